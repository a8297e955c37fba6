// A weight matrix in the order the kernels read it: 16 outputs side by side for each group of inputs; see packing.h.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "error.h"
#include "machine/pool.h"
#include "weights/packing.h"

namespace pystaged {

// Which row of a tensor becomes each row of a packed matrix; -1 is a row of zeros. Several tensors of one type make one
// matrix: their rows are counted through.
using RowOrder = std::vector<int>;

// Rows 0 to rows - 1.
inline RowOrder in_order(int rows) {
    RowOrder order(rows);
    std::iota(order.begin(), order.end(), 0);
    return order;
}

// Heads of `head_dim` rows whose first `rotary` rows belong together as (2 i, 2 i + 1): as (i, i + rotary / 2), which
// is what Kernel::rotate() turns.
inline RowOrder halves_of_pairs(int rows, int head_dim, int rotary) {
    RowOrder order = in_order(rows);
    for (int head = 0; head + head_dim <= rows; head += head_dim) {
        for (int i = 0; i < rotary / 2; ++i) {
            order[head + i] = head + 2 * i;
            order[head + rotary / 2 + i] = head + 2 * i + 1;
        }
    }
    return order;
}

// A gate's `rows` rows and then as many of what it opens, in turns of kLanes, for Epilogue::gated; padded to kBlock
// each.
inline RowOrder gate_in_turns(int rows) {
    RowOrder order;
    for (int group = 0; group < padded(rows, kBlock); group += kLanes) {
        for (const int first : {0, rows}) {
            for (int i = group; i < group + kLanes; ++i) {
                order.push_back(i < rows ? first + i : -1);
            }
        }
    }
    return order;
}

// Of `num_groups` that have a part of each of these sizes: the first part of all groups, then the second, and so on.
inline RowOrder part_by_part(int num_groups, const std::vector<int>& sizes) {
    const int stride = std::accumulate(sizes.begin(), sizes.end(), 0);
    RowOrder order;
    int first = 0;
    for (const int size : sizes) {
        for (int group = 0; group < num_groups; ++group) {
            for (int i = 0; i < size; ++i) {
                order.push_back(group * stride + first + i);
            }
        }
        first += size;
    }
    return order;
}

// `order`, and then the rows of another tensor.
inline RowOrder stacked(RowOrder order, const RowOrder& next) {
    const int first = order.empty() ? 0 : *std::max_element(order.begin(), order.end()) + 1;
    for (const int row : next) {
        order.push_back(row < 0 ? row : first + row);
    }
    return order;
}

// Brings `count` rows of the sources, the first of them row `first`, as the file has them. Called by several threads.
using RowReader = std::function<void(int first, int count, uint8_t* rows)>;

class PackedMatrix {
public:
    PackedMatrix() = default;
    // Packs order.size() rows of ggml `type`, as they are read, into `storage` of size packed_bytes(): kLanes at a time
    // by each thread, so that a row goes from the file through that thread's cache to its place.
    PackedMatrix(ggml_type type, int cols, const RowReader& read, const RowOrder& order, uint8_t* storage,
                 int num_threads)
        : PackedMatrix(type, static_cast<int>(order.size()), cols, storage) {
        const size_t row_bytes = ggml_row_size(type, cols);
        const int groups = padded_rows() / kLanes;
        const int tasks = padded(static_cast<int>((bytes() + kPackBytes - 1) / kPackBytes), num_threads);
        const int share = (groups + tasks - 1) / tasks;
        std::vector<std::vector<uint8_t>> buffers(num_threads);
        ThreadPool::shared().run(tasks, num_threads, [&](int task, int worker) {
            std::vector<uint8_t>& buffer = buffers[worker];
            buffer.resize(kLanes * row_bytes);
            for (int g = task * share; g < std::min(groups, (task + 1) * share); ++g) {
                const int* wanted = order.data() + size_t(g) * kLanes;
                const int lanes = std::clamp(rows_ - g * kLanes, 0, kLanes);
                const uint8_t* rows[kLanes] = {};
                for (int lane = 0; lane < lanes; ++lane) {
                    rows[lane] = wanted[lane] < 0 ? nullptr : buffer.data() + lane * row_bytes;
                }
                for (int lane = 0, next = 0; lane < lanes; lane = next) {
                    // Rows that follow each other are read at once.
                    for (next = lane + 1; rows[lane] && next < lanes && wanted[next] == wanted[next - 1] + 1;) {
                        ++next;
                    }
                    if (rows[lane]) {
                        read(wanted[lane], next - lane, buffer.data() + lane * row_bytes);
                    }
                }
                uint8_t* out = storage + g * group_bytes_;
                if (cols_ != padded_cols() || std::find(rows, rows + kLanes, nullptr) != rows + kLanes) {
                    std::memset(out, 0, group_bytes_);
                }
                pack_group(packing_, rows, cols_, out);
            }
        });
    }
    // What was packed into `storage` before.
    PackedMatrix(ggml_type type, int rows, int cols, const uint8_t* storage)
        : packing_(packing_of(type)),
          rows_(rows),
          cols_(cols),
          group_bytes_(group_bytes(packing_, padded(cols, kBlock))),
          data_(storage) {
        require(cols % ggml_blck_size(type) == 0, ggml_type_name(type), " needs rows of a multiple of ",
                ggml_blck_size(type), " weights, not ", cols);
    }

    // Throws std::invalid_argument when `type` has no packing here.
    static size_t packed_bytes(ggml_type type, int rows, int cols) {
        return group_bytes(packing_of(type), padded(cols, kBlock)) * (padded(rows, kBlock) / kLanes);
    }
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
    bool reads(Packing packing) const {
        // A minimum for a whole block takes the sum of the values, which is there for all.
        const Layout &own = layout_of(packing_), &other = layout_of(packing);
        if (!integer() || packing == packing_ || (own.has_minima && !own.has_halves)) {
            return true;
        }
        return packing_ != Packing::q2_k && packing != Packing::q2_k && own.zero_point == other.zero_point &&
               own.has_halves == other.has_halves;
    }

    // One row of weights as floats, out[cols()].
    void row(int index, float* out) const {
        unpack_row(packing_, data_ + index / kLanes * group_bytes_, index % kLanes, cols_, out);
    }

private:
    // What one thread packs at a time: a huge page, which two threads that touched it first would both fill with zeros.
    static constexpr size_t kPackBytes = 2 << 20;

    Packing packing_ = Packing::f32;
    int rows_ = 0, cols_ = 0;
    size_t group_bytes_ = 0;
    const uint8_t* data_ = nullptr;
};

}  // namespace pystaged
