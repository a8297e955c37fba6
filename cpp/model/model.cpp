#include "model/model.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <optional>

#include "machine/pool.h"
#include "model/loader.h"

namespace pystaged {

// What a model may take at most: so much, and so many times its file.
constexpr double kMostBytes = 256 << 20, kMostTimesFile = 4;

static Cores checked_threads(int num_threads) {
    require(num_threads >= 0 && num_threads <= ThreadPool::kMaxThreads,
            "the number of threads must be between 0 (automatic) and ", ThreadPool::kMaxThreads, ", not ", num_threads);
    Cores cores = num_threads > 0 ? Cores{.few = num_threads, .many = num_threads} : choose_cores();
    cores.few = std::min(cores.few, ThreadPool::kMaxThreads);
    cores.many = std::min(cores.many, ThreadPool::kMaxThreads);
    return cores;
}

// Matrices are padded to whole blocks, and a pass has rows as wide as the widest: for the shape of a model that is less
// than its file, for an absurd one it may be hundreds of times as much. So may the states of recurrent layers.
static void check_memory(const Loader& loader, size_t state_bytes) {
    const GgufFile& file = loader.file;
    const Hyperparameters& numbers = loader.numbers;
    double bytes = numbers.pass_bytes() + double(state_bytes);
    for (const auto& [tensor, is_table] : loader.matrices()) {
        const double cols = double(tensor->ne[0]), rows = double(tensor->ne[1]);  // of each matrix
        bytes += double(tensor->bytes) * std::ceil(cols / kBlock) * std::ceil(rows / kBlock) * kBlock * kBlock /
                 (cols * rows);
    }
    file.require(bytes <= kMostBytes + kMostTimesFile * double(file.bytes()), "a model of width ", numbers.width,
                 ", with a feed-forward width of ", numbers.ffn_width, " and ", numbers.vocab_size,
                 " tokens, would take ", int64_t(bytes / (1 << 20)), " MiB of memory for a file of ",
                 file.bytes() >> 20, "; it is damaged or not a model");
}

static void check_vocabulary(const GgufFile& file, const Hyperparameters& numbers) {
    const auto tokens = file.array("tokenizer.ggml.tokens", GGUF_TYPE_STRING);
    const size_t num_tokens = tokens ? tokens->second : numbers.vocab_size;
    file.require(num_tokens == size_t(numbers.vocab_size), "the file has weights for ", numbers.vocab_size,
                 " tokens, but a vocabulary of ", num_tokens);
}

// Checks all that a file holds; nothing is packed.
static void declare(Loader& loader, size_t state_bytes) {
    load_weights(loader);
    loader.check_complete();
    check_memory(loader, state_bytes);
}

Model::Model(const std::string& path, const std::string& kernel, int num_threads, const Devices& devices,
             const std::function<void()>& progress, KvType kv, const std::string& packed,
             std::shared_ptr<const Model> target, DraftForm form)
    : kernel_(find_kernel(kernel)), threads_(checked_threads(num_threads)), kv_type_(kv), target_(std::move(target)) {
    require(!target_ || (!target_->llama() && devices.empty()),
            "embeddings are borrowed on the CPU's own kernels alone");
    require(kv == KvType::f16 || devices.empty(),
            "keys and values of eight bits are for the CPU's own kernels; leave them at f16");
    const FloatEnvironment pinned;
    const GgufFile file(path);
    facts_.file_bytes = file.bytes();
    facts_.name = file.text("general.name", "");
    if (!devices.empty()) {
        load_llama(file, devices, progress);
        return;
    }
    family_ = &find_family(file);
    if (target_) {
        const std::string wanted = family_->target ? family_->target : target_->family().name;
        file.require(wanted == target_->family().name, "architecture '", family_->name, "' is a draft for '", wanted,
                     "' models, but the target is of architecture '", target_->family().name, "'");
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
    numbers_ = read_hyperparameters(file, *family_, target_ ? &target_->numbers() : nullptr);
    if (form.other_feedback) {
        numbers_.feeds_back_normed = !numbers_.feeds_back_normed;
    }
    check_vocabulary(file, numbers_);
    Loader loader(file, *family_, numbers_);
    declare(loader, state_bytes());
    load_packed(loader, packed);
    // All but what rows are looked up in, and Markov weights; the head may be borrowed.
    const Weights& own = weights_;
    facts_.weight_bytes = facts_.matrix_bytes + head().packed.bytes() - own.head.packed.bytes() -
                          own.token_embedding.packed.bytes() - own.markov.in.packed.bytes() -
                          own.markov.out.packed.bytes() - own.layer_embeddings.tokens.packed.bytes();
    for (const Layer& layer : own.layers) {
        if (const auto* experts = layer.feed_forward ? std::get_if<Experts>(&*layer.feed_forward) : nullptr) {
            const Dense& any = experts->each[0];
            facts_.weight_bytes -= (numbers_.experts.count - numbers_.experts.used) *
                                   (any.gate.packed.bytes() + any.up.packed.bytes() + any.down.packed.bytes());
        }
    }
    for (const auto& [tensor, is_table] : loader.matrices()) {
        count(*tensor, !is_table || (tensor->name == kEmbedding && !own.head.present()));
    }
    std::ranges::stable_sort(facts_.weight_types, std::greater(), &std::pair<std::string, size_t>::second);
    if (numbers_.hidden_width > 0) {
        taps_ = {numbers_.num_layers};  // which the next token's row reads
    }
}

// A matrix of the file, of which a pass reads all, and of experts those that a row uses, or only a row. Returns how
// many bytes those are.
size_t Model::count(const TensorView& tensor, bool is_read) {
    const std::string type = ggml_type_name(tensor.type);
    auto& types = facts_.weight_types;
    const auto place = std::ranges::lower_bound(types, type, {}, &std::pair<std::string, size_t>::first);
    (place == types.end() || place->first != type ? types.emplace(place, type, 0) : place)->second += tensor.bytes;
    const bool is_expert = numbers_.experts.count > 0 && tensor.name.find("_exps") != std::string::npos;
    const size_t share = is_expert ? numbers_.experts.count : 1, read = is_expert ? numbers_.experts.used : 1;
    facts_.num_weights += is_read ? size_t(tensor.ne[0]) * tensor.ne[1] * tensor.ne[2] / share * read : 0;
    return is_read ? tensor.bytes / share * read : 0;
}

// What libllama does not say is for those who ask about the model.
void Model::load_llama(const GgufFile& file, const Devices& devices, const std::function<void()>& progress) {
    try {
        // libllama ends the process on some damaged files.
        const Family& family = find_family(file);
        const Hyperparameters numbers = read_hyperparameters(file, family, nullptr);
        check_vocabulary(file, numbers);
        Loader loader(file, family, numbers);
        declare(loader, 0);
        file.require(!numbers.is_recurrent() || std::ranges::any_of(numbers.layers, &LayerNumbers::attends),
                     "no layer attends, and llama.cpp does not compute such a model; leave out the device");
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
        return values && !values->empty() ? static_cast<int>(std::ranges::max(*values))
                                          : static_cast<int>(file.integer(architecture_ + key, 0, 1 << 30, otherwise));
    };
    numbers_.vocab_size = numbers_.vocab_rows = llama_vocab_n_tokens(llama_model_get_vocab(model));
    numbers_.max_context = std::max(1, llama_model_n_ctx_train(model));
    numbers_.width = llama_model_n_embd_out(model);
    numbers_.num_layers = llama_model_n_layer(model);
    numbers_.num_heads = llama_model_n_head(model);
    numbers_.num_kv_heads = llama_model_n_head_kv(model);
    numbers_.head_dim = number(".attention.key_length", numbers_.width / std::max(1, numbers_.num_heads));
    numbers_.ffn_width = number(".feed_forward_length", 0);
    numbers_.experts.count = number(".expert_count", 0);
    numbers_.experts.used = number(".expert_used_count", 0);
    const bool has_head = file.has_tensor(kHeadName);
    for (const std::string& name : file.tensor_names()) {
        const TensorView tensor = file.tensor(name);
        if (tensor.ne[1] > 1) {
            facts_.matrix_bytes += tensor.bytes;
            facts_.weight_bytes += count(tensor, name != kEmbedding || !has_head);
        }
    }
    std::ranges::stable_sort(facts_.weight_types, std::greater(), &std::pair<std::string, size_t>::second);
}

void Model::load_packed(Loader& loader, const std::string& packed) {
    if (!packed.empty()) {
        content_ = PackedContent(loader.file);
        const std::filesystem::path path(std::u8string(packed.begin(), packed.end()));
        if (std::error_code none; std::filesystem::exists(path, none)) {
            PackedContent content = content_;
            try {
                PackedFile mapped(packed, content);
                loader.begin_packing(num_threads(), content, &mapped);
                weights_ = load_weights(loader);
                mapped.check(content, loader.used(), num_threads());
                arena_ = mapped.take();
                facts_.is_mapped = true;
            } catch (const ModelError& error) {
                facts_.packed_problem = error.what();
            }
        }
    }
    if (!facts_.is_mapped) {
        loader.begin_packing(num_threads(), content_);
        weights_ = load_weights(loader);
        arena_ = loader.take_arena();
    }
    facts_.matrix_bytes = loader.used();
    facts_.buffer_bytes = loader.buffer_bytes();
}

void Model::save_packed(const std::string& path, const std::function<void()>& check_interrupt) const {
    require<std::logic_error>(!content_.empty() && !facts_.is_mapped,
                              "packed weights are saved of a model that was loaded to be packed");
    PackedFile::write(path, content_, arena_.data(), facts_.matrix_bytes, num_threads(), check_interrupt);
}

void Model::tap(std::vector<int> layers, bool all_rows, bool last_row) {
    require(!llama_, "hidden states are handed out by the CPU's own kernels alone");
    for (size_t i = 0; i < layers.size(); ++i) {
        require(layers[i] > (i == 0 ? 0 : layers[i - 1]) && layers[i] <= numbers_.num_layers,
                "layers to tap must rise, from 1 to the model's ", numbers_.num_layers);
    }
    taps_ = std::move(layers);
    taps_all_rows_ = all_rows;
    taps_last_row_ = last_row && !taps_.empty();
}

void Model::cut_head(int rows) {
    require(rows >= 1, "a head is cut to 1 row at least");
    if (!target_ || weights_.head.present() || !weights_.head_tokens.empty() || rows >= numbers_.vocab_rows) {
        return;
    }
    const auto first_rows = [&](const PackedMatrix& whole) {
        return PackedMatrix(type_of(whole.packing()), rows, whole.cols(), whole.data());
    };
    weights_.head.packed = first_rows(target_->head().packed);
    weights_.head_bias = target_->head_bias();
    if (numbers_.markov_rank > 0) {
        weights_.markov.out.packed = first_rows(weights_.markov.out.packed);
    }
    numbers_.vocab_rows = rows;
    facts_.weight_bytes -= target_->head().packed.bytes() - weights_.head.packed.bytes();
}

int Model::most_pending() const {
    return is_chained()              ? 1 + llama_->num_back()
           : numbers_.is_recurrent() ? RecurrentSizes::kMostPending
                                     : std::numeric_limits<int>::max();
}

const Vector& Model::rope_factors(int context) const {
    if (weights_.rope_factors.present()) {
        return weights_.rope_factors;
    }
    return context > numbers_.original_context ? weights_.rope_factors_long : weights_.rope_factors_short;
}

}  // namespace pystaged
