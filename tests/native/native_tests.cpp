// Tests of the engine for a build with sanitizers: native_tests MODEL.gguf, a small model that may be of any type.
//
// Buffers are exactly as long as their contracts say, so that a read or write past them is caught.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "error.h"
#include "kv_cache.h"
#include "packed_matrix.h"
#include "sampler.h"
#include "session.h"
#include "thread_pool.h"
#include "tokenizer.h"

using namespace pystaged;

namespace {

int failures = 0;

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            if (++failures == 20) {                                              \
                std::exit(1);                                                    \
            }                                                                    \
        }                                                                        \
    } while (false)

#define CHECK_THROWS(kind, expression) \
    do {                               \
        bool threw = false;            \
        try {                          \
            (void)(expression);        \
        } catch (const kind& error) {  \
            threw = *error.what();     \
        } catch (...) {                \
        }                              \
        CHECK(threw && #expression);   \
    } while (false)

std::mt19937 random_bits(1);

int random_int(int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random_bits);
}

float random_float(float deviation = 1) {
    return std::normal_distribution<float>(0, deviation)(random_bits);
}

// Aligned as the engine's own memory is, and not a byte longer than asked for.
template <class T>
class Array {
public:
    explicit Array(size_t size)
        : size_(size), data_(static_cast<T*>(::operator new[](size * sizeof(T), std::align_val_t(64)))) {
        std::fill_n(data_, size, T());
    }
    ~Array() { ::operator delete[](data_, std::align_val_t(64)); }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;

    T* data() const { return data_; }
    size_t size() const { return size_; }
    T& operator[](size_t i) const { return data_[i]; }
    bool same(const Array& other) const { return !std::memcmp(data_, other.data_, size_ * sizeof(T)); }

private:
    size_t size_;
    T* data_;
};

bool same(const float* a, const float* b, size_t n) {
    return std::memcmp(a, b, n * sizeof(float)) == 0;
}

// ---- Matrices ----

struct Quantized {
    Array<int8_t> quants;
    Array<BlockFactors> factors;

    Quantized(int n, int cols) : quants(size_t(n) * cols), factors(size_t(n) * cols / kBlock) {}
    QuantizedRows rows(int n, Packing packing) const { return {n, packing, quants.data(), factors.data()}; }
    bool same(const Quantized& other) const { return quants.same(other.quants) && factors.same(other.factors); }
};

// The integer types, and where in a block of theirs F16 numbers stand.
const std::map<ggml_type, std::vector<int>> kIntegerTypes = {
    {GGML_TYPE_Q8_0, {0}},    {GGML_TYPE_Q4_0, {0}},    {GGML_TYPE_Q4_1, {0, 2}}, {GGML_TYPE_Q5_0, {0}},
    {GGML_TYPE_Q5_1, {0, 2}}, {GGML_TYPE_Q4_K, {0, 2}}, {GGML_TYPE_Q5_K, {0, 2}}, {GGML_TYPE_Q6_K, {208}},
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
    }
}

struct Product {
    Array<float> out;
    Quantized quantized;
    Product(int n, int rows) : out(size_t(n) * rows), quantized(n, rows) {}
};

// What x.n rows give, with bias, GELU, residual and quantized output.
void multiply(const PackedMatrix& matrix, const Kernel& kernel, const Array<float>& x, int first, int n,
              const Array<float>& bias, const Array<float>& residual, int num_threads, Product& result) {
    const int cols = matrix.padded_cols(), rows = matrix.padded_rows();
    const Quantized input(n, cols);
    const float* values = x.data() + size_t(first) * cols;
    for (int i = 0; i < n; ++i) {
        kernel.quantize(values + size_t(i) * cols, cols, i, input.rows(n, matrix.packing()));
    }
    Epilogue epilogue;
    epilogue.bias = bias.data();
    epilogue.gelu = true;
    epilogue.residual = residual.data() + size_t(first) * rows;
    epilogue.out = result.out.data();
    epilogue.stride = rows;
    const QuantizedRows next = result.quantized.rows(n, matrix.packing());
    matrix.multiply(kernel, {n, cols, values, input.rows(n, matrix.packing())}, epilogue, &next, num_threads);
}

