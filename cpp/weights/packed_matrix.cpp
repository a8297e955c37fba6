#include "weights/packed_matrix.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "error.h"
#include "machine/pool.h"

namespace pystaged {

// What one thread packs at a time: a huge page, which two threads that touched it first would both fill with zeros.
constexpr size_t kPackBytes = 2 << 20;

size_t PackedMatrix::packed_bytes(ggml_type type, int rows, int cols) {
    return group_bytes(packing_of(type), padded(cols, kBlock)) * (padded(rows, kBlock) / kLanes);
}

RowOrder in_order(int rows) {
    RowOrder order(rows);
    std::iota(order.begin(), order.end(), 0);
    return order;
}

RowOrder halves_of_pairs(int rows, int head_dim, int rotary) {
    RowOrder order = in_order(rows);
    for (int head = 0; head + head_dim <= rows; head += head_dim) {
        for (int i = 0; i < rotary / 2; ++i) {
            order[head + i] = head + 2 * i;
            order[head + rotary / 2 + i] = head + 2 * i + 1;
        }
    }
    return order;
}

RowOrder gate_in_turns(int rows) {
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

RowOrder part_by_part(int num_groups, const std::vector<int>& sizes) {
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

RowOrder stacked(RowOrder order, const RowOrder& next) {
    const int first = order.empty() ? 0 : *std::max_element(order.begin(), order.end()) + 1;
    for (const int row : next) {
        order.push_back(row < 0 ? row : first + row);
    }
    return order;
}

PackedMatrix::PackedMatrix(ggml_type type, int cols, const RowReader& read, const RowOrder& order, uint8_t* storage,
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

PackedMatrix::PackedMatrix(ggml_type type, int rows, int cols, const uint8_t* storage)
    : packing_(packing_of(type)),
      rows_(rows),
      cols_(cols),
      group_bytes_(group_bytes(packing_, padded(cols, kBlock))),
      data_(storage) {
    require(cols % ggml_blck_size(type) == 0, ggml_type_name(type), " needs rows of a multiple of ",
            ggml_blck_size(type), " weights, not ", cols);
}

bool PackedMatrix::reads(Packing packing) const {
    // A minimum for a whole block takes the sum of the values, which is there for all.
    const Layout &own = layout_of(packing_), &other = layout_of(packing);
    if (!integer() || packing == packing_ || (own.has_minima && !own.has_halves)) {
        return true;
    }
    return packing_ != Packing::q2_k && packing != Packing::q2_k && own.zero_point == other.zero_point &&
           own.has_halves == other.has_halves;
}

void PackedMatrix::row(int index, float* out) const {
    unpack_row(packing_, data_ + index / kLanes * group_bytes_, index % kLanes, cols_, out);
}

}  // namespace pystaged
