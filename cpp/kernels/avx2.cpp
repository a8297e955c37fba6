// AVX2, FMA and F16C: any x86-64 laptop since 2013.
#include <immintrin.h>

#include "features.h"
#include "kernel.h"

namespace pystaged {
namespace {

#include "avx.h"

constexpr int kPanelsFrom = 12;

// GCC would make all products first and add them up as trees, for which there are not registers enough.
inline __m256i in_order(__m256i sum) {
    asm("" : "+x"(sum));
    return sum;
}

// Of the pairs of numbers that Wide makes.
template <int rows, int units>
inline void dot_wide(const Bytes* const (&words)[units], const int8_t* x, F (&out)[rows][units]) {
    __m256i sum[rows][units];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            const __m256i values = broadcast4(x + r * 2 * kBlock + i % 2 * kBlock + 4 * (i / 2));
#pragma GCC unroll 2
            for (int u = 0; u < units; ++u) {
                const __m256i products = _mm256_madd_epi16(words[u][i].x, values);
                sum[r][u] = in_order(i == 0 ? products : _mm256_add_epi32(sum[r][u], products));
            }
        }
    }
    to_floats(sum, out);
}

template <int bits, int count, int rows, int units>
inline void dot_words(const Bytes* const (&words)[units], const int8_t* x, const int32_t (&offsets)[rows],
                      F (&out)[rows][units]) {
    if constexpr (bits == 16) {
        static_assert(count == 8, "a whole block");
        dot_wide(words, x, out);
        return;
    }
    // As many words as the 16-bit sums hold: words * 2 * (2^bits - 1) * 127 < 2^15. With 8 bits not even one is safe,
    // so there the weight's sign goes to the activation; the zero point cancels out and the offset is not needed.
    constexpr int most = bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1, together = most < count ? most : count;
    static_assert(count % together == 0);
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[rows][units];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
        for (int u = 0; u < units; ++u) {
            sum[r][u] = _mm256_set1_epi32(bits == 8 ? 0 : offsets[r]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; i += together) {
        __m256i pairs[rows][units];
#pragma GCC unroll 8
        for (int j = 0; j < together; ++j) {
            __m256i weights[units], magnitudes[units];
#pragma GCC unroll 2
            for (int u = 0; u < units; ++u) {
                const __m256i w = words[u][i + j].x;
                weights[u] = bits == 8 ? _mm256_xor_si256(w, _mm256_set1_epi8(-128)) : w;
                magnitudes[u] = bits == 8 ? _mm256_abs_epi8(weights[u]) : w;
            }
#pragma GCC unroll 4
            for (int r = 0; r < rows; ++r) {
                const __m256i values = broadcast4(x + r * kBlock + 4 * (i + j));
#pragma GCC unroll 2
                for (int u = 0; u < units; ++u) {
                    const __m256i products =
                        _mm256_maddubs_epi16(magnitudes[u], bits == 8 ? _mm256_sign_epi8(values, weights[u]) : values);
                    pairs[r][u] = in_order(j == 0 ? products : _mm256_add_epi16(pairs[r][u], products));
                }
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
            for (int u = 0; u < units; ++u) {
                sum[r][u] = in_order(_mm256_add_epi32(sum[r][u], _mm256_madd_epi16(pairs[r][u], ones)));
            }
        }
    }
    to_floats(sum, out);
}

// Bytes at even and at odd places as 16-bit numbers.
inline void widen(__m256i bytes, __m256i& even, __m256i& odd) {
    even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8);
    odd = _mm256_srai_epi16(bytes, 8);
}

// Weights of eight bits and the values they meet as 16-bit numbers, whose products need no care for signs: words[2 i]
// has inputs 4 i and 4 i + 2 of every lane, words[2 i + 1] the two others; the zero point is off.
template <class Quants>
struct Wide {
    static constexpr int num_bits = 16, bytes = Quants::bytes;
    static constexpr int value_bytes = 2 * kBlock;
    Bytes words[16];

    Wide() = default;
    Wide(const uint8_t* data, int part) {
        const Quants narrow(data, part);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            widen(_mm256_xor_si256(narrow.words[i].x, _mm256_set1_epi8(-128)), words[2 * i].x, words[2 * i + 1].x);
        }
    }
    static void copy_values(const int8_t* from, int rows, int8_t* to) {
        for (int r = 0; r < rows; ++r) {
            auto* pair = reinterpret_cast<__m256i*>(to + r * value_bytes);
            widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + r * kBlock)), pair[0], pair[1]);
        }
    }
};

template <class Quants>
using ManyRowsQuants = Wide<Quants>;

#include "generic.h"

}  // namespace

constexpr Kernel kAvx2Kernel = make_kernel("avx2", cpu_has_avx2);

}  // namespace pystaged