void test_matrix(ggml_type type, int rows, int cols) {
    constexpr int kMost = 20;
    Array<uint8_t> source(ggml_row_size(type, cols) * rows);
    fill_weights(type, source);
    const Array<uint8_t> storage(PackedMatrix::packed_bytes(type, rows, cols));
    const PackedMatrix matrix(type, rows, cols, source.data(), storage.data(), 2);
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
    Product alone(1, stride), whole(kMost, stride);
    multiply(matrix, scalar, x, 0, kMost, bias, residual, 1, whole);
    for (int i = 0; i < kMost; ++i) {
        for (int r = 0; r < rows; ++r) {
            double sum = bias[r], size = 0;
            for (int c = 0; c < cols; ++c) {
                sum += double(weights[r][c]) * x[size_t(i) * width + c];
                size += std::fabs(weights[r][c]);
            }
            const double gelu = sum / (1 + std::exp(-1.5957691216057308 * (sum + 0.044715 * sum * sum * sum)));
            // Activations of integer matrices are rounded to 8 bits.
            const double allowed = (matrix.integer() ? 0.02 : 1e-5) * (size + 1);
            CHECK(std::fabs(gelu + residual[size_t(i) * stride + r] - whole.out[size_t(i) * stride + r]) <= allowed);
        }
    }
    for (const Kernel* kernel : available_kernels()) {
        for (int n = 1; n <= kMost; ++n) {
            Product product(n, stride);
            multiply(matrix, *kernel, x, 0, n, bias, residual, n % 3 + 1, product);
            CHECK(same(product.out.data(), whole.out.data(), size_t(n) * stride));
            // A quantized row lies in the order of a pass of n; the scalar kernel says what it must be.
            Product twin(n, stride);
            multiply(matrix, scalar, x, 0, n, bias, residual, 1, twin);
            CHECK(product.quantized.same(twin.quantized));
        }
        for (int i = 0; i < kMost; ++i) {
            multiply(matrix, *kernel, x, i, 1, bias, residual, 1, alone);
            CHECK(same(alone.out.data(), &whole.out[size_t(i) * stride], stride));
        }
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
        }
    }
    CHECK_THROWS(std::invalid_argument, PackedMatrix::packing_of(GGML_TYPE_Q3_K));
    CHECK_THROWS(std::invalid_argument, PackedMatrix(GGML_TYPE_Q8_0, 1, 33, nullptr, nullptr, 1));
}

