// The formats of packed weights: how rows of a file become what the kernels read, and back.
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
//                F16 scales of the scales and of the minima
//   IQ4_NL       F16 scales[lane], indices
//   IQ4_XS       8-bit scales[lane], indices; before every eighth block F16 scales of the scales
//   MXFP4        exponents[lane], indices
// Quants are unsigned, the zero point added; those of eight bits are words[8][lane], a word being four inputs' bytes.
// Those of four bits, and indices into a table of quants, have word i in the low and word i + 4 in the high half of
// nibbles[4][lane]; those of two bits word 4 i + j in bits 2 j and 2 j + 1 of pairs[2][lane]. Of what is above four or
// two bits, one follows as bit i of more[lane] for word i, two as bits 2 j and 2 j + 1 of more[2][lane].
// Outputs are padded with zeros to a multiple of 32, inputs likewise.
#pragma once

#include "ggml.h"
#include "kernels/kernel.h"

namespace pystaged {

// What the weights of a packing are in a file.
ggml_type type_of(Packing packing);
// Throws std::invalid_argument when `type` has no packing here.
Packing packing_of(ggml_type type);

// Of kLanes rows, `padded_cols` a multiple of kBlock.
size_t group_bytes(Packing packing, int padded_cols);
// Packs `cols` weights of kLanes rows; null is a row of zeros, which `out` has already.
void pack_group(Packing packing, const uint8_t* const* rows, int cols, uint8_t* out);
// Row `lane` of a packed group as floats, out[cols].
void unpack_row(Packing packing, const uint8_t* group, int lane, int cols, float* out);

}  // namespace pystaged
