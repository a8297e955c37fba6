#include "model/hyperparameters.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

namespace pystaged {

namespace {

constexpr int64_t kMostNumbers = int64_t(1) << 24;  // far beyond any model, far below any overflow
constexpr int kMostLayers = 512;                    // ggml visits a graph by recursion, for which a stack must do
constexpr int kMostBlock = 64;                      // tokens of a draft's block

// Metadata under the architecture's own prefix.
class Keys {
public:
    explicit Keys(const GgufFile& file, const Family& family) : file_(file), prefix_(std::string(family.name) + ".") {}

    std::string name(const char* key) const { return prefix_ + key; }
    bool has(const char* key) const { return file_.has(name(key)); }
    int number(const char* key, int64_t least, int64_t most, std::optional<int64_t> otherwise = {}) const {
        return static_cast<int>(file_.integer(name(key), least, most, otherwise));
    }
    // The numbers of an array, or none where the key is missing.
    std::optional<std::vector<int64_t>> array(const char* key) const {
        auto values = file_.integers(name(key));
        require(values || !has(key), key, "is not an array");
        return values;
    }
    // An array with a number for each layer; none where the key is missing or, with `or_one`, has one number for all.
    std::optional<std::vector<int64_t>> numbers_of_layers(const char* key, bool or_one = true) const {
        auto values = or_one ? file_.integers(name(key)) : array(key);
        const int num_layers = number("block_count", 1, kMostLayers);
        const int size = values ? static_cast<int>(values->size()) : num_layers;
        require(size == num_layers, key, "has ", size, " entries for ", num_layers, " layers");
        return values;
    }
    // One for all layers, or an array, which says the same for each layer that uses it unless those may differ. Sets
    // layer.*place of each, and returns the largest.
    template <class Uses>
    int number_of_layers(const char* key, int64_t least, int64_t most, int64_t otherwise, Hyperparameters& h,
                         const Uses& uses, bool may_differ = false, int LayerNumbers::* place = nullptr) const {
        const auto values = numbers_of_layers(key);
        const int64_t one = values ? otherwise : number(key, least, most, otherwise);
        std::optional<int64_t> found;
        for (int i = 0; i < h.num_layers; ++i) {
            const int64_t value = values ? (*values)[h.first_layer + i] : one;
            if (!std::invoke(uses, h.layers[i])) {
                continue;
            }
            if (found && value != *found && !may_differ) {
                file_.refuse("metadata '", name(key), "' differs between layers, which is not supported");
            }
            require(!values || (value >= least && value <= most), key, "is ", value, ", outside ", least, " to ", most);
            found = std::max(value, found.value_or(value));
            if (place) {
                h.layers[i].*place = static_cast<int>(value);
            }
        }
        return static_cast<int>(found.value_or(one));
    }
    template <class... Parts>
    void require(bool holds, const char* key, const Parts&... parts) const {
        file_.require(holds, "metadata '", name(key), "' ", parts...);
    }
    float real(const char* key, float otherwise) const {
        const float value = file_.real(name(key), otherwise);
        require(std::isfinite(value), key, "is not a number");
        return value;
    }
    float positive(const char* key, float otherwise) const {
        const float value = real(key, otherwise);
        require(value > 0, key, "is not above 0");
        return value;
    }

private:
    const GgufFile& file_;
    std::string prefix_;
};

void read_delta_nets(const GgufFile& file, const Family& family, const Keys& keys, Hyperparameters& h) {
    const auto recurrent = keys.numbers_of_layers("attention.recurrent_layers", false);
    const int interval = keys.number("full_attention_interval", 1, kMostLayers, 4);
    for (int i = 0; i < h.num_layers; ++i) {
        const bool attends = recurrent ? (*recurrent)[i] == 0 : (i + 1) % interval == 0;
        h.layers[i].mixers = {attends ? MixerKind::attention : MixerKind::delta_net};
    }
    h.conv_width = keys.number("ssm.conv_kernel", 2, kMostConvWidth);
    h.delta.head_dim = keys.number("ssm.state_size", kLanes, 1024);
    h.delta.key_heads = keys.number("ssm.group_count", 1, 1024);
    h.delta.value_heads = keys.number("ssm.time_step_rank", 1, 4096);
    keys.require(h.delta.head_dim % kLanes == 0, "ssm.state_size", "is no multiple of ", kLanes);
    file.require(h.delta.value_heads % h.delta.key_heads == 0, h.delta.value_heads, " heads of values do not share ",
                 h.delta.key_heads, " heads of keys evenly (metadata '", keys.name("ssm.group_count"), "')");
    keys.number("ssm.inner_size", h.delta.values(), h.delta.values());
    h.delta.grouped = family.has(kGroupedValues);
}

void read_state_spaces(const GgufFile& file, const Keys& keys, Hyperparameters& h) {
    SpaceNumbers& space = h.space;
    h.conv_width = keys.number("ssm.conv_kernel", 2, kMostConvWidth);
    space.state_dim = keys.number("ssm.state_size", kLanes, 1024);
    space.groups = keys.number("ssm.group_count", 1, 1024);
    space.heads = keys.number("ssm.time_step_rank", 1, 4096);
    const int inner = keys.number("ssm.inner_size", 1, kMostNumbers);
    space.head_dim = inner / space.heads;
    file.require(
        inner % (space.heads * kLanes) == 0 && space.state_dim % kLanes == 0 && space.heads % space.groups == 0,
        "metadata '", keys.name("ssm.*"), "': ", inner, " numbers in ", space.heads, " heads of ", space.groups,
        " groups with states of ", space.state_dim, ", where heads and states must be multiples of ", kLanes,
        ", and groups as large as each other");
}

void read_mixers(const GgufFile& file, const Family& family, const Keys& keys, Hyperparameters& h) {
    if (family.has(kDeltaNets)) {
        read_delta_nets(file, family, keys, h);
    }
    if (!(family.rules & (kShortConvolutions | kStateSpaces))) {
        return;
    }
    const auto recurrent = family.has(kStateSpaces) ? MixerKind::state_space : MixerKind::short_convolution;
    const auto kv_heads = keys.numbers_of_layers("attention.head_count_kv");
    const auto ffn_widths = keys.numbers_of_layers("feed_forward_length", !family.has(kBranchesApart));
    for (int i = 0; i < h.num_layers; ++i) {
        LayerNumbers& layer = h.layers[i];
        if (family.has(kBothMixers)) {
            layer.mixers.push_back(recurrent);
        } else if (kv_heads && (*kv_heads)[i] == 0) {
            layer.mixers = {recurrent};
        }
        if (family.has(kBranchesApart)) {
            layer.feeds_forward = !ffn_widths || (*ffn_widths)[i] != 0;
            if (layer.feeds_forward) {
                layer.mixers.clear();
            }
        }
    }
    if (family.has(kStateSpaces)) {
        read_state_spaces(file, keys, h);
    } else {
        h.conv_width = keys.number("shortconv.l_cache", 2, kMostConvWidth);
    }
}

void read_experts(const GgufFile& file, const Family& family, const Keys& keys, Hyperparameters& h) {
    ExpertNumbers& experts = h.experts;
    const int least = family.has(kScoresOfChosen) ? 1 : 0;  // there is no gpt-oss without
    experts.count = family.has(kExperts) ? keys.number("expert_count", least, 1024, least) : 0;
    if (experts.count == 0) {
        return;
    }
    experts.used = keys.number("expert_used_count", 1, experts.count);
    const int first = keys.number("leading_dense_block_count", 0, kMostLayers, 0);
    keys.number("interleave_moe_layer_step", 1, 1, 1);  // all that llama.cpp runs, too
    std::string block;
    for (int i = 0; i < h.num_layers; ++i) {
        const int layer = h.first_layer + i;
        h.layers[i].has_experts = h.layers[i].feeds_forward && layer >= first;
        if (h.layers[i].has_experts && block.empty()) {
            block = "blk." + std::to_string(layer) + ".";
        }
    }
    const std::string shared = block + "ffn_down_shexp.weight";
    if (!family.has(kDenseBeside) && file.has_tensor(shared)) {
        experts.shared_width = static_cast<int>(std::clamp<int64_t>(file.tensor(shared).ne[0], 1, kMostNumbers));
    }
    experts.width = family.has(kWholeExperts) ? h.ffn_width
                                              : keys.number("expert_feed_forward_length", 1, kMostNumbers,
                                                            std::max(1, h.ffn_width / experts.used));
    experts.groups = keys.number("expert_group_count", 0, experts.count, 1);
    experts.groups = std::max(experts.groups, 1);
    experts.used_groups = keys.number("expert_group_used_count", 0, experts.groups, experts.groups);
    const int each = experts.count / experts.groups;
    experts.used_groups = experts.groups == 1 ? 1 : experts.used_groups;
    file.require(experts.groups == 1 ||
                     (experts.count % experts.groups == 0 && each >= 2 && each * experts.used_groups >= experts.used),
                 experts.count, " experts in ", experts.groups, " groups (metadata '", keys.name("expert_group_count"),
                 "'), of which ", experts.used_groups, " are used, do not make ", experts.used,
                 " experts for each token");
    experts.normalized = family.has(kNormalizedExperts);
    if (family.has(kScoresOfChosen)) {
        experts.scores = Scores::softmax_of_chosen;
    }
    if (family.has(kRoutingKeys)) {
        // GLM-4.7-Flash's first files say nothing; other files of its architecture that do so have a softmax.
        const int blocks =
            keys.number("block_count", 1, kMostLayers) - keys.number("nextn_predict_layers", 0, kMostLayers, 0);
        const bool is_flash = family.has(kLatents) && (blocks == 47 || blocks == 48) && file.has_tensor(kEmbedding) &&
                              file.tensor(kEmbedding).ne[1] == 154880;
        const int usual = static_cast<int>(family.has(kSigmoidExperts) || is_flash ? Scores::sigmoid : Scores::softmax);
        const int scores = keys.number("expert_gating_func", 0, 3, usual);
        experts.scores = static_cast<Scores>(scores == 0 ? usual : scores);
        experts.normalized = experts.normalized || file.flag(keys.name("expert_weights_norm"), false);
    }
    const float scale = keys.real("expert_weights_scale", 0);
    experts.scale = scale == 0 ? 1 : scale;
}

void read_rope(const GgufFile& file, const Family& family, const Keys& keys, Hyperparameters& h) {
    if (family.rope == Pairs::none) {
        return;
    }
    Rope& rope = h.rope;
    const auto read_dims = [&](const char* key, int head_dim) {
        const int dims = keys.number(key, 2, head_dim, head_dim);
        keys.require(dims % 2 == 0, key, "is odd, but rotary positions turn pairs");
        return dims;
    };
    rope.dims = read_dims("rope.dimension_count", h.head_dim);
    keys.require(!family.has(kWholeRotation) || rope.dims == h.head_dim, "rope.dimension_count", "is ", rope.dims,
                 " where heads are ", h.head_dim, " wide");
    rope.base = keys.positive("rope.freq_base", 10000);
    keys.require(rope.base > 1, "rope.freq_base", "is not above 1");
    // Positions of images have three parts; those of texts are three times the same, but some pairs may have none.
    if (const auto sections = keys.array("rope.dimension_sections")) {
        const int64_t pairs = rope.dims / 2;
        bool turns = sections->size() >= 3;
        for (int64_t i = 0; turns && i < pairs; ++i) {
            turns = (*sections)[i % 3] <= pairs && i < 3 * (*sections)[i % 3];
        }
        keys.require(turns, "rope.dimension_sections", "leaves pairs without a position");
    }
    rope.original_context = h.original_context;
    const std::string scaling = file.text(keys.name("rope.scaling.type"), "linear");
    keys.require(scaling == "none" || scaling == "linear" || scaling == "yarn" || scaling == "longrope",
                 "rope.scaling.type", "is '", scaling, "', which is unknown; there are: none, linear, yarn, longrope");
    const float factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 0));
    keys.require(factor == 0 || (factor > 1e-6f && factor < 1e6f), "rope.scaling.factor", "is ", factor,
                 ", which is no factor of a context");
    rope.scale = scaling == "none" || factor == 0 ? 1 : 1 / factor;
    rope.yarn = scaling == "yarn";
    if (rope.yarn) {
        double multiplier = 0;
        if (family.has(kYarnKeys)) {
            rope.beta_fast = keys.positive("rope.scaling.yarn_beta_fast", rope.beta_fast);
            rope.beta_slow = keys.positive("rope.scaling.yarn_beta_slow", rope.beta_slow);
            multiplier = keys.real("rope.scaling.yarn_log_multiplier", 0);
        }
        if (family.has(kLatents) && keys.real("rope.scaling.yarn_log_multiplier", 0) != 0) {
            multiplier = 1;  // that one is of the scores
        }
        // Attention sharpens by 0.1 ln(factor) + 1; amplitude() has that factor already, so the two cancel but for the
        // multiplier.
        const double log_factor = own_log(1.0 / rope.scale);
        const auto sharpening = [&](double m) { return rope.scale >= 1 ? 1.0 : 0.1 * m * log_factor + 1; };
        rope.magnitude = static_cast<float>(sharpening(1) / sharpening(multiplier) / (1 + 0.1 * log_factor));
    }
    rope.magnitude *= keys.positive("rope.scaling.attn_factor", 1);

