// The decoder, written down once for every family and for both ways to compute.
#pragma once

#include "model/model.h"

namespace pystaged {

// Runs or records one pass; the result is what ends it: the logits, or the last layer's keys and values where none are
// needed. What a model lacks is absent from its layers, and `Ops` takes an absent norm for none at all:
//   Value embed(num_rows)                             rows of the residual stream
//   Value tail(Value, first_row)                      the rows from there on
//   Value norm(Value, Norm)                           rows as matrices read them
//   Value qkv(Value, layer)                           queries, keys and values side by side
//   Value attention(Value, layer, first_row)          stores the keys and values of all rows; attends for those from
//                                                     `first_row` on, perhaps none
//   Value hidden(Value, layer)                        between the feed-forward network's matrices
//   Value add(Value x, Value y, Linear, Norm)         x + norm(W y + b), scaled as the model has it
//   void tap(Value, layer)                            may keep the rows of the residual stream behind a layer
//   Value logits(Value)
template <class Ops>
typename Ops::Value run_transformer(Ops& ops, const Model& model, int num_rows, int num_logits) {
    const int num_layers = model.numbers().num_layers;
    auto x = ops.embed(num_rows);
    for (int i = 0; i < num_layers; ++i) {
        const Layer& layer = model.layers()[i];
        const bool last = i + 1 == num_layers;
        const int first_row = last ? num_rows - num_logits : 0;

        auto input = ops.norm(x, layer.attn_norm);
        auto mixed = ops.attention(ops.qkv(input, layer), i, first_row);
        if (last && num_logits == 0) {
            return mixed;  // the cache is all that this pass is for
        }
        x = ops.add(ops.tail(x, first_row), mixed, layer.attn_output, layer.attn_post_norm);
        // Where the branches are parallel, both read the same; where only their results are normalized, nothing is
        // here.
        const bool parallel = layer.attn_norm.present() && !layer.ffn_norm.present();
        input = parallel ? ops.tail(input, first_row) : ops.norm(x, layer.ffn_norm);
        x = ops.add(x, ops.hidden(input, layer), layer.ffn_down, layer.ffn_post_norm);
        ops.tap(x, i);
    }
    return ops.logits(ops.norm(x, model.output_norm()));
}

}  // namespace pystaged
