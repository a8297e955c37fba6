// Latent attention. Heads attend to latent rows as they are, where files have what transforms queries and results; else
// to keys and values that are made of them. Which of the two never depends on the pass, as both round differently.
#include <algorithm>

#include "pass/workspace.h"

namespace pystaged {

// Writes keys and values of the rows of latent attention.
static void store_latents(Workspace& w, const LatentAttention& attention, const AttentionRows& rows, int n) {
    const LatentNumbers& latent = w.h.latent;
    const size_t cols = padded(latent.rank, kBlock);
    const int each = latent.own + latent.value;
    const size_t stride = padded(w.h.num_heads * each, kBlock);
    struct Cell {
        KvCache* cache;
        int number;
    };
    Cell* const cells = w.arena.take<Cell>(n);
    for (const AttentionSegment& segment : rows.segments) {
        for (int i = std::max(segment.first_row, rows.begin); i < segment.first_row + segment.num_rows; ++i) {
            cells[i - rows.begin] = {segment.cache, segment.first_cell + i - segment.first_row};
        }
    }
    const auto latent_row = [&](int i) { return rows.qkv + i * rows.stride + attention.latent_at; };
    float* const ranks = latent.absorbed ? nullptr : w.take(n, cols);
    w.for_rows(n, stride, [&](int i, int) {
        float* row = latent_row(i);
        const size_t angles = size_t(rows.begin + i) * rows.half;
        w.kernel.rms_norm(row, attention.norm.weight.data(), w.h.norm_epsilon, latent.rank, latent.rank, row);
        w.kernel.rotate(row + latent.rank, rows.half, rows.cos + angles, rows.sin + angles);
        if (latent.absorbed) {
            cells[i].cache->store_key(w.kernel, 0, cells[i].number, row);
            cells[i].cache->store_value(w.kernel, 0, cells[i].number, row);
        } else {
            std::fill(std::copy_n(row, latent.rank, ranks + i * cols), ranks + (i + 1) * cols, 0.0f);
        }
    });
    if (latent.absorbed) {
        return;
    }
    float *made = w.take(n, stride), *keys = w.take(n, latent.query());
    w.multiply(attention.expansion, {ranks, n, cols}, epilogue(attention.expansion, made, stride));
    w.for_rows(n, stride, [&](int i, int) {
        float* key = keys + size_t(i) * latent.query();
        std::copy_n(latent_row(i) + latent.rank, latent.turned, key + latent.own);
        for (int head = 0; head < w.h.num_heads; ++head) {
            const float* of_head = made + i * stride + size_t(head) * each;
            std::copy_n(of_head, latent.own, key);
            cells[i].cache->store_key(w.kernel, head, cells[i].number, key);
            cells[i].cache->store_value(w.kernel, head, cells[i].number, of_head + latent.own);
        }
    });
}

// Of each head its part, multiplied apart: inputs [heads][n][cols], quantized in the same order, as rows of `width`
// outputs side by side.
static void multiply_heads(Workspace& w, const std::vector<Linear>& matrices, int n, int cols, const float* inputs,
                           const QuantizedRows& quantized, float* out, int width, size_t stride) {
    Product* const products = w.arena.take<Product>(matrices.size());
    for (size_t head = 0; head < matrices.size(); ++head) {
        products[head] = {
            &matrices[head].packed,
            {n, cols, inputs + head * n * cols, from_block(quantized, static_cast<int>(head * cols / kBlock))},
            epilogue(matrices[head], out + head * width, stride)};
    }
    w.multiply(products, matrices.size());
}

Value mix(Workspace& w, const LatentAttention& attention, const Value& input, int index, int first_row) {
    const LatentNumbers& latent = w.h.latent;
    const int num_heads = w.h.num_heads, n = input.n - first_row, head_dim = w.h.head_dim;
    AttentionRows& rows = attention_rows(w, input.n, index, first_row);
    rows.qkv = w.take(input.n, attention.stride);
    rows.stride = attention.stride;
    w.products(attention.input, input, rows.qkv, rows.stride);
    store_latents(w, attention, rows, input.n);
    if (n == 0) {
        return {};
    }
    rows.begin = rows.first_row;
    rows.qkv += first_row * rows.stride;
    if (attention.queries.present()) {
        const size_t cols = padded(latent.query_rank, kBlock), stride = attention.queries.packed.padded_rows();
        float *ranks = w.take(n, cols), *queries = w.take(n, stride);
        w.for_rows(n, cols, [&](int i, int) {
            w.apply(attention.q_norm, rows.qkv + i * rows.stride, latent.query_rank, ranks + i * cols);
        });
        w.multiply(attention.queries, {ranks, n, cols}, epilogue(attention.queries, queries, stride));
        rows.qkv = queries;
        rows.stride = stride;
    }
    const size_t own = padded(latent.own, kBlock), stride = size_t(num_heads) * head_dim;
    float *parts = nullptr, *queries = nullptr;  // what matrices of each head read, and queries of latent rows
    QuantizedRows quantized;
    if (latent.absorbed) {
        parts = w.take(n * num_heads, own);
        queries = w.take(n, stride);
        quantized = w.quantized(attention.keys[0], n, num_heads * own);
    }
    w.for_rows(n, stride, [&](int i, int) {
        const size_t angles = size_t(rows.begin + i) * rows.half;
        for (int head = 0; head < num_heads; ++head) {
            float* query = rows.qkv + i * rows.stride + size_t(head) * latent.query();
            w.kernel.rotate(query + latent.own, rows.half, rows.cos + angles, rows.sin + angles);
            if (latent.absorbed) {
                float* part = parts + (size_t(head) * n + i) * own;
                std::fill(std::copy_n(query, latent.own, part), part + own, 0.0f);
                if (quantized.quants) {
                    w.kernel.quantize(part, static_cast<int>(own), i,
                                      from_block(quantized, static_cast<int>(head * own / kBlock)));
                }
                std::copy_n(query + latent.own, latent.turned,
                            queries + i * stride + size_t(head) * head_dim + latent.rank);
            }
        }
    });
    const AttentionLayer how = attention_layer(w, index);
    if (!latent.absorbed) {
        return attend(w, how, rows, attention.output);
    }
    multiply_heads(w, attention.keys, n, static_cast<int>(own), parts, quantized, queries, head_dim, stride);
    rows.qkv = queries;
    rows.stride = stride;
    const Value latents = attend(w, how, rows, attention.values[0]);
    if (!latents.handed.quants) {
        parts = w.take(n * num_heads, latent.rank);
        w.for_rows(n, latents.stride, [&](int i, int) {
            for (int head = 0; head < num_heads; ++head) {
                std::copy_n(latents.rows + i * latents.stride + size_t(head) * latent.rank, latent.rank,
                            parts + (size_t(head) * n + i) * latent.rank);
            }
        });
    }
    const size_t width = size_t(num_heads) * latent.value;
    float* const out = w.take(n, width);
    multiply_heads(w, attention.values, n, latent.rank, parts, latents.handed, out, latent.value, width);
    return {out, n, width};
}

}  // namespace pystaged
