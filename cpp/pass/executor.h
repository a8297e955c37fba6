// One pass of a model over rows of tokens, and the cache it reads and writes.
//
// The model is written down once, in transformer.h. PackedPass runs its operations at once on our kernels, bit-exact on
// the CPU; DevicePass records them as ggml's, for any device ggml knows.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "model/model.h"

namespace pystaged {

// What one pass evaluates and where its results go.
struct Pass {
    int num_rows = 0;
    const int32_t* tokens = nullptr;       // [num_rows]
    const int32_t* positions = nullptr;    // [num_rows]
    const RowContext* contexts = nullptr;  // [num_rows]
    int first_cell = 0;                    // row i writes its key and value into cell first_cell + i
    int num_logits = 0;                    // how many of the last rows need logits
    float* logits = nullptr;               // [num_logits][logits_stride()]
    float* maxima = nullptr;               // [num_logits][logits_stride() / kRun], of each run of logits
    // Called between layers where they are computed one by one, or none; what it throws ends the pass.
    const std::function<void()>* interrupted = nullptr;
};

class Executor {
public:
    virtual ~Executor() = default;
    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;

    // Floats from one row of logits to the next; entries past the vocabulary are -inf.
    size_t logits_stride() const { return padded(model_.numbers().vocab_size, kRun); }
    virtual int num_cells() const = 0;
    // Of one pass.
    virtual int max_rows() const = 0;
    virtual void compute(const Pass& pass) = 0;
    // Moves cells, in order, each from .first to .second; what .second held is lost.
    virtual void move(const std::vector<std::pair<int, int>>& cells) = 0;

    // How many of a row's largest logits a pass brings back; 0 where it writes all of them to Pass::logits at once. The
    // rest then stays on the device until read or until the next pass.
    virtual int shortlist_size() const { return 0; }
    // The largest logits of each row of the last pass, in no order: both [num_logits][shortlist_size()].
    virtual void read_shortlist(int32_t*, float*) {}
    // All logits of the last pass, [num_logits][logits_stride()], and the maxima of their runs, where compute() has not
    // written both already. The maxima of a row with a logit that is not finite are not all finite.
    virtual void read_logits(float*, float*) {}

protected:
    explicit Executor(const Model& model) : model_(model) {}

    const Model& model_;
};

}  // namespace pystaged