    h.windowed_rope = rope;
    if (family.has(kLayersDiffer)) {
        h.windowed_rope.dims =
            read_dims("rope.dimension_count_swa", keys.number("attention.key_length_swa", 1, h.head_dim, h.head_dim));
    }
    h.windowed_rope.base = keys.positive("rope.freq_base_swa", rope.base);
    if (family.has(kWindowOwnRope)) {
        h.windowed_rope.base = keys.positive("rope.freq_base_swa", 10000);
        h.windowed_rope.scale = 1;
    } else if (family.has(kWindowOriginalRope)) {
        h.windowed_rope.scale = h.windowed_rope.magnitude = 1;
        h.windowed_rope.yarn = false;
        h.windowed_rope.base = rope.base;
    }
    const bool rotates = !family.has(kMayNotRotate) || file.flag(keys.name("rope.scaling.finetuned"), true);
    for (int i = 0; i < h.num_layers; ++i) {
        h.layers[i].rotates = rotates && (family.skip_rope_every == 0 || (i + 1) % family.skip_rope_every != 0);
    }
}

// Newer files have what absorbs the latent rows, and say how wide heads would be without.
void read_latents(const GgufFile& file, const Keys& keys, Hyperparameters& h, int value_length) {
    LatentNumbers& latent = h.latent;
    const std::string block = "blk." + std::to_string(h.first_layer) + ".";
    latent.rank = keys.number("attention.kv_lora_rank", 1, 1 << 16);
    latent.query_rank =
        file.has_tensor(block + "attn_q.weight") ? 0 : keys.number("attention.q_lora_rank", 1, kMostNumbers);
    latent.turned = keys.number("rope.dimension_count", 2, h.head_dim);
    latent.absorbed = keys.has("attention.key_length_mla");
    const int query =
        latent.absorbed ? keys.number("attention.key_length_mla", latent.turned + 1, 1 << 16) : h.head_dim;
    latent.own = query - latent.turned;
    latent.value = latent.absorbed ? keys.number("attention.value_length_mla", 1, 1 << 16) : value_length;
    const bool fits = latent.absorbed ? h.head_dim == latent.row() && value_length == latent.rank && h.num_kv_heads == 1
                                      : latent.own > 0 && h.num_kv_heads == h.num_heads;
    file.require(fits, h.num_kv_heads, " heads of keys of ", h.head_dim, " and values of ", value_length,
                 " numbers do not fit latent rows of ", latent.rank, ", with ", latent.turned, " that are turned");
    file.require(!latent.absorbed || (latent.rank % kBlock == 0 && latent.value % kBlock == 0), "latent rows of ",
                 latent.rank, " numbers and values of ", latent.value, " must be multiples of ", kBlock);
    file.require(int64_t(h.num_heads) * (latent.query() + latent.value) <= kMostNumbers, h.num_heads, " heads of ",
                 latent.query(), " and ", latent.value, " numbers are absurdly many");
}

