// Matrix products. A unit is F::lanes outputs: a whole group, or a part of one where vectors are shorter. A part of
// generic.h.
#pragma once

#include "blocks.h"

inline F activate(F x, Activation activation) {
    switch (activation) {
        case Activation::gelu: return gelu(x);
        case Activation::silu: return silu(x);
        case Activation::clamped_silu: return clamped_silu(x);
        case Activation::clamped_linear: return clamped_linear(x);
        default: return squared_relu(x);
    }
}

// Of a unit and `rows` rows from `row` on, whose sums lie `step` apart. A function of its own, because there are
// hundreds of tiles.
[[gnu::noinline]] void finish(const F* sums, int step, int rows, const Epilogue& e, int row, int unit) {
    const bool opened = e.gated && unit / kUnits % 2 == 1;  // its gate lies in `out` already
    const size_t from = size_t(unit) * F::lanes;
    const size_t column = e.gated ? from - size_t(unit / kUnits + 1) / 2 * kLanes : from;
    for (int r = 0; r < rows; ++r) {
        F sum = sums[r * step];
        if (e.bias) {
            sum = sum + F::load(e.bias + from);
        }
        if (e.activation != Activation::none && !opened) {
            sum = activate(sum, e.activation);
        } else if (opened && e.activation == Activation::clamped_silu) {
            sum = activate(sum, Activation::clamped_linear);
        }
        const size_t at = (row + r) * e.stride + column;
        if (e.gated && !opened) {
            sum.store(e.out + at);
            continue;
        }
        if (opened || e.gate) {
            sum = F::load((opened ? e.out : e.gate) + at) * sum;
        }
        sum = sum * F::set(e.scale);
        if (e.softcap > 0) {
            sum = softcapped(sum, e.softcap);
        }
        if (e.residual) {
            sum = sum + F::load(e.residual + at);
        }
        sum.store(e.out + at);
    }
}

// Every `step`th line of what comes kPrefetchBytes later.
inline void prefetch(const uint8_t* data, int bytes, int first, int step) {
    if constexpr (kPrefetchBytes > 0) {
        for (int line = first; 64 * line < bytes; line += step) {
            __builtin_prefetch(data + kPrefetchBytes + 64 * line, 0, kPrefetchLocality);
        }
    }
}

// Adds a block of every row to its sums.
template <int rows, int units, class Block>
inline void add_rows(const Block* parts, F* sum, const int8_t* quants, const BlockFactors* factors) {
    constexpr int left = rows % kRowsTogether, whole = rows - left;
#pragma GCC unroll 16
    for (int r = 0; r < whole; r += kRowsTogether) {
        Block::template add<kRowsTogether, units>(parts, sum + r * units, quants + r * kBlock, factors + r);
    }
    if constexpr (left > 0) {
        Block::template add<left, units>(parts, sum + whole * units, quants + whole * kBlock, factors + whole);
    }
}

// The same for n rows and one unit.
template <class Block>
inline void add_any_rows(const Block& block, F* sum, const int8_t* quants, const BlockFactors* factors, int n) {
    for (; n >= 4; n -= 4) {
        add_rows<4, 1>(&block, sum, quants, factors);
        sum += 4;
        quants += 4 * kBlock;
        factors += 4;
    }
    switch (n) {
        case 1: return add_rows<1, 1>(&block, sum, quants, factors);
        case 2: return add_rows<2, 1>(&block, sum, quants, factors);
        case 3: return add_rows<3, 1>(&block, sum, quants, factors);
    }
}

