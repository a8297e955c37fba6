// The mixers of recurrent layers, on our kernels.
//
// A text's rows are gone through in order, parents first, by one thread for some channels or heads, which no others mix
// with: so the bits of a row depend on its path alone.
#include <algorithm>
#include <cmath>

#include "machine/math.h"
#include "pass/workspace.h"

namespace pystaged {

namespace {

// Channels of a short convolution that a thread computes at a time.
constexpr int kChannels = 256;

// Convolves some channels of a text's rows, in order, whose inputs begin at `at` in the layer's state. take(row,
// inputs, convolution) writes a row's own inputs and says where its result goes; false where none is wanted. Inputs of
// rows that are not applied yet stand first in what the state keeps of each; those of the rows before are a part of the
// state, [before][channels], the oldest first.
template <class Take>
void convolve_rows(const Workspace& w, const TextRows& text, int layer, size_t at, int channels, int first,
                   Convolution convolution, const Take& take) {
    RecurrentState& state = text.state->recurrent(layer);
    const int before = convolution.width - 1;
    at += first;
    const auto pending_inputs = [&](int pending) { return state.pending(pending) + first; };
    // Brings the state's part up to each stop, of the inputs that `from` holds and of those behind it.
    const auto write = [&](const std::vector<RecurrentState::Stop>& stops, const float* from, const auto& behind) {
        for (const RecurrentState::Stop& stop : stops) {
            for (int i = 0; i < before; ++i) {
                const int row = i + stop.rows;
                std::copy_n(row < before ? from + at + size_t(row) * channels : behind(row - before),
                            convolution.channels, stop.state + at + size_t(i) * channels);
            }
        }
    };
    write(state.stops(), state.state(), [&](int row) { return state.unapplied(row) + first; });
    const float* inputs[kMostConvWidth];
    convolution.inputs = inputs;
    text.for_rows([&](int row, int pending) {
        if (!take(row, pending_inputs(pending), convolution)) {
            return;
        }
        for (int back = 1; back <= before; ++back) {
            const int ancestor = w.ancestors[row * size_t(before) + back - 1] - state.first();
            inputs[before - back] = ancestor >= 0 ? pending_inputs(state.first() + ancestor)
                                                  : state.base() + at + size_t(before + ancestor) * channels;
        }
        inputs[before] = pending_inputs(pending);
        w.kernel.convolve(convolution);
    });
    write(state.reading_stops(), state.base(), [&](int row) { return pending_inputs(state.first() + row); });
}

// The texts' states of a layer, [keys][kLanes] a tile, and what each thread needs for them.
class States {
public:
    // Reserves memory of texts, before anything is applied; without tiles where there are no keys.
    States(Workspace& w, int layer, int keys) : w_(w), layer_(layer), keys_(keys) {
        const size_t input_size = w.h.recurrent_sizes(layer).input;
        int num_copies = 1;
        for (int i = 0; i < w.num_texts; ++i) {
            RecurrentState& state = w.texts[i].state->recurrent(layer);
            state.reserve(w.take(state.num_reading(), input_size));
            num_copies = std::max(num_copies, w.texts[i].walk.num_copies);
            num_steps_ = std::max({num_steps_, state.num_unapplied(), static_cast<int>(w.texts[i].walk.steps.size())});
        }
        tiles_size_ = size_t(num_copies) * keys * kLanes;
        tiles_ = w.take(w.num_threads, tiles_size_);
        steps_ = w.arena.take<DeltaStep>(size_t(w.num_threads) * num_steps_);
    }

    // Calls act(text, index, worker) for every text and index in [0, count), where each row has so many values.
    template <class Act>
    void run(int count, size_t values, const Act& act) const {
        const int threads = w_.pass->num_rows * values < 16 << 10 ? 1 : w_.num_threads;
        ThreadPool::shared().run(w_.num_texts * count, threads,
                                 [&](int task, int worker) { act(w_.texts[task / count], task % count, worker); });
    }

