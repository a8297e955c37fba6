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
    const int num_blocks = (h.width + kChannels - 1) / kChannels, before = h.conv_width - 1;
    const auto convolve = [&](int task, int) {
        const Text& text = texts_[task / num_blocks];
        const int first = task % num_blocks * kChannels, count = std::min(kChannels, h.width - first);
        ConvolutionInputs all(text.state->recurrent(index), 0, h.width, before, first);
        all.apply(count);
        const float* inputs[kMostConvWidth];
        Convolution convolution{h.conv_width, count, inputs, mixer.conv.data() + first, stride};
        for (const Segment& segment : text.segments) {
            for (int i = 0; i < segment.num_rows; ++i) {
                const int row = segment.first_row + i, pending = segment.first_pending + i;
                const float* b = product.rows + row * product.stride + first;
                const float* c = b + h.width;
                const float* values = c + h.width;
                float* own = all.pending(pending);
                for (int d = 0; d < count; ++d) {
                    own[d] = b[d] * values[d];
                }
                if (row < first_row) {
                    continue;
                }
                all.find(pending, &ancestors_[row * size_t(before)], inputs);
                convolution.gate = c;
                convolution.out = mixed_.data() + (row - first_row) * stride + first;
                model_.kernel().convolve(convolution);
                if (first + count == h.width) {
                    std::fill(convolution.out + count, mixed_.data() + (row - first_row + 1) * stride, 0.0f);
                }
            }
        }
        all.finish(count);
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

void PackedPass::walk_tile(RecurrentState& state, size_t tile, int keys, DeltaScratch& scratch) {
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
    const int threads = threads_for(size_t(product.n) * d.values() * d.head_dim);
    ThreadPool::shared().run(static_cast<int>(texts_.size()) * d.key_heads, threads, [&](int task, int worker) {
        run_delta(mixer, texts_[task / d.key_heads], index, task % d.key_heads, first_row, delta_scratch_[worker]);
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

void PackedPass::run_delta(const DeltaNet& mixer, const Text& text, int index, int head, int first_row,
                           DeltaScratch& scratch) {
    const Hyperparameters& h = model_.numbers();
    const DeltaNumbers& d = h.delta;
    const Kernel& kernel = model_.kernel();
    RecurrentState& state = text.state->recurrent(index);
    const int size = d.head_dim, before = h.conv_width - 1, group = d.group();
    const size_t mixed_stride = padded(d.values(), kBlock);
    // What the state keeps of a row: inputs of the convolution, keys, deltas, decays.
    const size_t keys_at = d.channels() + size_t(head) * size, deltas_at = size_t(d.channels()) + d.keys();
    const size_t decays_at = deltas_at + d.values();
    const float root = std::sqrt(static_cast<float>(size));
    const std::vector<float>& unit = unit_;

    const auto product = [&](int row) { return products_.data() + row * mixer.stride; };
    const auto convolve = [&](int first, bool normalize) {
        ConvolutionInputs all(state, size_t(d.values()) * size, d.channels(), before, first);
        all.apply(size);
        const float* inputs[kMostConvWidth];
        Convolution convolution{h.conv_width, size, inputs, mixer.conv.data() + first,
                                size_t(padded(d.channels(), kBlock))};
        for (const Segment& segment : text.segments) {
            for (int i = 0; i < segment.num_rows; ++i) {
                const int row = segment.first_row + i, pending = segment.first_pending + i;
                convolution.out = product(row) + mixer.qkv_at + first;
                std::copy_n(convolution.out, size, all.pending(pending));
                all.find(pending, &ancestors_[row * size_t(before)], inputs);
                kernel.convolve(convolution);
                if (normalize) {
                    // x / sqrt(sum of squares + epsilon)
                    kernel.rms_norm(convolution.out, unit.data(), h.norm_epsilon / size, size, size, convolution.out);
                }
            }
        }
        all.finish(size);
    };
    convolve(head * size, true);
    convolve(d.keys() + head * size, true);
    for (int i = 0; i < group; ++i) {
        convolve(2 * d.keys() + d.value_head(head, i) * size, false);
    }
    for (const Segment& segment : text.segments) {
        for (int i = 0; i < segment.num_rows; ++i) {
            float *row = product(segment.first_row + i), *kept = state.pending(segment.first_pending + i);
            std::copy_n(row + mixer.qkv_at + d.keys() + head * size, size, kept + keys_at);
            for (int j = 0; j < group; ++j) {
                const int value_head = d.value_head(head, j);
                float &rate = row[mixer.beta_at + value_head], &step = row[mixer.alpha_at + value_head];
                rate = static_cast<float>(1 / (1 + own_exp(-double(rate))));
                step = step + mixer.step.data()[value_head];
                kept[decays_at + value_head] =
                    static_cast<float>(own_exp(mixer.decay.data()[value_head] * softplus(step)));
            }
        }
    }

    std::vector<DeltaStep>& steps = scratch.steps;
    for (int j = 0; j < group; ++j) {
        const int value_head = d.value_head(head, j);
        for (int value = 0; value < size; value += kLanes) {
            const size_t column = size_t(value_head) * size + value, tile = column * size;
            const auto step = [&](float* kept) {
                DeltaStep result;
                result.decay = kept[decays_at + value_head];
                result.key = kept + keys_at;
                result.delta = kept + deltas_at + column;
                return result;
            };
            make_tile(state, tile, size, step, scratch);
            steps.clear();
            for (const WalkStep& walked : text.walk.steps) {
                steps.push_back(step(state.pending(walked.row)));
                steps.back().from = walked.from;
                steps.back().to = walked.to;
                const int row = text.rows[walked.row];
                if (row < 0) {
                    continue;  // of an earlier pass: it is repeated
                }
                steps.back().rate = product(row)[mixer.beta_at + value_head];
                steps.back().scale = 1 / root;
                steps.back().query = product(row) + mixer.qkv_at + head * size;
                steps.back().value = product(row) + mixer.qkv_at + 2 * d.keys() + column;
                if (row >= first_row) {
                    steps.back().out = mixed_.data() + (row - first_row) * mixed_stride + column;
                }
            }
            walk_tile(state, tile, size, scratch);
        }
        for (const Segment& segment : text.segments) {
            for (int row = std::max(first_row, segment.first_row); row < segment.first_row + segment.num_rows; ++row) {
                float* out = mixed_.data() + (row - first_row) * mixed_stride + size_t(value_head) * size;
                kernel.rms_norm(out, mixer.norm.data(), h.norm_epsilon, size, size, out);
                kernel.open(product(row) + mixer.gate_at + size_t(value_head) * size, true, size, out);
                if (value_head + 1 == d.value_heads) {
                    std::fill(out + size, mixed_.data() + (row - first_row + 1) * mixed_stride, 0.0f);
                }
            }
        }
    }
}

PackedPass::Value PackedPass::branch(const StateSpace& mixer, const Value& x, const Value& input, int index,
                                     int first_row) {
    const Hyperparameters& h = model_.numbers();
    const SpaceNumbers& d = h.space;
    const Kernel& kernel = model_.kernel();
    const size_t in_stride = mixer.input[0].packed.padded_rows(), stride = padded(d.inner(), kBlock);
    const Value product = products(mixer.input, input, in_stride);
    reserve_recurrent(index, d.state_dim);
    const int num_texts = static_cast<int>(texts_.size()), before = h.conv_width - 1;
    const int num_blocks = (d.channels() + kChannels - 1) / kChannels;
    const int threads = threads_for(size_t(product.n) * d.channels());
    ThreadPool::shared().run(num_texts * num_blocks, threads, [&](int task, int) {
        const Text& text = texts_[task / num_blocks];
        const int first = task % num_blocks * kChannels, count = std::min(kChannels, d.channels() - first);
        RecurrentState& state = text.state->recurrent(index);
        ConvolutionInputs all(state, size_t(d.inner()) * d.state_dim, d.channels(), before, first);
        all.apply(count);
        const float* inputs[kMostConvWidth];
        Convolution convolution{h.conv_width, count, inputs, mixer.conv.data() + first,
                                size_t(padded(d.channels(), kBlock))};
        convolution.bias = mixer.conv_bias.present() ? mixer.conv_bias.data() + first : nullptr;
        // Of these channels, those that lead into states.
        const int keys_first = std::max(first, d.inner()), keys_last = std::min(first + count, d.inner() + d.keys());
        for (const Segment& segment : text.segments) {
            for (int i = 0; i < segment.num_rows; ++i) {
                const int row = segment.first_row + i, pending = segment.first_pending + i;
                float* channels = products_.data() + row * in_stride + d.inner();
                convolution.out = channels + first;
                std::copy_n(convolution.out, count, all.pending(pending));
                all.find(pending, &ancestors_[row * size_t(before)], inputs);
                kernel.convolve(convolution);
                if (keys_first < keys_last) {
                    std::copy(channels + keys_first, channels + keys_last,
                              state.pending(pending) + d.channels() + keys_first - d.inner());
                }
            }
        }
        all.finish(count);
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
    for (const Segment& segment : text.segments) {
        for (int i = 0; i < segment.num_rows; ++i) {
            const float* row = channels(segment.first_row + i);
            float* kept = state.pending(segment.first_pending + i);
            const double step = softplus(row[d.channels() + head] + mixer.step.data()[head]);
            kept[decays_at + head] = static_cast<float>(own_exp(mixer.decay.data()[head] * step));
            for (int p = 0; p < d.head_dim; ++p) {
                kept[deltas_at + own + p] = row[own + p] * static_cast<float>(step);
            }
        }
    }
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
        scratch.steps.clear();
        for (const WalkStep& walked : text.walk.steps) {
            scratch.steps.push_back(step(state.pending(walked.row)));
            DeltaStep& last = scratch.steps.back();
            last.from = walked.from;
            last.to = walked.to;
            const int row = text.rows[walked.row];
            if (row >= first_row) {
                last.query = channels(row) + d.inner() + d.keys() + size_t(d.group_of(head)) * d.state_dim;
                last.out = mixed_.data() + (row - first_row) * stride + own + value;
            }
        }
        walk_tile(state, tile, d.state_dim, scratch);
    }
    for (const Segment& segment : text.segments) {
        for (int row = std::max(first_row, segment.first_row); row < segment.first_row + segment.num_rows; ++row) {
            float* out = mixed_.data() + (row - first_row) * stride + own;
            for (int p = 0; p < d.head_dim; ++p) {
                out[p] += mixer.skip.data()[head] * channels(row)[own + p];
            }
        }
    }
}

}  // namespace pystaged
