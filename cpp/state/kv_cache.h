// Keys and values of a layer: committed rows first and contiguous, pending rows behind them.
//
// A score needs one dimension of 16 cells at a time, a weighted sum one cell. Of a head,
//   F16   keys [cells / kLanes][head_dim][kLanes]; values [cells][value_dim, padded to kLanes]
//   Q8_0  keys as a packed matrix of type Q8_0 whose outputs are cells; of each cell the values' quants, padded to
//         kBlock, and behind them an F32 scale for each block
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels/kernel.h"
#include "machine/memory.h"
#include "state/text_state.h"

namespace pystaged {

class KvCache {
public:
    // Memory becomes resident as cells are written, which commit() allows. Values are as wide as keys where `value_dim`
    // is 0.
    KvCache(KvType type, int num_heads, int head_dim, int num_cells, int value_dim = 0)
        : type_(type),
          num_heads_(num_heads),
          head_dim_(head_dim),
          value_dim_(value_dim > 0 ? value_dim : head_dim),
          num_cells_(padded(num_cells, kLanes)),
          key_bytes_(key_bytes(type, head_dim)),
          value_bytes_(value_bytes(type, value_dim_)),
          memory_(Memory::reserve(num_heads * num_cells_ * (key_bytes_ + value_bytes_))) {}

    // Bytes that one cell takes.
    size_t cell_bytes() const { return num_heads_ * (key_bytes_ + value_bytes_); }

    KvType type() const { return type_; }
    int num_cells() const { return num_cells_; }
    const uint8_t* keys(int head) const { return head_data(head); }
    const uint8_t* values(int head) const { return head_data(head) + num_cells_ * key_bytes_; }

