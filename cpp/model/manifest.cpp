#include "model/manifest.h"

#include <algorithm>
#include <iterator>
#include <unordered_set>

namespace pystaged {

namespace {

// A dimension, by what it counts.
enum class Size {
    none,
    one_row,
    vocabulary,
    context,
    width,
    ffn,
    fused_ffn,
    q,
    kv,
    qkv,
    head,
    heads,
    kv_heads,
    pairs,
    features,
    target_width,
    target_layers,
    twice_width,
    twice_target_width,
    head_size,
    markov_rank,
    triple,
    taps,
    gated_q,
    channels,
    delta_values,
    delta_heads,
    delta_head,
    channels_gate,
    delta_rates,
    space_input,
    space_channels,
    space_heads,
    space_inner,
    space_groups,
    space_group,
    experts,
    expert_ffn,
    fused_expert_ffn,
    shared_ffn,
    layer_embedding,
    layer_embeddings,
    query_rank,
    latent_queries,
    latent_row,
    latent,
    latent_own,
    latent_value,
    latent_expanded,
    latent_values
};

int64_t count(Size size, const Hyperparameters& h, const LayerNumbers& layer) {
    const int64_t q = int64_t(h.num_heads) * layer.head_dim, kv = int64_t(layer.num_kv_heads) * layer.head_dim;
    switch (size) {
        case Size::vocabulary: return h.vocab_size;
        case Size::context: return h.max_context;
        case Size::width: return h.width;
        case Size::ffn: return layer.ffn_width;
        case Size::fused_ffn: return int64_t(2) * layer.ffn_width;
        case Size::q: return q;
        case Size::kv: return kv;
        case Size::qkv: return q + 2 * kv;
        case Size::head: return layer.head_dim;
        case Size::heads: return h.num_heads;
        case Size::kv_heads: return layer.num_kv_heads;
        case Size::pairs: return h.rope.dims / 2;
        case Size::features: return h.features_width();
        case Size::target_width: return h.target_width;
        case Size::target_layers: return int64_t(h.target_layers.size());
        case Size::twice_width: return int64_t(2) * h.width;
        case Size::twice_target_width: return int64_t(2) * h.target_width;
        case Size::head_size: return h.head_size;
        case Size::markov_rank: return h.markov_rank;
        case Size::triple: return int64_t(3) * h.width;
        case Size::taps: return h.conv_taps;
        case Size::gated_q: return 2 * q;
        case Size::channels: return h.delta.channels();
        case Size::delta_values: return h.delta.values();
        case Size::delta_heads: return h.delta.value_heads;
        case Size::delta_head: return h.delta.head_dim;
        case Size::channels_gate: return int64_t(h.delta.channels()) + h.delta.values();
        case Size::delta_rates: return int64_t(2) * h.delta.value_heads;
        case Size::space_input: return int64_t(h.space.inner()) + h.space.channels() + h.space.heads;
        case Size::space_channels: return h.space.channels();
        case Size::space_heads: return h.space.heads;
        case Size::space_inner: return h.space.inner();
        case Size::space_groups: return h.space.groups;
        case Size::space_group: return h.space.inner() / h.space.groups;
        case Size::experts: return h.experts.count;
        case Size::expert_ffn: return h.experts.width;
        case Size::fused_expert_ffn: return int64_t(2) * h.experts.width;
        case Size::shared_ffn: return h.experts.shared_width;
        case Size::layer_embedding: return h.layer_embedding_width;
        case Size::layer_embeddings: return int64_t(h.num_layers) * h.layer_embedding_width;
        case Size::query_rank: return h.latent.query_rank;
        case Size::latent_queries: return int64_t(h.num_heads) * h.latent.query();
        case Size::latent_row: return h.latent.row();
        case Size::latent: return h.latent.rank;
        case Size::latent_own: return h.latent.own;
        case Size::latent_value: return h.latent.value;
        case Size::latent_expanded: return int64_t(h.num_heads) * (h.latent.own + h.latent.value);
        case Size::latent_values: return int64_t(h.num_heads) * h.latent.value;
        default: return 1;
    }
}

// A set of parts of families, and of those below.
using Parts = uint64_t;

struct Entry {
    Role role;
    const char* name;
    Size cols, rows;  // rows none: a vector
    Parts parts;      // what a family must have for this tensor to be there
    Size matrices = Size::none;
};

// Beyond those of families: what their other fields say.
constexpr Parts kNormBias = 1u << 30, kGate = 1u << 29, kPlainUp = 1u << 28, kAheadNorm = 1u << 27,
                kOwnEmbedding = 1u << 26, kReadsFeatures = 1u << 25, kBeside = 1u << 24, kNormOfFeatures = 1u << 23,
                kNormOfContext = 1u << 22, kNormOfEach = 1u << 21, kSomeTokens = 1u << 20, kHasMarkov = 1u << 19,
                kPlainNorm = 1u << 17, kNamedNorm = 1u << 16, kPlainQ = 1u << 15, kGatedQ = Parts(1) << 32,
                kFfnNormBehindMixer = Parts(1) << 33, kTapsBias = Parts(1) << 34, kUnnamedFfnNorm = Parts(1) << 35,
                kRatesApart = Parts(1) << 36, kRatesJoined = Parts(1) << 37, kSelectionBias = Parts(1) << 38,
                kShares = Parts(1) << 39, kOpensShared = Parts(1) << 40, kLayerEmbeddings = Parts(1) << 41,
                kLayerScale = Parts(1) << 42, kHasSinks = Parts(1) << 43, kRankedQ = Parts(1) << 44,
                kUnrankedQ = Parts(1) << 45, kAbsorbed = Parts(1) << 46, kExpanded = Parts(1) << 47,
                kBorrowsCells = Parts(1) << 48;

constexpr const char *kFeaturesNorm = "enc.output_norm.weight", *kFeaturesNorms = "fc_norm.weight";

constexpr Entry kOfModel[] = {
    {Role::token_embedding, kEmbedding, Size::width, Size::vocabulary, kOwnEmbedding},
    {Role::position_embedding, "position_embd.weight", Size::width, Size::context, kPositions},
    {Role::output_norm, "output_norm.weight", Size::width, Size::none, kPlainNorm},
    {Role::output_norm, "token_embd_norm.weight", Size::width, Size::none, kNamedNorm},
    {Role::output_norm_bias, "output_norm.bias", Size::width, Size::none, kNormBias},
    {Role::features, "fc.weight", Size::features, Size::width, kReadsFeatures},
    {Role::features_norm, kFeaturesNorm, Size::features, Size::none, kNormOfFeatures},
    {Role::features_norm, kFeaturesNorm, Size::width, Size::none, kNormOfContext},
    {Role::features_norms, kFeaturesNorms, Size::target_width, Size::target_layers, kNormOfEach},
    {Role::beside_norm, "blk.0.attn_norm_2.weight", Size::width, Size::none, kBeside},
    {Role::head_tokens, kHeadTokens, Size::head_size, Size::none, kSomeTokens},
    {Role::markov_in, kMarkov, Size::markov_rank, Size::vocabulary, kHasMarkov},
    {Role::markov_out, "markov_w2.weight", Size::markov_rank, Size::head_size, kHasMarkov},
    {Role::head, kHeadName, Size::width, Size::head_size, kHead},
    {Role::head, kEmbedding, Size::width, Size::vocabulary, kBorrowsCells},  // its tokens are embedded by the target
    {Role::fusion, "nextn.pre_projection.weight", Size::twice_target_width, Size::width, kBorrowsCells},
    {Role::fusion_feedback, "nextn.post_projection.weight", Size::width, Size::target_width, kBorrowsCells},
    {Role::head_bias, "output.bias", Size::vocabulary, Size::none, kHeadBias},
    {Role::rope_factors, "rope_freqs.weight", Size::pairs, Size::none, kRopeFactors},
    {Role::rope_factors_long, "rope_factors_long.weight", Size::pairs, Size::none, kLongFactors},
    {Role::rope_factors_short, "rope_factors_short.weight", Size::pairs, Size::none, kLongFactors},
    {Role::layer_tokens, "per_layer_token_embd.weight", Size::layer_embeddings, Size::vocabulary, kLayerEmbeddings},
    {Role::layer_projection, "per_layer_model_proj.weight", Size::width, Size::layer_embeddings, kLayerEmbeddings},
    {Role::layer_projection_norm, "per_layer_proj_norm.weight", Size::layer_embedding, Size::none, kLayerEmbeddings},
};

// Of a layer that predicts further tokens, besides its mixer and network: the embedding and the head are the model's.
constexpr Entry kAhead[] = {
    {Role::fusion, "nextn.eh_proj.weight", Size::twice_width, Size::width, 0},
    {Role::fusion_token_norm, "nextn.enorm.weight", Size::width, Size::none, 0},
    {Role::fusion_hidden_norm, "nextn.hnorm.weight", Size::width, Size::none, 0},
    {Role::output_norm, "nextn.shared_head_norm.weight", Size::width, Size::none, kAheadNorm},
};

// Of a layer: norms; attention, its queries, keys and values in one matrix or in three; other mixers; dense networks.
constexpr Entry kNorms[] = {
    {Role::attn_norm, "attn_norm.weight", Size::width, Size::none, kAttnNorm},
    {Role::attn_norm_bias, "attn_norm.bias", Size::width, Size::none, kAttnNorm | kNormBias},
    {Role::attn_post_norm, "post_attention_norm.weight", Size::width, Size::none, kPostNorms},
    {Role::ffn_norm, "ffn_norm.weight", Size::width, Size::none, kFfnNorm},
    {Role::ffn_norm, "post_attention_norm.weight", Size::width, Size::none, kFfnNormBehindMixer},
    {Role::ffn_norm, "ffn_norm", Size::width, Size::none, kUnnamedFfnNorm},
    {Role::ffn_norm_bias, "ffn_norm.bias", Size::width, Size::none, kFfnNorm | kNormBias},
    {Role::ffn_post_norm, "post_ffw_norm.weight", Size::width, Size::none, kPostNorms},
};
constexpr Entry kFused[] = {
    {Role::attn_qkv, "attn_qkv.weight", Size::width, Size::qkv, 0},
    {Role::attn_qkv_bias, "attn_qkv.bias", Size::qkv, Size::none, kQkvBias},
};
constexpr Entry kSeparate[] = {
    {Role::attn_q, "attn_q.weight", Size::width, Size::q, kPlainQ},
    {Role::attn_q, "attn_q.weight", Size::width, Size::gated_q, kGatedQ},
    {Role::attn_k, "attn_k.weight", Size::width, Size::kv, 0},
    {Role::attn_v, "attn_v.weight", Size::width, Size::kv, 0},
};
// Of the first layer of a draft that reads hidden states beside tokens.
constexpr Entry kSeparateBeside[] = {
    {Role::attn_q, "attn_q.weight", Size::twice_width, Size::q, 0},
    {Role::attn_k, "attn_k.weight", Size::twice_width, Size::kv, 0},
    {Role::attn_v, "attn_v.weight", Size::twice_width, Size::kv, 0},
};
constexpr Entry kSeparateBiases[] = {
    {Role::attn_q_bias, "attn_q.bias", Size::q, Size::none, kQkvBias},
    {Role::attn_k_bias, "attn_k.bias", Size::kv, Size::none, kQkvBias},
    {Role::attn_v_bias, "attn_v.bias", Size::kv, Size::none, kQkvBias},
};
constexpr Entry kAttention[] = {
    {Role::attn_q_norm, "attn_q_norm.weight", Size::head, Size::none, kHeadNorms},
    {Role::attn_k_norm, "attn_k_norm.weight", Size::head, Size::none, kHeadNorms},
    {Role::attn_q_norm, "attn_q_norm.weight", Size::head, Size::heads, kOwnHeadNorms},
    {Role::attn_k_norm, "attn_k_norm.weight", Size::head, Size::kv_heads, kOwnHeadNorms},
    {Role::attn_q_norm, "attn_q_norm.weight", Size::q, Size::none, kWholeNorms},
    {Role::attn_k_norm, "attn_k_norm.weight", Size::kv, Size::none, kWholeNorms},
    {Role::attn_output, "attn_output.weight", Size::q, Size::width, 0},
    {Role::attn_output_bias, "attn_output.bias", Size::width, Size::none, kOutputBias},
    {Role::attn_sinks, "attn_sinks.weight", Size::heads, Size::none, kHasSinks},
};
constexpr Entry kLatentAttention[] = {
    {Role::attn_q, "attn_q.weight", Size::width, Size::latent_queries, kUnrankedQ},
    {Role::attn_q_a, "attn_q_a.weight", Size::width, Size::query_rank, kRankedQ},
    {Role::attn_q_a_norm, "attn_q_a_norm.weight", Size::query_rank, Size::none, kRankedQ},
    {Role::attn_q_b, "attn_q_b.weight", Size::query_rank, Size::latent_queries, kRankedQ},
    {Role::attn_latent, "attn_kv_a_mqa.weight", Size::width, Size::latent_row, 0},
    {Role::attn_latent_norm, "attn_kv_a_norm.weight", Size::latent, Size::none, 0},
    {Role::attn_k_b, "attn_k_b.weight", Size::latent_own, Size::latent, kAbsorbed, Size::heads},
    {Role::attn_v_b, "attn_v_b.weight", Size::latent, Size::latent_value, kAbsorbed, Size::heads},
    {Role::attn_kv_b, "attn_kv_b.weight", Size::latent, Size::latent_expanded, kExpanded},
    {Role::attn_output, "attn_output.weight", Size::latent_values, Size::width, 0},
};
// Of a layer that attends to keys and values of another one.
constexpr Entry kQueries[] = {
    {Role::attn_q, "attn_q.weight", Size::width, Size::q, 0},
    {Role::attn_q_norm, "attn_q_norm.weight", Size::head, Size::none, kHeadNorms},
    {Role::attn_output, "attn_output.weight", Size::q, Size::width, 0},
};
constexpr const char* kUnused[] = {"attn_k.weight", "attn_v.weight", "attn_k_norm.weight"};  // which it may have
constexpr Entry kLayerEmbedding[] = {
    {Role::layer_in, "inp_gate.weight", Size::width, Size::layer_embedding, kLayerEmbeddings},
    {Role::layer_out, "proj.weight", Size::layer_embedding, Size::width, kLayerEmbeddings},
    {Role::layer_post_norm, "post_norm.weight", Size::width, Size::none, kLayerEmbeddings},
    {Role::layer_scale, "layer_output_scale.weight", Size::one_row, Size::none, kLayerScale},
};
constexpr Entry kShortConvolution[] = {
    {Role::conv_input, "shortconv.in_proj.weight", Size::width, Size::triple, 0},
    {Role::conv_taps, "shortconv.conv.weight", Size::taps, Size::width, 0},
    {Role::conv_output, "shortconv.out_proj.weight", Size::width, Size::width, 0},
};
// What a delta net reads, in one matrix or in two.
constexpr Entry kDeltaInput = {Role::delta_qkv_gate, "ssm_in.weight", Size::width, Size::channels_gate, 0};
constexpr Entry kDeltaInputs[] = {
    {Role::delta_qkv, "attn_qkv.weight", Size::width, Size::channels, 0},
    {Role::delta_gate, "attn_gate.weight", Size::width, Size::delta_values, 0},
};
constexpr Entry kDeltaNet[] = {
    {Role::delta_beta, "ssm_beta.weight", Size::width, Size::delta_heads, kRatesApart},
    {Role::delta_alpha, "ssm_alpha.weight", Size::width, Size::delta_heads, kRatesApart},
    {Role::delta_beta_alpha, "ssm_ba.weight", Size::width, Size::delta_rates, kRatesJoined},
    {Role::delta_taps, "ssm_conv1d.weight", Size::taps, Size::channels, 0},
    {Role::delta_decay, "ssm_a", Size::delta_heads, Size::none, 0},
    {Role::delta_step, "ssm_dt.bias", Size::delta_heads, Size::none, 0},
    {Role::delta_norm, "ssm_norm.weight", Size::delta_head, Size::none, 0},
    {Role::delta_output, "ssm_out.weight", Size::delta_values, Size::width, 0},
};
constexpr Entry kStateSpace[] = {
    {Role::space_input, "ssm_in.weight", Size::width, Size::space_input, 0},
    {Role::space_taps, "ssm_conv1d.weight", Size::taps, Size::space_channels, 0},
    {Role::space_taps_bias, "ssm_conv1d.bias", Size::space_channels, Size::none, kTapsBias},
    {Role::space_decay, "ssm_a", Size::one_row, Size::space_heads, 0},
    {Role::space_step, "ssm_dt.bias", Size::space_heads, Size::none, 0},
    {Role::space_skip, "ssm_d", Size::one_row, Size::space_heads, 0},
    {Role::space_norm, "ssm_norm.weight", Size::space_group, Size::space_groups, kSpaceNorm},
    {Role::space_output, "ssm_out.weight", Size::space_inner, Size::width, 0},
};
constexpr Entry kDense[] = {
    {Role::ffn_gate, "ffn_gate.weight", Size::width, Size::ffn, kGate},
    {Role::ffn_gate_bias, "ffn_gate.bias", Size::ffn, Size::none, kGate | kFfnBias},
    {Role::ffn_up, "ffn_up.weight", Size::width, Size::ffn, kPlainUp},
    {Role::ffn_up, "ffn_up.weight", Size::width, Size::fused_ffn, kFusedGate},
    {Role::ffn_up_bias, "ffn_up.bias", Size::ffn, Size::none, kPlainUp | kFfnBias},
    {Role::ffn_down, "ffn_down.weight", Size::ffn, Size::width, 0},
    {Role::ffn_down_bias, "ffn_down.bias", Size::width, Size::none, kFfnBias},
};

// Of a layer of experts beside a dense network.
constexpr Entry kBesideDense[] = {
    {Role::router_norm, "ffn_gate_inp.scale", Size::width, Size::none, 0},
    {Role::experts_norm, "pre_ffw_norm_2.weight", Size::width, Size::none, 0},
    {Role::experts_post_norm, "post_ffw_norm_2.weight", Size::width, Size::none, 0},
    {Role::beside_post_norm, "post_ffw_norm_1.weight", Size::width, Size::none, 0},
    {Role::experts_down_factors, "ffn_down_exps.scale", Size::experts, Size::none, 0},
};
// Of a layer of experts: what gates them and what they hold is in one tensor or in two.
constexpr Entry kExpertUp[] = {
    {Role::experts_gate, "ffn_gate_exps.weight", Size::width, Size::expert_ffn, kGate, Size::experts},
    {Role::experts_up, "ffn_up_exps.weight", Size::width, Size::expert_ffn, 0, Size::experts},
};
constexpr Entry kFusedExpertUp = {
    Role::experts_up, "ffn_gate_up_exps.weight", Size::width, Size::fused_expert_ffn, kGate, Size::experts};
constexpr Entry kOfExperts[] = {
    {Role::router, "ffn_gate_inp.weight", Size::width, Size::experts, 0},
    {Role::router_bias, "ffn_gate_inp.bias", Size::experts, Size::none, kFfnBias},
    {Role::experts_gate_bias, "ffn_gate_exps.bias", Size::expert_ffn, Size::experts, kGate | kFfnBias},
    {Role::experts_up_bias, "ffn_up_exps.bias", Size::expert_ffn, Size::experts, kFfnBias},
    {Role::experts_down_bias, "ffn_down_exps.bias", Size::width, Size::experts, kFfnBias},
    {Role::selection_bias, "exp_probs_b.bias", Size::experts, Size::none, kSelectionBias},
    {Role::experts_down, "ffn_down_exps.weight", Size::expert_ffn, Size::width, 0, Size::experts},
    {Role::shared_gate, "ffn_gate_shexp.weight", Size::width, Size::shared_ffn, kShares | kGate},
    {Role::shared_up, "ffn_up_shexp.weight", Size::width, Size::shared_ffn, kShares},
    {Role::shared_down, "ffn_down_shexp.weight", Size::shared_ffn, Size::width, kShares},
    {Role::shared_opening, "ffn_gate_inp_shexp.weight", Size::width, Size::none, kShares | kOpensShared},
};

constexpr Role kMatrices[] = {
    Role::router,          Role::experts_gate, Role::experts_up,     Role::experts_down,     Role::shared_gate,
    Role::shared_up,       Role::shared_down,  Role::shared_opening, Role::token_embedding,  Role::fusion,
    Role::fusion_feedback, Role::features,     Role::markov_in,      Role::markov_out,       Role::head,
    Role::attn_qkv,        Role::attn_q,       Role::attn_k,         Role::attn_v,           Role::attn_output,
    Role::attn_q_a,        Role::attn_q_b,     Role::attn_latent,    Role::attn_k_b,         Role::attn_v_b,
    Role::attn_kv_b,       Role::conv_input,   Role::conv_output,    Role::delta_qkv,        Role::delta_gate,
    Role::delta_qkv_gate,  Role::delta_beta,   Role::delta_alpha,    Role::delta_beta_alpha, Role::delta_output,
    Role::space_input,     Role::space_output, Role::layer_tokens,   Role::layer_projection, Role::layer_in,
    Role::layer_out,       Role::ffn_gate,     Role::ffn_up,         Role::ffn_down};

bool is_matrix(Role role) {
    return std::find(std::begin(kMatrices), std::end(kMatrices), role) != std::end(kMatrices);
}

// What a draft has that reads its target's hidden states.
Parts features_of(const GgufFile& file, const Family& family, const Hyperparameters& h) {
    switch (family.reads) {
        case Reads::nothing:
        case Reads::joined_with_tokens: return 0;
        case Reads::joined_with_cells: return kBorrowsCells;
        default: break;
    }
    const bool beside = family.reads == Reads::beside_tokens;
    return kReadsFeatures | (beside ? kBeside : kNormOfContext) | (h.norm_before_fusion ? kNormOfFeatures : 0) |
           (beside && file.has_tensor(kFeaturesNorms) ? kNormOfEach : 0) |
           (file.has_tensor(kHeadTokens) ? kSomeTokens : 0) | (h.markov_rank > 0 ? kHasMarkov : 0);
}

}  // namespace

Manifest::Manifest(const GgufFile& file, const Family& family, const Hyperparameters& h) {
    const bool fused_gate = family.required & kFusedGate;
    const Parts required =
        family.required | (family.has(kLayerNorm) ? kNormBias : 0) | (fused_gate ? 0 : kPlainUp) |
        (file.has_tensor(kEmbedding) && family.reads != Reads::joined_with_cells ? kOwnEmbedding : 0) |
        (family.gate != Gate::none && !fused_gate ? kGate : 0) |
        (family.has(kEmbeddingNorm) ? kNamedNorm : kPlainNorm) |
        (family.has(kFfnNormBehind) ? kFfnNormBehindMixer : 0) | (family.has(kBareFfnNorm) ? kUnnamedFfnNorm : 0) |
        (family.has(kGroupedValues) ? kRatesJoined : kRatesApart) | (family.has(kGatedAttention) ? kGatedQ : kPlainQ) |
        (h.experts.shared_width > 0 ? kShares : 0) | (family.has(kSharedGate) ? kOpensShared : 0) |
        (h.layer_embedding_width > 0 ? kLayerEmbeddings : 0) | (family.has(kSinks) ? kHasSinks : 0) |
        (h.latent.query_rank > 0 ? kRankedQ : kUnrankedQ) | (h.latent.absorbed ? kAbsorbed : kExpanded) |
        features_of(file, family, h);
    const Parts known = required | family.optional | kTapsBias | kAheadNorm | kSelectionBias |
                        (family.has(kLayersDiffer) ? kLayerScale : 0);
    std::unordered_set<std::string> claimed;
    // Where an option was seen and where it was missed: the two may not both be.
    std::map<Parts, std::string> seen, missed;

    const auto claim = [&](const Entry& entry, const std::string& prefix, int layer) {
        if ((entry.parts & known) != entry.parts) {
            return;
        }
        const std::string name = prefix + entry.name;
        if (const Parts option = entry.parts & ~required; option != 0) {
            const bool there = file.has_tensor(name);
            (there ? seen : missed).emplace(option, name);
            if (seen.count(option) && missed.count(option)) {
                file.fail("tensor '" + missed[option] + "' is missing, although '" + seen[option] + "' is there");
            }
            if (!there) {
                return;
            }
        }
        std::vector<int64_t> shape = {count(entry.cols, h, h.layers[layer])};
        for (const Size size : {entry.rows, entry.matrices}) {
            if (size != Size::none) {
                shape.push_back(count(size, h, h.layers[layer]));
            }
        }
        tensors_.emplace(std::make_pair(layer, entry.role), file.tensor(name, shape));
        claimed.insert(name);
    };

    const auto claim_all = [&](const auto& entries, const std::string& prefix, int layer) {
        for (const Entry& entry : entries) {
            claim(entry, prefix, layer);
        }
    };

    const auto claim_attention = [&](const std::string& prefix, int layer) {
        if (family.has(kLatents)) {
            claim_all(kLatentAttention, prefix, layer);
            return;
        }
        if (!h.layers[layer].stores(layer)) {
            claim_all(kQueries, prefix, layer);
            for (const char* name : kUnused) {
                claimed.insert(prefix + name);
            }
            return;
        }
        const bool separate = family.has(kGatedAttention) || file.has_tensor(prefix + "attn_q.weight");
        if (layer == 0 && family.reads == Reads::beside_tokens) {
            claim_all(kSeparateBeside, prefix, layer);
        } else if (separate) {
            for (const Entry& entry : kSeparate) {
                const bool may_lack = entry.role == Role::attn_v && family.has(kNormedValues);
                if (!may_lack || file.has_tensor(prefix + entry.name)) {
                    claim(entry, prefix, layer);
                }
            }
        } else {
            claim(kFused[0], prefix, layer);
        }
        // A fused matrix may have separate biases.
        if (separate || file.has_tensor(prefix + "attn_q.bias")) {
            claim_all(kSeparateBiases, prefix, layer);
        } else {
            claim(kFused[1], prefix, layer);
        }
        claim_all(kAttention, prefix, layer);
    };

    const bool is_ahead = family.reads == Reads::joined_with_tokens;
    const auto prefix_of = [&](int layer) { return "blk." + std::to_string(h.first_layer + layer) + "."; };
    if (is_ahead) {
        claim_all(kAhead, prefix_of(0), 0);
    } else {
        claim_all(kOfModel, "", 0);
    }
    for (int layer = 0; layer < h.num_layers; ++layer) {
        const std::string prefix = prefix_of(layer);
        claim_all(kNorms, prefix, layer);
        for (const MixerKind mixer : h.layers[layer].mixers) {
            switch (mixer) {
                case MixerKind::attention: claim_attention(prefix, layer); break;
                case MixerKind::short_convolution: claim_all(kShortConvolution, prefix, layer); break;
                case MixerKind::delta_net:
                    if (family.has(kGroupedValues) && file.has_tensor(prefix + kDeltaInput.name)) {
                        claim(kDeltaInput, prefix, layer);
                    } else {
                        claim_all(kDeltaInputs, prefix, layer);
                    }
                    claim_all(kDeltaNet, prefix, layer);
                    break;
                case MixerKind::state_space: claim_all(kStateSpace, prefix, layer); break;
            }
        }
        if (h.layers[layer].has_experts) {
            if (file.has_tensor(prefix + kFusedExpertUp.name)) {
                claim(kFusedExpertUp, prefix, layer);
            } else {
                claim_all(kExpertUp, prefix, layer);
            }
            claim_all(kOfExperts, prefix, layer);
            if (family.has(kDenseBeside)) {
                claim_all(kBesideDense, prefix, layer);
                claim_all(kDense, prefix, layer);
            }
        } else if (h.layers[layer].feeds_forward) {
            claim_all(kDense, prefix, layer);
        }
        claim_all(kLayerEmbedding, prefix, layer);
        claimed.insert(prefix + "attn_rot_embd");  // of old files, which nothing reads
    }
    if (family.reads == Reads::as_context) {
        // DSpark's confidence head is not used: acceptance rates are learnt instead.
        claimed.insert({"conf_proj.weight", "conf_proj.bias"});
    }
    if (family.reads == Reads::joined_with_cells) {
        // Of a head that looks for the likeliest tokens among a few clusters; all are scored here.
        claimed.insert({"masked_embd_centroids.weight", "masked_embd_ordering"});
    }
    // Of a model and the layer behind it that predicts further tokens, what belongs to the other one.
    const auto is_of_other = [&](const std::string& name) {
        const auto is_of = [&](int layer) { return name.rfind(prefix_of(layer), 0) == 0; };
        if (is_ahead) {
            return !is_of(0) || name == prefix_of(0) + "nextn.embed_tokens.weight" ||
                   name == prefix_of(0) + "nextn.shared_head_head.weight";  // copies of the model's
        }
        bool found = false;
        for (int layer = h.num_layers; layer < h.num_layers + h.num_ahead; ++layer) {
            found = found || is_of(layer);
        }
        return found;
    };
    for (const std::string& name : file.tensor_names()) {
        if (!claimed.count(name) && !is_of_other(name)) {
            file.fail(
                "tensor '" + name + "' is none of architecture '" + family.name +
                "' as it is known here; without it the model would not be the one that was trained; choose another "
                "file of it, or run this one with llama.cpp");
        }
    }
}

const TensorView* Manifest::find(Role role, int layer) const {
    const auto found = tensors_.find({layer, role});
    return found == tensors_.end() ? nullptr : &found->second;
}

const TensorView* Manifest::head() const {
    const TensorView* own = find(Role::head);
    return own ? own : find(Role::token_embedding);
}

std::vector<const TensorView*> Manifest::multiplied() const {
    std::vector<const TensorView*> result;
    for (const auto& [key, tensor] : tensors_) {
        const bool looked_up =
            key.second == Role::token_embedding || key.second == Role::markov_in || key.second == Role::layer_tokens;
        if (is_matrix(key.second) && !looked_up && key.second != Role::head) {
            result.push_back(&tensor);
        }
    }
    if (head()) {
        result.push_back(head());
    }
    return result;
}

std::vector<const TensorView*> Manifest::matrices() const {
    std::vector<const TensorView*> result;
    for (const auto& [key, tensor] : tensors_) {
        if (is_matrix(key.second)) {
            result.push_back(&tensor);
        }
    }
    return result;
}

std::vector<std::pair<std::string, size_t>> Manifest::types() const {
    std::map<ggml_type, size_t> bytes;
    for (const TensorView* tensor : matrices()) {
        bytes[tensor->type] += tensor->bytes;
    }
    std::vector<std::pair<std::string, size_t>> result;
    for (const auto& [type, sum] : bytes) {
        result.emplace_back(ggml_type_name(type), sum);
    }
    std::stable_sort(result.begin(), result.end(), [](auto& a, auto& b) { return a.second > b.second; });
    return result;
}

}  // namespace pystaged
