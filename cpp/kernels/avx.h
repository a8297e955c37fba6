// The 256-bit vectors of AVX2, FMA and F16C, for the files that add their integer products. Included inside their own
// anonymous namespaces, as generic.h is.
#pragma once

struct F {
    static constexpr int lanes = 8;
    __m256 x;

    static F load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static F load_f16(const uint16_t* p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
    }
    static F load_bf16(const uint16_t* p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
    }
    static F load_u8(const uint8_t* p) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
    }
    static F load_i8(const uint8_t* p) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
    }
    static F set(float x) { return {_mm256_set1_ps(x)}; }
    void store(float* p) const { _mm256_storeu_ps(p, x); }
    int store_i8(int8_t* p) const {
        const __m256i i = _mm256_cvtps_epi32(x);
        const __m128i lo = _mm256_castsi256_si128(i), hi = _mm256_extracti128_si256(i, 1);
        const __m128i words = _mm_packs_epi32(lo, hi);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
        __m128i sum = _mm_add_epi32(lo, hi);
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
    }
    void store_f16(uint16_t* p) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
    friend F operator+(F a, F b) { return {_mm256_add_ps(a.x, b.x)}; }
    friend F operator-(F a, F b) { return {_mm256_sub_ps(a.x, b.x)}; }
    friend F operator*(F a, F b) { return {_mm256_mul_ps(a.x, b.x)}; }
    friend F operator/(F a, F b) { return {_mm256_div_ps(a.x, b.x)}; }
    friend F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.x, b.x, c.x)}; }
    friend F max(F a, F b) { return {_mm256_max_ps(a.x, b.x)}; }
    friend F min(F a, F b) { return {_mm256_min_ps(a.x, b.x)}; }
    friend F abs(F a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.x)}; }
    friend F round(F a) { return {_mm256_round_ps(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    friend float fold_sum(F a) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.x), _mm256_extractf128_ps(a.x, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }
    friend float fold_max(F a) {
        __m128 m = _mm_max_ps(_mm256_castps256_ps128(a.x), _mm256_extractf128_ps(a.x, 1));
        m = _mm_max_ps(m, _mm_movehl_ps(m, m));
        return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
    }
    friend F exp2_int(F a) {
        const __m256i n = _mm256_add_epi32(_mm256_cvtps_epi32(a.x), _mm256_set1_epi32(127));
        return {_mm256_castsi256_ps(_mm256_slli_epi32(n, 23))};
    }
};

// Words of 32 bits, one to a lane.
struct W {
    static constexpr int lanes = 8;
    __m256i x;

    static W load(const uint32_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
    static W set(uint32_t word) { return {_mm256_set1_epi32(static_cast<int>(word))}; }
    static W bits_of(F a) { return {_mm256_castps_si256(a.x)}; }
    F as_float() const { return {_mm256_castsi256_ps(x)}; }
    F to_float() const { return {_mm256_cvtepi32_ps(x)}; }
    void store(uint32_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
    template <int right>
    W shift() const {
        return {_mm256_srai_epi32(x, right)};
    }
    friend W operator+(W a, W b) { return {_mm256_add_epi32(a.x, b.x)}; }
    friend W operator^(W a, W b) { return {_mm256_xor_si256(a.x, b.x)}; }
    friend W operator&(W a, W b) { return {_mm256_and_si256(a.x, b.x)}; }
    friend W max(W a, W b) { return {_mm256_max_epi32(a.x, b.x)}; }
    friend int32_t fold_max(W a) {
        __m128i m = _mm_max_epi32(_mm256_castsi256_si128(a.x), _mm256_extracti128_si256(a.x, 1));
        m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
        return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
    }
    friend void multiply(W a, uint32_t b, W& high, W& low) {
        const __m256i factor = _mm256_set1_epi32(static_cast<int>(b));
        const __m256i even = _mm256_mul_epu32(a.x, factor), odd = _mm256_mul_epu32(_mm256_srli_epi64(a.x, 32), factor);
        high.x = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
        low.x = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    }
};

constexpr int kIntegerRows = 8, kPanelRows = 4, kPanelUnits = 2;
constexpr int kRowsTogether = 4;  // one by one, rows would need every word loaded for each: there are 16 registers
constexpr bool kRowPairs = false;
constexpr int kFloatRows = 6, kFloatSums = 12;
constexpr int kAttendRows = 6, kScoreSums = 6, kMixSums = 6;
constexpr int kPrefetchBytes = 6144, kPrefetchLocality = 2;  // the second cache: activations fill the first

struct Bytes {
    __m256i x;
    static Bytes load(const uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
    static Bytes set(int byte) { return {_mm256_set1_epi8(static_cast<char>(byte))}; }
    friend Bytes operator&(Bytes a, Bytes b) { return {_mm256_and_si256(a.x, b.x)}; }
    friend Bytes operator|(Bytes a, Bytes b) { return {_mm256_or_si256(a.x, b.x)}; }
};

// table[i] for every byte i < 16.
inline Bytes lookup(const uint8_t* table, Bytes i) {
    const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
    return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), i.x)};
}

template <int left>
inline Bytes shift(Bytes a) {
    return {left >= 0 ? _mm256_slli_epi16(a.x, left & 15) : _mm256_srli_epi16(a.x, -left & 15)};
}

template <int rows, int units>
[[gnu::always_inline]] inline void to_floats(const __m256i (&sums)[rows][units], F (&out)[rows][units]) {
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
        for (int u = 0; u < units; ++u) {
            out[r][u] = {_mm256_cvtepi32_ps(sums[r][u])};
        }
    }
}

inline __m256i broadcast4(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof(four));
    return _mm256_set1_epi32(four);
}
