// Mixtures of experts. Rows are gathered by expert, so that a pass reads an expert's weights once; each row's results
// are added in the order in which its experts were chosen, so that a row's bits depend on no other row.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "machine/math.h"
#include "machine/pool.h"
#include "pass/packed_pass.h"

namespace pystaged {

namespace {

constexpr double kLeastSum = 1.0 / (1 << 14);  // llama.cpp's, of weights before they are divided by it

// The indices of the `count` largest values, the largest first, the lower index first of equal ones.
template <class Value>
std::vector<int> largest(const std::vector<Value>& values, int count) {
    std::vector<int> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + count, order.end(),
                      [&](int a, int b) { return values[a] > values[b] || (values[a] == values[b] && a < b); });
    order.resize(count);
    return order;
}

void softmax(std::vector<double>& values) {
    const double top = *std::max_element(values.begin(), values.end());
    double sum = 0;
    for (double& value : values) {
        sum += value = own_exp(value - top);
    }
    for (double& value : values) {
        value /= sum;
    }
}

// Leaves the groups of the largest sums of two values; the values of the others become -inf (DeepSeek-V3, arXiv
// 2412.19437).
void keep_groups(std::vector<double>& values, int groups, int used) {
    const size_t size = values.size() / groups;
    std::vector<double> sums;
    for (auto group = values.begin(); group != values.end(); group += size) {
        std::vector<double> copy(group, group + size);
        std::partial_sort(copy.begin(), copy.begin() + 2, copy.end(), std::greater<>());
        sums.push_back(copy[0] + copy[1]);
    }
    std::vector<bool> kept(groups);
    for (const int group : largest(sums, used)) {
        kept[group] = true;
    }
    for (size_t i = 0; i < values.size(); ++i) {
        values[i] = kept[i / size] ? values[i] : -INFINITY;
    }
}

}  // namespace

void PackedPass::choose(const Experts& experts, int n) {
    const ExpertNumbers& numbers = model_.numbers().experts;
    const size_t stride = experts.router.packed.padded_rows();
    chosen_.resize(size_t(n) * numbers.used);
    // Each score takes as long as many of other values.
    ThreadPool::shared().run(n, threads_for(size_t(n) * numbers.count * 16), [&](int row, int) {
        const float* logits = scores_.data() + row * stride;
        std::vector<double> scores(logits, logits + numbers.count);
        for (double& score : scores) {
            score = std::isfinite(score) ? score : 0;  // so that they have an order
        }
        if (numbers.scores == Scores::softmax) {
            softmax(scores);
        } else if (numbers.scores == Scores::sigmoid) {
            for (double& score : scores) {
                score = 1 / (1 + own_exp(-score));
            }
        }
        std::vector<double> ranked = scores;
        for (int i = 0; experts.bias.present() && i < numbers.count; ++i) {
            ranked[i] += experts.bias.values[i];
        }
        if (numbers.groups > 1) {
            keep_groups(ranked, numbers.groups, numbers.used_groups);
        }
        const std::vector<int> best = largest(ranked, numbers.used);
        std::vector<double> weights;
        for (const int expert : best) {
            weights.push_back(scores[expert]);
        }
        if (numbers.scores == Scores::softmax_of_chosen) {
            softmax(weights);
        }
        const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
        for (size_t i = 0; i < best.size(); ++i) {
            const double weight = numbers.normalized ? weights[i] / std::max(sum, kLeastSum) : weights[i];
            const double factor = experts.factors.present() ? experts.factors.values[best[i]] : 1;
            chosen_[row * best.size() + i] = {best[i], static_cast<float>(weight * numbers.scale * factor)};
        }
    });
    std::vector<int> rows_of(numbers.count);
    for (const Chosen& chosen : chosen_) {
        ++rows_of[chosen.expert];
    }
    // The experts with the most rows first, as theirs is the longest work.
    groups_.clear();
    std::vector<int> group_of(numbers.count);
    int first = 0;
    for (const int expert : largest(rows_of, numbers.count)) {
        if (rows_of[expert] > 0) {
            group_of[expert] = static_cast<int>(groups_.size());
            groups_.push_back({expert, first, 0, {}, {}});
            first += rows_of[expert];
        }
    }
    rows_at_.resize(chosen_.size());
    for (size_t i = 0; i < chosen_.size(); ++i) {
        const int group = group_of[chosen_[i].expert];
        chosen_[i].place = groups_[group].first + groups_[group].n++;
        rows_at_[chosen_[i].place] = {static_cast<int>(i) / numbers.used, group};
    }
    // The rows of a pass's last layers are its last ones.
    const size_t first_row = pass_->num_rows - n, first_bit = size_t(mixture_++) * numbers.count;
    for (size_t i = 0; pass_->experts && i < chosen_.size(); ++i) {
        const size_t bit = first_bit + chosen_[i].expert;
        pass_->experts[(first_row + i / numbers.used) * numbers.num_bytes() + bit / 8] |= 1 << bit % 8;
    }
}

