#include "weights/product.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "machine/pool.h"

namespace pystaged {

namespace {

// Weights one thread takes at a time, at most and at least: prefetching past their end must be small change, and so
// must what a slow core still has in hand when the others are done.
constexpr size_t kMostBytes = 256 << 10, kLeastBytes = 32 << 10;

// From so many rows on weights are unpacked once for so many rows, the sums of so many groups staying in the cache:
// that is what a thread takes then, the rows in whole tiles.
constexpr int kManyRows = 64, kManyGroups = 8, kTile = 16;

// Bytes of weights that are worth one more thread; beyond kReadRows rows arithmetic takes longer than reading them, so
// proportionally fewer are.
constexpr size_t kWorthBytes = 48 << 10;
constexpr int kReadRows = 4;

// Groups whose outputs make a whole block, which is what is handed out.
int groups_of_block(const Product& p) {
    return p.epilogue.gated ? 4 : 2;
}

int divided(int n, int by) {
    return (n + by - 1) / by;
}

}  // namespace

void ProductTasks::share_out(const std::vector<Product>& products, int threads) {
    const auto blocks_of = [](const Product& p) {
        return p.weights->padded_rows() / kBlock / (p.epilogue.gated ? 2 : 1);
    };
    const auto bytes_of = [](const Product& p) {
        return p.weights->bytes() + (p.before ? p.before->weights->bytes() : 0);
    };
    size_t left = 0, worth = 0, all = 0;
    bool alike = true;
    for (const Product& p : products) {
        left += bytes_of(p);
        worth += bytes_of(p) * std::max(kReadRows, p.x.n) / kReadRows;
        all += size_t(p.weights->padded_rows()) * p.weights->cols() * p.x.n >> 16;
        alike = alike && p.x.n >= kManyRows && p.x.n == products[0].x.n;
    }
    num_threads = static_cast<int>(std::min<size_t>(threads, worth / kWorthBytes + 1));
    tasks.clear();
    parts = 0;
    for (const Product& p : products) {
        const bool many = p.x.n >= kManyRows;
        const int blocks = blocks_of(p), unit = p.maxima ? kRun / kBlock : 1;
        const int panels = many ? divided(p.x.n, kManyRows) : 1, tiles = divided(p.x.n, kTile);
        const size_t of_panel = p.part > 0 ? p.weights->rows() / p.part : 0, block_bytes = bytes_of(p) / blocks;
        const size_t least = kLeastBytes * kReadRows / std::max(kReadRows, p.x.n);
        for (int first = 0, last; first < blocks; first = last) {
            // Few rows: guided self-scheduling, each task a part of the weights that are left. Many: as evenly as can
            // be.
            const int rest = blocks - first;
            const int count = many ? divided(rest, divided(rest, kManyGroups / groups_of_block(p)))
                                   : std::clamp(left / (2 * num_threads), least, kMostBytes) / block_bytes;
            last = std::min(blocks, first + padded(std::max(1, count), unit));
            left -= (last - first) * block_bytes;
            for (int panel = 0; panel < panels; ++panel) {
                const int begin = tiles * panel / panels * kTile, end = tiles * (panel + 1) / panels * kTile;
                tasks.push_back({static_cast<int>(&p - products.data()), first, last, begin, std::min(p.x.n, end),
                                 parts + panel * of_panel});
            }
        }
        parts += panels * of_panel;
    }
    work = alike && !tasks.empty() ? static_cast<int>(all / tasks.size()) + 1 : 0;
}

void multiply(const Kernel& kernel, const std::vector<Product>& products, int num_threads) {
    // Kept from call to call, as they are made anew for each of a pass's products.
    thread_local ProductTasks shared;
    thread_local std::vector<std::atomic<int>> unmade_outputs;
    shared.share_out(products, num_threads);
    if (unmade_outputs.size() < shared.parts) {
        unmade_outputs = std::vector<std::atomic<int>>(shared.parts);
    }
    for (const ProductTask& task : shared.tasks) {
        const Product& p = products[task.product];
        if (p.part > 0 && task.first == 0) {
            std::fill_n(&unmade_outputs[task.parts], p.weights->rows() / p.part, p.part);
        }
    }
    const std::vector<ProductTask>& tasks = shared.tasks;
    std::atomic<int>* const unmade = unmade_outputs.data();
    const auto call = [&kernel, &products, &tasks, unmade](int i, int) {
        const auto [index, first, last, begin, end_row, parts] = tasks[i];
        const Product& p = products[index];
        for (const Product* each : {p.before, &p}) {
            if (each) {
                const PackedMatrix& weights = *each->weights;
                const int groups = groups_of_block(*each);
                const size_t at = begin * each->epilogue.stride;
                Activations x = each->x;
                x.n = end_row - begin;
                x.values += size_t(begin) * x.cols;
                x.quantized = weights.integer() ? from_row(x.quantized, begin) : x.quantized;
                Epilogue epilogue = each->epilogue;
                epilogue.out += at;
                epilogue.gate = epilogue.gate ? epilogue.gate + at : nullptr;
                epilogue.residual = epilogue.residual ? epilogue.residual + at : nullptr;
                kernel.matmul[static_cast<int>(weights.packing())](weights.data(), groups * first, groups * last, x,
                                                                   epilogue);
            }
        }
        for (int row = begin; row < end_row; ++row) {
            float* out = p.epilogue.out + row * p.epilogue.stride + size_t(first) * kBlock;
            if (p.quantized) {
                kernel.quantize(out, (last - first) * kBlock, row, from_block(*p.quantized, first));
            }
            if (p.maxima) {  // while they are still in the cache
                const int end = last * kBlock < p.weights->padded_rows() ? last * kBlock : int(p.epilogue.stride);
                find_maxima(kernel, out, std::min(end, p.weights->rows()) - first * kBlock, end - first * kBlock,
                            p.maxima + (out - p.epilogue.out) / kRun);
            }
        }
        const int end = std::min(last * kBlock, p.weights->rows());
        for (int at = first * kBlock, next; p.part > 0 && at < end; at = next) {
            const int part = at / p.part;
            next = std::min(end, (part + 1) * p.part);
            if ((unmade[parts + part] -= next - at) == 0) {
                p.finish(part * p.part, begin, end_row);
            }
        }
    };
    ThreadPool::shared().run(static_cast<int>(tasks.size()), shared.num_threads, call, shared.work);
}

void find_maxima(const Kernel& kernel, float* x, int size, int n, float* maxima) {
    // Neither a maximum nor infinite.
    std::fill(x + size, x + n, x[size - 1]);
    if (!kernel.run_max(x, n, maxima)) {
        maxima[0] = NAN;
    }
    std::fill(x + size, x + n, -INFINITY);
}

}  // namespace pystaged
