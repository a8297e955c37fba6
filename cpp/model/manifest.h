// Which tensors a model of an architecture consists of. Both loaders, byte counts and type statistics go through this
// list; what a file has besides is refused.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "files/gguf_file.h"
#include "model/family.h"
#include "model/hyperparameters.h"

namespace pystaged {

enum class Role {
    token_embedding,
    fusion,
    fusion_token_norm,
    fusion_hidden_norm,
    fusion_feedback,
    features,
    features_norm,
    features_norms,
    beside_norm,
    head_tokens,
    markov_in,
    markov_out,
    position_embedding,
    output_norm,
    output_norm_bias,
    head,
    head_bias,
    rope_factors,
    rope_factors_long,
    rope_factors_short,
    layer_tokens,
    layer_projection,
    layer_projection_norm,
    attn_norm,
    attn_norm_bias,
    attn_qkv,
    attn_qkv_bias,
    attn_q,
    attn_q_bias,
    attn_k,
    attn_k_bias,
    attn_v,
    attn_v_bias,
    attn_q_norm,
    attn_k_norm,
    attn_output,
    attn_output_bias,
    attn_sinks,
    attn_q_a,
    attn_q_a_norm,
    attn_q_b,
    attn_latent,
    attn_latent_norm,
    attn_k_b,
    attn_v_b,
    attn_kv_b,
    attn_post_norm,
    ffn_norm,
    ffn_norm_bias,
    ffn_gate,
    ffn_gate_bias,
    ffn_up,
    ffn_up_bias,
    ffn_down,
    ffn_down_bias,
    ffn_post_norm,
    router,
    router_bias,
    selection_bias,
    experts_gate,
    experts_gate_bias,
    experts_up,
    experts_up_bias,
    experts_down,
    experts_down_bias,
    experts_down_factors,
    router_norm,
    experts_norm,
    experts_post_norm,
    beside_post_norm,
    shared_gate,
    shared_up,
    shared_down,
    shared_opening,
    conv_input,
    conv_taps,
    conv_output,
    delta_qkv,
    delta_gate,
    delta_qkv_gate,
    delta_beta,
    delta_alpha,
    delta_beta_alpha,
    delta_taps,
    delta_decay,
    delta_step,
    delta_norm,
    delta_output,
    space_input,
    space_taps,
    space_taps_bias,
    space_decay,
    space_step,
    space_skip,
    space_norm,
    space_output,
    layer_in,
    layer_out,
    layer_post_norm,
    layer_scale,
};

class Manifest {
public:
    // Throws ModelError for a tensor that is missing, of the wrong shape, only in some layers, or none of the
    // architecture's.
    Manifest(const GgufFile& file, const Family& family, const Hyperparameters& numbers);

    // Null where the file has none.
    const TensorView* find(Role role, int layer = 0) const;
    const TensorView& get(Role role, int layer = 0) const { return tensors_.at({layer, role}); }
    // The matrix that makes logits: the token embedding where there is no other, null where both are borrowed.
    const TensorView* head() const;
    // The matrices that a pass multiplies by, the head last.
    std::vector<const TensorView*> multiplied() const;
    // All matrices.
    std::vector<const TensorView*> matrices() const;
    // ggml's names of the matrices' types and how many bytes each takes, the most first.
    std::vector<std::pair<std::string, size_t>> types() const;

private:
    std::map<std::pair<int, Role>, TensorView> tensors_;
};

}  // namespace pystaged
