#include "tree_attention.h"

#include <algorithm>

#include "graph.h"
#include "thread_pool.h"

namespace pystaged {

void tree_attention(const Gpt2& model, KvCache& cache, int layer, const Pass& pass, const float* qkv, int first_row,
                    float* out, const QuantizedRows* quantized, float* scratch) {
    const Gpt2Shape& shape = model.shape();
    const int head_dim = shape.head_dim(), width = shape.width, num_out = pass.num_rows - first_row;
    const size_t qkv_stride = padded(3 * width, kBlock), out_stride = shape.padded_width();
    // A head is independent of every other, its cells included: one join serves both halves.
    ThreadPool::shared().run(shape.num_heads, model.num_threads(), [&](int head, int worker) {
        for (int i = 0; i < pass.num_rows; ++i) {
            const float* row = qkv + i * qkv_stride + size_t(head) * head_dim;
            cache.store(model.kernel(), layer, head, pass.first_cell + i, row + width, row + 2 * width);
        }
        HeadPass head_pass;
        head_pass.n = num_out;
        head_pass.head_dim = head_dim;
        head_pass.num_cells = pass.first_cell + pass.num_rows;
        head_pass.rows = pass.contexts + first_row;
        head_pass.q = qkv + first_row * qkv_stride + size_t(head) * head_dim;
        head_pass.q_stride = qkv_stride;
        head_pass.k = cache.keys(layer, head);
        head_pass.v = cache.values(layer, head);
        const int next = head + model.num_threads();
        head_pass.upcoming = next < shape.num_heads ? cache.keys(layer, next) : nullptr;
        head_pass.scratch = scratch + worker * attention_scratch(cache.num_cells());
        head_pass.out = out + size_t(head) * head_dim;
        head_pass.out_stride = out_stride;
        model.kernel().attend(head_pass);
        for (int i = 0; quantized && i < num_out; ++i) {
            model.kernel().quantize(head_pass.out + i * out_stride, head_dim, i,
                                    from_block(*quantized, head * head_dim / kBlock));
        }
    });
    for (int i = 0; i < num_out; ++i) {
        std::fill(out + i * out_stride + width, out + (i + 1) * out_stride, 0.0f);
    }
}

}  // namespace pystaged
