// A draft head: a small recurrent network that goes on from a target's hidden state, a token at a time (ReDrafter,
// Cheng et al. 2024, arXiv 2403.09919). It has no context of its own: all it knows of the text is in that state.
//
// Its own state begins as a projection of what the target's layers said in the row before the root. A step takes in one
// token, and the new state says what may come next, among the commonest tokens alone.
#pragma once

#include <string>
#include <vector>

#include "model/model.h"

namespace pystaged {

class DraftHead {
public:
    // Loads a GGUF file of architecture "draft-head"; `kernel` as in find_kernel(). Throws ModelError for a file that
    // is damaged or of another kind.
    DraftHead(const std::string& path, const std::string& kernel);

    const std::string& name() const { return name_; }
    // The target's layers it reads, as Model's taps, and how many numbers of each.
    const std::vector<int>& taps() const { return taps_; }
    int width() const { return width_; }
    // The tokens it can propose, in rising order.
    const std::vector<int32_t>& tokens() const { return tokens_; }
    // Bytes of weights that a step reads.
    size_t weight_bytes() const;
    // Throws std::invalid_argument for a target whose states or tokens it cannot read.
    void check(const Model& target) const;

    // The state before the root, out[width], from the target's, [taps][target's width].
    void begin(const Model& target, const float* states, float* out) const;
    // Takes in n tokens, each after a state of its own, [n][width]: the states behind them, out[n][width], and the k
    // likeliest next tokens with their log-probabilities, both [n][k], best first. k is at most tokens().size(); with 0
    // nothing is said of them.
    void step(const Model& target, const float* states, const int32_t* tokens, int n, int k, float* out,
              int32_t* candidates, float* logprobs) const;

private:
    struct Block {
        std::vector<float> norm;
        PackedMatrix gate, up, down;
    };

    PackedMatrix matrix(const class GgufFile& file, const std::string& name, int cols, int rows);
    std::vector<float> normed(const float* x, int n, const std::vector<float>& weight) const;

    const Kernel& kernel_;
    std::string name_;
    int width_ = 0;
    float epsilon_ = 0;
    std::vector<int> taps_;
    std::vector<int32_t> tokens_;
    std::vector<Memory> storage_;
    std::vector<float> state_norm_, step_norm_, output_norm_;  // the first of each tap, the second of state and token
    PackedMatrix state_, step_, output_;
    std::vector<Block> blocks_;
};

}  // namespace pystaged
