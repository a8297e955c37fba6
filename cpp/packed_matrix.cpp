#include "packed_matrix.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "thread_pool.h"

namespace pystaged {

namespace {

// Weights one thread takes at a time: large enough that prefetching past the end is small change, small enough to share
// out evenly.
constexpr size_t kChunkBytes = 256 << 10;

// Bytes of one packed block (integer types) or of one input (float types) of a whole group.
size_t unit_bytes(Packing packing) {
    switch (packing) {
        case Packing::f32: return kLanes * 4;
        case Packing::f16:
        case Packing::bf16: return kLanes * 2;
        case Packing::q8_0: return kLanes * 2 + kLanes * kBlock;
        case Packing::q4_0: return kLanes * 2 + kLanes * kBlock / 2;
    }
    return 0;
}

size_t group_bytes(Packing packing, int padded_cols) {
    const bool integer = packing == Packing::q8_0 || packing == Packing::q4_0;
    return unit_bytes(packing) * (integer ? padded_cols / kBlock : padded_cols);
}

}  // namespace

Packing PackedMatrix::packing_of(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32: return Packing::f32;
        case GGML_TYPE_F16: return Packing::f16;
        case GGML_TYPE_BF16: return Packing::bf16;
        case GGML_TYPE_Q8_0: return Packing::q8_0;
        case GGML_TYPE_Q4_0: return Packing::q4_0;
        default: break;
    }
    throw std::invalid_argument(std::string("weights of type ") + ggml_type_name(type) +
                                " are not supported; use F32, F16, BF16, Q8_0 or Q4_0");
}

size_t PackedMatrix::packed_bytes(ggml_type type, int rows, int cols) {
    return group_bytes(packing_of(type), padded(cols, kBlock)) * (padded(rows, kBlock) / kLanes);
}

PackedMatrix::PackedMatrix(ggml_type type, int rows, int cols, const uint8_t* source, uint8_t* storage, int num_threads)
    : packing_(packing_of(type)),
      rows_(rows),
      cols_(cols),
      group_bytes_(group_bytes(packing_, padded(cols, kBlock))),
      data_(storage) {
    if (cols % ggml_blck_size(type) != 0) {
        throw std::invalid_argument(std::string(ggml_type_name(type)) + " needs rows of a multiple of " +
                                    std::to_string(ggml_blck_size(type)) + " weights, not " + std::to_string(cols));
    }
    ThreadPool::shared().run(padded_rows() / kLanes, num_threads, [&](int g, int) { pack_group(g, source); });
}

// Integer blocks keep the file's bytes and only move them in words of four inputs.
void PackedMatrix::pack_group(int group, const uint8_t* source) const {
    const int lanes = std::clamp(rows_ - group * kLanes, 0, kLanes);
    uint8_t* out = data_ + group * group_bytes_;
    if (lanes < kLanes || cols_ != padded_cols()) {
        std::memset(out, 0, group_bytes_);
    }
    if (!integer()) {
        const size_t size = packing_ == Packing::f32 ? 4 : 2;
        for (int lane = 0; lane < lanes; ++lane) {
            const uint8_t* in = source + size_t(group * kLanes + lane) * cols_ * size;
            for (int i = 0; i < cols_; ++i) {
                std::memcpy(out + (size_t(i) * kLanes + lane) * size, in + i * size, size);
            }
        }
        return;
    }
    const int blocks = cols_ / kBlock, words = packing_ == Packing::q8_0 ? 8 : 4;
    const uint32_t flip = packing_ == Packing::q8_0 ? 0x80808080u : 0;
    const size_t block_bytes = 2 + 4 * words;
    for (int b = 0; b < blocks; ++b, out += kLanes * block_bytes) {
        for (int lane = 0; lane < lanes; ++lane) {
            const uint8_t* in = source + (size_t(group * kLanes + lane) * blocks + b) * block_bytes;
            std::memcpy(out + 2 * lane, in, 2);
            for (int i = 0; i < words; ++i) {
                uint32_t word;
                std::memcpy(&word, in + 2 + 4 * i, 4);
                word ^= flip;
                std::memcpy(out + 2 * kLanes + 4 * (i * kLanes + lane), &word, 4);
            }
        }
    }
}

void PackedMatrix::multiply(const Kernel& kernel, const Activations& x, const Epilogue& epilogue,
                            const QuantizedRows* quantized, int num_threads) const {
    // Groups are handed out in pairs: two of them make a block of outputs.
    const int pairs = padded_rows() / kBlock;
    const int fair = (pairs + 2 * num_threads - 1) / (2 * num_threads);
    const int chunk = std::clamp(static_cast<int>(kChunkBytes / (2 * group_bytes_)), 1, fair);
    const auto matmul = kernel.matmul[static_cast<int>(packing_)];
    ThreadPool::shared().run((pairs + chunk - 1) / chunk, num_threads, [&](int i, int) {
        const int first = i * chunk, last = std::min(pairs, first + chunk);
        matmul(data_, 2 * first, 2 * last, x, epilogue);
        if (quantized) {
            const float* out = epilogue.out + size_t(first) * kBlock;
            for (int row = 0; row < x.n; ++row, out += epilogue.stride) {
                kernel.quantize(out, (last - first) * kBlock, row, quantized->from_block(first));
            }
        }
    });
}

void PackedMatrix::row(int index, float* out) const {
    const uint8_t* group = data_ + index / kLanes * group_bytes_;
    const int lane = index % kLanes;
    if (!integer()) {
        for (int i = 0; i < cols_; ++i) {
            const size_t at = size_t(i) * kLanes + lane;
            if (packing_ == Packing::f32) {
                std::memcpy(out + i, group + 4 * at, 4);
            } else if (packing_ == Packing::f16) {
                ggml_fp16_t value;
                std::memcpy(&value, group + 2 * at, 2);
                out[i] = ggml_fp16_to_fp32(value);
            } else {
                ggml_bf16_t value;
                std::memcpy(&value, group + 2 * at, 2);
                out[i] = ggml_bf16_to_fp32(value);
            }
        }
        return;
    }
    const size_t block_bytes = unit_bytes(packing_);
    for (int i = 0; i < cols_; ++i) {
        const uint8_t* block = group + i / kBlock * block_bytes;
        ggml_fp16_t scale;
        std::memcpy(&scale, block + 2 * lane, 2);
        const int at = packing_ == Packing::q8_0 ? i % kBlock : i % (kBlock / 2);
        int quant = block[2 * kLanes + at / 4 * 4 * kLanes + 4 * lane + at % 4];
        if (packing_ == Packing::q4_0) {
            quant = i % kBlock < kBlock / 2 ? quant & 15 : quant >> 4;
        }
        out[i] = ggml_fp16_to_fp32(scale) * static_cast<float>(quant - zero_point());
    }
}

}  // namespace pystaged
