// Quantized weights as packed_matrix lays them out, a block at a time. A part of generic.h.
#pragma once

#include "vector.h"

// The unsigned weights of one unit and block: words[i] has inputs 4 i to 4 i + 3 of every lane. Above four bits, the
// fifth bits are one more vector of bytes, bit i for words[i]; the fifth and sixth are two, with two bits for each
// word.
template <int bits>
struct Quants {
    static constexpr int bytes = kLanes * (bits == 8 ? kBlock : kBlock / 2 + 4 * (bits - 4));
    Bytes words[8];

    Quants(const uint8_t* data, int part) {
        data += part * F::lanes * 4;
        if constexpr (bits == 8) {
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                words[i] = Bytes::load(data + 4 * kLanes * i);
            }
        } else {
            const Bytes nibble = Bytes::set(15);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const Bytes both = Bytes::load(data + 4 * kLanes * i);
                words[i] = both & nibble;
                words[i + 4] = shift<-4>(both) & nibble;
            }
            if constexpr (bits == 5) {
                add_bits<1, 8>(words, Bytes::load(data + 16 * kLanes));
            } else if constexpr (bits == 6) {
                add_bits<2, 4>(words, Bytes::load(data + 16 * kLanes));
                add_bits<2, 4>(words + 4, Bytes::load(data + 20 * kLanes));
            }
        }
    }

    // Of each row the products with 32 inputs, or with the 16 of either half, and its offset.
    template <int rows>
    void dot(const int8_t* x, const BlockFactors* row, F (&out)[rows]) const {
        dot_from<0, 8, 0>(x, row, out);
    }
    template <int rows>
    void dot_first(const int8_t* x, const BlockFactors* row, F (&out)[rows]) const {
        dot_from<0, 4, 0>(x, row, out);
    }
    template <int rows>
    void dot_second(const int8_t* x, const BlockFactors* row, F (&out)[rows]) const {
        dot_from<4, 4, 1>(x, row, out);
    }
    // Without an offset.
    template <int rows>
    void dot_only(const int8_t* x, const BlockFactors* row, F (&out)[rows]) const {
        dot_from<0, 8, -1>(x, row, out);
    }

private:
    template <int first, int count, int offset, int rows>
    void dot_from(const int8_t* x, const BlockFactors* row, F (&out)[rows]) const {
        int32_t offsets[rows] = {};
        for (int r = 0; offset >= 0 && r < rows; ++r) {
            offsets[r] = row[r].offsets[offset < 0 ? 0 : offset];
        }
        constexpr int bytes_of_word = kRowPairs && rows == 2 ? 8 : 4;
        dot_words<bits, count, rows>(words + first, x + bytes_of_word * first, offsets, out);
    }

    // Bits 4 and up of each word, `width` of them at a time from `high`.
    template <int width, int count, int i = 0>
    static void add_bits(Bytes* words, Bytes high) {
        words[i] = words[i] | (shift<4 - width * i>(high) & Bytes::set(width == 1 ? 0x10 : 0x30));
        if constexpr (i + 1 < count) {
            add_bits<width, count, i + 1>(words, high);
        }
    }
};

inline F load_part(const uint8_t* halves, int part) {
    return F::load_f16(reinterpret_cast<const uint16_t*>(halves) + part * F::lanes);
}

template <int rows>
inline void add_scaled(F* sum, F scale, const BlockFactors* row, const F (&dot)[rows]) {
    for (int r = 0; r < rows; ++r) {
        sum[r] = fma(scale * F::set(row[r].scale), dot[r], sum[r]);
    }
}

// The blocks of the packings. Each covers kBlock inputs and adds its products with some rows to their sums; `Header` is
// what several in a row share.
struct NoHeader {
    static constexpr int bytes = 0, blocks = 1;
    NoHeader(const uint8_t*, int) {}
};

// weight = scale * (quant - zero point)
template <int bits>
struct OffsetBlock {
    using Header = NoHeader;
    static constexpr int bytes = 2 * kLanes + Quants<bits>::bytes;
    F scale;
    Quants<bits> quants;