    // Where a row's step lies in what the state keeps of the row.
    struct Places {
        size_t decay, key, delta;
    };
    // Computes a tile of the state at the committed end, applies the steps of the text's walk to a copy of the one
    // before the pass's rows, and writes the tile at each stop of a reading. of_pass(row, step) completes the step of a
    // row of the pass.
    template <class OfPass>
    void walk(const TextRows& text, size_t tile, int worker, const Places& at, const OfPass& of_pass) const {
        RecurrentState& state = text.state->recurrent(layer_);
        const size_t size = size_t(keys_) * kLanes;
        float* const tiles = tiles_ + worker * tiles_size_;
        DeltaStep* const steps = steps_ + worker * size_t(num_steps_);
        const auto step = [&](float* kept) {
            DeltaStep made;
            made.decay = kept[at.decay];
            made.key = kept + at.key;
            made.delta = kept + at.delta;
            return made;
        };
        const float* now = state.state() + tile;
        int applied = 0;
        for (const RecurrentState::Stop& stop : state.stops()) {
            float* next = stop.state + tile;
            if (next != now) {
                std::copy_n(now, size, next);
            }
            int count = 0;
            while (applied < stop.rows) {
                steps[count++] = step(state.unapplied(applied++));
            }
            w_.kernel.delta(steps, count, keys_, next);
            now = next;
        }
        std::copy_n(state.base() + tile, size, tiles);
        DeltaStep* last = steps;
        for (const WalkStep& walked : text.walk.steps) {
            *last = step(state.pending(walked.row));
            last->from = walked.from;
            last->to = walked.to;
            if (text.rows[walked.row] >= 0) {  // else of an earlier pass: it is repeated
                of_pass(text.rows[walked.row], *last);
            }
            ++last;
        }
        int done = 0;
        for (const RecurrentState::Stop& stop : state.reading_stops()) {
            w_.kernel.delta(steps + done, stop.rows - done, keys_, tiles);
            std::copy_n(tiles, size, stop.state + tile);
            done = stop.rows;
        }
        w_.kernel.delta(steps + done, static_cast<int>(last - steps) - done, keys_, tiles);
    }

    void applied() const {
        for (int i = 0; i < w_.num_texts; ++i) {
            w_.texts[i].state->recurrent(layer_).applied();
        }
    }

private:
    Workspace& w_;
    int layer_, keys_, num_steps_ = 0;
    size_t tiles_size_;
    float* tiles_;      // [threads][copies]
    DeltaStep* steps_;  // [threads][num_steps_]
};

// ln(1 + e^x)
double softplus(double x) {
    return x > 20 ? x : own_log(1 + own_exp(x));
}

int num_blocks(int channels) {
    return (channels + kChannels - 1) / kChannels;
}

// The parts of a delta net's rows: of `product`, and of what the state keeps, which are inputs of the convolution,
// keys, deltas and decays.
struct DeltaRows {
    const DeltaNet& mixer;
    const DeltaNumbers& d;
    float* product;  // [n][mixer.stride]

