// Operations on fixed numbers, whose results have the same bits with every kernel, compiler and library.
#pragma once

#include <algorithm>
#include <iterator>

#include "error.h"
#include "kernels/kernel.h"
#include "machine/digest.h"
#include "machine/math.h"
#include "machine/pool.h"

namespace pystaged {

// A sequence of bytes, and numbers from -2 to 2 made of them.
class FixedBytes {
public:
    uint8_t next() {
        state_ = state_ * 1664525u + 1013904223u;
        return static_cast<uint8_t>(state_ >> 24);
    }
    Lines<float> floats(size_t n) {
        Lines<float> values(n);
        for (float& value : values) {
            value = static_cast<float>(next() * 256 + next() - 32768) / 16384;
        }
        return values;
    }
    // Blocks of a packed matrix, or floats of `float_bytes`.
    Lines<uint8_t> weights(Packing packing, size_t blocks, int float_bytes) {
        const Layout& l = layout_of(packing);
        const size_t header = l.header_bytes, period = header + size_t(l.blocks) * l.block_bytes;
        Lines<uint8_t> bytes(period > 0 ? blocks / l.blocks * period : blocks * kLanes * kBlock * float_bytes);
        for (size_t i = 0; i < bytes.size(); ++i) {
            const size_t at = period > 0 ? i % period : 0;
            bytes[i] = next();
            if (period == 0) {
                bytes[i] &= i % 2 == 1 ? 0xbf : 0xff;  // the exponent's highest bit
            } else if (at < header || (at - header) % l.block_bytes < size_t(l.factors_bytes)) {
                bytes[i] = static_cast<uint8_t>((packing == Packing::mxfp4 ? 0x78 : 0x38) | bytes[i] % 8);
            }
        }
        return bytes;
    }

private:
    uint32_t state_ = 1;
};

inline uint64_t digest_of_product(const Kernel& kernel, int packing) {
    constexpr int n = 3, outputs = 2 * kLanes;
    const Packing of = static_cast<Packing>(packing);
    const int blocks = std::max(2, kLayouts[packing].blocks), cols = blocks * kBlock;
    FixedBytes fixed;
    const Lines<uint8_t> weights = fixed.weights(of, size_t(2) * blocks, of == Packing::f32 ? 4 : 2);
    const Lines<float> x = fixed.floats(size_t(n) * cols), bias = fixed.floats(outputs);
    Lines<int8_t> quants(x.size());
    Lines<BlockFactors> factors(x.size() / kBlock);
    const Activations activations{n, cols, x.data(), {n, of, quants.data(), factors.data()}};
    for (int i = 0; kLayouts[packing].blocks > 0 && i < n; ++i) {
        kernel.quantize(&x[size_t(i) * cols], cols, i, activations.quantized);
    }
    float out[n * outputs];
    const Epilogue epilogue{bias.data(), static_cast<Activation>(packing % 3), false, nullptr, 1e-3f, 30, nullptr, out,
                            outputs};
    kernel.matmul[packing](weights.data(), 0, 2, activations, epilogue);
    return digest(out, sizeof(out));
}

// Two rows of two heads that share keys and values.
inline uint64_t digest_of_attention(const Kernel& kernel) {
    constexpr int dim = kBlock, group = 2, queries = 2 * group;
    FixedBytes fixed;
    const Lines<uint8_t> keys = fixed.weights(Packing::f16, 2, 2), values = fixed.weights(Packing::f16, 2, 2);
    const Lines<float> q = fixed.floats(size_t(queries) * dim);
    const RowContext rows[] = {{21, 21, nullptr}, {22, 22, nullptr}};
    Lines<float> scratch(attention_scratch(dim)), partials(queries * partial_stride(dim));
    kernel.attend({.last = queries,
                   .group = group,
                   .head_dim = dim,
                   .value_dim = dim,
                   .scale = 0.125f,
                   .softcap = 20,
                   .rows = rows,
                   .q = q.data(),
                   .q_stride = size_t(group) * dim,
                   .k = keys.data(),
                   .v = values.data(),
                   .scratch = scratch.data(),
                   .partials = partials.data()});
    return digest(partials.data(), partials.size() * sizeof(float));
}

inline uint64_t digest_of_norm(const Kernel& kernel) {
    FixedBytes fixed;
    const Lines<float> x = fixed.floats(64), weight = fixed.floats(64);
    float y[64];
    kernel.rms_norm(x.data(), weight.data(), 1e-5f, 40, 64, y);
    return digest(y, sizeof(y));
}

inline uint64_t digest_of_noise(const Kernel& kernel) {
    int32_t tokens[32];
    float noise[32];
    for (int i = 0; i < 32; ++i) {
        tokens[i] = 1000 * i;
    }
    kernel.noise(7, 11, tokens, 32, noise);
    return digest(noise, sizeof(noise));
}

inline uint64_t digest_of_functions() {
    double found[4][8];
    for (int i = 0; i < 8; ++i) {
        const double x = (i + 1) / 4.0;
        found[0][i] = own_exp(x);
        found[1][i] = own_log(x);
        own_sin_cos(100 * x, &found[2][i], &found[3][i]);
    }
    return digest(found, sizeof(found));
}

// Throws std::runtime_error, which names what the kernel computes otherwise than it must.
inline void check_arithmetic(const Kernel& kernel) {
    struct Known {
        const char* operation;
        uint64_t digest;
    };
    // Products by Packing, then the others.
    constexpr Known kKnown[] = {
        {"F32 product", 0x0323e145937fac5d},    {"F16 product", 0x86bb544b1142199c},
        {"BF16 product", 0x8b701ef9f04ee3b9},   {"Q8_0 product", 0xb15a3fa3bf9c670b},
        {"Q4_0 product", 0xe36a37da5371a33e},   {"Q4_1 product", 0x22ee60e1222e70f8},
        {"Q5_0 product", 0xbd56ff58cab74594},   {"Q5_1 product", 0xe50c82338ad5555c},
        {"Q4_K product", 0xce0eebc5cb0ad6a5},   {"Q5_K product", 0xb9beea9f5d7e76b2},
        {"Q6_K product", 0x365c75472eed5c10},   {"IQ4_NL product", 0x326089eb2d1648b5},
        {"IQ4_XS product", 0x92f29eceac399c19}, {"MXFP4 product", 0x4d1bb7ad9bdc05f0},
        {"Q3_K product", 0xfaf142c551203180},   {"Q2_K product", 0x7e0dd0f5dd2445f6},
        {"norm", 0xab8e506d64391eeb},           {"attention", 0x682b3abfdd68c9eb},
        {"noise", 0x3b87f9ea2cf8302f},          {"exp, log, sine or cosine", 0x12a0759fa267dec6},
    };
    const FloatEnvironment pinned;
    std::string wrong;
    for (int i = 0; i < static_cast<int>(std::size(kKnown)); ++i) {
        const uint64_t found = i < kNumPackings        ? digest_of_product(kernel, i)
                               : i == kNumPackings     ? digest_of_norm(kernel)
                               : i == kNumPackings + 1 ? digest_of_attention(kernel)
                               : i == kNumPackings + 2 ? digest_of_noise(kernel)
                                                       : digest_of_functions();
        if (found != kKnown[i].digest) {
            wrong += std::string(wrong.empty() ? "" : ", ") + kKnown[i].operation;
        }
    }
    require<std::runtime_error>(
        wrong.empty(), "pystaged computes other numbers here than it must (kernel ", kernel.name, ": ", wrong,
        "). It was compiled with flags that change arithmetic, as -ffast-math, -Ofast, -funsafe-math-optimizations, "
        "-ffp-contract=fast and -mfpmath=387 do in CFLAGS or CXXFLAGS, or the compiler or its math library (fma, sqrt) "
        "is at fault; build it again without such flags, or with another compiler");
}

}  // namespace pystaged