// ---- Rows ----

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
        // Numbers that arithmetic stumbles over.
        for (const float odd : {NAN, INFINITY, -INFINITY, 3e38f, 1e-40f, 0.0f}) {
            const Array<float> x(64), twin(64), maxima(1);
            std::generate_n(x.data(), 64, [] { return random_float(); });
            x[random_int(0, 63)] = odd;
            for (const Packing packing : {Packing::q8_0, Packing::q4_k, Packing::q6_k}) {
                const Quantized a(1, 64), b(1, 64);
                kernel->quantize(x.data(), 64, 0, a.rows(1, packing));
                scalar.quantize(x.data(), 64, 0, b.rows(1, packing));
                CHECK(a.quants.same(b.quants));
                for (int block = 0; block < 2; ++block) {
                    CHECK(a.factors[block].offsets[0] == b.factors[block].offsets[0]);
                    CHECK(a.factors[block].offsets[1] == b.factors[block].offsets[1]);
                }
            }
            kernel->run_max(x.data(), 64, maxima.data());
            float most = -INFINITY;
            for (int i = 0; i < 64; ++i) {
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

// ---- Cache and attention ----

void test_cache() {
    for (const Kernel* kernel : available_kernels()) {
        for (const int dim : {1, 7, 16, 33, 64, 80, 130}) {
            const int layers = 2, heads = 3, cells = 37;
            KvCache cache(layers, heads, dim, cells);
            CHECK(cache.num_cells() == 48);
            const auto key_of = [](int layer, int head, int cell, int d) {
                return static_cast<float>(layer * 700 + head * 200 + cell * 3 + d % 3);
            };
            const auto value_of = [&](int layer, int head, int cell, int d) {
                return -key_of(layer, head, cell, d) - 0.5f;
            };
            const auto check = [&](int cell, int holds) {
                for (int layer = 0; layer < layers; ++layer) {
                    for (int head = 0; head < heads; ++head) {
                        const uint16_t* keys = cache.keys(layer, head);
                        const uint16_t* values = cache.values(layer, head) + cell * padded(dim, kLanes);
                        for (int d = 0; d < dim; ++d) {
                            const uint16_t key = keys[(cell / kLanes * dim + d) * kLanes + cell % kLanes];
                            CHECK(key == ggml_fp32_to_fp16(key_of(layer, head, holds, d)));
                            CHECK(values[d] == ggml_fp32_to_fp16(value_of(layer, head, holds, d)));
                        }
                    }
                }
            };
            const Array<float> key(dim), value(dim);
            for (int layer = 0; layer < layers; ++layer) {
                for (int head = 0; head < heads; ++head) {
                    for (int cell = 0; cell < cache.num_cells(); ++cell) {
                        for (int d = 0; d < dim; ++d) {
                            key[d] = key_of(layer, head, cell, d);
                            value[d] = value_of(layer, head, cell, d);
                        }
                        cache.store(*kernel, layer, head, cell, key.data(), value.data());
                    }
                }
            }
            for (int cell = 0; cell < cache.num_cells(); ++cell) {
                check(cell, cell);
            }
            for (int layer = 0; layer < layers; ++layer) {
                cache.move(layer, 47, 0);
                cache.move(layer, 20, 19);
                cache.move(layer, 5, 5);
            }
            for (int cell = 0; cell < cache.num_cells(); ++cell) {
                check(cell, cell == 0 ? 47 : cell == 19 ? 20 : cell);
            }
        }
    }
}

void test_attention(int dim, int committed, int n) {
    const Kernel& scalar = find_kernel("scalar");
    const int cells = committed + n;
    KvCache cache(1, 1, dim, cells);
    const Array<float> keys(size_t(cells) * dim), values(size_t(cells) * dim), q(size_t(n) * dim);
    for (const Array<float>* array : {&keys, &values, &q}) {
        // Halves, so that the twin below reads what the cache holds.
        std::generate_n(array->data(), array->size(),
                        [] { return ggml_fp16_to_fp32(ggml_fp32_to_fp16(random_float())); });
    }
    for (int cell = 0; cell < cells; ++cell) {
        cache.store(scalar, 0, 0, cell, &keys[size_t(cell) * dim], &values[size_t(cell) * dim]);
    }
    std::vector<std::vector<int32_t>> tails(n);
    std::vector<RowContext> rows(n);
    for (int i = 0; i < n; ++i) {
        const int parent = random_int(-1, i - 1);
        rows[i].direct = parent < 0 ? committed : rows[parent].direct;
        if (parent >= 0) {
            tails[i] = tails[parent];
        }
        rows[i].length = (parent < 0 ? committed : rows[parent].length) + 1;
        if (tails[i].empty() && rows[i].length == committed + i + 1) {
            rows[i].direct = rows[i].length;
        } else {
            tails[i].push_back(committed + i);
        }
        rows[i].tail = tails[i].data();
    }
    const auto attend = [&](const Kernel& kernel, int first, int count, Array<float>& out) {
        const Array<float> scratch(attention_scratch(cache.num_cells()));
        HeadPass pass;
        pass.n = count;
        pass.head_dim = dim;
        pass.num_cells = cells;
        pass.rows = rows.data() + first;
        pass.q = q.data() + size_t(first) * dim;
        pass.q_stride = dim;
        pass.k = cache.keys(0, 0);
        pass.v = cache.values(0, 0);
        pass.scratch = scratch.data();
        pass.out = out.data();
        pass.out_stride = dim;
        kernel.attend(pass);
    };
    Array<float> expected(size_t(n) * dim), row(dim);
    attend(scalar, 0, n, expected);
    for (int i = 0; i < n; ++i) {
        std::vector<int> seen;
        for (int c = 0; c < rows[i].length; ++c) {
            seen.push_back(c < rows[i].direct ? c : rows[i].tail[c - rows[i].direct]);
        }
        std::vector<double> mixed(dim);
        double total = 0;
        for (const int cell : seen) {
            double score = 0;
            for (int d = 0; d < dim; ++d) {
                score += double(q[size_t(i) * dim + d]) * keys[size_t(cell) * dim + d];
            }
            const double weight = std::exp(score / std::sqrt(double(dim)));
            total += weight;
            for (int d = 0; d < dim; ++d) {
                mixed[d] += weight * values[size_t(cell) * dim + d];
            }
        }
        for (int d = 0; d < dim; ++d) {
            CHECK(std::fabs(mixed[d] / total - expected[size_t(i) * dim + d]) < 1e-4);
        }
    }
    for (const Kernel* kernel : available_kernels()) {
        Array<float> out(size_t(n) * dim);
        attend(*kernel, 0, n, out);
        CHECK(out.same(expected));
        for (int i = 0; i < n; ++i) {
            attend(*kernel, i, 1, row);
            CHECK(same(row.data(), &expected[size_t(i) * dim], dim));
        }
    }
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
                }
            }
        });
    }
    for (std::thread& caller : callers) {
        caller.join();
    }
    CHECK(bad == 0);
    CHECK(physical_cores() >= 1);
}