// A group times `rows` rows of int8 activations, or n of them where `rows` is 0; the weights of a block are loaded once
// for all of them. Units take turns after a few blocks, so that weights come from memory evenly and once. Flattened, as
// Panel::multiply is: in a file of so many tiles the compiler runs out of the growth that it allows itself.
template <class Block, int rows>
[[gnu::flatten]] void integer_tile(const uint8_t* group, int g, const Activations& x, int row, int n,
                                   const Epilogue& e) {
    using Header = typename Block::Header;
    constexpr int turn = kUnits == 1 ? Header::blocks : 8;
    static_assert(Header::blocks == 1 || Header::blocks == turn, "a turn takes one header");
    const int8_t* quants = x.quantized.quants + size_t(row) * kBlock;
    const BlockFactors* factors = x.quantized.factors + row;
    F sums[kUnits][rows > 0 ? rows : kIntegerRows];
    clear(sums);
    for (int left = x.cols / kBlock; left > 0; left -= turn) {
        const int blocks = turn > Header::blocks && left < turn ? left : turn;
        for (int part = 0; part < kUnits; ++part) {
            F sum[rows > 0 ? rows : 1];
#pragma GCC unroll 16
            for (int r = 0; r < rows; ++r) {
                sum[r] = sums[part][r];
            }
            const Header header(group, part);
            prefetch(group, Header::bytes, part, kUnits);
            const uint8_t* data = group + Header::bytes;
            const int8_t* q = quants;
            const BlockFactors* f = factors;
            for (int b = 0; b < blocks; ++b) {
                const Block block(header, data, part);
                prefetch(data, Block::bytes, part, kUnits);
                if constexpr (rows > 0) {
                    add_rows<rows, 1>(&block, sum, q, f);
                } else {
                    add_any_rows(block, sums[part], q, f, n);
                }
                data += Block::bytes;
                q += size_t(x.quantized.n) * kBlock;
                f += x.quantized.n;
            }
#pragma GCC unroll 16
            for (int r = 0; r < rows; ++r) {
                sums[part][r] = sum[r];
            }
        }
        group += Header::bytes + blocks * Block::bytes;
        quants += size_t(blocks) * x.quantized.n * kBlock;
        factors += size_t(blocks) * x.quantized.n;
    }
    for (int part = 0; part < kUnits; ++part) {
        finish(sums[part], 1, n, e, row, g * kUnits + part);
    }
}

template <class Block>
inline void integer_rows(const uint8_t* group, int g, const Activations& x, int row, int n, const Epilogue& e) {
    for (; n > kIntegerRows; n -= kIntegerRows, row += kIntegerRows) {
        integer_tile<Block, 0>(group, g, x, row, kIntegerRows, e);
    }
    switch (n) {
        case 1: return integer_tile<Block, 1>(group, g, x, row, n, e);
        case 2: return integer_tile<Block, 2>(group, g, x, row, n, e);
        case 3: return integer_tile<Block, 3>(group, g, x, row, n, e);
        case 4: return integer_tile<Block, 4>(group, g, x, row, n, e);
        case 6: return integer_tile<Block, 6>(group, g, x, row, n, e);
        case 8: return integer_tile<Block, 8>(group, g, x, row, n, e);
        default: return integer_tile<Block, 0>(group, g, x, row, n, e);
    }
}

// Some blocks of a group and of rows as they are multiplied with each other: the weights of all units unpacked, the
// rows of a tile side by side.
constexpr int kPanelBlocks = 8;
constexpr int kMostPanelRows = 64;
constexpr int kPanelGroups = 8;  // whose sums stay in the cache meanwhile

template <class Block>
struct Panel {
    using Quants = decltype(Block::quants);

    struct Unpacked : Block {
        using Block::Block;
        static void* operator new(size_t, void* at) { return at; }  // the library's would be for the linker, too
    };
    Unpacked weights[kPanelBlocks][kUnits];
    alignas(
        64) int8_t quants[kMostPanelRows * kPanelBlocks * Quants::value_bytes];  // [tiles][blocks][rows][value bytes]
    BlockFactors factors[kMostPanelRows * kPanelBlocks];                         // [tiles][blocks][rows]
    int blocks;

