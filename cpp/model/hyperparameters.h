// The numbers of a model: from a file's metadata, and the few rules that no key states.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/kernel.h"
#include "machine/math.h"
#include "model/family.h"
#include "model/rope.h"

namespace pystaged {

constexpr int kMostConvWidth = 32;  // of a convolution
// Rows of a pass at most, also by libllama, whose batch has room for twice as many: so many that weights come from
// memory and are unpacked for next to nothing, and few enough that their values take little memory.
constexpr int kMostPassRows = 256;

constexpr const char* kEmbedding = "token_embd.weight";
constexpr const char* kHeadName = "output.weight";
constexpr const char* kMarkov = "markov_w1.weight";
constexpr const char* kHeadTokens = "d2t";

enum class MixerKind { attention, short_convolution, delta_net, state_space };

struct LayerNumbers {
    std::vector<MixerKind> mixers = {MixerKind::attention};  // side by side, or none; one recurrent at most
    bool feeds_forward = true;
    bool has_experts = false;  // where it feeds forward
    bool rotates = true;
    bool windowed = false;
    int head_dim = 0, num_kv_heads = 0, ffn_width = 0;
    int value_dim = 0;  // of a head's values
    int cells_of = 0;   // the layer whose keys and values it attends to, itself or one before
    bool lent = false;  // or one of a draft's target

    bool attends() const { return !mixers.empty() && mixers.front() == MixerKind::attention; }
    // Whether it, as layer `index`, stores the keys and values that it attends to.
    bool stores(int index) const { return attends() && !lent && cells_of == index; }
    // The kind that carries a state from row to row; attention where none does.
    MixerKind recurrence() const { return mixers.empty() ? MixerKind::attention : mixers.back(); }
};

// Of delta nets: heads of keys and queries, each shared by several heads of values, all as wide.
struct DeltaNumbers {
    int key_heads = 0, value_heads = 0, head_dim = 0;
    bool grouped = false;  // whether heads of values that share a head of keys lie side by side

    int keys() const { return key_heads * head_dim; }
    int values() const { return value_heads * head_dim; }
    int channels() const { return 2 * keys() + values(); }  // of queries, keys and values, in this order
    // Heads of values that share a head of keys, and that of one of them.
    int group() const { return value_heads / key_heads; }
    int key_head(int value) const { return grouped ? value / group() : value % key_heads; }
};

// Of Mamba-2: heads, and groups of them that share what leads into their states and out of them.
struct SpaceNumbers {
    int heads = 0, groups = 0, head_dim = 0, state_dim = 0;

    int inner() const { return heads * head_dim; }
    int keys() const { return groups * state_dim; }
    int channels() const { return inner() + 2 * keys(); }  // of values, inputs and outputs of states, in this order
    int group_of(int head) const { return head / (heads / groups); }
};

// Of multi-head latent attention (MLA): a row's keys and values are products of one latent row, besides a part of the
// keys that is turned and that all heads share (DeepSeek-V2, arXiv 2405.04434).
struct LatentNumbers {
    int rank = 0;                        // numbers of a latent row; 0 for other attention
    int query_rank = 0;                  // of what queries are made of, 0 where that is the input itself
    int own = 0, turned = 0, value = 0;  // parts of each head's query and key, and its value
    bool absorbed = false;  // heads attend to latent rows as they are: queries and results are transformed instead

    int query() const { return own + turned; }
    int row() const { return rank + turned; }  // what is made of an input
};

// How the router's numbers become experts' scores.
enum class Scores { softmax = 1, sigmoid = 2, softmax_of_chosen = 3 };

// Of mixtures of experts.
struct ExpertNumbers {
    int count = 0, used = 0;  // experts, and of them those of a row
    int width = 0;            // of an expert, and of the expert that all rows share, 0 for none
    int shared_width = 0;
    int groups = 1, used_groups = 1;  // of experts, the best of which a row's are chosen from
    Scores scores = Scores::softmax;
    bool normalized = false;  // whether the weights of a row's experts sum to 1
    float scale = 1;          // of the weights
};

// Floats of a recurrent layer; 0 of other layers.
struct RecurrentSizes {
    // Pending rows of trees at most, and those of a usual tree, whose inputs keep their memory from pass to pass.
    static constexpr int kMostPending = 512, kFewRows = 32;

