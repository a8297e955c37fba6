#include "machine/pool.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include "machine/system.h"

namespace pystaged {

namespace {

// Long enough to cover the gaps inside a pass, short enough that nobody notices it between passes.
constexpr auto kSpin = std::chrono::microseconds(50);

inline void relax() {
#ifdef __x86_64__
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

template <class Ready>
bool spin_until(const Ready& ready) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; ++i) {
            if (ready()) {
                return true;
            }
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return ready();
}

}  // namespace

void ThreadPool::grow(int num_workers) {
    try {
        while (num_workers_ < std::min(num_workers, kMaxThreads - 1)) {
            const int worker = num_workers_ + 1;
            std::thread([this, worker] { work(worker); }).detach();
            num_workers_ = worker;
        }
    } catch (const std::exception&) {
        // The system has no thread or no memory to give; those we have do the work.
    }
}

void ThreadPool::dispatch(int count, int num_threads, Call call, const void* task) {
    std::lock_guard<std::mutex> lock(run_mutex_);
    grow(num_threads - 1);
    count_ = count;
    call_ = call;
    task_ = task;
    unfinished_.store(count, std::memory_order_relaxed);
    ticket_.store(uint64_t(num_threads) << 32 | uint32_t(count), std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst) > 0) {
        std::lock_guard<std::mutex> sleep_lock(sleep_mutex_);
        work_ready_.notify_all();
    }
    while (claim_and_call(0)) {
    }
    const auto done = [this] { return unfinished_.load(std::memory_order_seq_cst) == 0; };
    if (!spin_until(done)) {
        std::unique_lock<std::mutex> sleep_lock(sleep_mutex_);
        caller_asleep_.store(true, std::memory_order_seq_cst);
        work_done_.wait(sleep_lock, done);
        caller_asleep_.store(false, std::memory_order_relaxed);
    }
    if (failed_.load(std::memory_order_relaxed)) {
        failed_.store(false, std::memory_order_relaxed);
        std::rethrow_exception(std::exchange(error_, nullptr));
    }
}

void ThreadPool::wake(int num_threads) {
    if (num_threads > 1 && num_asleep_.load(std::memory_order_relaxed) > 0) {
        std::lock_guard<std::mutex> sleep_lock(sleep_mutex_);
        ++wakes_;
        work_ready_.notify_all();
    }
}

bool ThreadPool::has_work(int worker) const {
    const uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
    return uint32_t(ticket) > 0 && uint64_t(worker) < ticket >> 32;
}

bool ThreadPool::claim_and_call(int worker) {
    uint64_t ticket = ticket_.load(std::memory_order_relaxed);
    do {
        if (uint32_t(ticket) == 0 || uint64_t(worker) >= ticket >> 32) {
            return false;
        }
    } while (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acquire, std::memory_order_relaxed));
    try {
        if (!failed_.load(std::memory_order_relaxed)) {
            call_(task_, count_ - static_cast<int>(uint32_t(ticket)), worker);
        }
    } catch (...) {
        if (!failed_.exchange(true, std::memory_order_relaxed)) {
            error_ = std::current_exception();
        }
    }
    if (unfinished_.fetch_sub(1, std::memory_order_seq_cst) == 1 && caller_asleep_.load(std::memory_order_seq_cst)) {
        std::lock_guard<std::mutex> sleep_lock(sleep_mutex_);
        work_done_.notify_one();
    }
    return true;
}

void ThreadPool::work(int worker) {
    prepare_worker();
    const FloatEnvironment pinned;
    const auto ready = [&] { return has_work(worker); };
    for (;;) {
        while (!spin_until(ready)) {
            std::unique_lock<std::mutex> sleep_lock(sleep_mutex_);
            const uint64_t wakes = wakes_;
            num_asleep_.fetch_add(1, std::memory_order_seq_cst);
            work_ready_.wait(sleep_lock, [&] { return ready() || wakes_ != wakes; });
            num_asleep_.fetch_sub(1, std::memory_order_relaxed);
        }
        while (claim_and_call(worker)) {
        }
    }
}

#if defined(__x86_64__)
FloatEnvironment::FloatEnvironment() : before_(_mm_getcsr()) {
    _mm_setcsr(0x1f80);  // all exceptions masked
}

FloatEnvironment::~FloatEnvironment() {
    _mm_setcsr(static_cast<unsigned>(before_));
}
#elif defined(__aarch64__)
FloatEnvironment::FloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
}

FloatEnvironment::~FloatEnvironment() {
    asm volatile("msr fpcr, %0" : : "r"(before_));
}
#else
FloatEnvironment::FloatEnvironment() : before_(0) {}

FloatEnvironment::~FloatEnvironment() = default;
#endif

}  // namespace pystaged