    [[gnu::noinline]] void take_weights(const uint8_t* data) {
        using Header = typename Block::Header;
        for (int part = 0; part < kUnits; ++part) {
            const Header header(data, part);
            for (int b = 0; b < blocks; ++b) {
                // In place: copied, a large block takes longer than unpacking it did.
                new (&weights[b][part]) Unpacked(header, data + Header::bytes + b * Block::bytes, part);
            }
        }
    }

    [[gnu::noinline]] void take_rows(const QuantizedRows& x, int n) {
        for (int b = 0; b < blocks; ++b) {
            for (int row = 0; row < n; row += kPanelRows) {
                const size_t at = row * kPanelBlocks + b * kPanelRows, from = size_t(b) * x.n + row;
                __builtin_memcpy(factors + at, x.factors + from, kPanelRows * sizeof(BlockFactors));
                Quants::copy_values(x.quants + from * kBlock, kPanelRows, quants + at * Quants::value_bytes);
            }
        }
    }

    // Adds to sums[row][unit] the products with the tile that begins at `row`.
    [[gnu::noinline, gnu::flatten]] void multiply(int row, F* sums) const {
        for (int unit = 0; unit < kUnits; unit += kPanelUnits) {
            F sum[kPanelRows * kPanelUnits];
#pragma GCC unroll 16
            for (int i = 0; i < kPanelRows * kPanelUnits; ++i) {
                sum[i] = sums[i / kPanelUnits * kUnits + unit + i % kPanelUnits];
            }
            const int8_t* q = quants + row * kPanelBlocks * Quants::value_bytes;
            const BlockFactors* f = factors + row * kPanelBlocks;
            for (int b = 0; b < blocks; ++b) {
                add_rows<kPanelRows, kPanelUnits>(&weights[b][unit], sum, q, f);
                q += kPanelRows * Quants::value_bytes;
                f += kPanelRows;
            }
#pragma GCC unroll 16
            for (int i = 0; i < kPanelRows * kPanelUnits; ++i) {
                sums[i / kPanelUnits * kUnits + unit + i % kPanelUnits] = sum[i];
            }
        }
    }
};

// Groups times many rows, a multiple of kPanelRows. Weights are unpacked once for all of them, and the rows of a panel
// stay in the cache for all groups.
template <class Block>
void integer_panels(const uint8_t* weights, int first, int last, const Activations& x, int row, int n,
                    const Epilogue& e) {
    using Header = typename Block::Header;
    const int blocks = x.cols / kBlock;
    const size_t group_bytes = size_t(blocks) * Block::bytes + size_t(blocks / Header::blocks) * Header::bytes;
    constexpr size_t panel_bytes = kPanelBlocks * Block::bytes + kPanelBlocks / Header::blocks * Header::bytes;
    Panel<Block> panel;
    F sums[kPanelGroups][kMostPanelRows][kUnits];
    for (int g = 0; g < last - first; ++g) {
        clear(sums[g]);
    }
    for (int b = 0; b < blocks; b += kPanelBlocks) {
        panel.blocks = blocks - b < kPanelBlocks ? blocks - b : kPanelBlocks;
        panel.take_rows(from_row(from_block(x.quantized, b), row), n);
        for (int g = first; g < last; ++g) {
            const uint8_t* data = weights + g * group_bytes + b / kPanelBlocks * panel_bytes;
            panel.take_weights(data);
            const uint8_t* next = g + 1 < last ? data + group_bytes : data - (g - first) * group_bytes + panel_bytes;
            for (int r = 0; r < n; r += kPanelRows) {
                prefetch(next - kPrefetchBytes, panel_bytes, r / kPanelRows, n / kPanelRows);
                panel.multiply(r, sums[g - first][r]);
            }
        }
    }
    for (int g = first; g < last; ++g) {
        for (int part = 0; part < kUnits; ++part) {
            finish(&sums[g - first][0][part], kUnits, n, e, row, g * kUnits + part);
        }
    }
}

