// Attention of tree rows: each row sees the committed cells, its own ancestors, and itself.
#pragma once

#include "gpt2.h"
#include "kv_cache.h"

namespace pystaged {

struct Pass;

// Writes the keys and values of qkv[rows][3 * width, padded] into the cache's cells of this pass, then attends for the
// rows from `first_row` on into out[rows - first_row][padded width], and into `quantized` where that is given (heads
// must be a multiple of kBlock wide). `scratch` holds attention_scratch() floats per thread.
void tree_attention(const Gpt2& model, KvCache& cache, int layer, const Pass& pass, const float* qkv, int first_row,
                    float* out, const QuantizedRows* quantized, float* scratch);

}  // namespace pystaged
