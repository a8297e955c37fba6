// The 128-bit vectors of 64-bit Arm, for the files that add their integer products. Included inside their own anonymous
// namespaces, as generic.h is.
#pragma once

struct F {
    static constexpr int lanes = 4;
    float32x4_t x;

    static F load(const float* p) { return {vld1q_f32(p)}; }
    static F load_f16(const uint16_t* p) { return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))}; }
    static F load_bf16(const uint16_t* p) { return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16))}; }
    static F load_u8(const uint8_t* p) { return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load4(p)))))}; }
    static F load_i8(const uint8_t* p) {
        return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load4(p))))))};
    }
    static F set(float x) { return {vdupq_n_f32(x)}; }
    void store(float* p) const { vst1q_f32(p, x); }
    int store_i8(int8_t* p) const {
        const int32x4_t i = vcvtnq_s32_f32(x);
        const int16x4_t words = vmovn_s32(i);
        const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
        __builtin_memcpy(p, &bytes, 4);
        return vaddvq_s32(i);
    }
    void store_f16(uint16_t* p) const { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
    friend F operator+(F a, F b) { return {vaddq_f32(a.x, b.x)}; }
    friend F operator-(F a, F b) { return {vsubq_f32(a.x, b.x)}; }
    friend F operator*(F a, F b) { return {vmulq_f32(a.x, b.x)}; }
    friend F operator/(F a, F b) { return {vdivq_f32(a.x, b.x)}; }
    friend F fma(F a, F b, F c) { return {vfmaq_f32(c.x, a.x, b.x)}; }
    // Not vmaxq_f32, which would return NaN wherever it meets one.
    friend F max(F a, F b) { return {vbslq_f32(vcgtq_f32(a.x, b.x), a.x, b.x)}; }
    friend F min(F a, F b) { return {vbslq_f32(vcltq_f32(a.x, b.x), a.x, b.x)}; }
    friend F abs(F a) { return {vabsq_f32(a.x)}; }
    friend F round(F a) { return {vrndnq_f32(a.x)}; }
    friend float fold_sum(F a) {
        const float32x2_t halves = vadd_f32(vget_low_f32(a.x), vget_high_f32(a.x));
        return vget_lane_f32(halves, 0) + vget_lane_f32(halves, 1);
    }
    friend float fold_max(F a) {
        const F halves = max(a, {vextq_f32(a.x, a.x, 2)});
        const float lo = vgetq_lane_f32(halves.x, 0), hi = vgetq_lane_f32(halves.x, 1);
        return lo > hi ? lo : hi;
    }
    friend F exp2_int(F a) {
        const int32x4_t n = vaddq_s32(vcvtq_s32_f32(a.x), vdupq_n_s32(127));
        return {vreinterpretq_f32_s32(vshlq_n_s32(n, 23))};
    }

private:
    static uint8x8_t load4(const uint8_t* p) {
        uint32_t four;
        __builtin_memcpy(&four, p, sizeof(four));
        return vreinterpret_u8_u32(vdup_n_u32(four));
    }
};

// Words of 32 bits, one to a lane.
struct W {
    static constexpr int lanes = 4;
    uint32x4_t x;

    static W load(const uint32_t* p) { return {vld1q_u32(p)}; }
    static W set(uint32_t word) { return {vdupq_n_u32(word)}; }
    static W bits_of(F a) { return {vreinterpretq_u32_f32(a.x)}; }
    F as_float() const { return {vreinterpretq_f32_u32(x)}; }
    F to_float() const { return {vcvtq_f32_s32(vreinterpretq_s32_u32(x))}; }
    void store(uint32_t* p) const { vst1q_u32(p, x); }
    template <int right>
    W shift() const {
        return {vreinterpretq_u32_s32(vshrq_n_s32(vreinterpretq_s32_u32(x), right))};
    }
    friend W operator+(W a, W b) { return {vaddq_u32(a.x, b.x)}; }
    friend W operator^(W a, W b) { return {veorq_u32(a.x, b.x)}; }
    friend W operator&(W a, W b) { return {vandq_u32(a.x, b.x)}; }
    friend W max(W a, W b) {
        return {vreinterpretq_u32_s32(vmaxq_s32(vreinterpretq_s32_u32(a.x), vreinterpretq_s32_u32(b.x)))};
    }
    friend int32_t fold_max(W a) { return vmaxvq_s32(vreinterpretq_s32_u32(a.x)); }
    friend void multiply(W a, uint32_t b, W& high, W& low) {
        const uint32x4_t factor = vdupq_n_u32(b);
        const uint32x4_t first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(a.x), vget_low_u32(factor)));
        const uint32x4_t second = vreinterpretq_u32_u64(vmull_high_u32(a.x, factor));
        high.x = vuzp2q_u32(first, second);
        low.x = vuzp1q_u32(first, second);
    }
};

constexpr int kIntegerRows = 8;
constexpr int kPanelsFrom = 64, kPanelRows = 8, kPanelUnits = 1;
constexpr int kFloatRows = 8, kFloatSums = 24;
constexpr int kAttendRows = 4, kScoreSums = 4, kMixSums = 4;
constexpr int kPrefetchBytes = 4096, kPrefetchLocality = 3;

template <class Quants>
using ManyRowsQuants = Quants;

struct Bytes {
    uint8x16_t x;
    static Bytes load(const uint8_t* p) { return {vld1q_u8(p)}; }
    static Bytes set(int byte) { return {vdupq_n_u8(static_cast<uint8_t>(byte))}; }
    friend Bytes operator&(Bytes a, Bytes b) { return {vandq_u8(a.x, b.x)}; }
    friend Bytes operator|(Bytes a, Bytes b) { return {vorrq_u8(a.x, b.x)}; }
};

// table[i] for every byte i < 16.
inline Bytes lookup(const uint8_t* table, Bytes i) {
    return {vqtbl1q_u8(vld1q_u8(table), i.x)};
}

template <int left>
inline Bytes shift(Bytes a) {
    if constexpr (left > 0) {
        return {vshlq_n_u8(a.x, left)};
    } else if constexpr (left < 0) {
        return {vshrq_n_u8(a.x, -left)};
    } else {
        return a;
    }
}

// Weights as signed bytes: those of eight bits lose their zero point, which `start` then leaves out as well; the others
// are too small to have a sign.
template <int bits>
inline int8x16_t signed_weights(Bytes words) {
    return vreinterpretq_s8_u8(bits == 8 ? veorq_u8(words.x, vdupq_n_u8(128)) : words.x);
}

template <int bits>
inline int32x4_t start(int32_t offset) {
    return vdupq_n_s32(bits == 8 ? 0 : offset);
}
