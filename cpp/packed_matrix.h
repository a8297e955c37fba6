// A weight matrix in the order the kernels read it: 16 outputs side by side for each group of inputs.
//
// One layout serves every kernel. Outputs come in groups of kLanes; inside a group, inputs come in file order. Float
// types are [input][lane]. Integer types are blocks of 32 inputs, each
//   Q8_0         F16 scales[lane], quants
//   Q4_0, Q5_0   F16 scales[lane], quants
//   Q4_1, Q5_1   F16 scales[lane], F16 minima[lane], quants
//   Q4_K, Q5_K   8-bit scales[lane], 8-bit minima[lane], quants; before every eighth block F16 scales and minima of the
//                scales and of the minima
//   Q6_K, Q3_K   8-bit scales[2][lane] of the halves, quants; before every eighth block F16 scales of the scales
//   Q2_K         scales (low four bits) and minima (high) [2][lane] of the halves, quants; before every eighth block
//   F16
//                scales of the scales and of the minima
//   IQ4_NL       F16 scales[lane], indices
//   IQ4_XS       8-bit scales[lane], indices; before every eighth block F16 scales of the scales
//   MXFP4        exponents[lane], indices
// Quants are unsigned, the zero point added; those of eight bits are words[8][lane], a word being four inputs' bytes.
// Those of four bits, and indices into a table of quants, have word i in the low and word i + 4 in the high half of
// nibbles[4][lane]; those of two bits word 4 i + j in bits 2 j and 2 j + 1 of pairs[2][lane]. Of what is above four or
// two bits, one follows as bit i of more[lane] for word i, two as bits 2 j and 2 j + 1 of more[2][lane].
// Outputs are padded with zeros to a multiple of 32, inputs likewise.
#pragma once

#include <functional>
#include <vector>

#include "ggml.h"
#include "kernels/kernel.h"

namespace pystaged {

// Which row of a tensor becomes each row of a packed matrix; -1 is a row of zeros. Several tensors of one type make one
// matrix: their rows are counted through.
using RowOrder = std::vector<int>;

// Rows 0 to rows - 1.
RowOrder in_order(int rows);
// Heads of `head_dim` rows whose first `rotary` rows belong together as (2 i, 2 i + 1): as (i, i + rotary / 2), which
// is what Kernel::rotate() turns.
RowOrder halves_of_pairs(int rows, int head_dim, int rotary);
// A gate's `rows` rows and then as many of what it opens, in turns of kLanes, for Epilogue::gated; padded to kBlock
// each.
RowOrder gate_in_turns(int rows);
// `order`, and then the rows of another tensor.
RowOrder stacked(RowOrder order, const RowOrder& next);

// A matrix as a file holds it.
struct Tensor {
    const uint8_t* data = nullptr;
    int rows = 0;
};

// Brings `count` rows of the sources, the first of them row `first`, as the file has them. Called by several threads.
using RowReader = std::function<void(int first, int count, uint8_t* rows)>;

struct Product;

class PackedMatrix {
public:
    PackedMatrix() = default;
    // Packs `source`, a [rows][cols] matrix of ggml `type`, into `storage` of size packed_bytes().
    PackedMatrix(ggml_type type, int rows, int cols, const uint8_t* source, uint8_t* storage, int num_threads);
    // Packs order.size() rows of `sources`.
    PackedMatrix(ggml_type type, int cols, const std::vector<Tensor>& sources, const RowOrder& order, uint8_t* storage,
                 int num_threads);
    // Packs order.size() rows as they are read, kLanes at a time by each thread, so that a row goes from the file
    // through that thread's cache to its place.
    PackedMatrix(ggml_type type, int cols, const RowReader& read, const RowOrder& order, uint8_t* storage,
                 int num_threads);
    // What was packed into `storage` before.
    PackedMatrix(ggml_type type, int rows, int cols, const uint8_t* storage);

    // Throws std::invalid_argument when `type` has no packing here.
    static Packing packing_of(ggml_type type);
    static size_t packed_bytes(ggml_type type, int rows, int cols);
    // Of the layout above. It counts up whenever packed weights written before would be read wrongly.
    static constexpr int kVersion = 1;

    int rows() const { return rows_; }
    int cols() const { return cols_; }
    int padded_rows() const { return padded(rows_, kBlock); }
    int padded_cols() const { return padded(cols_, kBlock); }
    Packing packing() const { return packing_; }
    bool integer() const { return packing_ >= Packing::q8_0; }
    size_t bytes() const { return group_bytes_ * (padded_rows() / kLanes); }
    // Whether rows that were quantized for matrices of `packing` will do for this one.
    bool reads(Packing packing) const;

    // out = W x, then the epilogue, for x.n rows of activations; the outputs are quantized too where `quantized` is
    // given, by the thread that has them at hand.
    void multiply(const Kernel& kernel, const Activations& x, const Epilogue& epilogue, const QuantizedRows* quantized,
                  int num_threads) const;
    // One row of weights as floats, out[cols()].
    void row(int index, float* out) const;

private:
    friend void multiply_all(const Kernel& kernel, const std::vector<Product>& products, int num_threads);

    Packing packing_ = Packing::f32;
    int rows_ = 0, cols_ = 0;
    size_t group_bytes_ = 0;
    const uint8_t* data_ = nullptr;
};

// One product of several over the same rows; see PackedMatrix::multiply.
struct Product {
    const PackedMatrix* weights = nullptr;
    Activations x;
    Epilogue epilogue;
    const QuantizedRows* quantized = nullptr;
    const Product* before = nullptr;  // whose outputs of the same places are made first: the gates of this one
    float* maxima = nullptr;  // of the outputs by find_maxima(), a row's stride being its n: [x.n][stride / kRun]
};

// All of them in one join.
void multiply_all(const Kernel& kernel, const std::vector<Product>& products, int num_threads);

// The maxima of the runs of x[size], one of them NaN where not all of x is finite. What is behind them becomes -inf, up
// to x[n], n a multiple of kRun.
void find_maxima(const Kernel& kernel, float* x, int size, int n, float* maxima);

}  // namespace pystaged
