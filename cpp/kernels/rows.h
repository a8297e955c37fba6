// Operations on single rows of floats. A part of generic.h.
#pragma once

#include "vector.h"

inline void clear_padding(float* y, int cols, int padded_cols) {
    for (int i = cols; i < padded_cols; ++i) {
        y[i] = 0;
    }
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int cols, int padded_cols,
                float* y) {
    Row sum = Row::set(0);
    for (int i = 0; i < cols; i += kLanes) {
        sum = sum + load_first(x + i, cols - i);
    }
    const Row mean = Row::set(fold_sum(sum) / static_cast<float>(cols));
    Row squares = Row::set(0);
    for (int i = 0; i < cols; i += kLanes) {
        Row d = load_first(x + i, cols - i) - mean;
        if (cols - i < kLanes) {
            d = some_lanes(d, 0, cols - i);
        }
        squares = fma(d, d, squares);
    }
    const Row rstd = Row::set(1.0f / __builtin_sqrtf(fold_sum(squares) / static_cast<float>(cols) + eps));
    for (int i = 0; i < cols; i += kLanes) {
        const Row scaled = (load_first(x + i, cols - i) - mean) * rstd, w = load_first(weight + i, cols - i);
        store_first(bias ? fma(scaled, w, load_first(bias + i, cols - i)) : scaled * w, y + i, cols - i);
    }
    clear_padding(y, cols, padded_cols);
}

void rms_norm(const float* x, const float* weight, float eps, int cols, int padded_cols, float* y) {
    Row squares = Row::set(0);
    for (int i = 0; i < cols; i += kLanes) {
        const Row v = load_first(x + i, cols - i);
        squares = fma(v, v, squares);
    }
    const Row rms = Row::set(1.0f / __builtin_sqrtf(fold_sum(squares) / static_cast<float>(cols) + eps));
    for (int i = 0; i < cols; i += kLanes) {
        store_first(load_first(x + i, cols - i) * rms * load_first(weight + i, cols - i), y + i, cols - i);
    }
    clear_padding(y, cols, padded_cols);
}

void rotate(float* x, int half, const float* cos, const float* sin) {
    for (int i = 0; i < half; i += kLanes) {
        const int left = half - i;
        const Row a = load_first(x + i, left), b = load_first(x + half + i, left);
        const Row c = load_first(cos + i, left), s = load_first(sin + i, left);
        store_first(a * c - b * s, x + i, left);
        store_first(a * s + b * c, x + half + i, left);
    }
}

void convolve(const Convolution& p) {
    for (int i = 0; i < p.channels; i += kLanes) {
        const int left = p.channels - i;
        Row sum = load_first(p.weights + i, left) * load_first(p.inputs[0] + i, left);
        for (int row = 1; row < p.width; ++row) {
            sum = fma(load_first(p.weights + row * p.stride + i, left), load_first(p.inputs[row] + i, left), sum);
        }
        if (p.bias) {
            sum = sum + load_first(p.bias + i, left);
        }
        store_first(p.gate ? load_first(p.gate + i, left) * sum : silu(sum), p.out + i, left);
    }
}

void open(const float* gate, bool with_gate, int n, float* x) {
    for (int i = 0; i < n; i += kLanes) {
        const Row g = load_first(gate + i, n - i);
        const Row opened = with_gate ? silu(g) : Row::set(1.0f) / (Row::set(1.0f) + exp(g * Row::set(-1.0f)));
        store_first(load_first(x + i, n - i) * opened, x + i, n - i);
    }
}

inline float round_to_f16(float x) {
    uint16_t halves[F::lanes];
    F::set(x).store_f16(halves);
    float floats[F::lanes];
    F::load_f16(halves).store(floats);
    return floats[0];
}

inline float as_number(int32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof(x));
    return x;
}

