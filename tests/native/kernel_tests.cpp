// Tests of the kernels and of what they work on: kernel_tests [KERNEL...], the names of those this CPU should have.
#ifndef _WIN32
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

#include <array>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <deque>
#include <iterator>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "machine/digest.h"
#include "machine/pool.h"
#include "machine/self_test.h"
#include "pass/attention.h"
#include "state/kv_cache.h"
#include "weights/product.h"

using namespace pystaged;

namespace {

thread_local int allocations_left = -1;  // after which memory has ended; negative for no end

}  // namespace

void* operator new(size_t size) {
    void* const memory = allocations_left == 0 ? nullptr : std::malloc(size);
    if (!memory) {
        throw std::bad_alloc();
    }
    allocations_left -= allocations_left > 0;
    return memory;
}

void operator delete(void* memory) noexcept {
    std::free(memory);
}

void operator delete(void* memory, size_t) noexcept {
    std::free(memory);
}

namespace {

template <class... Arrays>
void randomize(const Arrays&... arrays) {
    (std::generate_n(arrays.data(), arrays.size(), [] { return random_float(); }), ...);
}

// ---- Matrices ----

struct Quantized {
    Array<int8_t> quants;
    Array<BlockFactors> factors;

    Quantized(int n, int cols) : quants(size_t(n) * cols), factors(size_t(n) * cols / kBlock) {}
    Quantized(const Kernel& kernel, const float* x, int n, int cols, Packing packing) : Quantized(n, cols) {
        for (int i = 0; i < n; ++i) {
            kernel.quantize(x + size_t(i) * cols, cols, i, rows(n, packing));
        }
    }
    QuantizedRows rows(int n, Packing packing) const { return {n, packing, quants.data(), factors.data()}; }
};

// Rows that a kernel mixes in pairs, brought to the order of all others.
void unmix(const Array<int8_t>& quants, int n) {
    for (size_t at = 0; at < quants.size(); at += size_t(n) * kBlock) {
        for (int r = 0; r + 1 < n; r += 2) {
            int8_t* pair = &quants[at + size_t(r) * kBlock];
            int8_t mixed[2 * kBlock];
            std::memcpy(mixed, pair, sizeof(mixed));
            for (int i = 0; i < 2 * kBlock; i += 8) {
                std::memcpy(pair + i / 16 * 8 + i / 8 % 2 * kBlock, mixed + i, 8);
            }
        }
    }
}

// The integer types, and where in a block of theirs F16 numbers stand.
const std::map<ggml_type, std::vector<int>> kIntegerTypes = {
    {GGML_TYPE_Q8_0, {0}},      {GGML_TYPE_Q4_0, {0}},    {GGML_TYPE_Q4_1, {0, 2}}, {GGML_TYPE_Q5_0, {0}},
    {GGML_TYPE_Q5_1, {0, 2}},   {GGML_TYPE_Q4_K, {0, 2}}, {GGML_TYPE_Q5_K, {0, 2}}, {GGML_TYPE_Q6_K, {208}},
    {GGML_TYPE_IQ4_NL, {0}},    {GGML_TYPE_IQ4_XS, {0}},  {GGML_TYPE_MXFP4, {}},    {GGML_TYPE_Q3_K, {108}},
    {GGML_TYPE_Q2_K, {80, 82}},
};

void fill_weights(ggml_type type, Array<uint8_t>& source) {
    if (type == GGML_TYPE_F32) {
        std::generate_n(reinterpret_cast<float*>(source.data()), source.size() / 4, [] { return random_float(0.05f); });
        return;
    }
    if (type == GGML_TYPE_BF16) {
        std::generate_n(reinterpret_cast<ggml_bf16_t*>(source.data()), source.size() / 2,
                        [] { return ggml_fp32_to_bf16(random_float(0.05f)); });
        return;
    }
    const size_t block = ggml_type_size(type);
    std::generate_n(source.data(), source.size(), [] { return static_cast<uint8_t>(random_int(0, 255)); });
    for (size_t at = 0; at < source.size(); at += block) {
        for (const int field : type == GGML_TYPE_F16 ? std::vector<int>{0} : kIntegerTypes.at(type)) {
            const ggml_fp16_t h = ggml_fp32_to_fp16(random_float(0.05f));
            std::memcpy(&source[at + field], &h, 2);
        }
        if (type == GGML_TYPE_MXFP4) {  // an exponent: mostly ordinary, sometimes of subnormal numbers
            source[at] = static_cast<uint8_t>(at / block % 7 ? random_int(119, 126) : random_int(0, 4));
        }
    }
}

struct Product {
    Array<float> out;
    Quantized quantized;
    Product(int n, int rows) : out(size_t(n) * rows), quantized(n, rows) {}
};

// A matrix that lies in memory as a file has it.
PackedMatrix pack_rows(ggml_type type, int rows, int cols, const uint8_t* source, uint8_t* storage, int num_threads) {
    const auto read = [&](int first, int count, uint8_t* out) {
        const size_t row_bytes = ggml_row_size(type, cols);
        std::memcpy(out, source + first * row_bytes, count * row_bytes);
    };
    return {type, cols, read, in_order(rows), storage, num_threads};
}

// As a pass computes them, one after another.
void multiply(const Kernel& kernel, const std::vector<pystaged::Product>& products, int num_threads) {
    static std::map<const Kernel*, Multiplier> multipliers;
    multipliers.try_emplace(&kernel, kernel).first->second.multiply(products.data(), products.size(), num_threads);
}

// What x.n rows give, with what `how` says besides bias, residual and quantized output.
void multiply(const PackedMatrix& matrix, const Kernel& kernel, const Array<float>& x, int first, int n,
              const Array<float>& bias, const Array<float>& residual, int num_threads, Epilogue how, Product& result) {
    const int cols = matrix.padded_cols(), width = matrix.padded_rows() / (how.gated ? 2 : 1);
    const float* values = x.data() + size_t(first) * cols;
    const Quantized input(kernel, values, n, cols, matrix.packing());
    how.bias = bias.data();
    how.residual = residual.data() + size_t(first) * width;
    how.gate = how.gate ? how.gate + size_t(first) * width : nullptr;
    how.out = result.out.data();
    how.stride = width;
    const QuantizedRows next = result.quantized.rows(n, matrix.packing());
    // Each part is finished once in each row.
    const int part = how.gated ? 0 : matrix.rows() % 3 ? matrix.rows() : matrix.rows() / 3;
    Array<float> finished(result.out.size());
    std::atomic<int> num_finished{0};
    const auto finish = [&](int first, int row, int end) {
        num_finished += end - row;
        for (; row < end; ++row) {
            const size_t at = size_t(row) * width + first;
            std::copy_n(&result.out[at], part, &finished[at]);
        }
    };
    const std::function<void(int, int, int)> call = finish;
    multiply(
        kernel,
        {{&matrix, {n, cols, values, input.rows(n, matrix.packing())}, how, next, nullptr, nullptr, part, 0, &call}},
        num_threads);
    CHECK(num_finished == (part > 0 ? n * matrix.rows() / part : 0));
    for (int i = 0; part > 0 && i < n; ++i) {
        CHECK(same(&finished[size_t(i) * width], &result.out[size_t(i) * width], matrix.rows()));
    }
}

double activated(double x, Activation activation) {
    switch (activation) {
        case Activation::gelu: return x / (1 + std::exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)));
        case Activation::silu: return x / (1 + std::exp(-x));
        case Activation::squared_relu: return std::max(x, 0.0) * std::max(x, 0.0);
        case Activation::clamped_silu: return std::min(x, 7.0) / (1 + std::exp(-1.702 * std::min(x, 7.0)));
        case Activation::clamped_linear: return std::clamp(x, -7.0, 7.0) + 1;
        default: return x;
    }
}

// Epilogues in turn.
Epilogue some_epilogue() {
    static int turn = 0;
    Epilogue epilogue;
    epilogue.activation =
        std::array{Activation::gelu,         Activation::none,         Activation::silu,
                   Activation::squared_relu, Activation::clamped_silu, Activation::clamped_linear}[turn % 6];
    epilogue.scale = turn % 3 == 1 ? 0.25f : 1.0f;
    epilogue.softcap = turn % 5 == 4 ? 1.5f : 0.0f;
    ++turn;
    return epilogue;
}

double finished(double sum, const Epilogue& e) {
    sum = activated(sum, e.activation) * e.scale;
    return e.softcap > 0 ? e.softcap * std::tanh(sum / e.softcap) : sum;
}

