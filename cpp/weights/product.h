// Products of packed matrices with the rows of a pass, shared out over the thread pool.
#pragma once

#include <atomic>
#include <functional>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "weights/packed_matrix.h"

namespace pystaged {

// out = W x, then the epilogue, for x.n rows of activations.
struct Product {
    const PackedMatrix* weights = nullptr;
    Activations x = {};
    Epilogue epilogue = {};
    QuantizedRows quantized = {};     // the outputs too, by the thread that has them at hand; or none
    const Product* before = nullptr;  // whose outputs of the same places are made first: the gates of this one
    float* maxima = nullptr;  // of the outputs by find_maxima(), a row's stride being its n: [x.n][stride / kRun]
    // If not 0, so many outputs belong together; rows() is a multiple. `finish` is called with the first output of each
    // such part, counted from `first`, and rows [row, end), by the thread that makes the last one of them.
    int part = 0, first = 0;
    const std::function<void(int first, int row, int end)>* finish = nullptr;
};

// What of a product says how it is shared out.
struct ProductShape {
    explicit ProductShape(const Product& product);

    size_t bytes;  // of weights
    int rows, cols, n, part;
    // Whether outputs are gated (an int, as shapes are compared by their bytes), and blocks of outputs that one task
    // makes together.
    int gated, unit;
};

static_assert(std::has_unique_object_representations_v<ProductShape>);

// What a thread computes at a time: blocks [first, last) of the outputs, of rows [row, end).
struct ProductTask {
    int product, first, last, row, end;
    size_t parts;  // where the counts of the outputs that are still to be made begin, of these rows' parts
};

// How products are shared out, in the order in which threads take them.
struct ProductTasks {
    std::vector<ProductTask> tasks;
    int num_threads = 1;  // that the products are worth
    int work = 0;         // of each task in 2^16 multiply-adds, where they are alike; or 0
    size_t parts = 0;     // how many counts there are

    void share_out(const std::vector<ProductShape>& shapes, int threads);
};

// Computes products over the thread pool. How those of the same shapes are shared out is found once. For one caller at
// a time.
class Multiplier {
public:
    explicit Multiplier(const Kernel& kernel) : kernel_(kernel) {}

    // All of them in one join.
    void multiply(const Product* products, size_t count, int num_threads);

private:
    struct Plan {
        std::vector<ProductShape> shapes;
        ProductTasks shared;
    };
    const ProductTasks& plan(int num_threads);

    const Kernel& kernel_;
    std::vector<ProductShape> shapes_;          // of the call in hand
    std::unordered_map<uint64_t, Plan> plans_;  // by a digest of shapes and threads
    Plan transient_;                            // of shapes that hardly come again
    std::vector<std::atomic<int>> unmade_;      // see ProductTask::parts
};

// The maxima of the runs of x[size], one of them NaN where not all of x is finite. What is behind them becomes -inf, up
// to x[n], n a multiple of kRun.
void find_maxima(const Kernel& kernel, float* x, int size, int n, float* maxima);

}  // namespace pystaged
