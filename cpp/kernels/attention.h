// Attention of some rows to one chunk of one head, and of chunks folded. A part of generic.h.
#pragma once

#include "matmul.h"
#include "rows.h"

// What one query of a HeadChunk sees; positions count from the chunk's first.
struct AttendRow {
    const float* q;
    float* partial;
    float scale;
    int first, direct, last;  // sees [first, direct) in cells of the same numbers, [direct, last) in
    const int32_t* tail;      // these cells
};

inline int clipped(int position) {
    return position < 0 ? 0 : position > kChunk ? kChunk : position;
}

inline AttendRow attend_row(const HeadChunk& p, int query) {
    const int row = query / p.group;
    const RowContext& context = p.rows[row];
    AttendRow r;
    r.q = p.q + row * p.q_stride + size_t(query % p.group) * p.head_dim;
    r.partial = p.partials + query * partial_stride(p.value_dim);
    r.scale = p.row_scale ? p.scale * p.row_scale[row] : p.scale;
    r.first = clipped(p.window > 0 ? context.length - p.window - p.begin : 0);
    r.direct = clipped(context.direct - p.begin);
    r.last = clipped(context.length - p.begin);
    r.tail = r.direct < r.last ? context.tail + (p.begin + r.direct - context.direct) : nullptr;
    return r;
}

// at(i, j) += few(i) * many(j), the few kept meanwhile.
template <int num_few, int num_many, class Few, class Many, class At>
inline void add_all(const Few& few, const Many& many, const At& at) {
    F kept[num_few];
#pragma GCC unroll 16
    for (int i = 0; i < num_few; ++i) {
        kept[i] = few(i);
    }
#pragma GCC unroll 16
    for (int j = 0; j < num_many; ++j) {
        const F x = many(j);
#pragma GCC unroll 16
        for (int i = 0; i < num_few; ++i) {
            at(i, j) = fma(kept[i], x, at(i, j));
        }
    }
}

// sum[r][u] += row(r) * unit(u). The fewer of the two are loaded first and kept, so that all fits the registers.
template <int rows, int units, class RowOf, class UnitOf>
inline void add_products(F (&sum)[rows][units], const RowOf& row, const UnitOf& unit) {
    if constexpr (units < rows) {
        add_all<units, rows>(unit, row, [&](int u, int r) -> F& { return sum[r][u]; });
    } else {
        add_all<rows, units>(row, unit, [&](int r, int u) -> F& { return sum[r][u]; });
    }
}

// Raw scores of `rows` rows against `blocks` blocks of cells. A score is one chain over the head's dimensions, so it
// does not depend on the lane its cell lies in.
template <int rows, int blocks>
void score_tile(const HeadChunk& p, const AttendRow* row, size_t block, float* scores, size_t stride) {
    constexpr int units = blocks * kUnits;
    F sum[rows][units];
    clear(sum);
    const float* q[rows];
    for (int r = 0; r < rows; ++r) {
        q[r] = row[r].q;
    }
    const auto* k = reinterpret_cast<const uint16_t*>(p.k) + block * p.head_dim * kLanes;
    // The values of these cells are wanted next, and take as long to come as the keys.
    const auto* v = reinterpret_cast<const uint16_t*>(p.v) + block * p.value_dim * kLanes;
    for (int d = 0; d < p.head_dim; ++d) {
        const auto key = [&](int u) {
            const size_t at = (size_t(u / kUnits) * p.head_dim + d) * kLanes;
            if (u % (2 * kUnits) == 0) {
                __builtin_prefetch(v + at + d * kLanes, 0, 2);
            }
            return F::load_f16(k + at + u % kUnits * F::lanes);
        };
        add_products(sum, [&](int r) { return F::set(q[r][d]); }, key);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 16
        for (int u = 0; u < units; ++u) {
            sum[r][u].store(scores + r * stride + u * F::lanes);
        }
    }
}

// Turns the raw scores of positions [first, last) into weights relative to the largest, `top`, and returns their sum;
// lanes go by position, not by cell.
inline float soften(float* scores, int first, int last, float scale, float softcap, float& top) {
    const int begin = first / kLanes * kLanes, end = (last + kLanes - 1) / kLanes * kLanes;
    if (softcap > 0) {
        for (int i = begin; i < end; i += kLanes) {
            softcapped(Row::load(scores + i) * Row::set(scale), softcap).store(scores + i);
        }
        scale = 1;
    }
    for (int i = begin; i < first; ++i) {
        scores[i] = -__builtin_inff();
    }
    for (int i = last; i < end; ++i) {
        scores[i] = -__builtin_inff();
    }
    Row most = Row::load(scores + begin);
    for (int i = begin + kLanes; i < end; i += kLanes) {
        most = max(Row::load(scores + i), most);
    }
    top = fold_max(most);
    const Row largest = Row::set(top), factor = Row::set(scale);
    Row sum = Row::set(0);
    for (int i = begin; i < end; i += kLanes) {
        Row w = exp((Row::load(scores + i) - largest) * factor);
        if (i < first || last - i < kLanes) {
            w = some_lanes(w, first - i, last - i);
        }
        w.store(scores + i);
        sum = sum + w;
    }
    return fold_sum(sum);
}

