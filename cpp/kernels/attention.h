// Attention of some rows of one head. A part of generic.h.
#pragma once

#include "vector.h"

// Raw scores of `rows` rows against `blocks` blocks of cells. A score is one chain over the head's dimensions, so it
// does not depend on the lane its cell lies in.
template <int rows, int blocks>
void score_tile(const HeadPass& p, int row, int block, float* scores, size_t stride) {
    constexpr int units = blocks * kUnits;
    F sum[rows][units];
    clear(sum);
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
                sum[r][u] = fma(F::set(p.q[(row + r) * p.q_stride + d]), key, sum[r][u]);
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

// Turns raw scores into weights that sum to the returned number; lanes go by position, not by cell.
inline float soften(float* scores, int length, float scale) {
    const int end = (length + kLanes - 1) / kLanes * kLanes;
    for (int i = length; i < end; ++i) {
        scores[i] = -__builtin_inff();
    }
    Row most = Row::load(scores);
    for (int i = kLanes; i < end; i += kLanes) {
        most = max(Row::load(scores + i), most);
    }
    const Row top = Row::set(fold_max(most)), factor = Row::set(scale);
    Row sum = Row::set(0);
    for (int i = 0; i < end; i += kLanes) {
        Row w = exp((Row::load(scores + i) - top) * factor);
        if (length - i < kLanes) {
            w = first_lanes(w, length - i);
        }
        w.store(scores + i);
        sum = sum + w;
    }
    return fold_sum(sum);
}

// Weighted sums of values for `rows` rows and `vectors` vectors of dimensions from `dim` on: the cells that all rows
// share are loaded once, then each row goes on alone.
template <int rows, int vectors>
void mix_tile(const HeadPass& p, int row, int dim, const float* weights, size_t stride, const float* inverse_sums) {
    const size_t v_stride = padded(p.head_dim, kLanes);
    const uint16_t* v = p.v + dim;
    int shared = p.rows[row].direct;
    for (int r = 1; r < rows; ++r) {
        shared = p.rows[row + r].direct < shared ? p.rows[row + r].direct : shared;
    }
    constexpr int units = vectors * kUnits;
    F sum[rows][units];
    clear(sum);
    for (int c = 0; c < shared; ++c) {
        if (row == 0 && dim == 0 && p.upcoming) {
            __builtin_prefetch(p.upcoming + size_t(c) * p.head_dim, 0, 2);
            __builtin_prefetch(p.upcoming + size_t(c) * p.head_dim + p.head_dim / 2, 0, 2);
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
        const RowContext& context = p.rows[row + r];
        for (int c = shared; c < context.length; ++c) {
            const size_t cell = c < context.direct ? c : context.tail[c - context.direct];
#pragma GCC unroll 16
            for (int u = 0; u < units; ++u) {
                const F value = F::load_f16(v + cell * v_stride + u * F::lanes);
                sum[r][u] = fma(F::set(weights[r * stride + c]), value, sum[r][u]);
            }
        }
        float parts[units * F::lanes];
#pragma GCC unroll 16
        for (int u = 0; u < units; ++u) {
            (sum[r][u] * F::set(inverse_sums[r])).store(parts + u * F::lanes);
        }
        const int count = p.head_dim - dim < units * F::lanes ? p.head_dim - dim : units * F::lanes;
        __builtin_memcpy(p.out + (row + r) * p.out_stride + dim, parts, count * sizeof(float));
    }
}

template <int rows>
void attend_rows(const HeadPass& p, int row) {
    int cells = 0;
    for (int r = 0; r < rows; ++r) {
        const RowContext& context = p.rows[row + r];
        cells = context.direct > cells ? context.direct : cells;
        for (int i = 0; i < context.length - context.direct; ++i) {
            cells = context.tail[i] + 1 > cells ? context.tail[i] + 1 : cells;
        }
    }
    const int blocks = (cells + kLanes - 1) / kLanes;
    const size_t stride = (p.num_cells + kLanes - 1) / kLanes * kLanes;
    float* scores = p.scratch;
    float* gathered = p.scratch + rows * stride;
    constexpr int wide = kScoreSums / rows < 8 ? kScoreSums / rows : 8;
    int block = 0;
    for (; block + wide <= blocks; block += wide) {
        score_tile<rows, wide>(p, row, block, scores, stride);
    }
    for (; block < blocks; ++block) {
        score_tile<rows, 1>(p, row, block, scores, stride);
    }
    float inverse_sums[rows];
    for (int r = 0; r < rows; ++r) {
        const RowContext& context = p.rows[row + r];
        float* s = scores + r * stride;
        for (int i = 0; i < context.length - context.direct; ++i) {
            gathered[i] = s[context.tail[i]];
        }
        for (int i = 0; i < context.length - context.direct; ++i) {
            s[context.direct + i] = gathered[i];
        }
        inverse_sums[r] = 1.0f / soften(s, context.length, 1.0f / __builtin_sqrtf(static_cast<float>(p.head_dim)));
    }
    int dim = 0;
    constexpr int vectors = kMixSums / rows < 4 ? kMixSums / rows : 4;
    for (; dim + vectors * kLanes <= p.head_dim; dim += vectors * kLanes) {
        mix_tile<rows, vectors>(p, row, dim, scores, stride, inverse_sums);
    }
    for (; dim < p.head_dim; dim += kLanes) {
        mix_tile<rows, 1>(p, row, dim, scores, stride, inverse_sums);
    }
}

template <int rows>
void attend_from(const HeadPass& p, int row) {
    if constexpr (rows == kAttendRows) {
        for (; p.n - row >= rows; row += rows) {
            attend_rows<rows>(p, row);
        }
    } else if (p.n - row == rows) {
        attend_rows<rows>(p, row);
        return;
    }
    if constexpr (rows > 1) {
        attend_from<rows - 1>(p, row);
    }
}

void attend(const HeadPass& p) {
    static_assert(kAttendRows <= kMostAttendRows, "attention_scratch() has room for so many rows");
    attend_from<kAttendRows>(p, 0);
}
