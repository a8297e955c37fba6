#include "weights/packing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "error.h"

namespace pystaged {

namespace {

// By Packing.
constexpr ggml_type kTypes[kNumPackings] = {
    GGML_TYPE_F32,    GGML_TYPE_F16,   GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1,
    GGML_TYPE_Q5_0,   GGML_TYPE_Q5_1,  GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_NL,
    GGML_TYPE_IQ4_XS, GGML_TYPE_MXFP4, GGML_TYPE_Q3_K, GGML_TYPE_Q2_K,
};

uint32_t load_word(const uint8_t* p) {
    uint32_t word;
    std::memcpy(&word, p, sizeof(word));
    return word;
}

void store_word(uint8_t* p, uint32_t word) {
    std::memcpy(p, &word, sizeof(word));
}

// Compiled for each type and each place in its blocks.
#define ALWAYS_INLINE inline __attribute__((always_inline))

// 32 inputs of one output: scales and minima as they are kept, quants as words of four bytes, the zero point added.
struct LaneBlock {
    uint8_t factors[4];
    uint32_t words[8];
};

constexpr uint32_t kNibbles = 0x0f0f0f0f, kOnes = 0x01010101;

// Four bits, one to each byte.
constexpr uint32_t spread(uint32_t bits) {
    return (bits & 15) * 0x00204081 & kOnes;
}

// Types of 32 inputs a block: scales, then fifth bits, then nibbles.
ALWAYS_INLINE LaneBlock read_block(const Layout& l, const uint8_t* in) {
    LaneBlock block;
    const int factors = l.factors * l.factor_bytes;
    std::memcpy(block.factors, in, factors);
    in += factors;
    if (l.bits == 8) {
        for (int i = 0; i < 8; ++i) {
            block.words[i] = load_word(in + 4 * i) ^ 0x80808080u;
        }
        return block;
    }
    uint32_t fifth = 0;
    if (l.bits == 5) {
        fifth = load_word(in);
        in += 4;
    }
    for (int i = 0; i < 4; ++i) {
        const uint32_t both = load_word(in + 4 * i);
        block.words[i] = (both & kNibbles) | spread(fifth >> 4 * i) << 4;
        block.words[i + 4] = (both >> 4 & kNibbles) | spread(fifth >> (16 + 4 * i)) << 4;
    }
    return block;
}

// Block `index` of the eight in a file's block of Q4_K or Q5_K.
ALWAYS_INLINE LaneBlock read_minimum_block(const Layout& l, const uint8_t* in, int index) {
    LaneBlock block;
    const uint8_t* packed = in + 4;
    if (index < 4) {
        block.factors[0] = packed[index] & 63;
        block.factors[1] = packed[index + 4] & 63;
    } else {
        block.factors[0] = static_cast<uint8_t>((packed[index + 4] & 15) | (packed[index - 4] >> 6) << 4);
        block.factors[1] = static_cast<uint8_t>((packed[index + 4] >> 4) | (packed[index] >> 6) << 4);
    }
    const uint8_t* fifth = in + 16;
    const uint8_t* nibbles = in + (l.bits == 5 ? 48 : 16) + index / 2 * 32;
    for (int i = 0; i < 8; ++i) {
        block.words[i] = load_word(nibbles + 4 * i) >> 4 * (index % 2) & kNibbles;
        if (l.bits == 5) {
            block.words[i] |= (load_word(fifth + 4 * i) >> index & kOnes) << 4;
        }
    }
    return block;
}

// Block `index` of the eight in a file's block of Q6_K.
ALWAYS_INLINE LaneBlock read_halves_block(const uint8_t* in, int index) {
    LaneBlock block;
    const int half = index / 4, quarter = index % 4;
    const uint8_t* nibbles = in + 64 * half + 32 * (quarter % 2);
    const uint8_t* high = in + 128 + 32 * half;
    std::memcpy(block.factors, in + 192 + 8 * half + 2 * quarter, 2);
    for (int i = 0; i < 8; ++i) {
        block.words[i] = (load_word(nibbles + 4 * i) >> 4 * (quarter / 2) & kNibbles) |
                         (load_word(high + 4 * i) >> 2 * quarter & 3 * kOnes) << 4;
    }
    return block;
}

// Block `index` of the eight in a file's block of IQ4_XS.
ALWAYS_INLINE LaneBlock read_scaled_block(const uint8_t* in, int index) {
    LaneBlock block;
    uint16_t high;
    std::memcpy(&high, in + 2, sizeof(high));
    const int scale = (in[4 + index / 2] >> 4 * (index % 2) & 15) | (high >> 2 * index & 3) << 4;
    block.factors[0] = static_cast<uint8_t>(scale - 32);
    for (int i = 0; i < 4; ++i) {
        const uint32_t both = load_word(in + 8 + 16 * index + 4 * i);
        block.words[i] = both & kNibbles;
        block.words[i + 4] = both >> 4 & kNibbles;
    }
    return block;
}

// Block `index` of the eight in a file's block of Q2_K or Q3_K.
ALWAYS_INLINE LaneBlock read_small_block(const Layout& l, const uint8_t* in, int index) {
    LaneBlock block;
    const uint8_t* scales = in + (l.bits == 3 ? 96 : 0);
    const uint8_t* low = in + (l.bits == 3 ? 32 : 16) + 32 * (index / 4);
    for (int i = 0; i < 8; ++i) {
        block.words[i] = load_word(low + 4 * i) >> 2 * (index % 4) & 3 * kOnes;
        if (l.bits == 3) {
            block.words[i] |= (load_word(in + 4 * i) >> index & kOnes) << 2;
        }
    }
    for (int half = 0; half < 2; ++half) {
        const int k = 2 * index + half;
        if (l.bits == 3) {
            const int scale = (scales[k % 8] >> 4 * (k / 8) & 15) | (scales[8 + k % 4] >> 2 * (k / 4) & 3) << 4;
            block.factors[half] = static_cast<uint8_t>(scale - 32);
        } else {
            block.factors[half] = scales[k];
        }
    }
    return block;
}

ALWAYS_INLINE LaneBlock read_block(Packing packing, const uint8_t* in, int index) {
    const Layout& l = layout_of(packing);
    switch (packing) {
        case Packing::q4_k:
        case Packing::q5_k: return read_minimum_block(l, in, index);
        case Packing::q6_k: return read_halves_block(in, index);
        case Packing::iq4_xs: return read_scaled_block(in, index);
        case Packing::q2_k:
        case Packing::q3_k: return read_small_block(l, in, index);
        default: return read_block(l, in);
    }
}

// Moves what one lane has to its places in a packed block, and quants back. Beyond their lower bits, which are four or
// else two, there are none, one or two.
ALWAYS_INLINE void store_block(const Layout& l, const LaneBlock& block, int lane, uint8_t* out) {
    for (int i = 0; i < l.factors; ++i) {
        std::memcpy(out + (i * kLanes + lane) * l.factor_bytes, block.factors + i * l.factor_bytes, l.factor_bytes);
    }
    out += l.factors_bytes + 4 * lane;
    if (l.bits == 8) {
        for (int i = 0; i < 8; ++i) {
            store_word(out + 4 * kLanes * i, block.words[i]);
        }
        return;
    }
    const auto store_bits = [&](int at, int width) {
        for (int plane = 0, count = width == 1 ? 8 : 4; plane < width; ++plane) {
            uint32_t bits = 0;
            for (int i = 0; i < count; ++i) {
                bits |= (block.words[plane * count + i] >> at & (width == 1 ? kOnes : 3 * kOnes)) << width * i;
            }
            store_word(out + 4 * kLanes * (at + plane), bits);
        }
    };
    if (l.bits < 4) {
        store_bits(0, 2);
        store_bits(2, l.bits - 2);
        return;
    }
    for (int i = 0; i < 4; ++i) {
        store_word(out + 4 * kLanes * i, (block.words[i] & kNibbles) | (block.words[i + 4] & kNibbles) << 4);
    }
    store_bits(4, l.bits - 4);
}

void load_quants(const Layout& l, const uint8_t* in, int lane, uint32_t* words) {
    in += 4 * lane;
    if (l.bits == 8) {
        for (int i = 0; i < 8; ++i) {
            words[i] = load_word(in + 4 * kLanes * i);
        }
        return;
    }
    const auto add_bits = [&](int at, int width) {
        for (int i = 0, count = width == 1 ? 8 : 4; width > 0 && i < 8; ++i) {
            const uint32_t bits = load_word(in + 4 * kLanes * (at + i / count)) >> width * (i % count);
            words[i] |= (bits & (width == 1 ? kOnes : 3 * kOnes)) << at;
        }
    };
    for (int i = 0; i < 8; ++i) {
        words[i] = l.bits < 4 ? 0 : load_word(in + 4 * kLanes * (i % 4)) >> 4 * (i / 4) & kNibbles;
    }
    if (l.bits < 4) {
        add_bits(0, 2);
        add_bits(2, l.bits - 2);
    } else {
        add_bits(4, l.bits - 4);
    }
}

// Packs a group of kLanes rows; null is a row of zeros, which `out` has already.
template <class Number>
void pack_floats(const uint8_t* const* rows, int cols, uint8_t* out) {
    for (int first = 0; first < cols; first += kBlock) {
        const int last = std::min(first + kBlock, cols);
        for (int lane = 0; lane < kLanes; ++lane) {
            for (int i = first; rows[lane] && i < last; ++i) {
                std::memcpy(out + (size_t(i) * kLanes + lane) * sizeof(Number), rows[lane] + i * sizeof(Number),
                            sizeof(Number));
            }
        }
    }
}

// The indices are those of the blocks that share a header.
template <Packing kPacking, int... kIndices>
void pack_blocks(const uint8_t* const* rows, int cols, uint8_t* out, std::integer_sequence<int, kIndices...>) {
    constexpr Layout l = layout_of(kPacking);
    // Where in a block of the file its F16 numbers for all of ours stand.
    constexpr Packing q6 = Packing::q6_k, q3 = Packing::q3_k, q2 = Packing::q2_k;
    constexpr int at = kPacking == q6 ? 208 : kPacking == q3 ? 108 : kPacking == q2 ? 80 : 0;
    const size_t file_block = ggml_type_size(type_of(kPacking));
    for (int b = 0; b < cols / kBlock / l.blocks; ++b, out += l.header_bytes + l.blocks * l.block_bytes) {
        for (int lane = 0; lane < kLanes; ++lane) {
            if (!rows[lane]) {
                continue;
            }
            const uint8_t* in = rows[lane] + b * file_block;
            for (int i = 0; i < l.headers; ++i) {
                std::memcpy(out + 2 * (i * kLanes + lane), in + at + 2 * i, 2);
            }
            uint8_t* blocks = out + l.header_bytes;
            (store_block(l, read_block(kPacking, in, kIndices), lane, blocks + kIndices * l.block_bytes), ...);
        }
    }
}

template <Packing kPacking>
void pack(const uint8_t* const* rows, int cols, uint8_t* out) {
    if constexpr (kPacking == Packing::f32) {
        pack_floats<float>(rows, cols, out);
    } else if constexpr (kPacking < Packing::q8_0) {
        pack_floats<uint16_t>(rows, cols, out);
    } else {
        pack_blocks<kPacking>(rows, cols, out, std::make_integer_sequence<int, layout_of(kPacking).blocks>());
    }
}

float load_half(const uint8_t* p) {
    ggml_fp16_t half;
    std::memcpy(&half, p, sizeof(half));
    return ggml_fp16_to_fp32(half);
}

}  // namespace

ggml_type type_of(Packing packing) {
    return kTypes[static_cast<int>(packing)];
}

Packing packing_of(ggml_type type) {
    std::string names;
    for (int i = 0; i < kNumPackings; ++i) {
        if (kTypes[i] == type) {
            return static_cast<Packing>(i);
        }
        names += std::string(i == 0 ? "" : i + 1 < kNumPackings ? ", " : " or ") + ggml_type_name(kTypes[i]);
    }
    throw std::invalid_argument(say("weights of type ", ggml_type_name(type), " are not supported; use ", names));
}

size_t group_bytes(Packing packing, int padded_cols) {
    const Layout& l = layout_of(packing);
    if (l.bits == 0) {
        return ggml_row_size(type_of(packing), padded_cols) * kLanes;
    }
    const size_t blocks = padded_cols / kBlock;
    return blocks * l.block_bytes + blocks / l.blocks * l.header_bytes;
}

void pack_group(Packing packing, const uint8_t* const* rows, int cols, uint8_t* out) {
    const auto pack_as = [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
        ((static_cast<int>(packing) == kIndices ? pack<static_cast<Packing>(kIndices)>(rows, cols, out) : void()), ...);
    };
    pack_as(std::make_integer_sequence<int, kNumPackings>());
}

void unpack_row(Packing packing, const uint8_t* in, int lane, int cols, float* out) {
    const Layout& l = layout_of(packing);
    if (l.bits == 0) {
        const ggml_type type = type_of(packing);
        const size_t size = ggml_type_size(type);
        const ggml_to_float_t to_float = ggml_get_type_traits(type)->to_float;
        for (int i = 0; i < cols; ++i) {
            const uint8_t* value = in + (size_t(i) * kLanes + lane) * size;
            if (to_float) {
                to_float(value, out + i, 1);
            } else {
                std::memcpy(out + i, value, size);
            }
        }
        return;
    }
    const uint8_t* header = in;
    const bool is_iq4 = packing == Packing::iq4_nl || packing == Packing::iq4_xs;
    // What quants stand for, or null where they are numbers themselves.
    const uint8_t* table = is_iq4 ? kIq4Values : packing == Packing::mxfp4 ? kFp4Values : nullptr;
    for (int b = 0; b < cols / kBlock; ++b, in += l.block_bytes, out += kBlock) {
        if (b % l.blocks == 0) {
            header = in;
            in += l.header_bytes;
        }
        // Of either half of the block; minima are subtracted.
        float scales[2], minima[2];
        for (int half = 0; half < 2; ++half) {
            const auto factor = [&](int i) { return in + (i * kLanes + lane) * l.factor_bytes; };
            const auto shared = [&](int i) { return load_half(header + 2 * (i * kLanes + lane)); };
            const uint8_t* own = factor(l.has_halves ? half : 0);
            switch (packing) {
                case Packing::mxfp4: scales[half] = std::ldexp(1.0f, *own - 128); break;
                case Packing::q4_k:
                case Packing::q5_k:
                    scales[half] = shared(0) * static_cast<float>(*own);
                    minima[half] = shared(1) * static_cast<float>(*factor(1));
                    break;
                case Packing::q2_k:
                    scales[half] = shared(0) * static_cast<float>(*own & 15);
                    minima[half] = shared(1) * static_cast<float>(*own >> 4);
                    break;
                default:
                    scales[half] =
                        l.headers ? shared(0) * static_cast<float>(static_cast<int8_t>(*own)) : load_half(own);
                    minima[half] = l.headers || l.factors == 1 ? 0 : -load_half(factor(1));
            }
        }
        uint32_t words[8];
        load_quants(l, in + l.factors_bytes, lane, words);
        for (int i = 0; i < kBlock; ++i) {
            const int byte = static_cast<int>(words[i / 4] >> 8 * (i % 4) & 255);
            const int quant = (table ? table[byte] : byte) - l.zero_point;
            // As ggml writes it, for the sign of zeros.
            const float product = scales[i / 16] * static_cast<float>(quant);
            out[i] = l.has_minima ? product - minima[i / 16] : product;
        }
    }
}

}  // namespace pystaged