// ---- Sampler ----

struct Logits {
    Array<float> values, maxima;
    int size;

    explicit Logits(int n) : values(padded(n, 64)), maxima(padded(n, 64) / 64), size(n) {
        std::fill_n(values.data(), values.size(), -INFINITY);
        std::generate_n(values.data(), n, [] { return random_float(3); });
    }
    LogitsRow row(const Kernel& kernel) const {
        kernel.run_max(values.data(), static_cast<int>(values.size()), maxima.data());
        return {values.data(), maxima.data(), size, static_cast<int>(values.size())};
    }
};

void test_sampler() {
    const float nan = NAN, inf = INFINITY;
    for (const Sampling& bad : {Sampling{-1, 0, 1, 0, 0}, Sampling{nan, 0, 1, 0, 0}, Sampling{inf, 0, 1, 0, 0},
                                Sampling{1, -1, 1, 0, 0}, Sampling{1, 0, 0, 0, 0}, Sampling{1, 0, 1.5f, 0, 0},
                                Sampling{1, 0, nan, 0, 0}, Sampling{1, 0, 1, 1, 0}, Sampling{1, 0, 1, nan, 0}}) {
        CHECK_THROWS(std::invalid_argument, (check(bad), 0));
    }
    for (const uint64_t seed : {uint64_t(0), ~uint64_t(0)}) {
        for (const int64_t position : {int64_t(0), int64_t(1) << 40}) {
            for (const int32_t token : {0, 5, INT32_MAX}) {
                const float g = gumbel(seed, position, token);
                CHECK(g > -3.2f && g < 22.9f);
            }
        }
    }
    std::vector<Sampling> samplings;
    for (const float temperature : {0.0f, 1e-38f, 0.1f, 1.0f, 100.0f, 3e38f}) {
        for (const int top_k : {0, 1, 5, 1000000}) {
            for (const float top_p : {1.0f, 0.9f, 1e-6f}) {
                for (const float min_p : {0.0f, 0.1f, 0.999f}) {
                    samplings.push_back({temperature, top_k, top_p, min_p, 7});
                }
            }
        }
    }
    const Kernel& kernel = find_kernel("");
    Sampler sampler(kernel);
    for (const int size : {1, 3, 63, 64, 65, 1000}) {
        for (const float odd : {0.0f, nan, inf, -inf, 3e38f, -3e38f}) {
            for (const int how_many : {1, 2, size}) {
                const Logits logits(size);
                for (int i = 0; i < std::min(how_many, size); ++i) {
                    logits.values[random_int(0, size - 1)] = odd;
                }
                if (how_many == size) {
                    std::fill_n(logits.values.data(), size, odd);
                }
                const LogitsRow row = logits.row(kernel);
                for (const Sampling& sampling : samplings) {
                    const int32_t chosen = sampler.choose(sampling, row, 12);
                    CHECK(chosen >= 0 && chosen < size);
                    for (const int k : {1, 4, size, size + 9}) {
                        const std::vector<Candidate>& found = sampler.candidates(sampling, row, 12, k);
                        CHECK(found.size() <= static_cast<size_t>(std::min(k, size)));
                        for (const Candidate& c : found) {
                            CHECK(c.token >= 0 && c.token < size);
                        }
                        if (odd == 0) {
                            CHECK(!found.empty() && found.front().token == chosen);
                        }
                    }
                }
            }
        }
    }
}

