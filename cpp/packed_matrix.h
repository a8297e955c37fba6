// A weight matrix in the order the kernels read it: 16 outputs side by side for each group of inputs.
//
// One layout serves every kernel. Outputs come in groups of kLanes; inside a group, inputs come in file order:
//   float types   [input][lane]
//   Q8_0          per block of 32 inputs: 16 F16 scales, then [input / 4][lane][input % 4] as unsigned q + 128
//   Q4_0          the same with a byte holding q + 8 of input i (low) and of input i + 16 (high), for i < 16
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
    bool integer() const { return packing_ == Packing::q8_0 || packing_ == Packing::q4_0; }
    // What an integer packing adds to its weights.
    int zero_point() const { return packing_ == Packing::q8_0 ? 128 : 8; }
    size_t bytes() const { return group_bytes_ * (padded_rows() / kLanes); }

    // out = W x, then the epilogue, for x.n rows of activations; the outputs are quantized too where `quantized` is
    // given, by the thread that has them at hand.
    void multiply(const Kernel& kernel, const Activations& x, const Epilogue& epilogue, const QuantizedRows* quantized,
                  int num_threads) const;
    // One row of weights as floats, out[cols()].
    void row(int index, float* out) const;

private:
    void pack_group(int group, const uint8_t* source) const;

    Packing packing_ = Packing::f32;
    int rows_ = 0, cols_ = 0;
    size_t group_bytes_ = 0;
    uint8_t* data_ = nullptr;
};

}  // namespace pystaged
