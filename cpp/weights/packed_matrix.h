// A weight matrix in the order the kernels read it: 16 outputs side by side for each group of inputs; see packing.h.
#pragma once

#include <functional>
#include <vector>

#include "weights/packing.h"

namespace pystaged {

// Which row of a tensor becomes each row of a packed matrix; -1 is a row of zeros. Several tensors of one type make one
// matrix: their rows are counted through.
using RowOrder = std::vector<int>;

// Rows 0 to rows - 1.
RowOrder in_order(int rows);
// Heads of `head_dim` rows whose first `rotary` rows belong together as (2 i, 2 i + 1): as (i, i + rotary / 2), which
// is what Kernel::rotate() turns.
RowOrder halves_of_pairs(int rows, int head_dim, int rotary);
// A gate's `rows` rows and then as many of what it opens, in turns of kLanes, for Epilogue::gated; padded to kBlock
// each.
RowOrder gate_in_turns(int rows);
// Of `num_groups` that have a part of each of these sizes: the first part of all groups, then the second, and so on.
RowOrder part_by_part(int num_groups, const std::vector<int>& sizes);
// `order`, and then the rows of another tensor.
RowOrder stacked(RowOrder order, const RowOrder& next);

// Brings `count` rows of the sources, the first of them row `first`, as the file has them. Called by several threads.
using RowReader = std::function<void(int first, int count, uint8_t* rows)>;

class PackedMatrix {
public:
    PackedMatrix() = default;
    // Packs order.size() rows of ggml `type`, as they are read, into `storage` of size packed_bytes(): kLanes at a time
    // by each thread, so that a row goes from the file through that thread's cache to its place.
    PackedMatrix(ggml_type type, int cols, const RowReader& read, const RowOrder& order, uint8_t* storage,
                 int num_threads);
    // What was packed into `storage` before.
    PackedMatrix(ggml_type type, int rows, int cols, const uint8_t* storage);

    // Throws std::invalid_argument when `type` has no packing here.
    static size_t packed_bytes(ggml_type type, int rows, int cols);
    // Of the layout of packing.h. It counts up whenever packed weights written before would be read wrongly.
    static constexpr int kVersion = 1;

    int rows() const { return rows_; }
    int cols() const { return cols_; }
    int padded_rows() const { return padded(rows_, kBlock); }
    int padded_cols() const { return padded(cols_, kBlock); }
    Packing packing() const { return packing_; }
    bool integer() const { return packing_ >= Packing::q8_0; }
    const uint8_t* data() const { return data_; }
    size_t bytes() const { return group_bytes_ * (padded_rows() / kLanes); }
    // Whether rows that were quantized for matrices of `packing` will do for this one.
    bool reads(Packing packing) const;

    // One row of weights as floats, out[cols()].
    void row(int index, float* out) const;

private:
    Packing packing_ = Packing::f32;
    int rows_ = 0, cols_ = 0;
    size_t group_bytes_ = 0;
    const uint8_t* data_ = nullptr;
};

}  // namespace pystaged
