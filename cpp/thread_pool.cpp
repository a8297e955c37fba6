#include "thread_pool.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <set>
#include <string>
#include <system_error>
#include <thread>

#ifdef __x86_64__
#include <immintrin.h>
#endif
#ifdef __linux__
#include <sched.h>
#endif
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

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

ThreadPool& ThreadPool::shared() {
    static ThreadPool* pool = new ThreadPool;
    return *pool;
}

void ThreadPool::grow(int num_workers) {
    try {
        while (num_workers_ < std::min(num_workers, kMaxThreads - 1)) {
            const int worker = num_workers_ + 1;
            std::thread([this, worker] { work(worker); }).detach();
            num_workers_ = worker;
        }
    } catch (const std::system_error&) {
        // The system has no thread to give; those we have do the work.
    }
}

void ThreadPool::dispatch(int count, int num_threads, Call call, const void* task) {
    std::lock_guard<std::mutex> lock(run_mutex_);
    grow(num_threads - 1);
    const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(job << 32 | kClosed, std::memory_order_seq_cst);
    count_.store(count, std::memory_order_relaxed);
    num_threads_.store(num_threads, std::memory_order_relaxed);
    call_.store(call, std::memory_order_relaxed);
    task_.store(task, std::memory_order_relaxed);
    unfinished_.store(count, std::memory_order_relaxed);
    ticket_.store((job + 1) << 32, std::memory_order_seq_cst);
    if (num_asleep_.load(std::memory_order_seq_cst) > 0) {
        std::lock_guard<std::mutex> sleep_lock(sleep_mutex_);
        work_ready_.notify_all();
    }
    while (claim_and_call(ticket_.load(std::memory_order_acquire), 0)) {
    }
    const auto done = [this] { return unfinished_.load(std::memory_order_seq_cst) == 0; };
    if (!spin_until(done)) {
        std::unique_lock<std::mutex> sleep_lock(sleep_mutex_);
        caller_asleep_.store(true, std::memory_order_seq_cst);
        work_done_.wait(sleep_lock, done);
        caller_asleep_.store(false, std::memory_order_relaxed);
    }
}

bool ThreadPool::claim_and_call(uint64_t ticket, int worker) {
    for (;;) {
        const uint64_t index = ticket & kClosed;
        const Call call = call_.load(std::memory_order_relaxed);
        const void* task = task_.load(std::memory_order_relaxed);
        const int count = count_.load(std::memory_order_relaxed);
        const int num_threads = num_threads_.load(std::memory_order_relaxed);
        if (index >= static_cast<uint64_t>(count) || worker >= num_threads) {
            return false;
        }
        if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
            call(task, static_cast<int>(index), worker);
            if (unfinished_.fetch_sub(1, std::memory_order_seq_cst) == 1 &&
                caller_asleep_.load(std::memory_order_seq_cst)) {
                std::lock_guard<std::mutex> sleep_lock(sleep_mutex_);
                work_done_.notify_one();
            }
            return true;
        }
    }
}

void ThreadPool::work(int worker) {
    uint64_t seen = 0;
    for (;;) {
        uint64_t ticket = 0;
        const auto has_work = [&] {
            ticket = ticket_.load(std::memory_order_seq_cst);
            return (ticket & kClosed) != kClosed && (ticket >> 32) != seen;
        };
        if (!spin_until(has_work)) {
            std::unique_lock<std::mutex> sleep_lock(sleep_mutex_);
            num_asleep_.fetch_add(1, std::memory_order_seq_cst);
            work_ready_.wait(sleep_lock, has_work);
            num_asleep_.fetch_sub(1, std::memory_order_relaxed);
        }
        const uint64_t job = ticket >> 32;
        while ((ticket >> 32) == job && claim_and_call(ticket, worker)) {
            ticket = ticket_.load(std::memory_order_acquire);
        }
        // Whatever job the ticket is at now gets a fresh look; this one has nothing left for us.
        seen = job;
    }
}

namespace {

#ifdef __linux__
int cores_by_topology() {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
        return 0;
    }
    std::set<std::string> cores;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &allowed)) {
            continue;
        }
        std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
        std::string siblings;
        if (!std::getline(file, siblings)) {
            return CPU_COUNT(&allowed);
        }
        cores.insert(siblings);
    }
    return static_cast<int>(cores.size());
}
#elif defined(__APPLE__)
int cores_by_topology() {
    // Performance cores where there are two kinds: the slow ones would hold up every join.
    for (const char* name : {"hw.perflevel0.physicalcpu", "hw.physicalcpu"}) {
        int value = 0;
        size_t size = sizeof(value);
        if (sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value > 0) {
            return value;
        }
    }
    return 0;
}
#else
int cores_by_topology() {
    return 0;
}
#endif

}  // namespace

int physical_cores() {
    const int cores = cores_by_topology();
    return cores > 0 ? cores : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace pystaged
