// What drafts read of other models' hidden states, and hand on.
#include <algorithm>

#include "pass/workspace.h"

namespace pystaged {

// The hidden states that a draft reads of its target, as rows of its own width. Rows of the draft's own are left out.
static void read_features(Workspace& w, float* out, size_t stride) {
    const Hyperparameters& h = w.h;
    const Features& features = w.model.weights().features;
    const bool is_context = w.model.family().reads == Reads::as_context;
    const int width = h.features_width();
    int n = 0;
    int* const rows = w.arena.take<int>(w.pass->num_rows);
    for (int i = 0; i < w.pass->num_rows; ++i) {
        if (is_context || w.pass->rows[i].of_target) {
            rows[n++] = i;
        }
    }
    if (n == 0) {
        return;
    }
    float *read = w.take(n, width), *made = w.take(n, stride);
    for (int i = 0; i < n; ++i) {
        const float* from = w.pass->rows[rows[i]].input;
        float* row = read + size_t(i) * width;
        if (h.norm_before_fusion) {
            w.apply(features.norm, from, width, row);
        } else if (features.each_norm.present()) {
            for (int at = 0; at < width; at += h.target_width) {
                w.kernel.rms_norm(from + at, features.each_norm.data() + at, h.norm_epsilon, h.target_width,
                                  h.target_width, row + at);
            }
        } else {
            std::copy_n(from, width, row);
        }
    }
    // The rows of the result may lie apart.
    w.multiply(features.projection, {read, n, size_t(width)}, epilogue(features.projection, made, stride));
    for (int i = 0; i < n; ++i) {
        float* to = out + rows[i] * stride;
        std::copy_n(made + i * stride, stride, to);
        if (is_context) {
            w.apply(features.norm, to, h.width, to);
        }
    }
}

// The target's hidden states are read as its head reads them; the draft's own already are.
Value join_hidden(Workspace& w) {
    const Fusion& fusion = w.model.weights().fusion;
    const Pass& pass = *w.pass;
    const int width = w.h.hidden_width;
    const size_t stride = size_t(2) * width;
    float* const both = w.take(pass.num_rows, stride);
    for (int i = 0; i < pass.num_rows; ++i) {
        float *token = both + i * stride, *states = token + width;
        w.embed_token(pass.rows[i].token, token);
        std::copy_n(pass.rows[i].input, width, states);
        if (pass.rows[i].of_target) {
            w.apply(w.model.target().output_norm(), states, width, states);
        }
        if (fusion.token_norm.present()) {
            w.apply(fusion.token_norm, token, width, token);
            w.apply(fusion.hidden_norm, states, width, states);
        }
    }
    const Value x{w.next_rows(), pass.num_rows, size_t(w.h.padded_width())};
    w.multiply(fusion.projection, {both, x.n, stride},
               epilogue(fusion.projection, const_cast<float*>(x.rows), x.stride));
    return x;
}

// The residual stream is what is read, [norm(embedding); norm(what is read)] the first layer's input.
Value hidden_beside(Workspace& w, const Value& embedded) {
    const int width = w.h.width;
    const Value x{w.next_rows(), embedded.n, embedded.stride};
    float *rows = const_cast<float*>(x.rows), *both = w.take(x.n, size_t(2) * width);
    for (int i = 0; i < x.n; ++i) {
        if (!w.pass->rows[i].of_target) {
            std::copy_n(w.pass->rows[i].input, width, rows + i * x.stride);
        }
    }
    read_features(w, rows, x.stride);
    w.first_input = {both, x.n, size_t(2) * width};
    for (int i = 0; i < x.n; ++i, rows += x.stride, both += 2 * width) {
        w.apply(w.model.weights().layers[0].mixer_norm, embedded.rows + i * x.stride, width, both);
        w.apply(w.model.weights().features.beside_norm, rows, width, both + width);
        if (w.h.norm_before_residual) {
            std::copy_n(both + width, width, rows);
        }
    }
    return x;
}

Value hidden_context(Workspace& w) {
    float* const rows = w.next_rows();
    read_features(w, rows, w.h.padded_width());
    return {rows, w.pass->num_rows, size_t(w.h.padded_width())};
}

void hand_on(Workspace& w, const Value& x) {
    const Linear& feedback = w.model.weights().fusion.feedback;
    const size_t width = w.h.hidden_width;
    float* const states = w.take(x.n, width);
    w.multiply(feedback, x.normed(w.model.output_norm()), epilogue(feedback, states, width));
    for (int i = 0; i < x.n; ++i) {
        if (float* out = w.pass->rows[w.pass->num_rows - x.n + i].hidden) {
            std::copy_n(states + i * width, width, out);
        }
    }
}

void add_markov_rows(Workspace& w, const int32_t* before, int n, float* logits, float* maxima) {
    const Markov& markov = w.model.weights().markov;
    const size_t stride = markov.in.packed.padded_cols();
    w.begin(n);
    float* const rows = w.take(n, stride);
    std::fill_n(rows, n * stride, 0.0f);
    for (int i = 0; i < n; ++i) {
        markov.in.packed.row(before[i], rows + i * stride);
    }
    Epilogue sum = epilogue(markov.out, logits, w.h.logits_stride());
    sum.residual = logits;
    w.multiply(markov.out, {rows, n, stride}, sum, maxima);
}

}  // namespace pystaged
