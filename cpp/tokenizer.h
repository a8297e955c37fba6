// Text to tokens and back, by libllama's own vocabulary code reading the model's GGUF file.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

struct llama_model;
struct llama_vocab;

namespace pystaged {

class Tokenizer {
public:
    // Loads the vocabulary alone. Throws ModelError when the file has none that is usable.
    explicit Tokenizer(const std::string& path);

    int num_tokens() const;
    // Token ids of UTF-8 text; special tokens written out in the text are recognized. `interrupted` is called now and
    // then and may throw.
    std::vector<int32_t> encode(const std::string& text, const std::function<void()>& interrupted = [] {}) const;
    // The bytes a token stands for, possibly part of a character; empty for control tokens.
    std::string token_bytes(int32_t token) const;
    // Whether the token ends a text.
    bool is_end(int32_t token) const;
    // The first token that both vocabularies have and that stands for different bytes, or -1.
    int32_t first_difference(const Tokenizer& other) const;
    // Names the vocabulary: equal for equal token bytes.
    std::string fingerprint() const;

private:
    struct Free {
        void operator()(llama_model* model) const;
    };
    // The text of a token that libllama looks for before all else.
    struct Special {
        std::string text;
        bool firm;  // whether text may be cut behind it
    };

    std::vector<int32_t> encode_piece(const char* text, size_t size, bool add_special) const;
    std::vector<size_t> cuts(const std::string& text) const;

    std::unique_ptr<llama_model, Free> model_;
    const llama_vocab* vocab_ = nullptr;
    std::vector<Special> specials_;  // sorted by text
};

}  // namespace pystaged
