// Attention of some rows of one head. A part of generic.h.
#pragma once

#include "vector.h"

// What is needed of one number of a HeadPass.
struct AttendRow {
    const RowContext* context;
    const float* q;
    float* out;
    float scale;
    int first;  // position it sees
};

inline AttendRow attend_row(const HeadPass& p, int number) {
    const int row = number / p.group;
    const size_t column = size_t(number % p.group) * p.head_dim;
    const RowContext& context = p.rows[row];
    return {&context, p.q + row * p.q_stride + column, p.out + row * p.out_stride + column,
            p.row_scale ? p.scale * p.row_scale[row] : p.scale,
            p.window > 0 && context.length > p.window ? context.length - p.window : 0};
}

// Raw scores of `rows` rows against `blocks` blocks of cells. A score is one chain over the head's dimensions, so it
// does not depend on the lane its cell lies in.
template <int rows, int blocks>
void score_tile(const HeadPass& p, const AttendRow* row, int block, float* scores, size_t stride) {
    constexpr int units = blocks * kUnits;
    F sum[rows][units];
    clear(sum);
    const float* q[rows];
    for (int r = 0; r < rows; ++r) {
        q[r] = row[r].q;
    }
    const uint16_t* k = p.k + size_t(block) * p.head_dim * kLanes;
    // The values of these cells are wanted next, and take as long to come as the keys.
    const uint16_t* v = p.v + size_t(block) * p.head_dim * kLanes;
    for (int d = 0; d < p.head_dim; ++d) {
#pragma GCC unroll 16
        for (int u = 0; u < units; ++u) {
            const size_t first = size_t(u / kUnits) * p.head_dim;
            if (u % (2 * kUnits) == 0) {
                __builtin_prefetch(v + (first + 2 * d) * kLanes, 0, 2);
            }
            const F key = F::load_f16(k + (first + d) * kLanes + u % kUnits * F::lanes);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                sum[r][u] = fma(F::set(q[r][d]), key, sum[r][u]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 16
        for (int u = 0; u < units; ++u) {
            sum[r][u].store(scores + r * stride + size_t(block) * kLanes + u * F::lanes);
        }
    }
}

// Turns the raw scores of positions [first, length) into weights that sum to the returned number; lanes go by position,
// not by cell.
inline float soften(float* scores, int first, int length, float scale, float softcap) {
    const int begin = first / kLanes * kLanes, end = (length + kLanes - 1) / kLanes * kLanes;
    if (softcap > 0) {
        for (int i = begin; i < end; i += kLanes) {
            softcapped(Row::load(scores + i) * Row::set(scale), softcap).store(scores + i);
        }
        scale = 1;
    }
    for (int i = begin; i < first; ++i) {
        scores[i] = -__builtin_inff();
    }
    for (int i = length; i < end; ++i) {
        scores[i] = -__builtin_inff();
    }
    Row most = Row::load(scores + begin);
    for (int i = begin + kLanes; i < end; i += kLanes) {
        most = max(Row::load(scores + i), most);
    }
    const Row top = Row::set(fold_max(most)), factor = Row::set(scale);
    Row sum = Row::set(0);
    for (int i = begin; i < end; i += kLanes) {
        Row w = exp((Row::load(scores + i) - top) * factor);
        if (i < first || length - i < kLanes) {
            w = some_lanes(w, first - i, length - i);
        }
        w.store(scores + i);
        sum = sum + w;
    }
    return fold_sum(sum);
}

// Weighted sums of values for `rows` rows and `vectors` vectors of dimensions from `dim` on: the cells that all rows
// share are loaded once; what a row sees before and after them it goes through alone.
template <int rows, int vectors>
void mix_tile(const HeadPass& p, const AttendRow* row, int dim, const float* weights, size_t stride,
              const float* inverse_sums, const uint16_t* upcoming) {
    const size_t v_stride = padded(p.head_dim, kLanes);
    const uint16_t* v = p.v + dim;
    int begin = row[0].first, end = row[0].context->direct;
    for (int r = 1; r < rows; ++r) {
        begin = row[r].first > begin ? row[r].first : begin;
        end = row[r].context->direct < end ? row[r].context->direct : end;
    }
    constexpr int units = vectors * kUnits;
    F sum[rows][units];
    clear(sum);
    const auto go_alone = [&](int r, int from, int to) {
        const RowContext& context = *row[r].context;
        for (int c = from; c < to; ++c) {
            const size_t cell = c < context.direct ? c : context.tail[c - context.direct];
#pragma GCC unroll 16
            for (int u = 0; u < units; ++u) {
                const F value = F::load_f16(v + cell * v_stride + u * F::lanes);
                sum[r][u] = fma(F::set(weights[r * stride + c]), value, sum[r][u]);
            }
        }
    };
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        go_alone(r, row[r].first, begin < end ? begin : row[r].first);
    }
    for (int c = begin; c < end; ++c) {
        if (upcoming) {
            __builtin_prefetch(upcoming + size_t(c) * p.head_dim, 0, 2);
            __builtin_prefetch(upcoming + size_t(c) * p.head_dim + p.head_dim / 2, 0, 2);
        }
#pragma GCC unroll 16
        for (int u = 0; u < units; ++u) {
            const F value = F::load_f16(v + c * v_stride + u * F::lanes);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                sum[r][u] = fma(F::set(weights[r * stride + c]), value, sum[r][u]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        go_alone(r, begin < end ? end : row[r].first, row[r].context->length);
        float parts[units * F::lanes];
#pragma GCC unroll 16
        for (int u = 0; u < units; ++u) {
            (sum[r][u] * F::set(inverse_sums[r])).store(parts + u * F::lanes);
        }
        const int count = p.head_dim - dim < units * F::lanes ? p.head_dim - dim : units * F::lanes;
        __builtin_memcpy(row[r].out + dim, parts, count * sizeof(float));
    }
}

template <int rows>
void attend_rows(const HeadPass& p, int number) {
    AttendRow row[rows];
    int first = p.num_cells, cells = 0;
    for (int r = 0; r < rows; ++r) {
        row[r] = attend_row(p, number + r);
        const RowContext& context = *row[r].context;
        // What the row sees in its tail lies in cells from `direct` on.
        const int begin = row[r].first < context.direct ? row[r].first : context.direct;
        first = begin < first ? begin : first;
        cells = context.direct > cells ? context.direct : cells;
        for (int i = 0; i < context.length - context.direct; ++i) {
            cells = context.tail[i] + 1 > cells ? context.tail[i] + 1 : cells;
        }
    }
    const int blocks = (cells + kLanes - 1) / kLanes;
    const size_t stride = padded(p.num_cells, kLanes);
    float* scores = p.scratch;
    float* gathered = p.scratch + rows * stride;
    constexpr int wide = kScoreSums / rows < 8 ? kScoreSums / rows : 8;
    int block = first / kLanes;
    for (; block + wide <= blocks; block += wide) {
        score_tile<rows, wide>(p, row, block, scores, stride);
    }
    for (; block < blocks; ++block) {
        score_tile<rows, 1>(p, row, block, scores, stride);
    }
    float inverse_sums[rows];
    for (int r = 0; r < rows; ++r) {
        const RowContext& context = *row[r].context;
        float* s = scores + r * stride;
        for (int i = 0; i < context.length - context.direct; ++i) {
            gathered[i] = s[context.tail[i]];
        }
        for (int i = 0; i < context.length - context.direct; ++i) {
            s[context.direct + i] = gathered[i];
        }
        inverse_sums[r] = 1.0f / soften(s, row[r].first, context.length, row[r].scale, p.softcap);
    }
    const uint16_t* upcoming = number == p.first ? p.upcoming : nullptr;
    int dim = 0;
    constexpr int vectors = kMixSums / rows < 4 ? kMixSums / rows : 4;
    for (; dim + vectors * kLanes <= p.head_dim; dim += vectors * kLanes, upcoming = nullptr) {
        mix_tile<rows, vectors>(p, row, dim, scores, stride, inverse_sums, upcoming);
    }
    for (; dim < p.head_dim; dim += kLanes, upcoming = nullptr) {
        mix_tile<rows, 1>(p, row, dim, scores, stride, inverse_sums, upcoming);
    }
}

template <int rows>
void attend_from(const HeadPass& p, int number) {
    if constexpr (rows == kAttendRows) {
        for (; p.last - number >= rows; number += rows) {
            attend_rows<rows>(p, number);
        }
    } else if (p.last - number == rows) {
        attend_rows<rows>(p, number);
        return;
    }
    if constexpr (rows > 1) {
        attend_from<rows - 1>(p, number);
    }
}

void attend(const HeadPass& p) {
    static_assert(kAttendRows <= kMostAttendRows, "attention_scratch() has room for so many rows");
    attend_from<kAttendRows>(p, p.first);
}
