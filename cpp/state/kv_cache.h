// Keys and values of a layer: committed rows first and contiguous, pending rows behind them.
//
// A score needs one dimension of 16 cells at a time, a weighted sum one cell. Of a head,
//   F16   keys [cells / kLanes][head_dim][kLanes]; values [cells][value_dim, padded to kLanes]
//   Q8_0  keys as a packed matrix of type Q8_0 whose outputs are cells; of each cell the values' quants, padded to
//         kBlock, and behind them an F32 scale for each block
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernel.h"
#include "machine/memory.h"
#include "state/text_state.h"

namespace pystaged {

class KvCache {
public:
    // Memory becomes resident as cells are written, which commit() allows. Values are as wide as keys where `value_dim`
    // is 0.
    KvCache(KvType type, int num_heads, int head_dim, int num_cells, int value_dim = 0);

    // Bytes that one cell takes.
    size_t cell_bytes() const { return num_heads_ * (key_bytes_ + value_bytes_); }

    KvType type() const { return type_; }
    int num_cells() const { return num_cells_; }
    const uint8_t* keys(int head) const { return head_data(head); }
    const uint8_t* values(int head) const { return head_data(head) + num_cells_ * key_bytes_; }

    // Cells [first, last) may be used from now on. Throws std::bad_alloc.
    void commit(int first, int last);
    // Write one head's key, head_dim floats, or value, value_dim floats, into a cell.
    void store_key(const Kernel& kernel, int head, int cell, const float* key);
    void store_value(const Kernel& kernel, int head, int cell, const float* value);
    // Copies a cell to another. Nothing fails.
    void move(int from, int to);
    // Copies cells [first, last) from a cache of the same shape.
    void copy(const KvCache& from, int first, int last);
    // Appends the memory of cells [first, last); `first` is a multiple of kLanes.
    void add_pieces(int first, int last, std::vector<Piece>& pieces) const;
    // Gives the memory of cells [first, last) back to the system, as far as it is whole pages.
    void release(int first, int last);

private:
    uint8_t* head_data(int head) const { return memory_.data() + head * num_cells_ * (key_bytes_ + value_bytes_); }
    // Calls act(offset in a cell, offset in another, bytes) for every piece of their keys; offsets from the head's
    // first byte.
    template <class Act>
    void for_keys(int a, int b, const Act& act) const;

    KvType type_;
    int num_heads_, head_dim_, value_dim_;
    size_t num_cells_, key_bytes_, value_bytes_;  // of a cell and head
    Memory memory_;
};

}  // namespace pystaged
