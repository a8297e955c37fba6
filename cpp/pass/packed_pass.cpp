// A pass over packed weights, on the CPU: every operation runs at once and shares its work over the thread pool, five
// joins a layer, so that a busy machine does not stall at a spinning barrier.
#include <algorithm>
#include <cmath>

#include "pass/workspace.h"

namespace pystaged {

static void read_layer_embeddings(Workspace& w, const Value& x) {
    const LayerEmbeddings& embeddings = w.model.weights().layer_embeddings;
    const int width = w.h.layer_embedding_width;
    const size_t stride = padded(width, kBlock), of_row = padded(w.h.num_layers * width, kBlock);
    w.layer_inputs = w.take(w.h.num_layers * x.n, stride);
    float *rows = w.take(x.n, of_row), *tokens = w.take(x.n, embeddings.tokens.packed.padded_cols());
    Epilogue result = epilogue(embeddings.projection, rows, of_row);
    result.scale = 1 / std::sqrt(static_cast<float>(w.h.width));
    w.multiply(embeddings.projection, x, result);
    const float scale = std::sqrt(static_cast<float>(width)), half = 1 / std::sqrt(2.0f);
    w.for_rows(x.n, of_row, [&](int i, int) {
        float* token = tokens + size_t(i) * embeddings.tokens.packed.padded_cols();
        embeddings.tokens.packed.row(w.pass->rows[i].token, token);
        for (int layer = 0; layer < w.h.num_layers; ++layer, token += width) {
            float* out = w.layer_inputs + (size_t(layer) * x.n + i) * stride;
            w.apply(embeddings.norm, rows + i * of_row + size_t(layer) * width, width, out);
            for (int d = 0; d < width; ++d) {
                out[d] = (out[d] + token[d] * scale) * half;
            }
        }
    });
}

static Value embed(Workspace& w) {
    const Pass& pass = *w.pass;
    const Reads reads = w.model.family().reads;
    if (reads == Reads::joined_with_tokens || w.model.borrows_cells()) {
        return join_hidden(w);
    }
    const size_t stride = w.h.padded_width();
    float* const rows = w.next_rows();
    w.for_rows(pass.num_rows, stride, [&](int i, int) {
        float* row = rows + i * stride;
        w.embed_token(pass.rows[i].token, row);
        std::fill(row + w.h.width, row + stride, 0.0f);
        if (w.model.weights().position_embedding.present()) {
            const float* position = w.model.weights().position_embedding.data() + pass.rows[i].position * stride;
            std::transform(row, row + stride, position, row, std::plus<>());
        }
    });
    const Value x{rows, pass.num_rows, stride};
    if (w.h.layer_embedding_width > 0) {
        read_layer_embeddings(w, x);
    }
    return reads == Reads::beside_tokens ? hidden_beside(w, x) : x;
}

// x plus the branches of a layer's mixers, one after the other.
static Value add_mixers(Workspace& w, Value x, const Value& input, int index, int first_row) {
    if (w.pass->interrupted) {
        (*w.pass->interrupted)();
    }
    const Layer& layer = w.model.weights().layers[index];
    for (const Mixer& each : layer.mixers) {
        std::visit(
            [&](const auto& mixer) {
                const Value mixed = mix(w, mixer, input, index, first_row);
                x = mixed.n > 0 ? w.add(x, mixed, mixer.output, layer.mixer_post_norm) : x;
            },
            each);
    }
    return x;
}

// x with the layer's own embeddings of tokens, scaled.
static Value finish(Workspace& w, const Value& x, int index) {
    const LayerEmbedding& embedding = w.model.weights().layers[index].embedding;
    Value result = x;
    if (embedding.in.present()) {
        const int num_rows = w.pass->num_rows;
        const size_t stride = embedding.out.packed.padded_cols();
        float* const hidden = w.take(x.n, stride);
        Epilogue opened = epilogue(embedding.in, hidden, stride);
        opened.activation = Activation::gelu;
        opened.gate = w.layer_inputs + (size_t(index) * num_rows + num_rows - x.n) * stride;
        w.multiply(embedding.in, x, opened);
        result = w.add(x, {hidden, x.n, stride}, embedding.out, embedding.norm);
    }
    if (embedding.scale != 1) {
        float* const rows = const_cast<float*>(result.rows);  // of the residual stream
        std::transform(rows, rows + result.n * result.stride, rows, [&](float v) { return v * embedding.scale; });
    }
    return result;
}

// Keeps what is asked for of the rows behind a layer.
static void tap(Workspace& w, const Value& x, int index) {
    const Pass& pass = *w.pass;
    const bool is_last = index + 1 == w.h.num_layers;
    if (w.model.borrows_cells()) {
        if (is_last) {
            hand_on(w, x);
        }
        return;
    }
    const std::vector<int>& taps = w.model.taps();
    const auto found = std::find(taps.begin(), taps.end(), index + 1);
    for (int i = 0, first = pass.num_rows - x.n; i < x.n; ++i) {
        const float* row = x.rows + i * x.stride;
        const PassRow& asks = pass.rows[first + i];
        if (found != taps.end() && asks.hidden) {
            float* to = asks.hidden + (found - taps.begin()) * w.h.width;
            if (w.h.feeds_back_normed) {
                w.apply(w.model.output_norm(), row, w.h.width, to);
            } else {
                std::copy_n(row, w.h.width, to);
            }
        }
        if (is_last && asks.embedding) {
            w.apply(w.model.output_norm(), row, w.h.width, asks.embedding);
        }
    }
}

// The decoder of every family: the residual stream from layer to layer, and its end as logits.
static void decode(Workspace& w, const Pass& pass) {
    const int first_judged = pass.num_rows - pass.num_logits;
    const int first_wanted =
        pass.embeds || w.model.taps_end() ? 0 : first_judged;  // that anything reads behind the last mixer
    Value x = embed(w);
    for (int i = 0; i < w.h.num_layers; ++i) {
        const Arena::Mark mark = w.arena.mark();
        const Layer& layer = w.model.weights().layers[i];
        const int first_row = i == w.h.last_mixing ? first_wanted : 0;
        Value input = i == 0 && w.first_input.n > 0 ? w.first_input : x.normed(layer.mixer_norm);
        x = add_mixers(w, x.from(first_row), input, i, first_row);
        if (first_row == pass.num_rows) {
            return;
        }
        if (layer.feed_forward) {
            // Parallel branches read the same. Where only results are normalized, there is neither of the norms.
            const bool parallel = layer.mixer_norm.present() && !layer.ffn_norm.present();
            input = parallel ? input.from(first_row) : x.normed(layer.ffn_norm);
            x = std::visit([&](const auto& network) { return add(w, network, x, input, layer.ffn_post_norm); },
                           *layer.feed_forward);
        }
        x = finish(w, x, i);
        tap(w, x, i);
        w.arena.reset(mark);
    }
    if (pass.num_logits > 0) {  // which go straight to the caller's memory
        Epilogue out = epilogue(w.model.head(), pass.logits, w.h.logits_stride());
        out.bias = w.model.head_bias().data();
        out.scale = w.h.logit_scale;
        out.softcap = w.h.logit_softcap;
        x = x.from(first_judged - first_wanted).normed(w.model.output_norm());
        w.multiply(w.model.head(), x, out, pass.maxima);
    }
}

// Rows that are context: every layer's mixer takes them in as they are, and that is all.
static void take_in(Workspace& w, const Pass& pass) {
    const Value x = hidden_context(w);
    for (int i = 0; i < w.h.num_layers; ++i) {
        const Arena::Mark mark = w.arena.mark();
        add_mixers(w, x.from(pass.num_rows), x, i, pass.num_rows);
        w.arena.reset(mark);
    }
}

namespace {

class PackedPass : public Backend {
public:
    explicit PackedPass(const Model& model) : Backend(model), w_(model) {}

