// Products of packed matrices with the rows of a pass, shared out over the thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "machine/digest.h"
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
    explicit ProductShape(const Product& p)
        : bytes(p.weights->bytes() + (p.before ? p.before->weights->bytes() : 0)),
          rows(p.weights->rows()),
          cols(p.weights->cols()),
          n(p.x.n),
          part(p.part),
          gated(p.epilogue.gated),
          unit(p.maxima ? kRun / kBlock : 1) {}

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
    // Weights one thread takes at a time, at most and at least: prefetching past their end must be small change, and so
    // must what a slow core still has in hand when the others are done.
    static constexpr size_t kMostBytes = 256 << 10, kLeastBytes = 32 << 10;
    // Rows for which weights are unpacked once, the sums of so many groups staying in the cache: that is what a thread
    // takes where there are as many, the rows in whole tiles.
    static constexpr int kPanelRows = 64, kPanelGroups = 8, kTile = 16;
    // Bytes of weights that are worth one more thread; beyond kReadRows rows arithmetic takes longer than reading them,
    // so proportionally fewer are.
    static constexpr size_t kWorthBytes = 48 << 10;
    static constexpr int kReadRows = 4;

    // Groups whose outputs make a whole block, which is what is handed out.
    static int groups_of_block(bool gated) { return gated ? 4 : 2; }
    static int divided(int n, int by) { return (n + by - 1) / by; }

    std::vector<ProductTask> tasks;
    int num_threads = 1;  // that the products are worth
    int work = 0;         // of each task in 2^16 multiply-adds, where they are alike; or 0
    size_t parts = 0;     // how many counts there are

    void share_out(const std::vector<ProductShape>& shapes, int threads) {
        size_t left = 0, worth = 0, all = 0;
        bool alike = true;
        for (const ProductShape& shape : shapes) {
            left += shape.bytes;
            worth += shape.bytes * std::max(kReadRows, shape.n) / kReadRows;
            all += size_t(padded(shape.rows, kBlock)) * shape.cols * shape.n >> 16;
            alike = alike && shape.n >= kPanelRows && shape.n == shapes[0].n;
        }
        num_threads = static_cast<int>(std::min<size_t>(threads, worth / kWorthBytes + 1));
        tasks.clear();
        parts = 0;
        for (const ProductShape& shape : shapes) {
            const int n = shape.n, blocks = padded(shape.rows, kBlock) / kBlock / (shape.gated ? 2 : 1);
            const bool many = n >= kPanelRows;
            const int panels = many ? divided(n, kPanelRows) : 1, tiles = divided(n, kTile);
            const size_t of_panel = shape.part > 0 ? shape.rows / shape.part : 0, block_bytes = shape.bytes / blocks;
            const size_t least = kLeastBytes * kReadRows / std::max(kReadRows, n);
            for (int first = 0, last; first < blocks; first = last) {
                // Few rows: guided self-scheduling, each task a part of the weights that are left. Many: as evenly as
                // can be.
                const int rest = blocks - first;
                const int count = many ? divided(rest, divided(rest, kPanelGroups / groups_of_block(shape.gated)))
                                       : std::clamp(left / (2 * num_threads), least, kMostBytes) / block_bytes;
                last = std::min(blocks, first + padded(std::max(1, count), shape.unit));
                left -= (last - first) * block_bytes;
                for (int panel = 0; panel < panels; ++panel) {
                    const int begin = tiles * panel / panels * kTile, end = tiles * (panel + 1) / panels * kTile;
                    tasks.push_back({static_cast<int>(&shape - shapes.data()), first, last, begin, std::min(n, end),
                                     parts + panel * of_panel});
                }
            }
            parts += panels * of_panel;
        }
        work = alike && !tasks.empty() ? static_cast<int>(all / tasks.size()) + 1 : 0;
    }
};

// The maxima of the runs of x[size], one of them NaN where not all of x is finite. What is behind them becomes -inf, up
// to x[n], n a multiple of kRun.
inline void find_maxima(const Kernel& kernel, float* x, int size, int n, float* maxima) {
    // Neither a maximum nor infinite.
    std::fill(x + size, x + n, x[size - 1]);
    if (!kernel.run_max(x, n, maxima)) {
        maxima[0] = NAN;
    }
    std::fill(x + size, x + n, -INFINITY);
}

// Computes products over the thread pool. How those of the same shapes are shared out is found once. For one caller at
// a time.
class Multiplier {
public:
    explicit Multiplier(const Kernel& kernel) : kernel_(kernel) {}

