// Weights as our kernels read them.
#pragma once

#include <vector>

#include "weights/packed_matrix.h"

namespace pystaged {

// Padded with zeros like the rows they meet. Empty where a model has none.
struct Vector {
    std::vector<float> values;

    bool present() const { return !values.empty(); }
    const float* data() const { return values.empty() ? nullptr : values.data(); }
};

struct Norm {
    Vector weight, bias;

    bool present() const { return weight.present(); }
};

struct Linear {
    PackedMatrix packed;
    Vector bias;

    bool present() const { return packed.rows() > 0; }
};

// How a draft joins hidden states with tokens: x = W [norm(embedding); norm(hidden states)]; and, unless these are what
// its head reads, what makes of that the states that it hands on.
struct Fusion {
    Norm token_norm, hidden_norm;
    Linear projection, feedback;
};

// How a draft reads its target's hidden states, one row of all tapped layers: W norm(states), normalized again where it
// reads them as context.
struct Features {
    Norm norm;         // of the whole row before the product, or of its result
    Vector each_norm;  // of each layer's states before the product, [layers][padded target's width]
    Linear projection;
    Norm beside_norm;  // of the result, where the first layer reads it beside tokens
};

// What tokens mean to each layer, beside their embedding x: P = (norm(W x) / sqrt(width) + own embedding) / sqrt(2),
// all layers side by side, normalized one by one.
struct LayerEmbeddings {
    Linear tokens, projection;
    Norm norm;
};

// A layer's last branch: norm(W_out(gelu(W_in x) P)) is added, and all is scaled.
struct LayerEmbedding {
    Linear in, out;
    Norm norm;
    float scale = 1;
};

// What a token adds to the logits of the one after it: out in[token].
struct Markov {
    Linear in, out;
};

}  // namespace pystaged
