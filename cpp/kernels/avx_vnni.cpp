// AVX-VNNI, the 256-bit form without AVX-512: Intel client CPUs since Alder Lake, AMD since Zen 5.
#include <immintrin.h>

#include "features.h"
#include "kernel.h"

namespace pystaged {
namespace {

#include "avx.h"

constexpr int kPanelsFrom = 32;

// Where a test build encodes it as AVX-512 does, so that more machines can run this file.
inline __m256i dot4(__m256i sum, __m256i weights, __m256i values) {
#ifdef __AVXVNNI__
    return _mm256_dpbusd_avx_epi32(sum, weights, values);
#else
    return _mm256_dpbusd_epi32(sum, weights, values);
#endif
}

// vpdpbusd multiplies unsigned weights by signed activations.
template <int bits, int count, int rows, int units>
inline void dot_words(const Bytes* const (&words)[units], const int8_t* x, const int32_t (&offsets)[rows],
                      F (&out)[rows][units]) {
    __m256i sum[rows][units];
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
        for (int u = 0; u < units; ++u) {
            sum[r][u] = _mm256_set1_epi32(offsets[r]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) {
            const __m256i values = broadcast4(x + r * kBlock + 4 * i);
#pragma GCC unroll 2
            for (int u = 0; u < units; ++u) {
                sum[r][u] = dot4(sum[r][u], words[u][i].x, values);
            }
        }
    }
    to_floats(sum, out);
}

template <class Quants>
using ManyRowsQuants = Quants;

#include "generic.h"

}  // namespace

#ifdef __AVXVNNI__
constexpr Kernel kAvxVnniKernel = make_kernel("avx-vnni", cpu_has_avx_vnni);
#else
constexpr Kernel kAvxVnniKernel = make_kernel("avx-vnni", cpu_has_avx512_vnni);
#endif

}  // namespace pystaged
