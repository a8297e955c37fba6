// How passes of a model are computed over rows of one or more texts, and the cells they read and write.
//
// The model is written down once, in transformer.h. PackedPass runs its operations at once on our kernels, bit-exact on
// the CPU, for several texts in a pass; DevicePasses records them as ggml's, for any device ggml knows, a text at a
// time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "model/model.h"

namespace pystaged {

// Keys and values of one text, a cell for each row.
class Cells {
public:
    Cells() = default;
    virtual ~Cells() = default;
    Cells(const Cells&) = delete;
    Cells& operator=(const Cells&) = delete;

    virtual int count() const = 0;
    // Moves cells, in order, each from .first to .second; what .second held is lost.
    virtual void move(const std::vector<std::pair<int, int>>& cells) = 0;
    // Takes over the first `count` cells of another text of the same model, of as many positions; they are reachable
    // there.
    virtual void copy(const Cells& from, int count) = 0;
    // The text has grown to so many cells, by what was read or else written: cells that no later row sees may be given
    // up. Nothing fails.
    virtual void grow(int, bool) {}
    // The longest beginning of the text, of `length` cells at most, that rows can go on from.
    virtual int reachable(int length) const { return length; }
    // The text goes on from its first cells, so many and reachable; what the others hold is of no use any more.
    virtual void cut(int) {}
    // How many of the text's first `length` cells are kept in layers with a window; the others keep all.
    virtual int num_windowed(int length) const { return length; }
};

// Consecutive rows of one text.
struct Segment {
    Cells* cells = nullptr;
    int first_row = 0, num_rows = 0;
    int first_cell = 0;  // row first_row + i writes its key and value into cell first_cell + i
};

// What one pass evaluates and where its results go. A text whose rows are not all next to each other has several
// segments.
struct Pass {
    int num_rows = 0;
    const int32_t* tokens = nullptr;       // [num_rows]
    const int32_t* positions = nullptr;    // [num_rows]
    const RowContext* contexts = nullptr;  // [num_rows]
    std::vector<Segment> segments;         // all rows, in order
    int num_logits = 0;                    // how many of the last rows need logits
    float* logits = nullptr;               // [num_logits][logits stride]
    float* maxima = nullptr;               // [num_logits][logits stride / kRun], of each run of logits
    float* states = nullptr;               // [num_logits][taps][width], or none
    // Called between layers where they are computed one by one, or none; what it throws ends the pass.
    const std::function<void()>* interrupted = nullptr;
};

class Backend {
public:
    virtual ~Backend() = default;
    Backend(const Backend&) = delete;
    Backend& operator=(const Backend&) = delete;

    // For a text of `context` positions; more cells than that give trees at its end room for branches.
    virtual std::unique_ptr<Cells> make_cells(int num_cells, int context) const = 0;
    // Rows of one pass at most.
    virtual int max_rows() const = 0;
    // Whether a pass takes rows of several texts; else it has one segment.
    virtual bool mixes_texts() const = 0;
    virtual void compute(const Pass& pass) = 0;

    // How many of a row's largest logits a pass brings back; 0 where it writes all of them to Pass::logits at once. The
    // rest then stays on the device until read or until the text's next pass.
    virtual int shortlist_size(const Cells&) const { return 0; }
    // The largest logits of each row of a text's last pass, in no order: both [num_logits][shortlist_size()].
    virtual void read_shortlist(const Cells&, int32_t*, float*) const {}
    // All logits of a text's last pass and the maxima of their runs, laid out as Pass has them, where compute() has not
    // written both already. The maxima of a row with a logit that is not finite are not all finite.
    virtual void read_logits(const Cells&, float*, float*) const {}

protected:
    explicit Backend(const Model& model) : model_(model) {}

    const Model& model_;
};

}  // namespace pystaged
