// A weight matrix in the order the kernels read it: 16 outputs side by side for each group of inputs.
//
// One layout serves every kernel. Outputs come in groups of kLanes; inside a group, inputs come in file order. Float
// types are [input][lane]. Integer types are blocks of 32 inputs, each
//   Q8_0         F16 scales[lane], quants
//   Q4_0, Q5_0   F16 scales[lane], quants
//   Q4_1, Q5_1   F16 scales[lane], F16 minima[lane], quants
//   Q4_K, Q5_K   8-bit scales[lane], 8-bit minima[lane], quants; before every eighth block F16 scales and minima of the
//                scales and of the minima
//   Q6_K         8-bit scales[2][lane] of the halves, quants; before every eighth block F16 scales of the scales
// Quants are unsigned, the zero point added; those of eight bits are words[8][lane], a word being four inputs' bytes.
// Those of four bits have word i in the low and word i + 4 in the high half of nibbles[4][lane]. Fifth bits follow as
// bit i of fifth[lane] for word i, fifth and sixth ones as bits 2 i and 2 i + 1 of both[2][lane] for words i and i + 4.
// Outputs are padded with zeros to a multiple of 32, inputs likewise.
#pragma once

#include "ggml.h"
#include "kernels/kernel.h"

namespace pystaged {

class PackedMatrix {
public:
    PackedMatrix() = default;
    // Packs `source`, a [rows][cols] matrix of ggml `type`, into `storage` of size packed_bytes().
    PackedMatrix(ggml_type type, int rows, int cols, const uint8_t* source, uint8_t* storage, int num_threads);

    // Throws std::invalid_argument when `type` has no packing here.
    static Packing packing_of(ggml_type type);
    static size_t packed_bytes(ggml_type type, int rows, int cols);

    int rows() const { return rows_; }
    int cols() const { return cols_; }
    int padded_rows() const { return padded(rows_, kBlock); }
    int padded_cols() const { return padded(cols_, kBlock); }
    Packing packing() const { return packing_; }
    bool integer() const { return packing_ >= Packing::q8_0; }
    size_t bytes() const { return group_bytes_ * (padded_rows() / kLanes); }

    // out = W x, then the epilogue, for x.n rows of activations; the outputs are quantized too where `quantized` is
    // given, by the thread that has them at hand.
    void multiply(const Kernel& kernel, const Activations& x, const Epilogue& epilogue, const QuantizedRows* quantized,
                  int num_threads) const;
    // One row of weights as floats, out[cols()].
    void row(int index, float* out) const;

private:
    void pack_floats(int group, const uint8_t* source) const;
    void pack_blocks(int group, const uint8_t* source) const;

    Packing packing_ = Packing::f32;
    int rows_ = 0, cols_ = 0;
    size_t group_bytes_ = 0;
    uint8_t* data_ = nullptr;
};

}  // namespace pystaged
