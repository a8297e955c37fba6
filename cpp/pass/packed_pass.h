// A pass over packed weights, on the CPU: every operation runs at once and shares its work over the thread pool, five
// joins a layer, so that a busy machine does not stall at a spinning barrier.
#pragma once

#include "pass/workspace.h"

namespace pystaged {

class PackedPass : public Backend {
public:
    explicit PackedPass(const Model& model) : Backend(model), w_(model) {}

    static constexpr int kMaxRows = kMostPassRows;

    std::unique_ptr<TextState> make_state(int num_rows, int context) override;
    int max_rows() const override { return kMaxRows; }
    void compute(const Pass& pass) override;
    void add_markov(const int32_t* before, int n, float* logits, float* maxima) override;

private:
    // The decoder of every family: the residual stream from layer to layer, and its end as logits.
    void decode(const Pass& pass);
    // Rows that are context: every layer's mixer takes them in as they are, and that is all.
    void take_in(const Pass& pass);
    // x plus the branches of a layer's mixers, one after the other.
    Value add_mixers(Value x, const Value& input, int layer, int first_row);
    Value embed();
    void read_layer_embeddings(const Value& x);
    // x with the layer's own embeddings of tokens, scaled.
    Value finish(const Value& x, int layer);
    // Keeps what is asked for of the rows behind a layer.
    void tap(const Value& x, int layer);
    void write_logits(const Value& x);

    Workspace w_;
};

}  // namespace pystaged
