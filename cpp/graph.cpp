#include "graph.h"

namespace pystaged {

ggml_tensor* Graph::build(ggml_context* c, int num_rows, int num_logits) {
    const int num_layers = model_.shape().num_layers;
    ggml_tensor* x = embed(c, num_rows);
    for (int i = 0; i < num_layers; ++i) {
        const Gpt2Layer& layer = model_.layers()[i];
        const bool last = i + 1 == num_layers;
        const int first_row = last ? num_rows - num_logits : 0;

        Dense qkv, output, up, down;
        qkv.weights = &layer.attn_qkv;
        qkv.norm = &layer.attn_norm;
        output.weights = &layer.attn_output;
        up.weights = &layer.ffn_up;
        up.norm = &layer.ffn_norm;
        up.gelu = true;
        up.next = &layer.ffn_down;
        down.weights = &layer.ffn_down;

        ggml_tensor* mixed = attention(c, linear(c, x, qkv), i, first_row, output.weights);
        if (last && num_logits == 0) {
            return mixed;  // the cache is all that this pass is for
        }
        if (first_row > 0) {
            x = ggml_view_2d(c, x, x->ne[0], num_logits, x->nb[1], first_row * x->nb[1]);
        }
        output.residual = x;
        x = linear(c, mixed, output);
        down.residual = x;
        x = linear(c, linear(c, x, up), down);
    }
    return head(c, x);
}

}  // namespace pystaged