void test_matrix(ggml_type type, int rows, int cols) {
    constexpr int kMost = 20;
    Array<uint8_t> source(ggml_row_size(type, cols) * rows);
    fill_weights(type, source);
    const Array<uint8_t> storage(PackedMatrix::packed_bytes(type, rows, cols));
    const PackedMatrix matrix = pack_rows(type, rows, cols, source.data(), storage.data(), 2);
    CHECK(matrix.bytes() == storage.size());

    // Back to floats: as ggml reads the file.
    Array<float> row(cols), expected(cols);
    std::vector<std::vector<float>> weights;
    for (int r = 0; r < rows; ++r) {
        const uint8_t* in = source.data() + r * ggml_row_size(type, cols);
        if (type == GGML_TYPE_F32) {
            std::memcpy(expected.data(), in, cols * sizeof(float));
        } else {
            ggml_get_type_traits(type)->to_float(in, expected.data(), cols);
        }
        matrix.row(r, row.data());
        CHECK(row.same(expected));
        weights.emplace_back(row.data(), row.data() + cols);
    }

    const int width = matrix.padded_cols(), stride = matrix.padded_rows();
    const Array<float> x(size_t(kMost) * width), bias(stride), residual(size_t(kMost) * stride);
    for (int i = 0; i < kMost; ++i) {
        std::generate_n(&x[size_t(i) * width], cols, [] { return random_float(); });
        std::generate_n(&residual[size_t(i) * stride], rows, [] { return random_float(); });
    }
    std::generate_n(bias.data(), rows, [] { return random_float(); });

    const Kernel& scalar = find_kernel("scalar");
    const Epilogue how = some_epilogue();
    Product alone(1, stride), whole(kMost, stride);
    multiply(matrix, scalar, x, 0, kMost, bias, residual, 1, how, whole);
    for (int i = 0; i < kMost; ++i) {
        for (int r = 0; r < rows; ++r) {
            double sum = bias[r], size = 0;
            for (int c = 0; c < cols; ++c) {
                sum += double(weights[r][c]) * x[size_t(i) * width + c];
                size += std::fabs(weights[r][c]);
            }
            // Activations of integer matrices are rounded to 8 bits.
            const double slope = how.activation == Activation::squared_relu ? 2 * std::fabs(sum) + 2 : 1;
            const double allowed = (matrix.integer() ? 0.02 : 1e-5) * (size + 1) * slope;
            CHECK(std::fabs(finished(sum, how) + residual[size_t(i) * stride + r] -
                            whole.out[size_t(i) * stride + r]) <= allowed);
        }
    }
    for (const Kernel* kernel : available_kernels()) {
        for (int n = 1; n <= kMost; ++n) {
            Product product(n, stride);
            multiply(matrix, *kernel, x, 0, n, bias, residual, n % 3 + 1, how, product);
            CHECK(same(product.out.data(), whole.out.data(), size_t(n) * stride));
            // A quantized row lies in the order of a pass of n; the scalar kernel says what it must be.
            Product twin(n, stride);
            multiply(matrix, scalar, x, 0, n, bias, residual, 1, how, twin);
            if (kernel->row_pairs) {
                unmix(product.quantized.quants, n);
            }
            CHECK(product.quantized.quants.same(twin.quantized.quants));
            CHECK(product.quantized.factors.same(twin.quantized.factors));
        }
        for (int i = 0; i < kMost; ++i) {
            multiply(matrix, *kernel, x, i, 1, bias, residual, 1, how, alone);
            CHECK(same(alone.out.data(), &whole.out[size_t(i) * stride], stride));
        }
    }
}

struct RandomWeights : Array<uint8_t> {
    RandomWeights(ggml_type type, int rows, int cols) : Array(ggml_row_size(type, cols) * rows) {
        fill_weights(type, *this);
    }
};

// The rows of `source` as a file would bring them.
RowReader reader(const Array<uint8_t>& source, size_t row_bytes) {
    return [&source, row_bytes](int first, int count, uint8_t* out) {
        std::memcpy(out, source.data() + first * row_bytes, count * row_bytes);
    };
}

// Many rows at once, whose weights are unpacked once for all of them, against each row alone.
void test_many_rows(ggml_type type) {
    constexpr int kMost = 140, rows = 304;
    const int cols = ggml_blck_size(type) == kBlock ? 11 * kBlock : 2 * static_cast<int>(ggml_blck_size(type));
    const RandomWeights source(type, rows, cols);
    const Array<uint8_t> storage(PackedMatrix::packed_bytes(type, rows, cols));
    const PackedMatrix matrix = pack_rows(type, rows, cols, source.data(), storage.data(), 1);
    const int stride = matrix.padded_rows();
    const Array<float> x(size_t(kMost) * cols), bias(stride), residual(size_t(kMost) * stride);
    randomize(x, bias, residual);
    const Epilogue how = some_epilogue();
    const Array<float> expected(size_t(kMost) * stride);
    Product alone(1, stride);
    for (int i = 0; i < kMost; ++i) {
        multiply(matrix, find_kernel("scalar"), x, i, 1, bias, residual, 1, how, alone);
        std::copy_n(alone.out.data(), stride, &expected[size_t(i) * stride]);
    }
    for (const Kernel* kernel : available_kernels()) {
        for (const int n : {8, 15, 16, 31, 32, 33, 63, 64, 67, 80, kMost}) {
            Product product(n, stride);
            multiply(matrix, *kernel, x, kMost - n, n, bias, residual, n % 3 + 1, how, product);
            CHECK(same(product.out.data(), &expected[size_t(kMost - n) * stride], size_t(n) * stride));
        }
    }
}

// Rows at the edges of F32 are those of the scalar kernel, and one without finite numbers leaves the others alone.
void test_extremes(ggml_type type) {
    constexpr int n = 8, rows = 33;
    const float numbers[n] = {0, -0.0f, 3e38f, 1e-33f, 1e-42f, 1, NAN, INFINITY};
    const int cols = ggml_blck_size(type) > 32 ? 256 : 96;
    const RandomWeights source(type, rows, cols);
    const Array<uint8_t> storage(PackedMatrix::packed_bytes(type, rows, cols));
    const PackedMatrix matrix = pack_rows(type, rows, cols, source.data(), storage.data(), 1);
    const int width = matrix.padded_cols(), stride = matrix.padded_rows();
    const Array<float> x(size_t(n) * width), bias(stride), residual(size_t(n) * stride);
    for (int i = 0; i < n; ++i) {
        std::generate_n(&x[size_t(i) * width], cols, [&] { return random_int(0, 1) ? numbers[i] : -numbers[i]; });
    }
    Product expected(n, stride), alone(1, stride);
    multiply(matrix, find_kernel("scalar"), x, 0, n, bias, residual, 1, {}, expected);
    CHECK(std::all_of(expected.out.data(), &expected.out[2 * size_t(stride)], [](float sum) { return sum == 0; }));
    for (const Kernel* kernel : available_kernels()) {
        Product product(n, stride);
        multiply(matrix, *kernel, x, 0, n, bias, residual, 2, {}, product);
        for (const int i : {0, 1, 3, 4, 5}) {
            multiply(matrix, *kernel, x, i, 1, bias, residual, 1, {}, alone);
            const float* row = &product.out[size_t(i) * stride];
            CHECK(same(row, &expected.out[size_t(i) * stride], rows) && same(row, alone.out.data(), rows));
            CHECK(std::all_of(row, row + rows, [](float sum) { return std::isfinite(sum); }));
        }
        for (int r = 0; r < rows; ++r) {
            CHECK(!std::isfinite(product.out[6 * size_t(stride) + r]));
        }
    }
}