constexpr const char* kDifferentLengths = "keys and values of different lengths are not supported";

// What families may have of their own in each layer.
void read_heads(const GgufFile& file, const Family& family, const Keys& keys, Hyperparameters& h) {
    const bool differ = family.has(kLayersDiffer);
    h.num_kv_heads = keys.number_of_layers("attention.head_count_kv", 1, h.num_heads, h.num_heads, h,
                                           &LayerNumbers::attends, differ, &LayerNumbers::num_kv_heads);
    h.head_dim = keys.number("attention.key_length", 1, 1 << 16, h.width / h.num_heads);
    const int value_dim = keys.number("attention.value_length", 1, 1 << 16, h.width / h.num_heads);
    if (family.has(kLatents)) {
        read_latents(file, keys, h, value_dim);
    } else {
        file.require(value_dim == h.head_dim, kDifferentLengths);
    }
    file.require(keys.has("attention.key_length") || h.width % h.num_heads == 0, "a width of ", h.width,
                 " does not split into ", h.num_heads, " heads");
    const int windowed = differ ? keys.number("attention.key_length_swa", 1, h.head_dim, h.head_dim) : h.head_dim;
    file.require(!differ || keys.number("attention.value_length_swa", 1, h.head_dim, windowed) == windowed,
                 kDifferentLengths);
    const bool shares = differ && family.reads != Reads::joined_with_cells;
    const int own = h.num_layers - (shares ? keys.number("attention.shared_kv_layers", 0, h.num_layers - 1, 0) : 0);
    for (int i = 0; i < h.num_layers; ++i) {
        LayerNumbers& layer = h.layers[i];
        layer.head_dim = layer.windowed ? windowed : h.head_dim;
        layer.value_dim = family.has(kLatents) ? value_dim : layer.head_dim;
        file.require(!layer.attends() || h.num_heads % layer.num_kv_heads == 0, h.num_heads, " heads do not share ",
                     layer.num_kv_heads, " heads of keys and values evenly");
        for (layer.cells_of = std::min(i, own - 1); i >= own && h.layers[layer.cells_of].windowed != layer.windowed;) {
            keys.require(--layer.cells_of >= 0, "attention.shared_kv_layers", "leaves layers without keys and values");
        }
        layer.num_kv_heads = h.layers[layer.cells_of].num_kv_heads;
    }
    h.last_mixing = std::min(h.last_mixing, own - 1);
}

