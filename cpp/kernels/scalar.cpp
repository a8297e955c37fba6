// The reference: plain C++ on any CPU, the same bits as the vector kernels.
#include "ggml.h"
#include "kernel.h"

namespace pystaged {
namespace {

inline float as_float(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof(x));
    return x;
}

inline float from_f16(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ffu;
    if (exponent == 0) {
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    return as_float(sign | (exponent == 31 ? 0xffu : exponent + 112) << 23 | mantissa << 13);
}

struct F {
    static constexpr int lanes = 1;
    float x;

    static F load(const float* p) { return {*p}; }
    static F load_f16(const uint16_t* p) { return {from_f16(*p)}; }
    static F load_bf16(const uint16_t* p) { return {as_float(uint32_t(*p) << 16)}; }
    static F set(float x) { return {x}; }
    void store(float* p) const { *p = x; }
    // Rounds half to even; returns the sum of what it stored.
    int store_i8(int8_t* p) const { return *p = static_cast<int8_t>(__builtin_rintf(x)); }
    void store_f16(uint16_t* p) const { *p = ggml_fp32_to_fp16(x); }
    friend F operator+(F a, F b) { return {a.x + b.x}; }
    friend F operator-(F a, F b) { return {a.x - b.x}; }
    friend F operator*(F a, F b) { return {a.x * b.x}; }
    friend F operator/(F a, F b) { return {a.x / b.x}; }
    friend F fma(F a, F b, F c) { return {__builtin_fmaf(a.x, b.x, c.x)}; }
    friend F max(F a, F b) { return {a.x > b.x ? a.x : b.x}; }
    friend F min(F a, F b) { return {a.x < b.x ? a.x : b.x}; }
    friend F abs(F a) { return {__builtin_fabsf(a.x)}; }
    friend F round(F a) { return {__builtin_rintf(a.x)}; }
    friend float fold_sum(F a) { return a.x; }
    friend float fold_max(F a) { return a.x; }
    friend F exp2_int(F a) { return {as_float(static_cast<uint32_t>(static_cast<int>(a.x) + 127) << 23)}; }
};

constexpr int kIntegerRows = 4;  // rows of one integer tile
constexpr int kFloatRows = 4;    // rows of one float tile
constexpr int kFloatSums = 4;    // sums a float tile keeps in registers
constexpr int kAttendRows = 1;   // rows that attention takes at a time
constexpr int kScoreSums = 1;    // its sums in registers: rows times blocks of cells
constexpr int kMixSums = 1;      // and rows times vectors of dimensions

struct IntegerBlock {
    const uint8_t* data;
    int part;
    IntegerBlock(const uint8_t* group, int p) : data(group + 2 * kLanes), part(p) {
        uint16_t h;
        __builtin_memcpy(&h, group + 2 * p, sizeof(h));
        d = from_f16(h);
    }
    float d;
    F scale() const { return {d}; }
    static void prefetch(const uint8_t*) {}
};

struct Q8 : IntegerBlock {
    static constexpr int bytes = 2 * kLanes + kBlock * kLanes;
    using IntegerBlock::IntegerBlock;
    F dot(const int8_t* x, int32_t offset) const {
        int sum = offset;
        for (int i = 0; i < kBlock; ++i) {
            sum += data[i / 4 * 4 * kLanes + 4 * part + i % 4] * x[i];
        }
        return {static_cast<float>(sum)};
    }
};

struct Q4 : IntegerBlock {
    static constexpr int bytes = 2 * kLanes + kBlock * kLanes / 2;
    using IntegerBlock::IntegerBlock;
    F dot(const int8_t* x, int32_t offset) const {
        int sum = offset;
        for (int i = 0; i < kBlock / 2; ++i) {
            const int pair = data[i / 4 * 4 * kLanes + 4 * part + i % 4];
            sum += (pair & 15) * x[i] + (pair >> 4) * x[i + kBlock / 2];
        }
        return {static_cast<float>(sum)};
    }
};

#include "generic.h"

bool supported() {
    return true;
}

}  // namespace

extern const Kernel kScalarKernel;
constexpr Kernel kScalarKernel = make_kernel("scalar", supported);

}  // namespace pystaged