// Gate and up in turns, against one after the other.
void test_gated(ggml_type type, int rows, int cols) {
    constexpr int kMost = 9;
    const RandomWeights source(type, 2 * rows, cols);
    const size_t row_bytes = ggml_row_size(type, cols);
    const RowOrder order = gate_in_turns(rows);
    const Array<uint8_t> storage(PackedMatrix::packed_bytes(type, static_cast<int>(order.size()), cols));
    const Array<uint8_t> gate_storage(PackedMatrix::packed_bytes(type, rows, cols)), up_storage(gate_storage.size());
    const PackedMatrix both(type, cols, reader(source, row_bytes), order, storage.data(), 2);
    const PackedMatrix gate = pack_rows(type, rows, cols, source.data(), gate_storage.data(), 1);
    const PackedMatrix up = pack_rows(type, rows, cols, source.data() + rows * row_bytes, up_storage.data(), 1);
    CHECK(both.bytes() == storage.size());

    const int width = both.padded_cols(), stride = up.padded_rows();
    CHECK(both.padded_rows() == 2 * stride);
    const Array<float> x(size_t(kMost) * width), residual(size_t(kMost) * stride);
    const Array<float> bias(2 * stride), gate_bias(stride), up_bias(stride), none(size_t(kMost) * stride);
    randomize(x, residual);
    for (int i = 0; i < 2 * stride; ++i) {
        bias[i] = order[i] < 0 ? 0 : random_float();
        if (order[i] >= 0) {
            (order[i] < rows ? gate_bias : up_bias)[order[i] % rows] = bias[i];
        }
    }
    for (const Activation activation : {Activation::gelu, Activation::silu, Activation::clamped_silu}) {
        Epilogue first, second, at_once;
        first.activation = at_once.activation = activation;
        second.scale = at_once.scale = 0.25f;
        second.activation = activation == Activation::clamped_silu ? Activation::clamped_linear : Activation::none;
        at_once.gated = true;
        Product opened(kMost, stride), expected(kMost, stride);
        multiply(gate, find_kernel("scalar"), x, 0, kMost, gate_bias, none, 1, first, opened);
        second.gate = opened.out.data();
        multiply(up, find_kernel("scalar"), x, 0, kMost, up_bias, residual, 1, second, expected);
        for (const Kernel* kernel : available_kernels()) {
            for (int n = 1; n <= kMost; ++n) {
                Product product(n, stride);
                multiply(both, *kernel, x, kMost - n, n, bias, residual, n % 3 + 1, at_once, product);
                CHECK(same(product.out.data(), &expected.out[size_t(kMost - n) * stride], size_t(n) * stride));
            }
            // Two matrices in one join.
            const Quantized input(*kernel, x.data(), kMost, width, gate.packing());
            const Array<float> gates(size_t(kMost) * stride), out(gates.size());
            const Activations activations{kMost, width, x.data(), input.rows(kMost, gate.packing())};
            pystaged::Product before{&gate, activations, first}, product{&up, activations, second};
            before.epilogue.bias = gate_bias.data();
            product.epilogue.bias = up_bias.data();
            product.epilogue.residual = residual.data();
            product.epilogue.gate = before.epilogue.out = gates.data();
            product.epilogue.out = out.data();
            product.epilogue.stride = before.epilogue.stride = stride;
            product.before = &before;
            for (const int num_threads : {1, 2, 3, 7}) {
                std::fill_n(out.data(), out.size(), NAN);
                std::fill_n(gates.data(), gates.size(), NAN);
                multiply(*kernel, {product}, num_threads);
                CHECK(out.same(expected.out));
            }
        }
    }
}

// Matrices of several types over the same rows, in one join and alone.
void test_together() {
    constexpr int n = 5, cols = 256;
    struct Case {
        ggml_type type;
        int rows;
    };
    const Case cases[] = {{GGML_TYPE_Q4_K, 70}, {GGML_TYPE_Q6_K, 16},  {GGML_TYPE_IQ4_NL, 200},
                          {GGML_TYPE_F16, 33},  {GGML_TYPE_Q2_K, 100}, {GGML_TYPE_Q8_0, 1}};
    const Array<float> x(size_t(n) * cols);
    randomize(x);
    for (const Kernel* kernel : available_kernels()) {
        std::deque<Array<uint8_t>> storage;
        std::deque<PackedMatrix> matrices;
        std::deque<Quantized> inputs;
        std::deque<Array<float>> expected, outs;
        std::vector<pystaged::Product> products;
        for (const Case& c : cases) {
            const RandomWeights source(c.type, c.rows, cols);
            storage.emplace_back(PackedMatrix::packed_bytes(c.type, c.rows, cols));
            const PackedMatrix& matrix =
                matrices.emplace_back(pack_rows(c.type, c.rows, cols, source.data(), storage.back().data(), 1));
            // Q6_K's rows do for Q4_K too, and Q8_0's for IQ4_NL.
            const Packing packing = matrix.reads(Packing::q6_k)   ? Packing::q6_k
                                    : matrix.reads(Packing::q8_0) ? Packing::q8_0
                                                                  : matrix.packing();
            const QuantizedRows rows = inputs.emplace_back(*kernel, x.data(), n, cols, packing).rows(n, packing);
            const size_t stride = matrix.padded_rows();
            expected.emplace_back(n * stride);
            outs.emplace_back(n * stride);
            Epilogue epilogue{.out = expected.back().data(), .stride = stride};
            const Quantized own(*kernel, x.data(), n, cols, matrix.packing());
            multiply(*kernel, {{&matrix, {n, cols, x.data(), own.rows(n, matrix.packing())}, epilogue}}, 1);
            epilogue.out = outs.back().data();
            products.push_back({&matrix, {n, cols, x.data(), rows}, epilogue});
        }
        for (const int num_threads : {1, 2, 3, 7}) {
            for (const Array<float>& out : outs) {
                std::fill_n(out.data(), out.size(), NAN);
            }
            multiply(*kernel, products, num_threads);
            for (size_t i = 0; i < outs.size(); ++i) {
                CHECK(outs[i].same(expected[i]));
            }
        }
    }
}

void test_orders() {
    // Two heads of 10 rows, 6 of which rotate, and then another tensor.
    const RowOrder order = stacked(halves_of_pairs(20, 10, 6), in_order(3));
    const RowOrder expected = {0, 2, 4, 1, 3, 5, 6, 7, 8, 9, 10, 12, 14, 11, 13, 15, 16, 17, 18, 19, 20, 21, 22};
    CHECK(order == expected);
    CHECK(stacked(gate_in_turns(2), in_order(1)).back() == 4);
    const int cols = 32;
    for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_Q8_0}) {
        const RandomWeights weights(type, 23, cols);
        const size_t row_bytes = ggml_row_size(type, cols);
        const Array<uint8_t> storage(PackedMatrix::packed_bytes(type, 23, cols));
        const PackedMatrix matrix(type, cols, reader(weights, row_bytes), order, storage.data(), 1);
        Array<float> row(cols), source(cols);
        for (int i = 0; i < 23; ++i) {
            matrix.row(i, row.data());
            const Array<uint8_t> alone(PackedMatrix::packed_bytes(type, 1, cols));
            pack_rows(type, 1, cols, &weights[order[i] * row_bytes], alone.data(), 1).row(0, source.data());
            CHECK(row.same(source));
        }
    }
}

// Packed weights are kept in files. Whoever changes what is expected here changes PackedMatrix::kVersion too.
void test_layout() {
    CHECK(PackedMatrix::kVersion == 1);
    const std::map<ggml_type, uint64_t> expected = {
        {GGML_TYPE_F32, 0x41d9905d6bae305cu},    {GGML_TYPE_F16, 0x7eb12941808e8bf8u},
        {GGML_TYPE_BF16, 0x7eb12941808e8bf8u},   {GGML_TYPE_Q8_0, 0x853954c945c4947bu},
        {GGML_TYPE_Q4_0, 0x57b7f116c2ffebd4u},   {GGML_TYPE_Q4_1, 0xac63b68b0a78aac6u},
        {GGML_TYPE_Q5_0, 0x13d7b964bd9a5fb8u},   {GGML_TYPE_Q5_1, 0x44aeb3a3d1fe1695u},
        {GGML_TYPE_Q4_K, 0x9ab5deb1a72a5adau},   {GGML_TYPE_Q5_K, 0x8e413a2b203a4638u},
        {GGML_TYPE_Q6_K, 0x0ec1cf4c939aec16u},   {GGML_TYPE_IQ4_NL, 0x57b7f116c2ffebd4u},
        {GGML_TYPE_IQ4_XS, 0xe6b6112e2247d86eu}, {GGML_TYPE_MXFP4, 0x9c3a178a71168405u},
        {GGML_TYPE_Q3_K, 0x08a4a215d91ec7ccu},   {GGML_TYPE_Q2_K, 0x54b66d05edb7f4feu},
    };
    // A row of zeros before row 0, too.
    const RowOrder order = stacked({-1, 0, 1}, gate_in_turns(22));
    for (const auto& [type, layout] : expected) {
        const int cols =
            type < GGML_TYPE_Q4_0 || type == GGML_TYPE_BF16 ? 33 : 3 * static_cast<int>(ggml_blck_size(type));
        std::mt19937 bits(1);  // the same everywhere, which distributions are not
        const size_t row_bytes = ggml_row_size(type, cols);
        const Array<uint8_t> source(46 * row_bytes);
        std::generate_n(source.data(), source.size(), [&] { return static_cast<uint8_t>(bits() >> 24); });
        const Array<uint8_t> storage(PackedMatrix::packed_bytes(type, static_cast<int>(order.size()), cols));
        std::fill_n(storage.data(), storage.size(), uint8_t(255));
        const PackedMatrix matrix(type, cols, reader(source, row_bytes), order, storage.data(), 2);
        CHECK(digest(storage.data(), storage.size()) == layout);
    }
}