    float* row(int i) const { return product + i * mixer.stride; }
    float* qkv(int i) const { return row(i) + mixer.qkv_at; }
    size_t keys_at(int key_head) const { return d.channels() + size_t(key_head) * d.head_dim; }
    size_t deltas_at() const { return size_t(d.channels()) + d.keys(); }
    size_t decay_at(int value_head) const { return deltas_at() + d.values() + value_head; }
};

// Of a text, what one head's state reads and is changed by: of queries, of keys or of values, in this order.
void prepare_head(const Workspace& w, const DeltaRows& rows, const TextRows& text, int layer, int head) {
    const DeltaNumbers& d = rows.d;
    RecurrentState& state = text.state->recurrent(layer);
    const int size = d.head_dim, first = head * size, value_head = head - 2 * d.key_heads;
    const auto take = [&](int row, float* own, Convolution& convolution) {
        convolution.out = rows.qkv(row) + first;
        std::copy_n(convolution.out, size, own);
        return true;
    };
    convolve_rows(w, text, layer, size_t(d.values()) * size, d.channels(), first,
                  {w.h.conv_width, size, nullptr, rows.mixer.conv.data() + first, size_t(padded(d.channels(), kBlock))},
                  take);
    text.for_rows([&](int row, int pending) {
        float *made = rows.qkv(row) + first, *kept = state.pending(pending);
        if (value_head < 0) {
            // x / sqrt(sum of squares + epsilon), by a norm whose weights are 1 / sqrt(size)
            w.kernel.rms_norm(made, w.unit.data(), w.h.norm_epsilon / size, size, size, made);
            if (head >= d.key_heads) {
                std::copy_n(made, size, kept + rows.keys_at(head - d.key_heads));
            }
            return;
        }
        float& rate = rows.row(row)[rows.mixer.beta_at + value_head];
        rate = static_cast<float>(1 / (1 + own_exp(-double(rate))));
        const float step = rows.row(row)[rows.mixer.alpha_at + value_head] + rows.mixer.step.data()[value_head];
        kept[rows.decay_at(value_head)] =
            static_cast<float>(own_exp(rows.mixer.decay.data()[value_head] * softplus(step)));
    });
}

// Of a text, one head of values, whose states are mapped to out[n][stride] of the rows from `first_row` on.
void run_head(const Workspace& w, const DeltaRows& rows, const States& states, const TextRows& text, int value_head,
              int worker, int first_row, float* out, size_t stride) {
    const DeltaNumbers& d = rows.d;
    const int size = d.head_dim, key_head = d.key_head(value_head);
    const size_t values_at = size_t(value_head) * size;
    const float root = std::sqrt(static_cast<float>(size));
    for (size_t column = values_at; column < values_at + size; column += kLanes) {
        const States::Places at{rows.decay_at(value_head), rows.keys_at(key_head), rows.deltas_at() + column};
        states.walk(text, column * size, worker, at, [&](int row, DeltaStep& made) {
            made.rate = rows.row(row)[rows.mixer.beta_at + value_head];
            made.scale = 1 / root;
            made.query = rows.qkv(row) + key_head * size;
            made.value = rows.qkv(row) + 2 * d.keys() + column;
            made.out = row < first_row ? nullptr : out + (row - first_row) * stride + column;
        });
    }
    text.for_rows([&](int row, int) {
        if (row >= first_row) {
            float *end = out + (row - first_row + 1) * stride, *own = end - stride + values_at;
            w.kernel.rms_norm(own, rows.mixer.norm.data(), w.h.norm_epsilon, size, size, own);
            w.kernel.open(rows.row(row) + rows.mixer.gate_at + values_at, true, size, own);
            std::fill(value_head + 1 == d.value_heads ? own + size : end, end, 0.0f);
        }
    });
}

// Of a text, one head of Mamba-2, of `product`, in which gates are followed by the convolution's channels and steps.
void run_head(const Workspace& w, const StateSpace& mixer, const float* product, const States& states,
              const TextRows& text, int layer, int head, int worker, int first_row, float* out, size_t stride) {
    const SpaceNumbers& d = w.h.space;
    RecurrentState& state = text.state->recurrent(layer);
    // What the state keeps of a row: inputs of the convolution, what leads into states, what they take in, decays.
    const size_t of_group = size_t(d.group_of(head)) * d.state_dim, own = size_t(head) * d.head_dim;
    const size_t deltas_at = size_t(d.channels()) + d.keys(), decays_at = deltas_at + d.inner();
    const auto channels = [&](int row) {
        return product + row * size_t(mixer.input[0].packed.padded_rows()) + d.inner();
    };
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
        const States::Places at{decays_at + head, d.channels() + of_group, deltas_at + own + value};
        states.walk(text, (own + value) * d.state_dim, worker, at, [&](int row, DeltaStep& made) {
            if (row >= first_row) {
                made.query = channels(row) + d.inner() + d.keys() + of_group;
                made.out = out + (row - first_row) * stride + own + value;
            }
        });
    }
    text.for_rows([&](int row, int) {
        for (int p = 0; row >= first_row && p < d.head_dim; ++p) {
            out[(row - first_row) * stride + own + p] += mixer.skip.data()[head] * channels(row)[own + p];
        }
    });
}

}  // namespace