// ---- Sessions ----

std::vector<float> logits_of(Session& session, int row) {
    std::vector<float> logits(session.model().shape().vocab_size);
    session.logits(row, logits.data());
    return logits;
}

std::vector<int32_t> random_tokens(const Gpt2& model, int n) {
    std::vector<int32_t> tokens(n);
    std::generate(tokens.begin(), tokens.end(), [&] { return random_int(0, model.shape().vocab_size - 1); });
    return tokens;
}

void test_session(const std::string& path, const Kernel& kernel) {
    const auto model = std::make_shared<Gpt2>(path, kernel.name, 2);
    const auto uninterrupted = [] {};
    Session session(model, 0), plain(model, 0);
    const int context = session.context();
    CHECK(context == model->shape().max_context);
    for (int round = 0; round < 8; ++round) {
        const int room = context - static_cast<int>(session.tokens().size());
        const std::vector<int32_t> prompt = random_tokens(*model, random_int(0, std::min(20, room / 2)));
        session.prefill(prompt, uninterrupted);
        const int n = random_int(1, std::min(70, room / 3));
        const std::vector<int32_t> tokens = random_tokens(*model, n);
        std::vector<int32_t> parents(n);
        for (int i = 0; i < n; ++i) {
            parents[i] = i == 0 ? -1 : random_int(std::max(0, i - 6), i - 1);
        }
        const int first = random_int(0, n);
        if (first > 0) {
            session.evaluate({tokens.begin(), tokens.begin() + first}, {parents.begin(), parents.begin() + first}, -1);
        }
        if (first < n) {
            session.evaluate({tokens.begin() + first, tokens.end()}, {parents.begin() + first, parents.end()}, -1);
        }
        CHECK(session.num_pending() == n);
        // A path to any row gives the bits that the same tokens give one by one.
        const int leaf = random_int(0, n - 1);
        std::vector<int32_t> way;
        for (int row = leaf; row >= 0; row = parents[row]) {
            way.insert(way.begin(), row);
        }
        plain.truncate(0);
        plain.prefill(session.tokens(), uninterrupted);
        for (const int row : way) {
            plain.evaluate({tokens[row]}, {-1}, 1);
            CHECK(logits_of(plain, 0) == logits_of(session, row));
            plain.commit({0});
        }
        const Followed followed = session.follow({0.5f, 0, 1, 0, 3}, 0);
        CHECK(followed.path.front() == 0 && followed.path.size() == followed.tokens.size());
        std::vector<int32_t> found(2 * 5);
        std::vector<float> scores(2 * 5);
        const Sampling filtered{1, 3, 1, 0, 1}, other{1, 2, 1, 0, 1};
        session.candidates({filtered}, {0, n - 1}, 5, found.data(), scores.data());
        CHECK(found[2] >= 0 && found[3] == -1 && scores[3] == -INFINITY && found[7] >= 0 && found[8] == -1);
        session.candidates({filtered, other}, {0, n - 1}, 5, found.data(), scores.data());
        CHECK(found[2] >= 0 && found[3] == -1 && found[6] >= 0 && found[7] == -1);
        CHECK_THROWS(std::invalid_argument,
                     (session.candidates({filtered, other}, {0}, 5, found.data(), scores.data()), 0));
        CHECK_THROWS(std::invalid_argument, (session.candidates({}, {0}, 5, found.data(), scores.data()), 0));
        CHECK_THROWS(std::invalid_argument, (session.candidates({}, {}, 5, found.data(), scores.data()), 0));
        session.candidates({filtered}, {}, 5, found.data(), scores.data());
        session.commit(way);
        CHECK(session.tokens() == plain.tokens());
        if (round % 3 == 2) {
            session.truncate(static_cast<int>(session.tokens().size()) / 2);
        }
    }

    // Errors leave everything as it was.
    session.truncate(3);
    const std::vector<int32_t> before = session.tokens();
    const int vocabulary = model->shape().vocab_size;
    session.evaluate({1, 2}, {-1, 0}, 1);
    CHECK_THROWS(std::invalid_argument, (session.evaluate({1}, {2}, -1), 0));
    CHECK_THROWS(std::invalid_argument, (session.evaluate({1}, {-2}, -1), 0));
    CHECK_THROWS(std::invalid_argument, (session.evaluate({vocabulary}, {1}, -1), 0));
    CHECK_THROWS(std::invalid_argument, (session.evaluate({-1}, {1}, -1), 0));
    CHECK_THROWS(std::invalid_argument, (session.evaluate({1}, {1, 1}, -1), 0));
    CHECK_THROWS(std::invalid_argument, (session.evaluate({}, {}, -1), 0));
    CHECK_THROWS(std::invalid_argument, (session.evaluate({1}, {1}, 2), 0));
    CHECK_THROWS(std::invalid_argument, (session.prefill({1}, uninterrupted), 0));
    CHECK_THROWS(std::invalid_argument, (session.commit({1}), 0));
    CHECK_THROWS(std::invalid_argument, (session.commit({0, 0}), 0));
    CHECK_THROWS(std::invalid_argument, (session.commit({5}), 0));
    CHECK_THROWS(std::invalid_argument, (session.truncate(4), 0));
    CHECK_THROWS(std::invalid_argument, (session.truncate(-1), 0));
    CHECK_THROWS(std::invalid_argument, logits_of(session, 0));
    CHECK_THROWS(std::invalid_argument, logits_of(session, 2));
    CHECK_THROWS(std::invalid_argument, session.follow({}, 0));
    CHECK_THROWS(std::invalid_argument, session.follow({}, 2));
    CHECK_THROWS(std::invalid_argument, session.follow({}, -1));
    CHECK(session.num_pending() == 2 && session.tokens() == before);
    session.discard();
    CHECK_THROWS(ContextFullError, (session.prefill(random_tokens(*model, context), uninterrupted), 0));
    const int too_many = context + 600;
    CHECK_THROWS(ContextFullError,
                 (session.evaluate(random_tokens(*model, too_many), std::vector<int32_t>(too_many, -1), 1), 0));
    const auto interrupted = [] { throw std::runtime_error("interrupted"); };
    if (context > Graph::kMaxRows + 3) {
        CHECK_THROWS(std::runtime_error, (session.prefill(random_tokens(*model, Graph::kMaxRows + 1), interrupted), 0));
    }
    CHECK(session.num_pending() == 0 && session.tokens() == before);
    session.prefill(random_tokens(*model, context - 3), uninterrupted);
    session.prefill({}, uninterrupted);
    CHECK_THROWS(ContextFullError, (session.evaluate({0}, {-1}, 1), 0));
    session.truncate(context - 1);
    // At the very end there is still room for branches.
    session.evaluate(random_tokens(*model, 500), std::vector<int32_t>(500, -1), 1);
    session.commit({499});
    CHECK(static_cast<int>(session.tokens().size()) == context);
    session.close();
    session.close();
    CHECK(session.closed());
    CHECK_THROWS(std::invalid_argument, (session.evaluate({0}, {-1}, 1), 0));
    CHECK_THROWS(std::invalid_argument, (session.prefill({0}, uninterrupted), 0));
    CHECK_THROWS(std::invalid_argument, (session.truncate(0), 0));
    CHECK_THROWS(std::invalid_argument, (session.commit({}), 0));
    CHECK_THROWS(std::invalid_argument, (session.discard(), 0));
    CHECK_THROWS(std::invalid_argument, session.follow({}, 0));
    for (const int n_ctx : {-1, context + 1}) {
        CHECK_THROWS(std::invalid_argument, Session(model, n_ctx));
    }
    Session smallest(model, 1);
    smallest.evaluate({0}, {-1}, 1);
    CHECK_THROWS(ContextFullError, (smallest.evaluate({0}, {0}, 1), 0));
    smallest.commit({0});
    CHECK(smallest.tokens().size() == 1);
}