void test_matrices() {
    for (const int rows : {1, 16, 17, 50, 97}) {
        for (const int cols : {1, 31, 32, 33, 80}) {
            for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16}) {
                test_matrix(type, rows, cols);
            }
        }
        for (const auto& [type, fields] : kIntegerTypes) {
            test_matrix(type, rows, static_cast<int>(ggml_blck_size(type)));
            test_matrix(type, rows, 3 * static_cast<int>(ggml_blck_size(type)));
            test_gated(type, rows, static_cast<int>(ggml_blck_size(type)));
        }
        test_gated(GGML_TYPE_F32, rows, 33);
        test_gated(GGML_TYPE_F16, rows, 33);
    }
    for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16}) {
        test_extremes(type);
    }
    for (const auto& [type, fields] : kIntegerTypes) {
        test_many_rows(type);
        test_extremes(type);
    }
    CHECK_THROWS(std::invalid_argument, packing_of(GGML_TYPE_IQ3_S));
    CHECK_THROWS(std::invalid_argument, PackedMatrix(GGML_TYPE_Q8_0, 1, 33, nullptr));
}

// ---- Rows ----

// Exactly as many numbers as there are, with and without bias, also in place.
void test_norms(const Kernel& kernel, int cols) {
    const Kernel& scalar = find_kernel("scalar");
    const Array<float> x(cols), weight(cols), y(cols), twin(cols);
    std::generate_n(x.data(), cols, [] { return random_float(3); });
    std::generate_n(weight.data(), cols, [] { return random_float(); });
    double mean = 0, squares = 0;
    for (int i = 0; i < cols; ++i) {
        mean += x[i] / cols;
        squares += double(x[i]) * x[i] / cols;
    }
    kernel.rms_norm(x.data(), weight.data(), 1e-5f, cols, cols, y.data());
    scalar.rms_norm(x.data(), weight.data(), 1e-5f, cols, cols, twin.data());
    CHECK(y.same(twin));
    for (int i = 0; i < cols; ++i) {
        CHECK(std::fabs(y[i] - x[i] / std::sqrt(squares + 1e-5) * weight[i]) < 1e-5);
    }
    kernel.layer_norm(x.data(), weight.data(), nullptr, 1e-5f, cols, cols, y.data());
    scalar.layer_norm(x.data(), weight.data(), nullptr, 1e-5f, cols, cols, twin.data());
    CHECK(y.same(twin));
    for (int i = 0; i < cols; ++i) {
        const double deviation = std::sqrt(std::max(0.0, squares - mean * mean) + 1e-5);
        CHECK(std::fabs(y[i] - (x[i] - mean) / deviation * weight[i]) < 1e-3);
    }
    kernel.layer_norm(x.data(), weight.data(), nullptr, 1e-5f, cols, cols, x.data());
    CHECK(x.same(y));
    kernel.rms_norm(x.data(), weight.data(), 1e-5f, cols, cols, y.data());
    kernel.rms_norm(x.data(), weight.data(), 1e-5f, cols, cols, x.data());
    CHECK(x.same(y));
    const Array<float> wide(cols + 40);
    std::fill_n(wide.data(), wide.size(), 7.0f);
    kernel.rms_norm(x.data(), weight.data(), 1e-5f, cols, cols + 40, wide.data());
    CHECK(std::all_of(wide.data() + cols, wide.data() + wide.size(), [](float v) { return v == 0; }));
}

void test_convolution(const Kernel& kernel, int channels) {
    const int width = 3;
    const size_t stride = padded(channels, kBlock);
    const Array<float> weights(width * stride), x(width * channels), gate(channels), y(channels), twin(channels);
    const Array<float> bias(channels);
    randomize(weights, x, gate, bias);
    const float* inputs[] = {&x[0], &x[channels], &x[2 * channels]};
    Convolution convolution{width, channels, inputs, weights.data(), stride, gate.data(), y.data(), bias.data()};
    kernel.convolve(convolution);
    convolution.out = twin.data();
    find_kernel("scalar").convolve(convolution);
    CHECK(y.same(twin));
    for (int i = 0; i < channels; ++i) {
        double sum = bias[i];
        for (int row = 0; row < width; ++row) {
            sum += double(weights[row * stride + i]) * inputs[row][i];
        }
        CHECK(std::fabs(y[i] - gate[i] * sum) < 1e-5);
    }
}

// Two steps from one tile, of which the second is made anew from its delta.
void test_delta(const Kernel& kernel, int keys) {
    const size_t tile = size_t(keys) * kLanes;
    const Array<float> tiles(3 * tile), twins(3 * tile), key(keys), query(keys), value(kLanes), delta(kLanes);
    const Array<float> out(kLanes), twin_delta(kLanes), twin_out(kLanes);
    for (const Array<float>* values : {&tiles, &key, &query, &value}) {
        std::generate_n(values->data(), values->size(), [] { return random_float(0.3f); });
    }
    std::copy_n(tiles.data(), tiles.size(), twins.data());
    std::vector<double> state(tiles.data(), tiles.data() + tile);
    const float decay = 0.9f, rate = 0.7f, scale = 0.25f;
    const auto run = [&](const Kernel& which, const Array<float>& on, const Array<float>& change,
                         const Array<float>& result) {
        const DeltaStep steps[] = {
            {0, 1, decay, rate, scale, key.data(), query.data(), value.data(), change.data(), result.data()},
            {0, 2, decay, rate, scale, key.data(), query.data(), nullptr, change.data(), nullptr},
            {0, 0, decay, rate, scale, key.data(), query.data(), nullptr, change.data(), nullptr}};
        which.delta(steps, 3, keys, on.data());
    };
    run(kernel, tiles, delta, out);
    run(find_kernel("scalar"), twins, twin_delta, twin_out);
    CHECK(tiles.same(twins) && delta.same(twin_delta) && out.same(twin_out));
    for (int copy = 0; copy < 2; ++copy) {
        CHECK(std::equal(&tiles[copy * tile], &tiles[copy * tile] + tile, &tiles[2 * tile]));
    }
    for (int lane = 0; lane < kLanes; ++lane) {
        double found = 0, sum = 0;
        for (int i = 0; i < keys; ++i) {
            found += decay * state[i * kLanes + lane] * key[i];
        }
        const double change = rate * (value[lane] - found);
        CHECK(std::fabs(delta[lane] - change) < 1e-4);
        for (int i = 0; i < keys; ++i) {
            const double kept = decay * state[i * kLanes + lane] + change * key[i];
            CHECK(std::fabs(tiles[i * kLanes + lane] - kept) < 1e-4);
            sum += kept * query[i];
        }
        CHECK(std::fabs(out[lane] - scale * sum) < 1e-3);
    }
}

void test_gates(const Kernel& kernel, int n) {
    for (const bool silu : {false, true}) {
        const Array<float> gate(n), x(n), twin(n);
        std::generate_n(gate.data(), n, [] { return random_float(); });
        std::fill_n(x.data(), n, 0.5f);
        std::fill_n(twin.data(), n, 0.5f);
        kernel.open(gate.data(), silu, n, x.data());
        find_kernel("scalar").open(gate.data(), silu, n, twin.data());
        CHECK(x.same(twin));
        for (int i = 0; i < n; ++i) {
            CHECK(std::fabs(x[i] - 0.5 * (silu ? gate[i] : 1) / (1 + std::exp(-double(gate[i])))) < 1e-6);
        }
    }
}

void test_rotation(const Kernel& kernel, int half) {
    const Array<float> x(2 * half), twin(2 * half), cosines(half), sines(half);
    std::generate_n(x.data(), x.size(), [] { return random_float(); });
    std::copy_n(x.data(), x.size(), twin.data());
    std::vector<double> expected(2 * half);
    for (int i = 0; i < half; ++i) {
        const double angle = random_float(3);
        cosines[i] = static_cast<float>(std::cos(angle));
        sines[i] = static_cast<float>(std::sin(angle));
        expected[i] = x[i] * std::cos(angle) - x[half + i] * std::sin(angle);
        expected[half + i] = x[i] * std::sin(angle) + x[half + i] * std::cos(angle);
    }
    kernel.rotate(x.data(), half, cosines.data(), sines.data());
    find_kernel("scalar").rotate(twin.data(), half, cosines.data(), sines.data());
    CHECK(x.same(twin));
    for (int i = 0; i < 2 * half; ++i) {
        CHECK(std::fabs(x[i] - expected[i]) < 1e-6);
    }
}

