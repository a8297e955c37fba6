// AVX2, FMA and F16C: any x86-64 laptop since 2013.
#include <immintrin.h>

#include "kernel.h"

namespace pystaged {
namespace {

#include "avx.h"

template <int bits, int count>
inline F dot_words(const Bytes* words, const int8_t* x, int32_t offset) {
    const __m256i ones = _mm256_set1_epi16(1);
    if constexpr (bits == 8) {
        // An unsigned byte times a signed one would overflow the 16-bit sums, so the weight's sign goes to the
        // activation first. The zero point cancels out and `offset` is not needed.
        __m256i sum = _mm256_setzero_si256();
        for (int i = 0; i < count; ++i) {
            const __m256i w = _mm256_xor_si256(words[i].x, _mm256_set1_epi8(-128));
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(broadcast4(x + 4 * i), w));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
        }
        return {_mm256_cvtepi32_ps(sum)};
    }
    // As many words as the 16-bit sums hold: words * 2 * (2^bits - 1) * 127 < 2^15.
    constexpr int together = bits == 4 ? 8 : bits == 5 ? 4 : 2;
    __m256i sum = _mm256_set1_epi32(offset);
    for (int i = 0; i < count; i += together) {
        __m256i pairs = _mm256_maddubs_epi16(words[i].x, broadcast4(x + 4 * i));
        for (int j = i + 1; j < i + together && j < count; ++j) {
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(words[j].x, broadcast4(x + 4 * j)));
        }
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
    }
    return {_mm256_cvtepi32_ps(sum)};
}

#include "generic.h"

bool supported() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

}  // namespace

extern const Kernel kAvx2Kernel;
constexpr Kernel kAvx2Kernel = make_kernel("avx2", supported);

}  // namespace pystaged
