// Latent attention. Heads attend to latent rows as they are, where files have what transforms queries and results; else
// to keys and values that are made of them. Which of the two never depends on the pass, as both round differently.
#include <algorithm>

#include "machine/pool.h"
#include "pass/packed_pass.h"

namespace pystaged {

void PackedPass::store_latents(const LatentAttention& attention, const AttentionRows& rows, int n) {
    const Hyperparameters& h = model_.numbers();
    const LatentNumbers& latent = h.latent;
    const Kernel& kernel = model_.kernel();
    const size_t cols = padded(latent.rank, kBlock);
    const int each = latent.own + latent.value;
    const size_t stride = padded(h.num_heads * each, kBlock);
    std::vector<std::pair<KvCache*, int>> cells(n);
    for (const AttentionSegment& segment : rows.segments) {
        for (int i = std::max(segment.first_row, rows.begin); i < segment.first_row + segment.num_rows; ++i) {
            cells[i - rows.begin] = {segment.cache, segment.first_cell + i - segment.first_row};
        }
    }
    const auto for_rows = [&](const auto& act) {
        ThreadPool::shared().run(n, threads_for(n * stride), [&](int i, int) {
            act(i, products_.data() + i * attention.stride + attention.latent_at);
        });
    };
    for_rows([&](int i, float* row) {
        const size_t angles = size_t(rows.begin + i) * rows.half;
        kernel.rms_norm(row, attention.norm.weight.data(), h.norm_epsilon, latent.rank, latent.rank, row);
        kernel.rotate(row + latent.rank, rows.half, rows.cos + angles, rows.sin + angles);
        if (latent.absorbed) {
            const auto [cache, cell] = cells[i];
            cache->store_key(kernel, 0, cell, row);
            cache->store_value(kernel, 0, cell, row);
        } else {
            float* copy = ranks_.data() + i * cols;
            std::fill(std::copy_n(row, latent.rank, copy), copy + cols, 0.0f);
        }
    });
    if (latent.absorbed) {
        return;
    }
    multiply_by(attention.expansion, {ranks_.data(), n, cols}, epilogue(attention.expansion, heads_.data(), stride));
    for_rows([&](int i, const float* row) {
        const auto [cache, cell] = cells[i];
        std::vector<float> key(latent.query());
        std::copy_n(row + latent.rank, latent.turned, key.data() + latent.own);
        for (int head = 0; head < h.num_heads; ++head) {
            const float* made = heads_.data() + i * stride + size_t(head) * each;
            std::copy_n(made, latent.own, key.data());
            cache->store_key(kernel, head, cell, key.data());
            cache->store_value(kernel, head, cell, made + latent.own);
        }
    });
}

PackedPass::Value PackedPass::branch(const LatentAttention& attention, const Value& x, const Value& input, int index,
                                     int first_row) {
    const Hyperparameters& h = model_.numbers();
    const LatentNumbers& latent = h.latent;
    const Kernel& kernel = model_.kernel();
    const int num_heads = h.num_heads, n = input.n - first_row;
    AttentionRows rows = attention_rows(input, index, first_row);
    products(attention.input, input, attention.stride);
    store_latents(attention, rows, input.n);
    if (n == 0) {
        return {};
    }

    rows.begin = rows.first_row;
    rows.qkv = products_.data() + first_row * attention.stride;
    rows.stride = attention.stride;
    if (attention.queries.present()) {
        const size_t cols = padded(latent.query_rank, kBlock), stride = attention.queries.packed.padded_rows();
        ThreadPool::shared().run(n, threads_for(n * cols), [&](int i, int) {
            apply(attention.q_norm, rows.qkv + i * rows.stride, latent.query_rank, ranks_.data() + i * cols);
        });
        multiply_by(attention.queries, {ranks_.data(), n, cols}, epilogue(attention.queries, queries_.data(), stride));
        rows.qkv = queries_.data();
        rows.stride = stride;
    }

    // Products of each head's part, [heads][n][cols] of `head_inputs_` or quantized, side by side in rows of `out`.
    const auto multiply_heads = [&](const std::vector<Linear>& matrices, size_t cols, const QuantizedRows& quantized,
                                    float* out, int width, size_t stride) {
        std::vector<Product> products;
        for (int head = 0; head < num_heads; ++head) {
            products.push_back({&matrices[head].packed,
                                {n, int(cols), head_inputs_.data() + head * n * cols,
                                 from_block(quantized, static_cast<int>(head * cols / kBlock))},
                                epilogue(matrices[head], out + size_t(head) * width, stride)});
        }
        multiply(kernel, products, num_threads_);
    };
    const size_t own = padded(latent.own, kBlock), stride = size_t(num_heads) * h.head_dim;
    const bool quantizes = latent.absorbed && attention.keys[0].packed.integer();
    QuantizedRows quantized;
    if (latent.absorbed) {
        quantized = quantized_heads_.rows(n, attention.keys[0].packed.packing());
    }
    ThreadPool::shared().run(n, threads_for(n * stride), [&](int i, int) {
        const size_t angles = size_t(rows.begin + i) * rows.half;
        for (int head = 0; head < num_heads; ++head) {
            float* query = rows.qkv + i * rows.stride + size_t(head) * latent.query();
            kernel.rotate(query + latent.own, rows.half, rows.cos + angles, rows.sin + angles);
            if (latent.absorbed) {
                float* part = head_inputs_.data() + (size_t(head) * n + i) * own;
                std::fill(std::copy_n(query, latent.own, part), part + own, 0.0f);
                if (quantizes) {
                    kernel.quantize(part, static_cast<int>(own), i,
                                    from_block(quantized, static_cast<int>(head * own / kBlock)));
                }
                std::copy_n(query + latent.own, latent.turned,
                            heads_.data() + i * stride + size_t(head) * h.head_dim + latent.rank);
            }
        }
    });
    const AttentionLayer how = attention_layer(index);
    const size_t width = padded(num_heads * how.value_dim, kBlock);
    const Norm& norm = model_.weights().layers[index].mixer_post_norm;
    if (!latent.absorbed) {
        const QuantizedRows* handed = how.value_dim % kBlock == 0 ? hand_to(attention.output, n) : nullptr;
        tree_attention(kernel, num_threads_, how, rows, mixed_.data(), width, handed, attention_scratch_);
        return add(x, {mixed_.data(), n, width, nullptr, handed != nullptr}, attention.output, norm);
    }
    multiply_heads(attention.keys, own, quantized, heads_.data(), h.head_dim, stride);
    rows.qkv = heads_.data();
    rows.stride = stride;
    const PackedMatrix& values = attention.values[0].packed;
    quantized = quantized_heads_.rows(n, values.packing());
    tree_attention(kernel, num_threads_, how, rows, mixed_.data(), width, values.integer() ? &quantized : nullptr,
                   attention_scratch_);
    ThreadPool::shared().run(values.integer() ? 0 : n, threads_for(n * width), [&](int i, int) {
        for (int head = 0; head < num_heads; ++head) {
            std::copy_n(mixed_.data() + i * width + size_t(head) * latent.rank, latent.rank,
                        head_inputs_.data() + (size_t(head) * n + i) * latent.rank);
        }
    });
    const size_t result = size_t(num_heads) * latent.value;
    multiply_heads(attention.values, latent.rank, quantized, queries_.data(), latent.value, result);
    return add(x, {queries_.data(), n, result}, attention.output, norm);
}

}  // namespace pystaged