void test_row_functions() {
    const Kernel& scalar = find_kernel("scalar");
    for (const Kernel* kernel : available_kernels()) {
        for (int cols = 1; cols <= 70; ++cols) {
            const int width = padded(cols, kBlock);
            const Array<float> x(width), weight(width), bias(width), y(width), expected(width);
            std::generate_n(x.data(), cols, [] { return random_float(3); });
            std::generate_n(weight.data(), cols, [] { return random_float(); });
            std::generate_n(bias.data(), cols, [] { return random_float(); });
            kernel->layer_norm(x.data(), weight.data(), bias.data(), 1e-5f, cols, width, y.data());
            scalar.layer_norm(x.data(), weight.data(), bias.data(), 1e-5f, cols, width, expected.data());
            CHECK(y.same(expected));
            CHECK(std::all_of(y.data() + cols, y.data() + width, [](float v) { return v == 0; }));
            test_norms(*kernel, cols);
            test_rotation(*kernel, cols);
            test_convolution(*kernel, cols);
            test_gates(*kernel, cols);

            const Array<uint16_t> halves(cols), twin(cols);
            const Array<float> floats(cols);
            std::generate_n(floats.data(), cols, [] { return random_float(std::ldexp(1.0f, random_int(-30, 18))); });
            kernel->to_f16(floats.data(), cols, halves.data());
            scalar.to_f16(floats.data(), cols, twin.data());
            CHECK(halves.same(twin));
            for (int i = 0; i < cols; ++i) {
                CHECK(halves[i] == ggml_fp32_to_fp16(floats[i]));
            }
        }
        for (const int keys : {16, 48, 128}) {
            test_delta(*kernel, keys);
        }
        // Numbers that arithmetic stumbles over.
        for (const float odd : {NAN, INFINITY, -INFINITY, 3e38f, 1e-40f, 0.0f}) {
            const Array<float> x(64), twin(64), maxima(1);
            std::generate_n(x.data(), 64, [] { return random_float(); });
            x[random_int(0, 63)] = odd;
            for (const Packing packing : {Packing::q8_0, Packing::q4_k, Packing::q6_k, Packing::q3_k, Packing::q2_k}) {
                const Quantized a(*kernel, x.data(), 1, 64, packing), b(scalar, x.data(), 1, 64, packing);
                CHECK(a.quants.same(b.quants));
                CHECK(a.factors.same(b.factors));
                CHECK(std::isnan(odd) == std::isnan(a.factors[0].scale + a.factors[1].scale));
                for (int block = 0; block < (packing == Packing::q2_k ? 0 : 2); ++block) {
                    CHECK(a.factors[block].offsets[0] == b.factors[block].offsets[0]);
                    CHECK(a.factors[block].offsets[1] == b.factors[block].offsets[1]);
                }
            }
            CHECK(kernel->run_max(x.data(), kRun, maxima.data()) == std::isfinite(odd));
            float most = -INFINITY;
            for (int i = 0; i < kRun; ++i) {
                most = x[i] > most ? x[i] : most;
            }
            CHECK(maxima[0] == most);
            const float sum = kernel->sum_exp(x.data(), 64, most, 1), expected = scalar.sum_exp(x.data(), 64, most, 1);
            CHECK(std::memcmp(&sum, &expected, sizeof(sum)) == 0);
        }
        for (const size_t bytes : {size_t(0), size_t(63), size_t(64), size_t(1000)}) {
            kernel->read(Array<uint8_t>(bytes).data(), bytes);
        }
        CHECK(kernel->dots(0) == 0);
        CHECK(kernel->dots(3) > 0);
    }
    CHECK_THROWS(std::invalid_argument, find_kernel("abacus"));
}

// ---- Noise ----

double exponential_time(uint32_t word) {
    return -std::log((word + 0.5) * 0x1p-32);
}

using Words = std::array<uint32_t, 4>;

// Words of Philox4x32-10, the arithmetic of Salmon et al. 2011 word by word.
Words philox(uint64_t seed, int64_t position, uint32_t counter, uint32_t kind) {
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    Words c = {counter, kind, static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
        c = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ key[0], static_cast<uint32_t>(b),
             static_cast<uint32_t>(a >> 32) ^ c[3] ^ key[1], static_cast<uint32_t>(a)};
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return c;
}

// Against libm in double; the same bits from every kernel, in any company; and what the tokens of a run can have.
void test_noise() {
    // Their known answers.
    CHECK((philox(0, 0, 0, 0) == Words{0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8}));
    CHECK((philox(~0ull, -1, ~0u, ~0u) == Words{0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD}));
    CHECK((philox(0x299F31D0A4093822, 0x0370734413198A2E, 0x243F6A88, 0x85A308D3) ==
           Words{0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1}));

    const Kernel& scalar = find_kernel("scalar");
    constexpr int num_runs = 48, num_tokens = num_runs * kRun;
    std::vector<int32_t> tokens(num_tokens);
    std::iota(tokens.begin(), tokens.end(), 0);
    tokens.push_back(INT32_MAX);
    std::generate_n(std::back_inserter(tokens), 200, [] { return random_int(0, INT32_MAX); });
    const auto any = [] { return uint64_t(random_bits()) << 32 | random_bits(); };
    for (const uint64_t seed : {uint64_t(0), uint64_t(1) << 40, ~uint64_t(0), any(), any()}) {
        for (const int64_t position : {int64_t(0), int64_t(7), (int64_t(1) << 50) + 3, int64_t(any() >> 2)}) {
            const Array<float> expected(tokens.size()), most(num_runs);
            scalar.noise(seed, position, tokens.data(), static_cast<int>(tokens.size()), expected.data());
            scalar.run_noise(seed, position, num_runs, most.data());
            for (size_t i = 0; i < tokens.size(); ++i) {
                const uint32_t token = tokens[i];
                const auto run = philox(seed, position, token / kRun, 1);
                const double later = exponential_time(philox(seed, position, token / 4, 0)[token % 4]);
                const double time = exponential_time(run[0]) / kRun + (run[1] % kRun == token % kRun ? 0 : later);
                CHECK(std::fabs(expected[i] + std::log(time)) <= 2e-7 * (1 + std::fabs(expected[i])));
            }
            for (int run = 0; run < num_runs; ++run) {
                const float best = *std::max_element(&expected[run * kRun], &expected[run * kRun] + kRun);
                CHECK(best <= most[run] && most[run] < best + 2e-4f);
            }
            for (const Kernel* kernel : available_kernels()) {
                const Array<float> out(tokens.size()), bounds(num_runs);
                kernel->noise(seed, position, tokens.data(), static_cast<int>(tokens.size()), out.data());
                kernel->run_noise(seed, position, num_runs, bounds.data());
                CHECK(out.same(expected) && bounds.same(most));
                const int first = random_int(0, 40), n = random_int(1, 40);
                kernel->noise(seed, position, &tokens[first], n, out.data());
                CHECK(same(out.data(), &expected[first], n));
            }
        }
    }
}

// The maxima of a product's outputs, found while they are made.
void test_maxima() {
    constexpr int n = 5, cols = 64;
    for (const int rows : {1, 40, 64, 70, 1000}) {
        const RandomWeights source(GGML_TYPE_Q8_0, rows, cols);
        const Array<uint8_t> storage(PackedMatrix::packed_bytes(GGML_TYPE_Q8_0, rows, cols));
        const PackedMatrix matrix = pack_rows(GGML_TYPE_Q8_0, rows, cols, source.data(), storage.data(), 1);
        const Array<float> x(n * cols), bias(matrix.padded_rows());
        std::generate_n(x.data(), x.size(), [] { return random_float(); });
        std::generate_n(bias.data(), bias.size(), [] { return -std::fabs(random_float()); });
        const int stride = padded(rows, kRun), runs = stride / kRun;
        for (const float odd : {0.0f, NAN, INFINITY, -INFINITY}) {
            const int at = random_int(0, rows - 1);
            const float before = bias[at];
            bias[at] = odd == 0 ? before : odd;
            for (const Kernel* kernel : available_kernels()) {
                const Quantized input(*kernel, x.data(), n, cols, Packing::q8_0);
                const Activations activations{n, cols, x.data(), input.rows(n, Packing::q8_0)};
                const Array<float> alone(n * matrix.padded_rows());
                const size_t alone_stride = matrix.padded_rows();
                Epilogue epilogue{.bias = bias.data(), .out = alone.data(), .stride = alone_stride};
                multiply(*kernel, {{&matrix, activations, epilogue}}, 1);
                for (const int num_threads : {1, 2, 3, 7}) {
                    const Array<float> out(n * stride), maxima(n * runs);
                    std::fill_n(out.data(), out.size(), NAN);
                    epilogue.out = out.data();
                    epilogue.stride = stride;
                    multiply(*kernel, {{&matrix, activations, epilogue, {}, nullptr, maxima.data()}}, num_threads);
                    for (int i = 0; i < n; ++i) {
                        const float* row = &out[i * stride];
                        CHECK(same(row, &alone[i * alone_stride], rows));
                        CHECK(std::all_of(row + rows, row + stride, [](float v) { return v == -INFINITY; }));
                        const float* own = &maxima[i * runs];
                        CHECK(std::all_of(own, own + runs, [](float v) { return std::isfinite(v); }) == (odd == 0));
                        for (int run = 0; odd == 0 && run < runs; ++run) {
                            CHECK(own[run] == *std::max_element(row + run * kRun, row + (run + 1) * kRun));
                        }
                    }
                }
            }
            bias[at] = before;
        }
    }
}

