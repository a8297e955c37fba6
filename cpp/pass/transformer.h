// The decoder, written down once for every family and for both ways to compute.
#pragma once

#include "model/model.h"

namespace pystaged {

// x plus the branches of a layer's mixers, one after the other; see run_transformer().
template <class Ops, class Value>
Value mix(Ops& ops, const Layer& layer, Value x, const Value& input, int index, int first_row) {
    ops.check_interruption();
    for (const Mixer& each : layer.mixers) {
        x = std::visit([&](const auto& mixer) { return ops.branch(mixer, x, input, index, first_row); }, each);
    }
    return x;
}

// Runs or records one pass; the result is what ends it: the logits, or what the last mixer leaves where no row needs
// any. With `embeds`, all rows come to the end. What a model lacks is absent from its layers, and `Ops` takes an absent
// norm for none at all:
//   Value embed(num_rows)                             rows of the residual stream, perhaps of hidden rows too
//   Value tail(Value, first_row)                      the rows from there on
//   Value norm(Value, Norm)                           rows as matrices read them
//   void check_interruption()                         may throw, before each layer
//   Value branch(mixer, Value x, Value input, layer, first_row)
//       x plus a mixer's branch, for the rows from `first_row` on; mixers take in all rows of `input`. No rows where
//       none are wanted: the text's state is all that such a pass is for
//   Value branch(network, Value x, Value input, Norm) x plus a feed-forward network's branch, normalized by that
//   Value finish(Value, layer)                        with the layer's own embeddings of tokens, scaled
//   void tap(Value, layer)                            may keep the rows of the residual stream behind a layer
//   Value logits(Value)
// A branch is normalized where the layer says so, and scaled as the model has it.
template <class Ops>
typename Ops::Value run_transformer(Ops& ops, const Model& model, int num_rows, int num_logits, bool embeds = false) {
    const int first_judged = num_rows - num_logits;
    const int first_wanted = embeds || model.taps_end() ? 0 : first_judged;  // behind the last mixer
    auto x = ops.embed(num_rows);
    for (int i = 0; i < model.numbers().num_layers; ++i) {
        const Layer& layer = model.weights().layers[i];
        const int first_row = i == model.numbers().last_mixing ? first_wanted : 0;
        auto input = ops.norm(x, layer.mixer_norm);
        x = mix(ops, layer, ops.tail(x, first_row), input, i, first_row);
        if (first_row == num_rows) {
            return x;
        }
        if (layer.feed_forward) {
            // Where the branches are parallel, both read the same; where only their results are normalized, nothing is
            // here.
            const bool parallel = layer.mixer_norm.present() && !layer.ffn_norm.present();
            input = parallel ? ops.tail(input, first_row) : ops.norm(x, layer.ffn_norm);
            x = std::visit([&](const auto& network) { return ops.branch(network, x, input, layer.ffn_post_norm); },
                           *layer.feed_forward);
        }
        x = ops.finish(x, i);
        ops.tap(x, i);
    }
    return num_logits == 0 ? x : ops.logits(ops.norm(ops.tail(x, first_judged - first_wanted), model.output_norm()));
}

// Of rows that are context, `context(num_rows)`: every layer's mixer takes them in as they are, and that is all.
template <class Ops>
void run_context(Ops& ops, const Model& model, int num_rows) {
    const auto x = ops.context(num_rows);
    for (int i = 0; i < model.numbers().num_layers; ++i) {
        mix(ops, model.weights().layers[i], ops.tail(x, num_rows), x, i, num_rows);
    }
}

}  // namespace pystaged
