#include "model/family.h"

namespace pystaged {

namespace {

constexpr unsigned kPreNorms = kAttnNorm | kFfnNorm;
constexpr unsigned kBiases = kQkvBias | kOutputBias | kFfnBias;
constexpr int kAllWindowed = 1 << 10;  // of fewer layers than that none is without a window
constexpr unsigned kNormalized = kExperts | kNormalizedExperts;
constexpr unsigned kRouted = kExperts | kRoutingKeys;
constexpr unsigned kLlama = kHead | kBiases | kRopeFactors | kLongFactors;

constexpr Family kFamilies[] = {
    {"gpt2", Pairs::none, Gate::none, kPositions | kPreNorms | kBiases, kHead, kLayerNorm | kDefaultNumbers},
    {"llama", Pairs::adjacent, Gate::silu, kPreNorms, kLlama, kWholeRotation | kNormalized | kWholeExperts},
    {"mistral3", Pairs::adjacent, Gate::silu, kPreNorms, kLlama, kYarnKeys | kTemperatureScale},
    {"granite", Pairs::adjacent, Gate::silu, kPreNorms, kLlama, kScaleKeys | kMayNotRotate},
    {"granitemoe", Pairs::adjacent, Gate::silu, kPreNorms, kLlama,
     kScaleKeys | kMayNotRotate | kNormalized | kWholeExperts},
    {"smollm3", Pairs::adjacent, Gate::silu, kPreNorms, kHead | kQkvBias, 0, 4},
    {"qwen2", Pairs::halves, Gate::silu, kPreNorms, kHead | kQkvBias | kHeadBias},
    {"qwen2moe", Pairs::halves, Gate::silu, kPreNorms | kQkvBias, kHead, kExperts | kSharedGate},
    {"qwen3", Pairs::halves, Gate::silu, kPreNorms | kHeadNorms, kHead | kQkvBias},
    {"qwen3moe", Pairs::halves, Gate::silu, kPreNorms | kHeadNorms, kHead | kQkvBias, kNormalized},
    {"glm4moe", Pairs::halves, Gate::silu, kAttnNorm, kHead | kQkvBias | kHeadNorms,
     kFfnNormBehind | kRouted | kSigmoidExperts},
    {"ernie4_5-moe", Pairs::adjacent, Gate::silu, kPreNorms, kHead | kQkvBias | kOutputBias, kNormalized},
    {"bailingmoe2", Pairs::halves, Gate::silu, kPreNorms | kHeadNorms, kHead, kRouted | kSigmoidExperts},
    {"deepseek2", Pairs::adjacent, Gate::silu, kPreNorms, kHead, kRouted | kLatents | kTemperatureScale},
    {"olmoe", Pairs::halves, Gate::silu, kPreNorms | kWholeNorms | kHead, kQkvBias, kExperts | kWholeExperts},
    {"gpt-oss", Pairs::halves, Gate::clamped, kAttnNorm | kBiases | kHead, 0,
     kFfnNormBehind | kExperts | kScoresOfChosen | kSinks, 0, 2, 128},
    {"phi3", Pairs::halves, Gate::silu, kPreNorms | kFusedGate, kHead | kQkvBias | kLongFactors},
    {"starcoder2", Pairs::halves, Gate::none, kPreNorms | kOutputBias | kFfnBias, kHead | kQkvBias, kLayerNorm},
    {"stablelm", Pairs::halves, Gate::silu, kAttnNorm | kHead, kFfnNorm | kQkvBias | kOwnHeadNorms, kLayerNorm},
    {"olmo2", Pairs::halves, Gate::silu, kPostNorms | kWholeNorms | kHead, kQkvBias, kWindowOriginalRope, 0, 4},
    {"gemma2", Pairs::halves, Gate::gelu, kPreNorms | kPostNorms, kQkvBias, kScaledEmbedding | kLogitSoftcap, 0, 2,
     4096, 46, 50, 30},
    {"gemma3", Pairs::halves, Gate::gelu, kPreNorms | kPostNorms | kHeadNorms, kHead | kQkvBias,
     kScaledEmbedding | kLogitSoftcap | kWindowOwnRope, 0, 6, 0, 62},
    {"gemma4", Pairs::halves, Gate::gelu, kPreNorms | kPostNorms | kHeadNorms, kHead | kRopeFactors,
     kScaledEmbedding | kLogitSoftcap | kLayersDiffer | kUnscaledScores | kNormedValues | kNormalized | kDenseBeside, 0,
     6, 0, 0, 0, 30},
    {"lfm2", Pairs::halves, Gate::silu, kPreNorms | kHeadNorms, kHead, kEmbeddingNorm | kShortConvolutions, 0,
     kAllWindowed},
    {"lfm2moe", Pairs::halves, Gate::silu, kPreNorms | kHeadNorms, kHead,
     kEmbeddingNorm | kShortConvolutions | kNormalizedExperts | kRouted | kSigmoidExperts},
    {"qwen35", Pairs::halves, Gate::silu, kAttnNorm | kHeadNorms, kHead, kDeltaNets | kFfnNormBehind | kGatedAttention},
    {"qwen35moe", Pairs::halves, Gate::silu, kAttnNorm | kHeadNorms, kHead,
     kDeltaNets | kFfnNormBehind | kGatedAttention | kNormalized | kSharedGate},
    {"granitehybrid", Pairs::adjacent, Gate::silu, kPreNorms | kSpaceNorm, kHead,
     kScaleKeys | kMayNotRotate | kStateSpaces | kNormalized | kWholeExperts},
    {"nemotron_h", Pairs::none, Gate::none, kAttnNorm | kSpaceNorm, kHead | kBiases,
     kStateSpaces | kBranchesApart | kSquaredRelu},
    {"nemotron_h_moe", Pairs::none, Gate::none, kAttnNorm | kSpaceNorm, kHead | kBiases,
     kStateSpaces | kBranchesApart | kSquaredRelu | kRouted | kSigmoidExperts},
    {"falcon-h1", Pairs::halves, Gate::silu, kAttnNorm, kHead | kQkvBias | kFfnBias | kSpaceNorm,
     kStateSpaces | kBothMixers | kBareFfnNorm},
    {"qwen3next", Pairs::halves, Gate::silu, kAttnNorm | kHeadNorms, kHead,
     kDeltaNets | kFfnNormBehind | kGatedAttention | kGroupedValues | kNormalized | kSharedGate},
    {"eagle3", Pairs::adjacent, Gate::silu, kPreNorms, kHead | kHeadNorms | kRopeFactors, kWholeRotation, 0, 0, 0, 0, 0,
     0, Reads::beside_tokens},
    {"dflash", Pairs::halves, Gate::silu, kPreNorms | kHeadNorms, kHead | kRopeFactors, 0, 0, 0, 0, 0, 0, 0,
     Reads::as_context},
    {"gemma4-assistant", Pairs::halves, Gate::gelu, kPreNorms | kPostNorms | kHeadNorms, kRopeFactors,
     kLayersDiffer | kUnscaledScores, 0, 6, 0, 0, 0, 0, Reads::joined_with_cells, "gemma4"},
};

}  // namespace

const Family& find_family(const GgufFile& file) {
    const std::string name = file.text("general.architecture");
    std::string names;
    for (const Family& family : kFamilies) {
        if (name == family.name) {
            file.require(family.has(kExperts) || file.integer(name + ".expert_count", 0, 1 << 20, 0) == 0,
                         "architecture '", name, "' is known without experts, but metadata '", name,
                         ".expert_count' says that it has some; choose a dense model");
            return family;
        }
        if (family.reads == Reads::nothing) {
            names += std::string(names.empty() ? "" : ", ") + family.name;
        }
    }
    file.refuse("architecture '", name, "' is not supported; choose a model of one of: ", names);
}

}  // namespace pystaged
