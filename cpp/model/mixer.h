// What mixes a row with the rows before it, the first half of a layer: a closed set of alternatives.
#pragma once

#include <variant>
#include <vector>

#include "model/weights.h"

namespace pystaged {

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

using Mixer = std::variant<Attention, LatentAttention, ShortConvolution, DeltaNet, StateSpace>;

}  // namespace pystaged