// ---- Files ----

void test_tokenizer(const std::string& path) {
    const Tokenizer tokenizer(path);
    const std::string text("the \xc3\xa9 \xf0\x9f\xa6\x99\0\n\t x", 16);
    std::string back;
    for (const int32_t token : tokenizer.encode(text)) {
        back += tokenizer.token_bytes(token);
    }
    CHECK(back == text);
    CHECK(tokenizer.encode("").empty());
    CHECK(tokenizer.encode(std::string(5000, 'a')).size() > 10);
    (void)tokenizer.encode("\xff\xc3");
    int ends = 0;
    for (int32_t token = 0; token < tokenizer.num_tokens(); ++token) {
        (void)tokenizer.token_bytes(token);
        ends += tokenizer.is_end(token);
    }
    CHECK(ends > 0);
    for (const int32_t token : {-1, tokenizer.num_tokens(), INT32_MIN, INT32_MAX}) {
        CHECK_THROWS(std::invalid_argument, tokenizer.token_bytes(token));
        CHECK(!tokenizer.is_end(token));
    }
}

// Loads, or refuses with a message of its own.
void load(const std::string& path) {
    for (const bool model : {false, true}) {
        try {
            if (model) {
                Session session(std::make_shared<Gpt2>(path, "", 2), 0);
                session.evaluate({0, 0, 0}, {-1, 0, 0}, -1);
                session.follow({1, 0, 0.9f, 0, 0}, 0);
            } else {
                Tokenizer(path).encode("the tree");
            }
        } catch (const ModelError& error) {
            CHECK(std::strlen(error.what()) > path.size());
        } catch (const ContextFullError&) {
        }
    }
}

