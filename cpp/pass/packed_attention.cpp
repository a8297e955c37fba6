#include "pass/workspace.h"

namespace pystaged {

AttentionLayer attention_layer(const Workspace& w, int index) {
    const LayerNumbers& numbers = w.h.layers[index];
    return {.num_heads = w.h.num_heads,
            .num_kv_heads = numbers.num_kv_heads,
            .head_dim = numbers.head_dim,
            .value_dim = numbers.value_dim,
            .scale = w.h.attention_scale,
            .softcap = w.h.attention_softcap,
            .window = numbers.windowed ? w.h.window : 0,
            .norm_epsilon = w.h.norm_epsilon};
}

AttentionRows& attention_rows(Workspace& w, int num_inputs, int index, int first_row) {
    const LayerNumbers& numbers = w.h.layers[index];
    const Workspace::Rotation& angles = w.rotations[numbers.windowed];
    AttentionRows& rows = w.attention_rows;
    rows.n = w.pass->num_rows;
    rows.begin = rows.n - num_inputs;
    rows.first_row = rows.begin + first_row;
    rows.segments.clear();
    for (const Segment& segment : w.pass->segments) {
        auto& state = numbers.lent ? static_cast<PackedState&>(*segment.lent).kv(numbers.cells_of)
                                   : static_cast<PackedState&>(*segment.state).kv(index);
        rows.segments.push_back({&state.cache, segment.first_row, segment.num_rows, segment.first_cell()});
    }
    rows.contexts = w.pass->contexts;
    rows.half = numbers.rotates ? angles.half : 0;
    rows.cos = angles.cosines;
    rows.sin = angles.sines;
    rows.row_scale = w.row_scales;
    rows.gate_at = 0;
    return rows;
}

Value attend(Workspace& w, const AttentionLayer& how, const AttentionRows& rows, const Linear& output) {
    const int n = rows.n - rows.first_row, value_dim = how.value_dim > 0 ? how.value_dim : how.head_dim;
    const size_t stride = padded(how.num_heads * value_dim, kBlock);
    float* const out = w.take(n, stride);
    const QuantizedRows handed = value_dim % kBlock == 0 ? w.quantized(output, n, stride) : QuantizedRows();
    tree_attention(w.kernel, w.num_threads, how, rows, out, stride, handed, w.attention_scratch);
    return {out, n, stride, nullptr, handed};
}

Value mix(Workspace& w, const Attention& attention, const Value& input, int index, int first_row) {
    const Hyperparameters& h = w.h;
    AttentionRows& rows = attention_rows(w, input.n, index, first_row);
    rows.qkv = w.take(input.n, attention.qkv_stride);
    rows.stride = attention.qkv_stride;
    rows.gate_at = attention.gate_at;
    rows.k_at = attention.k_at;
    rows.v_at = attention.v_at;

    const bool whole_norms = w.model.family().required & kWholeNorms;
    AttentionLayer how = attention_layer(w, index);
    how.q_norm = whole_norms ? nullptr : attention.q_norm.weight.data();
    how.k_norm = whole_norms ? nullptr : attention.k_norm.weight.data();
    how.v_norm = attention.v_norm.data();
    how.sinks = attention.sinks.data();
    how.own_norms = w.model.family().optional & kOwnHeadNorms;
    how.layer_norms = w.model.family().has(kLayerNorm);

    const auto prepare = [&](int at, int row, int end) { prepare_head(w.kernel, how, rows, at, row, end); };
    const std::function<void(int at, int row, int end)> finish = std::cref(prepare);  // which allocates nothing
    w.products(attention.qkv, input, rows.qkv, rows.stride, whole_norms ? 0 : how.head_dim, &finish);
    w.for_rows(whole_norms ? input.n : 0, rows.stride, [&](int i, int) {
        float *q = rows.qkv + i * rows.stride, *k = q + rows.k_at;
        w.kernel.rms_norm(q, attention.q_norm.weight.data(), h.norm_epsilon, h.q_width(), h.q_width(), q);
        w.kernel.rms_norm(k, attention.k_norm.weight.data(), h.norm_epsilon, h.kv_width(), h.kv_width(), k);
        const std::pair<size_t, int> parts[] = {{0, h.q_width()}, {rows.k_at, h.kv_width()}, {rows.v_at, h.kv_width()}};
        for (const auto& [first, width] : parts) {
            for (size_t at = first; at < first + width; at += h.head_dim) {
                prepare(static_cast<int>(at), i, i + 1);
            }
        }
    });
    return first_row == input.n ? Value() : attend(w, how, rows, attention.output);
}

}  // namespace pystaged
