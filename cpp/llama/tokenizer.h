// Text to tokens and back, by libllama's own vocabulary code reading the model's GGUF file.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "llama.h"

namespace pystaged {

class GgufFile;

// libllama asserts, and so aborts, on some malformed vocabularies; they are refused here first. Throws ModelError.
void check_vocabulary(const GgufFile& file);

class Tokenizer {
public:
    // Loads the vocabulary alone. Throws ModelError when the file has none that is usable.
    explicit Tokenizer(const std::string& path);

    int num_tokens() const { return llama_vocab_n_tokens(vocab_); }
    // Token ids of UTF-8 text, with what the vocabulary puts before and behind a text where `add_special`. Control
    // tokens written out in the text are recognized where `parse_special`; those that users defined always are.
    // `interrupted` is called now and then and may throw. Throws std::invalid_argument for a text the vocabulary cannot
    // spell, or whose words are too long to be split.
    std::vector<int32_t> encode(
        const std::string& text, bool add_special = true, bool parse_special = true,
        const std::function<void()>& interrupted = [] {}) const;
    // The bytes a token stands for, possibly part of a character; empty for control tokens unless `special`.
    std::string token_bytes(int32_t token, bool special = false) const;
    // The bytes of tokens, one after the other.
    std::string decode(const std::vector<int32_t>& tokens, bool special = false) const;
    // The sequences of tokens that a text may begin in: each token that holds it, alone, and each that ends with its
    // beginning, with the tokens of the rest; as DRY's breakers of llama.cpp.
    std::vector<std::vector<int32_t>> sequences_of(const std::string& text) const;
    // How the vocabulary spells a token.
    std::string token_text(int32_t token) const;
    // Whether the token steers the model and is no text.
    bool is_control(int32_t token) const;
    // Whether the token ends a text.
    bool is_end(int32_t token) const { return token >= 0 && token < num_tokens() && llama_vocab_is_eog(vocab_, token); }
    // Whether texts begin with a token of their own, and end with one.
    bool adds_bos() const { return llama_vocab_get_add_bos(vocab_); }
    bool adds_eos() const { return llama_vocab_get_add_eos(vocab_); }
    // Of the file as it was: keys and values that are no arrays, as libllama spells them.
    const std::vector<std::pair<std::string, std::string>>& metadata() const { return metadata_; }
    // Token ids, or -1.
    int32_t bos() const { return llama_vocab_bos(vocab_); }
    int32_t eos() const { return llama_vocab_eos(vocab_); }
    // Tokens that the file says are never to be chosen.
    std::vector<int32_t> suppressed() const;
    // Of a draft model that guesses in parallel (PARD).
    int32_t mask_token() const { return mask_token_; }
    // The vocabulary's tokens for filling in the middle, of "prefix", "suffix", "middle", "repository" and "file".
    std::map<std::string, int32_t> infill_tokens() const;
    // For each token of this vocabulary whether the other one has it under the same id, with the same bytes, spelling
    // and role.
    std::vector<bool> shared_with(const Tokenizer& other) const;
    // Names the vocabulary: equal for equal tokens.
    std::string fingerprint() const;

private:
    struct Free {
        void operator()(llama_model* model) const { llama_model_free(model); }
    };
    // The text of a token that libllama looks for before all else.
    struct Special {
        std::string text;
        bool firm;    // whether text may be cut behind it
        bool always;  // recognized even where control tokens are not
    };

    std::vector<int32_t> encode_piece(const char* text, size_t size, bool add_special, bool parse_special) const;
    std::vector<size_t> cuts(const std::string& text, bool parse_special) const;
    void check_token(int32_t token) const;

    std::unique_ptr<llama_model, Free> model_;
    const llama_vocab* vocab_ = nullptr;
    std::vector<Special> specials_;  // sorted by text
    std::vector<std::pair<std::string, std::string>> metadata_;
    int32_t mask_token_ = -1;
};

}  // namespace pystaged
