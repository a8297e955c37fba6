// Keys and values of every layer as F16: committed rows first and contiguous, pending rows behind them.
#pragma once

#include <cstdint>

#include "kernels/kernel.h"
#include "memory.h"

namespace pystaged {

class KvCache {
public:
    // Memory becomes resident as cells are written.
    KvCache(int num_layers, int num_heads, int head_dim, int num_cells);

    int num_cells() const { return num_cells_; }

    // [num_cells / kLanes][head_dim][kLanes]: a score needs one dimension of 16 cells at a time.
    const uint16_t* keys(int layer, int head) const { return head_data(layer, head); }
    // [num_cells][padded head_dim]: a weighted sum needs one cell at a time.
    const uint16_t* values(int layer, int head) const { return head_data(layer, head) + key_size_; }

    // Writes one head's key and value, head_dim floats each, into a cell.
    void store(const Kernel& kernel, int layer, int head, int cell, const float* key, const float* value);
    // Copies a cell of one layer to another.
    void move(int layer, int from, int to);

private:
    uint16_t* head_data(int layer, int head) const {
        return reinterpret_cast<uint16_t*>(memory_.data()) + (size_t(layer) * num_heads_ + head) * head_size_;
    }
    size_t key_at(int cell) const { return size_t(cell) / kLanes * head_dim_ * kLanes + cell % kLanes; }

    int num_layers_, num_heads_, head_dim_, num_cells_;
    size_t value_stride_, key_size_, head_size_;
    Memory memory_;
};

}  // namespace pystaged
