#include "model/family.h"

namespace pystaged {

namespace {

constexpr unsigned kPreNorms = kAttnNorm | kFfnNorm;
constexpr unsigned kBiases = kQkvBias | kOutputBias | kFfnBias;
constexpr unsigned kLlama = kHead | kBiases | kRopeFactors | kLongFactors;

constexpr Family kFamilies[] = {
    {"gpt2", Pairs::none, Gate::none, kPositions | kPreNorms | kBiases, kHead, kLayerNorm | kDefaultNumbers},
    {"llama", Pairs::adjacent, Gate::silu, kPreNorms, kLlama, kWholeRotation},
    {"mistral3", Pairs::adjacent, Gate::silu, kPreNorms, kLlama, kYarnKeys | kTemperatureScale},
    {"granite", Pairs::adjacent, Gate::silu, kPreNorms, kLlama, kScaleKeys | kMayNotRotate},
    {"smollm3", Pairs::adjacent, Gate::silu, kPreNorms, kHead | kQkvBias, 0, 4},
    {"qwen2", Pairs::halves, Gate::silu, kPreNorms, kHead | kQkvBias | kHeadBias},
    {"qwen3", Pairs::halves, Gate::silu, kPreNorms | kHeadNorms, kHead | kQkvBias},
    {"phi3", Pairs::halves, Gate::silu, kPreNorms | kFusedGate, kHead | kQkvBias | kLongFactors},
    {"starcoder2", Pairs::halves, Gate::none, kPreNorms | kOutputBias | kFfnBias, kHead | kQkvBias, kLayerNorm},
    {"stablelm", Pairs::halves, Gate::silu, kAttnNorm | kHead, kFfnNorm | kQkvBias | kOwnHeadNorms, kLayerNorm},
    {"olmo2", Pairs::halves, Gate::silu, kPostNorms | kWholeNorms | kHead, kQkvBias, kWindowOriginalRope, 0, 4},
    {"gemma2", Pairs::halves, Gate::gelu, kPreNorms | kPostNorms, kQkvBias, kScaledEmbedding | kLogitSoftcap, 0, 2,
     4096, 46, 50, 30},
    {"gemma3", Pairs::halves, Gate::gelu, kPreNorms | kPostNorms | kHeadNorms, kHead | kQkvBias,
     kScaledEmbedding | kLogitSoftcap | kWindowOwnRope, 0, 6, 0, 62},
    {"eagle3", Pairs::adjacent, Gate::silu, kPreNorms, kHead | kHeadNorms | kRopeFactors, kWholeRotation, 0, 0, 0, 0, 0,
     0, Reads::beside_tokens},
    {"dflash", Pairs::halves, Gate::silu, kPreNorms | kHeadNorms, kHead, 0, 0, 0, 0, 0, 0, 0, Reads::as_context},
};

// Keys of state that grows with no position: it cannot be cut back, and the rows of a tree cannot share it.
constexpr const char* kRecurrent[] = {"ssm.conv_kernel", "ssm.state_size",    "ssm.inner_size",
                                      "wkv.head_size",   "shortconv.l_cache", "linear_attention.head_count"};

}  // namespace

const Family& find_family(const GgufFile& file) {
    const std::string name = file.text("general.architecture");
    if (file.has(name + ".expert_count") && file.integer(name + ".expert_count", 0, 1 << 20) > 0) {
        file.fail("architecture '" + name +
                  "' with 'expert_count' is a mixture of experts, which needs a router and products by chosen experts; "
                  "choose a dense model");
    }
    for (const char* key : kRecurrent) {
        if (file.has(name + "." + key)) {
            file.fail("architecture '" + name + "' is recurrent or hybrid (metadata '" + name + "." + key +
                      "'): its state would have to be kept for every row of a tree; choose a model of attention alone");
        }
    }
    std::string names;
    for (const Family& family : kFamilies) {
        if (name == family.name) {
            return family;
        }
        names += std::string(names.empty() ? "" : ", ") + family.name;
    }
    file.fail("architecture '" + name + "' is not supported; there are: " + names);
}

}  // namespace pystaged
