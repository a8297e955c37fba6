// Quantized weights as packing.h lays them out, a block at a time. A part of generic.h.
#pragma once

#include "vector.h"

// The unsigned weights, below 2^bits, of one unit and block: words[i] has inputs 4 i to 4 i + 3 of every lane.
template <int bits>
struct Words {
    static constexpr int num_bits = bits;
    static constexpr int value_bytes = kBlock;  // of a row's block as dot_words reads it
    Bytes words[8];

    static void copy_values(const int8_t* from, int rows, int8_t* to) { __builtin_memcpy(to, from, rows * kBlock); }
};

// As they are stored: the lower four bits of words i and i + 4 in one vector, or the lower two of words 4 i to 4 i + 3.
// One more bit above those is a vector of bytes, bit i for words[i]; two more are two, with two bits for each word.
template <int bits>
struct Quants : Words<bits> {
    static constexpr int bytes = kLanes * kBlock / 8 * bits;
    using Words<bits>::words;

    Quants() = default;
    Quants(const uint8_t* data, int part) {
        data += part * F::lanes * 4;
        if constexpr (bits == 8) {
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                words[i] = Bytes::load(data + 4 * kLanes * i);
            }
        } else if constexpr (bits >= 4) {
            const Bytes nibble = Bytes::set(15);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const Bytes both = Bytes::load(data + 4 * kLanes * i);
                words[i] = both & nibble;
                words[i + 4] = shift<-4>(both) & nibble;
            }
            if constexpr (bits == 5) {
                add_bits<1, 8, 4>(words, Bytes::load(data + 16 * kLanes));
            } else if constexpr (bits == 6) {
                add_bits<2, 4, 4>(words, Bytes::load(data + 16 * kLanes));
                add_bits<2, 4, 4>(words + 4, Bytes::load(data + 20 * kLanes));
            }
        } else {
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                words[i] = Bytes::set(0);
            }
            add_bits<2, 4, 0>(words, Bytes::load(data));
            add_bits<2, 4, 0>(words + 4, Bytes::load(data + 4 * kLanes));
            if constexpr (bits == 3) {
                add_bits<1, 8, 2>(words, Bytes::load(data + 8 * kLanes));
            }
        }
    }

private:
    // Bits `at` and up of each word, `width` of them at a time from `from`.
    template <int width, int count, int at, int i = 0>
    static void add_bits(Bytes* words, Bytes from) {
        words[i] = words[i] | (shift<at - width * i>(from) & Bytes::set((width == 1 ? 1 : 3) << at));
        if constexpr (i + 1 < count) {
            add_bits<width, count, at, i + 1>(words, from);
        }
    }
};

// Four bits that stand for bytes of a table, below 2^bits.
template <const uint8_t (&table)[16], int bits>
struct TableQuants : Words<bits> {
    static constexpr int bytes = Quants<4>::bytes;
    using Words<bits>::words;

    TableQuants() = default;
    TableQuants(const uint8_t* data, int part) {
        const Quants<4> indices(data, part);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            words[i] = lookup(table, indices.words[i]);
        }
    }
};

inline F load_part(const uint8_t* halves, int part) {
    return F::load_f16(reinterpret_cast<const uint16_t*>(halves) + part * F::lanes);
}

// Of `rows` rows and a block's `units` units from `parts` on: the sums over 32 inputs, or over the 16 of a half, each
// with the row's offset of that number, or without for -1; dot[row][unit].
template <int rows, int units, int offset, int first = 0, int count = 8, class Block>
inline void dot_parts(const Block* parts, const int8_t* x, const BlockFactors* row, F (&dot)[rows][units]) {
    constexpr int bytes_of_word = kRowPairs && rows == 2 ? 8 : 4;
    const Bytes* words[units];
    for (int u = 0; u < units; ++u) {
        words[u] = parts[u].quants.words + first;
    }
    int32_t offsets[rows] = {};
    for (int r = 0; offset >= 0 && r < rows; ++r) {
        offsets[r] = row[r].offsets[offset < 0 ? 0 : offset];
    }
    dot_words<decltype(Block::quants)::num_bits, count>(words, x + bytes_of_word * first, offsets, dot);
}

