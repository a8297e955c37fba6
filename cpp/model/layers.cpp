#include <algorithm>
#include <cmath>
#include <map>

#include "model/loader.h"

namespace pystaged {

namespace {

// In the order that load_query_key_value() gives a head's numbers; norms of heads lie side by side, as heads do.
Vector head_norm(Loader& from, const TensorView* tensor) {
    const Vector plain = from.flat(tensor);
    if (from.family.rope != Pairs::adjacent) {
        return plain;
    }
    Vector turned;
    for (const int i :
         halves_of_pairs(static_cast<int>(plain.values.size()), from.numbers.head_dim, from.numbers.rope.dims)) {
        turned.values.push_back(plain.values[i]);
    }
    return turned;
}

// Queries, keys and values, in one matrix of the file or in three.
void load_query_key_value(Loader& from, Attention& attention) {
    const Hyperparameters& h = from.numbers;
    const LayerNumbers& layer = from.layer();
    const bool is_beside = from.index() == 0 && from.family.reads == Reads::beside_tokens;
    const bool is_gated = from.family.has(kGatedAttention), borrows = !layer.stores(from.index());
    const int q = h.num_heads * layer.head_dim, kv = layer.num_kv_heads * layer.head_dim;
    const int width = is_beside ? 2 * h.width : h.width;
    // Our kernel turns pairs (i, i + half). A score is the same in any order of a head's numbers that queries and keys
    // share.
    const auto turned = [&](int rows) {
        return from.family.rope == Pairs::adjacent ? halves_of_pairs(rows, layer.head_dim, h.rope.dims)
                                                   : in_order(rows);
    };
    const auto bias = [&](const char* name, int size) { return from.take(name, {size}, kQkvBias); };
    if (!(is_beside || is_gated || borrows || from.has("attn_q.weight"))) {
        Loader::Stack stack{{from.take("attn_qkv.weight", {width, q + 2 * kv})},
                            {},
                            stacked(stacked(turned(q), turned(kv)), in_order(kv))};
        if (const TensorView* first = from.has("attn_q.bias") ? bias("attn_q.bias", q) : nullptr) {
            stack.biases = {first, bias("attn_k.bias", kv), bias("attn_v.bias", kv)};
        } else if (const TensorView* all = bias("attn_qkv.bias", q + 2 * kv)) {
            stack.biases = {all};
        }
        attention.k_at = q;
        attention.v_at = q + kv;
        attention.qkv_stride = padded(q + 2 * kv, kBlock);
        attention.qkv.push_back(from.pack(stack));
        return;
    }
    size_t q_at = 0;
    std::vector<Loader::Member> members;
    const auto add = [&](const std::string& name, int rows, int size, const RowOrder& order, size_t& place) {
        const TensorView* weight = from.take(name + ".weight", {width, rows});
        members.push_back({weight, borrows ? nullptr : bias((name + ".bias").c_str(), size), order, &place});
    };
    if (is_gated) {  // a file has each head's gate behind its query, here all come behind all
        add("attn_q", 2 * q, q, part_by_part(h.num_heads, {h.head_dim, h.head_dim}), q_at);
        attention.gate_at = q;
    } else {
        add("attn_q", q, q, turned(q), q_at);
    }
    const bool has_values = !borrows && (!from.family.has(kNormedValues) || from.has("attn_v.weight"));
    if (!borrows) {
        add("attn_k", kv, kv, turned(kv), attention.k_at);
    }
    if (has_values) {
        add("attn_v", kv, kv, in_order(kv), attention.v_at);
    }
    attention.qkv = from.pack_side_by_side(members, attention.qkv_stride);
    if (borrows) {
        attention.k_at = attention.qkv_stride;
        for (const char* name : {"attn_k.weight", "attn_v.weight", "attn_k_norm.weight"}) {
            from.ignore(name);
        }
    }
    if (!has_values) {
        attention.v_at = attention.qkv_stride;
    }
}

Attention load_attention(Loader& from) {
    const Hyperparameters& h = from.numbers;
    const LayerNumbers& layer = from.layer();
    const int64_t head = layer.head_dim, q = h.num_heads * head;
    const auto norm = [&](const char* name, int64_t heads) {
        const TensorView* tensor = from.take(name, {head}, kHeadNorms);
        tensor = tensor ? tensor : from.take(name, {head, heads}, kOwnHeadNorms);
        return head_norm(from, tensor ? tensor : from.take(name, {head * heads}, kWholeNorms));
    };
    Attention result;
    result.q_norm.weight = norm("attn_q_norm.weight", h.num_heads);
    if (layer.stores(from.index())) {
        result.k_norm.weight = norm("attn_k_norm.weight", layer.num_kv_heads);
    }
    if (from.family.has(kNormedValues)) {
        result.v_norm.values.assign(layer.head_dim, 1.0f);
    }
    if (from.family.has(kSinks)) {
        result.sinks = from.vector("attn_sinks.weight", {h.num_heads});
    }
    load_query_key_value(from, result);
    result.output = from.linear(from.take("attn_output.weight", {q, h.width}),
                                from.take("attn_output.bias", {h.width}, kOutputBias));
    return result;
}

LatentAttention load_latent_attention(Loader& from) {
    const Hyperparameters& h = from.numbers;
    const LatentNumbers& latent = h.latent;
    const int queries = h.num_heads * latent.query();
    // The last numbers of a query and of a latent row are turned.
    const auto turned = [&](int rows, int width) {
        const int own = width - latent.turned;
        RowOrder order = in_order(rows);
        for (int first = own; first < int(order.size()); first += width) {
            const RowOrder pairs = halves_of_pairs(latent.turned, latent.turned, latent.turned);
            std::transform(pairs.begin(), pairs.end(), order.begin() + first, [&](int row) { return first + row; });
        }
        return order;
    };
    const auto heads = [&](const char* name, int64_t cols, int64_t rows) {
        std::vector<Linear> result;
        const TensorView& whole = *from.take(name, {cols, rows, h.num_heads});
        for (int head = 0; head < h.num_heads; ++head) {
            TensorView part = whole;
            part.bytes /= part.ne[2];
            part.at += head * part.bytes;
            part.ne[2] = 1;
            result.push_back(from.linear(&part));
        }
        return result;
    };
    LatentAttention result;
    size_t q_at = 0;
    std::vector<Loader::Member> members;
    if (latent.query_rank > 0) {
        members.push_back(
            {from.take("attn_q_a.weight", {h.width, latent.query_rank}), nullptr, in_order(latent.query_rank), &q_at});
        result.q_norm.weight = from.vector("attn_q_a_norm.weight", {latent.query_rank});
        result.queries = from.pack(
            {{from.take("attn_q_b.weight", {latent.query_rank, queries})}, {}, turned(queries, latent.query())});
    } else {
        members.push_back(
            {from.take("attn_q.weight", {h.width, queries}), nullptr, turned(queries, latent.query()), &q_at});
    }
    members.push_back({from.take("attn_kv_a_mqa.weight", {h.width, latent.row()}), nullptr,
                       turned(latent.row(), latent.row()), &result.latent_at});
    result.input = from.pack_side_by_side(members, result.stride);
    result.norm.weight = from.vector("attn_kv_a_norm.weight", {latent.rank});
    if (latent.absorbed) {
        result.keys = heads("attn_k_b.weight", latent.own, latent.rank);
        result.values = heads("attn_v_b.weight", latent.rank, latent.value);
    } else {
        result.expansion = from.linear("attn_kv_b.weight", {latent.rank, h.num_heads * (latent.own + latent.value)});
    }
    result.output = from.linear("attn_output.weight", {h.num_heads * latent.value, h.width});
    return result;
}

ShortConvolution load_short_convolution(Loader& from) {
    const int64_t width = from.numbers.width;
    return {{from.linear("shortconv.in_proj.weight", {width, 3 * width})},
            from.convolution(from.take("shortconv.conv.weight", {from.numbers.conv_width, width})),
            from.linear("shortconv.out_proj.weight", {width, width})};
}

DeltaNet load_delta_net(Loader& from) {
    const int64_t width = from.numbers.width;
    const DeltaNumbers& delta = from.numbers.delta;
    const int heads = delta.value_heads, channels = delta.channels(), values = delta.values();
    const bool is_grouped = from.family.has(kGroupedValues), is_joined = is_grouped && from.has("ssm_in.weight");
    DeltaNet result;
    std::vector<Loader::Member> members;
    const auto add = [&](const char* name, const RowOrder& order, size_t& place) {
        members.push_back({from.take(name, {width, int64_t(order.size())}), nullptr, order, &place});
    };
    if (is_joined) {
        const int size = delta.head_dim, group = delta.group() * size;
        add("ssm_in.weight", part_by_part(delta.key_heads, {size, size, group, group}), result.qkv_at);
    } else {
        add("attn_qkv.weight", in_order(channels), result.qkv_at);
        add("attn_gate.weight", in_order(values), result.gate_at);
    }
    if (is_grouped) {
        add("ssm_ba.weight", part_by_part(delta.key_heads, {delta.group(), delta.group()}), result.beta_at);
    } else {
        add("ssm_beta.weight", in_order(heads), result.beta_at);
        add("ssm_alpha.weight", in_order(heads), result.alpha_at);
    }
    result.input = from.pack_side_by_side(members, result.stride);
    if (is_joined) {
        result.gate_at = result.qkv_at + channels;
    }
    if (is_grouped) {
        result.alpha_at = result.beta_at + heads;
    }
    result.conv = from.convolution(from.take("ssm_conv1d.weight", {from.numbers.conv_width, channels}));
    result.decay = from.vector("ssm_a", {heads});
    result.step = from.vector("ssm_dt.bias", {heads});
    result.norm = from.vector("ssm_norm.weight", {delta.head_dim});
    result.output = from.linear("ssm_out.weight", {values, width});
    return result;
}

StateSpace load_state_space(Loader& from) {
    const int64_t width = from.numbers.width;
    const SpaceNumbers& space = from.numbers.space;
    const int64_t inner = space.inner(), channels = space.channels(), heads = space.heads;
    StateSpace result;
    result.input.push_back(from.linear("ssm_in.weight", {width, inner + channels + heads}));
    result.conv = from.convolution(from.take("ssm_conv1d.weight", {from.numbers.conv_width, channels}));
    result.conv_bias = from.vector("ssm_conv1d.bias", {channels}, kConvBias);
    result.decay = from.flat(from.take("ssm_a", {1, heads}));
    result.step = from.vector("ssm_dt.bias", {heads});
    result.skip = from.flat(from.take("ssm_d", {1, heads}));
    result.norm = from.vector("ssm_norm.weight", {inner / space.groups, space.groups}, kSpaceNorm);
    result.output = from.linear("ssm_out.weight", {inner, width});
    return result;
}

// Matrices and biases of a network that is `width` wide; the gate may be null, and each bias.
struct DenseTensors {
    const TensorView *gate, *up, *down, *gate_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr;
};

// Of a network that is `ffn` wide, or of `count` side by side, whose tensors' names end in `suffix`. Gate and up may be
// one tensor.
DenseTensors take_dense(Loader& from, const std::string& suffix, int64_t ffn, int64_t count = 1, bool biased = true) {
    const int64_t width = from.numbers.width;
    const auto weight = [&](const char* part, int64_t cols, int64_t rows) {
        return from.take("ffn_" + (part + suffix) + ".weight", {cols, rows, count});
    };
    const auto bias = [&](const char* part, int64_t size) {
        return biased ? from.take("ffn_" + (part + suffix) + ".bias", {size, count}, kFfnBias) : nullptr;
    };
    const bool is_fused = from.family.required & kFusedGate, is_gated = from.family.gate != Gate::none && !is_fused;
    const bool is_joined = is_gated && from.has("ffn_gate_up" + suffix + ".weight");
    DenseTensors of = {};
    of.gate = is_gated && !is_joined ? weight("gate", width, ffn) : nullptr;
    of.up = weight(is_joined ? "gate_up" : "up", width, is_fused || is_joined ? 2 * ffn : ffn);
    of.down = weight("down", ffn, width);
    of.gate_bias = is_gated ? bias("gate", ffn) : nullptr;
    of.up_bias = bias("up", ffn);
    of.down_bias = bias("down", width);
    return of;
}

Dense pack_dense(Loader& from, const DenseTensors& of, int width) {
    Dense result;
    // Gate and up are one matrix where they can be joined, or where the file has them as one.
    if (of.gate ? of.gate->type == of.up->type : from.family.gate != Gate::none) {
        Loader::Stack both{{of.up}, {of.gate_bias, of.up_bias}, gate_in_turns(width)};
        if (of.gate) {
            both.weights = {of.gate, of.up};
        }
        result.up = from.pack(both);
    } else {
        result.gate = from.linear(of.gate, of.gate_bias);
        result.up = from.linear(of.up, of.up_bias);
    }
    result.down = from.linear(of.down, of.down_bias);
    return result;
}

Dense load_dense(Loader& from) {
    const int ffn = from.layer().ffn_width;
    return pack_dense(from, take_dense(from, "", ffn), ffn);
}

Experts load_experts(Loader& from) {
    const int64_t width = from.numbers.width;
    const ExpertNumbers& numbers = from.numbers.experts;
    const int64_t count = numbers.count;
    const int shared = numbers.shared_width;
    Experts result;
    result.router = from.linear(from.take("ffn_gate_inp.weight", {width, count}),
                                from.take("ffn_gate_inp.bias", {count}, kFfnBias));
    result.bias = from.vector("exp_probs_b.bias", {count}, kSelectionBias);
    const DenseTensors all = take_dense(from, "_exps", numbers.width, count);
    for (int i = 0; i < (from.is_packing() ? numbers.count : 1); ++i) {  // all slice the same tensors
        std::map<const TensorView*, TensorView> slices;
        const auto slice = [&](const TensorView* whole, int dimension) -> const TensorView* {
            if (!whole) {
                return nullptr;
            }
            TensorView& part = slices[whole] = *whole;
            part.bytes /= part.ne[dimension];
            part.at += i * part.bytes;
            part.ne[dimension] = 1;
            return &part;
        };
        result.each.push_back(pack_dense(from,
                                         {slice(all.gate, 2), slice(all.up, 2), slice(all.down, 2),
                                          slice(all.gate_bias, 1), slice(all.up_bias, 1), slice(all.down_bias, 1)},
                                         numbers.width));
    }
    if (shared > 0) {
        result.shared = pack_dense(from, take_dense(from, "_shexp", shared, 1, /*biased=*/false), shared);
    }
    if (from.family.has(kDenseBeside)) {
        const auto vector = [&](const char* name, int64_t size) { return from.vector(name, {size}); };
        result.shared = load_dense(from);
        result.router_norm.weight = vector("ffn_gate_inp.scale", width);
        for (float& weight : result.router_norm.weight.values) {
            weight /= std::sqrt(static_cast<float>(width));
        }
        result.norm.weight = vector("pre_ffw_norm_2.weight", width);
        result.post_norm.weight = vector("post_ffw_norm_2.weight", width);
        result.shared_post_norm.weight = vector("post_ffw_norm_1.weight", width);
        result.factors = vector("ffn_down_exps.scale", count);
    }
    if (shared > 0 && from.family.has(kSharedGate)) {
        result.shared_gate = from.linear("ffn_gate_inp_shexp.weight", {width});
    }
    return result;
}

Layer load_layer(Loader& from) {
    const int64_t width = from.numbers.width, embedding = from.numbers.layer_embedding_width;
    const LayerNumbers& numbers = from.layer();
    const auto vector = [&](const char* name, unsigned extra = 0) { return from.vector(name, {width}, extra); };
    Layer layer;
    layer.mixer_norm = from.norm("attn_norm", kAttnNorm);
    layer.mixer_post_norm.weight = vector("post_attention_norm.weight", kPostNorms);
    for (const MixerKind mixer : numbers.mixers) {
        switch (mixer) {
            case MixerKind::attention:
                layer.mixers.push_back(from.family.has(kLatents) ? Mixer(load_latent_attention(from))
                                                                 : load_attention(from));
                break;
            case MixerKind::short_convolution: layer.mixers.emplace_back(load_short_convolution(from)); break;
            case MixerKind::delta_net: layer.mixers.emplace_back(load_delta_net(from)); break;
            case MixerKind::state_space: layer.mixers.emplace_back(load_state_space(from)); break;
        }
    }
    if (from.family.has(kFfnNormBehind)) {
        layer.ffn_norm.weight = vector("post_attention_norm.weight");
    } else if (from.family.has(kBareFfnNorm)) {
        layer.ffn_norm.weight = vector("ffn_norm");
    } else {
        layer.ffn_norm = from.norm("ffn_norm", kFfnNorm);
    }
    layer.ffn_post_norm.weight = vector("post_ffw_norm.weight", kPostNorms);
    if (numbers.has_experts) {
        layer.feed_forward = load_experts(from);
    } else if (numbers.feeds_forward) {
        layer.feed_forward = load_dense(from);
    }
    if (embedding > 0) {
        layer.embedding.in = from.linear("inp_gate.weight", {width, embedding});
        layer.embedding.out = from.linear("proj.weight", {embedding, width});
        layer.embedding.norm.weight = vector("post_norm.weight");
    }
    if (from.family.has(kLayersDiffer)) {
        if (const Vector scale = from.flat(from.take("layer_output_scale.weight", {1}, kLayerScale)); scale.present()) {
            layer.embedding.scale = scale.values[0];
        }
    }
    from.ignore("attn_rot_embd");  // of old files
    return layer;
}

Vector load_rope_factors(Loader& from, const char* name, unsigned extra) {
    const TensorView* tensor = from.take(name, {from.numbers.rope.dims / 2}, extra);
    if (!tensor) {
        return {};
    }
    const std::vector<float> factors = from.read(*tensor);
    from.file.require(std::ranges::none_of(factors, [](float factor) { return factor < 1e-6f; }), "tensor '",
                      tensor->name, "' holds factors that are not above 0");
    return from.vector(tensor);
}

std::vector<int32_t> load_head_tokens(Loader& from) {
    const Hyperparameters& h = from.numbers;
    const TensorView* tensor = from.take(kHeadTokens, {h.vocab_rows});
    from.file.require(tensor->type == GGML_TYPE_I64, "tensor '", tensor->name, "' is of type ",
                      ggml_type_name(tensor->type), " where I64 is needed");
    const Memory data = from.file.read(*tensor);
    std::vector<int32_t> tokens;
    for (int i = 0; i < h.vocab_rows; ++i) {
        const int64_t token = reinterpret_cast<const int64_t*>(data.data())[i];
        from.file.require(token >= 0 && token < h.vocab_size, "tensor '", tensor->name, "' names token ", token,
                          ", outside the vocabulary of ", h.vocab_size);
        tokens.push_back(static_cast<int32_t>(token));
    }
    return tokens;
}

// How a draft reads its target's hidden states as they are.
void load_features(Loader& from, Weights& weights) {
    const Hyperparameters& h = from.numbers;
    const int64_t width = h.width, all = h.features_width();
    constexpr const char *kNorm = "enc.output_norm.weight", *kNorms = "fc_norm.weight";
    Features& features = weights.features;
    if (from.family.reads == Reads::as_context) {
        features.norm.weight = from.vector(kNorm, {width});
        // DSpark's confidence head is not used: acceptance rates are learnt instead.
        from.ignore("conf_proj.weight");
        from.ignore("conf_proj.bias");
    } else {
        if (h.norm_before_fusion) {
            features.norm.weight = from.vector(kNorm, {all});
        }
        if (from.has(kNorms)) {
            features.each_norm = from.vector(kNorms, {h.target_width, int64_t(h.target_layers.size())});
        }
        features.beside_norm.weight = from.vector("blk.0.attn_norm_2.weight", {width});
    }
    features.projection = from.linear("fc.weight", {all, width});
    if (from.has(kHeadTokens)) {
        weights.head_tokens = load_head_tokens(from);
    }
    if (h.markov_rank > 0) {
        weights.markov = {from.table(from.take(kMarkov, {h.markov_rank, h.vocab_size})),
                          from.linear("markov_w2.weight", {h.markov_rank, h.vocab_rows})};
    }
}

// What is of no layer.
void load_ends(Loader& from, Weights& weights) {
    const Hyperparameters& h = from.numbers;
    const int64_t width = h.width, layers = int64_t(h.num_layers) * h.layer_embedding_width;
    const bool joins_cells = from.family.reads == Reads::joined_with_cells;
    if (joins_cells) {  // its tokens are embedded by the target
        weights.head = from.linear(kEmbedding, {width, h.vocab_size});
    } else {
        if (from.has(kEmbedding)) {
            weights.token_embedding = from.table(from.take(kEmbedding, {width, h.vocab_size}));
        }
        weights.head = from.linear(kHeadName, {width, h.vocab_rows}, kHead);
    }
    weights.head_bias = from.vector("output.bias", {h.vocab_size}, kHeadBias);
    weights.position_embedding = from.vector("position_embd.weight", {width, h.max_context}, kPositions);
    weights.rope_factors = load_rope_factors(from, "rope_freqs.weight", kRopeFactors);
    weights.rope_factors_long = load_rope_factors(from, "rope_factors_long.weight", kLongFactors);
    weights.rope_factors_short = load_rope_factors(from, "rope_factors_short.weight", kLongFactors);
    weights.output_norm = from.norm(from.family.has(kEmbeddingNorm) ? "token_embd_norm" : "output_norm");
    if (joins_cells) {
        const int64_t target = h.target_width;
        weights.fusion.projection = from.linear("nextn.pre_projection.weight", {2 * target, width});
        weights.fusion.feedback = from.linear("nextn.post_projection.weight", {width, target});
        // Of a head that looks for the likeliest tokens among a few clusters; all are scored here.
        from.ignore("masked_embd_centroids.weight");
        from.ignore("masked_embd_ordering");
    } else if (from.family.reads != Reads::nothing) {
        load_features(from, weights);
    }
    from.file.require(!weights.head_tokens.empty() || h.vocab_rows >= h.vocab_size || !from.has(kHeadName),
                      "the head has ", h.vocab_rows, " rows for a vocabulary of ", h.vocab_size,
                      " tokens, and no tensor '", kHeadTokens, "' names them");
    if (h.layer_embedding_width > 0) {
        weights.layer_embeddings = {from.table(from.take("per_layer_token_embd.weight", {layers, h.vocab_size})),
                                    from.linear("per_layer_model_proj.weight", {width, layers}),
                                    {from.vector("per_layer_proj_norm.weight", {h.layer_embedding_width}), {}}};
    }
}

// Of a layer that predicts further tokens, besides its mixer and network; the embedding and the head are the model's.
void load_ahead(Loader& from, Weights& weights) {
    const int64_t width = from.numbers.width;
    weights.output_norm.weight = from.vector("nextn.shared_head_norm.weight", {width}, kAheadNorm);
    weights.fusion.token_norm.weight = from.vector("nextn.enorm.weight", {width});
    weights.fusion.hidden_norm.weight = from.vector("nextn.hnorm.weight", {width});
    weights.fusion.projection = from.linear("nextn.eh_proj.weight", {2 * width, width});
}

}  // namespace

Weights load_weights(Loader& from) {
    Weights weights;
    const bool is_ahead = from.family.reads == Reads::joined_with_tokens;
    if (!is_ahead) {
        load_ends(from, weights);
    }
    for (int i = 0; i < from.numbers.num_layers; ++i) {
        from.begin_layer(i);
        if (is_ahead && i == 0) {
            load_ahead(from, weights);
        }
        weights.layers.push_back(load_layer(from));
    }
    return weights;
}

}  // namespace pystaged
