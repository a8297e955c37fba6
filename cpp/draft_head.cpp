#include "draft_head.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "error.h"
#include "gguf_file.h"
#include "model/loaders.h"
#include "product.h"
#include "sampler.h"
#include "thread_pool.h"

namespace pystaged {

namespace {

constexpr int kMostNumbers = 1 << 16;
constexpr int kMostBlocks = 16;
constexpr int kMostLayers = 256;  // of a target
constexpr const char* kPrefix = "draft-head.";

int number(const GgufFile& file, const char* key, int64_t most) {
    return static_cast<int>(file.integer(kPrefix + std::string(key), 1, most));
}

// Whole numbers that rise, from `least` to `most`.
std::vector<int32_t> rising(const GgufFile& file, const char* key, int64_t least, int64_t most) {
    const std::string name = kPrefix + std::string(key);
    const auto values = file.integers(name);
    if (!values || values->empty()) {
        file.fail("metadata '" + name + "' is missing or no array of integers");
    }
    std::vector<int32_t> result;
    for (const int64_t value : *values) {
        if (value < least || value > most) {
            file.fail("metadata '" + name + "' holds " + std::to_string(value) + ", which is out of range or order");
        }
        result.push_back(static_cast<int32_t>(value));
        least = value + 1;
    }
    return result;
}

std::vector<float> floats(const GgufFile& file, const std::string& name, int size) {
    return read_floats(file, file.tensor(name, {size}));
}

}  // namespace

DraftHead::DraftHead(const std::string& path, const std::string& kernel) : kernel_(find_kernel(kernel)) {
    const FloatEnvironment pinned;
    const GgufFile file(path);
    const std::string architecture = file.text("general.architecture");
    if (architecture != "draft-head") {
        file.fail("architecture '" + architecture + "' is no draft head");
    }
    name_ = file.text("general.name", "");
    width_ = number(file, "embedding_length", kMostNumbers);
    const int ffn = number(file, "feed_forward_length", kMostNumbers);
    if (width_ % kBlock != 0 || ffn % kBlock != 0) {
        file.fail("a draft head's widths must be multiples of " + std::to_string(kBlock));
    }
    epsilon_ = file.real(kPrefix + std::string("attention.layer_norm_rms_epsilon"), 1e-5f);
    if (!(epsilon_ > 0 && epsilon_ < 1)) {
        file.fail("metadata 'draft-head.attention.layer_norm_rms_epsilon' is not between 0 and 1");
    }
    taps_ = rising(file, "taps", 1, kMostLayers);
    tokens_ = rising(file, "tokens", 0, INT32_MAX - 1);
    const int taps = static_cast<int>(taps_.size()), size = static_cast<int>(tokens_.size());
    state_norm_ = floats(file, "state_norm.weight", taps * width_);
    state_ = matrix(file, "state.weight", taps * width_, width_);
    step_norm_ = floats(file, "step_norm.weight", 2 * width_);
    step_ = matrix(file, "step.weight", 2 * width_, width_);
    for (int i = 0; i < number(file, "block_count", kMostBlocks); ++i) {
        const std::string prefix = "blk." + std::to_string(i) + ".";
        Block block;
        block.norm = floats(file, prefix + "ffn_norm.weight", width_);
        block.gate = matrix(file, prefix + "ffn_gate.weight", width_, ffn);
        block.up = matrix(file, prefix + "ffn_up.weight", width_, ffn);
        block.down = matrix(file, prefix + "ffn_down.weight", ffn, width_);
        blocks_.push_back(std::move(block));
    }
    output_norm_ = floats(file, "output_norm.weight", width_);
    output_ = matrix(file, "output.weight", width_, size);
}

PackedMatrix DraftHead::matrix(const GgufFile& file, const std::string& name, int cols, int rows) {
    const TensorView tensor = file.tensor(name, {cols, rows});
    try {
        Memory storage(PackedMatrix::packed_bytes(tensor.type, rows, cols));
        const Memory data = file.read(tensor);
        PackedMatrix packed(tensor.type, rows, cols, data.data(), storage.data(), 1);
        storage_.push_back(std::move(storage));
        return packed;
    } catch (const std::invalid_argument& error) {
        file.fail("tensor '" + name + "': " + error.what());
    }
}

size_t DraftHead::weight_bytes() const {
    size_t bytes = step_.bytes() + output_.bytes();
    for (const Block& block : blocks_) {
        bytes += block.gate.bytes() + block.up.bytes() + block.down.bytes();
    }
    return bytes;
}

void DraftHead::check(const Model& target) const {
    if (target.taps() != taps_ || target.numbers().width < width_ || target.numbers().vocab_size <= tokens_.back()) {
        throw std::invalid_argument("the draft head was made for another model: one that is " + std::to_string(width_) +
                                    " wide, with " + std::to_string(taps_.back()) + " layers and " +
                                    std::to_string(tokens_.back() + 1) + " tokens at least");
    }
}

// x[n][width] normalized.
std::vector<float> DraftHead::normed(const float* x, int n, const std::vector<float>& weight) const {
    std::vector<float> result(size_t(n) * width_);
    for (int i = 0; i < n; ++i) {
        kernel_.rms_norm(x + size_t(i) * width_, weight.data(), epsilon_, width_, width_, &result[size_t(i) * width_]);
    }
    return result;
}

void DraftHead::begin(const Model& target, const float* states, float* out) const {
    check(target);
    const FloatEnvironment pinned;
    const int threads = target.num_threads();
    ThreadPool::shared().wake(threads);
    const size_t taps = taps_.size();
    std::vector<float> x(taps * width_);
    for (size_t i = 0; i < taps; ++i) {
        kernel_.rms_norm(states + i * target.numbers().width, &state_norm_[i * width_], epsilon_, width_, width_,
                         &x[i * width_]);
    }
    const std::vector<float> result = multiply(kernel_, state_, x, 1, {}, threads);
    std::copy_n(result.data(), width_, out);
}

void DraftHead::step(const Model& target, const float* states, const int32_t* tokens, int n, int k, float* out,
                     int32_t* candidates, float* logprobs) const {
    check(target);
    if (k < 0 || k > static_cast<int>(tokens_.size())) {
        throw std::invalid_argument("k must be between 0 and the number of the head's tokens");
    }
    const FloatEnvironment pinned;
    const int threads = target.num_threads();
    ThreadPool::shared().wake(threads);
    std::vector<float> x(size_t(n) * 2 * width_), embedding(target.numbers().padded_width());
    for (int i = 0; i < n; ++i) {
        if (tokens[i] < 0 || tokens[i] >= target.numbers().vocab_size) {
            throw std::invalid_argument("token " + std::to_string(tokens[i]) + " is outside the vocabulary");
        }
        target.token_embedding().packed.row(tokens[i], embedding.data());
        float* row = &x[size_t(i) * 2 * width_];
        kernel_.rms_norm(states + size_t(i) * width_, step_norm_.data(), epsilon_, width_, width_, row);
        kernel_.rms_norm(embedding.data(), &step_norm_[width_], epsilon_, width_, width_, row + width_);
    }
    Epilogue sum;
    sum.residual = states;
    std::vector<float> state = multiply(kernel_, step_, x, n, sum, threads);
    for (const Block& block : blocks_) {
        const std::vector<float> input = normed(state.data(), n, block.norm);
        Epilogue silu;
        silu.activation = Activation::silu;
        const std::vector<float> gate = multiply(kernel_, block.gate, input, n, silu, threads);
        Epilogue gated;
        gated.gate = gate.data();
        Epilogue residual;
        residual.residual = state.data();
        state =
            multiply(kernel_, block.down, multiply(kernel_, block.up, input, n, gated, threads), n, residual, threads);
    }
    std::copy(state.begin(), state.end(), out);
    if (k == 0) {
        return;
    }
    const int size = static_cast<int>(tokens_.size()), stride = padded(size, kRun);
    std::vector<float> maxima(size_t(n) * stride / kRun);
    const std::vector<float> logits =
        multiply(kernel_, output_, normed(state.data(), n, output_norm_), n, {}, threads, maxima.data());
    if (!std::all_of(maxima.begin(), maxima.end(), [](float top) { return std::isfinite(top); })) {
        throw ModelError("the draft head's logits are not finite");
    }
    Sampler sampler(kernel_);
    for (int i = 0; i < n; ++i) {
        const LogitsRow row{&logits[size_t(i) * stride], &maxima[size_t(i) * stride / kRun], size, stride};
        const std::vector<Candidate>& found = sampler.log_probabilities(row, 0, k, 1);
        // The first one found is the token that was asked for, 0.
        for (int j = 0; j < k; ++j) {
            candidates[i * k + j] = tokens_[found[j + 1].token];
            logprobs[i * k + j] = found[j + 1].score;
        }
    }
}

}  // namespace pystaged