// ---- Cache and attention ----

void test_cache() {
    for (const Kernel* kernel : available_kernels()) {
        for (const int dim : {1, 7, 16, 33, 64, 80, 130}) {
            const int heads = 3, cells = 37;
            KvCache cache(KvType::f16, heads, dim, cells);
            cache.commit(0, cells);
            CHECK(cache.num_cells() == 48);
            const auto key_of = [](int head, int cell, int d) {
                return static_cast<float>(head * 200 + cell * 3 + d % 3);
            };
            const auto value_of = [&](int head, int cell, int d) { return -key_of(head, cell, d) - 0.5f; };
            const auto check = [&](int cell, int holds) {
                for (int head = 0; head < heads; ++head) {
                    const auto* keys = reinterpret_cast<const uint16_t*>(cache.keys(head));
                    const auto* values =
                        reinterpret_cast<const uint16_t*>(cache.values(head)) + cell * padded(dim, kLanes);
                    for (int d = 0; d < dim; ++d) {
                        const uint16_t key = keys[(cell / kLanes * dim + d) * kLanes + cell % kLanes];
                        CHECK(key == ggml_fp32_to_fp16(key_of(head, holds, d)));
                        CHECK(values[d] == ggml_fp32_to_fp16(value_of(head, holds, d)));
                    }
                }
            };
            const Array<float> key(dim), value(dim);
            for (int head = 0; head < heads; ++head) {
                for (int cell = 0; cell < cache.num_cells(); ++cell) {
                    for (int d = 0; d < dim; ++d) {
                        key[d] = key_of(head, cell, d);
                        value[d] = value_of(head, cell, d);
                    }
                    cache.store_key(*kernel, head, cell, key.data());
                    cache.store_value(*kernel, head, cell, value.data());
                }
            }
            for (int cell = 0; cell < cache.num_cells(); ++cell) {
                check(cell, cell);
            }
            cache.move(47, 0);
            cache.move(20, 19);
            cache.move(5, 5);
            for (int cell = 0; cell < cache.num_cells(); ++cell) {
                check(cell, cell == 0 ? 47 : cell == 19 ? 20 : cell);
            }
        }
    }
}

// Moved or stored there, a cell holds the same bytes.
void test_eight_bit_cache() {
    const Kernel& kernel = find_kernel("");
    for (const int dim : {16, 32, 40, 64}) {
        KvCache moved(KvType::q8_0, 2, dim, 64), stored(KvType::q8_0, 2, dim, 64);
        moved.commit(0, 64);
        stored.commit(0, 64);
        CHECK(moved.cell_bytes() < (dim % kBlock ? 1.2 : 0.57) * KvCache(KvType::f16, 2, dim, 64).cell_bytes());
        const Array<float> key(dim), value(dim);
        for (int head = 0; head < 2; ++head) {
            randomize(key, value);
            for (const auto& [cache, cell] : {std::pair(&moved, 37), std::pair(&stored, 5), std::pair(&stored, 37)}) {
                cache->store_key(kernel, head, cell, key.data());
                cache->store_value(kernel, head, cell, value.data());
            }
        }
        moved.move(37, 5);
        const size_t bytes = moved.cell_bytes() / 2 * moved.num_cells();
        for (int head = 0; head < 2; ++head) {
            CHECK(std::memcmp(moved.keys(head), stored.keys(head), bytes) == 0);
        }
    }
}

struct AttentionCase {
    int dim, committed, n, kv_heads, group, window;
    float softcap;
    int half;
    bool norms;
    KvType type = KvType::f16;
};

// What a cache keeps of a vector.
std::vector<float> kept(KvType type, const float* x, int dim) {
    std::vector<float> result(dim);
    for (int first = 0; first < dim; first += kBlock) {
        const int last = std::min(dim, first + kBlock);
        float largest = 0;
        for (int d = first; d < last; ++d) {
            largest = std::max(largest, std::fabs(x[d]));
        }
        const float scale = ggml_fp16_to_fp32(ggml_fp32_to_fp16(largest / 127)),
                    inverse = largest > 0 ? 127 / largest : 0;
        for (int d = first; d < last; ++d) {
            result[d] = type == KvType::f16 ? ggml_fp16_to_fp32(ggml_fp32_to_fp16(x[d]))
                                            : scale * std::nearbyint(x[d] * inverse);
        }
    }
    return result;
}

