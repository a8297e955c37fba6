// What every 64-bit Arm CPU has.
#include <arm_neon.h>

#include "kernel.h"

namespace pystaged {
namespace {

#include "neon.h"

constexpr int kRowsTogether = 1;
constexpr bool kRowPairs = false;

// A word of activations for every lane of weights.
inline int8x16_t broadcast4(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, sizeof(four));
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}

template <int bits, int count, int rows>
inline void dot_words(const Bytes* const (&unit)[1], const int8_t* x, const int32_t (&offsets)[rows],
                      F (&out)[rows][1]) {
    const Bytes* words = unit[0];
    // As many words as the 16-bit sums hold: words * 127 * the largest weight < 2^15.
    constexpr int most = bits == 8 ? 2 : bits == 6 ? 4 : 8, together = most < count ? most : count;
    static_assert(count % together == 0);
    for (int r = 0; r < rows; ++r) {
        int32x4_t lo = vdupq_n_s32(0), hi = lo;  // two sums for each lane
#pragma GCC unroll 8
        for (int i = 0; i < count; i += together) {
            int16x8_t lo_pairs = vdupq_n_s16(0), hi_pairs = lo_pairs;
#pragma GCC unroll 8
            for (int j = i; j < i + together; ++j) {
                const int8x16_t w = signed_weights<bits>(words[j]), four = broadcast4(x + r * kBlock + 4 * j);
                lo_pairs = vmlal_s8(lo_pairs, vget_low_s8(w), vget_low_s8(four));
                hi_pairs = vmlal_high_s8(hi_pairs, w, four);
            }
            lo = vpadalq_s16(lo, lo_pairs);
            hi = vpadalq_s16(hi, hi_pairs);
        }
        out[r][0] = {vcvtq_f32_s32(vaddq_s32(start<bits>(offsets[r]), vpaddq_s32(lo, hi)))};
    }
}

#include "generic.h"

}  // namespace

constexpr Kernel kNeonKernel = make_kernel("neon");

}  // namespace pystaged
