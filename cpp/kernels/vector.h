// Vectors of 16 lanes from those of an instruction set, and functions of them. A part of generic.h.
#pragma once

// Two vectors as one; nests until there are kLanes lanes.
template <class Half>
struct Pair {
    static constexpr int lanes = 2 * Half::lanes;
    Half lo, hi;

    template <class Lane>
    static Pair load(const Lane* p) {
        return {Half::load(p), Half::load(p + Half::lanes)};
    }
    static Pair load_f16(const uint16_t* p) { return {Half::load_f16(p), Half::load_f16(p + Half::lanes)}; }
    template <class Lane>
    static Pair set(Lane x) {
        return {Half::set(x), Half::set(x)};
    }
    template <class Lane>
    void store(Lane* p) const {
        lo.store(p);
        hi.store(p + Half::lanes);
    }
    int store_i8(int8_t* p) const { return lo.store_i8(p) + hi.store_i8(p + Half::lanes); }
    friend Pair operator+(Pair a, Pair b) { return {a.lo + b.lo, a.hi + b.hi}; }
    friend Pair operator-(Pair a, Pair b) { return {a.lo - b.lo, a.hi - b.hi}; }
    friend Pair operator*(Pair a, Pair b) { return {a.lo * b.lo, a.hi * b.hi}; }
    friend Pair operator/(Pair a, Pair b) { return {a.lo / b.lo, a.hi / b.hi}; }
    friend Pair fma(Pair a, Pair b, Pair c) { return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)}; }
    friend Pair max(Pair a, Pair b) { return {max(a.lo, b.lo), max(a.hi, b.hi)}; }
    friend Pair min(Pair a, Pair b) { return {min(a.lo, b.lo), min(a.hi, b.hi)}; }
    friend Pair abs(Pair a) { return {abs(a.lo), abs(a.hi)}; }
    friend Pair round(Pair a) { return {round(a.lo), round(a.hi)}; }
    friend Pair exp2_int(Pair a) { return {exp2_int(a.lo), exp2_int(a.hi)}; }
    // Lane i with lane i + half, until one is left.
    friend float fold_sum(Pair a) { return fold_sum(a.lo + a.hi); }
    friend auto fold_max(Pair a) { return fold_max(max(a.lo, a.hi)); }

    // Of words.
    template <class Floats>
    static Pair bits_of(const Floats& a) {
        return {Half::bits_of(a.lo), Half::bits_of(a.hi)};
    }
    auto as_float() const { return Pair<decltype(lo.as_float())>{lo.as_float(), hi.as_float()}; }
    auto to_float() const { return Pair<decltype(lo.to_float())>{lo.to_float(), hi.to_float()}; }
    template <int right>
    Pair shift() const {
        return {lo.template shift<right>(), hi.template shift<right>()};
    }
    friend Pair operator^(Pair a, Pair b) { return {a.lo ^ b.lo, a.hi ^ b.hi}; }
    friend Pair operator&(Pair a, Pair b) { return {a.lo & b.lo, a.hi & b.hi}; }
    friend void multiply(Pair a, uint32_t b, Pair& high, Pair& low) {
        multiply(a.lo, b, high.lo, low.lo);
        multiply(a.hi, b, high.hi, low.hi);
    }
};

template <class V>
constexpr auto widened() {
    if constexpr (V::lanes < kLanes) {
        return widened<Pair<V>>();
    } else {
        return V();
    }
}
// The 16 lanes that reductions are defined over.
using Row = decltype(widened<F>());
using WordRow = decltype(widened<W>());
constexpr int kUnits = kLanes / F::lanes;

// Lanes from `from` up to `to`; the others are zero.
inline Row some_lanes(Row v, int from, int to) {
    float a[kLanes];
    v.store(a);
    for (int i = 0; i < kLanes; ++i) {
        a[i] = i < from || i >= to ? 0 : a[i];
    }
    return Row::load(a);
}

// The first `count` floats at p, zeros behind them, and the other way round; `count` may be more than there are lanes.
inline Row load_first(const float* p, int count) {
    if (count >= kLanes) {
        return Row::load(p);
    }
    float a[kLanes] = {};
    __builtin_memcpy(a, p, count * sizeof(float));
    return Row::load(a);
}

inline void store_first(Row v, float* p, int count) {
    if (count >= kLanes) {
        v.store(p);
        return;
    }
    float a[kLanes];
    v.store(a);
    __builtin_memcpy(p, a, count * sizeof(float));
}

template <int rows, int units>
inline void clear(F (&sums)[rows][units]) {
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 16
        for (int u = 0; u < units; ++u) {
            sums[r][u] = F::set(0);
        }
    }
}

// Cephes' expf: relative error about 1e-7 on [-87, 88], to which the argument is clamped.
template <class V>
[[gnu::always_inline]] inline V exp(V x) {
    x = min(V::set(88.0f), max(V::set(-87.0f), x));  // in this order, which keeps NaN
    const V n = round(x * V::set(1.44269504f));
    V r = fma(n, V::set(-0.693359375f), x);
    r = fma(n, V::set(2.12194440e-4f), r);
    V p = V::set(1.9875691500e-4f);
    p = fma(p, r, V::set(1.3981999507e-3f));
    p = fma(p, r, V::set(8.3334519073e-3f));
    p = fma(p, r, V::set(4.1665795894e-2f));
    p = fma(p, r, V::set(1.6666665459e-1f));
    p = fma(p, r, V::set(5.0000001201e-1f));
    p = fma(p, r * r, r) + V::set(1.0f);
    return p * exp2_int(n);
}

// GPT-2's GELU, x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3), as x / (1 + exp(-2 u)).
template <class V>
inline V gelu(V x) {
    const V cubic = fma(x * x * x, V::set(0.044715f), x);
    return x / (V::set(1.0f) + exp(cubic * V::set(-1.59576912f)));
}

template <class V>
inline V silu(V x) {
    return x / (V::set(1.0f) + exp(x * V::set(-1.0f)));
}

template <class V>
inline V squared_relu(V x) {
    x = max(V::set(0.0f), x);  // in this order, which keeps NaN
    return x * x;
}

// gpt-oss's gate, and what it opens: both bounded, NaN kept.
template <class V>
inline V clamped_silu(V x) {
    x = min(V::set(7.0f), x);
    return x / (V::set(1.0f) + exp(x * V::set(-1.702f)));
}

template <class V>
inline V clamped_linear(V x) {
    return max(V::set(-7.0f), min(V::set(7.0f), x)) + V::set(1.0f);
}

// cap * tanh(x / cap), as cap - 2 cap / (exp(2 x / cap) + 1); NaN where x is not finite.
template <class V>
inline V softcapped(V x, float cap) {
    const V bounded = V::set(cap) - V::set(2 * cap) / (exp(x * V::set(2 / cap)) + V::set(1.0f));
    return bounded + (x - x);
}
