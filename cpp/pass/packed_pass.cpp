#include "pass/packed_pass.h"

#include <algorithm>
#include <cmath>

namespace pystaged {

std::unique_ptr<TextState> PackedPass::make_state(int num_rows, int context) {
    return std::make_unique<PackedState>(model_, num_rows, context);
}

void PackedPass::compute(const Pass& pass) {
    w_.begin(pass);
    if (pass.is_context) {
        take_in(pass);
    } else {
        decode(pass);
    }
    w_.end();
}

void PackedPass::add_markov(const int32_t* before, int n, float* logits, float* maxima) {
    for (int first = 0; first < n; first += kMaxRows) {
        const size_t to = first * model_.numbers().logits_stride();
        add_markov_rows(w_, before + first, std::min(n - first, kMaxRows), logits + to, maxima + to / kRun);
    }
}

void PackedPass::decode(const Pass& pass) {
    const int first_judged = pass.num_rows - pass.num_logits;
    const int first_wanted =
        pass.embeds || model_.taps_end() ? 0 : first_judged;  // that anything reads behind the last mixer
    Value x = embed();
    for (int i = 0; i < model_.numbers().num_layers; ++i) {
        const Arena::Mark mark = w_.arena.mark();
        const Layer& layer = model_.weights().layers[i];
        const int first_row = i == model_.numbers().last_mixing ? first_wanted : 0;
        Value input = i == 0 && w_.first_input.n > 0 ? w_.first_input : x.normed(layer.mixer_norm);
        x = add_mixers(x.from(first_row), input, i, first_row);
        if (first_row == pass.num_rows) {
            return;
        }
        if (layer.feed_forward) {
            // Parallel branches read the same. Where only results are normalized, there is neither of the norms.
            const bool parallel = layer.mixer_norm.present() && !layer.ffn_norm.present();
            input = parallel ? input.from(first_row) : x.normed(layer.ffn_norm);
            x = std::visit([&](const auto& network) { return add(w_, network, x, input, layer.ffn_post_norm); },
                           *layer.feed_forward);
        }
        x = finish(x, i);
        tap(x, i);
        w_.arena.reset(mark);
    }
    if (pass.num_logits > 0) {
        write_logits(x.from(first_judged - first_wanted).normed(model_.output_norm()));
    }
}

void PackedPass::take_in(const Pass& pass) {
    const Value x = hidden_context(w_);
    for (int i = 0; i < model_.numbers().num_layers; ++i) {
        const Arena::Mark mark = w_.arena.mark();
        add_mixers(x.from(pass.num_rows), x, i, pass.num_rows);
        w_.arena.reset(mark);
    }
}

Value PackedPass::add_mixers(Value x, const Value& input, int index, int first_row) {
    if (w_.pass->interrupted) {
        (*w_.pass->interrupted)();
    }
    const Layer& layer = model_.weights().layers[index];
    for (const Mixer& each : layer.mixers) {
        std::visit(
            [&](const auto& mixer) {
                const Value mixed = mix(w_, mixer, input, index, first_row);
                x = mixed.n > 0 ? w_.add(x, mixed, mixer.output, layer.mixer_post_norm) : x;
            },
            each);
    }
    return x;
}

Value PackedPass::embed() {
    const Hyperparameters& h = model_.numbers();
    const Pass& pass = *w_.pass;
    const Reads reads = model_.family().reads;
    if (reads == Reads::joined_with_tokens || model_.borrows_cells()) {
        return join_hidden(w_);
    }
    const size_t stride = h.padded_width();
    float* const rows = w_.next_rows();
    w_.for_rows(pass.num_rows, stride, [&](int i, int) {
        float* row = rows + i * stride;
        w_.embed_token(pass.rows[i].token, row);
        std::fill(row + h.width, row + stride, 0.0f);
        if (model_.weights().position_embedding.present()) {
            const float* position = model_.weights().position_embedding.data() + pass.rows[i].position * stride;
            std::transform(row, row + stride, position, row, std::plus<>());
        }
    });
    const Value x{rows, pass.num_rows, stride};
    if (h.layer_embedding_width > 0) {
        read_layer_embeddings(x);
    }
    return reads == Reads::beside_tokens ? hidden_beside(w_, x) : x;
}

void PackedPass::read_layer_embeddings(const Value& x) {
    const Hyperparameters& h = model_.numbers();
    const LayerEmbeddings& embeddings = model_.weights().layer_embeddings;
    const int width = h.layer_embedding_width;
    const size_t stride = padded(width, kBlock), of_row = padded(h.num_layers * width, kBlock);
    w_.layer_inputs = w_.take(h.num_layers * x.n, stride);
    float *rows = w_.take(x.n, of_row), *tokens = w_.take(x.n, embeddings.tokens.packed.padded_cols());
    Epilogue result = epilogue(embeddings.projection, rows, of_row);
    result.scale = 1 / std::sqrt(static_cast<float>(h.width));
    w_.multiply(embeddings.projection, x, result);
    const float scale = std::sqrt(static_cast<float>(width)), half = 1 / std::sqrt(2.0f);
    w_.for_rows(x.n, of_row, [&](int i, int) {
        float* token = tokens + size_t(i) * embeddings.tokens.packed.padded_cols();
        embeddings.tokens.packed.row(w_.pass->rows[i].token, token);
        for (int layer = 0; layer < h.num_layers; ++layer, token += width) {
            float* out = w_.layer_inputs + (size_t(layer) * x.n + i) * stride;
            w_.apply(embeddings.norm, rows + i * of_row + size_t(layer) * width, width, out);
            for (int d = 0; d < width; ++d) {
                out[d] = (out[d] + token[d] * scale) * half;
            }
        }
    });
}

Value PackedPass::finish(const Value& x, int index) {
    const LayerEmbedding& embedding = model_.weights().layers[index].embedding;
    Value result = x;
    if (embedding.in.present()) {
        const int num_rows = w_.pass->num_rows;
        const size_t stride = embedding.out.packed.padded_cols();
        float* const hidden = w_.take(x.n, stride);
        Epilogue opened = epilogue(embedding.in, hidden, stride);
        opened.activation = Activation::gelu;
        opened.gate = w_.layer_inputs + (size_t(index) * num_rows + num_rows - x.n) * stride;
        w_.multiply(embedding.in, x, opened);
        result = w_.add(x, {hidden, x.n, stride}, embedding.out, embedding.norm);
    }
    if (embedding.scale != 1) {
        float* const rows = const_cast<float*>(result.rows);  // of the residual stream
        std::transform(rows, rows + result.n * result.stride, rows, [&](float v) { return v * embedding.scale; });
    }
    return result;
}

void PackedPass::tap(const Value& x, int index) {
    const Hyperparameters& h = model_.numbers();
    const Pass& pass = *w_.pass;
    const bool is_last = index + 1 == h.num_layers;
    if (model_.borrows_cells()) {
        if (is_last) {
            hand_on(w_, x);
        }
        return;
    }
    const std::vector<int>& taps = model_.taps();
    const auto found = std::find(taps.begin(), taps.end(), index + 1);
    for (int i = 0, first = pass.num_rows - x.n; i < x.n; ++i) {
        const float* row = x.rows + i * x.stride;
        const PassRow& asks = pass.rows[first + i];
        if (found != taps.end() && asks.hidden) {
            float* to = asks.hidden + (found - taps.begin()) * h.width;
            if (h.feeds_back_normed) {
                w_.apply(model_.output_norm(), row, h.width, to);
            } else {
                std::copy_n(row, h.width, to);
            }
        }
        if (is_last && asks.embedding) {
            w_.apply(model_.output_norm(), row, h.width, asks.embedding);
        }
    }
}

// Straight to the caller's memory.
void PackedPass::write_logits(const Value& x) {
    const Hyperparameters& h = model_.numbers();
    Epilogue out = epilogue(model_.head(), w_.pass->logits, h.logits_stride());
    out.bias = model_.head_bias().data();
    out.scale = h.logit_scale;
    out.softcap = h.logit_softcap;
    w_.multiply(model_.head(), x, out, w_.pass->maxima);
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

Value add(Workspace& w, const Dense& dense, const Value& x, const Value& input, const Norm& post_norm) {
    const Inputs read = w.inputs(input, {&dense.up, &dense.gate});
    const size_t stride = dense.down.packed.padded_cols();
    const QuantizedRows handed = w.quantized(dense.down, input.n, stride);
    float *hidden = w.take(input.n, stride), *gates = dense.gate.present() ? w.take(input.n, stride) : nullptr;
    Product gate, up;
    open(w, dense, read[1], read[0], hidden, gates, handed, gate, up);
    w.multiply(&up, 1);
    return w.add(x, {hidden, input.n, stride, nullptr, handed}, dense.down, post_norm);
}

}  // namespace pystaged