    // All of them in one join.
    void multiply(const Product* products, size_t count, int num_threads) {
        shapes_.clear();
        for (const Product* product = products; product < products + count; ++product) {
            shapes_.emplace_back(*product);
        }
        const ProductTasks& shared = plan(num_threads);
        if (unmade_.size() < shared.parts) {
            unmade_ = std::vector<std::atomic<int>>(shared.parts);
        }
        for (const ProductTask& task : shared.tasks) {
            const Product& p = products[task.product];
            if (p.part > 0 && task.first == 0) {
                std::fill_n(&unmade_[task.parts], p.weights->rows() / p.part, p.part);
            }
        }
        const auto call = [&](int i, int) {
            const auto [index, first, last, begin, end_row, parts] = shared.tasks[i];
            const Product& p = products[index];
            for (const Product* each : {p.before, &p}) {
                if (each) {
                    const PackedMatrix& weights = *each->weights;
                    const int groups = ProductTasks::groups_of_block(each->epilogue.gated);
                    const size_t at = begin * each->epilogue.stride;
                    Activations x = each->x;
                    x.n = end_row - begin;
                    x.values += size_t(begin) * x.cols;
                    x.quantized = weights.integer() ? from_row(x.quantized, begin) : x.quantized;
                    Epilogue epilogue = each->epilogue;
                    epilogue.out += at;
                    epilogue.gate = epilogue.gate ? epilogue.gate + at : nullptr;
                    epilogue.residual = epilogue.residual ? epilogue.residual + at : nullptr;
                    kernel_.matmul[static_cast<int>(weights.packing())](weights.data(), groups * first, groups * last,
                                                                        x, epilogue);
                }
            }
            for (int row = begin; row < end_row; ++row) {
                float* out = p.epilogue.out + row * p.epilogue.stride + size_t(first) * kBlock;
                if (p.quantized.quants) {
                    kernel_.quantize(out, (last - first) * kBlock, row, from_block(p.quantized, first));
                }
                if (p.maxima) {  // while they are still in the cache
                    const int end = last * kBlock < p.weights->padded_rows() ? last * kBlock : int(p.epilogue.stride);
                    find_maxima(kernel_, out, std::min(end, p.weights->rows()) - first * kBlock, end - first * kBlock,
                                p.maxima + (out - p.epilogue.out) / kRun);
                }
            }
            const int end = std::min(last * kBlock, p.weights->rows());
            for (int at = first * kBlock, next; p.part > 0 && at < end; at = next) {
                const int part = at / p.part;
                next = std::min(end, (part + 1) * p.part);
                if ((unmade_[parts + part] -= next - at) == 0) {
                    (*p.finish)(p.first + part * p.part, begin, end_row);
                }
            }
        };
        ThreadPool::shared().run(static_cast<int>(shared.tasks.size()), shared.num_threads, call, shared.work);
    }

private:
    static constexpr size_t kMostPlans = 1024;  // that are kept before they are made anew
    static constexpr size_t kMostTogether = 4;  // matrices that multiply the same rows, at most

    struct Plan {
        std::vector<ProductShape> shapes;
        ProductTasks shared;
    };
    const ProductTasks& plan(int num_threads) {
        const auto same = [](const ProductShape& a, const ProductShape& b) { return !std::memcmp(&a, &b, sizeof(a)); };
        // Experts' shapes hardly come again: their plan is not kept.
        const bool is_transient =
            shapes_.size() > kMostTogether && !std::equal(shapes_.begin() + 1, shapes_.end(), shapes_.begin(), same);
        if (plans_.size() > kMostPlans) {
            plans_.clear();
        }
        const uint64_t sum = digest(shapes_.data(), shapes_.size() * sizeof(shapes_[0]));
        Plan& plan = is_transient ? transient_ : plans_[sum + num_threads];
        if (is_transient || !std::equal(shapes_.begin(), shapes_.end(), plan.shapes.begin(), plan.shapes.end(), same)) {
            plan.shapes.clear();  // until all is there
            plan.shared.share_out(shapes_, num_threads);
            plan.shapes = shapes_;
        }
        return plan.shared;
    }

    const Kernel& kernel_;
    std::vector<ProductShape> shapes_;          // of the call in hand
    std::unordered_map<uint64_t, Plan> plans_;  // by a digest of shapes and threads
    Plan transient_;                            // of shapes that hardly come again
    std::vector<std::atomic<int>> unmade_;      // see ProductTask::parts
};

}  // namespace pystaged