// Values as a cache stores them: `units` vectors of one cell, from dimension `dim` on.
struct HalfValues {
    static constexpr KvType type = KvType::f16;
    static F load(const uint8_t* cell, int, int d) { return F::load_f16(reinterpret_cast<const uint16_t*>(cell) + d); }
};
struct EightBitValues {
    static constexpr KvType type = KvType::q8_0;
    // Exact: a scale has eleven bits.
    static F load(const uint8_t* cell, int value_dim, int d) {
        const auto* scales = reinterpret_cast<const float*>(cell + padded(value_dim, kBlock));
        return F::load_i8(cell + d) * F::set(scales[d / kBlock]);
    }
};

// Weighted sums of values for `rows` rows and `vectors` vectors of dimensions from `dim` on: the cells that all rows
// share are loaded once; what a row sees before and after them it goes through alone.
template <class Values, int rows, int vectors>
void mix_tile(const HeadChunk& p, const AttendRow* row, int dim, const float* weights) {
    const size_t stride = value_bytes(Values::type, p.value_dim);
    const uint8_t* chunk = p.v + p.begin * stride;
    int begin = row[0].first, end = row[0].direct;
    for (int r = 1; r < rows; ++r) {
        begin = row[r].first > begin ? row[r].first : begin;
        end = row[r].direct < end ? row[r].direct : end;
    }
    constexpr int units = vectors * kUnits;
    F sum[rows][units];
    clear(sum);
    const auto go_alone = [&](int r, int from, int to) {
        for (int c = from; c < to; ++c) {
            const uint8_t* cell =
                c < row[r].direct ? chunk + c * stride : p.v + row[r].tail[c - row[r].direct] * stride;
#pragma GCC unroll 16
            for (int u = 0; u < units; ++u) {
                const F value = Values::load(cell, p.value_dim, dim + u * F::lanes);
                sum[r][u] = fma(F::set(weights[r * kChunk + c]), value, sum[r][u]);
            }
        }
    };
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        go_alone(r, row[r].first, begin < end ? begin : row[r].first);
    }
    for (int c = begin; c < end; ++c) {
        const uint8_t* cell = chunk + c * stride;
        add_products(
            sum, [&](int r) { return F::set(weights[r * kChunk + c]); },
            [&](int u) { return Values::load(cell, p.value_dim, dim + u * F::lanes); });
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
        go_alone(r, begin < end ? end : row[r].first, row[r].last);
#pragma GCC unroll 16
        for (int u = 0; u < units; ++u) {
            sum[r][u].store(row[r].partial + dim + u * F::lanes);
        }
    }
}

template <class Values, int rows>
void mix(const HeadChunk& p, const AttendRow* row, const float* weights) {
    constexpr int vectors = kMixSums / rows < 4 ? kMixSums / rows : 4;
    const int width = padded(p.value_dim, kLanes);
    int dim = 0;
    for (; dim + vectors * kLanes <= width; dim += vectors * kLanes) {
        mix_tile<Values, rows, vectors>(p, row, dim, weights);
    }
    for (; dim < width; dim += kLanes) {
        mix_tile<Values, rows, 1>(p, row, dim, weights);
    }
}

// Raw scores of `rows` rows against F16 keys.
template <int rows>
struct HalfKeys {
    const HeadChunk& p;
    const AttendRow* row;

    void score(size_t block, size_t end, float* scores, size_t stride) const {
        constexpr int wide = kScoreSums / rows < 8 ? kScoreSums / rows : 8;
        for (; block + wide <= end; block += wide, scores += wide * kLanes) {
            score_tile<rows, wide>(p, row, block, scores, stride);
        }
        for (; block < end; ++block, scores += kLanes) {
            score_tile<rows, 1>(p, row, block, scores, stride);
        }
    }
};

// The same against keys of eight bits, with queries of eight bits: a product with a packed matrix. `scratch` keeps the
// queries.
template <int rows>
struct EightBitKeys {
    const HeadChunk& p;
    const AttendRow* row;
    float* scratch;

    int width() const { return padded(p.head_dim, kBlock); }
    QuantizedRows queries() const {
        auto* factors = reinterpret_cast<BlockFactors*>(scratch + width());
        return {rows, Packing::q8_0, reinterpret_cast<int8_t*>(factors + rows * width() / kBlock), factors};
    }
    void quantize_queries() const {
        clear_padding(scratch, p.head_dim, width());
        for (int r = 0; r < rows; ++r) {
            __builtin_memcpy(scratch, row[r].q, p.head_dim * sizeof(float));
            quantize(scratch, width(), r, queries());
        }
    }

    void score(size_t block, size_t end, float* scores, size_t stride) const {
        const size_t block_bytes = size_t(width() / kBlock) * layout_of(Packing::q8_0).block_bytes;
        Epilogue out;
        out.out = scores;
        out.stride = stride;
        integer_matmul<OffsetBlock<Quants<8>>>(p.k + block * block_bytes, 0, static_cast<int>(end - block),
                                               {rows, width(), nullptr, queries()}, out);
    }
};

