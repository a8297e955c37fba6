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

// From so many rows on a thread takes this many groups at least, which share what is prepared of the rows.
constexpr int kManyRows = 64, kLeastGroups = 8;

// Groups whose outputs make a whole block, which is what is handed out.
int groups_of_block(const Product& p) {
    return p.epilogue.gated ? 4 : 2;
}

// Blocks of outputs that one thread takes at a time.
struct BlockRange {
    const Product* product;
    int first, last;
};

// Ever smaller ones: of all the weights that are left, the same part.
std::vector<BlockRange> ranges_of(const std::vector<Product>& products, int num_threads) {
    const auto block_bytes = [](const Product& p) {
        const size_t bytes = p.weights->bytes() / p.weights->padded_rows() * kLanes * groups_of_block(p);
        return p.before ? bytes + p.before->weights->bytes() / p.before->weights->padded_rows() * kBlock : bytes;
    };
    size_t left = 0;
    const auto blocks_of = [](const Product& p) { return p.weights->padded_rows() / kLanes / groups_of_block(p); };
    for (const Product& p : products) {
        left += blocks_of(p) * block_bytes(p);
    }
    std::vector<BlockRange> ranges;
    ranges.reserve(32);
    for (const Product& p : products) {
        const int blocks = blocks_of(p), unit = p.maxima ? kRun / kBlock : 1;
        for (int first = 0, last; first < blocks; first = last) {
            const size_t bytes = std::clamp(left / (2 * num_threads), kLeastBytes, kMostBytes);
            const int least = p.x.n < kManyRows ? 1 : std::max(1, kLeastGroups / groups_of_block(p));
            const int count = std::max(least, static_cast<int>(bytes / block_bytes(p)));
            last = std::min(blocks, first + padded(count, unit));
            left -= (last - first) * block_bytes(p);
            ranges.push_back({&p, first, last});
        }
    }
    return ranges;
}

}  // namespace

void multiply(const Kernel& kernel, const std::vector<Product>& products, int num_threads) {
    const std::vector<BlockRange> ranges = ranges_of(products, num_threads);
    std::vector<std::vector<std::atomic<int>>> unmade(products.size());  // outputs of each part
    for (size_t i = 0; i < products.size(); ++i) {
        if (const int part = products[i].part) {
            unmade[i] = std::vector<std::atomic<int>>(products[i].weights->rows() / part);
            std::fill(unmade[i].begin(), unmade[i].end(), part);
        }
    }
    ThreadPool::shared().run(static_cast<int>(ranges.size()), num_threads, [&](int i, int) {
        const Product& p = *ranges[i].product;
        const int first = ranges[i].first, last = ranges[i].last;
        for (const Product* each : {p.before, &p}) {
            if (each) {
                const PackedMatrix& weights = *each->weights;
                const int groups = groups_of_block(*each);
                kernel.matmul[static_cast<int>(weights.packing())](weights.data(), groups * first, groups * last,
                                                                   each->x, each->epilogue);
            }
        }
        if (p.quantized) {
            const float* out = p.epilogue.out + size_t(first) * kBlock;
            for (int row = 0; row < p.x.n; ++row, out += p.epilogue.stride) {
                kernel.quantize(out, (last - first) * kBlock, row, from_block(*p.quantized, first));
            }
        }
        // While they are still in the cache.
        for (int row = 0; p.maxima && row < p.x.n; ++row) {
            const size_t at = row * p.epilogue.stride + size_t(first) * kBlock;
            const int end = last * kBlock < p.weights->padded_rows() ? last * kBlock : int(p.epilogue.stride);
            find_maxima(kernel, p.epilogue.out + at, std::min(end, p.weights->rows()) - first * kBlock,
                        end - first * kBlock, p.maxima + at / kRun);
        }
        const int end = std::min(last * kBlock, p.weights->rows());
        for (int at = first * kBlock, next; p.part > 0 && at < end; at = next) {
            const int index = at / p.part;
            next = std::min(end, (index + 1) * p.part);
            if ((unmade[&p - products.data()][index] -= next - at) == 0) {
                p.finish(index * p.part);
            }
        }
    });
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
