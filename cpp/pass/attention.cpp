#include "pass/attention.h"

#include <algorithm>
#include <climits>
#include <numeric>

#include "thread_pool.h"

namespace pystaged {

namespace {

// Below this many values a join costs more than it saves.
constexpr int kValuesWorthSharing = 4 << 10;
// So many for each thread share out evenly enough.
constexpr int kTasksEnough = 4;

void norm_and_rotate(const Kernel& kernel, const AttentionLayer& how, const AttentionRows& rows, const float* norm,
                     int head, int row, float* x) {
    if (norm) {
        const float* weight = norm + (how.own_norms ? size_t(head) * how.head_dim : 0);
        if (how.layer_norms) {
            kernel.layer_norm(x, weight, nullptr, how.norm_epsilon, how.head_dim, how.head_dim, x);
        } else {
            kernel.rms_norm(x, weight, how.norm_epsilon, how.head_dim, how.head_dim, x);
        }
    }
    if (rows.half > 0) {
        const size_t angles = size_t(row) * rows.half;
        kernel.rotate(x, rows.half, rows.cos + angles, rows.sin + angles);
    }
}

}  // namespace

void tree_attention(const Kernel& kernel, int num_threads, KvCache& cache, int layer, const AttentionLayer& how,
                    const AttentionRows& rows, float* out, size_t out_stride, const QuantizedRows* quantized,
                    AttentionScratch& scratch) {
    const int head_dim = how.head_dim, num_kv_heads = how.num_kv_heads, group = how.num_heads / num_kv_heads;
    const int num_out = rows.n - rows.first_row, numbers = num_out * group;
    int first_chunk = INT_MAX, last_chunk = 0;
    for (int i = rows.first_row; i < rows.n; ++i) {
        const int length = rows.contexts[i].length;
        first_chunk = std::min(first_chunk, how.window > 0 ? std::max(0, length - how.window) / kChunk : 0);
        last_chunk = std::max(last_chunk, (length + kChunk - 1) / kChunk);
    }
    const size_t stride = partial_stride(head_dim), head_floats = numbers * stride;
    const int at_once = static_cast<int>(std::clamp(
        scratch.most_partials / std::max<size_t>(1, num_kv_heads * head_floats), size_t(1), size_t(INT_MAX)));
    // What does not share out evenly is split by what reads it.
    const int tasks = num_kv_heads * std::min(at_once, std::max(1, last_chunk - first_chunk));
    const bool uneven = tasks % num_threads != 0 && tasks < kTasksEnough * num_threads;
    const int parts = std::max(1, std::min(uneven ? num_threads / std::gcd(num_threads, tasks) : 1, numbers));

    const auto prepare = [&](int kv_head) {
        for (int i = 0; i < rows.n; ++i) {
            const size_t at = i * rows.stride + size_t(kv_head) * head_dim;
            norm_and_rotate(kernel, how, rows, how.k_norm, kv_head, i, rows.k + at);
            cache.store(kernel, layer, kv_head, rows.first_cell + i, rows.k + at, rows.v + at);
            for (int head = kv_head * group; i >= rows.first_row && head < (kv_head + 1) * group; ++head) {
                norm_and_rotate(kernel, how, rows, how.q_norm, head, i,
                                rows.q + i * rows.stride + size_t(head) * head_dim);
            }
        }
    };
    const auto attend = [&](int kv_head, int chunk, int first, int last, float* partials, int worker) {
        HeadChunk pass;
        pass.first = first;
        pass.last = last;
        pass.begin = chunk * kChunk;
        pass.group = group;
        pass.head_dim = head_dim;
        pass.window = how.window;
        pass.scale = how.scale;
        pass.softcap = how.softcap;
        pass.row_scale = rows.row_scale ? rows.row_scale + rows.first_row : nullptr;
        pass.rows = rows.contexts + rows.first_row;
        pass.q = rows.q + rows.first_row * rows.stride + size_t(kv_head) * group * head_dim;
        pass.q_stride = rows.stride;
        pass.type = cache.type();
        pass.k = cache.keys(layer, kv_head);
        pass.v = cache.values(layer, kv_head);
        pass.scratch = scratch.scores.data() + worker * attention_scratch(head_dim);
        pass.partials = partials;
        kernel.attend(pass);
    };
    const auto fold = [&](int kv_head, const float* partials, int count, bool done) {
        for (int i = 0; i < numbers; ++i) {
            const int row = i / group, head = kv_head * group + i % group;
            float* to = out + row * out_stride + size_t(head) * head_dim;
            float* total = scratch.totals.data() + kv_head * head_floats + i * stride;
            kernel.fold(partials + i * stride, head_floats, count, head_dim, total, done ? to : nullptr);
            if (done && quantized) {
                kernel.quantize(to, head_dim, row, from_block(*quantized, head * head_dim / kBlock));
            }
        }
    };

    // A whole head is independent of every other, its cells included: where each is one task, one join serves all.
    const bool whole = parts == 1 && last_chunk - first_chunk == 1;
    if (!whole) {
        const size_t values = size_t(rows.n) * (how.num_heads + 2 * num_kv_heads) * head_dim;
        ThreadPool::shared().run(num_kv_heads, values < kValuesWorthSharing ? 1 : num_threads,
                                 [&](int kv_head, int) { prepare(kv_head); });
    }
    scratch.totals.assign(num_kv_heads * head_floats, 0.0f);
    for (int chunk = first_chunk; chunk < last_chunk; chunk += at_once) {
        const int chunks = std::min(at_once, last_chunk - chunk), per_head = chunks * parts;
        scratch.partials.resize(std::max(scratch.partials.size(), num_kv_heads * chunks * head_floats));
        std::fill_n(scratch.unfinished.get(), num_kv_heads, per_head);
        ThreadPool::shared().run(num_kv_heads * per_head, num_threads, [&](int i, int worker) {
            const int kv_head = i / per_head, at = i % per_head / parts, part = i % parts;
            if (whole) {
                prepare(kv_head);
            }
            float* partials = scratch.partials.data() + kv_head * chunks * head_floats;
            attend(kv_head, chunk + at, numbers * part / parts, numbers * (part + 1) / parts,
                   partials + at * head_floats, worker);
            if (--scratch.unfinished[kv_head] == 0) {
                fold(kv_head, partials, chunks, chunk + chunks == last_chunk);
            }
        });
    }
    for (int i = 0; i < num_out; ++i) {
        std::fill(out + i * out_stride + size_t(how.num_heads) * head_dim, out + (i + 1) * out_stride, 0.0f);
    }
}

}  // namespace pystaged