// Scales are rounded as ggml rounds its own, which keeps the two engines' choices together; quants are not affected.
void quantize(const float* x, int cols, int row, const QuantizedRows& to) {
    static_assert(kBlock == 2 * kLanes, "a block is two rows of lanes");
    for (int b = 0; b < cols / kBlock; ++b, x += kBlock) {
        const size_t at = size_t(b) * to.n + row;
        // Rows that are multiplied in pairs lie in turns of eight bytes; one left over lies as all others do.
        const bool paired = kRowPairs && (row | 1) < to.n;
        int8_t own[kBlock];
        int8_t* out = paired ? own : to.quants + at * kBlock;
        const Row lo = Row::load(x), hi = Row::load(x + kLanes);
        // By bits, in whose order NaN is above all numbers: a block that has one is NaN as a whole.
        const float largest = as_number(fold_max(max(WordRow::bits_of(abs(lo)), WordRow::bits_of(abs(hi)))));
        const Row inverse = Row::set(largest > 1e-30f ? 127.0f / largest : 0.0f);
        // The order of max's operands makes a quant of NaN, too.
        const Row least = Row::set(-127), most = Row::set(127);
        const int first = min(max(lo * inverse, least), most).store_i8(out);
        const int second = min(max(hi * inverse, least), most).store_i8(out + kLanes);
        for (int i = 0; paired && i < kBlock; i += 8) {
            __builtin_memcpy(to.quants + (at - row % 2) * kBlock + row % 2 * 8 + 2 * i, own + i, 8);
        }
        const float scale = largest == largest ? round_to_f16(largest / 127.0f) : __builtin_nanf("");
        const Layout& layout = layout_of(to.packing);
        BlockFactors& factors = to.factors[at];
        factors.scale = scale;
        factors.sum = scale * static_cast<float>(first + second);
        if (to.packing == Packing::q2_k) {
            factors.sums[0] = scale * static_cast<float>(first);
            factors.sums[1] = scale * static_cast<float>(second);
        } else {
            factors.offsets[0] = -layout.zero_point * (layout.has_halves ? first : first + second);
            factors.offsets[1] = -layout.zero_point * second;
        }
    }
}

void to_f16(const float* x, int n, uint16_t* out) {
    int i = 0;
    for (; i + F::lanes <= n; i += F::lanes) {
        F::load(x + i).store_f16(out + i);
    }
    if (i < n) {
        float rest[F::lanes] = {};
        uint16_t halves[F::lanes];
        __builtin_memcpy(rest, x + i, (n - i) * sizeof(float));
        F::load(rest).store_f16(halves);
        __builtin_memcpy(out + i, halves, (n - i) * sizeof(uint16_t));
    }
}

// NaN counts as absent: where max() meets one it returns its second operand.
bool run_max(const float* x, int n, float* maxima) {
    Row nothing = Row::set(0);  // or NaN
    for (int i = 0; i < n; i += kRun) {
        Row most = Row::set(-__builtin_inff());
        for (int j = 0; j < kRun; j += kLanes) {
            const Row values = Row::load(x + i + j);
            most = max(values, most);
            nothing = nothing + (values - values);
        }
        *maxima++ = fold_max(most);
    }
    return fold_sum(nothing) == 0;
}

double sum_exp(const float* x, int n, float top, float factor) {
    const Row t = Row::set(top), f = Row::set(factor);
    double total = 0;
    // Few enough at a time that float rounds nothing that matters.
    for (int i = 0; i < n;) {
        Row sum = Row::set(0);
        for (const int end = n - i < 32 * kLanes ? n : i + 32 * kLanes; i < end; i += kLanes) {
            sum = sum + exp((Row::load(x + i) - t) * f);
        }
        total += static_cast<double>(fold_sum(sum));
    }
    return total;
}

uint64_t read_bytes(const uint8_t* data, size_t bytes) {
    uint64_t sums[8] = {};
    const uint64_t* words = reinterpret_cast<const uint64_t*>(data);
    for (size_t i = 0; i + 8 <= bytes / 8; i += 8) {
        for (int j = 0; j < 8; ++j) {
            sums[j] += words[i + j];
        }
    }
    uint64_t total = 0;
    for (const uint64_t s : sums) {
        total += s;
    }
    return total;
}