// Of a draft whose layers attend to keys and values of the target's last layer with a window, or without one.
void borrow_cells(const GgufFile& file, const Hyperparameters& target, Hyperparameters& h) {
    for (LayerNumbers& layer : h.layers) {
        int from = target.num_layers - 1;
        while (from >= 0 && target.layers[from].windowed != layer.windowed) {
            --from;
        }
        const std::string kind = std::string("layers with") + (layer.windowed ? "" : "out") + " a window";
        file.require(from >= 0, "the draft attends to ", kind, " of its target, which has none");
        const LayerNumbers& lent = target.layers[from];
        file.require(layer.num_kv_heads == lent.num_kv_heads && layer.head_dim == lent.head_dim,
                     "the draft attends to ", layer.num_kv_heads, " heads of ", layer.head_dim, " numbers in ", kind,
                     ", but the target has ", lent.num_kv_heads, " of ", lent.head_dim);
        layer.cells_of = lent.cells_of;
        layer.lent = true;
    }
    file.require(h.window == target.window, "the draft's window is ", h.window, " positions, the target's ",
                 target.window);
    // A row has no cell at its own position.
    file.require(h.window != 1, "a window of 1 position leaves a draft without keys and values nothing to attend to");
    h.window = std::max(0, h.window - 1);
}

