// The arithmetic of kernel.h, written once over the vector type `F` that the including file defines for its instruction
// set, beside its integer blocks and register budget. Included inside that file's own anonymous namespace, and without
// the standard library's inline functions: code compiled for a newer CPU must never be the copy the linker keeps for
// all.
#pragma once

#include "attention.h"
#include "blocks.h"
#include "matmul.h"
#include "rows.h"
#include "vector.h"

// The table of all that these define.
constexpr Kernel make_kernel(const char* name, bool (*supported)()) {
    return {
        name,
        supported,
        kRowPairs,
        {float_matmul<WeightF32>, float_matmul<WeightF16>, float_matmul<WeightBf16>, integer_matmul<OffsetBlock<8>>,
         integer_matmul<OffsetBlock<4>>, integer_matmul<MinimumBlock<4>>, integer_matmul<OffsetBlock<5>>,
         integer_matmul<MinimumBlock<5>>, integer_matmul<SuperMinimumBlock<4>>, integer_matmul<SuperMinimumBlock<5>>,
         integer_matmul<HalvesBlock>},
        layer_norm,
        rms_norm,
        rotate,
        quantize,
        to_f16,
        attend,
        run_max,
        sum_exp,
        read_bytes,
        dots,
    };
}