// Raw scores of what the rows see beyond their direct cells, to the places of their positions.
template <int rows, class Keys>
void score_tails(const Keys& keys, const AttendRow* row, float* scores, float* loose) {
    int first = 0, last = 0;  // cells
    for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < row[r].last - row[r].direct; ++i) {
            const int cell = row[r].tail[i];
            first = last == 0 || cell < first ? cell : first;
            last = cell + 1 > last ? cell + 1 : last;
        }
    }
    for (int block = first / kLanes; block * kLanes < last; ++block) {
        keys.score(block, block + 1, loose, kLanes);
        for (int r = 0; r < rows; ++r) {
            for (int i = 0; i < row[r].last - row[r].direct; ++i) {
                const int lane = row[r].tail[i] - block * kLanes;
                if (lane >= 0 && lane < kLanes) {
                    scores[r * kChunk + row[r].direct + i] = loose[r * kLanes + lane];
                }
            }
        }
    }
}

template <int rows>
void attend_rows(const HeadChunk& p, int query) {
    AttendRow row[rows];
    int first = kChunk, last = 0;  // of what lies in cells of the same numbers
    for (int r = 0; r < rows; ++r) {
        row[r] = attend_row(p, query + r);
        first = row[r].first < first ? row[r].first : first;
        last = row[r].direct > last ? row[r].direct : last;
    }
    float *scores = p.scratch, *loose = scores + rows * kChunk;
    const auto score = [&](const auto& keys) {
        const int begin = first / kLanes, end = (last + kLanes - 1) / kLanes, chunk = p.begin / kLanes;
        if (begin < end) {
            keys.score(chunk + begin, chunk + end, scores + begin * kLanes, kChunk);
        }
        score_tails<rows>(keys, row, scores, loose);
    };
    if (p.type == KvType::f16) {
        score(HalfKeys<rows>{p, row});
    } else {
        const EightBitKeys<rows> keys{p, row, loose + rows * kLanes};
        keys.quantize_queries();
        score(keys);
    }
    for (int r = 0; r < rows; ++r) {
        float *state = row[r].partial + padded(p.value_dim, kLanes), top = 0, sum = 0;
        if (row[r].first < row[r].last) {
            sum = soften(scores + r * kChunk, row[r].first, row[r].last, row[r].scale, p.softcap, top);
        }
        state[kPartialSum] = sum;
        state[kPartialTop] = top;
        state[kPartialScale] = p.softcap > 0 ? 1 : row[r].scale;
    }
    if (p.type == KvType::f16) {
        mix<HalfValues, rows>(p, row, scores);
    } else {
        mix<EightBitValues, rows>(p, row, scores);
    }
}

template <int rows>
void attend_tile(const HeadChunk& p, int query, int n) {
    if constexpr (rows > 1) {
        if (n < rows) {
            attend_tile<rows - 1>(p, query, n);
            return;
        }
    }
    attend_rows<rows>(p, query);
}

// In tiles of nearly the same size.
void attend(const HeadChunk& p) {
    static_assert(kAttendRows <= kMostAttendRows, "attention_scratch() has room for so many rows");
    for (int query = p.first; query < p.last;) {
        const int left = p.last - query, tiles = (left + kAttendRows - 1) / kAttendRows, n = (left + tiles - 1) / tiles;
        attend_tile<kAttendRows>(p, query, n);
        query += n;
    }
}

void fold(const float* partials, size_t next, int count, int value_dim, float* total, float* out) {
    const int width = padded(value_dim, kLanes);
    float* state = total + width;
    for (int i = 0; i < count; ++i, partials += next) {
        const float* add = partials + width;
        if (add[kPartialSum] == 0) {
            continue;
        }
        if (state[kPartialSum] == 0) {
            __builtin_memcpy(total, partials, (width + kLanes) * sizeof(float));
            continue;
        }
        const float top = add[kPartialTop] > state[kPartialTop] ? add[kPartialTop] : state[kPartialTop];
        const Row factor = Row::set(state[kPartialScale]);
        const Row old = exp((Row::set(state[kPartialTop]) - Row::set(top)) * factor);
        const Row fresh = exp((Row::set(add[kPartialTop]) - Row::set(top)) * factor);
        for (int d = 0; d < width; d += kLanes) {
            fma(Row::load(partials + d), fresh, Row::load(total + d) * old).store(total + d);
        }
        float sums[kLanes];
        fma(Row::set(add[kPartialSum]), fresh, Row::set(state[kPartialSum]) * old).store(sums);
        state[kPartialSum] = sums[0];
        state[kPartialTop] = top;
    }
    const Row inverse = Row::set(1.0f / state[kPartialSum]);
    for (int d = 0; out && d < value_dim; d += kLanes) {
        store_first(Row::load(total + d) * inverse, out + d, value_dim - d);
    }
}
