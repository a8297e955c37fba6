// NEON with products of 8-bit matrices: Apple since M2, Cortex-X2 and A710 and all after them, Graviton since 3.
#include <arm_neon.h>

#include "features.h"
#include "kernel.h"

namespace pystaged {
namespace {

#include "neon.h"

constexpr int kRowsTogether = 2;
constexpr bool kRowPairs = true;

inline uint8x16_t as_bytes(uint32x4_t words) {
    return vreinterpretq_u8_u32(words);
}

// Unsigned weights times signed activations. Two outputs times two rows over eight inputs is one instruction; the
// weights it needs, two words of two outputs, are the same for every pair of rows.
template <int bits, int count, int rows>
inline void dot_words(const Bytes* const (&unit)[1], const int8_t* x, const int32_t (&offsets)[rows],
                      F (&out)[rows][1]) {
    const Bytes* words = unit[0];
    if constexpr (rows == 1) {
        int32x4_t sum = vdupq_n_s32(offsets[0]);
#pragma GCC unroll 2
        for (int i = 0; i < count; i += 4) {
            const int8x16_t values = vld1q_s8(x + 4 * i);
            sum = vusdotq_laneq_s32(sum, words[i].x, values, 0);
            sum = vusdotq_laneq_s32(sum, words[i + 1].x, values, 1);
            sum = vusdotq_laneq_s32(sum, words[i + 2].x, values, 2);
            sum = vusdotq_laneq_s32(sum, words[i + 3].x, values, 3);
        }
        out[0][0] = {vcvtq_f32_s32(sum)};
    } else {
        const int32x2_t offset = vset_lane_s32(offsets[1], vdup_n_s32(offsets[0]), 1);
        int32x4_t lo = vcombine_s32(offset, offset), hi = lo;
#pragma GCC unroll 4
        for (int i = 0; i < count; i += 2) {
            const uint32x4_t even = vreinterpretq_u32_u8(words[i].x), odd = vreinterpretq_u32_u8(words[i + 1].x);
            const int8x16_t values = vld1q_s8(x + 8 * i);
            lo = vusmmlaq_s32(lo, as_bytes(vzip1q_u32(even, odd)), values);
            hi = vusmmlaq_s32(hi, as_bytes(vzip2q_u32(even, odd)), values);
        }
        out[0][0] = {vcvtq_f32_s32(vuzp1q_s32(lo, hi))};
        out[1][0] = {vcvtq_f32_s32(vuzp2q_s32(lo, hi))};
    }
}

#include "generic.h"

}  // namespace

constexpr Kernel kNeonI8mmKernel = make_kernel("neon-i8mm", cpu_has_i8mm);

}  // namespace pystaged