// Random trees over a random cache: against sums in double, for every kernel and number of threads, and row by row.
void test_attention(const AttentionCase& c) {
    const Kernel& scalar = find_kernel("scalar");
    const int cells = c.committed + c.n, heads = c.kv_heads * c.group, stride = (heads + 2 * c.kv_heads) * c.dim;
    const auto half_exact = [] { return ggml_fp16_to_fp32(ggml_fp32_to_fp16(random_float())); };

    AttentionLayer how;
    how.num_heads = heads;
    how.num_kv_heads = c.kv_heads;
    how.head_dim = c.dim;
    how.scale = 0.8f / std::sqrt(static_cast<float>(c.dim));
    how.softcap = c.softcap;
    how.window = c.window;
    const Array<float> q_norm(heads * c.dim), k_norm(c.kv_heads * c.dim);
    randomize(q_norm, k_norm);
    if (c.norms) {
        how.q_norm = q_norm.data();
        how.k_norm = k_norm.data();
        how.own_norms = how.layer_norms = c.dim % 2;
        how.norm_epsilon = 1e-5f;
    }

    std::vector<std::vector<int32_t>> tails(c.n);
    std::vector<RowContext> contexts(c.n);
    for (int i = 0; i < c.n; ++i) {
        const int parent = random_int(-1, i - 1);
        contexts[i].direct = parent < 0 ? c.committed : contexts[parent].direct;
        if (parent >= 0) {
            tails[i] = tails[parent];
        }
        contexts[i].length = (parent < 0 ? c.committed : contexts[parent].length) + 1;
        if (tails[i].empty() && contexts[i].length == c.committed + i + 1) {
            contexts[i].direct = contexts[i].length;
        } else {
            tails[i].push_back(c.committed + i);
        }
        contexts[i].tail = tails[i].data();
    }
    const Array<float> qkv(size_t(c.n) * stride), row_scale(c.n), cosines(c.n * c.half), sines(c.n * c.half);
    const Array<float> keys(size_t(c.kv_heads) * cells * c.dim), values(keys.size());
    std::generate_n(qkv.data(), qkv.size(), half_exact);
    std::generate_n(keys.data(), keys.size(), half_exact);
    std::generate_n(values.data(), values.size(), half_exact);
    std::generate_n(row_scale.data(), c.n, [] { return 1 + std::fabs(random_float(0.1f)); });
    for (size_t i = 0; i < cosines.size(); ++i) {
        const double angle = random_float(3);
        cosines[i] = static_cast<float>(std::cos(angle));
        sines[i] = static_cast<float>(std::sin(angle));
    }

    // What becomes of q and k before they meet.
    const Array<float> prepared(qkv.size());
    std::copy_n(qkv.data(), qkv.size(), prepared.data());
    for (int i = 0; i < c.n; ++i) {
        for (int head = 0; head < heads + c.kv_heads; ++head) {
            float* x = &prepared[size_t(i) * stride + size_t(head) * c.dim];
            const float* norm = head < heads ? q_norm.data() : k_norm.data();
            norm += how.own_norms ? (head < heads ? head : head - heads) * c.dim : 0;
            if (c.norms && how.layer_norms) {
                scalar.layer_norm(x, norm, nullptr, 1e-5f, c.dim, c.dim, x);
            } else if (c.norms) {
                scalar.rms_norm(x, norm, 1e-5f, c.dim, c.dim, x);
            }
            scalar.rotate(x, c.half, &cosines[i * c.half], &sines[i * c.half]);
        }
    }

    const size_t out_stride = padded(heads * c.dim, kBlock);
    // In a pass with others like it, of which every other one has its rows in two segments.
    const auto attend = [&](const Kernel& kernel, int first_row, int num_threads, int texts, const Array<float>& out,
                            const Quantized* quantized) {
        std::vector<std::unique_ptr<KvCache>> caches;
        AttentionRows rows;
        std::vector<RowContext> all_contexts;
        const Array<float> mutated(texts * qkv.size()), all_cosines(texts * cosines.size()),
            all_sines(texts * sines.size()), all_scales(texts * c.n);
        for (int text = 0; text < texts; ++text) {
            caches.push_back(std::make_unique<KvCache>(c.type, c.kv_heads, c.dim, cells));
            KvCache& cache = *caches.back();
            cache.commit(0, cells);
            for (int head = 0; head < c.kv_heads; ++head) {
                for (int cell = 0; cell < c.committed; ++cell) {
                    const size_t at = (size_t(head) * cells + cell) * c.dim;
                    cache.store_key(scalar, head, cell, &keys[at]);
                    cache.store_value(scalar, head, cell, &values[at]);
                }
            }
            const int half = text % 2 * c.n / 2;
            if (half > 0) {
                rows.segments.push_back({&cache, text * c.n, half, c.committed});
            }
            rows.segments.push_back({&cache, text * c.n + half, c.n - half, c.committed + half});
            all_contexts.insert(all_contexts.end(), contexts.begin(), contexts.end());
            std::copy_n(qkv.data(), qkv.size(), mutated.data() + text * qkv.size());
            std::copy_n(cosines.data(), cosines.size(), all_cosines.data() + text * cosines.size());
            std::copy_n(sines.data(), sines.size(), all_sines.data() + text * sines.size());
            std::copy_n(row_scale.data(), c.n, all_scales.data() + text * c.n);
        }
        const KvCache& cache = *caches.back();
        AttentionScratch scratch(num_threads, c.dim);
        scratch.most_partials = num_threads % 2 ? scratch.most_partials : 1;
        rows.n = texts * c.n;
        rows.first_row = first_row;
        rows.contexts = all_contexts.data();
        rows.half = c.half;
        rows.cos = all_cosines.data();
        rows.sin = all_sines.data();
        rows.row_scale = c.norms ? all_scales.data() : nullptr;
        rows.qkv = mutated.data();
        rows.stride = stride;
        rows.k_at = heads * c.dim;
        rows.v_at = rows.k_at + c.kv_heads * c.dim;
        for (int at = 0; at < stride; at += c.dim) {
            prepare_head(kernel, how, rows, at, 0, rows.n);
        }
        const QuantizedRows next = quantized ? quantized->rows(rows.n - first_row, Packing::q8_0) : QuantizedRows();
        tree_attention(kernel, num_threads, how, rows, out.data(), out_stride, next, scratch);
        for (int head = 0; head < c.kv_heads; ++head) {
            for (int i = 0; i < c.n; ++i) {
                const int cell = c.committed + i;
                const float* key = &prepared[size_t(i) * stride + size_t(heads + head) * c.dim];
                const float* value = &qkv[size_t(i) * stride + size_t(heads + c.kv_heads + head) * c.dim];
                const auto* keys = reinterpret_cast<const uint16_t*>(cache.keys(head));
                const auto* values = reinterpret_cast<const uint16_t*>(cache.values(head));
                for (int d = 0; c.type == KvType::f16 && d < c.dim; ++d) {
                    CHECK(keys[(cell / kLanes * c.dim + d) * kLanes + cell % kLanes] == ggml_fp32_to_fp16(key[d]));
                    CHECK(values[cell * padded(c.dim, kLanes) + d] == ggml_fp32_to_fp16(value[d]));
                }
            }
        }
    };

    const Array<float> expected(c.n * out_stride);
    std::fill_n(expected.data(), expected.size(), NAN);
    attend(scalar, 0, 1, 1, expected, nullptr);
    for (int i = 0; i < c.n; ++i) {
        const int first = c.window > 0 ? std::max(0, contexts[i].length - c.window) : 0;
        for (int head = 0; head < heads; ++head) {
            const float* exact = &prepared[size_t(i) * stride + size_t(head) * c.dim];
            const std::vector<float> query =
                c.type == KvType::f16 ? std::vector<float>(exact, exact + c.dim) : kept(c.type, exact, c.dim);
            std::vector<double> mixed(c.dim);
            double total = 0;
            for (int position = first; position < contexts[i].length; ++position) {
                const int cell =
                    position < contexts[i].direct ? position : contexts[i].tail[position - contexts[i].direct];
                const int kv_head = head / c.group, row = cell - c.committed;
                const size_t at = (size_t(kv_head) * cells + cell) * c.dim;
                const float* key =
                    row < 0 ? &keys[at] : &prepared[size_t(row) * stride + size_t(heads + kv_head) * c.dim];
                const float* value =
                    row < 0 ? &values[at] : &qkv[size_t(row) * stride + size_t(heads + c.kv_heads + kv_head) * c.dim];
                const std::vector<float> kept_key = kept(c.type, key, c.dim), kept_value = kept(c.type, value, c.dim);
                double score = 0;
                for (int d = 0; d < c.dim; ++d) {
                    score += double(query[d]) * kept_key[d];
                }
                score *= how.scale * (c.norms ? row_scale[i] : 1);
                score = c.softcap > 0 ? c.softcap * std::tanh(score / c.softcap) : score;
                const double weight = std::exp(score);
                total += weight;
                for (int d = 0; d < c.dim; ++d) {
                    mixed[d] += weight * kept_value[d];
                }
            }
            for (int d = 0; d < c.dim; ++d) {
                CHECK(std::fabs(mixed[d] / total - expected[i * out_stride + size_t(head) * c.dim + d]) < 1e-4);
            }
        }
        for (size_t column = size_t(heads) * c.dim; column < out_stride; ++column) {
            CHECK(expected[i * out_stride + column] == 0);
        }
    }
    for (const Kernel* kernel : available_kernels()) {
        for (const int num_threads : {1, 2, 3, 7}) {
            // Fewer rows need attention than are stored; another tile of rows must not change one.
            const int first_row = num_threads == 1 ? 0 : random_int(0, c.n);
            const Array<float> out((c.n - first_row) * out_stride);
            attend(*kernel, first_row, num_threads, 1, out, nullptr);
            CHECK(same(out.data(), expected.data() + first_row * out_stride, out.size()));
            const int texts = 4, first_text = num_threads % 4;
            const Array<float> crowd((texts - first_text) * expected.size());
            attend(*kernel, first_text * c.n, num_threads, texts, crowd, nullptr);
            for (int text = 0; text < texts - first_text; ++text) {
                CHECK(same(crowd.data() + text * expected.size(), expected.data(), expected.size()));
            }
        }
        if (c.dim % kBlock == 0) {
            const Array<float> out(c.n * out_stride);
            const Quantized handed(c.n, static_cast<int>(out_stride));
            attend(*kernel, 0, 3, 1, out, &handed);
            const Quantized twin(*kernel, out.data(), c.n, static_cast<int>(out_stride), Packing::q8_0);
            CHECK(handed.quants.same(twin.quants));
            CHECK(handed.factors.same(twin.factors));
        }
    }
}

void test_attentions() {
    for (const int dim : {1, 7, 16, 33, 64, 80, 130}) {
        for (const int committed : {0, 1, 15, 16, 100}) {
            for (const int n : {1, 3, 8, 21}) {
                test_attention({dim, committed, n, 1, 1, 0, 0, 0, false});
            }
        }
    }
    int turn = 0;
    for (const int kv_heads : {1, 2, 3}) {
        for (const int group : {1, 3, 4, 8}) {
            for (const int window : {0, 1, 2, 16, 21, 40}) {
                for (const int n : {1, 5, 12}) {
                    const int dim = std::array{32, 40, 17, 64, 80}[turn % 5];
                    const int half = std::array{0, dim / 2, dim / 4, 1}[turn / 2 % 4];
                    const int committed = std::array{0, 3, 37, 70}[turn / 3 % 4];
                    test_attention({dim, committed, n, kv_heads, group, window, turn % 3 ? 0 : 2.5f, half,
                                    turn % 4 == 1, turn % 5 < 2 ? KvType::q8_0 : KvType::f16});
                    ++turn;
                }
            }
        }
    }
    // Borders of chunks, within what is committed and within the tree.
    for (const int committed : {kChunk - 12, kChunk - 1, kChunk, 2 * kChunk - 5, 3 * kChunk + 100}) {
        for (const int window : {0, 7, kChunk, kChunk + 90}) {
            test_attention({turn % 2 ? 48 : 20, committed, turn % 2 ? 20 : 7, 2, 3, window, turn % 3 ? 0 : 2.5f, 4,
                            false, turn % 4 < 2 ? KvType::q8_0 : KvType::f16});
            ++turn;
        }
    }
}

