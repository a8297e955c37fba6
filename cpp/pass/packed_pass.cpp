#include "pass/packed_pass.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "machine/pool.h"
#include "pass/transformer.h"
#include "weights/product.h"

namespace pystaged {

namespace {

// Rows there is memory for as soon as there is any.
constexpr int kFewRows = 64;

Activation activation_of(const Family& family) {
    return family.gate == Gate::clamped ? Activation::clamped_silu
           : family.has(kSquaredRelu)   ? Activation::squared_relu
           : family.gate == Gate::silu  ? Activation::silu
                                        : Activation::gelu;
}

}  // namespace

PackedPass::PackedPass(const Model& model)
    : Backend(model), attention_scratch_(model.num_threads(), model.numbers().head_dim) {
    const Hyperparameters& h = model.numbers();
    if (h.rope.dims > 0) {
        rotation_.half = h.rope.dims / 2;
        rotation_.amplitude = h.rope.amplitude();
        windowed_rotation_.half = h.windowed_rope.dims / 2;
        windowed_rotation_.amplitude = h.windowed_rope.amplitude();
    }
    for (const Layer& layer : model.weights().layers) {
        for (const Mixer& mixer : layer.mixers) {
            if (const auto* attention = std::get_if<Attention>(&mixer)) {
                product_stride_ = std::max(product_stride_, attention->qkv_stride);
            } else if (const auto* latent = std::get_if<LatentAttention>(&mixer)) {
                product_stride_ = std::max(product_stride_, latent->stride);
            } else if (const auto* delta = std::get_if<DeltaNet>(&mixer)) {
                product_stride_ = std::max(product_stride_, delta->stride);
            } else if (const auto* space = std::get_if<StateSpace>(&mixer)) {
                product_stride_ = std::max<size_t>(product_stride_, space->input[0].packed.padded_rows());
            } else {
                product_stride_ = std::max<size_t>(product_stride_, padded(3 * h.width, kBlock));
            }
        }
        if (layer.feed_forward) {
            const auto* dense = std::get_if<Dense>(&*layer.feed_forward);
            has_gate_ = has_gate_ || !dense || dense->gate.present();
        }
    }
    inputs_.resize(4);  // of a delta net, which may read its input by four matrices
    unit_.assign(h.delta.head_dim, 1 / std::sqrt(static_cast<float>(std::max(1, h.delta.head_dim))));
}

double PackedPass::bytes(const Hyperparameters& h) {
    const double values = (h.is_recurrent() ? 9.0 : 6.0) * h.padded_width() + 4.0 * h.q_width() + 2.0 * h.kv_width() +
                          3.0 * padded(std::max(h.ffn_width, h.experts.shared_width), kBlock) +
                          h.experts.used * (3.0 * h.padded_width() + 3.0 * padded(h.experts.width, kBlock)) +
                          padded(h.experts.count, kBlock);
    const double own = (h.num_layers + 1.0) * padded(h.layer_embedding_width, kBlock) +
                       padded(h.num_layers * h.layer_embedding_width, kBlock);
    const double delta = 2.0 * h.delta.channels() + 3.0 * h.delta.values() + h.space.channels() + 3.0 * h.space.inner();
    const LatentNumbers& latent = h.latent;
    const double latents =
        latent.rank == 0
            ? 0
            : 2.0 * latent.row() + 2.0 * latent.query_rank +
                  double(h.num_heads) * (3.0 * latent.query() + 6.0 * latent.value + 2.0 * latent.rank + h.head_dim);
    size_t inputs = 0;
    for (int layer = 0; layer < h.num_layers; ++layer) {
        inputs = std::max(inputs, h.recurrent_sizes(layer).input);
    }
    const double fused = 4.0 * h.hidden_width + 2.0 * std::max(h.features_width(), h.markov_rank);
    return sizeof(float) *
           (kMaxRows * (values + delta + fused + own + inputs + latents) + kFewRows * double(h.logits_stride()));
}

std::unique_ptr<TextState> PackedPass::make_state(int num_rows, int context) {
    return std::make_unique<PackedState>(model_, num_rows, context);
}

void PackedPass::make_room(int num_rows) {
    num_threads_ = model_.num_threads_for(num_rows);
    if (num_rows <= room_) {
        return;
    }
    // A few for trees; a prompt that fills a pass takes the most there are.
    const size_t rows = num_rows <= kFewRows ? kFewRows : kMaxRows;
    const Hyperparameters& h = model_.numbers();
    const int ffn_width = std::max(h.ffn_width, h.experts.shared_width);
    const LatentNumbers& latent = h.latent;
    const int mixed_width = std::max(h.q_width(), h.num_heads * latent.value);
    const size_t widest = padded(std::max({h.width, ffn_width, mixed_width}), kBlock);
    for (Lines<float>& stream : stream_) {
        stream.resize(rows * h.padded_width());
    }
    normed_.resize(rows * h.padded_width());
    branch_.resize(normed_.size());
    products_.resize(rows * product_stride_);
    mixed_.resize(rows * padded(std::max({h.width, mixed_width, h.delta.values(), h.space.inner()}), kBlock));
    hidden_.resize(rows * padded(std::max(ffn_width, h.layer_embedding_width), kBlock));
    const size_t own = h.num_layers * padded(h.layer_embedding_width, kBlock);
    layer_inputs_.resize(rows * (own + padded(h.num_layers * h.layer_embedding_width, kBlock)));
    if (has_gate_) {
        gate_.resize(hidden_.size());
    }
    // Of the residual stream, or of heads that are no whole blocks wide.
    const int fused = 2 * h.hidden_width;
    for (Quantized& input : inputs_) {
        input.resize(
            rows * padded(std::max({h.width, mixed_width, h.delta.values(), h.space.inner(), fused, h.features_width(),
                                    h.markov_rank, h.layer_embedding_width, latent.rank, latent.query_rank}),
                          kBlock));
    }
    fused_.resize(rows * fused);
    features_.resize(rows * std::max(h.features_width(), padded(h.markov_rank, kBlock)));
    handed_.resize(rows * widest);
    if (latent.rank > 0) {
        const size_t num_heads = h.num_heads;
        ranks_.resize(rows * padded(std::max(latent.rank, latent.query_rank), kBlock));
        queries_.resize(rows * padded(h.num_heads * std::max(latent.query(), latent.value), kBlock));
        heads_.resize(rows * padded(h.num_heads * std::max(h.head_dim, latent.own + latent.value), kBlock));
        const size_t transformed = latent.absorbed ? padded(std::max(latent.own, latent.rank), kBlock) : 0;
        head_inputs_.resize(rows * num_heads * transformed);
        quantized_heads_.resize(rows * num_heads * transformed);
    }
    const size_t places = rows * h.experts.used, expert_width = padded(h.experts.width, kBlock);
    scores_.resize(rows * padded(h.experts.count, kBlock));
    shared_gates_.resize(h.experts.count > 0 ? rows * kBlock : 0);
    gathered_.resize(places * h.padded_width());
    expert_out_.resize(places * h.padded_width());
    expert_hidden_.resize(places * expert_width);
    expert_gates_.resize(places * expert_width);
    for (Quantized& inputs : expert_inputs_) {
        inputs.resize(places * h.padded_width());
    }
    expert_handed_.resize(places * expert_width);
    room_ = static_cast<int>(rows);
}

void PackedPass::Quantized::resize(size_t values) {
    quants.resize(values);
    factors.resize(values / kBlock);
}

QuantizedRows PackedPass::Quantized::rows(int n, Packing packing) {
    return {n, packing, quants.data(), factors.data()};
}

void PackedPass::Rotation::set(const Pass& pass, bool windowed) {
    cosines.resize(pass.num_rows * half);
    sines.resize(pass.num_rows * half);
    for (const Segment& segment : pass.segments) {
        const auto& frequencies = static_cast<const PackedState&>(*segment.state).frequencies(windowed);
        for (int i = segment.first_row; half > 0 && i < segment.first_row + segment.num_rows; ++i) {
            rotation(frequencies, amplitude, pass.positions[i], &cosines[i * half], &sines[i * half]);
        }
    }
}

void PackedPass::compute(const Pass& pass) {
    const Hyperparameters& h = model_.numbers();
    make_room(pass.num_rows);
    rotation_.set(pass, false);
    if (h.window > 0) {
        windowed_rotation_.set(pass, true);
    }
    texts_.clear();
    for (const Segment& segment : pass.segments) {
        auto* const state = static_cast<PackedState*>(segment.state);
        const auto is_its = [&](const Text& text) { return text.state == state; };
        auto text = std::find_if(texts_.begin(), texts_.end(), is_its);
        if (text == texts_.end()) {
            text =
                texts_.insert(text, {state, segment.num_committed, segment.first_pending, segment.is_reading, {}, {}});
        }
        text->rows.resize(segment.first_pending, -1);
        for (int i = 0; i < segment.num_rows; ++i) {
            text->rows.push_back(segment.first_row + i);
        }
    }
    ancestors_.resize(size_t(pass.num_rows) * std::max(0, h.conv_taps - 1));
    for (Text& text : texts_) {
        const int num_rows = static_cast<int>(text.rows.size()) - text.first;
        int32_t* const parents = text.state->begin(text.num_committed, text.first, num_rows, text.is_reading);
        text.for_rows([&](int row, int pending) { parents[pending - text.first] = pass.parents[row]; });
        text.for_rows([&](int row, int pending) {
            for (int back = 1; back < h.conv_taps; ++back) {
                ancestors_[size_t(row) * (h.conv_taps - 1) + back - 1] = text.state->ancestor(pending, back);
            }
        });
        if (h.delta.head_dim > 0 || h.space.head_dim > 0) {
            // Rows of a reading's passes before are included in the state.
            text.walk.make(text.state->parents(), text.first, text.is_reading ? text.first : 0);
        }
    }
    row_scales_.clear();
    for (int i = 0; h.temperature_scale != 0 && i < pass.num_rows; ++i) {
        row_scales_.push_back(h.query_scale(pass.positions[i]));
    }
    pass_ = &pass;
    mixture_ = 0;
    if (pass.is_context) {
        run_context(*this, model_, pass.num_rows);
    } else {
        run_transformer(*this, model_, pass.num_rows, pass.num_logits, pass.embeddings != nullptr);
    }
    pass_ = nullptr;
}

float* PackedPass::next_rows() {
    in_stream_ = (in_stream_ + 1) % 3;
    return stream_[in_stream_].data();
}

void PackedPass::embed_token(int32_t token, float* out) const {
    const PackedMatrix& embedding = model_.token_embedding().packed;
    const float scale = model_.numbers().embedding_scale;
    embedding.row(token, out);
    for (int d = 0; scale != 1 && d < embedding.cols(); ++d) {
        out[d] *= scale;
    }
}

PackedPass::Value PackedPass::embed(int num_rows) {
    const Hyperparameters& h = model_.numbers();
    if (model_.family().reads == Reads::joined_with_tokens || model_.borrows_cells()) {
        return join(num_rows);
    }
    const size_t stride = h.padded_width();
    float* rows = next_rows();
    ThreadPool::shared().run(num_rows, threads_for(num_rows * stride), [&](int i, int) {
        float* row = rows + i * stride;
        embed_token(pass_->tokens[i], row);
        std::fill(row + h.width, row + stride, 0.0f);
        if (model_.weights().position_embedding.present()) {
            const float* position = model_.weights().position_embedding.data() + pass_->positions[i] * stride;
            for (size_t d = 0; d < stride; ++d) {
                row[d] += position[d];
            }
        }
    });
    const Value x{rows, num_rows, stride};
    if (h.layer_embedding_width > 0) {
        read_layer_embeddings(x);
    }
    return model_.family().reads == Reads::beside_tokens ? beside(x) : x;
}

float* PackedPass::layer_inputs(int layer) {
    return layer_inputs_.data() + size_t(layer) * room_ * padded(model_.numbers().layer_embedding_width, kBlock);
}

void PackedPass::read_layer_embeddings(const Value& x) {
    const Hyperparameters& h = model_.numbers();
    const LayerEmbeddings& embeddings = model_.weights().layer_embeddings;
    const int width = h.layer_embedding_width;
    const size_t stride = padded(width, kBlock), of_row = padded(h.num_layers * width, kBlock);
    float* rows = layer_inputs(h.num_layers);  // of all layers side by side
    Epilogue result = epilogue(embeddings.projection, rows, of_row);
    result.scale = 1 / std::sqrt(static_cast<float>(h.width));
    multiply_by(embeddings.projection, x, result);
    const float scale = std::sqrt(static_cast<float>(width)), half = 1 / std::sqrt(2.0f);
    ThreadPool::shared().run(x.n, threads_for(x.n * of_row), [&](int i, int) {
        std::vector<float> tokens(embeddings.tokens.packed.padded_cols());
        embeddings.tokens.packed.row(pass_->tokens[i], tokens.data());
        for (int layer = 0; layer < h.num_layers; ++layer) {
            float* out = layer_inputs(layer) + i * stride;
            apply(embeddings.norm, rows + i * of_row + size_t(layer) * width, width, out);
            for (int d = 0; d < width; ++d) {
                out[d] = (out[d] + tokens[size_t(layer) * width + d] * scale) * half;
            }
        }
    });
}

// EAGLE-3: the residual stream is what is read, [norm(embedding); norm(what is read)] the first layer's input.
PackedPass::Value PackedPass::beside(const Value& x) {
    const Hyperparameters& h = model_.numbers();
    float* rows = next_rows();
    std::vector<int> of_target;
    for (int i = 0; i < x.n; ++i) {
        if (pass_->of_target[i]) {
            of_target.push_back(i);
        } else {
            std::copy_n(pass_->inputs[i], h.width, rows + i * x.stride);
        }
    }
    read_features(of_target, rows, x.stride);
    for (int i = 0; i < x.n; ++i) {
        float *row = rows + i * x.stride, *both = fused_.data() + i * size_t(2) * h.width;
        apply(model_.weights().layers[0].mixer_norm, x.rows + i * x.stride, h.width, both);
        apply(model_.weights().features.beside_norm, row, h.width, both + h.width);
        if (h.norm_before_residual) {
            std::copy_n(both + h.width, h.width, row);
        }
    }
    return {rows, x.n, x.stride};
}

void PackedPass::read_features(const std::vector<int>& rows, float* out, size_t stride) {
    if (rows.empty()) {
        return;
    }
    const Hyperparameters& h = model_.numbers();
    const Features& features = model_.weights().features;
    const int width = h.features_width(), n = static_cast<int>(rows.size());
    for (int i = 0; i < n; ++i) {
        const float* from = pass_->inputs[rows[i]];
        float* row = features_.data() + size_t(i) * width;
        if (h.norm_before_fusion) {
            apply(features.norm, from, width, row);
        } else if (features.each_norm.present()) {
            for (int at = 0; at < width; at += h.target_width) {
                model_.kernel().rms_norm(from + at, features.each_norm.data() + at, h.norm_epsilon, h.target_width,
                                         h.target_width, row + at);
            }
        } else {
            std::copy_n(from, width, row);
        }
    }
    // The rows of the result may lie apart.
    const Value read{features_.data(), n, size_t(width)};
    multiply_by(features.projection, read, epilogue(features.projection, branch_.data(), stride));
    for (int i = 0; i < n; ++i) {
        float* to = out + rows[i] * stride;
        std::copy_n(branch_.data() + i * stride, stride, to);
        if (model_.family().reads == Reads::as_context) {
            apply(features.norm, to, h.width, to);
        }
    }
}

PackedPass::Value PackedPass::context(int num_rows) {
    std::vector<int> all(num_rows);
    std::iota(all.begin(), all.end(), 0);
    float* rows = next_rows();
    const size_t stride = model_.numbers().padded_width();
    read_features(all, rows, stride);
    return {rows, num_rows, stride};
}

void PackedPass::add_markov(const int32_t* before, int n, float* logits, float* maxima) {
    const Markov& markov = model_.weights().markov;
    const size_t stride = markov.in.packed.padded_cols();
    for (int first = 0; first < n; first += kMaxRows) {
        const int count = std::min(n - first, kMaxRows);
        make_room(count);
        for (int i = 0; i < count; ++i) {
            float* row = features_.data() + i * stride;
            std::fill_n(row, stride, 0.0f);
            markov.in.packed.row(before[first + i], row);
        }
        const size_t to = size_t(first) * model_.numbers().logits_stride();
        Epilogue sum = epilogue(markov.out, logits + to, model_.numbers().logits_stride());
        sum.residual = logits + to;
        multiply_by(markov.out, {features_.data(), count, stride}, sum, maxima + to / kRun);
    }
}

// The target's hidden states are read as its head reads them; the draft's own already are.
PackedPass::Value PackedPass::join(int num_rows) {
    const Hyperparameters& h = model_.numbers();
    const Fusion& fusion = model_.weights().fusion;
    const int width = h.hidden_width;
    const Value both{fused_.data(), num_rows, size_t(2) * width};
    for (int i = 0; i < num_rows; ++i) {
        float *token = fused_.data() + i * both.stride, *states = token + width;
        embed_token(pass_->tokens[i], token);
        std::copy_n(pass_->inputs[i], width, states);
        if (pass_->of_target[i]) {
            apply(model_.target().output_norm(), states, width, states);
        }
        if (fusion.token_norm.present()) {
            apply(fusion.token_norm, token, width, token);
            apply(fusion.hidden_norm, states, width, states);
        }
    }
    float* out = next_rows();
    const size_t stride = h.padded_width();
    multiply_by(fusion.projection, both, epilogue(fusion.projection, out, stride));
    return {out, num_rows, stride};
}

void PackedPass::hand_on(const Value& x) {
    const Linear& feedback = model_.weights().fusion.feedback;
    const size_t width = model_.numbers().hidden_width;
    multiply_by(feedback, norm(x, model_.output_norm()), epilogue(feedback, fused_.data(), width));
    for (int i = 0; i < x.n; ++i) {
        if (float* out = pass_->hidden[pass_->num_rows - x.n + i]) {
            std::copy_n(fused_.data() + i * width, width, out);
        }
    }
}

PackedPass::Value PackedPass::tail(Value x, int first_row) const {
    x.rows += first_row * x.stride;
    x.n -= first_row;
    return x;
}

PackedPass::Value PackedPass::norm(Value x, const Norm& norm) const {
    x.norm = norm.present() ? &norm : nullptr;
    return x;
}

void PackedPass::apply(const Norm& norm, const float* row, int cols, float* out) const {
    const Kernel& kernel = model_.kernel();
    const float epsilon = model_.numbers().norm_epsilon;
    if (model_.family().has(kLayerNorm)) {
        kernel.layer_norm(row, norm.weight.data(), norm.bias.data(), epsilon, cols, padded(cols, kBlock), out);
    } else {
        kernel.rms_norm(row, norm.weight.data(), epsilon, cols, padded(cols, kBlock), out);
    }
}

// The rows of x, normalized, and quantized as each of the matrices that will multiply them needs it.
std::vector<Activations> PackedPass::activations(const Value& x, const std::vector<const Linear*>& matrices) {
    const int cols = static_cast<int>(x.stride);
    std::vector<Activations> result;
    if (x.handed) {
        return {matrices.size(), Activations{x.n, cols, x.rows, handed_rows_}};
    }
    // What adds a zero point needs factors of its own kind; the others take any.
    std::vector<QuantizedRows> sets;
    const auto set_for = [&](const PackedMatrix& matrix) -> const QuantizedRows& {
        for (const QuantizedRows& set : sets) {
            if (matrix.reads(set.packing)) {
                return set;
            }
        }
        sets.push_back(inputs_[sets.size()].rows(x.n, matrix.packing()));
        return sets.back();
    };
    for (const bool with_zero_point : {true, false}) {
        for (const Linear* linear : matrices) {
            if (linear->packed.integer() && (zero_point(linear->packed.packing()) > 0) == with_zero_point) {
                set_for(linear->packed);
            }
        }
    }
    const auto prepare = [&](int i, int) {
        const float* row = x.rows + i * x.stride;
        if (x.norm) {
            float* normed = normed_.data() + i * x.stride;
            apply(*x.norm, row, matrices[0]->packed.cols(), normed);
            row = normed;
        }
        for (const QuantizedRows& set : sets) {
            model_.kernel().quantize(row, cols, i, set);
        }
    };
    if (x.norm || !sets.empty()) {
        ThreadPool::shared().run(x.n, threads_for(size_t(x.n) * cols), prepare);
    }
    for (const Linear* linear : matrices) {
        const bool integer = linear->packed.integer();
        result.push_back(
            {x.n, cols, x.norm ? normed_.data() : x.rows, integer ? set_for(linear->packed) : QuantizedRows()});
    }
    return result;
}

Epilogue PackedPass::epilogue(const Linear& linear, float* out, size_t stride) const {
    Epilogue result;
    result.bias = linear.bias.data();
    result.out = out;
    result.stride = stride;
    return result;
}

void PackedPass::multiply_by(const Linear& linear, const Value& x, const Epilogue& result, float* maxima) {
    multiply(model_.kernel(), {{&linear.packed, activations(x, {&linear})[0], result, nullptr, nullptr, maxima}},
             num_threads_);
}

const QuantizedRows* PackedPass::hand_to(const Linear& next, int n) {
    handed_rows_ = handed_.rows(n, next.packed.packing());
    return next.packed.integer() ? &handed_rows_ : nullptr;
}

void PackedPass::check_interruption() const {
    if (pass_->interrupted) {
        (*pass_->interrupted)();
    }
}

PackedPass::Value PackedPass::products(const std::vector<Linear>& all, const Value& x, size_t stride, int part,
                                       const std::function<void(size_t at, int row, int end)>& finish) {
    std::vector<const Linear*> matrices;
    for (const Linear& linear : all) {
        matrices.push_back(&linear);
    }
    const std::vector<Activations> inputs = activations(x, matrices);
    std::vector<Product> products;
    size_t at = 0;
    for (size_t i = 0; i < matrices.size(); ++i) {
        products.push_back({&matrices[i]->packed, inputs[i], epilogue(*matrices[i], products_.data() + at, stride)});
        products.back().part = part;
        products.back().finish = [&finish, at](int first, int row, int end) { finish(at + first, row, end); };
        at += matrices[i]->packed.padded_rows();
    }
    multiply(model_.kernel(), products, num_threads_);
    return {products_.data(), x.n, stride};
}

AttentionLayer PackedPass::attention_layer(int index) const {
    const Hyperparameters& h = model_.numbers();
    const LayerNumbers& numbers = h.layers[index];
    AttentionLayer how;
    how.num_heads = h.num_heads;
    how.num_kv_heads = numbers.num_kv_heads;
    how.head_dim = numbers.head_dim;
    how.value_dim = numbers.value_dim;
    how.scale = h.attention_scale;
    how.softcap = h.attention_softcap;
    how.window = numbers.windowed ? h.window : 0;
    how.norm_epsilon = h.norm_epsilon;
    return how;
}

AttentionRows PackedPass::attention_rows(const Value& input, int index, int first_row) const {
    const LayerNumbers& numbers = model_.numbers().layers[index];
    const Rotation& angles = numbers.windowed ? windowed_rotation_ : rotation_;
    AttentionRows rows;
    rows.n = pass_->num_rows;
    rows.begin = rows.n - input.n;
    rows.first_row = rows.begin + first_row;
    for (const Segment& segment : pass_->segments) {
        auto& state = numbers.lent ? static_cast<PackedState&>(*segment.lent).kv(numbers.cells_of)
                                   : static_cast<PackedState&>(*segment.state).kv(index);
        rows.segments.push_back({&state.cache(), segment.first_row, segment.num_rows, segment.first_cell()});
    }
    rows.contexts = pass_->contexts;
    rows.half = numbers.rotates ? static_cast<int>(angles.half) : 0;
    rows.cos = angles.cosines.data();
    rows.sin = angles.sines.data();
    rows.row_scale = row_scales_.empty() ? nullptr : row_scales_.data();
    return rows;
}

PackedPass::Value PackedPass::branch(const Attention& attention, const Value& x, const Value& input, int index,
                                     int first_row) {
    const Hyperparameters& h = model_.numbers();
    AttentionRows rows = attention_rows(input, index, first_row);
    rows.qkv = products_.data();
    rows.stride = attention.qkv_stride;
    rows.gate_at = attention.gate_at;
    rows.k_at = attention.k_at;
    rows.v_at = attention.v_at;

    const bool whole_norms = model_.family().required & kWholeNorms;
    AttentionLayer how = attention_layer(index);
    how.q_norm = whole_norms ? nullptr : attention.q_norm.weight.data();
    how.k_norm = whole_norms ? nullptr : attention.k_norm.weight.data();
    how.v_norm = attention.v_norm.data();
    how.sinks = attention.sinks.data();
    how.own_norms = model_.family().optional & kOwnHeadNorms;
    how.layer_norms = model_.family().has(kLayerNorm);

    const bool reads_both = index == 0 && model_.family().reads == Reads::beside_tokens;
    const Value read = reads_both ? Value{fused_.data(), input.n, size_t(2) * h.width} : input;
    const auto prepare = [&](size_t at, int row, int end) { prepare_head(model_.kernel(), how, rows, at, row, end); };
    const Value product = products(attention.qkv, read, attention.qkv_stride, whole_norms ? 0 : how.head_dim, prepare);
    if (whole_norms) {
        ThreadPool::shared().run(product.n, threads_for(product.n * product.stride), [&](int i, int) {
            float *q = rows.qkv + i * rows.stride, *k = q + rows.k_at;
            model_.kernel().rms_norm(q, attention.q_norm.weight.data(), h.norm_epsilon, h.q_width(), h.q_width(), q);
            model_.kernel().rms_norm(k, attention.k_norm.weight.data(), h.norm_epsilon, h.kv_width(), h.kv_width(), k);
            const auto prepare_heads = [&](size_t first, int width) {
                for (size_t at = first; at < first + width; at += h.head_dim) {
                    prepare(at, i, i + 1);
                }
            };
            prepare_heads(0, h.q_width());
            prepare_heads(rows.k_at, h.kv_width());
            prepare_heads(rows.v_at, h.kv_width());
        });
    }

    const int num_out = product.n - first_row;
    if (num_out == 0) {
        return {};
    }
    const size_t stride = padded(h.num_heads * how.head_dim, kBlock);
    const QuantizedRows* handed = how.head_dim % kBlock == 0 ? hand_to(attention.output, num_out) : nullptr;
    tree_attention(model_.kernel(), num_threads_, how, rows, mixed_.data(), stride, handed, attention_scratch_);
    return add(x, {mixed_.data(), num_out, stride, nullptr, handed != nullptr}, attention.output,
               model_.weights().layers[index].mixer_post_norm);
}

PackedPass::Value PackedPass::branch(const Dense& dense, const Value& x, const Value& input, const Norm& norm) {
    std::vector<Activations> inputs =
        activations(input, dense.gate.present() ? std::vector<const Linear*>{&dense.gate, &dense.up}
                                                : std::vector<const Linear*>{&dense.up});
    const QuantizedRows* handed = hand_to(dense.down, input.n);
    Product gate, up;
    open(dense, inputs.front(), inputs.back(), hidden_.data(), gate_.data(), handed, gate, up);
    multiply(model_.kernel(), {up}, num_threads_);
    return add(x, {hidden_.data(), input.n, up.epilogue.stride, nullptr, handed != nullptr}, dense.down, norm);
}

void PackedPass::open(const Dense& dense, const Activations& of_gate, const Activations& of_up, float* out,
                      float* gates, const QuantizedRows* handed, Product& gate, Product& up) const {
    const size_t stride = dense.down.packed.padded_cols();
    const Activation activation = activation_of(model_.family());
    up.weights = &dense.up.packed;
    up.x = of_up;
    up.epilogue = epilogue(dense.up, out, stride);
    up.quantized = handed;
    if (dense.gate.present()) {
        gate.weights = &dense.gate.packed;
        gate.x = of_gate;
        gate.epilogue = epilogue(dense.gate, gates, stride);
        gate.epilogue.activation = activation;
        up.epilogue.gate = gates;
        up.epilogue.activation = activation == Activation::clamped_silu ? Activation::clamped_linear : Activation::none;
        up.before = &gate;
    } else {
        up.epilogue.activation = activation;
        up.epilogue.gated = model_.family().gate != Gate::none;
    }
}

PackedPass::Value PackedPass::add(const Value& x, const Value& y, const Linear& linear, const Norm& norm) {
    const Hyperparameters& h = model_.numbers();
    float* out = next_rows();
    Epilogue branch = epilogue(linear, norm.present() ? branch_.data() : out, x.stride);
    if (!norm.present()) {
        branch.scale = h.residual_scale;
        branch.residual = x.rows;
    }
    multiply_by(linear, y, branch);
    ThreadPool::shared().run(norm.present() ? x.n : 0, threads_for(x.n * x.stride), [&](int i, int) {
        float *row = branch_.data() + i * x.stride, *sum = out + i * x.stride;
        apply(norm, row, h.width, row);
        for (size_t d = 0; d < x.stride; ++d) {
            sum[d] = x.rows[i * x.stride + d] + h.residual_scale * row[d];
        }
    });
    return {out, x.n, x.stride};
}

PackedPass::Value PackedPass::finish(const Value& x, int index) {
    const LayerEmbedding& embedding = model_.weights().layers[index].embedding;
    Value result = x;
    if (embedding.in.present()) {
        const size_t stride = embedding.out.packed.padded_cols();
        Epilogue opened = epilogue(embedding.in, hidden_.data(), stride);
        opened.activation = Activation::gelu;
        opened.gate = layer_inputs(index) + (pass_->num_rows - x.n) * stride;
        multiply_by(embedding.in, x, opened);
        result = add(x, {hidden_.data(), x.n, stride}, embedding.out, embedding.norm);
    }
    float* rows = stream_[in_stream_].data();  // which the result is
    for (size_t i = 0; embedding.scale != 1 && i < result.n * result.stride; ++i) {
        rows[i] *= embedding.scale;
    }
    return result;
}

void PackedPass::tap(const Value& x, int index) {
    const bool is_last = index + 1 == model_.numbers().num_layers;
    if (model_.borrows_cells()) {
        if (is_last) {
            hand_on(x);
        }
        return;
    }
    const std::vector<int>& taps = model_.taps();
    const auto found = std::find(taps.begin(), taps.end(), index + 1);
    const int width = model_.numbers().width, first = pass_->num_rows - x.n;
    for (int i = 0; found != taps.end() && pass_->hidden && i < x.n; ++i) {
        if (float* out = pass_->hidden[first + i]) {
            float* to = out + (found - taps.begin()) * width;
            if (model_.numbers().feeds_back_normed) {
                apply(model_.output_norm(), x.rows + i * x.stride, width, to);
            } else {
                std::copy_n(x.rows + i * x.stride, width, to);
            }
        }
    }
    for (int i = 0; is_last && pass_->embeddings && i < x.n; ++i) {
        if (float* out = pass_->embeddings[first + i]) {
            apply(model_.output_norm(), x.rows + i * x.stride, width, out);
        }
    }
}

// Straight to the caller's memory.
PackedPass::Value PackedPass::logits(const Value& x) {
    Epilogue out = epilogue(model_.head(), pass_->logits, model_.numbers().logits_stride());
    out.bias = model_.head_bias().data();
    out.scale = model_.numbers().logit_scale;
    out.softcap = model_.numbers().logit_softcap;
    multiply_by(model_.head(), x, out, pass_->maxima);
    return {};
}

}  // namespace pystaged
