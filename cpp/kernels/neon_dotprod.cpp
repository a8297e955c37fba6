// NEON with dot products: Apple since M1, Cortex-A55 and A76 and all after them, Graviton since 2.
#include <arm_neon.h>

#include "features.h"
#include "kernel.h"

namespace pystaged {
namespace {

#include "neon.h"

constexpr int kRowsTogether = 1;
constexpr bool kRowPairs = false;

template <int bits, int count, int rows>
inline void dot_words(const Bytes* const (&unit)[1], const int8_t* x, const int32_t (&offsets)[rows],
                      F (&out)[rows][1]) {
    const Bytes* words = unit[0];
    for (int r = 0; r < rows; ++r) {
        int32x4_t sum = start<bits>(offsets[r]);
#pragma GCC unroll 2
        for (int i = 0; i < count; i += 4) {
            const int8x16_t values = vld1q_s8(x + r * kBlock + 4 * i);
            sum = vdotq_laneq_s32(sum, signed_weights<bits>(words[i]), values, 0);
            sum = vdotq_laneq_s32(sum, signed_weights<bits>(words[i + 1]), values, 1);
            sum = vdotq_laneq_s32(sum, signed_weights<bits>(words[i + 2]), values, 2);
            sum = vdotq_laneq_s32(sum, signed_weights<bits>(words[i + 3]), values, 3);
        }
        out[r][0] = {vcvtq_f32_s32(sum)};
    }
}

#include "generic.h"

}  // namespace

constexpr Kernel kNeonDotprodKernel = make_kernel("neon-dotprod", cpu_has_dotprod);

}  // namespace pystaged