Value mix(Workspace& w, const ShortConvolution& mixer, const Value& input, int layer, int first_row) {
    const int width = w.h.width, n = input.n - first_row;
    const size_t stride = w.h.padded_width(), in_stride = padded(3 * width, kBlock);
    float* const product = w.take(input.n, in_stride);
    w.products(mixer.input, input, product, in_stride);
    const States states(w, layer, 0);
    float* const mixed = w.take(n, stride);
    states.run(num_blocks(width), width, [&](const TextRows& text, int block, int) {
        const int first = block * kChannels, count = std::min(kChannels, width - first);
        const auto take = [&](int row, float* own, Convolution& convolution) {
            const float *b = product + row * in_stride + first, *c = b + width, *values = c + width;
            for (int d = 0; d < count; ++d) {
                own[d] = b[d] * values[d];
            }
            if (row < first_row) {
                return false;
            }
            float* const out = mixed + (row - first_row) * stride;
            convolution.gate = c;
            convolution.out = out + first;
            std::fill(first + count == width ? out + width : out + stride, out + stride, 0.0f);
            return true;
        };
        convolve_rows(w, text, layer, 0, width, first,
                      {w.h.conv_width, count, nullptr, mixer.conv.data() + first, stride}, take);
    });
    states.applied();
    return {mixed, n, stride};
}

Value mix(Workspace& w, const DeltaNet& mixer, const Value& input, int layer, int first_row) {
    const DeltaNumbers& d = w.h.delta;
    const int n = input.n - first_row;
    const size_t stride = padded(d.values(), kBlock);
    const DeltaRows rows{mixer, d, w.take(input.n, mixer.stride)};
    w.products(mixer.input, input, rows.product, mixer.stride);
    const States states(w, layer, d.head_dim);
    float* const mixed = w.take(n, stride);
    states.run(2 * d.key_heads + d.value_heads, d.channels(),
               [&](const TextRows& text, int head, int) { prepare_head(w, rows, text, layer, head); });
    states.run(d.value_heads, size_t(d.values()) * d.head_dim, [&](const TextRows& text, int head, int worker) {
        run_head(w, rows, states, text, head, worker, first_row, mixed, stride);
    });
    states.applied();
    return {mixed, n, stride};
}

Value mix(Workspace& w, const StateSpace& mixer, const Value& input, int layer, int first_row) {
    const SpaceNumbers& d = w.h.space;
    const int n = input.n - first_row, group = d.inner() / d.groups;
    const size_t in_stride = mixer.input[0].packed.padded_rows(), stride = padded(d.inner(), kBlock);
    float *product = w.take(input.n, in_stride), *mixed = w.take(n, stride);
    w.products(mixer.input, input, product, in_stride);
    const States states(w, layer, d.state_dim);
    states.run(num_blocks(d.channels()), d.channels(), [&](const TextRows& text, int block, int) {
        const int first = block * kChannels, count = std::min(kChannels, d.channels() - first);
        const auto channels = [&](int row) { return product + row * in_stride + d.inner(); };
        const auto take = [&](int row, float* own, Convolution& convolution) {
            convolution.out = channels(row) + first;
            std::copy_n(convolution.out, count, own);
            return true;
        };
        Convolution convolution{w.h.conv_width, count, nullptr, mixer.conv.data() + first,
                                size_t(padded(d.channels(), kBlock))};
        convolution.bias = mixer.conv_bias.present() ? mixer.conv_bias.data() + first : nullptr;
        convolve_rows(w, text, layer, size_t(d.inner()) * d.state_dim, d.channels(), first, convolution, take);
        // Of these channels, those that lead into states.
        const int keys_first = std::max(first, d.inner()), keys_last = std::min(first + count, d.inner() + d.keys());
        text.for_rows([&](int row, int pending) {
            float* kept = text.state->recurrent(layer).pending(pending);
            std::copy_n(channels(row) + keys_first, std::max(0, keys_last - keys_first),
                        kept + d.channels() + keys_first - d.inner());
        });
    });
    states.run(d.heads, size_t(d.inner()) * d.state_dim, [&](const TextRows& text, int head, int worker) {
        run_head(w, mixer, product, states, text, layer, head, worker, first_row, mixed, stride);
    });
    states.applied();
    w.for_rows(n, d.channels(), [&](int i, int) {
        float* out = mixed + i * stride;
        w.kernel.open(product + (first_row + i) * in_stride, true, d.inner(), out);
        for (int g = 0; mixer.norm.present() && g < d.groups; ++g) {
            w.kernel.rms_norm(out + g * group, mixer.norm.data() + size_t(g) * padded(group, kBlock), w.h.norm_epsilon,
                              group, group, out + g * group);
        }
        std::fill(out + d.inner(), out + stride, 0.0f);
    });
    return {mixed, n, stride};
}

}  // namespace pystaged