    // Cells [first, last) may be used from now on. Throws std::bad_alloc.
    void commit(int first, int last) {
        for_ranges(first, padded(last, kLanes), [&](size_t begin, size_t end) { memory_.commit(begin, end); });
    }
    // Write one head's key, head_dim floats, or value, value_dim floats, into a cell.
    void store_key(const Kernel& kernel, int head, int cell, const float* key) {
        uint8_t* out = head_data(head) + cell / kLanes * kLanes * key_bytes_;
        const size_t lane = cell % kLanes;
        const auto put = [&](size_t at, const void* from, auto bytes) {
            std::memcpy(out + at + lane * bytes, from, bytes);
        };
        for (int d = 0; d < head_dim_; d += kBlock) {
            const int count = std::min(kBlock, head_dim_ - d);
            uint16_t halves[kBlock];
            if (type_ == KvType::f16) {
                kernel.to_f16(key + d, count, halves);
                for (int i = 0; i < count; ++i) {
                    put((d + i) * kLanes * kHalf, halves + i, kHalf);
                }
                continue;
            }
            EightBits k(kernel, key + d, count);
            kernel.to_f16(&k.factors.scale, 1, halves);
            put(0, halves, kHalf);
            std::transform(k.quants, k.quants + kBlock, k.quants,
                           [](int8_t quant) { return static_cast<int8_t>(quant + kQ8.zero_point); });
            for (size_t i = 0; i < kBlock / kWord; ++i) {
                put(kQ8.factors_bytes + i * kLanes * kWord, k.quants + i * kWord, kWord);
            }
            out += kQ8.block_bytes;
        }
    }
    void store_value(const Kernel& kernel, int head, int cell, const float* value) {
        uint8_t* out = head_data(head) + num_cells_ * key_bytes_ + cell * value_bytes_;
        if (type_ == KvType::f16) {
            kernel.to_f16(value, value_dim_, reinterpret_cast<uint16_t*>(out));
            return;
        }
        auto* scales = reinterpret_cast<float*>(out + padded(value_dim_, kBlock));
        for (int d = 0; d < value_dim_; d += kBlock) {
            const EightBits v(kernel, value + d, value_dim_ - d);
            std::memcpy(out + d, v.quants, kBlock);
            scales[d / kBlock] = v.factors.scale;
        }
    }
    // Copies a cell to another. Nothing fails.
    void move(int from, int to) {
        for (int head = 0; head < num_heads_; ++head) {
            uint8_t *data = head_data(head), *values = data + num_cells_ * key_bytes_;
            std::memmove(values + to * value_bytes_, values + from * value_bytes_, value_bytes_);
            const uint8_t* key = data + from / kLanes * kLanes * key_bytes_;
            uint8_t* out = data + to / kLanes * kLanes * key_bytes_;
            const auto copy = [&](size_t at, auto bytes) {
                std::memcpy(out + at + to % kLanes * bytes, key + at + from % kLanes * bytes, bytes);
            };
            for (int d = 0; type_ == KvType::f16 && d < head_dim_; ++d) {
                copy(d * kLanes * kHalf, kHalf);
            }
            for (int d = 0; type_ == KvType::q8_0 && d < head_dim_; d += kBlock) {
                copy(0, kHalf);
                for (size_t i = 0; i < kBlock / kWord; ++i) {
                    copy(kQ8.factors_bytes + i * kLanes * kWord, kWord);
                }
                key += kQ8.block_bytes;
                out += kQ8.block_bytes;
            }
        }
    }
    // Copies cells [first, last) from a cache of the same shape.
    void copy(const KvCache& from, int first, int last) {
        for_ranges(first, last, [&](size_t begin, size_t end) {
            std::memcpy(memory_.data() + begin, from.memory_.data() + begin, end - begin);
        });
    }
    // Appends the memory of cells [first, last); `first` is a multiple of kLanes.
    void add_pieces(int first, int last, std::vector<Piece>& pieces) const {
        for_ranges(first, last,
                   [&](size_t begin, size_t end) { pieces.push_back({memory_.data() + begin, end - begin}); });
    }
    // Gives the memory of cells [first, last) back to the system, as far as it is whole pages.
    void release(int first, int last) {
        for (int head = 0; head < num_heads_; ++head) {
            const size_t keys = head_data(head) - memory_.data(), values = keys + num_cells_ * key_bytes_;
            memory_.release(keys + padded(first, kLanes) * key_bytes_, keys + last / kLanes * kLanes * key_bytes_);
            memory_.release(values + first * value_bytes_, values + last * value_bytes_);
        }
    }

private:
    static constexpr Layout kQ8 = layout_of(Packing::q8_0);
    static constexpr std::integral_constant<size_t, sizeof(uint16_t)> kHalf{};
    static constexpr std::integral_constant<size_t, sizeof(uint32_t)> kWord{};

    // One block of a key or value, in eight bits.
    struct EightBits {
        int8_t quants[kBlock];
        BlockFactors factors;

        EightBits(const Kernel& kernel, const float* x, int count) {
            float block[kBlock] = {};
            std::copy_n(x, std::min(count, kBlock), block);
            kernel.quantize(block, kBlock, 0, {1, Packing::q8_0, quants, &factors});
        }
    };

    uint8_t* head_data(int head) const { return memory_.data() + head * num_cells_ * (key_bytes_ + value_bytes_); }
    // Calls act(begin, end) for the bytes of each head's keys in cells [first, last), whole groups of kLanes, and
    // values.
    template <class Act>
    void for_ranges(int first, int last, const Act& act) const {
        for (int head = 0; head < num_heads_ && first < last; ++head) {
            const size_t keys = head_data(head) - memory_.data(), values = keys + num_cells_ * key_bytes_;
            act(keys + first / kLanes * kLanes * key_bytes_, keys + padded(last, kLanes) * key_bytes_);
            act(values + first * value_bytes_, values + last * value_bytes_);
        }
    }

    KvType type_;
    int num_heads_, head_dim_, value_dim_;
    size_t num_cells_, key_bytes_, value_bytes_;  // of a cell and head
    Memory memory_;
};

}  // namespace pystaged