template <class Block, class PanelBlock = Block>
void integer_matmul(const uint8_t* weights, int first, int last, const Activations& x, const Epilogue& e) {
    using Header = typename Block::Header;
    const size_t group_bytes =
        size_t(x.cols / kBlock) * Block::bytes + size_t(x.cols / kBlock / Header::blocks) * Header::bytes;
    const int whole = x.quantized.n < kPanelsFrom ? 0 : x.n / kPanelRows * kPanelRows;
    for (int row = 0; row < whole; row += kMostPanelRows) {
        const int n = whole - row < kMostPanelRows ? whole - row : kMostPanelRows;
        for (int g = first; g < last; g += kPanelGroups) {
            integer_panels<PanelBlock>(weights, g, last - g < kPanelGroups ? last : g + kPanelGroups, x, row, n, e);
        }
    }
    for (int g = first; whole < x.n && g < last; ++g) {
        integer_rows<Block>(weights + g * group_bytes, g, x, whole, x.n - whole, e);
    }
}

// `units` units times `rows` rows of float activations: enough sums in flight to hide the latency of a multiply-add.
template <class Weight, int units, int rows>
void float_tile(const typename Weight::type* weights, int unit, const Activations& x, int row, const Epilogue& e) {
    const typename Weight::type* base[units];
    F sum[units][rows];
    clear(sum);
#pragma GCC unroll 8
    for (int u = 0; u < units; ++u) {
        base[u] = weights + size_t((unit + u) / kUnits) * x.cols * kLanes + (unit + u) % kUnits * F::lanes;
    }
    const float* values = x.values + size_t(row) * x.cols;
    for (int i = 0; i < x.cols; ++i) {
        F w[units];
#pragma GCC unroll 8
        for (int u = 0; u < units; ++u) {
            w[u] = Weight::load(base[u] + size_t(i) * kLanes);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            const F value = F::set(values[size_t(r) * x.cols + i]);
#pragma GCC unroll 8
            for (int u = 0; u < units; ++u) {
                sum[u][r] = fma(w[u], value, sum[u][r]);
            }
        }
    }
#pragma GCC unroll 8
    for (int u = 0; u < units; ++u) {
        finish(sum[u], 1, rows, e, row, unit + u);
    }
}

template <class Weight, int rows>
void float_rows(const typename Weight::type* weights, int first, int last, const Activations& x, int row, int n,
                const Epilogue& e) {
    const auto tile = [&](int at) {
        constexpr int units = kFloatSums / rows > 4 ? 4 : (kFloatSums / rows > 0 ? kFloatSums / rows : 1);
        int unit = first;
        for (; unit + units <= last; unit += units) {
            float_tile<Weight, units, rows>(weights, unit, x, at, e);
        }
        for (; unit < last; ++unit) {
            float_tile<Weight, 1, rows>(weights, unit, x, at, e);
        }
    };
    if constexpr (rows == kFloatRows) {
        for (; n >= rows; n -= rows, row += rows) {
            tile(row);
        }
    } else if (n == rows) {
        tile(row);
        return;
    }
    if constexpr (rows > 1) {
        float_rows<Weight, rows - 1>(weights, first, last, x, row, n, e);
    }
}

template <class Weight>
void float_matmul(const uint8_t* weights, int first, int last, const Activations& x, const Epilogue& e) {
    const auto* w = reinterpret_cast<const typename Weight::type*>(weights);
    float_rows<Weight, kFloatRows>(w, first * kUnits, last * kUnits, x, 0, x.n, e);
}

struct WeightF32 {
    using type = float;
    static F load(const float* p) { return F::load(p); }
};
struct WeightF16 {
    using type = uint16_t;
    static F load(const uint16_t* p) { return F::load_f16(p); }
};
struct WeightBf16 {
    using type = uint16_t;
    static F load(const uint16_t* p) { return F::load_bf16(p); }
};
