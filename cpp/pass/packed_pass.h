// A pass over packed weights, on the CPU: every operation runs at once and shares its work over the thread pool, five
// joins a layer, so that a busy machine does not stall at a spinning barrier.
#pragma once

#include "pass/workspace.h"

namespace pystaged {

class PackedPass : public Backend {
public:
    explicit PackedPass(const Model& model) : Backend(model), w_(model) {}

    static constexpr int kMaxRows = kMostPassRows;

    std::unique_ptr<TextState> make_state(int num_rows, int context) override {
        return std::make_unique<PackedState>(model_, num_rows, context);
    }
    int max_rows() const override { return kMaxRows; }
    void compute(const Pass& pass) override;
    void add_markov(const int32_t* before, int n, float* logits, float* maxima) override;

private:
    Workspace w_;
};

}  // namespace pystaged