void PackedPass::run_shared(const Experts& experts, const Value& input) {
    const Dense& dense = *experts.shared;
    std::vector<const Linear*> matrices = {&dense.up};
    if (dense.gate.present()) {
        matrices.push_back(&dense.gate);
    }
    if (experts.shared_gate.present()) {
        matrices.push_back(&experts.shared_gate);
    }
    const std::vector<Activations> inputs = activations(input, matrices);
    const QuantizedRows* handed = hand_to(dense.down, input.n);
    Product gate, up;
    open(dense, inputs[dense.gate.present() ? 1 : 0], inputs[0], hidden_.data(), gate_.data(), handed, gate, up);
    std::vector<Product> products = {up};
    if (experts.shared_gate.present()) {
        products.push_back(
            {&experts.shared_gate.packed, inputs.back(), epilogue(experts.shared_gate, shared_gates_.data(), kBlock)});
    }
    multiply(model_.kernel(), products, num_threads_);
    const Value hidden{hidden_.data(), input.n, up.epilogue.stride, nullptr, handed != nullptr};
    multiply_by(dense.down, hidden, epilogue(dense.down, branch_.data(), input.stride));
}

PackedPass::Value PackedPass::branch(const Experts& experts, const Value& x, const Value& input, const Norm& norm) {
    const Hyperparameters& h = model_.numbers();
    const int n = input.n, used = h.experts.used;
    const size_t cols = input.stride, width = padded(h.experts.width, kBlock);
    const Value routed = experts.router_norm.present() ? this->norm(x, experts.router_norm) : input;
    Activations read = activations(routed, {&experts.router})[0];
    const Epilogue scores = epilogue(experts.router, scores_.data(), experts.router.packed.padded_rows());
    multiply(model_.kernel(), {{&experts.router.packed, read, scores}}, num_threads_);
    choose(experts, n);
    if (experts.norm.present()) {
        read = activations(this->norm(x, experts.norm), {&experts.router})[0];
    }

    // A gate apart may need its input quantized in another way.
    const Dense& any = experts.each[0];
    const bool apart = any.gate.present() && any.gate.packed.integer() &&
                       !(any.up.packed.integer() && any.gate.packed.reads(any.up.packed.packing()));
    const bool floats = !any.up.packed.integer() || (any.gate.present() && !any.gate.packed.integer());
    for (Group& group : groups_) {
        const auto rows = [&](Quantized& memory, size_t stride, Packing packing) -> QuantizedRows {
            const size_t at = group.first * stride;
            return {group.n, packing, memory.quants.data() + at, memory.factors.data() + at / kBlock};
        };
        group.inputs[0] = rows(expert_inputs_[0], cols, any.up.packed.packing());
        group.inputs[1] = apart ? rows(expert_inputs_[1], cols, any.gate.packed.packing()) : group.inputs[0];
        group.handed = rows(expert_handed_, width, any.down.packed.packing());
    }
    const int places = static_cast<int>(chosen_.size());
    ThreadPool::shared().run(places, threads_for(places * cols), [&](int place, int) {
        const auto [row, index] = rows_at_[place];
        const Group& group = groups_[index];
        const float* values = read.values + row * cols;
        if (floats) {
            std::copy_n(values, cols, gathered_.data() + place * cols);
        }
        if (any.up.packed.integer()) {
            model_.kernel().quantize(values, static_cast<int>(cols), place - group.first, group.inputs[0]);
        }
        if (apart) {
            model_.kernel().quantize(values, static_cast<int>(cols), place - group.first, group.inputs[1]);
        }
    });

    std::vector<Product> gates(groups_.size()), ups(groups_.size()), downs;
    for (size_t i = 0; i < groups_.size(); ++i) {
        const Group& group = groups_[i];
        const Dense& expert = experts.each[group.expert];
        const QuantizedRows* handed = expert.down.packed.integer() ? &group.handed : nullptr;
        const float* gathered = gathered_.data() + group.first * cols;
        float* hidden = expert_hidden_.data() + group.first * width;
        open(expert, {group.n, int(cols), gathered, group.inputs[1]}, {group.n, int(cols), gathered, group.inputs[0]},
             hidden, expert_gates_.data() + group.first * width, handed, gates[i], ups[i]);
        downs.push_back({&expert.down.packed,
                         {group.n, int(width), hidden, group.handed},
                         epilogue(expert.down, expert_out_.data() + group.first * cols, cols)});
    }
    multiply(model_.kernel(), ups, num_threads_);
    multiply(model_.kernel(), downs, num_threads_);
    if (experts.shared) {
        run_shared(experts, input);
    }

    float* out = next_rows();
    ThreadPool::shared().run(n, threads_for(places * cols), [&](int row, int) {
        float *sum = out + row * cols, *shared = branch_.data() + row * cols;
        std::fill_n(sum, cols, 0.0f);
        for (int i = row * used; i < (row + 1) * used; ++i) {
            const float* result = expert_out_.data() + chosen_[i].place * cols;
            for (size_t d = 0; d < cols; ++d) {
                sum[d] += chosen_[i].weight * result[d];
            }
        }
        if (experts.post_norm.present()) {
            apply(experts.post_norm, sum, h.width, sum);
            apply(experts.shared_post_norm, shared, h.width, shared);
        }
        if (experts.shared) {
            const float logit = experts.shared_gate.present() ? shared_gates_[size_t(row) * kBlock] : 0;
            const float gate = experts.shared_gate.present() ? float(1 / (1 + own_exp(-double(logit)))) : 1;
            for (size_t d = 0; d < cols; ++d) {
                sum[d] += gate * shared[d];
            }
        }
        if (norm.present()) {
            apply(norm, sum, h.width, sum);
        }
        for (size_t d = 0; d < cols; ++d) {
            sum[d] = x.rows[row * x.stride + d] + h.residual_scale * sum[d];
        }
    });
    return {out, n, cols};
}

}  // namespace pystaged
