// AVX-512 with VNNI: Intel since Ice Lake, AMD since Zen 4.
#include <immintrin.h>

#include "features.h"
#include "kernel.h"

namespace pystaged {
namespace {

struct F {
    static constexpr int lanes = 16;
    __m512 x;

    static F load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static F load_f16(const uint16_t* p) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
    }
    static F load_bf16(const uint16_t* p) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
    }
    static F load_u8(const uint8_t* p) {
        return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
    }
    static F load_i8(const uint8_t* p) {
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
    }
    static F set(float x) { return {_mm512_set1_ps(x)}; }
    void store(float* p) const { _mm512_storeu_ps(p, x); }
    int store_i8(int8_t* p) const {
        const __m512i i = _mm512_cvtps_epi32(x);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(i));
        return _mm512_reduce_add_epi32(i);
    }
    void store_f16(uint16_t* p) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    friend F operator+(F a, F b) { return {_mm512_add_ps(a.x, b.x)}; }
    friend F operator-(F a, F b) { return {_mm512_sub_ps(a.x, b.x)}; }
    friend F operator*(F a, F b) { return {_mm512_mul_ps(a.x, b.x)}; }
    friend F operator/(F a, F b) { return {_mm512_div_ps(a.x, b.x)}; }
    friend F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.x, b.x, c.x)}; }
    friend F max(F a, F b) { return {_mm512_max_ps(a.x, b.x)}; }
    friend F min(F a, F b) { return {_mm512_min_ps(a.x, b.x)}; }
    friend F abs(F a) { return {_mm512_abs_ps(a.x)}; }
    friend F round(F a) { return {_mm512_roundscale_ps(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    friend float fold_sum(F a) {
        const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.x), _mm512_extractf32x8_ps(a.x, 1));
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }
    friend float fold_max(F a) { return _mm512_reduce_max_ps(a.x); }
    friend F exp2_int(F a) {
        const __m512i n = _mm512_add_epi32(_mm512_cvtps_epi32(a.x), _mm512_set1_epi32(127));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(n, 23))};
    }
};

// Words of 32 bits, one to a lane.
struct W {
    static constexpr int lanes = 16;
    __m512i x;

    static W load(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
    static W set(uint32_t word) { return {_mm512_set1_epi32(static_cast<int>(word))}; }
    static W bits_of(F a) { return {_mm512_castps_si512(a.x)}; }
    F as_float() const { return {_mm512_castsi512_ps(x)}; }
    F to_float() const { return {_mm512_cvtepi32_ps(x)}; }
    void store(uint32_t* p) const { _mm512_storeu_si512(p, x); }
    template <int right>
    W shift() const {
        return {_mm512_srai_epi32(x, right)};
    }
    friend W operator+(W a, W b) { return {_mm512_add_epi32(a.x, b.x)}; }
    friend W operator^(W a, W b) { return {_mm512_xor_si512(a.x, b.x)}; }
    friend W operator&(W a, W b) { return {_mm512_and_si512(a.x, b.x)}; }
    friend W max(W a, W b) { return {_mm512_max_epi32(a.x, b.x)}; }
    friend int32_t fold_max(W a) { return _mm512_reduce_max_epi32(a.x); }
    friend void multiply(W a, uint32_t b, W& high, W& low) {
        const __m512i factor = _mm512_set1_epi32(static_cast<int>(b));
        const __m512i even = _mm512_mul_epu32(a.x, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64(a.x, 32), factor);
        high.x = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
        low.x = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
    }
};

constexpr int kIntegerRows = 16, kRowsTogether = 1;
constexpr bool kRowPairs = false;
constexpr int kPanelsFrom = 64, kPanelRows = 16, kPanelUnits = 1;
constexpr int kFloatRows = 16, kFloatSums = 24;
constexpr int kAttendRows = 8, kScoreSums = 16, kMixSums = 16;
constexpr int kPrefetchBytes = 6144, kPrefetchLocality = 2;  // the second cache: activations fill the first

struct Bytes {
    __m512i x;
    static Bytes load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
    static Bytes set(int byte) { return {_mm512_set1_epi8(static_cast<char>(byte))}; }
    friend Bytes operator&(Bytes a, Bytes b) { return {_mm512_and_si512(a.x, b.x)}; }
    friend Bytes operator|(Bytes a, Bytes b) { return {_mm512_or_si512(a.x, b.x)}; }
};

// table[i] for every byte i < 16.
inline Bytes lookup(const uint8_t* table, Bytes i) {
    const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), i.x)};
}

template <int left>
inline Bytes shift(Bytes a) {
    return {left >= 0 ? _mm512_slli_epi16(a.x, left & 15) : _mm512_srli_epi16(a.x, -left & 15)};
}

// sum += weights (16 lanes of 4 unsigned bytes) times four signed bytes, the same for every lane. As an instruction of
// its own, because GCC otherwise spends a second one on the broadcast.
inline __m512i dot4(__m512i sum, __m512i weights, const int8_t* four) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(*reinterpret_cast<const int32_t*>(four)));
    return sum;
}

// vpdpbusd multiplies unsigned weights by signed activations.
template <int bits, int count, int rows>
inline void dot_words(const Bytes* const (&unit)[1], const int8_t* x, const int32_t (&offsets)[rows],
                      F (&out)[rows][1]) {
    const Bytes* words = unit[0];
    for (int r = 0; r < rows; ++r) {
        __m512i sum = _mm512_set1_epi32(offsets[r]);
#pragma GCC unroll 8
        for (int i = 0; i < count; ++i) {
            sum = dot4(sum, words[i].x, x + r * kBlock + 4 * i);
        }
        out[r][0] = {_mm512_cvtepi32_ps(sum)};
    }
}

template <class Quants>
using ManyRowsQuants = Quants;

#include "generic.h"

}  // namespace

constexpr Kernel kAvx512VnniKernel = make_kernel("avx512-vnni", cpu_has_avx512_vnni);

}  // namespace pystaged
