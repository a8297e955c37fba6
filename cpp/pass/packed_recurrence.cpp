// The mixers of recurrent layers, on our kernels.
//
// A text's rows are gone through in order, parents first, by one thread for some channels or heads, which no others mix
// with: so the bits of a row depend on its path alone.
#include <algorithm>
#include <cmath>

#include "machine/math.h"
#include "machine/pool.h"
#include "pass/packed_pass.h"

namespace pystaged {

namespace {

// Channels of a short convolution that a thread computes at a time.
constexpr int kChannels = 256;

// The inputs of some channels of a convolution. Those of rows that are not applied yet stand first in what the state
// keeps of each; those of the rows before are a part of the state, [before][channels], the oldest first.
class ConvolutionInputs {
public:
    ConvolutionInputs(RecurrentState& state, size_t at, int channels, int before, int first)
        : state_(state), at_(at + first), channels_(channels), before_(before), first_(first) {}

    // Brings the state's part up to the committed end.
    void apply(int count) {
        write(state_.stops(), state_.state(), count, [&](int row) { return state_.unapplied(row) + first_; });
    }
    // Brings the part of a reading's state up to its last row.
    void finish(int count) {
        write(state_.reading_stops(), state_.base(), count, [&](int row) { return pending(state_.first() + row); });
    }
    float* pending(int row) { return state_.pending(row) + first_; }
    // ancestors[i]: what PackedState::ancestor() says of i + 1 rows before a pending row.
    void find(int row, const int* ancestors, const float** inputs) {
        for (int back = 1; back <= before_; ++back) {
            const int ancestor = ancestors[back - 1] - state_.first();
            inputs[before_ - back] = ancestor >= 0 ? pending(state_.first() + ancestor)
                                                   : state_.base() + at_ + size_t(before_ + ancestor) * channels_;
        }
        inputs[before_] = pending(row);
    }

private:
    // The inputs of the rows before each stop, of those that `from` holds and of those behind it.
    template <class InputsOf>
    void write(const std::vector<RecurrentState::Stop>& stops, const float* from, int count, const InputsOf& behind) {
        for (const RecurrentState::Stop& stop : stops) {
            for (int i = 0; i < before_; ++i) {
                const int row = i + stop.rows;
                std::copy_n(row < before_ ? from + at_ + size_t(row) * channels_ : behind(row - before_), count,
                            stop.state + at_ + size_t(i) * channels_);
            }
        }
    }