// Where memory ends in the middle of a pass, the next one finds all it needs.
void test_memory_that_ends() {
    const int dim = 16, kv_heads = 40;
    std::vector<float> qkv(3 * kv_heads * dim, 1.0f), out(kv_heads * dim);
    const RowContext context{1, 1, nullptr};
    KvCache cache(KvType::f16, kv_heads, dim, 1);
    cache.commit(0, 1);
    AttentionLayer how;
    how.num_heads = how.num_kv_heads = kv_heads;
    how.head_dim = dim;
    AttentionRows rows;
    rows.n = 1;
    rows.segments = {{&cache, 0, 1, 0}};
    rows.contexts = &context;
    rows.qkv = qkv.data();
    rows.stride = qkv.size();
    rows.k_at = kv_heads * dim;
    rows.v_at = 2 * kv_heads * dim;
    for (int at = 0; at < 3 * kv_heads * dim; at += dim) {
        prepare_head(find_kernel("scalar"), how, rows, at, 0, 1);
    }
    const auto attend = [&](AttentionScratch& scratch) {
        tree_attention(find_kernel("scalar"), 1, how, rows, out.data(), out.size(), {}, scratch);
    };
    bool failed = true;
    for (int few = 0; failed; ++few) {
        AttentionScratch scratch(1, dim);
        allocations_left = few;
        try {
            attend(scratch);
            failed = false;
        } catch (const std::bad_alloc&) {
        }
        allocations_left = -1;
        std::fill(out.begin(), out.end(), 0.0f);
        attend(scratch);
        CHECK(std::all_of(out.begin(), out.end(), [](float x) { return x == 1; }));
        CHECK(few > 0 || failed);
    }
}

// What a kernel computes otherwise than all others is told.
void test_arithmetic() {
    for (const Kernel* kernel : available_kernels()) {
        check_arithmetic(*kernel);
    }
    Kernel broken = find_kernel("scalar");
    broken.rms_norm = [](const float* x, const float* weight, float eps, int cols, int padded_cols, float* y) {
        find_kernel("scalar").rms_norm(x, weight, eps, cols, padded_cols, y);
        y[3] = std::nextafter(y[3], 1.0f);
    };
    broken.matmul[int(Packing::q5_k)] = broken.matmul[int(Packing::q4_k)];  // whose weights are fewer
    std::string told;
    try {
        check_arithmetic(broken);
    } catch (const std::runtime_error& error) {
        told = error.what();
    }
    CHECK(told.find("(kernel scalar: Q5_K product, norm)") != std::string::npos);
    CHECK(told.find("-ffast-math") != std::string::npos);
}

// ---- Threads ----

void test_pool() {
    ThreadPool& pool = ThreadPool::shared();
    const auto run = [&](int count, int num_threads) {
        std::vector<int> calls(count);
        std::atomic<bool> bad_worker{false};
        pool.run(count, num_threads, [&](int i, int worker) {
            ++calls[i];
            if (worker < 0 || worker >= std::max(1, num_threads)) {
                bad_worker = true;
            }
        });
        return !bad_worker && std::all_of(calls.begin(), calls.end(), [](int n) { return n == 1; });
    };
    for (const int num_threads : {0, 1, 2, 3, 8, 40}) {
        for (const int count : {0, 1, 2, 3, 7, 100}) {
            for (int repeat = 0; repeat < 50; ++repeat) {
                CHECK(run(count, num_threads));
            }
        }
    }
    std::atomic<int> bad{0};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&, caller] {
            for (int repeat = 0; repeat < 500; ++repeat) {
                bad += !run(1 + (repeat + caller) % 9, 2 + caller);
                if (repeat % 100 == 0) {
                    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // so that workers fall asleep
                    pool.wake(2);
                }
            }
        });
    }
    for (std::thread& caller : callers) {
        caller.join();
    }
    CHECK(bad == 0);
    // Jobs that follow each other at once, for other threads and of other lengths than those before.
    for (int job = 0; job < 20000; ++job) {
        const int count = 2 + job % 3, num_threads = 2 + job % 4;
        int calls[4] = {};
        pool.run(count, num_threads, [&, job](int i, int worker) { calls[i] += worker < num_threads ? job + 1 : -1; });
        for (int i = 0; i < 4; ++i) {
            CHECK(calls[i] == (i < count ? job + 1 : 0));
        }
    }
    // Where there is no memory for another worker, those there are do the work.
    int calls = 0;
    allocations_left = 0;
    pool.run(2, ThreadPool::kMaxThreads, [&](int, int worker) { calls += worker >= 0; });
    allocations_left = -1;
    CHECK(calls == 2);
}

#ifndef _WIN32
// Workers that a job cannot use sleep on: there are no more switches than its own threads make.
void test_pool_sleepers() {
    constexpr int kJobs = 300;
    ThreadPool& pool = ThreadPool::shared();
    pool.run(64, 64, [](int, int) { std::this_thread::sleep_for(std::chrono::milliseconds(1)); });
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    std::atomic<int> calls{0};
    for (int job = 0; job < kJobs; ++job) {
        pool.run(8, 2, [&](int, int) { ++calls; });
    }
    getrusage(RUSAGE_SELF, &after);
    CHECK(calls == 8 * kJobs);
    CHECK(after.ru_nvcsw - before.ru_nvcsw < 10 * kJobs);
}
#endif

// A task that throws, on the caller and on workers: its exception arrives when none is running, and the pool goes on.
void test_pool_exceptions() {
    ThreadPool& pool = ThreadPool::shared();
    for (const int num_threads : {1, 2, 3, 8}) {
        for (int repeat = 0; repeat < 50; ++repeat) {
            std::atomic<int> running{0};
            const auto fail = [&](const auto& fails) {
                pool.run(40, num_threads, [&](int i, int worker) {
                    ++running;
                    const bool failing = fails(i, worker);
                    --running;
                    if (failing) {
                        throw std::out_of_range("task " + std::to_string(i));
                    }
                });
            };
            CHECK_THROWS(std::out_of_range, (fail([](int, int) { return true; }), 0));
            CHECK(running == 0);
            CHECK_THROWS(std::out_of_range, (fail([&](int i, int) { return i == repeat % 40; }), 0));
            CHECK(running == 0);
            std::atomic<int> calls{0};
            pool.run(40, num_threads, [&](int, int) { ++calls; });
            CHECK(calls == 40);
        }
    }
}

// Flush-to-zero and odd rounding of the thread that calls are neither seen by tasks nor lost.
void test_floats() {
    std::fesetround(FE_DOWNWARD);
    std::atomic<int> odd{0};
    {
        const FloatEnvironment pinned;
        ThreadPool::shared().run(64, 4, [&](int, int) {
            const volatile float one = 1, three = 3;
            odd += one / three != 0x1.555556p-2f;
        });
    }
    CHECK(odd == 0);
    CHECK(std::fegetround() == FE_DOWNWARD);
    std::fesetround(FE_TONEAREST);
}

#ifndef _WIN32
// A child has workers of its own, also while other threads keep the parent's busy.
void test_fork() {
    std::atomic<bool> stop{false};
    std::thread busy([&] {
        while (!stop) {
            ThreadPool::shared().run(50, 3, [](int, int) {});
        }
    });
    for (int repeat = 0; repeat < 10; ++repeat) {
        const pid_t child = fork();
        if (child == 0) {
            std::atomic<int> calls{0}, others{0};
            const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
            ThreadPool::shared().run(200, 3, [&](int, int worker) {
                ++calls;
                others += worker > 0;
                // A worker may need its time to begin where the machine is busy.
                while (others == 0 && std::chrono::steady_clock::now() < end) {
                    std::this_thread::sleep_for(std::chrono::milliseconds(1));
                }
            });
            _exit(calls == 200 && others > 0 ? 0 : 1);
        }
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    stop = true;
    busy.join();
}
#endif

}  // namespace

int main(int argc, char** argv) {
    std::vector<std::string> names;
    for (const Kernel* kernel : available_kernels()) {
        names.emplace_back(kernel->name);
    }
    CHECK(argc == 1 || names == std::vector<std::string>(argv + 1, argv + argc));
#ifndef __SANITIZE_THREAD__  // under which these take very long
    test_matrices();
    test_together();
    test_orders();
    test_layout();
    test_row_functions();
    test_noise();
    test_maxima();
    test_cache();
    test_eight_bit_cache();
    test_attentions();
    test_memory_that_ends();
    test_arithmetic();
#if !defined(PYSTAGED_EMULATED) && !defined(_WIN32)  // neither the sanitizer nor qemu has threads in fork's children
    test_fork();
#endif
#endif
    test_pool();
#ifndef _WIN32
    test_pool_sleepers();
#endif
    test_pool_exceptions();
    test_floats();
    std::fprintf(stderr, failures ? "%d checks failed\n" : "all checks passed\n", failures);
    return failures ? 1 : 0;
}
