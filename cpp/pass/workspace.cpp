#include "pass/workspace.h"

#include <algorithm>
#include <cmath>

namespace pystaged {

Workspace::Workspace(const Model& model)
    : model(model),
      h(model.numbers()),
      kernel(model.kernel()),
      multiplier(model.kernel()),
      unit(h.delta.head_dim, 1 / std::sqrt(static_cast<float>(std::max(1, h.delta.head_dim)))),
      attention_scratch(model.num_threads(), model.numbers().head_dim) {}

void Workspace::begin(int num_rows) {
    num_threads = model.num_threads_for(num_rows);
    arena.clear();
}

void Workspace::begin(const Pass& next) {
    pass = &next;
    begin(next.num_rows);
    num_mixtures = 0;
    first_input = {};
    for (float*& rows : stream) {
        rows = take(next.num_rows, h.padded_width());
    }
    num_texts = 0;
    for (const Segment& segment : next.segments) {
        auto* const state = static_cast<PackedState*>(segment.state);
        const auto known = std::ranges::find(texts.begin(), texts.begin() + num_texts, state, &TextRows::state);
        const size_t at = known - texts.begin();
        if (static_cast<int>(at) == num_texts) {
            texts.resize(std::max(texts.size(), at + 1));
            TextRows& text = texts[num_texts++];
            text.state = state;
            text.num_committed = segment.num_committed;
            text.first = segment.first_pending;
            text.is_reading = segment.is_reading;
            text.rows.clear();
        }
        texts[at].rows.resize(segment.first_pending, -1);
        for (int i = 0; i < segment.num_rows; ++i) {
            texts[at].rows.push_back(segment.first_row + i);
        }
    }
    const int before = std::max(0, h.conv_width - 1);
    ancestors.resize(size_t(next.num_rows) * before);
    for (int i = 0; i < num_texts; ++i) {
        TextRows& text = texts[i];
        PackedState& state = *text.state;
        const int num_rows = static_cast<int>(text.rows.size()) - text.first;
        int32_t* const parents = state.begin(text.num_committed, text.first, num_rows, text.is_reading);
        text.for_rows([&](int row, int pending) { parents[pending - text.first] = next.rows[row].parent; });
        text.for_rows([&](int row, int pending) {
            for (int back = 1; back <= before; ++back) {
                ancestors[row * size_t(before) + back - 1] = state.ancestor(pending, back);
            }
        });
        if (h.delta.head_dim > 0 || h.space.head_dim > 0) {
            // Rows of a reading's passes before are included in the state.
            text.walk.make(state.parents(), text.first, text.is_reading ? text.first : 0);
        }
    }
    rotate(false, h.rope);
    rotate(true, h.windowed_rope);
    row_scales = h.temperature_scale != 0 ? take(next.num_rows, 1) : nullptr;
    for (int i = 0; row_scales && i < next.num_rows; ++i) {
        row_scales[i] = h.query_scale(next.rows[i].position);
    }
}

void Workspace::end() {
    pass = nullptr;
    arena.clear();
}

void Workspace::rotate(bool windowed, const Rope& rope) {
    Rotation& angles = rotations[windowed];
    angles.half = h.rope.dims > 0 && (h.window > 0 || !windowed) ? rope.dims / 2 : 0;
    angles.cosines = take(pass->num_rows, angles.half);
    angles.sines = take(pass->num_rows, angles.half);
    const double amplitude = rope.amplitude();
    for (int i = 0; angles.half > 0 && i < num_texts; ++i) {
        const std::vector<double>& frequencies = texts[i].state->frequencies(windowed);
        texts[i].for_rows([&](int row, int) {
            const size_t at = size_t(row) * angles.half;
            rotation(frequencies, amplitude, pass->rows[row].position, angles.cosines + at, angles.sines + at);
        });
    }
}

QuantizedRows Workspace::quantized(const Linear& next, int n, size_t cols) {
    if (!next.packed.integer()) {
        return {};
    }
    return {n, next.packed.packing(), arena.take<int8_t>(n * cols), arena.take<BlockFactors>(n * cols / kBlock)};
}

void Workspace::apply(const Norm& norm, const float* row, int cols, float* out) const {
    if (model.family().has(kLayerNorm)) {
        kernel.layer_norm(row, norm.weight.data(), norm.bias.data(), h.norm_epsilon, cols, padded(cols, kBlock), out);
    } else {
        kernel.rms_norm(row, norm.weight.data(), h.norm_epsilon, cols, padded(cols, kBlock), out);
    }
}

// The rows of x, normalized, and quantized as each of the matrices needs it.
Inputs Workspace::inputs(const Value& x, const Matrices& matrices) {
    Inputs result;
    const int cols = static_cast<int>(x.stride);
    if (x.handed.quants) {
        result.fill({x.n, cols, x.rows, x.handed});
        return result;
    }
    float* const normed = x.norm ? take(x.n, x.stride) : nullptr;
    result.fill({x.n, cols, normed ? normed : x.rows, {}});
    QuantizedRows sets[std::tuple_size<Matrices>()];
    int num_sets = 0;
    // What adds a zero point needs factors of its own kind; the others take any.
    for (const bool with_zero_point : {true, false}) {
        for (size_t i = 0; i < matrices.size(); ++i) {
            if (!matrices[i] || !matrices[i]->present() || !matrices[i]->packed.integer() ||
                (layout_of(matrices[i]->packed.packing()).zero_point > 0) != with_zero_point) {
                continue;
            }
            const PackedMatrix& matrix = matrices[i]->packed;
            const auto set = std::find_if(sets, sets + num_sets,
                                          [&](const QuantizedRows& made) { return matrix.reads(made.packing); });
            if (set == sets + num_sets) {
                *set = quantized(*matrices[i], x.n, x.stride);
                ++num_sets;
            }
            result[i].quantized = *set;
        }
    }
    if (normed || num_sets > 0) {
        for_rows(x.n, x.stride, [&](int i, int) {
            const float* row = x.rows + i * x.stride;
            if (normed) {
                apply(*x.norm, row, matrices[0]->packed.cols(), normed + i * x.stride);
                row = normed + i * x.stride;
            }
            for (int set = 0; set < num_sets; ++set) {
                kernel.quantize(row, cols, i, sets[set]);
            }
        });
    }
    return result;
}

Epilogue epilogue(const Linear& linear, float* out, size_t stride) {
    return {.bias = linear.bias.data(), .out = out, .stride = stride};
}

void Workspace::multiply(const Linear& linear, const Value& x, const Epilogue& result, float* maxima) {
    const Product product{&linear.packed, inputs(x, {&linear})[0], result, {}, nullptr, maxima};
    multiply(&product, 1);
}

void Workspace::products(const std::vector<Linear>& all, const Value& x, float* out, size_t stride, int part,
                         const std::function<void(int at, int row, int end)>* finish) {
    Matrices matrices = {};
    std::transform(all.begin(), all.end(), matrices.begin(), [](const Linear& linear) { return &linear; });
    const Inputs read = inputs(x, matrices);
    Product products[std::tuple_size<Matrices>()];
    int at = 0;
    for (size_t i = 0; i < all.size(); ++i) {
        products[i] = {&all[i].packed, read[i], epilogue(all[i], out + at, stride), {}, nullptr, nullptr, part, at,
                       finish};
        at += all[i].packed.padded_rows();
    }
    multiply(products, all.size());
}

Value Workspace::products(const std::vector<Linear>& matrices, const Value& x, size_t stride) {
    float* const out = take(x.n, stride);
    products(matrices, x, out, stride);
    return {out, x.n, stride};
}

Value Workspace::add(const Value& x, const Value& y, const Linear& linear, const Norm& norm) {
    float* const out = next_rows();
    float* const branch = norm.present() ? take(x.n, x.stride) : out;
    Epilogue result = epilogue(linear, branch, x.stride);
    if (!norm.present()) {
        result.scale = h.residual_scale;
        result.residual = x.rows;
    }
    multiply(linear, y, result);
    for_rows(norm.present() ? x.n : 0, x.stride, [&](int i, int) {
        float *row = branch + i * x.stride, *sum = out + i * x.stride;
        apply(norm, row, h.width, row);
        for (size_t d = 0; d < x.stride; ++d) {
            sum[d] = x.rows[i * x.stride + d] + h.residual_scale * row[d];
        }
    });
    return {out, x.n, x.stride};
}

void Workspace::embed_token(int32_t token, float* out) const {
    const PackedMatrix& embedding = model.token_embedding().packed;
    embedding.row(token, out);
    for (int d = 0; h.embedding_scale != 1 && d < embedding.cols(); ++d) {
        out[d] *= h.embedding_scale;
    }
}

}  // namespace pystaged
