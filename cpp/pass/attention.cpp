#include "pass/attention.h"

#include <algorithm>
#include <numeric>

#include "thread_pool.h"

namespace pystaged {

namespace {

// Below this many values a join costs more than it saves.
constexpr int kValuesWorthSharing = 4 << 10;

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
                    float* scratch) {
    const int head_dim = how.head_dim, group = how.num_heads / how.num_kv_heads, num_out = rows.n - rows.first_row;
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
    const auto attend = [&](int kv_head, int first, int last, int worker) {
        const size_t column = size_t(kv_head) * group * head_dim;
        HeadPass pass;
        pass.first = first;
        pass.last = last;
        pass.group = group;
        pass.head_dim = head_dim;
        pass.num_cells = rows.first_cell + rows.n;
        pass.window = how.window;
        pass.scale = how.scale;
        pass.softcap = how.softcap;
        pass.row_scale = rows.row_scale ? rows.row_scale + rows.first_row : nullptr;
        pass.rows = rows.contexts + rows.first_row;
        pass.q = rows.q + rows.first_row * rows.stride + column;
        pass.q_stride = rows.stride;
        pass.k = cache.keys(layer, kv_head);
        pass.v = cache.values(layer, kv_head);
        const int next = kv_head + num_threads;
        pass.upcoming = next < how.num_kv_heads ? cache.keys(layer, next) : nullptr;
        pass.scratch = scratch + worker * attention_scratch(cache.num_cells());
        pass.out = out + column;
        pass.out_stride = out_stride;
        kernel.attend(pass);
        for (int i = first; quantized && i < last; ++i) {
            const int row = i / group, head = kv_head * group + i % group;
            kernel.quantize(out + row * out_stride + size_t(head) * head_dim, head_dim, row,
                            from_block(*quantized, head * head_dim / kBlock));
        }
    };
    // Heads of keys that do not share out evenly are split by what reads them. A whole head is independent of every
    // other, its cells included, so that one join serves both halves.
    const int numbers = num_out * group;
    const int parts = std::max(1, std::min(num_threads / std::gcd(num_threads, how.num_kv_heads), numbers));
    if (parts == 1) {
        ThreadPool::shared().run(how.num_kv_heads, num_threads, [&](int kv_head, int worker) {
            prepare(kv_head);
            attend(kv_head, 0, numbers, worker);
        });
    } else {
        const int values = rows.n * (how.num_heads + 2 * how.num_kv_heads) * head_dim;
        ThreadPool::shared().run(how.num_kv_heads, values < kValuesWorthSharing ? 1 : num_threads,
                                 [&](int kv_head, int) { prepare(kv_head); });
        ThreadPool::shared().run(how.num_kv_heads * parts, num_threads, [&](int i, int worker) {
            const int part = i % parts;
            attend(i / parts, numbers * part / parts, numbers * (part + 1) / parts, worker);
        });
    }
    for (int i = 0; i < num_out; ++i) {
        std::fill(out + i * out_stride + size_t(how.num_heads) * head_dim, out + (i + 1) * out_stride, 0.0f);
    }
}

}  // namespace pystaged
