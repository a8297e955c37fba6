#include "tokenizer.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <stdexcept>
#include <unordered_set>

#include "error.h"
#include "gguf_file.h"
#include "llama.h"

namespace pystaged {

namespace {

// libllama asserts, and so aborts, on some malformed vocabularies; those are refused here first.
void check_vocabulary(const std::string& path) {
    const GgufFile file(path);
    if (file.text("tokenizer.ggml.model") != "gpt2") {
        file.fail("tokenizer model '" + file.text("tokenizer.ggml.model") + "' is not supported, only 'gpt2'");
    }
    const auto tokens = file.array("tokenizer.ggml.tokens", GGUF_TYPE_STRING);
    if (!tokens || tokens->second == 0 || tokens->second > size_t(1) << 24) {
        file.fail("the vocabulary 'tokenizer.ggml.tokens' is missing, empty or absurdly long");
    }
    std::unordered_set<std::string> seen;
    seen.reserve(tokens->second);
    for (size_t i = 0; i < tokens->second; ++i) {
        std::string text = file.array_text(tokens->first, i);
        if (text.empty()) {
            text = "[EMPTY_" + std::to_string(i) + "]";
        }
        if (!seen.insert(text).second) {
            file.fail("token " + std::to_string(i) + " of the vocabulary stands there twice");
        }
    }
    const auto last = static_cast<int64_t>(tokens->second) - 1;
    for (const char* name : {"bos", "eos"}) {
        // libllama's default for a BPE vocabulary that names none is 11.
        const std::string key = std::string("tokenizer.ggml.") + name + "_token_id";
        if (file.integer(key, 0, last, 11) > last) {
            file.fail("metadata '" + key + "' is missing");
        }
    }
}

}  // namespace

void Tokenizer::Free::operator()(llama_model* model) const {
    llama_model_free(model);
}

Tokenizer::Tokenizer(const std::string& path) {
    check_vocabulary(path);
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    std::string reason;
    {
        LogCapture log;
        model_.reset(llama_model_load_from_file(path.c_str(), params));
        reason = log.first_error();
    }
    if (!model_) {
        throw ModelError(path + ": cannot load the vocabulary: " + reason);
    }
    vocab_ = llama_model_get_vocab(model_.get());
}

int Tokenizer::num_tokens() const {
    return llama_vocab_n_tokens(vocab_);
}

std::vector<int32_t> Tokenizer::encode(const std::string& text) const {
    if (text.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
        throw std::invalid_argument("the text is longer than 2 GiB");
    }
    const auto size = static_cast<int32_t>(text.size());
    std::vector<int32_t> tokens(text.size() + 2);
    int32_t n = llama_tokenize(vocab_, text.data(), size, tokens.data(), static_cast<int32_t>(tokens.size()),
                               /*add_special=*/true, /*parse_special=*/true);
    if (n < 0) {
        tokens.resize(static_cast<size_t>(-static_cast<int64_t>(n)));
        n = llama_tokenize(vocab_, text.data(), size, tokens.data(), static_cast<int32_t>(tokens.size()), true, true);
    }
    if (n < 0) {
        throw std::runtime_error("the text cannot be tokenized");
    }
    tokens.resize(static_cast<size_t>(n));
    return tokens;
}

std::string Tokenizer::token_bytes(int32_t token) const {
    if (token < 0 || token >= num_tokens()) {
        throw std::invalid_argument("token " + std::to_string(token) + " is outside the vocabulary of " +
                                    std::to_string(num_tokens()));
    }
    std::string piece(32, '\0');
    int32_t n = llama_token_to_piece(vocab_, token, piece.data(), static_cast<int32_t>(piece.size()), 0, false);
    if (n < 0) {
        piece.resize(static_cast<size_t>(-n));
        n = llama_token_to_piece(vocab_, token, piece.data(), static_cast<int32_t>(piece.size()), 0, false);
    }
    piece.resize(static_cast<size_t>(n < 0 ? 0 : n));
    return piece;
}

bool Tokenizer::is_end(int32_t token) const {
    return token >= 0 && token < num_tokens() && llama_vocab_is_eog(vocab_, token);
}

int32_t Tokenizer::first_difference(const Tokenizer& other) const {
    const int32_t shared = std::min(num_tokens(), other.num_tokens());
    for (int32_t token = 0; token < shared; ++token) {
        if (token_bytes(token) != other.token_bytes(token) || is_end(token) != other.is_end(token)) {
            return token;
        }
    }
    return -1;
}

std::string Tokenizer::fingerprint() const {
    uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
    const auto add = [&](uint8_t byte) { hash = (hash ^ byte) * 0x100000001b3u; };
    for (int32_t token = 0; token < num_tokens(); ++token) {
        const std::string bytes = token_bytes(token);
        add(static_cast<uint8_t>(bytes.size()));
        for (const char c : bytes) {
            add(static_cast<uint8_t>(c));
        }
    }
    char text[17];
    std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
    return std::to_string(num_tokens()) + "-" + text;
}

}  // namespace pystaged