void read_windows(const Family& family, const Keys& keys, Hyperparameters& h) {
    // Other families may have the key, but their models never learnt to use it (Phi-3's is wrong in most files).
    if (family.window_period == 0) {
        return;
    }
    h.window = keys.number("attention.sliding_window", 0, int64_t(1) << 30, family.window);
    if (h.window == 0) {
        keys.require(family.window == 0, "attention.sliding_window", "is 0");
        return;
    }
    const auto pattern = keys.numbers_of_layers("attention.sliding_window_pattern");
    const int period =
        pattern ? 0 : keys.number("attention.sliding_window_pattern", 0, kMostLayers, family.window_period);
    for (int i = 0; i < h.num_layers; ++i) {
        const int layer = h.first_layer + i;
        const bool has_window = pattern ? (*pattern)[layer] != 0 : period == 0 || layer % period < period - 1;
        h.layers[i].windowed = has_window && h.layers[i].attends();
    }
}

void read_scales(const Family& family, const Keys& keys, Hyperparameters& h) {
    const int head_dim = h.num_layers == family.largest ? h.width / h.num_heads : h.head_dim;
    h.attention_scale = family.has(kUnscaledScores) ? 1 : 1 / std::sqrt(static_cast<float>(head_dim));
    h.embedding_scale = family.has(kScaledEmbedding) ? std::sqrt(static_cast<float>(h.width)) : 1;
    if (family.has(kScaleKeys)) {
        const auto scale = [&](const char* key, float otherwise) {
            const float value = keys.real(key, 0);
            return value == 0 ? otherwise : value;
        };
        h.logit_scale = 1 / keys.real("logit_scale", family.has(kStateSpaces) ? 1 : 0);
        keys.require(std::isfinite(h.logit_scale), "logit_scale", "is missing or 0");
        h.residual_scale = scale("residual_scale", 1);
        h.embedding_scale = scale("embedding_scale", 1);
        h.attention_scale = scale("attention.scale", h.attention_scale);
    }
    if (family.has(kLatents)) {
        const double log_factor = own_log(1.0 / h.rope.scale);
        const double sharpening = h.rope.magnitude * (1 + 0.1 * log_factor) *
                                  (1 + keys.real("rope.scaling.yarn_log_multiplier", 0) * log_factor);
        h.attention_scale = static_cast<float>(sharpening * sharpening / std::sqrt(double(h.latent.query())));
    }
    if (family.attention_softcap > 0) {
        h.attention_softcap = keys.positive("attn_logit_softcapping", family.attention_softcap);
    }
    if (family.has(kLogitSoftcap)) {
        const char* key = "final_logit_softcapping";
        h.logit_softcap =
            family.logit_softcap > 0 ? keys.positive(key, family.logit_softcap) : std::fabs(keys.real(key, 0));
    }
    if (family.has(kTemperatureScale)) {
        h.temperature_scale = keys.real("attention.temperature_scale", 0);
        const int length = keys.number("attention.temperature_length", 1, kMostNumbers, h.original_context);
        keys.require(h.temperature_scale == 0 || length == h.original_context, "attention.temperature_length", "is ",
                     length, ", but only the original context of ", h.original_context, " is supported");
    }
}