    size_t state = 0;  // carried from row to row, the convolution's included
    size_t input = 0;  // of a row that update the state
};

struct Hyperparameters {
    int vocab_size = 0;
    int max_context = 0;       // positions the model was trained for
    int original_context = 0;  // before its rotary positions were stretched
    int width = 0;
    int hidden_width = 0;  // of what a draft hands on, and reads beside tokens or joined with them; else 0
    int vocab_rows = 0;    // tokens that it has logits of; for a draft perhaps fewer than vocab_size
    int ffn_width = 0;     // of the widest layer
    int num_layers = 0;
    int first_layer = 0;  // how the file numbers the first of them
    int num_heads = 0;
    int num_kv_heads = 0;           // of the layer with the most
    int head_dim = 0;               // of the layer with the widest
    int layer_embedding_width = 0;  // of embeddings of tokens that each layer has of its own, 0 for none
    DeltaNumbers delta;
    SpaceNumbers space;
    ExpertNumbers experts;
    LatentNumbers latent;
    int num_ahead = 0;   // layers behind the last that predict further tokens, which are a draft of their own
    int conv_width = 0;  // rows that convolutions see, the row's own included; 0 where no layer has any
    float norm_epsilon = 1e-5f;
    float embedding_scale = 1, residual_scale = 1, logit_scale = 1;
    float attention_scale = 0;
    float attention_softcap = 0, logit_softcap = 0;  // 0 for none
    float temperature_scale = 0;                     // of queries beyond the original context
    // Cells that a windowed layer sees: the row's own, unless keys and values are lent, and those before it.
    int window = 0;
    std::vector<LayerNumbers> layers;
    int last_mixing = 0;  // the last layer that stores something of each row
    Rope rope, windowed_rope;
    // Of a draft that reads its target's hidden states.
    std::vector<int> target_layers;  // it reads the states behind these, the first being 1
    int target_width = 0;
    bool norm_before_residual = false, norm_before_fusion = false, feeds_back_normed = false;  // of EAGLE-3
    int block_size = 0;        // tokens of a block, of which the first is the root
    bool is_anchored = false;  // whether the first one already has a guess after it
    bool is_causal = false;
    int32_t mask_token = 0;  // the others
    int markov_rank = 0;     // 0 for none

    // What queries at a position are multiplied by.
    float query_scale(int position) const {
        return static_cast<float>(1 + temperature_scale * own_log(position / original_context + 1));
    }
    int q_width() const { return num_heads * head_dim; }
    bool is_recurrent() const { return conv_width > 0; }
    int kv_width() const { return num_kv_heads * head_dim; }
    RecurrentSizes recurrent_sizes(int layer) const {
        const size_t before = std::max(0, conv_width - 1);
        const auto of_heads = [&](size_t channels, int keys, size_t values, int dim, int heads) -> RecurrentSizes {
            return {values * dim + before * channels, channels + keys + values + padded(heads, kLanes)};
        };
        switch (layers[layer].recurrence()) {
            case MixerKind::short_convolution: return {before * width, size_t(width)};
            case MixerKind::delta_net:
                return of_heads(delta.channels(), delta.keys(), delta.values(), delta.head_dim, delta.value_heads);
            case MixerKind::state_space:
                return of_heads(space.channels(), space.keys(), space.inner(), space.state_dim, space.heads);
            default: return {};
        }
    }
    int padded_width() const { return padded(width, kBlock); }
    // Floats from one row of logits to the next; entries past the vocabulary are -inf.
    size_t logits_stride() const { return padded(vocab_rows, kRun); }
    int features_width() const { return int(target_layers.size()) * target_width; }

    // Bytes of keys and values that one token of a context takes, perhaps only in layers with a window.
    size_t cell_bytes(KvType type, bool windowed_only = false) const {
        size_t bytes = 0;
        for (int i = 0; i < num_layers; ++i) {
            const LayerNumbers& layer = layers[i];
            if (layer.stores(i) && (layer.windowed || !windowed_only)) {
                bytes += layer.num_kv_heads * (key_bytes(type, layer.head_dim) + value_bytes(type, layer.value_dim));
            }
        }
        return bytes;
    }
    // Of a text's recurrent layers at most: two states, and the inputs of a tree's rows; and of one state.
    size_t state_bytes() const {
        size_t inputs = 0;
        for (int layer = 0; layer < num_layers; ++layer) {
            inputs += recurrent_sizes(layer).input;
        }
        return 2 * kept_state_bytes() + RecurrentSizes::kFewRows * inputs * sizeof(float);
    }
    size_t kept_state_bytes() const {
        size_t values = 0;
        for (int layer = 0; layer < num_layers; ++layer) {
            values += recurrent_sizes(layer).state;
        }
        return values * sizeof(float);
    }
    // About what the values of a pass take: of what a row is made into, little is there at a time, but some of it in
    // several copies. And the logits of a usual tree.
    double pass_bytes() const {
        size_t inputs = 0;
        for (int layer = 0; layer < num_layers; ++layer) {
            inputs = std::max(inputs, recurrent_sizes(layer).input);
        }
        const double heads = double(num_heads) * (head_dim + latent.query() + latent.value + latent.rank);
        const double expert = double(experts.used) * (padded_width() + padded(experts.width, kBlock));
        const double row = 2.0 * padded_width() + heads + 2.0 * kv_width() + latent.row() + 2.0 * latent.query_rank +
                           markov_rank + experts.count + expert +
                           padded(std::max(ffn_width, experts.shared_width), kBlock) + delta.channels() +
                           delta.values() + space.channels() + space.inner() + hidden_width + features_width() +
                           num_layers * double(padded(layer_embedding_width, kBlock));
        return sizeof(float) * (kMostPassRows * (3 * row + inputs) + 64 * double(logits_stride()));
    }
};

// `target` is the target of a draft that reads hidden states, or null. Throws ModelError for what is missing, out of
// range, or inconsistent.
Hyperparameters read_hyperparameters(const GgufFile& file, const Family& family, const Hyperparameters* target);

}  // namespace pystaged