void test_damaged_files(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    const std::string data{std::istreambuf_iterator<char>(in), {}};
    const std::filesystem::path damaged =
        std::filesystem::temp_directory_path() / ("pystaged-native-" + std::to_string(std::random_device()()));
    const auto attempt = [&](const std::string& content) {
        std::ofstream(damaged, std::ios::binary | std::ios::trunc) << content;
        load(damaged.string());
    };
    attempt(data);
    for (int i = 0; i < 50; ++i) {
        const size_t head = std::min<size_t>(data.size(), 8192);
        const size_t end = i < 30 ? head * i / 30 : head + (data.size() - head) * (i - 30) / 20;
        attempt(data.substr(0, end));
    }
    for (int i = 0; i < 200; ++i) {
        std::string changed = data;
        const int most = static_cast<int>(i % 2 ? data.size() : std::min<size_t>(data.size(), 8192)) - 1;
        for (int j = 0; j <= i % 3; ++j) {
            changed[random_int(0, most)] ^= static_cast<char>(1 << random_int(0, 7));
        }
        attempt(changed);
    }
    std::filesystem::remove(damaged);
    CHECK_THROWS(ModelError, Tokenizer(damaged.string()));
    CHECK_THROWS(ModelError, Gpt2(damaged.string(), "", 0));
    CHECK_THROWS(std::invalid_argument, Gpt2(path, "abacus", 0));
    CHECK_THROWS(std::invalid_argument, Gpt2(path, "", -1));
    CHECK_THROWS(std::invalid_argument, Gpt2(path, "", 257));
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) {
        std::fprintf(stderr, "usage: native_tests MODEL.gguf\n");
        return 2;
    }
    const std::string path = argv[1];
    test_matrices();
    test_row_functions();
    test_cache();
    for (const int dim : {1, 7, 16, 33, 64, 80, 130}) {
        for (const int committed : {0, 1, 15, 16, 100}) {
            for (const int n : {1, 3, 8, 21}) {
                test_attention(dim, committed, n);
            }
        }
    }
    test_pool();
    test_sampler();
    for (const Kernel* kernel : available_kernels()) {
        test_session(path, *kernel);
    }
    test_tokenizer(path);
    test_damaged_files(path);
    std::fprintf(stderr, failures ? "%d checks failed\n" : "all checks passed\n", failures);
    return failures ? 1 : 0;
}
