// The architectures this engine runs, one row each: what neither a file's tensors nor its metadata say.
#pragma once

#include "files/gguf_file.h"

namespace pystaged {

// Which numbers of a head rotary positions turn together.
enum class Pairs { none, adjacent, halves };

// What the feed-forward network does between its matrices: GELU alone, or an activation of the gate times the rest,
// which is clamped like the gate in gpt-oss.
enum class Gate { none, silu, gelu, clamped };

// How a draft reads hidden states of its target: a row beside each token (EAGLE-3), a row joined with each token into
// one (MTP, the layer in some models' files that predicts further tokens), the same with layers that attend to the
// target's keys and values and have none (Gemma 4's assistants), or as context, the keys and values of the committed
// tokens (DFlash, DSpark), behind which it evaluates a block of tokens at once.
enum class Reads { nothing, beside_tokens, joined_with_tokens, joined_with_cells, as_context };

// Tensors that not every architecture has.
enum Extra : unsigned {
    kPositions = 1 << 0,       // position_embd
    kAttnNorm = 1 << 1,        // before attention
    kFfnNorm = 1 << 2,         // before the feed-forward network; without it that reads what attention read
    kPostNorms = 1 << 3,       // of both branches, before they are added
    kHeadNorms = 1 << 4,       // of queries and keys, the same for every head
    kOwnHeadNorms = 1 << 5,    // of queries and keys, one for each head
    kWholeNorms = 1 << 6,      // of queries and keys, over all heads at once
    kQkvBias = 1 << 7,         //
    kOutputBias = 1 << 8,      // of attention
    kFfnBias = 1 << 9,         //
    kFusedGate = 1 << 10,      // gate rows first in ffn_up, no ffn_gate
    kHead = 1 << 11,           // output.weight; else the head is the embedding
    kHeadBias = 1 << 12,       //
    kRopeFactors = 1 << 13,    // rope_freqs
    kLongFactors = 1 << 14,    // rope_factors_long and rope_factors_short
    kConvBias = 1 << 15,       // of Mamba-2's convolution
    kAheadNorm = 1 << 16,      // of a layer that predicts further tokens
    kSelectionBias = 1 << 17,  // of the scores that experts are chosen by
    kLayerScale = 1 << 18,     // of a layer's result
    kSpaceNorm = 1u << 31,     // of what Mamba-2 makes, group by group
};
constexpr unsigned kOfAnyFamily = kConvBias | kAheadNorm | kSelectionBias | kLayerScale;  // some files have them

// What holds for some architectures and not for others.
enum Rule : uint64_t {
    kLayerNorm = 1 << 0,            // norms are layer norms, else RMS
    kScaledEmbedding = 1 << 1,      // by the square root of the width
    kWholeRotation = 1 << 2,        // rotary positions turn all of a head
    kMayNotRotate = 1 << 3,         // rope.scaling.finetuned says whether rotary positions are used at all
    kYarnKeys = 1 << 4,             // the file has YaRN's constants
    kTemperatureScale = 1 << 5,     // queries grow beyond the original context, by attention.temperature_scale
    kScaleKeys = 1 << 6,            // the file has the scales of embeddings, attention, branches and logits
    kLogitSoftcap = 1 << 7,         // final_logit_softcapping
    kDefaultNumbers = 1 << 8,       // a file may lack the feed-forward width and the norms' epsilon
    kWindowOwnRope = 1 << 9,        // layers with a window: a base of their own, 10,000 by default, and no stretching
    kWindowOriginalRope = 1 << 10,  // layers with a window: the base of all, and no stretching
    kEmbeddingNorm = 1 << 11,       // the last norm is named as if it were the embedding's
    kShortConvolutions = 1 << 12,   // in layers without heads of keys and values
    kDeltaNets = 1 << 13,           // in all layers but each full_attention_interval-th, or as recurrent_layers says
    kFfnNormBehind = 1 << 14,       // the norm before the feed-forward network is named as if it were behind attention
    kStateSpaces = 1 << 16,         // Mamba-2 in layers without heads of keys and values
    kGatedAttention = 1 << 15,      // each head of attn_q has, behind its query, a gate of what it attends to
    kBothMixers = 1 << 17,          // each layer attends and has Mamba-2, both of the same rows
    kBranchesApart = 1 << 18,       // a layer mixes, or is a feed-forward network where that has a width
    kSquaredRelu = 1 << 19,         // in place of GELU
    kBareFfnNorm = 1 << 20,         // the norm before the feed-forward network is named without ".weight"
    kGroupedValues = 1 << 21,       // a delta net's heads of values that share a head of keys lie side by side
    kExperts = 1 << 22,             // feed-forward networks are mixtures of experts where the file says so
    kNormalizedExperts = 1 << 23,   // the weights of a row's experts sum to 1
    kRoutingKeys = 1 << 24,         // the file says how experts are scored, and whether their weights sum to 1
    kSigmoidExperts = 1 << 25,      // such a file may say nothing: experts are scored by a sigmoid
    kWholeExperts = 1 << 26,        // an expert is as wide as feed_forward_length says
    kSharedGate = 1 << 27,          // the shared expert has a gate
    kLayersDiffer = 1 << 28,        // in heads of keys and values and feed-forward width; where they have a window, in
                                    // the width of heads and what is turned of them; the last may store no keys
    kUnscaledScores = 1 << 29,      // attention's scores are not divided by the root of a head's width
    kNormedValues = 1 << 30,        // by each head's RMS; a layer without values normalizes its keys for them
    kSinks = uint64_t(1) << 31,     // each head has a score beside those of positions, for attending to nothing
    kScoresOfChosen = uint64_t(1) << 32,  // the weights of a row's experts are a softmax of their scores alone
    kDenseBeside = uint64_t(1) << 33,     // a dense network beside the experts, all with norms of their own
    kLatents = uint64_t(1) << 34          // keys and values are made of latent rows that all heads share
};

struct Family {
    const char* name;  // general.architecture
    Pairs rope;
    Gate gate;
    unsigned required, optional;  // extras
    uint64_t rules = 0;
    int skip_rope_every = 0;  // every so many layers, one has no rotary positions
    int window_period = 0;    // where a file has a window but no pattern: how many layers to one without it
    int window = 0;           // of a file that states none; such a family always has one
    int largest = 0;  // layers of the model that scales attention as if its heads shared its width, whatever their own
    float attention_softcap = 0, logit_softcap = 0;  // where the file has none
    Reads reads = Reads::nothing;
    const char* target = nullptr;  // the only architecture that its layers attend to keys and values of

    bool has(Rule rule) const { return rules & rule; }
};

// The row of a file. Throws ModelError for an architecture that has none, saying what it would need.
const Family& find_family(const GgufFile& file);

}  // namespace pystaged
