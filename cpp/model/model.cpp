#include "model/model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <stdexcept>

#include "error.h"
#include "machine/pool.h"
#include "model/loaders.h"
#include "model/manifest.h"
#include "pass/packed_pass.h"
#include "state/kept_cells.h"
#include "state/kv_cache.h"
#include "state/recurrent_state.h"
#include "text/executor.h"

namespace pystaged {

namespace {

// What a model may take at most: so much, and so many times its file.
constexpr double kMostBytes = 256 << 20, kMostTimesFile = 4;

Cores checked_threads(int num_threads) {
    if (num_threads < 0 || num_threads > ThreadPool::kMaxThreads) {
        throw std::invalid_argument("the number of threads must be between 0 (automatic) and " +
                                    std::to_string(ThreadPool::kMaxThreads) + ", not " + std::to_string(num_threads));
    }
    Cores cores = choose_cores();
    if (num_threads > 0) {
        cores.few = cores.many = num_threads;
    }
    return cores;
}

void check_factors(const GgufFile& file, const Manifest& manifest) {
    for (const Role role : {Role::rope_factors, Role::rope_factors_long, Role::rope_factors_short}) {
        const TensorView* tensor = manifest.find(role);
        if (!tensor) {
            continue;
        }
        const std::vector<float> factors = read_floats(file, *tensor);
        if (std::any_of(factors.begin(), factors.end(), [](float factor) { return factor < 1e-6f; })) {
            file.fail("tensor '" + tensor->name + "' holds factors that are not above 0");
        }
    }
}

// Matrices are padded to whole blocks, and a pass has rows as wide as the widest: for the shape of a model that is less
// than its file, for an absurd one it may be hundreds of times as much. So may the states of recurrent layers.
void check_memory(const GgufFile& file, const Manifest& manifest, const Hyperparameters& numbers, size_t state_bytes) {
    double bytes = PackedPass::bytes(numbers) + double(state_bytes);
    for (const TensorView* tensor : manifest.matrices()) {
        const double cols = double(tensor->ne[0]), rows = double(tensor->ne[1]);  // of each matrix
        bytes += double(tensor->bytes) * std::ceil(cols / kBlock) * std::ceil(rows / kBlock) * kBlock * kBlock /
                 (cols * rows);
    }
    if (bytes > kMostBytes + kMostTimesFile * double(file.bytes())) {
        file.fail("a model of width " + std::to_string(numbers.width) + ", with a feed-forward width of " +
                  std::to_string(numbers.ffn_width) + " and " + std::to_string(numbers.vocab_size) +
                  " tokens, would take " + std::to_string(int64_t(bytes / (1 << 20))) +
                  " MiB of memory for a file of " + std::to_string(file.bytes() >> 20) +
                  "; it is damaged or not a model");
    }
}

// The tokens that a draft's head has logits of.
std::vector<int32_t> read_head_tokens(const GgufFile& file, const Manifest& manifest, const Hyperparameters& numbers) {
    const TensorView* tensor = manifest.find(Role::head_tokens);
    if (!tensor) {
        if (numbers.head_size < numbers.vocab_size && manifest.find(Role::head)) {
            file.fail("the head has " + std::to_string(numbers.head_size) + " rows for a vocabulary of " +
                      std::to_string(numbers.vocab_size) + " tokens, and no tensor '" + kHeadTokens + "' names them");
        }
        return {};
    }
    if (tensor->type != GGML_TYPE_I64) {
        file.fail("tensor '" + tensor->name + "' is of type " + ggml_type_name(tensor->type) + " where I64 is needed");
    }
    const Memory data = file.read(*tensor);
    std::vector<int32_t> tokens;
    for (int i = 0; i < numbers.head_size; ++i) {
        const int64_t token = reinterpret_cast<const int64_t*>(data.data())[i];
        if (token < 0 || token >= numbers.vocab_size) {
            file.fail("tensor '" + tensor->name + "' names token " + std::to_string(token) +
                      ", outside the vocabulary of " + std::to_string(numbers.vocab_size));
        }
        tokens.push_back(static_cast<int32_t>(token));
    }
    return tokens;
}

void check_vocabulary(const GgufFile& file, const Hyperparameters& numbers) {
    const auto tokens = file.array("tokenizer.ggml.tokens", GGUF_TYPE_STRING);
    if (tokens && tokens->second != size_t(numbers.vocab_size)) {
        file.fail("the file has weights for " + std::to_string(numbers.vocab_size) + " tokens, but a vocabulary of " +
                  std::to_string(tokens->second));
    }
}

ShortConvolution load_short_convolution(PackedLoader& loader) {
    return {{loader.linear(Role::conv_input)}, loader.taps(Role::conv_taps), loader.linear(Role::conv_output)};
}

DeltaNet load_delta_net(PackedLoader& loader) {
    DeltaNet result = loader.delta_inputs();
    result.taps = loader.taps(Role::delta_taps);
    result.decay = loader.vector(Role::delta_decay);
    result.step = loader.vector(Role::delta_step);
    result.norm = loader.vector(Role::delta_norm);
    result.output = loader.linear(Role::delta_output);
    return result;
}

StateSpace load_state_space(PackedLoader& loader) {
    StateSpace result;
    result.input.push_back(loader.linear(Role::space_input));
    result.taps = loader.taps(Role::space_taps);
    result.taps_bias = loader.vector(Role::space_taps_bias);
    result.decay = loader.per_head(Role::space_decay);
    result.step = loader.vector(Role::space_step);
    result.skip = loader.per_head(Role::space_skip);
    result.norm = loader.vector(Role::space_norm);
    result.output = loader.linear(Role::space_output);
    return result;
}

}  // namespace

Model::Model(const std::string& path, const std::string& kernel, int num_threads, const Devices& devices,
             const std::function<void()>& progress, KvType kv, const std::string& packed,
             std::shared_ptr<const Model> lender, DraftForm form)
    : kernel_(find_kernel(kernel)), threads_(checked_threads(num_threads)), kv_type_(kv), lender_(std::move(lender)) {
    if (lender_ && (lender_->llama() || !devices.empty())) {
        throw std::invalid_argument("embeddings are borrowed on the CPU's own kernels alone");
    }
    if (kv != KvType::f16 && !devices.empty()) {
        throw std::invalid_argument("keys and values of eight bits are for the CPU's own kernels; leave them at f16");
    }
    const FloatEnvironment pinned;
    const GgufFile file(path);
    file_bytes_ = file.bytes();
    name_ = file.text("general.name", "");
    if (!devices.empty()) {
        load_llama(file, devices, progress);
        return;
    }
    family_ = &find_family(file);
    if (lender_) {
        if (family_->target && std::string(lender_->family().name) != family_->target) {
            file.fail("architecture '" + std::string(family_->name) + "' is a draft for '" + family_->target +
                      "' models, but the target is of architecture '" + lender_->family().name + "'");
        }
        own_family_ = *family_;
        if (form.other_pairs) {
            own_family_.rope = family_->rope == Pairs::halves ? Pairs::adjacent : Pairs::halves;
        }
        if (family_->reads == Reads::nothing) {
            own_family_.reads = Reads::joined_with_tokens;
            own_family_.rules &= ~(kDeltaNets | kShortConvolutions | kStateSpaces);  // it attends
        }
        family_ = &own_family_;
    }
    numbers_ = read_hyperparameters(file, *family_, lender_ ? &lender_->numbers() : nullptr);
    if (form.other_feedback) {
        numbers_.feeds_back_normed = !numbers_.feeds_back_normed;
    }
    check_vocabulary(file, numbers_);
    const Manifest manifest(file, *family_, numbers_);
    check_memory(file, manifest, numbers_, state_bytes());
    check_factors(file, manifest);
    head_tokens_ = read_head_tokens(file, manifest, numbers_);
    weight_types_ = manifest.types();
    load_packed(file, manifest, packed);
    // All but what rows are looked up in, and Markov weights; the head may be borrowed.
    weight_bytes_ = matrix_bytes_ + head().packed.bytes() - head_.packed.bytes() - token_embedding_.packed.bytes() -
                    markov_.in.packed.bytes() - markov_.out.packed.bytes() - layer_embeddings_.tokens.packed.bytes();
    for (const Layer& layer : layers_) {
        if (const auto* experts = layer.feed_forward ? std::get_if<Experts>(&*layer.feed_forward) : nullptr) {
            const Dense& any = experts->each[0];
            weight_bytes_ -= (numbers_.experts.count - numbers_.experts.used) *
                             (any.gate.packed.bytes() + any.up.packed.bytes() + any.down.packed.bytes());
        }
    }
    for (const TensorView* tensor : manifest.multiplied()) {
        num_weights_ += size_t(tensor->ne[0]) * tensor->ne[1] *
                        (tensor->name.find("_exps") != std::string::npos ? numbers_.experts.used : tensor->ne[2]);
    }
    if (numbers_.hidden_width > 0) {
        taps_ = {numbers_.num_layers};  // which the next token's row reads
    }
}

// What libllama does not say is for those who ask about the model.
void Model::load_llama(const GgufFile& file, const Devices& devices, const std::function<void()>& progress) {
    try {
        // libllama ends the process on some damaged files.
        const Family& family = find_family(file);
        const Hyperparameters numbers = read_hyperparameters(file, family, nullptr);
        check_vocabulary(file, numbers);
        const Manifest manifest(file, family, numbers);
        check_memory(file, manifest, numbers, 0);
        check_factors(file, manifest);
        const auto attends = [](const LayerNumbers& layer) { return layer.attends(); };
        if (numbers.is_recurrent() && std::none_of(numbers.layers.begin(), numbers.layers.end(), attends)) {
            file.fail("no layer attends, and llama.cpp does not compute such a model; leave out the device");
        }
    } catch (const UnsupportedModelError&) {
        // Only libllama knows what belongs into this file.
    }
    llama_ = std::make_unique<LlamaModel>(file.path(), devices, threads_.few, progress);
    const llama_model* model = llama_->get();
    architecture_ = file.text("general.architecture");
    own_family_.name = architecture_.c_str();
    family_ = &own_family_;
    const auto number = [&](const char* key, int otherwise) {
        const std::optional<std::vector<int64_t>> values = file.integers(architecture_ + key);
        return values && !values->empty() ? static_cast<int>(*std::max_element(values->begin(), values->end()))
                                          : static_cast<int>(file.integer(architecture_ + key, 0, 1 << 30, otherwise));
    };
    numbers_.vocab_size = numbers_.head_size = llama_vocab_n_tokens(llama_model_get_vocab(model));
    numbers_.max_context = std::max(1, llama_model_n_ctx_train(model));
    numbers_.width = llama_model_n_embd_out(model);
    numbers_.num_layers = llama_model_n_layer(model);
    numbers_.num_heads = llama_model_n_head(model);
    numbers_.num_kv_heads = llama_model_n_head_kv(model);
    numbers_.head_dim = number(".attention.key_length", numbers_.width / std::max(1, numbers_.num_heads));
    numbers_.ffn_width = number(".feed_forward_length", 0);
    const int experts = number(".expert_count", 0), used = number(".expert_used_count", 0);
    std::map<std::string, size_t> types;
    const bool has_head = file.has_tensor(kHeadName);
    for (const std::string& name : file.tensor_names()) {
        const TensorView tensor = file.tensor(name);
        if (tensor.ne[1] == 1) {
            continue;
        }
        types[ggml_type_name(tensor.type)] += tensor.bytes;
        matrix_bytes_ += tensor.bytes;
        // A pass reads all but what rows are looked up in, and of experts those that a row uses.
        const bool is_expert = experts > 0 && name.find("_exps") != std::string::npos;
        const size_t share = is_expert ? experts : 1, read = is_expert ? used : name != kEmbedding || !has_head;
        weight_bytes_ += tensor.bytes / share * read;
        num_weights_ += size_t(tensor.ne[0]) * tensor.ne[1] * tensor.ne[2] / share * read;
    }
    weight_types_.assign(types.begin(), types.end());
    std::sort(weight_types_.begin(), weight_types_.end(),
              [](const auto& a, const auto& b) { return a.second > b.second; });
}

void Model::load_packed(const GgufFile& file, const Manifest& manifest, const std::string& packed) {
    if (!packed.empty()) {
        content_ = PackedContent(file);
        PackedContent content = content_;
        if (file_exists(packed)) {
            try {
                PackedFile mapped(packed, content);
                PackedLoader loader(file, manifest, *family_, numbers_, num_threads(), content, &mapped);
                load(loader);
                mapped.check(content, loader.used(), num_threads());
                arena_ = mapped.take();
                is_mapped_ = true;
                matrix_bytes_ = loader.used();
                buffer_bytes_ = loader.buffer_bytes();
                return;
            } catch (const ModelError& error) {
                packed_problem_ = error.what();
                layers_.clear();
            }
        }
    }
    PackedLoader loader(file, manifest, *family_, numbers_, num_threads(), content_);
    load(loader);
    arena_ = loader.take_arena();
    matrix_bytes_ = loader.used();
    buffer_bytes_ = loader.buffer_bytes();
}

void Model::save_packed(const std::string& path, const std::function<void()>& check_interrupt) const {
    if (content_.empty() || is_mapped_) {
        throw std::logic_error("packed weights are saved of a model that was loaded to be packed");
    }
    write_packed(path, content_, arena_.data(), matrix_bytes_, num_threads(), check_interrupt);
}

void Model::load(PackedLoader& loader) {
    token_embedding_ = loader.token_embedding();
    head_ = loader.head();
    head_bias_ = loader.vector(Role::head_bias);
    position_embedding_ = loader.vector(Role::position_embedding);
    rope_factors_ = loader.vector(Role::rope_factors);
    rope_factors_long_ = loader.vector(Role::rope_factors_long);
    rope_factors_short_ = loader.vector(Role::rope_factors_short);
    output_norm_ = loader.norm(Role::output_norm, Role::output_norm_bias);
    if (family_->reads == Reads::joined_with_tokens) {
        fusion_.token_norm.weight = loader.vector(Role::fusion_token_norm);
        fusion_.hidden_norm.weight = loader.vector(Role::fusion_hidden_norm);
        fusion_.projection = loader.linear(Role::fusion);
    } else if (family_->reads == Reads::joined_with_cells) {
        fusion_.projection = loader.linear(Role::fusion);
        fusion_.feedback = loader.linear(Role::fusion_feedback);
    } else if (family_->reads != Reads::nothing) {
        features_.norm.weight = loader.vector(Role::features_norm);
        features_.each_norm = loader.vector(Role::features_norms);
        features_.projection = loader.linear(Role::features);
        features_.beside_norm.weight = loader.vector(Role::beside_norm);
    }
    if (numbers_.markov_rank > 0) {
        markov_ = {loader.linear(Role::markov_in), loader.linear(Role::markov_out)};
    }
    if (numbers_.layer_embedding_width > 0) {
        layer_embeddings_ = {loader.linear(Role::layer_tokens),
                             loader.linear(Role::layer_projection),
                             {loader.vector(Role::layer_projection_norm), {}}};
    }
    for (int i = 0; i < numbers_.num_layers; ++i) {
        loader.begin_layer(i);
        Layer layer;
        layer.mixer_norm = loader.norm(Role::attn_norm, Role::attn_norm_bias);
        layer.mixer_post_norm.weight = loader.vector(Role::attn_post_norm);
        for (const MixerKind mixer : numbers_.layers[i].mixers) {
            switch (mixer) {
                case MixerKind::attention:
                    if (family_->has(kLatents)) {
                        layer.mixers.emplace_back(loader.latent_attention());
                    } else {
                        layer.mixers.emplace_back(loader.attention());
                    }
                    break;
                case MixerKind::short_convolution: layer.mixers.emplace_back(load_short_convolution(loader)); break;
                case MixerKind::delta_net: layer.mixers.emplace_back(load_delta_net(loader)); break;
                case MixerKind::state_space: layer.mixers.emplace_back(load_state_space(loader)); break;
            }
        }
        layer.ffn_norm = loader.norm(Role::ffn_norm, Role::ffn_norm_bias);
        layer.ffn_post_norm.weight = loader.vector(Role::ffn_post_norm);
        if (numbers_.layers[i].has_experts) {
            layer.feed_forward = loader.experts();
        } else if (numbers_.layers[i].feeds_forward) {
            layer.feed_forward = loader.dense();
        }
        if (numbers_.layer_embedding_width > 0) {
            layer.embedding.in = loader.linear(Role::layer_in);
            layer.embedding.out = loader.linear(Role::layer_out);
            layer.embedding.norm.weight = loader.vector(Role::layer_post_norm);
        }
        if (const Vector scale = loader.vector(Role::layer_scale); scale.present()) {
            layer.embedding.scale = scale.values[0];
        }
        layers_.push_back(std::move(layer));
    }
}

void Model::tap(std::vector<int> layers, bool all_rows, bool last_row) {
    if (llama_) {
        throw std::invalid_argument("hidden states are handed out by the CPU's own kernels alone");
    }
    for (size_t i = 0; i < layers.size(); ++i) {
        if (layers[i] <= (i == 0 ? 0 : layers[i - 1]) || layers[i] > numbers_.num_layers) {
            throw std::invalid_argument("layers to tap must rise, from 1 to the model's " +
                                        std::to_string(numbers_.num_layers));
        }
    }
    const std::lock_guard<std::mutex> lock(Executor::making());
    if (!executor_.expired()) {
        throw std::invalid_argument(
            "layers are tapped before the first session is opened, and this model has sessions");
    }
    taps_ = std::move(layers);
    taps_all_rows_ = all_rows;
    taps_last_row_ = last_row && !taps_.empty();
}

void Model::cut_head(int rows) {
    const std::lock_guard<std::mutex> lock(Executor::making());
    if (rows < 1 || !executor_.expired()) {
        throw std::invalid_argument("a head is cut to 1 row at least, before the first session is opened");
    }
    if (!lender_ || head_.present() || !head_tokens_.empty() || rows >= numbers_.head_size) {
        return;
    }
    const auto first_rows = [&](const PackedMatrix& whole) {
        return PackedMatrix(type_of(whole.packing()), rows, whole.cols(), whole.data());
    };
    head_.packed = first_rows(lender_->head().packed);
    head_bias_ = lender_->head_bias();
    if (numbers_.markov_rank > 0) {
        markov_.out.packed = first_rows(markov_.out.packed);
    }
    numbers_.head_size = rows;
    weight_bytes_ -= lender_->head().packed.bytes() - head_.packed.bytes();
}

size_t Model::cell_bytes() const {
    size_t bytes = llama_ ? llama_->cell_bytes() : 0;
    for (int layer = 0; !llama_ && layer < numbers_.num_layers; ++layer) {
        bytes += layer_cell_bytes(layer);
    }
    return bytes;
}

size_t Model::windowed_cell_bytes() const {
    size_t bytes = 0;
    for (int layer = 0; !llama_ && layer < numbers_.num_layers; ++layer) {
        bytes += numbers_.layers[layer].windowed ? layer_cell_bytes(layer) : 0;
    }
    return bytes;
}

size_t Model::layer_cell_bytes(int index) const {
    const LayerNumbers& layer = numbers_.layers[index];
    if (!layer.stores(index)) {
        return 0;
    }
    return KvCache::cell_bytes(kv_type_, layer.num_kv_heads, layer.head_dim, layer.value_dim);
}

int64_t Model::most_windowed() const {
    return KeptCells::most(numbers_.window);
}

size_t Model::state_bytes() const {
    if (llama_) {
        return (1 + llama_->num_back()) * llama_->state_bytes();
    }
    size_t values = 0;
    for (int layer = 0; layer < numbers_.num_layers; ++layer) {
        values += RecurrentState::kFewRows * numbers_.recurrent_sizes(layer).input;
    }
    return 2 * kept_state_bytes() + values * sizeof(float);
}

size_t Model::kept_state_bytes() const {
    if (llama_) {
        return llama_->state_bytes();
    }
    size_t values = 0;
    for (int layer = 0; layer < numbers_.num_layers; ++layer) {
        values += numbers_.recurrent_sizes(layer).state;
    }
    return values * sizeof(float);
}

int Model::most_pending() const {
    return is_chained()              ? 1 + llama_->num_back()
           : numbers_.is_recurrent() ? RecurrentState::kMostPending
                                     : std::numeric_limits<int>::max();
}

const Vector& Model::rope_factors(int context) const {
    if (rope_factors_.present()) {
        return rope_factors_;
    }
    return context > numbers_.original_context ? rope_factors_long_ : rope_factors_short_;
}

}  // namespace pystaged