// A draft that reads its target's hidden states.
void read_features(const GgufFile& file, const Family& family, const Keys& keys, const Hyperparameters* target,
                   Hyperparameters& h) {
    if (family.reads == Reads::nothing) {
        return;
    }
    const bool is_ahead = family.reads == Reads::joined_with_tokens;
    const bool borrows_cells = family.reads == Reads::joined_with_cells;
    const char* const key = "target_layers";
    auto layers = keys.array(key);
    const bool states_none = !keys.has(key) && family.reads == Reads::beside_tokens;
    file.require(!is_ahead || h.first_layer == target->num_layers, "layer ", h.first_layer,
                 " predicts further tokens (MTP) for a model of as many layers, but the target has ",
                 target->num_layers);
    if (is_ahead || borrows_cells) {
        layers = {target->num_layers};
    } else if (states_none && target->num_layers > 6) {
        layers = {2, target->num_layers / 2, target->num_layers - 3};  // EAGLE's own, which its files do not state
    }
    keys.require(layers && !layers->empty(), key, "is missing");
    for (const int64_t layer : *layers) {
        const int before = h.target_layers.empty() ? 0 : h.target_layers.back();
        keys.require(layer > before && layer <= target->num_layers, key, "must rise from 1 to the target's ",
                     target->num_layers, " layers; the draft was made for another target");
        h.target_layers.push_back(static_cast<int>(layer));
    }
    h.target_width = borrows_cells
                         ? keys.number("embedding_length_out", 1, kMostNumbers)
                         : keys.number("target_hidden_size", 1, kMostNumbers, is_ahead ? h.width : target->width);
    file.require(h.target_width == target->width, "the draft was made for a target that is ", h.target_width,
                 " wide, but this one is ", target->width, " wide");
    file.require(h.vocab_size >= target->vocab_size && (!borrows_cells || h.vocab_size == target->vocab_size),
                 "the draft knows ", h.vocab_size, " tokens, but the target has ", target->vocab_size);
    file.require(borrows_cells || file.has_tensor(kHeadName) || target->width == h.width, "the draft is ", h.width,
                 " wide, but the head that it borrows of its target ", target->width);
    file.require(h.width % kBlock == 0 && h.target_width % kBlock == 0 &&
                     int64_t(h.target_layers.size()) * h.target_width <= kMostNumbers,
                 "the widths of draft and target, ", h.width, " and ", h.target_width, ", must be multiples of ",
                 kBlock);
    // It goes on as far as its target does.
    h.max_context = std::max(h.max_context, target->max_context);
    if (borrows_cells) {
        h.hidden_width = h.target_width;
        h.embedding_scale = target->embedding_scale;
        borrow_cells(file, *target, h);
        return;
    }
    if (family.reads != Reads::as_context) {
        h.hidden_width = h.width;
        h.norm_before_residual = !is_ahead && file.flag(keys.name("norm_before_residual"), false);
        h.norm_before_fusion = !is_ahead && file.flag(keys.name("norm_before_fc"), false);
        h.feeds_back_normed = is_ahead || file.flag(keys.name("norm_output"), false);
        return;
    }
    h.block_size = keys.number("block_size", 2, kMostBlock);
    h.is_anchored = file.flag(keys.name("sample_from_anchor"), false);
    h.is_causal = file.flag(keys.name("attention.causal"), false);
    h.mask_token = static_cast<int32_t>(file.integer("tokenizer.ggml.mask_token_id", 0, h.vocab_size - 1));
    if (file.has_tensor(kMarkov)) {
        h.markov_rank = static_cast<int>(std::min(file.tensor(kMarkov).ne[0], kMostNumbers));
    }
}

}  // namespace

