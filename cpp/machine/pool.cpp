#include "machine/pool.h"

#include <chrono>
#include <thread>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace pystaged {

// How much slower than before a worker may look after an index.
constexpr float kRise = 0.25f;

// Long enough to cover the gaps inside a pass, short enough that nobody notices it between passes.
constexpr auto kSpin = std::chrono::microseconds(50);

static inline void relax() {
#ifdef __x86_64__
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

static int64_t now() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

template <class Ready>
static bool spin_until(const Ready& ready) {
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

void Claims::open(int count, int num_threads, int work) {
    count_ = count;
    work_.store(work, std::memory_order_relaxed);
    is_first_.store(true, std::memory_order_relaxed);
    ticket_.store((work > 0 ? kAlike : 0) | uint64_t(num_threads) << 32 | uint32_t(count), std::memory_order_seq_cst);
}

bool Claims::has_work(int worker) const {
    const uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
    return left_in(ticket) > 0 && worker < threads_of(ticket);
}

bool Claims::leaves(int worker, int num_threads, int left) const {
    const float own = slowness_[worker].load(std::memory_order_relaxed);
    int sooner = 0;
    for (int other = 0; own >= 2 && other < num_threads && sooner < left; ++other) {
        const float its = std::max(1.0f, slowness_[other].load(std::memory_order_relaxed));
        sooner += std::max(0, static_cast<int>(own / its) - 1);
    }
    return sooner >= left;
}

void Claims::took(int worker, int64_t nanoseconds) {
    // What is lost where two do this at once matters little.
    const float own = static_cast<float>(std::max<int64_t>(1, nanoseconds)) / work_.load(std::memory_order_relaxed);
    float least = own;
    if (is_first_.load(std::memory_order_relaxed)) {
        is_first_.store(false, std::memory_order_relaxed);
    } else {
        least = std::min(least, least_.load(std::memory_order_relaxed));
    }
    least_.store(least, std::memory_order_relaxed);
    // Slowly up, as a worker may have lost its core once, and soon down.
    std::atomic<float>& slowness = slowness_[worker];
    const float before = slowness.load(std::memory_order_relaxed);
    const float more = own / least - before;
    slowness.store(before + std::min(more > 0 ? more : more / 2, kRise), std::memory_order_relaxed);
}

void ThreadPool::dispatch(int count, int num_threads, int work, Call call, const void* task) {
    std::lock_guard<std::mutex> lock(run_mutex_);
    grow(num_threads - 1);
    call_ = call;
    task_ = task;
    unfinished_.store(count, std::memory_order_relaxed);
    wanted_.store(num_threads, std::memory_order_relaxed);
    claims_.open(count, num_threads, work);
    wake_two();
    while (claim_and_call(0)) {
    }
    const auto done = [this] { return unfinished_.load(std::memory_order_seq_cst) == 0; };
    if (!spin_until(done)) {
        std::unique_lock<std::mutex> lock_of_caller(caller_mutex_);
        caller_asleep_.store(true, std::memory_order_seq_cst);
        work_done_.wait(lock_of_caller, done);
        caller_asleep_.store(false, std::memory_order_relaxed);
    }
    if (failed_.load(std::memory_order_relaxed)) {
        failed_.store(false, std::memory_order_relaxed);
        std::rethrow_exception(std::exchange(error_, nullptr));
    }
}

void ThreadPool::wake(int num_threads) {
    num_threads = std::min(num_threads, kMaxThreads);
    int wanted = wanted_.load(std::memory_order_relaxed);  // perhaps of a job of another thread, which is not cut short
    while (wanted < num_threads && !wanted_.compare_exchange_weak(wanted, num_threads, std::memory_order_relaxed)) {
    }
    wake_two();
}

void ThreadPool::wake_two() {
    const int wanted = wanted_.load(std::memory_order_relaxed);
    for (int first = 0, woken = 0; first < wanted; first += 64) {
        const uint64_t able = wanted - first < 64 ? (uint64_t(1) << (wanted - first)) - 1 : ~uint64_t(0);
        std::atomic<uint64_t>& parked = parked_[first / 64];
        for (uint64_t found; (found = parked.load(std::memory_order_seq_cst) & able) != 0;) {
            const int bit = __builtin_ctzll(found);
            if (!(parked.fetch_and(~(uint64_t(1) << bit), std::memory_order_seq_cst) >> bit & 1)) {
                continue;
            }
            Bed& bed = beds_[first + bit];
            {
                std::lock_guard<std::mutex> lock(bed.mutex);
                bed.is_woken = true;
            }
            bed.woken.notify_one();
            if (++woken == 2) {
                return;
            }
        }
    }
}

void ThreadPool::park(int worker) {
    std::atomic<uint64_t>& parked = parked_[worker / 64];
    const uint64_t bit = uint64_t(1) << worker % 64;
    parked.fetch_or(bit, std::memory_order_seq_cst);
    if (claims_.has_work(worker) && (parked.fetch_and(~bit, std::memory_order_seq_cst) & bit)) {
        return;
    }
    Bed& bed = beds_[worker];
    {
        std::unique_lock<std::mutex> lock(bed.mutex);
        bed.woken.wait(lock, [&] { return bed.is_woken; });
        bed.is_woken = false;
    }
    wake_two();
}

bool ThreadPool::claim_and_call(int worker) {
    const int index = claims_.claim(worker, now);
    if (index == Claims::kNone) {
        return false;
    }
    if (index == Claims::kLeave) {
        for (int i = 0; i < 16; ++i) {
            relax();
        }
        return true;
    }
    const bool alike = claims_.alike();
    const int64_t begin = alike ? now() : 0;
    try {
        if (!failed_.load(std::memory_order_relaxed)) {
            call_(task_, index, worker);
        }
    } catch (...) {
        if (!failed_.exchange(true, std::memory_order_relaxed)) {
            error_ = std::current_exception();
        }
    }
    if (alike) {
        claims_.took(worker, now() - begin);
    }
    if (unfinished_.fetch_sub(1, std::memory_order_seq_cst) == 1 && caller_asleep_.load(std::memory_order_seq_cst)) {
        std::lock_guard<std::mutex> lock(caller_mutex_);
        work_done_.notify_one();
    }
    return true;
}

void ThreadPool::work(int worker) {
    prepare_worker();
    const FloatEnvironment pinned;
    const auto ready = [&] { return claims_.has_work(worker); };
    for (;;) {
        while (!spin_until(ready)) {
            park(worker);
        }
        while (claim_and_call(worker)) {
        }
    }
}

FloatEnvironment::FloatEnvironment() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
}

FloatEnvironment::~FloatEnvironment() {
    std::fesetenv(&before_);
}

}  // namespace pystaged