    std::unique_ptr<TextState> make_state(int num_rows, int context) override {
        return std::make_unique<PackedState>(model_, num_rows, context);
    }
    void compute(const Pass& pass) override {
        w_.begin(pass);
        if (pass.is_context) {
            take_in(w_, pass);
        } else {
            decode(w_, pass);
        }
        w_.end();
    }
    void add_markov(const int32_t* before, int n, float* logits, float* maxima) override {
        for (int first = 0; first < n; first += kMostPassRows) {
            const size_t to = first * model_.numbers().logits_stride();
            add_markov_rows(w_, before + first, std::min(n - first, kMostPassRows), logits + to, maxima + to / kRun);
        }
    }

private:
    Workspace w_;
};

}  // namespace

std::unique_ptr<Backend> make_packed_pass(const Model& model) {
    return std::make_unique<PackedPass>(model);
}

void open(const Workspace& w, const Dense& dense, const Activations& of_gate, const Activations& of_up, float* out,
          float* gates, const QuantizedRows& handed, Product& gate, Product& up) {
    const Family& family = w.model.family();
    const size_t stride = dense.down.packed.padded_cols();
    const Activation activation = family.gate == Gate::clamped ? Activation::clamped_silu
                                  : family.has(kSquaredRelu)   ? Activation::squared_relu
                                  : family.gate == Gate::silu  ? Activation::silu
                                                               : Activation::gelu;
    up = {&dense.up.packed, of_up, epilogue(dense.up, out, stride), handed};
    if (dense.gate.present()) {
        gate = {&dense.gate.packed, of_gate, epilogue(dense.gate, gates, stride)};
        gate.epilogue.activation = activation;
        up.epilogue.gate = gates;
        up.epilogue.activation = activation == Activation::clamped_silu ? Activation::clamped_linear : Activation::none;
        up.before = &gate;
    } else {
        up.epilogue.activation = activation;
        up.epilogue.gated = family.gate != Gate::none;
    }
}

Value open(Workspace& w, const Dense& dense, const Value& input, const Linear* beside, float* out) {
    const Inputs read = w.inputs(input, {&dense.up, &dense.gate, beside});
    const size_t stride = dense.down.packed.padded_cols();
    const QuantizedRows handed = w.quantized(dense.down, input.n, stride);
    float *hidden = w.take(input.n, stride), *gates = dense.gate.present() ? w.take(input.n, stride) : nullptr;
    Product gate, products[2];
    open(w, dense, read[1], read[0], hidden, gates, handed, gate, products[0]);
    if (beside) {
        products[1] = {&beside->packed, read[2], epilogue(*beside, out, kBlock)};
    }
    w.multiply(products, beside ? 2 : 1);
    return {hidden, input.n, stride, nullptr, handed};
}

Value add(Workspace& w, const Dense& dense, const Value& x, const Value& input, const Norm& post_norm) {
    return w.add(x, open(w, dense, input), dense.down, post_norm);
}

}  // namespace pystaged
