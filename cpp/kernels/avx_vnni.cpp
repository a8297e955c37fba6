// AVX-VNNI, the 256-bit form without AVX-512: Intel client CPUs since Alder Lake, AMD since Zen 5.
#include <immintrin.h>

#include "kernel.h"

namespace pystaged {
namespace {

#include "avx.h"

// Where a test build encodes it as AVX-512 does, so that more machines can run this file.
inline __m256i dot4(__m256i sum, __m256i weights, __m256i values) {
#ifdef __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(sum, weights, values);
#else
    return _mm256_dpbusd_epi32(sum, weights, values);
#endif
}

// vpdpbusd multiplies unsigned weights by signed activations.
template <int bits, int count>
inline F dot_words(const Bytes* words, const int8_t* x, int32_t offset) {
    __m256i sum = _mm256_set1_epi32(offset);
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
        sum = dot4(sum, words[i].x, broadcast4(x + 4 * i));
    }
    return {_mm256_cvtepi32_ps(sum)};
}

#include "generic.h"

bool supported() {
#ifdef __AVXVNNI__
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
           __builtin_cpu_supports("avxvnni");
#else
    return __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#endif
}

}  // namespace

extern const Kernel kAvxVnniKernel;
constexpr Kernel kAvxVnniKernel = make_kernel("avx-vnni", supported);

}  // namespace pystaged
