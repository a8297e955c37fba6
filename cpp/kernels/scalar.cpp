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

struct F {
    static constexpr int lanes = 1;
    float x;

    static F load(const float* p) { return {*p}; }
    static F load_f16(const uint16_t* p) { return {ggml_fp16_to_fp32(*p)}; }
    static F load_bf16(const uint16_t* p) { return {as_float(uint32_t(*p) << 16)}; }
    static F load_u8(const uint8_t* p) { return {static_cast<float>(*p)}; }
    static F load_i8(const uint8_t* p) { return {static_cast<float>(static_cast<int8_t>(*p))}; }
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
    friend F exp2_int(F a) {
        const int n = a.x == a.x ? static_cast<int>(a.x) : 0;
        return {as_float(static_cast<uint32_t>(n + 127) << 23)};
    }
};

// A word of 32 bits.
struct W {
    static constexpr int lanes = 1;
    uint32_t x;

    static W load(const uint32_t* p) { return {*p}; }
    static W set(uint32_t word) { return {word}; }
    static W bits_of(F a) {
        W word;
        __builtin_memcpy(&word.x, &a.x, sizeof(word.x));
        return word;
    }
    F as_float() const { return {pystaged::as_float(x)}; }
    F to_float() const { return {static_cast<float>(static_cast<int32_t>(x))}; }
    void store(uint32_t* p) const { *p = x; }
    // Of a signed number, to the right.
    template <int right>
    W shift() const {
        return {static_cast<uint32_t>(static_cast<int32_t>(x) >> right)};
    }
    friend W operator+(W a, W b) { return {a.x + b.x}; }
    friend W operator^(W a, W b) { return {a.x ^ b.x}; }
    friend W operator&(W a, W b) { return {a.x & b.x}; }
    // As signed numbers.
    friend W max(W a, W b) { return static_cast<int32_t>(a.x) > static_cast<int32_t>(b.x) ? a : b; }
    friend int32_t fold_max(W a) { return static_cast<int32_t>(a.x); }
    // The two halves of a * b.
    friend void multiply(W a, uint32_t b, W& high, W& low) {
        const uint64_t product = uint64_t(a.x) * b;
        high.x = static_cast<uint32_t>(product >> 32);
        low.x = static_cast<uint32_t>(product);
    }
};

constexpr int kIntegerRows = 4;    // rows of one integer tile
constexpr int kRowsTogether = 1;   // of them, those that a block is multiplied by at once
constexpr bool kRowPairs = false;  // whether quantize() interleaves rows in pairs
constexpr int kPanelsFrom = 8;     // rows from which on weights are unpacked once for all of them
constexpr int kPanelRows = 4;      // rows that a panel of unpacked weights is multiplied by at once
constexpr int kPanelUnits = 1;     // units of it that are multiplied side by side
constexpr int kFloatRows = 4;      // rows of one float tile
constexpr int kFloatSums = 4;      // sums a float tile keeps in registers
constexpr int kAttendRows = 1;     // rows that attention takes at a time
constexpr int kScoreSums = 1;      // its sums in registers: rows times blocks of cells
constexpr int kMixSums = 1;        // and rows times vectors of dimensions

// How far ahead weights are prefetched, and into which caches, as __builtin_prefetch counts them.
constexpr int kPrefetchBytes = 0;
constexpr int kPrefetchLocality = 0;

// F::lanes times four bytes.
struct Bytes {
    uint32_t x;
    static Bytes load(const uint8_t* p) {
        Bytes bytes;
        __builtin_memcpy(&bytes.x, p, sizeof(bytes.x));
        return bytes;
    }
    static Bytes set(int byte) { return {0x01010101u * static_cast<uint32_t>(byte)}; }
    friend Bytes operator&(Bytes a, Bytes b) { return {a.x & b.x}; }
    friend Bytes operator|(Bytes a, Bytes b) { return {a.x | b.x}; }
};

// table[i] for every byte i < 16.
inline Bytes lookup(const uint8_t* table, Bytes i) {
    Bytes found{0};
    for (int byte = 0; byte < 32; byte += 8) {
        found.x |= uint32_t(table[i.x >> byte & 255]) << byte;
    }
    return found;
}

// To the left, or to the right where negative. Bits may come over from neighbouring bytes; nobody looks at them.
template <int left>
inline Bytes shift(Bytes a) {
    return {left >= 0 ? a.x << (left & 31) : a.x >> (-left & 31)};
}

// Of `rows` rows, 1 to kRowsTogether: the offset and the sum over `count` words of their unsigned bytes, below 2^bits,
// times the row's signed bytes. Those begin at x, kBlock apart; with kRowPairs those of two rows take turns after
// eight.
template <int bits, int count, int rows>
inline void dot_words(const Bytes* const (&unit)[1], const int8_t* x, const int32_t (&offsets)[rows],
                      F (&out)[rows][1]) {
    const Bytes* words = unit[0];
    for (int r = 0; r < rows; ++r) {
        int sum = offsets[r];
        for (int i = 0; i < 4 * count; ++i) {
            sum += static_cast<int>(words[i / 4].x >> 8 * (i % 4) & 255) * x[r * kBlock + i];
        }
        out[r][0] = {static_cast<float>(sum)};
    }
}

// What takes the place of quants of eight bits where many rows are multiplied.
template <class Quants>
using ManyRowsQuants = Quants;

#include "generic.h"

}  // namespace

constexpr Kernel kScalarKernel = make_kernel("scalar");

}  // namespace pystaged
