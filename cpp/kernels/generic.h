// The arithmetic of kernel.h, written once over the vector type `F` that the including file defines for its instruction
// set, beside its integer blocks and register budget. Included inside that file's own anonymous namespace, and without
// the standard library's inline functions: code compiled for a newer CPU must never be the copy the linker keeps for
// all.
#pragma once

#include "attention.h"
#include "blocks.h"
#include "delta.h"
#include "matmul.h"
#include "noise.h"
#include "rows.h"
#include "vector.h"

// The product of a packing, read by blocks of the size that packing.cpp writes.
template <class Block, Packing packing, class PanelBlock = Block>
constexpr auto matmul_of() {
    constexpr Layout layout = layout_of(packing);
    static_assert(Block::bytes == layout.block_bytes, "a block");
    static_assert(Block::Header::bytes == layout.header_bytes && Block::Header::blocks == layout.blocks, "a header");
    return integer_matmul<Block, PanelBlock>;
}

template <template <class> class Block, class Quants, Packing packing>
constexpr auto bytes_matmul_of() {
    return matmul_of<Block<Quants>, packing, Block<ManyRowsQuants<Quants>>>();
}

// The table of all that these define; without `supported`, for any CPU.
constexpr Kernel make_kernel(const char* name, bool (*supported)() = [] { return true; }) {
    return {
        name,
        supported,
        kRowPairs,
        {float_matmul<WeightF32>, float_matmul<WeightF16>, float_matmul<WeightBf16>,
         bytes_matmul_of<OffsetBlock, Quants<8>, Packing::q8_0>(), matmul_of<OffsetBlock<Quants<4>>, Packing::q4_0>(),
         matmul_of<MinimumBlock<4>, Packing::q4_1>(), matmul_of<OffsetBlock<Quants<5>>, Packing::q5_0>(),
         matmul_of<MinimumBlock<5>, Packing::q5_1>(), matmul_of<SuperMinimumBlock<4>, Packing::q4_k>(),
         matmul_of<SuperMinimumBlock<5>, Packing::q5_k>(), matmul_of<HalvesBlock<6>, Packing::q6_k>(),
         bytes_matmul_of<OffsetBlock, TableQuants<kIq4Values, 8>, Packing::iq4_nl>(),
         bytes_matmul_of<SuperOffsetBlock, TableQuants<kIq4Values, 8>, Packing::iq4_xs>(),
         matmul_of<ExponentBlock<TableQuants<kFp4Values, 5>>, Packing::mxfp4>(),
         matmul_of<HalvesBlock<3>, Packing::q3_k>(), matmul_of<HalvesMinimumBlock<2>, Packing::q2_k>()},
        layer_norm,
        rms_norm,
        rotate,
        convolve,
        delta,
        open,
        quantize,
        to_f16,
        attend,
        fold,
        run_max,
        sum_exp,
        noise,
        run_noise,
        read_bytes,
        dots,
    };
}