template <int rows, int units, class Block>
inline void add_scaled(const Block* parts, F* sum, const BlockFactors* row, const F (&dot)[rows][units]) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
        for (int u = 0; u < units; ++u) {
            F& to = sum[r * units + u];
            to = fma(parts[u].scale * F::set(row[r].scale), dot[r][u], to);
        }
    }
}

// The blocks of the packings. Each covers kBlock inputs of a unit; `add` takes those of some units side by side and
// adds their products with some rows to sum[row][unit]. `Header` is what several in a row share.
struct NoHeader {
    static constexpr int bytes = 0, blocks = 1;
    NoHeader(const uint8_t*, int) {}
};

// F16 numbers of which the blocks' are multiples.
struct ScaleHeader {
    static constexpr int bytes = 2 * kLanes, blocks = 8;
    F scale;
    ScaleHeader(const uint8_t* data, int part) : scale(load_part(data, part)) {}
};

struct MinimumHeader {
    static constexpr int bytes = 4 * kLanes, blocks = 8;
    F scale, minus_minimum;
    MinimumHeader(const uint8_t* data, int part)
        : scale(load_part(data, part)), minus_minimum(F::set(-1) * load_part(data + 2 * kLanes, part)) {}
};

// weight = scale * (quant - zero point)
template <class Quants>
struct WithOffset {
    F scale;
    Quants quants;

    template <int rows, int units, class Block>
    static void add(const Block* parts, F* sum, const int8_t* x, const BlockFactors* row) {
        F dot[rows][units];
        dot_parts<rows, units, 0>(parts, x, row, dot);
        add_scaled(parts, sum, row, dot);
    }
};

template <class Quants>
struct OffsetBlock : WithOffset<Quants> {
    using Header = NoHeader;
    static constexpr int bytes = 2 * kLanes + Quants::bytes;

    OffsetBlock() = default;
    OffsetBlock(const Header&, const uint8_t* data, int part)
        : WithOffset<Quants>{load_part(data, part), {data + 2 * kLanes, part}} {}
};

// scale = header scale * block scale
template <class Quants>
struct SuperOffsetBlock : WithOffset<Quants> {
    using Header = ScaleHeader;
    static constexpr int bytes = kLanes + Quants::bytes;

    SuperOffsetBlock() = default;
    SuperOffsetBlock(const Header& header, const uint8_t* data, int part)
        : WithOffset<Quants>{header.scale * F::load_i8(data + part * F::lanes), {data + kLanes, part}} {}
};

// scale = 2^(exponent - 128), perhaps a subnormal number
template <class Quants>
struct ExponentBlock : WithOffset<Quants> {
    using Header = NoHeader;
    static constexpr int bytes = kLanes + Quants::bytes;

    ExponentBlock() = default;
    ExponentBlock(const Header&, const uint8_t* data, int part)
        : WithOffset<Quants>{power(F::load_u8(data + part * F::lanes) - F::set(128)), {data + kLanes, part}} {}

private:
    static F power(F exponent) {
        const F normal = max(exponent, F::set(-126));
        return exp2_int(normal) * exp2_int(exponent - normal);
    }
};

// weight = scale * quant + minimum
template <int bits>
struct WithMinimum {
    F scale, minimum;
    Quants<bits> quants;

    template <int rows, int units, class Block>
    static void add(const Block* parts, F* sum, const int8_t* x, const BlockFactors* row) {
        F dot[rows][units];
        dot_parts<rows, units, -1>(parts, x, row, dot);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
            for (int u = 0; u < units; ++u) {
                F& to = sum[r * units + u];
                to = fma(parts[u].minimum, F::set(row[r].sum), to);
            }
        }
        add_scaled(parts, sum, row, dot);
    }
};

template <int bits>
struct MinimumBlock : WithMinimum<bits> {
    using Header = NoHeader;
    static constexpr int bytes = 4 * kLanes + Quants<bits>::bytes;

    MinimumBlock() = default;
    MinimumBlock(const Header&, const uint8_t* data, int part)
        : WithMinimum<bits>{load_part(data, part), load_part(data + 2 * kLanes, part), {data + 4 * kLanes, part}} {}
};

// scale = header scale * block scale, and the same for the minimum
template <int bits>
struct SuperMinimumBlock : WithMinimum<bits> {
    using Header = MinimumHeader;
    static constexpr int bytes = 2 * kLanes + Quants<bits>::bytes;

