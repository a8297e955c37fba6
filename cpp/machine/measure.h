// How fast this machine reads and multiplies.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "kernels/kernel.h"
#include "machine/pool.h"

namespace pystaged {

// Bytes per second at which threads read memory that no cache holds.
inline double read_bandwidth(size_t bytes, int num_threads) {
    const Memory memory(bytes, /*huge=*/true);
    constexpr size_t kChunk = 1 << 18;
    const int chunks = static_cast<int>(bytes / kChunk);
    std::vector<uint64_t> sums(chunks);
    const Kernel& kernel = find_kernel("");
    std::vector<double> rates;
    for (int repeat = 0; repeat < 8; ++repeat) {
        // The first round writes, because untouched memory is one page of zeros.
        const auto start = std::chrono::steady_clock::now();
        ThreadPool::shared().run(chunks, num_threads, [&](int i, int) {
            uint8_t* chunk = memory.data() + i * kChunk;
            if (repeat == 0) {
                std::fill_n(chunk, kChunk, static_cast<uint8_t>(i));
            } else {
                sums[i] += kernel.read(chunk, kChunk);
            }
        });
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        if (repeat > 0) {
            rates.push_back(static_cast<double>(chunks) * kChunk / seconds.count());
        }
    }
    std::sort(rates.begin(), rates.end());
    return rates[rates.size() / 2];
}

// Multiply-adds per second of a kernel that reads no matrix.
inline double dot_rate(const std::string& kernel_name, int num_threads) {
    const Kernel& kernel = find_kernel(kernel_name);
    constexpr int kRounds = 50000;
    double best = 0;
    for (int repeat = 0; repeat < 50; ++repeat) {
        std::atomic<uint64_t> count{0};
        const auto start = std::chrono::steady_clock::now();
        ThreadPool::shared().run(num_threads, num_threads, [&](int, int) { count += kernel.dots(kRounds); });
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        best = std::max(best, static_cast<double>(count) / seconds.count());
    }
    return best;
}

}  // namespace pystaged