Hyperparameters read_hyperparameters(const GgufFile& file, const Family& family, const Hyperparameters* target) {
    file.require(
        family.reads == Reads::nothing || target, "architecture '", family.name,
        "' is a draft that reads its target's hidden states; load the target, and name this file as its draft");
    const Keys keys(file, family);
    Hyperparameters h;
    h.width = keys.number("embedding_length", 1, kMostNumbers);
    h.max_context = keys.number("context_length", 1, kMostNumbers);
    h.original_context = keys.number("rope.scaling.original_context_length", 1, kMostNumbers, h.max_context);
    h.num_layers = keys.number("block_count", 1, kMostLayers);
    // Of an assistant, all layers predict further tokens.
    const bool borrows_cells = family.reads == Reads::joined_with_cells;
    h.num_ahead = borrows_cells ? 0 : keys.number("nextn_predict_layers", 0, h.num_layers - 1, 0);
    h.num_layers -= h.num_ahead;
    if (family.reads == Reads::joined_with_tokens) {
        file.require(!family.has(kLayerNorm) && !family.has(kLayersDiffer),
                     "layers that predict further tokens are not supported in architecture '", family.name,
                     "'; name another draft");
        file.require(h.num_ahead == 1, "the file has ", h.num_ahead, " layers that predict further tokens (metadata '",
                     keys.name("nextn_predict_layers"),
                     "'); a draft is made of one, which is called again for each token");
        h.first_layer = h.num_layers;
        h.num_layers = h.num_ahead;
        h.num_ahead = 0;
    } else {
        const auto is_of_first = [](const std::string& name) { return name.starts_with("blk.0."); };
        file.require(h.num_ahead == 0 || std::ranges::any_of(file.tensor_names(), is_of_first),
                     "the file has only the layer that predicts further tokens (MTP) of a model of ", h.num_layers,
                     " layers, ", h.width, " wide; load that model, and name this file as its draft");
    }
    h.layers.resize(h.num_layers);
    read_mixers(file, family, keys, h);
    for (h.last_mixing = h.num_layers - 1; h.layers[h.last_mixing].mixers.empty(); --h.last_mixing) {
        keys.require(h.last_mixing != 0, "feed_forward_length", "leaves no layer that mixes rows");
    }
    h.num_heads = keys.number_of_layers("attention.head_count", 1, h.width, 0, h, &LayerNumbers::attends);
    keys.require(h.num_heads != 0, "attention.head_count", "is missing");
    read_windows(family, keys, h);
    read_heads(file, family, keys, h);
    h.ffn_width = keys.number_of_layers(
        "feed_forward_length", 1, kMostNumbers, family.has(kDefaultNumbers) ? int64_t(4) * h.width : 0, h,
        &LayerNumbers::feeds_forward, family.has(kLayersDiffer), &LayerNumbers::ffn_width);
    read_experts(file, family, keys, h);
    const bool is_dense = std::ranges::any_of(h.layers, [&](const LayerNumbers& layer) {
        return layer.feeds_forward && (!layer.has_experts || family.has(kDenseBeside));
    });
    if (h.ffn_width == 0 && !is_dense) {
        h.ffn_width = h.experts.width;
    }
    keys.require(h.ffn_width != 0, "feed_forward_length", "is missing");
    file.require(int64_t(h.num_heads) * h.head_dim <= kMostNumbers, h.num_heads, " heads of ", h.head_dim,
                 " numbers are absurdly many");
    const char *of_layer_norms = "attention.layer_norm_epsilon", *epsilon = "attention.layer_norm_rms_epsilon";
    if (family.has(kLayerNorm) || (!keys.has(epsilon) && keys.has(of_layer_norms))) {
        epsilon = of_layer_norms;
    }
    keys.require(family.has(kDefaultNumbers) || keys.has(epsilon), epsilon, "is missing");
    h.norm_epsilon = file.real(keys.name(epsilon), 1e-5f);
    keys.require(h.norm_epsilon > 0 && h.norm_epsilon < 1, epsilon, "is not between 0 and 1");
    const bool borrows =
        target && !borrows_cells && (family.reads == Reads::joined_with_tokens || !file.has_tensor(kEmbedding));
    file.require(!borrows || target->width == h.width,
                 "the draft borrows the embedding of its target, and was made for one that is ", h.width,
                 " wide, but this one is ", target ? target->width : 0, " wide");
    const int64_t vocab_size = borrows ? target->vocab_size : file.tensor(kEmbedding).ne[1];
    file.require(vocab_size >= 1 && vocab_size <= kMostNumbers, "tensor 'token_embd.weight' has ", vocab_size, " rows");
    h.vocab_size = static_cast<int>(vocab_size);
    h.vocab_rows = h.vocab_size;
    if (family.reads != Reads::nothing && !borrows_cells) {
        const bool has_head = file.has_tensor(kHeadName) && family.reads != Reads::joined_with_tokens;
        const int64_t rows = has_head ? file.tensor(kHeadName).ne[1] : target->vocab_rows;
        file.require(rows >= 1 && rows <= kMostNumbers, "tensor '", kHeadName, "' has ", rows, " rows");
        h.vocab_rows = static_cast<int>(rows);
    }
    h.layer_embedding_width =
        family.has(kLayersDiffer) ? keys.number("embedding_length_per_layer_input", 0, kMostNumbers, 0) : 0;
    keys.require(int64_t(h.layer_embedding_width) * h.num_layers <= kMostNumbers, "embedding_length_per_layer_input",
                 "is absurdly large");
    read_rope(file, family, keys, h);
    read_scales(family, keys, h);
    read_features(file, family, keys, target, h);
    return h;
}

}  // namespace pystaged
