// Text to tokens and back, by libllama's own vocabulary code reading the model's GGUF file.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <unordered_set>
#include <vector>

#include "files/gguf_file.h"
#include "llama.h"
#include "machine/digest.h"

namespace pystaged {

constexpr const char* kMaskToken = "pystaged.pard_token";

// libllama asserts, and so aborts, on some malformed vocabularies; they are refused here first. Throws ModelError.
inline void check_vocabulary(const GgufFile& file) {
    const std::string model = file.text("tokenizer.ggml.model");
    file.require(
        model == "gpt2" || model == "gemma4" || model == "llama", "tokenizer model '", model,
        "' is not supported, only 'gpt2' and 'gemma4' (BPE) and 'llama' (SentencePiece); choose another model, "
        "or run this one with llama.cpp");
    // It asserts that no words have spaces in them, and splits by them nowhere else.
    file.require(file.text("tokenizer.ggml.pre", "") != "whitespace",
                 "pre-tokenizer 'whitespace' is not supported; choose another model, or run this one with llama.cpp");
    const auto tokens = file.array("tokenizer.ggml.tokens", GGUF_TYPE_STRING);
    file.require(tokens && tokens->second > 0 && tokens->second <= size_t(1) << 24,
                 "the vocabulary 'tokenizer.ggml.tokens' is missing, empty or absurdly long");
    std::unordered_set<std::string> seen;
    seen.reserve(tokens->second);
    for (size_t i = 0; i < tokens->second; ++i) {
        std::string text = file.array_text(tokens->first, i);
        if (text.empty()) {
            text = say("[EMPTY_", i, "]");
        }
        file.require(seen.insert(text).second, "token ", i, " of the vocabulary stands there twice");
    }
    const auto last = static_cast<int64_t>(tokens->second) - 1;
    for (const char* name : {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", kMaskToken}) {
        file.integer(name, 0, last, 0);
    }
}

struct FreeLlama {
    void operator()(llama_model* model) const { llama_model_free(model); }
    void operator()(llama_context* context) const { llama_free(context); }
};

class Tokenizer {
public:
    // Loads the vocabulary alone. Throws ModelError when the file has none that is usable.
    explicit Tokenizer(const std::string& path) {
        {
            const GgufFile file(path);
            check_vocabulary(file);
            metadata_ = file.spelled();
            mask_token_ = static_cast<int32_t>(file.integer(kMaskToken, -1, std::numeric_limits<int32_t>::max(), -1));
        }
        llama_model_params params = llama_model_default_params();
        params.vocab_only = true;
        {
            const LogCapture log;
            model_.reset(llama_model_load_from_file(path.c_str(), params));
            require<ModelError>(model_ != nullptr, path, ": cannot load the vocabulary: ", log.first_error());
        }
        vocab_ = llama_model_get_vocab(model_.get());
        // libllama ends the process where it is to add a token that the vocabulary does not have.
        for (const bool begin : {true, false}) {
            const bool adds = begin ? adds_bos() : adds_eos();
            const int32_t token = begin ? bos() : eos();
            const char* const name = begin ? "bos" : "eos";
            require<ModelError>(!adds || (token >= 0 && token < num_tokens()), path,
                                ": the vocabulary adds a token to every text (tokenizer.ggml.add_", name,
                                "_token), but has none: 'tokenizer.ggml.", name, "_token_id' is missing");
        }
        for (int32_t token = 0; token < num_tokens(); ++token) {
            const int attributes = llama_vocab_get_attr(vocab_, token);
            constexpr int kSpecial =
                LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED | LLAMA_TOKEN_ATTR_UNKNOWN;
            if (const char* text = llama_vocab_get_text(vocab_, token); (attributes & kSpecial) && *text) {
                // White space at either end may be taken by a neighbour that strips.
                const bool spaces = std::isspace(static_cast<uint8_t>(text[0])) ||
                                    std::isspace(static_cast<uint8_t>(text[std::strlen(text) - 1]));
                specials_.push_back({text, (attributes & LLAMA_TOKEN_ATTR_RSTRIP) == 0 && !spaces,
                                     (attributes & LLAMA_TOKEN_ATTR_USER_DEFINED) != 0});
            }
        }
        std::ranges::sort(specials_, {}, &Special::text);
    }

    int num_tokens() const { return llama_vocab_n_tokens(vocab_); }
    // Token ids of UTF-8 text, with what the vocabulary puts before and behind a text where `add_special`. Control
    // tokens written out in the text are recognized where `parse_special`; those that users defined always are.
    // `interrupted` is called now and then and may throw. Throws std::invalid_argument for a text the vocabulary cannot
    // spell, or whose words are too long to be split. In pieces, because libllama's time grows with the square of the
    // number of special tokens.
    std::vector<int32_t> encode(
        const std::string& text, bool add_special = true, bool parse_special = true,
        const std::function<void()>& interrupted = [] {}) const {
        require(text.size() <= size_t(std::numeric_limits<int32_t>::max()), "the text is longer than 2 GiB");
        const std::vector<size_t> ends = cuts(text, parse_special);
        if (ends.size() == 1) {
            return encode_piece(text.data(), text.size(), add_special, parse_special);
        }
        std::vector<int32_t> tokens;
        if (add_special && adds_bos()) {
            tokens.push_back(llama_vocab_bos(vocab_));
        }
        size_t begin = 0;
        for (const size_t end : ends) {
            const std::vector<int32_t> piece = encode_piece(text.data() + begin, end - begin, false, parse_special);
            tokens.insert(tokens.end(), piece.begin(), piece.end());
            begin = end;
            interrupted();
        }
        if (add_special && adds_eos()) {
            tokens.push_back(llama_vocab_eos(vocab_));
        }
        return tokens;
    }
    // The bytes a token stands for, possibly part of a character; empty for control tokens unless `special`.
    std::string token_bytes(int32_t token, bool special = false) const {
        check_token(token);
        std::string piece(32, '\0');
        const auto write = [&] {
            return llama_token_to_piece(vocab_, token, piece.data(), static_cast<int32_t>(piece.size()), 0, special);
        };
        int32_t n = write();
        if (n < 0) {
            piece.resize(static_cast<size_t>(-n));
            n = write();
        }
        piece.resize(static_cast<size_t>(std::max(0, n)));
        return piece;
    }
    // The bytes of tokens, one after the other.
    std::string decode(const std::vector<int32_t>& tokens, bool special = false) const {
        std::string bytes;
        for (const int32_t token : tokens) {
            bytes += token_bytes(token, special);
        }
        return bytes;
    }
    // How the vocabulary spells a token.
    std::string token_text(int32_t token) const {
        check_token(token);
        return llama_vocab_get_text(vocab_, token);
    }
    // Whether the token steers the model and is no text.
    bool is_control(int32_t token) const {
        check_token(token);
        return llama_vocab_get_attr(vocab_, token) & LLAMA_TOKEN_ATTR_CONTROL;
    }
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
    std::vector<int32_t> suppressed() const {
        int32_t count = 0;
        const int32_t* tokens = llama_vocab_get_suppress_tokens(vocab_, &count);
        return {tokens, tokens + count};
    }
    // Of a draft model that guesses in parallel (PARD).
    int32_t mask_token() const { return mask_token_; }
    // The vocabulary's tokens for filling in the middle, of "prefix", "suffix", "middle", "repository" and "file".
    std::map<std::string, int32_t> infill_tokens() const {
        std::map<std::string, int32_t> tokens{{"prefix", llama_vocab_fim_pre(vocab_)},
                                              {"suffix", llama_vocab_fim_suf(vocab_)},
                                              {"middle", llama_vocab_fim_mid(vocab_)},
                                              {"repository", llama_vocab_fim_rep(vocab_)},
                                              {"file", llama_vocab_fim_sep(vocab_)}};
        std::erase_if(tokens, [&](const auto& each) { return each.second < 0 || each.second >= num_tokens(); });
        return tokens;
    }
    // For each token of this vocabulary whether the other one has it under the same id, with the same bytes, spelling
    // and role.
    std::vector<bool> shared_with(const Tokenizer& other) const {
        std::vector<bool> result(num_tokens());
        for (int32_t token = 0; token < std::min(num_tokens(), other.num_tokens()); ++token) {
            result[token] = token_text(token) == other.token_text(token) &&
                            is_control(token) == other.is_control(token) && is_end(token) == other.is_end(token) &&
                            token_bytes(token) == other.token_bytes(token);
        }
        return result;
    }
    // Names the vocabulary: equal for equal tokens.
    std::string fingerprint() const {
        uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
        const auto add = [&](uint8_t byte) { hash = (hash ^ byte) * 0x100000001b3u; };
        const auto add_text = [&](const std::string& text) {
            add(static_cast<uint8_t>(text.size()));
            for (const char c : text) {
                add(static_cast<uint8_t>(c));
            }
        };
        for (int32_t token = 0; token < num_tokens(); ++token) {
            add_text(token_bytes(token));
            // What has no bytes is told by its spelling.
            if (is_control(token)) {
                add_text(llama_vocab_get_text(vocab_, token));
            }
            add(is_end(token));
        }
        return say(num_tokens(), "-", hexadecimal(hash));
    }

private:
    // Of a text that is cut; small, because libllama takes time that grows with the square of the former.
    static constexpr int kPieceTokens = 64;
    static constexpr size_t kPieceBytes = 64 << 10;

    // libllama splits most texts by std::regex, which recurses for every character of a match: GNU's takes 325 bytes of
    // the stack for one. A match may be as long as a line.
    static constexpr size_t kStackBytes = 1 << 10;          // for each byte of a line
    static constexpr size_t kSafeLine = 2 << 10;            // that any stack has room for
    static constexpr size_t kLongestRun = size_t(1) << 20;  // of bytes without white space, or of white space

    static bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)); }

    // Bytes of the longest line, and of the longest run without white space or of it.
    static std::pair<size_t, size_t> longest_parts(const char* text, size_t size) {
        size_t line = 0, run = 0, longest_line = 0, longest_run = 0;
        for (size_t i = 0; i < size; ++i) {
            run = i > 0 && is_space(text[i]) == is_space(text[i - 1]) ? run + 1 : 1;
            // Empty lines make one match.
            const bool begins = i > 0 && text[i - 1] == '\n' && !is_space(text[i]);
            line = begins ? 1 : line + 1;
            longest_line = std::max(longest_line, line);
            longest_run = std::max(longest_run, run);
        }
        return {longest_line, longest_run};
    }

    // Calls `work` with a stack of at least that size; throws what it throws.
    static void call_deep(size_t bytes, const std::function<void()>& work) {
        std::exception_ptr error;
        call_with_stack(bytes, [&] {
            try {
                work();
            } catch (...) {
                error = std::current_exception();
            }
        });
        if (error) {
            std::rethrow_exception(error);
        }
    }

    // The text of a token that libllama looks for before all else.
    struct Special {
        std::string text;
        bool firm;    // whether text may be cut behind it
        bool always;  // recognized even where control tokens are not
    };

    std::vector<int32_t> encode_piece(const char* text, size_t size, bool add_special, bool parse_special) const {
        std::vector<int32_t> tokens(size + 2);
        const auto tokenize = [&] {
            return llama_tokenize(vocab_, text, static_cast<int32_t>(size), tokens.data(),
                                  static_cast<int32_t>(tokens.size()), add_special, parse_special);
        };
        int32_t n = 0;
        const auto fill = [&] {
            n = tokenize();
            if (n < 0) {
                tokens.resize(static_cast<size_t>(-static_cast<int64_t>(n)));
                n = tokenize();
            }
        };
        const auto [line, run] = longest_parts(text, size);
        const bool recurses = llama_vocab_type(vocab_) == LLAMA_VOCAB_TYPE_BPE;
        require(!recurses || run <= kLongestRun, "the text has ", run,
                " bytes in a row without white space, or of it; at most ", kLongestRun, " can be split into tokens");
        try {
            if (recurses && line > kSafeLine) {
                call_deep(kStackBytes * std::min(line, kLongestRun), fill);
            } else {
                fill();
            }
        } catch (...) {
            // A SentencePiece vocabulary that spells not even all bytes: std::out_of_range, which is another type where
            // libllama has a C++ library of its own.
            if (llama_vocab_type(vocab_) != LLAMA_VOCAB_TYPE_SPM) {
                throw;
            }
            throw std::invalid_argument("the vocabulary has no tokens for some character of the text");
        }
        require<std::runtime_error>(n >= 0, "the text cannot be tokenized");
        tokens.resize(static_cast<size_t>(n));
        return tokens;
    }
    // Places where a text may be cut without changing its tokens, in order; the last is its end.
    //
    // libllama takes special tokens out of a text, the longest first, and then tokenizes what lies between them. A
    // special token whose place no other one overlaps is taken out there whatever stands around it, so what lies before
    // its end and behind it never meet, unless it takes white space with it.
    std::vector<size_t> cuts(const std::string& text, bool parse_special) const {
        bool begins[256] = {};
        for (const Special& special : specials_) {
            begins[static_cast<uint8_t>(special.text[0])] = true;
        }
        std::vector<size_t> found;
        size_t last_cut = 0, end = 0;  // of the special tokens so far
        int overlapping = 0, num_tokens = 0;
        bool firm = false;
        const auto cut = [&] {
            if (overlapping == 1 && firm && (++num_tokens == kPieceTokens || end - last_cut >= kPieceBytes)) {
                found.push_back(last_cut = end);
                num_tokens = 0;
            }
            overlapping = 0;
        };
        for (size_t at = 0; at < text.size(); ++at) {
            if (at == end) {
                cut();
            }
            if (!begins[static_cast<uint8_t>(text[at])]) {
                continue;
            }
            auto first = specials_.begin(), last = specials_.end();
            for (size_t depth = 0; first != last && at + depth < text.size(); ++depth) {
                const auto byte = [&](const Special& s) {
                    return depth < s.text.size() ? static_cast<uint8_t>(s.text[depth]) : -1;
                };
                const int wanted = static_cast<uint8_t>(text[at + depth]);
                first = std::partition_point(first, last, [&](const Special& s) { return byte(s) < wanted; });
                last = std::partition_point(first, last, [&](const Special& s) { return byte(s) == wanted; });
                if (first != last && first->text.size() == depth + 1 && (parse_special || first->always)) {
                    ++overlapping;
                    firm = first->firm;
                    end = std::max(end, at + depth + 1);
                }
            }
        }
        found.push_back(text.size());
        return found;
    }
    void check_token(int32_t token) const {
        require(token >= 0 && token < num_tokens(), "token ", token, " is outside the vocabulary of ", num_tokens());
    }

    std::unique_ptr<llama_model, FreeLlama> model_;
    const llama_vocab* vocab_ = nullptr;
    std::vector<Special> specials_;  // sorted by text
    std::vector<std::pair<std::string, std::string>> metadata_;
    int32_t mask_token_ = -1;
};

}  // namespace pystaged
