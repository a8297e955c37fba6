// Repeats the text of a receipt with one kernel: repeat_tests MODEL.gguf KERNEL < numbers, for machines without Python.
// The numbers are what receipt_numbers.py takes from the receipt: n_ctx; temperature, top-k, top-p, min-p, seed, repeat
// penalty and how far it looks back; then the prompt and the text, each as a count and token ids.
#include <iostream>
#include <memory>
#include <stdexcept>
#include <vector>

#include "check.h"
#include "llama.h"
#include "steps.h"

using namespace pystaged;

#ifndef _WIN32
// All of libllama that is called.
void llama_log_get(ggml_log_callback* callback, void** data) {
    ggml_log_get(callback, data);
}
void llama_log_set(ggml_log_callback callback, void* data) {
    ggml_log_set(callback, data);
}
#endif

namespace {

template <class T>
T read() {
    T value;
    if (!(std::cin >> value)) {
        throw std::runtime_error("standard input ends early, or is not numbers");
    }
    return value;
}

std::vector<int32_t> read_tokens() {
    std::vector<int32_t> tokens(read<uint16_t>());
    std::generate(tokens.begin(), tokens.end(), read<int32_t>);
    return tokens;
}

// The text again, with trees in which the text's next tokens are a chain of so many, and others lie beside them.
void test_text(const std::shared_ptr<const Model>& model, int context, const Sampling& sampling,
               const std::vector<int32_t>& prompt, const std::vector<int32_t>& text, size_t guesses) {
    Session session(model, context);
    prefill(session, {prompt.begin(), prompt.end() - 1});
    std::vector<int32_t> found{prompt.back()};
    while (found.size() <= text.size()) {
        std::vector<int32_t> tokens{found.back()}, parents{-1};
        for (size_t at = found.size() - 1, last = 0; at < std::min(found.size() - 1 + guesses, text.size()); ++at) {
            tokens.push_back((text[at] + 1) % model->numbers().vocab_size);
            tokens.push_back(text[at]);
            parents.insert(parents.end(), 2, static_cast<int32_t>(last));
            last = tokens.size() - 1;
        }
        const Followed followed = verify(session, tokens, parents, sampling);
        found.insert(found.end(), followed.tokens.begin(), followed.tokens.end());
    }
    CHECK(std::equal(text.begin(), text.end(), found.begin() + 1));
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: repeat_tests MODEL.gguf KERNEL < numbers\n");
        return 2;
    }
    const auto model = std::make_shared<Model>(argv[1], argv[2], 2);
    const int context = read<int>();
    Sampling sampling;
    sampling.temperature = read<float>();
    sampling.top_k = read<int>();
    sampling.top_p = read<float>();
    sampling.min_p = read<float>();
    sampling.seed = read<uint64_t>();
    LogitRules rules;
    rules.repeat_penalty = read<float>();
    rules.repeat_last_n = read<int>();
    if (rules.repeat_penalty != 1) {
        sampling.rules = std::make_shared<LogitRules>(rules);
    }
    const std::vector<int32_t> prompt = read_tokens(), text = read_tokens();
    CHECK(!prompt.empty() && !text.empty());
    for (const size_t guesses : {0, 5}) {
        test_text(model, context, sampling, prompt, text, guesses);
    }
    std::fprintf(stderr, failures ? "%s: the text differs\n" : "%s: the same text\n", argv[2]);
    return failures ? 1 : 0;
}
