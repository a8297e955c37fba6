// Mixtures of experts. Rows are gathered by expert, so that a pass reads an expert's weights once; each row's results
// are added in the order in which its experts were chosen, so that a row's bits depend on no other row.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "machine/math.h"
#include "pass/workspace.h"

namespace pystaged {

namespace {

constexpr double kLeastSum = 1.0 / (1 << 14);  // llama.cpp's, of weights before they are divided by it

// Writes the indices of the values, `count` of the largest first, the largest before all, the lower one first of equal
// ones.
template <class Number>
void sort_largest(const Number* values, int n, int count, int* order) {
    std::iota(order, order + n, 0);
    std::partial_sort(order, order + count, order + n,
                      [&](int a, int b) { return values[a] > values[b] || (values[a] == values[b] && a < b); });
}

void softmax(double* values, int n) {
    const double top = *std::max_element(values, values + n);
    double sum = 0;
    for (int i = 0; i < n; ++i) {
        sum += values[i] = own_exp(values[i] - top);
    }
    for (int i = 0; i < n; ++i) {
        values[i] /= sum;
    }
}

// Leaves the groups of the largest sums of two values; the values of the others become -inf (DeepSeek-V3, arXiv
// 2412.19437). `sums` and `order` have room for as many numbers as there are groups.
void keep_groups(double* values, int n, int groups, int used, double* sums, int* order) {
    const int size = n / groups;
    for (int group = 0; group < groups; ++group) {
        double best[2] = {-INFINITY, -INFINITY};
        for (int i = group * size; i < (group + 1) * size; ++i) {
            best[1] = std::max(best[1], std::min(best[0], values[i]));
            best[0] = std::max(best[0], values[i]);
        }
        sums[group] = best[0] + best[1];
    }
    sort_largest(sums, groups, used, order);
    for (int i = used; i < groups; ++i) {
        std::fill_n(values + order[i] * size, size, -INFINITY);
    }
}

// A place is a row at one of its experts; those of an expert lie side by side.
struct Chosen {
    int expert;
    float weight;
    int place;
};
struct Group {
    int expert, first, n;  // its places
    QuantizedRows inputs[2], handed;
};
struct Routes {
    Chosen* chosen;  // [rows][used], in the order of selection
    Group* groups;   // of experts that have rows, those with the most first, as theirs is the longest work
    int num_groups;
    struct Place {
        int row, group;
    }* places;
};

// Chooses a row's experts by the router's numbers. memory[3 * experts] and order[experts] are to work in.
void choose_row(const ExpertNumbers& numbers, const Experts& experts, const float* logits, double* memory, int* order,
                Chosen* chosen) {
    const int count = numbers.count;
    double *scores = memory, *ranked = memory + count, *weights = memory + 2 * count;
    // Others have no order.
    std::transform(logits, logits + count, scores, [](float x) { return std::isfinite(x) ? double(x) : 0.0; });
    if (numbers.scores == Scores::softmax) {
        softmax(scores, count);
    } else if (numbers.scores == Scores::sigmoid) {
        std::transform(scores, scores + count, scores, [](double x) { return 1 / (1 + own_exp(-x)); });
    }
    std::copy_n(scores, count, ranked);
    for (int i = 0; experts.bias.present() && i < count; ++i) {
        ranked[i] += experts.bias.values[i];
    }
    if (numbers.groups > 1) {
        keep_groups(ranked, count, numbers.groups, numbers.used_groups, weights, order);
    }
    sort_largest(ranked, count, numbers.used, order);
    for (int i = 0; i < numbers.used; ++i) {
        weights[i] = scores[order[i]];
    }
    if (numbers.scores == Scores::softmax_of_chosen) {
        softmax(weights, numbers.used);
    }
    const double sum = std::accumulate(weights, weights + numbers.used, 0.0);
    for (int i = 0; i < numbers.used; ++i) {
        const double weight = numbers.normalized ? weights[i] / std::max(sum, kLeastSum) : weights[i];
        const double factor = experts.factors.present() ? experts.factors.values[order[i]] : 1;
        chosen[i] = {order[i], static_cast<float>(weight * numbers.scale * factor), 0};
    }
}

// Chooses each row's experts by the router's scores[n][stride], and gathers the rows by expert.
Routes choose(Workspace& w, const Experts& experts, const float* scores, size_t stride, int n) {
    const ExpertNumbers& numbers = w.h.experts;
    const int count = numbers.count, used = numbers.used, num_places = n * used;
    Routes routes{w.arena.take<Chosen>(num_places), w.arena.take<Group>(count), 0,
                  w.arena.take<Routes::Place>(num_places)};
    double* const memory = w.arena.take<double>(size_t(n) * 3 * count);
    int* const orders = w.arena.take<int>(size_t(n) * count);
    // Each score takes as long as many of other values.
    w.for_rows(n, size_t(count) * 16, [&](int row, int) {
        choose_row(numbers, experts, scores + row * stride, memory + size_t(row) * 3 * count,
                   orders + size_t(row) * count, routes.chosen + row * used);
    });
    int *rows_of = w.arena.take<int>(count), *group_of = w.arena.take<int>(count), *order = w.arena.take<int>(count);
    std::fill_n(rows_of, count, 0);
    for (int i = 0; i < num_places; ++i) {
        ++rows_of[routes.chosen[i].expert];
    }
    sort_largest(rows_of, count, count, order);
    for (int first = 0; first < num_places; first += rows_of[order[routes.num_groups++]]) {
        group_of[order[routes.num_groups]] = routes.num_groups;
        routes.groups[routes.num_groups] = {order[routes.num_groups], first, 0, {}, {}};
    }
    for (int i = 0; i < num_places; ++i) {
        const int which = group_of[routes.chosen[i].expert];
        Group& group = routes.groups[which];
        routes.chosen[i].place = group.first + group.n++;
        routes.places[routes.chosen[i].place] = {i / used, which};
    }
    return routes;
}

}  // namespace

Value add(Workspace& w, const Experts& experts, const Value& x, const Value& input, const Norm& post_norm) {
    const Hyperparameters& h = w.h;
    const int n = input.n, used = h.experts.used, num_places = n * used, cols = static_cast<int>(input.stride);
    const int width = padded(h.experts.width, kBlock);
    const Value routed = experts.router_norm.present() ? x.normed(experts.router_norm) : input;
    Activations read = w.inputs(routed, {&experts.router})[0];
    const size_t num_scores = experts.router.packed.padded_rows();
    float* const scores = w.take(n, num_scores);
    const Product router{&experts.router.packed, read, epilogue(experts.router, scores, num_scores)};
    w.multiply(&router, 1);
    const Routes routes = choose(w, experts, scores, num_scores, n);
    if (experts.norm.present()) {
        read = w.inputs(x.normed(experts.norm), {&experts.router})[0];
    }

    // A gate apart may need its input quantized in another way.
    const Dense& any = experts.each[0];
    const bool apart = any.gate.present() && any.gate.packed.integer() &&
                       !(any.up.packed.integer() && any.gate.packed.reads(any.up.packed.packing()));
    const bool floats = !any.up.packed.integer() || (any.gate.present() && !any.gate.packed.integer());
    const QuantizedRows up_inputs = w.quantized(any.up, num_places, cols);
    const QuantizedRows gate_inputs = apart ? w.quantized(any.gate, num_places, cols) : up_inputs;
    const QuantizedRows handed = w.quantized(any.down, num_places, width);
    const auto part = [](const QuantizedRows& all, const Group& group, size_t stride) -> QuantizedRows {
        const size_t at = group.first * stride;
        return all.quants ? QuantizedRows{group.n, all.packing, all.quants + at, all.factors + at / kBlock} : all;
    };
    for (Group* group = routes.groups; group < routes.groups + routes.num_groups; ++group) {
        group->inputs[0] = part(up_inputs, *group, cols);
        group->inputs[1] = part(gate_inputs, *group, cols);
        group->handed = part(handed, *group, width);
    }
    float* const gathered = w.take(floats ? num_places : 0, cols);
    w.for_rows(num_places, cols, [&](int place, int) {
        const auto [row, index] = routes.places[place];
        const Group& group = routes.groups[index];
        const float* values = read.values + row * size_t(cols);
        if (floats) {
            std::copy_n(values, cols, gathered + place * size_t(cols));
        }
        if (up_inputs.quants) {
            w.kernel.quantize(values, cols, place - group.first, group.inputs[0]);
        }
        if (apart) {
            w.kernel.quantize(values, cols, place - group.first, group.inputs[1]);
        }
    });

    const size_t num_groups = routes.num_groups;
    Product *gates = w.arena.take<Product>(num_groups), *ups = w.arena.take<Product>(num_groups),
            *downs = w.arena.take<Product>(num_groups);
    float *hidden = w.take(num_places, width), *opened = w.take(num_places, width), *made = w.take(num_places, cols);
    for (size_t i = 0; i < num_groups; ++i) {
        const Group& group = routes.groups[i];
        const Dense& expert = experts.each[group.expert];
        const float* values = floats ? gathered + size_t(group.first) * cols : nullptr;
        float* const own = hidden + size_t(group.first) * width;
        open(w, expert, {group.n, cols, values, group.inputs[1]}, {group.n, cols, values, group.inputs[0]}, own,
             opened + size_t(group.first) * width, group.handed, gates[i], ups[i]);
        downs[i] = {&expert.down.packed,
                    {group.n, width, own, group.handed},
                    epilogue(expert.down, made + size_t(group.first) * cols, cols)};
    }
    w.multiply(ups, num_groups);
    w.multiply(downs, num_groups);
    // What the expert that all rows share adds to a row, and what that is multiplied by, [n][kBlock], or null.
    float *shared = nullptr, *shared_gates = nullptr;
    if (experts.shared) {
        const Linear* const gate = experts.shared_gate.present() ? &experts.shared_gate : nullptr;
        shared = w.take(n, cols);
        shared_gates = gate ? w.take(n, kBlock) : nullptr;
        const Linear& down = experts.shared->down;
        w.multiply(down, open(w, *experts.shared, input, gate, shared_gates), epilogue(down, shared, cols));
    }

    float* const out = w.next_rows();
    w.for_rows(n, size_t(used) * cols, [&](int row, int) {
        float *sum = out + row * size_t(cols), *own = shared + row * size_t(cols);
        std::fill_n(sum, cols, 0.0f);
        for (int i = row * used; i < (row + 1) * used; ++i) {
            const Chosen& chosen = routes.chosen[i];
            const float* result = made + chosen.place * size_t(cols);
            for (int d = 0; d < cols; ++d) {
                sum[d] += chosen.weight * result[d];
            }
        }
        if (experts.post_norm.present()) {
            w.apply(experts.post_norm, sum, h.width, sum);
            w.apply(experts.shared_post_norm, own, h.width, own);
        }
        if (experts.shared) {
            const float gate = shared_gates ? float(1 / (1 + own_exp(-double(shared_gates[size_t(row) * kBlock])))) : 1;
            for (int d = 0; d < cols; ++d) {
                sum[d] += gate * own[d];
            }
        }
        if (post_norm.present()) {
            w.apply(post_norm, sum, h.width, sum);
        }
        for (int d = 0; d < cols; ++d) {
            sum[d] = x.rows[row * x.stride + d] + h.residual_scale * sum[d];
        }
    });
    return {out, n, input.stride};
}

}  // namespace pystaged
