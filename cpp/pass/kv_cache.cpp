#include "pass/kv_cache.h"

#include <algorithm>
#include <cstring>

namespace pystaged {

KvCache::KvCache(int num_layers, int num_heads, int head_dim, int num_cells)
    : num_layers_(num_layers),
      num_heads_(num_heads),
      head_dim_(head_dim),
      num_cells_(padded(num_cells, kLanes)),
      value_stride_(padded(head_dim, kLanes)),
      key_size_(size_t(num_cells_) * head_dim),
      head_size_(key_size_ + size_t(num_cells_) * value_stride_),
      memory_(size_t(num_layers) * num_heads * head_size_ * sizeof(uint16_t)) {}

void KvCache::store(const Kernel& kernel, int layer, int head, int cell, const float* key, const float* value) {
    uint16_t* data = head_data(layer, head);
    uint16_t* column = data + key_at(cell);
    constexpr int kPart = 64;
    uint16_t halves[kPart];
    for (int d = 0; d < head_dim_; d += kPart) {
        const int count = std::min(kPart, head_dim_ - d);
        kernel.to_f16(key + d, count, halves);
        for (int i = 0; i < count; ++i) {
            column[size_t(d + i) * kLanes] = halves[i];
        }
    }
    kernel.to_f16(value, head_dim_, data + key_size_ + cell * value_stride_);
}

void KvCache::move(int layer, int from, int to) {
    for (int head = 0; head < num_heads_; ++head) {
        uint16_t* data = head_data(layer, head);
        const uint16_t* source = data + key_at(from);
        uint16_t* target = data + key_at(to);
        for (int d = 0; d < head_dim_; ++d) {
            target[size_t(d) * kLanes] = source[size_t(d) * kLanes];
        }
        uint16_t* values = data + key_size_;
        std::memcpy(values + to * value_stride_, values + from * value_stride_, value_stride_ * sizeof(uint16_t));
    }
}

}  // namespace pystaged
