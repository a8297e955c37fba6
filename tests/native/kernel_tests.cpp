// Tests of the kernels and of what they work on: kernel_tests [KERNEL...], the names of those this CPU should have.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <cmath>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "kv_cache.h"
#include "packed_matrix.h"
#include "thread_pool.h"

using namespace pystaged;

namespace {

// ---- Matrices ----

struct Quantized {
    Array<int8_t> quants;
    Array<BlockFactors> factors;

    Quantized(int n, int cols) : quants(size_t(n) * cols), factors(size_t(n) * cols / kBlock) {}
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
            if (kernel->row_pairs) {
                unmix(product.quantized.quants, n);
            }
            CHECK(product.quantized.quants.same(twin.quantized.quants));
            CHECK(product.quantized.factors.same(twin.quantized.factors));
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
                CHECK(std::isnan(odd) || a.factors.same(b.factors));
                for (int block = 0; block < 2; ++block) {
                    CHECK(a.factors[block].offsets[0] == b.factors[block].offsets[0]);
                    CHECK(a.factors[block].offsets[1] == b.factors[block].offsets[1]);
                }
            }
            kernel->run_max(x.data(), kRun, maxima.data());
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
            // As long as a worker needs to begin.
            for (int i = 0; i < 1000 && others == 0; ++i) {
                calls = 0;
                ThreadPool::shared().run(200, 3, [&](int, int worker) {
                    ++calls;
                    others += worker > 0;
                    std::this_thread::yield();
                });
            }
            _exit(calls == 200 && others > 0 ? 0 : 1);
        }
        int status = -1;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    stop = true;
    busy.join();
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<std::string> names;
    for (const Kernel* kernel : available_kernels()) {
        names.emplace_back(kernel->name);
    }
    CHECK(argc == 1 || names == std::vector<std::string>(argv + 1, argv + argc));
#ifndef __SANITIZE_THREAD__  // under which these take very long
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
    test_fork();  // in whose child it does not support new threads
#endif
    test_pool();
    test_pool_exceptions();
    test_floats();
    std::fprintf(stderr, failures ? "%d checks failed\n" : "all checks passed\n", failures);
    return failures ? 1 : 0;
}