    SuperMinimumBlock() = default;
    SuperMinimumBlock(const Header& header, const uint8_t* data, int part)
        : WithMinimum<bits>{header.scale * F::load_u8(data + part * F::lanes),
                            header.minus_minimum * F::load_u8(data + kLanes + part * F::lanes),
                            {data + 2 * kLanes, part}} {}
};

// weight = header scale * scale of the half block * (quant - zero point)
template <int bits>
struct HalvesBlock {
    using Header = ScaleHeader;
    static constexpr int bytes = 2 * kLanes + Quants<bits>::bytes;
    F scale, first, second;
    Quants<bits> quants;

    HalvesBlock() = default;
    HalvesBlock(const Header& header, const uint8_t* data, int part)
        : scale(header.scale),
          first(F::load_i8(data + part * F::lanes)),
          second(F::load_i8(data + kLanes + part * F::lanes)),
          quants(data + 2 * kLanes, part) {}
    template <int rows, int units, class Block>
    static void add(const Block* parts, F* sum, const int8_t* x, const BlockFactors* row) {
        F dot[rows][units], second_dot[rows][units];
        dot_parts<rows, units, 0, 0, 4>(parts, x, row, dot);
        dot_parts<rows, units, 1, 4, 4>(parts, x, row, second_dot);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
            for (int u = 0; u < units; ++u) {
                // Exact: both products and their sum are integers below 2^24.
                dot[r][u] = fma(second_dot[r][u], parts[u].second, dot[r][u] * parts[u].first);
            }
        }
        add_scaled(parts, sum, row, dot);
    }
};

// weight = header scale * scale of the half block * quant - header minimum * minimum of the half block
template <int bits>
struct HalvesMinimumBlock {
    using Header = MinimumHeader;
    static constexpr int bytes = 2 * kLanes + Quants<bits>::bytes;
    F scale;
    F scales[2], minima[2];
    Quants<bits> quants;

    HalvesMinimumBlock() = default;
    HalvesMinimumBlock(const Header& header, const uint8_t* data, int part)
        : scale(header.scale), quants(data + 2 * kLanes, part) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            // The scale in the low and the minimum in the high half of a byte.
            const F both = F::load_u8(data + half * kLanes + part * F::lanes);
            const F high = round((both - F::set(7.5f)) * F::set(0.0625f));
            minima[half] = header.minus_minimum * high;
            scales[half] = fma(high, F::set(-16), both);
        }
    }
    template <int rows, int units, class Block>
    static void add(const Block* parts, F* sum, const int8_t* x, const BlockFactors* row) {
        F dot[rows][units], second_dot[rows][units];
        dot_parts<rows, units, -1, 0, 4>(parts, x, row, dot);
        dot_parts<rows, units, -1, 4, 4>(parts, x, row, second_dot);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
            for (int u = 0; u < units; ++u) {
                const Block& part = parts[u];
                F& to = sum[r * units + u];
                // Exact, as above.
                dot[r][u] = fma(second_dot[r][u], part.scales[1], dot[r][u] * part.scales[0]);
                to = fma(part.minima[0], F::set(row[r].sums[0]), to);
                to = fma(part.minima[1], F::set(row[r].sums[1]), to);
            }
        }
        add_scaled(parts, sum, row, dot);
    }
};

[[gnu::flatten]] uint64_t dots(int rounds) {
    constexpr int rows = 8, together = kRowsTogether;
    alignas(64) uint8_t weights[Quants<4>::bytes] = {};
    alignas(64) int8_t x[rows * kBlock] = {};
    const BlockFactors factors[together] = {};
    // The compiler must not know what these hold.
    asm volatile("" : : "r"(weights) : "memory");
    const WithOffset<Quants<4>> part = {F::set(1), {weights, 0}};
    F sums[rows];
    for (F& sum : sums) {
        sum = F::set(0);
    }
    for (int round = 0; round < rounds; ++round) {
        // Nor that every round is the same.
        asm volatile("" : : "r"(x) : "memory");
#pragma GCC unroll 8
        for (int r = 0; r < rows; r += together) {
            F dot[together][1];
            dot_parts<together, 1, -1>(&part, x + r * kBlock, factors, dot);
            for (int i = 0; i < together; ++i) {
                sums[r + i] = sums[r + i] + dot[i][0];
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
