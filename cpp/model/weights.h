// The weights of a model as our kernels read them, part by part.
#pragma once

#include <optional>
#include <variant>
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

// The matrices that multiply the same row are joined into one if their types allow it.
struct Attention {
    Norm q_norm, k_norm;
    Vector sinks;   // [heads], or none
    Vector v_norm;  // of ones, where values are normalized
    std::vector<Linear> qkv;
    // Where rows of `qkv`'s products, packed, have their parts behind the queries; at their end what they do not have.
    size_t k_at = 0, v_at = 0, gate_at = 0, qkv_stride = 0;
    Linear output;
};

// Multi-head latent attention (MLA): keys and values are made of latent rows; see LatentNumbers.
struct LatentAttention {
    std::vector<Linear> input;         // queries, or what they are made of, and latent rows
    size_t latent_at = 0, stride = 0;  // where rows of its products have the latter
    Norm q_norm, norm;                 // of what queries are made of, and of latent rows
    Linear queries;                    // or none
    std::vector<Linear> keys, values;  // [heads] of what transforms queries and results, or none
    Linear expansion;                  // or else what makes each head's key and value, in turns
    Linear output;
};

// A gated causal convolution over a few rows, channel by channel: W_output (c * convolution of b * x), where
// W_input makes b, c and x of a row, in this order.
struct ShortConvolution {
    std::vector<Linear> input;  // one
    Vector conv;                // [conv_width][padded width], the oldest row's first
    Linear output;
};

// A gated delta net. Queries, keys and values are convolved over a few rows; each head's state maps keys to values, and
// a row corrects what it has for its key.
struct DeltaNet {
    std::vector<Linear> input;
    size_t qkv_at = 0, gate_at = 0, beta_at = 0, alpha_at = 0, stride = 0;  // where rows of their products have parts
    Vector conv;         // [conv_width][channels], the oldest row's first
    Vector decay, step;  // [heads of values]
    Vector norm;         // of a head
    Linear output;
};

// Mamba-2. W_input makes of a row: gates, values, inputs and outputs of states, and steps. All but gates and steps are
// convolved over a few rows. Each head decays its state and adds its value, both by its step.
struct StateSpace {
    std::vector<Linear> input;  // one
    Vector conv, conv_bias;     // [conv_width][channels], the oldest row's first; [channels], or none
    Vector decay, step, skip;   // [heads]
    Vector norm;                // [groups][padded width of a group], or none
    Linear output;
};

// What mixes a row with the rows before it, the first half of a layer: a closed set of alternatives.
using Mixer = std::variant<Attention, LatentAttention, ShortConvolution, DeltaNet, StateSpace>;

struct Dense {
    Linear gate;  // empty where there is none, or where it is a part of `up`
    Linear up, down;
};

// A mixture of experts (Shazeer et al. 2017, arXiv 1701.06538): a router chooses a few networks for each row, and may
// give another one to all rows.
struct Experts {
    Linear router;
    Vector bias;                  // of the scores that experts are chosen by, [experts], or none
    std::vector<Dense> each;      // [experts]
    std::optional<Dense> shared;  // the shared expert, or none,
    Linear shared_gate;           // and its gate, one number for a row, or none
    // Where that is a dense network beside the experts, norms of what the router and the experts read and of both
    // results, and factors of the experts' results, [experts].
    Norm router_norm, norm, post_norm, shared_post_norm;
    Vector factors;
};

// What is done to each row alone, the second half of a layer.
using FeedForward = std::variant<Dense, Experts>;

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

// A layer is mixers of the same rows and a feed-forward network, each a branch that is added to the residual stream;
// some layers have no mixer, or no feed-forward network.
struct Layer {
    Norm mixer_norm, mixer_post_norm;
    std::vector<Mixer> mixers;
    Norm ffn_norm, ffn_post_norm;
    std::optional<FeedForward> feed_forward;
    LayerEmbedding embedding;
};

struct Weights {
    Linear token_embedding, head;      // of a draft perhaps none
    std::vector<int32_t> head_tokens;  // the token of each row of the head; empty where that is the row's number
    Vector head_bias;
    Vector position_embedding;  // [max_context][padded width]
    Vector rope_factors, rope_factors_long, rope_factors_short;
    Norm output_norm;
    Fusion fusion;      // of a draft that joins hidden states with tokens
    Features features;  // of other drafts that read hidden states
    Markov markov;
    LayerEmbeddings layer_embeddings;
    std::vector<Layer> layers;
};

}  // namespace pystaged