    RecurrentState& state_;
    size_t at_;
    int channels_, before_, first_;
};

// Convolves some channels of a text's rows, in order. take(row, inputs, convolution) writes a row's own inputs and says
// where its result goes; false where none is wanted. `ancestors`: of the pass's rows, [rows][taps - 1].
template <class Take>
void convolve_rows(const Kernel& kernel, const PackedPass::Text& text, const std::vector<int>& ancestors,
                   ConvolutionInputs all, Convolution convolution, const Take& take) {
    const float* inputs[kMostTaps];
    convolution.inputs = inputs;
    all.apply(convolution.channels);
    text.for_rows([&](int row, int pending) {
        if (take(row, all.pending(pending), convolution)) {
            all.find(pending, &ancestors[row * size_t(convolution.taps - 1)], inputs);
            kernel.convolve(convolution);
        }
    });
    all.finish(convolution.channels);
}

// ln(1 + e^x)
double softplus(double x) {
    return x > 20 ? x : own_log(1 + own_exp(x));
}

}  // namespace

PackedPass::Value PackedPass::branch(const ShortConvolution& mixer, const Value& x, const Value& input, int index,
                                     int first_row) {
    const Hyperparameters& h = model_.numbers();
    const size_t stride = h.padded_width();
    const Value product = products(mixer.input, input, padded(3 * h.width, kBlock));
    reserve_recurrent(index, 0);
    const int num_blocks = (h.width + kChannels - 1) / kChannels;
    const auto convolve = [&](int task, int) {
        const Text& text = texts_[task / num_blocks];
        const int first = task % num_blocks * kChannels, count = std::min(kChannels, h.width - first);
        const auto take = [&](int row, float* own, Convolution& convolution) {
            const float* b = product.rows + row * product.stride + first;
            const float* c = b + h.width;
            const float* values = c + h.width;
            for (int d = 0; d < count; ++d) {
                own[d] = b[d] * values[d];
            }
            if (row < first_row) {
                return false;
            }
            float* out = mixed_.data() + (row - first_row) * stride;
            convolution.gate = c;
            convolution.out = out + first;
            std::fill(out + h.width, out + stride, 0.0f);
            return true;
        };
        convolve_rows(model_.kernel(), text, ancestors_,
                      {text.state->recurrent(index), 0, h.width, h.conv_taps - 1, first},
                      {h.conv_taps, count, nullptr, mixer.taps.data() + first, stride}, take);
    };
    ThreadPool::shared().run(static_cast<int>(texts_.size()) * num_blocks, threads_for(size_t(product.n) * h.width),
                             convolve);
    for (const Text& text : texts_) {
        text.state->recurrent(index).applied();
    }
    const int num_out = product.n - first_row;
    if (num_out == 0) {
        return {};
    }
    return add(x, {mixed_.data(), num_out, stride}, mixer.output, model_.weights().layers[index].mixer_post_norm);
}

void PackedPass::reserve_recurrent(int index, int keys) {
    int num_copies = 1, num_steps = 0;
    size_t num_read = 0;
    const size_t input_size = model_.numbers().recurrent_sizes(index).input;
    for (const Text& text : texts_) {
        num_read += text.state->recurrent(index).num_reading();
    }
    reading_inputs_.resize(std::max(reading_inputs_.size(), num_read * input_size));
    num_read = 0;
    for (const Text& text : texts_) {
        RecurrentState& state = text.state->recurrent(index);
        state.reserve(reading_inputs_.data() + num_read * input_size);
        num_read += state.num_reading();
        num_copies = std::max(num_copies, text.walk.num_copies);
        num_steps = std::max({num_steps, state.num_unapplied(), static_cast<int>(text.walk.steps.size())});
    }
    delta_scratch_.resize(model_.num_threads());
    for (DeltaScratch& scratch : delta_scratch_) {
        scratch.tiles.resize(std::max(scratch.tiles.size(), size_t(num_copies) * keys * kLanes));
        scratch.steps.reserve(num_steps);
    }
}

template <class StepOf>
void PackedPass::make_tile(RecurrentState& state, size_t tile, int keys, const StepOf& step, DeltaScratch& scratch) {
    const size_t size = size_t(keys) * kLanes;
    const float* now = state.state() + tile;
    int applied = 0;
    for (const RecurrentState::Stop& stop : state.stops()) {
        float* next = stop.state + tile;
        if (next != now) {
            std::copy_n(now, size, next);
        }
        for (scratch.steps.clear(); applied < stop.rows; ++applied) {
            scratch.steps.push_back(step(state.unapplied(applied)));
        }
        model_.kernel().delta(scratch.steps.data(), static_cast<int>(scratch.steps.size()), keys, next);
        now = next;
    }
    std::copy_n(state.base() + tile, size, scratch.tiles.data());
}

template <class StepOf, class OfPass>
void PackedPass::walk_tile(const Text& text, RecurrentState& state, size_t tile, int keys, const StepOf& step,
                           DeltaScratch& scratch, const OfPass& of_pass) {
    scratch.steps.clear();
    for (const WalkStep& walked : text.walk.steps) {
        scratch.steps.push_back(step(state.pending(walked.row)));
        DeltaStep& last = scratch.steps.back();
        last.from = walked.from;
        last.to = walked.to;
        const int row = text.rows[walked.row];
        if (row >= 0) {  // else of an earlier pass: it is repeated
            of_pass(row, last);
        }
    }
    const auto walk = [&](int first, int last) {
        model_.kernel().delta(scratch.steps.data() + first, last - first, keys, scratch.tiles.data());
    };
    int done = 0;
    for (const RecurrentState::Stop& stop : state.reading_stops()) {
        walk(done, stop.rows);
        std::copy_n(scratch.tiles.data(), size_t(keys) * kLanes, stop.state + tile);
        done = stop.rows;
    }
    walk(done, static_cast<int>(scratch.steps.size()));
}

PackedPass::Value PackedPass::branch(const DeltaNet& mixer, const Value& x, const Value& input, int index,
                                     int first_row) {
    const DeltaNumbers& d = model_.numbers().delta;
    const Value product = products(mixer.input, input, mixer.stride);
    reserve_recurrent(index, d.head_dim);
    const int num_texts = static_cast<int>(texts_.size()), num_heads = 2 * d.key_heads + d.value_heads;
    ThreadPool::shared().run(num_texts * num_heads, threads_for(size_t(product.n) * d.channels()), [&](int task, int) {
        prepare_delta(mixer, texts_[task / num_heads], index, task % num_heads);
    });
    const int threads = threads_for(size_t(product.n) * d.values() * d.head_dim);
    ThreadPool::shared().run(num_texts * d.value_heads, threads, [&](int task, int worker) {
        const Text& text = texts_[task / d.value_heads];
        run_delta(mixer, text, index, task % d.value_heads, first_row, delta_scratch_[worker]);
    });
    for (const Text& text : texts_) {
        text.state->recurrent(index).applied();
    }
    const int num_out = product.n - first_row;
    if (num_out == 0) {
        return {};
    }
    const size_t stride = padded(d.values(), kBlock);
    return add(x, {mixed_.data(), num_out, stride}, mixer.output, model_.weights().layers[index].mixer_post_norm);
}

void PackedPass::prepare_delta(const DeltaNet& mixer, const Text& text, int index, int head) {
    const Hyperparameters& h = model_.numbers();
    const DeltaNumbers& d = h.delta;
    const Kernel& kernel = model_.kernel();
    RecurrentState& state = text.state->recurrent(index);
    const int size = d.head_dim, first = head * size, value_head = head - 2 * d.key_heads;
    const auto channels = [&](int row) { return products_.data() + row * mixer.stride + mixer.qkv_at + first; };
    const auto take = [&](int row, float* own, Convolution& convolution) {
        convolution.out = channels(row);
        std::copy_n(convolution.out, size, own);
        return true;
    };
    convolve_rows(kernel, text, ancestors_, {state, size_t(d.values()) * size, d.channels(), h.conv_taps - 1, first},
                  {h.conv_taps, size, nullptr, mixer.taps.data() + first, size_t(padded(d.channels(), kBlock))}, take);
    text.for_rows([&](int row, int pending) {
        float *made = channels(row), *kept = state.pending(pending);
        if (value_head < 0) {
            // x / sqrt(sum of squares + epsilon)
            kernel.rms_norm(made, unit_.data(), h.norm_epsilon / size, size, size, made);
            if (head >= d.key_heads) {
                std::copy_n(made, size, kept + d.channels() + first - d.keys());
            }
            return;
        }
        float* product = products_.data() + row * mixer.stride;
        float& rate = product[mixer.beta_at + value_head];
        rate = static_cast<float>(1 / (1 + own_exp(-double(rate))));
        const double step = softplus(product[mixer.alpha_at + value_head] + mixer.step.data()[value_head]);
        kept[d.channels() + d.keys() + d.values() + value_head] =
            static_cast<float>(own_exp(mixer.decay.data()[value_head] * step));
    });
}

void PackedPass::run_delta(const DeltaNet& mixer, const Text& text, int index, int value_head, int first_row,
                           DeltaScratch& scratch) {
    const Hyperparameters& h = model_.numbers();
    const DeltaNumbers& d = h.delta;
    const Kernel& kernel = model_.kernel();
    RecurrentState& state = text.state->recurrent(index);
    const int size = d.head_dim, key_head = d.key_head(value_head);
    const size_t mixed_stride = padded(d.values(), kBlock), values_at = size_t(value_head) * size;
    // What the state keeps of a row: inputs of the convolution, keys, deltas, decays.
    const size_t keys_at = d.channels() + size_t(key_head) * size, deltas_at = size_t(d.channels()) + d.keys();
    const size_t decay_at = deltas_at + d.values() + value_head;
    const float root = std::sqrt(static_cast<float>(size));
    const auto product = [&](int row) { return products_.data() + row * mixer.stride; };
    for (size_t column = values_at; column < values_at + size; column += kLanes) {
        const size_t tile = column * size;
        const auto step = [&](float* kept) {
            DeltaStep result;
            result.decay = kept[decay_at];
            result.key = kept + keys_at;
            result.delta = kept + deltas_at + column;
            return result;
        };
        make_tile(state, tile, size, step, scratch);
        walk_tile(text, state, tile, size, step, scratch, [&](int row, DeltaStep& made) {
            const float* qkv = product(row) + mixer.qkv_at;
            made.rate = product(row)[mixer.beta_at + value_head];
            made.scale = 1 / root;
            made.query = qkv + key_head * size;
            made.value = qkv + 2 * d.keys() + column;
            if (row >= first_row) {
                made.out = mixed_.data() + (row - first_row) * mixed_stride + column;
            }
        });
    }
    text.for_rows([&](int row, int) {
        if (row >= first_row) {
            float* out = mixed_.data() + (row - first_row) * mixed_stride;
            kernel.rms_norm(out + values_at, mixer.norm.data(), h.norm_epsilon, size, size, out + values_at);
            kernel.open(product(row) + mixer.gate_at + values_at, true, size, out + values_at);
            if (value_head + 1 == d.value_heads) {
                std::fill(out + d.values(), out + mixed_stride, 0.0f);
            }
        }
    });
}

PackedPass::Value PackedPass::branch(const StateSpace& mixer, const Value& x, const Value& input, int index,
                                     int first_row) {
    const Hyperparameters& h = model_.numbers();
    const SpaceNumbers& d = h.space;
    const Kernel& kernel = model_.kernel();
    const size_t in_stride = mixer.input[0].packed.padded_rows(), stride = padded(d.inner(), kBlock);
    const Value product = products(mixer.input, input, in_stride);
    reserve_recurrent(index, d.state_dim);
    const int num_texts = static_cast<int>(texts_.size()), num_blocks = (d.channels() + kChannels - 1) / kChannels;
    const int threads = threads_for(size_t(product.n) * d.channels());
    ThreadPool::shared().run(num_texts * num_blocks, threads, [&](int task, int) {
        const Text& text = texts_[task / num_blocks];
        const int first = task % num_blocks * kChannels, count = std::min(kChannels, d.channels() - first);
        RecurrentState& state = text.state->recurrent(index);
        const auto channels = [&](int row) { return products_.data() + row * in_stride + d.inner(); };
        const auto take = [&](int row, float* own, Convolution& convolution) {
            convolution.out = channels(row) + first;
            std::copy_n(convolution.out, count, own);
            return true;
        };
        Convolution convolution{h.conv_taps, count, nullptr, mixer.taps.data() + first,
                                size_t(padded(d.channels(), kBlock))};
        convolution.bias = mixer.taps_bias.present() ? mixer.taps_bias.data() + first : nullptr;
        convolve_rows(kernel, text, ancestors_,
                      {state, size_t(d.inner()) * d.state_dim, d.channels(), h.conv_taps - 1, first}, convolution,
                      take);
        // Of these channels, those that lead into states.
        const int keys_first = std::max(first, d.inner()), keys_last = std::min(first + count, d.inner() + d.keys());
        text.for_rows([&](int row, int pending) {
            std::copy_n(channels(row) + keys_first, std::max(0, keys_last - keys_first),
                        state.pending(pending) + d.channels() + keys_first - d.inner());
        });
    });
    const int threads_of_states = threads_for(size_t(product.n) * d.inner() * d.state_dim);
    ThreadPool::shared().run(num_texts * d.heads, threads_of_states, [&](int task, int worker) {
        run_space(mixer, texts_[task / d.heads], index, task % d.heads, first_row, delta_scratch_[worker]);
    });
    for (const Text& text : texts_) {
        text.state->recurrent(index).applied();
    }
    const int num_out = product.n - first_row, group = d.inner() / d.groups;
    if (num_out == 0) {
        return {};
    }
    ThreadPool::shared().run(num_out, threads, [&](int i, int) {
        float* out = mixed_.data() + i * stride;
        kernel.open(products_.data() + (first_row + i) * in_stride, true, d.inner(), out);
        for (int g = 0; mixer.norm.present() && g < d.groups; ++g) {
            kernel.rms_norm(out + g * group, mixer.norm.data() + size_t(g) * padded(group, kBlock), h.norm_epsilon,
                            group, group, out + g * group);
        }
        std::fill(out + d.inner(), out + stride, 0.0f);
    });
    return add(x, {mixed_.data(), num_out, stride}, mixer.output, model_.weights().layers[index].mixer_post_norm);
}

void PackedPass::run_space(const StateSpace& mixer, const Text& text, int index, int head, int first_row,
                           DeltaScratch& scratch) {
    const SpaceNumbers& d = model_.numbers().space;
    RecurrentState& state = text.state->recurrent(index);
    const size_t in_stride = mixer.input[0].packed.padded_rows(), stride = padded(d.inner(), kBlock);
    // What the state keeps of a row: inputs of the convolution, what leads into states, what they take in, decays.
    const size_t keys_at = d.channels() + size_t(d.group_of(head)) * d.state_dim,
                 deltas_at = size_t(d.channels()) + d.keys();
    const size_t decays_at = deltas_at + d.inner(), own = size_t(head) * d.head_dim;
    const auto channels = [&](int row) { return products_.data() + row * in_stride + d.inner(); };
    text.for_rows([&](int row, int pending) {
        const float* made = channels(row);
        float* kept = state.pending(pending);
        const double step = softplus(made[d.channels() + head] + mixer.step.data()[head]);
        kept[decays_at + head] = static_cast<float>(own_exp(mixer.decay.data()[head] * step));
        for (int p = 0; p < d.head_dim; ++p) {
            kept[deltas_at + own + p] = made[own + p] * static_cast<float>(step);
        }
    });
    for (int value = 0; value < d.head_dim; value += kLanes) {
        const auto step = [&](float* kept) {
            DeltaStep result;
            result.decay = kept[decays_at + head];
            result.key = kept + keys_at;
            result.delta = kept + deltas_at + own + value;
            return result;
        };
        const size_t tile = (own + value) * d.state_dim;
        make_tile(state, tile, d.state_dim, step, scratch);
        walk_tile(text, state, tile, d.state_dim, step, scratch, [&](int row, DeltaStep& made) {
            if (row >= first_row) {
                made.query = channels(row) + d.inner() + d.keys() + size_t(d.group_of(head)) * d.state_dim;
                made.out = mixed_.data() + (row - first_row) * stride + own + value;
            }
        });
    }
    text.for_rows([&](int row, int) {
        float* out = mixed_.data() + (row - first_row) * stride + own;
        for (int p = 0; row >= first_row && p < d.head_dim; ++p) {
            out[p] += mixer.skip.data()[head] * channels(row)[own + p];
        }
    });
}

}  // namespace pystaged
