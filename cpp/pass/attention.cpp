#include "pass/attention.h"

#include <numeric>

#include "machine/math.h"
#include "machine/pool.h"

namespace pystaged {

// So many for each thread share out evenly enough.
constexpr int kTasksEnough = 4;

static void normalize(const Kernel& kernel, const AttentionLayer& how, const float* norm, int head, float* x) {
    if (norm) {
        const float* weight = norm + (how.own_norms ? size_t(head) * how.head_dim : 0);
        if (how.layer_norms) {
            kernel.layer_norm(x, weight, nullptr, how.norm_epsilon, how.head_dim, how.head_dim, x);
        } else {
            kernel.rms_norm(x, weight, how.norm_epsilon, how.head_dim, how.head_dim, x);
        }
    }
}

static void norm_and_rotate(const Kernel& kernel, const AttentionLayer& how, const AttentionRows& rows,
                            const float* norm, int head, int row, float* x) {
    normalize(kernel, how, norm, head, x);
    if (rows.half > 0) {
        const size_t angles = size_t(row) * rows.half;
        kernel.rotate(x, rows.half, rows.cos + angles, rows.sin + angles);
    }
}

void prepare_head(const Kernel& kernel, const AttentionLayer& how, const AttentionRows& rows, size_t at, int row,
                  int end) {
    const auto head_behind = [&](size_t first) { return static_cast<int>((at - first) / how.head_dim); };
    for (const AttentionSegment& segment : rows.segments) {
        const int last = std::min(segment.first_row + segment.num_rows, rows.begin + end);
        for (int i = std::max(segment.first_row, rows.begin + row); i < last; ++i) {
            float* x = rows.qkv + (i - rows.begin) * rows.stride + at;
            const int cell = segment.first_cell + i - segment.first_row;
            if (at >= rows.v_at) {
                normalize(kernel, how, how.v_norm, 0, x);
                segment.cache->store_value(kernel, head_behind(rows.v_at), cell, x);
            } else if (at >= rows.k_at) {
                if (rows.v_at == rows.stride) {
                    thread_local std::vector<float> value;
                    value.assign(x, x + how.head_dim);
                    normalize(kernel, how, how.v_norm, 0, value.data());
                    segment.cache->store_value(kernel, head_behind(rows.k_at), cell, value.data());
                }
                norm_and_rotate(kernel, how, rows, how.k_norm, head_behind(rows.k_at), i, x);
                segment.cache->store_key(kernel, head_behind(rows.k_at), cell, x);
            } else if (i >= rows.first_row && head_behind(0) < how.num_heads) {
                norm_and_rotate(kernel, how, rows, how.q_norm, head_behind(0), i, x);
            }
        }
    }
}

void tree_attention(const Kernel& kernel, int num_threads, const AttentionLayer& how, const AttentionRows& rows,
                    float* out, size_t out_stride, const QuantizedRows& quantized, AttentionScratch& scratch) {
    const int head_dim = how.head_dim, num_kv_heads = how.num_kv_heads, group = how.num_heads / num_kv_heads;
    const int num_segments = static_cast<int>(rows.segments.size());
    const int value_dim = how.value_dim > 0 ? how.value_dim : head_dim;
    const size_t stride = partial_stride(value_dim);
    std::vector<AttentionShare>& shares = scratch.shares;
    shares.assign(num_segments, {});
    size_t head_floats = 0;  // of all shares
    int64_t most_chunks = 0, chunk_queries = 0;
    for (int s = 0; s < num_segments; ++s) {
        const AttentionSegment& segment = rows.segments[s];
        AttentionShare& share = shares[s];
        const int end = segment.first_row + segment.num_rows;
        share.first_row = std::min(end, std::max(segment.first_row, rows.first_row));
        share.queries = (end - share.first_row) * group;
        for (int i = share.first_row; i < end; ++i) {
            const int length = rows.contexts[i].length;
            const int first = how.window > 0 ? std::max(0, length - how.window) / kChunk : 0;
            share.first_chunk = std::min(share.first_chunk, first);
            share.last_chunk = std::max(share.last_chunk, (length + kChunk - 1) / kChunk);
        }
        share.totals = num_kv_heads * head_floats;
        head_floats += share.queries * stride;
        const int chunks = share.chunks_of(0, INT_MAX);
        most_chunks = std::max<int64_t>(most_chunks, chunks);
        chunk_queries += int64_t(chunks) * share.queries;
    }
    const int at_once = static_cast<int>(std::clamp(
        scratch.most_partials / std::max<size_t>(1, num_kv_heads * head_floats), size_t(1), size_t(INT_MAX)));
    int64_t tasks = 0;
    for (const AttentionShare& share : shares) {
        tasks += int64_t(num_kv_heads) * share.chunks_of(0, at_once);
    }
    // Tasks that threads cannot share out evenly are split by queries, and so is a share that is long beside the
    // others.
    const bool uneven = tasks % num_threads != 0 && tasks < kTasksEnough * num_threads;
    const int split = uneven ? num_threads / std::gcd(num_threads, static_cast<int>(tasks)) : 1;
    const int64_t most_queries = std::max<int64_t>(1, num_kv_heads * chunk_queries / (kTasksEnough * num_threads));
    size_t all_parts = 0;
    for (AttentionShare& share : shares) {
        const int64_t parts = num_segments == 1 ? 1 : (share.queries + most_queries - 1) / most_queries;
        share.parts =
            static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(std::max<int64_t>(split, parts), share.queries)));
        share.unfinished = all_parts;
        all_parts += size_t(num_kv_heads) * share.parts;
    }

    const auto attend = [&](int s, int kv_head, int chunk, int part, float* partials, int worker) {
        const KvCache& cache = *rows.segments[s].cache;
        const AttentionShare& share = shares[s];
        kernel.attend(
            {.first = share.first_of(part),
             .last = share.first_of(part + 1),
             .begin = chunk * kChunk,
             .group = group,
             .head_dim = head_dim,
             .value_dim = value_dim,
             .window = how.window,
             .scale = how.scale,
             .softcap = how.softcap,
             .row_scale = rows.row_scale ? rows.row_scale + share.first_row : nullptr,
             .rows = rows.contexts + share.first_row,
             .q = rows.qkv + (share.first_row - rows.begin) * rows.stride + size_t(kv_head) * group * head_dim,
             .q_stride = rows.stride,
             .type = cache.type(),
             .k = cache.keys(kv_head),
             .v = cache.values(kv_head),
             .scratch = scratch.scores.data() + worker * attention_scratch(head_dim),
             .partials = partials});
    };
    const auto fold = [&](const AttentionShare& share, int kv_head, int part, const float* partials, int first,
                          int count) {
        const bool done = first + count == share.last_chunk;
        const size_t next = share.queries * stride;
        for (int i = share.first_of(part); i < share.first_of(part + 1); ++i) {
            const int row = share.first_row - rows.first_row + i / group, head = kv_head * group + i % group;
            float* to = out + row * out_stride + size_t(head) * value_dim;
            float* total = scratch.totals.data() + share.totals + kv_head * next + i * stride;
            std::fill_n(total, first == share.first_chunk ? stride : 0, 0.0f);
            kernel.fold(partials + i * stride, next, count, value_dim, total, done ? to : nullptr);
            if (done && how.sinks) {
                const float* state = total + padded(value_dim, kLanes);
                const double sum = state[kPartialSum];
                const double sink = own_exp(how.sinks[head] - double(state[kPartialTop]) * state[kPartialScale]);
                const float kept = static_cast<float>(sum / (sum + sink));
                std::transform(to, to + value_dim, to, [kept](float x) { return x * kept; });
            }
            if (done && rows.gate_at > 0) {
                const float* gates = rows.qkv + (rows.first_row + row - rows.begin) * rows.stride + rows.gate_at;
                kernel.open(gates + size_t(head) * value_dim, false, value_dim, to);
            }
            if (done && quantized.quants) {
                kernel.quantize(to, value_dim, row, from_block(quantized, head * value_dim / kBlock));
            }
        }
    };

    scratch.totals.resize(std::max(scratch.totals.size(), num_kv_heads * head_floats));
    if (scratch.unfinished.size() < all_parts) {
        scratch.unfinished = std::vector<std::atomic<int>>(all_parts);
    }
    for (int64_t done = 0; done < most_chunks; done += at_once) {
        int num_tasks = 0;
        size_t floats = 0;
        for (AttentionShare& share : shares) {
            share.first_task = num_tasks;
            share.chunks = share.chunks_of(done, at_once);
            share.partials = floats;
            const int num_parts = num_kv_heads * share.parts;
            std::fill_n(&scratch.unfinished[share.unfinished], num_parts, share.chunks);
            num_tasks += num_parts * share.chunks;
            floats += size_t(num_kv_heads) * share.chunks * share.queries * stride;
        }
        scratch.partials.resize(std::max(scratch.partials.size(), floats));
        ThreadPool::shared().run(num_tasks, num_threads, [&](int task, int worker) {
            int s = 0;
            while (s + 1 < num_segments && shares[s + 1].first_task <= task) {
                ++s;
            }
            const AttentionShare& share = shares[s];
            const int i = task - share.first_task, per_head = share.chunks * share.parts;
            const int kv_head = i / per_head, at = i % per_head / share.parts, part = i % share.parts;
            const size_t chunk_floats = share.queries * stride;
            float* partials = scratch.partials.data() + share.partials + kv_head * share.chunks * chunk_floats;
            const int first = share.first_chunk + static_cast<int>(done);
            attend(s, kv_head, first + at, part, partials + at * chunk_floats, worker);
            if (--scratch.unfinished[share.unfinished + kv_head * share.parts + part] == 0) {
                fold(share, kv_head, part, partials, first, share.chunks);
            }
        });
    }
    for (int i = 0; i < rows.n - rows.first_row; ++i) {
        std::fill(out + i * out_stride + size_t(how.num_heads) * value_dim, out + (i + 1) * out_stride, 0.0f);
    }
}

}  // namespace pystaged
