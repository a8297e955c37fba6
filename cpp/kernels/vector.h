// Vectors of 16 lanes from those of an instruction set, and functions of them. A part of generic.h.
#pragma once

// Two vectors as one; nests until there are kLanes lanes.
template <class Half>
struct Pair {
    static constexpr int lanes = 2 * Half::lanes;
    Half lo, hi;

    static Pair load(const float* p) { return {Half::load(p), Half::load(p + Half::lanes)}; }
    static Pair load_f16(const uint16_t* p) { return {Half::load_f16(p), Half::load_f16(p + Half::lanes)}; }
    static Pair set(float x) { return {Half::set(x), Half::set(x)}; }
    void store(float* p) const {
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
    friend float fold_max(Pair a) { return fold_max(max(a.lo, a.hi)); }
};

template <class V, bool wide = V::lanes == kLanes>
struct Widened {
    using type = typename Widened<Pair<V>>::type;
};
template <class V>
struct Widened<V, true> {
    using type = V;
};
// The 16 lanes that reductions are defined over.
using Row = typename Widened<F>::type;
constexpr int kUnits = kLanes / F::lanes;

inline Row first_lanes(Row v, int count) {
    float a[kLanes];
    v.store(a);
    for (int i = count; i < kLanes; ++i) {
        a[i] = 0;
    }
    return Row::load(a);
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
inline V exp(V x) {
    x = min(max(x, V::set(-87.0f)), V::set(88.0f));
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
