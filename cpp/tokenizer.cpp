#include "tokenizer.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <unordered_set>

#include "error.h"
#include "gguf_file.h"
#include "llama.h"

namespace pystaged {

namespace {

// Of a text that is cut; small, because libllama takes time that grows with the square of the former.
constexpr int kPieceTokens = 64;
constexpr size_t kPieceBytes = 64 << 10;

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
    for (int32_t token = 0; token < num_tokens(); ++token) {
        const int attributes = llama_vocab_get_attr(vocab_, token);
        constexpr int kSpecial = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED | LLAMA_TOKEN_ATTR_UNKNOWN;
        if (const char* text = llama_vocab_get_text(vocab_, token); (attributes & kSpecial) && *text) {
            // White space at either end may be taken by a neighbour that strips.
            const bool spaces = std::isspace(static_cast<uint8_t>(text[0])) ||
                                std::isspace(static_cast<uint8_t>(text[std::strlen(text) - 1]));
            specials_.push_back({text, (attributes & LLAMA_TOKEN_ATTR_RSTRIP) == 0 && !spaces});
        }
    }
    std::sort(specials_.begin(), specials_.end(), [](const Special& a, const Special& b) { return a.text < b.text; });
}

int Tokenizer::num_tokens() const {
    return llama_vocab_n_tokens(vocab_);
}

// Places where a text may be cut without changing its tokens, in order; the last is its end.
//
// libllama takes special tokens out of a text, the longest first, and then tokenizes what lies between them. A special
// token whose place no other one overlaps is taken out there whatever stands around it, so what lies before its end and
// behind it never meet, unless it takes white space with it.
std::vector<size_t> Tokenizer::cuts(const std::string& text) const {
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
            if (first != last && first->text.size() == depth + 1) {
                ++overlapping;
                firm = first->firm;
                end = std::max(end, at + depth + 1);
            }
        }
    }
    found.push_back(text.size());
    return found;
}

// In pieces, because libllama's time grows with the square of the number of special tokens.
std::vector<int32_t> Tokenizer::encode(const std::string& text, const std::function<void()>& interrupted) const {
    if (text.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
        throw std::invalid_argument("the text is longer than 2 GiB");
    }
    const std::vector<size_t> ends = cuts(text);
    if (ends.size() == 1) {
        return encode_piece(text.data(), text.size(), true);
    }
    std::vector<int32_t> tokens;
    if (llama_vocab_get_add_bos(vocab_)) {
        tokens.push_back(llama_vocab_bos(vocab_));
    }
    size_t begin = 0;
    for (const size_t end : ends) {
        const std::vector<int32_t> piece = encode_piece(text.data() + begin, end - begin, false);
        tokens.insert(tokens.end(), piece.begin(), piece.end());
        begin = end;
        interrupted();
    }
    if (llama_vocab_get_add_eos(vocab_)) {
        tokens.push_back(llama_vocab_eos(vocab_));
    }
    return tokens;
}

std::vector<int32_t> Tokenizer::encode_piece(const char* text, size_t size, bool add_special) const {
    std::vector<int32_t> tokens(size + 2);
    const auto tokenize = [&] {
        return llama_tokenize(vocab_, text, static_cast<int32_t>(size), tokens.data(),
                              static_cast<int32_t>(tokens.size()), add_special, /*parse_special=*/true);
    };
    int32_t n = tokenize();
    if (n < 0) {
        tokens.resize(static_cast<size_t>(-static_cast<int64_t>(n)));
        n = tokenize();
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