    OffsetBlock(const Header&, const uint8_t* data, int part)
        : scale(load_part(data, part)), quants(data + 2 * kLanes, part) {}
    template <int rows>
    void add(F* sum, const int8_t* x, const BlockFactors* row) const {
        F dot[rows];
        quants.dot(x, row, dot);
        add_scaled(sum, scale, row, dot);
    }
};

// weight = scale * quant + minimum
template <int bits>
struct WithMinimum {
    F scale, minimum;
    Quants<bits> quants;

    template <int rows>
    void add(F* sum, const int8_t* x, const BlockFactors* row) const {
        F dot[rows];
        quants.dot_only(x, row, dot);
        for (int r = 0; r < rows; ++r) {
            sum[r] = fma(minimum, F::set(row[r].sum), sum[r]);
        }
        add_scaled(sum, scale, row, dot);
    }
};

template <int bits>
struct MinimumBlock : WithMinimum<bits> {
    using Header = NoHeader;
    static constexpr int bytes = 4 * kLanes + Quants<bits>::bytes;

    MinimumBlock(const Header&, const uint8_t* data, int part)
        : WithMinimum<bits>{load_part(data, part), load_part(data + 2 * kLanes, part), {data + 4 * kLanes, part}} {}
};

// scale = header scale * block scale, and the same for the minimum
template <int bits>
struct SuperMinimumBlock : WithMinimum<bits> {
    struct Header {
        static constexpr int bytes = 4 * kLanes, blocks = 8;
        F scale, minus_minimum;
        Header(const uint8_t* data, int part)
            : scale(load_part(data, part)), minus_minimum(F::set(-1) * load_part(data + 2 * kLanes, part)) {}
    };
    static constexpr int bytes = 2 * kLanes + Quants<bits>::bytes;

    SuperMinimumBlock(const Header& header, const uint8_t* data, int part)
        : WithMinimum<bits>{header.scale * F::load_u8(data + part * F::lanes),
                            header.minus_minimum * F::load_u8(data + kLanes + part * F::lanes),
                            {data + 2 * kLanes, part}} {}
};

// weight = header scale * scale of the half block * (quant - zero point)
struct HalvesBlock {
    struct Header {
        static constexpr int bytes = 2 * kLanes, blocks = 8;
        F scale;
        Header(const uint8_t* data, int part) : scale(load_part(data, part)) {}
    };
    static constexpr int bytes = 2 * kLanes + Quants<6>::bytes;
    F scale, first, second;
    Quants<6> quants;

    HalvesBlock(const Header& header, const uint8_t* data, int part)
        : scale(header.scale),
          first(F::load_i8(data + part * F::lanes)),
          second(F::load_i8(data + kLanes + part * F::lanes)),
          quants(data + 2 * kLanes, part) {}
    template <int rows>
    void add(F* sum, const int8_t* x, const BlockFactors* row) const {
        F dot[rows], second_dot[rows];
        quants.dot_first(x, row, dot);
        quants.dot_second(x, row, second_dot);
        for (int r = 0; r < rows; ++r) {
            // Exact: both products and their sum are integers below 2^24.
            dot[r] = fma(second_dot[r], second, dot[r] * first);
        }
        add_scaled(sum, scale, row, dot);
    }
};

uint64_t dots(int rounds) {
    constexpr int rows = 8, together = kRowsTogether;
    alignas(64) uint8_t weights[Quants<4>::bytes] = {};
    alignas(64) int8_t x[rows * kBlock] = {};
    const BlockFactors factors[together] = {};
    const Quants<4> quants(weights, 0);
    F sums[rows];
    for (F& sum : sums) {
        sum = F::set(0);
    }
    for (int round = 0; round < rounds; ++round) {
        // The compiler must not find out that every round is the same.
        asm volatile("" : : "r"(x) : "memory");
#pragma GCC unroll 8
        for (int r = 0; r < rows; r += together) {
            F dot[together];
            quants.dot_only(x + r * kBlock, factors, dot);
            for (int i = 0; i < together; ++i) {
                sums[r + i] = sums[r + i] + dot[i];
            }
        }
    }
    float total = 0;
    for (const F sum : sums) {
        float lanes[F::lanes];
        sum.store(lanes);
        total += lanes[0];
    }
    asm volatile("" : : "m"(total));
    return uint64_t(rounds) * rows * kBlock * F::lanes;
}
