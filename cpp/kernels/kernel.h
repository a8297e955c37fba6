// The row arithmetic of a pass, one implementation per instruction set, chosen once from the CPU.
//
// Every operation computes a row in an order that depends on that row alone: not on how many rows are in the pass, not
// on the tree they form, not on the number of threads. Reductions run over 16 lanes by position (or output) and are
// then folded in a fixed order; multiply-adds are fused everywhere. So a row has the same bits whatever it is batched
// with, and the same bits on every instruction set.
//
// Functions here are static: code compiled for a newer CPU must never be the copy the linker keeps for all.
#pragma once

#include <cfloat>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || FLT_EVAL_METHOD != 0 || \
    (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "flags such as -ffast-math, -Ofast and -mfpmath=387 change arithmetic; take them out of CFLAGS and CXXFLAGS"
#endif

namespace pystaged {

// Outputs that lie side by side in a packed matrix, and the lanes of a reduction.
constexpr int kLanes = 16;
// Inputs that share one scale.
constexpr int kBlock = 32;
// Logits that share one maximum.
constexpr int kRun = 64;

static constexpr int padded(int n, int multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

// How a packed matrix stores its weights; see packing.h for the layouts.
enum class Packing {
    f32,
    f16,
    bf16,
    q8_0,
    q4_0,
    q4_1,
    q5_0,
    q5_1,
    q4_k,
    q5_k,
    q6_k,
    iq4_nl,
    iq4_xs,
    mxfp4,
    q3_k,
    q2_k,
};
constexpr int kNumPackings = 16;

// The parts of an integer packing.
struct Layout {
    int bits = 0;          // of a quant
    int factors = 0;       // scales and minima per lane and block
    int factor_bytes = 0;  // of one of them
    int headers = 0;       // F16 numbers per lane that several blocks in a row share
    int blocks = 0;        // that share them
    int zero_point = 0;    // added to weights to store them unsigned; those with a minimum need none
    bool has_minima = false;
    bool has_halves = false;  // whether the halves of a block have scales of their own

    // Of a group.
    int factors_bytes = kLanes * factors * factor_bytes;
    int block_bytes = factors_bytes + kLanes * kBlock / 8 * bits;
    int header_bytes = kLanes * headers * 2;
};

// By Packing; none for floats.
constexpr Layout kLayouts[kNumPackings] = {
    {},
    {},
    {},
    {8, 1, 2, 0, 1, 128},
    {4, 1, 2, 0, 1, 8},
    {4, 2, 2, 0, 1, 0, true},
    {5, 1, 2, 0, 1, 16},
    {5, 2, 2, 0, 1, 0, true},
    {4, 2, 1, 2, 8, 0, true},
    {5, 2, 1, 2, 8, 0, true},
    {6, 2, 1, 1, 8, 32, false, true},
    {4, 1, 2, 0, 1, 128},
    {4, 1, 1, 1, 8, 128},
    {4, 1, 1, 0, 1, 12},
    {3, 2, 1, 1, 8, 4, false, true},
    {2, 2, 1, 2, 8, 0, true, true},
};

static constexpr const Layout& layout_of(Packing packing) {
    return kLayouts[static_cast<int>(packing)];
}

// What the four bits of IQ4_NL and IQ4_XS, and of MXFP4, stand for, the zero point added.
alignas(16) constexpr uint8_t kIq4Values[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                129, 141, 153, 166, 181, 197, 217, 241};
alignas(16) constexpr uint8_t kFp4Values[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// What a product needs to know of one block of one row besides its quants.
struct BlockFactors {
    float scale;  // value = scale * quant
    float sum;    // of the values
    union {
        int32_t offsets[2];  // minus the zero point times the sum of the quants, or of either half's
        float sums[2];       // Q2_K: of either half's values
    };
};

// n rows of int8 blocks. The rows of a block lie side by side, so that a tile of rows reaches them all from one
// address; see Kernel::row_pairs.
struct QuantizedRows {
    int n = 0;
    Packing packing = Packing::q8_0;  // of the weights they are to be multiplied with
    int8_t* quants = nullptr;         // [cols / kBlock][n][kBlock]
    BlockFactors* factors = nullptr;  // [cols / kBlock][n]
};

static inline QuantizedRows from_block(const QuantizedRows& rows, int block) {
    const size_t at = size_t(block) * rows.n;
    return {rows.n, rows.packing, rows.quants + at * kBlock, rows.factors + at};
}

// Those from `row` on, an even one, of as many.
static inline QuantizedRows from_row(const QuantizedRows& rows, int row) {
    return {rows.n, rows.packing, rows.quants + size_t(row) * kBlock, rows.factors + row};
}

// n rows of activations, as float packings or as integer packings read them; perhaps some of those that were quantized.
struct Activations {
    int n = 0;
    int cols = 0;                   // inputs, a multiple of kBlock; padding is zero
    const float* values = nullptr;  // [n][cols]
    QuantizedRows quantized;
};

// gelu in its tanh form; what clamped_silu gates is clamped, too, and 1 added.
enum class Activation { none, gelu, silu, squared_relu, clamped_silu, clamped_linear };

// What happens to a sum before it is stored:
//   out = softcap(gate * activation(sum + bias) * scale) + residual
// Where the outputs are `gated`, those of groups 2 g are gates of those of groups 2 g + 1, which alone make group g:
//   out = softcap(activation(gate's sum + bias) * (sum + bias) * scale) + residual
// where clamped_silu's gates open clamped_linear(sum + bias).
struct Epilogue {
    const float* bias = nullptr;  // [outputs], or none
    Activation activation = Activation::none;
    bool gated = false;
    const float* gate = nullptr;      // [n][stride], or none
    float scale = 1;                  // of a branch before it is added
    float softcap = 0;                // c tanh(x / c), or 0 for none
    const float* residual = nullptr;  // [n][stride], or none
    float* out = nullptr;             // [n][stride]
    size_t stride = 0;
};

// Where the context of one row lies: positions [0, direct) in the cells of the same number, the rest in `tail`.
struct RowContext {
    int length = 0;  // positions the row sees, itself included
    int direct = 0;
    const int32_t* tail = nullptr;  // [length - direct] cells
};

// How a cache stores keys and values; see kv_cache.h.
enum class KvType { f16, q8_0 };

// Bytes of one cell's key and of its values of a head.
static constexpr size_t key_bytes(KvType type, int head_dim) {
    return type == KvType::f16 ? sizeof(uint16_t) * head_dim
                               : padded(head_dim, kBlock) / kBlock * layout_of(Packing::q8_0).block_bytes / kLanes;
}
static constexpr size_t value_bytes(KvType type, int value_dim) {
    const size_t width = padded(value_dim, kBlock);
    return type == KvType::f16 ? sizeof(uint16_t) * padded(value_dim, kLanes) : width + width / kBlock * sizeof(float);
}

// Positions that attention goes through at a time. A row's attention is made of one part for each chunk, and those are
// folded in order of position; so its bits depend on no other chunk's cells, rows or threads.
constexpr int kChunk = 512;

// Attention of one row, by one of its heads, to one chunk: weighted values, padded to whole lanes, and behind them the
// largest score, the sum of the weights relative to it, 0 where the row sees nothing there, and the scores' scale.
enum PartialState { kPartialTop, kPartialSum, kPartialScale };
static constexpr size_t partial_stride(int value_dim) {
    return padded(value_dim, kLanes) + kLanes;
}

// One chunk of one head of keys and values, for rows of one pass, each with the `group` query heads that share them (a
// GQA group). Each query head of each row has a query: query i is that of head i % group of row i / group.
struct HeadChunk {
    int first = 0, last = 0;  // queries to attend for
    int begin = 0;            // the chunk's first position, a multiple of kChunk
    int group = 1;
    int head_dim = 0, value_dim = 0;   // of queries and keys, and of values
    int window = 0;                    // positions a row sees at most, itself included; 0 for all
    float scale = 1;                   // of the scores
    float softcap = 0;                 // c tanh(score / c) after it, or 0 for none
    const float* row_scale = nullptr;  // [rows] on top of `scale`, or none
    const RowContext* rows = nullptr;  // [rows]
    const float* q = nullptr;          // [rows][q_stride], of a row [group][head_dim]
    size_t q_stride = 0;
    KvType type = KvType::f16;
    const uint8_t* k = nullptr;  // as the cache lays them out
    const uint8_t* v = nullptr;
    float* scratch = nullptr;   // [attention_scratch(head_dim)]
    float* partials = nullptr;  // [queries][partial_stride(value_dim)]
};

// A causal convolution of one row, channel by channel: the sum over its width of weight[i] * input[i], from the oldest
// input on, times gate[i], or through SiLU where there is no gate.
struct Convolution {
    int width = 0, channels = 0;           // in rows, the last one its own
    const float* const* inputs = nullptr;  // [width][channels], of the oldest row first
    const float* weights = nullptr;        // [width][stride]
    size_t stride = 0;
    const float* gate = nullptr;
    float* out = nullptr;
    const float* bias = nullptr;  // [channels] of the sum, or none
};

// A row's step of a gated delta rule, for kLanes values of a head: of a tile [keys][kLanes] of the head's state M,
//   M = decay M;  delta = rate (value - M key);  M = M + key delta;  out = scale M query
// A tile is where the row before it left it, and goes elsewhere where other rows begin there, too. The sums over keys
// are four, of each fourth key, added in a fixed order.
struct DeltaStep {
    int from = 0, to = 0;  // tiles
    float decay = 1, rate = 0, scale = 1;
    const float* key = nullptr;    // [keys]
    const float* query = nullptr;  // [keys]
    const float* value = nullptr;  // [kLanes], or none for a step that is repeated: its delta is there
    float* delta = nullptr;        // [kLanes]
    float* out = nullptr;          // [kLanes], or none
};

struct Kernel {
    const char* name;
    bool (*supported)();
    bool row_pairs;  // whether quantize() mixes the quants of each two rows, eight bytes of one and then of the other

    // out[row][g * kLanes + lane] for the output groups g in [first, last) of a packed matrix.
    void (*matmul[kNumPackings])(const uint8_t* weights, int first, int last, const Activations&, const Epilogue&);
    // y = (x - mean) / sqrt(var + eps) * weight + bias over `cols` values, y perhaps x; y is zero up to `padded_cols`.
    // The bias may be null.
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int cols, int padded_cols,
                       float* y);
    // y = x / sqrt(mean of squares + eps) * weight, the rest as above.
    void (*rms_norm)(const float* x, const float* weight, float eps, int cols, int padded_cols, float* y);
    // Turns each (x[i], x[i + half]) by the angle whose cosine and sine are cos[i] and sin[i], i < half.
    void (*rotate)(float* x, int half, const float* cos, const float* sin);
    void (*convolve)(const Convolution&);
    // Steps in order, on tiles [][keys][kLanes]; keys are a multiple of kLanes.
    void (*delta)(const DeltaStep* steps, int count, int keys, float* tiles);
    // x[i] *= gate[i] / (1 + exp(-gate[i])), or without the gate in the numerator.
    void (*open)(const float* gate, bool silu, int n, float* x);
    // x[cols], cols a multiple of kBlock, into row `row` of `out`.
    void (*quantize)(const float* x, int cols, int row, const QuantizedRows& out);
    // x[n] to F16, rounding half to even.
    void (*to_f16)(const float* x, int n, uint16_t* out);
    void (*attend)(const HeadChunk&);
    // Adds `count` partials of following chunks, `next` floats apart, to `total`, a partial too, of zeros at first; and
    // writes the attention that this makes to out[value_dim], unless that is null.
    void (*fold)(const float* partials, size_t next, int count, int value_dim, float* total, float* out);
    // The maximum of each run of kRun values of x[n], NaN aside, and whether all values are finite; n is a multiple of
    // kRun.
    bool (*run_max)(const float* x, int n, float* maxima);
    // The sum of exp((x[i] - top) * factor) over x[n]; n is a multiple of 16.
    double (*sum_exp)(const float* x, int n, float top, float factor);
    // The noise of tokens[n], at least 0 each; see noise.h.
    void (*noise)(uint64_t seed, int64_t position, const int32_t* tokens, int n, float* out);
    // For each of the runs [0, n): what the noise of none of its tokens exceeds, and that of one of them all but
    // reaches; n is a multiple of kLanes.
    void (*run_noise)(uint64_t seed, int64_t position, int n, float* most);
    // Reads every byte once; for measuring bandwidth.
    uint64_t (*read)(const uint8_t* data, size_t bytes);
    // `rounds` rounds of dot products without a matrix to read, and how many multiply-adds they were; for measuring how
    // fast those can be.
    uint64_t (*dots)(int rounds);
};

// Floats of scratch that `attend` needs: of the rows it takes at a time the scores, in order of position and of a
// block, and the queries in eight bits.
constexpr int kMostAttendRows = 8;
static constexpr size_t attention_scratch(int head_dim) {
    return kMostAttendRows * (kChunk + kLanes + 2 * padded(head_dim, kBlock));
}

// Those that a build may have.
extern const Kernel kScalarKernel, kAvx2Kernel, kAvxVnniKernel, kAvx512VnniKernel;
extern const Kernel kNeonKernel, kNeonDotprodKernel, kNeonI8mmKernel;

// The kernels of this build that the CPU can run, best first.
std::vector<const Kernel*> available_kernels();

// The kernel called `name`, or the best one for "". Throws std::invalid_argument for a name that is unknown here, and
// for "" where a build for another machine has none of this one's.
const Kernel& find_kernel(const std::string& name);

}  // namespace pystaged
