// The weights of a model, part by part.
#pragma once

#include <optional>
#include <vector>

#include "model/feed_forward.h"
#include "model/loader.h"
#include "model/mixer.h"

namespace pystaged {

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

// Takes all tensors of a model of the loader's family. Throws ModelError where one is missing, damaged, or of the wrong
// shape, or is only in some layers.
Weights load_weights(Loader& from);

}  // namespace pystaged
