// AVX2, FMA and F16C: any x86-64 laptop since 2013.
#include <cpuid.h>
#include <immintrin.h>

#include "kernel.h"

namespace pystaged {
namespace {

#include "avx.h"

// GCC would make all products first and add them up as trees, for which there are not registers enough.
inline __m256i in_order(__m256i sum) {
    asm("" : "+x"(sum));
    return sum;
}

template <int bits, int count, int rows>
inline void dot_words(const Bytes* words, const int8_t* x, const int32_t (&offsets)[rows], F (&out)[rows]) {
    // As many words as the 16-bit sums hold: words * 2 * (2^bits - 1) * 127 < 2^15. With 8 bits not even one is safe,
    // so there the weight's sign goes to the activation; the zero point cancels out and the offset is not needed.
    constexpr int most = bits <= 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1, together = most < count ? most : count;
    static_assert(count % together == 0);
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[rows];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
        sum[r] = _mm256_set1_epi32(bits == 8 ? 0 : offsets[r]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; i += together) {
        __m256i pairs[rows];
#pragma GCC unroll 8
        for (int j = 0; j < together; ++j) {
            const __m256i w = bits == 8 ? _mm256_xor_si256(words[i + j].x, _mm256_set1_epi8(-128)) : words[i + j].x;
            const __m256i magnitude = bits == 8 ? _mm256_abs_epi8(w) : w;
#pragma GCC unroll 4
            for (int r = 0; r < rows; ++r) {
                const __m256i values = broadcast4(x + r * kBlock + 4 * (i + j));
                const __m256i products =
                    _mm256_maddubs_epi16(magnitude, bits == 8 ? _mm256_sign_epi8(values, w) : values);
                pairs[r] = in_order(j == 0 ? products : _mm256_add_epi16(pairs[r], products));
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            sum[r] = in_order(_mm256_add_epi32(sum[r], _mm256_madd_epi16(pairs[r], ones)));
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
        out[r] = {_mm256_cvtepi32_ps(sum[r])};
    }
}

#include "generic.h"

bool supported() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && supports_f16c();
}

}  // namespace

extern const Kernel kAvx2Kernel;
constexpr Kernel kAvx2Kernel = make_kernel("avx2", supported);

}  // namespace pystaged
