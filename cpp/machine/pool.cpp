#include "machine/pool.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <sstream>
#include <thread>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
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

namespace {

// Microseconds of CPU time in each period; zeros, or -1, where there is no limit.
struct Quota {
    double used = 0, period = 0;
};

Quota read_quota(const std::string& used_path, const std::string& period_path) {
    Quota quota;
    std::ifstream used(used_path);
    used >> quota.used;
    if (period_path.empty()) {
        used >> quota.period;
    } else {
        std::ifstream(period_path) >> quota.period;
    }
    return quota;
}

}  // namespace

int cpu_quota(const std::string& root) {
    double least = 0;
    const auto consider = [&](const Quota& quota) {
        if (quota.used > 0 && quota.period > 0) {
            const double cpus = quota.used / quota.period;
            least = least > 0 ? std::min(least, cpus) : cpus;
        }
    };
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        // number:controllers:/path, without controllers in version 2
        std::istringstream fields(line);
        std::string number, controllers, path;
        if (!std::getline(fields, number, ':') || !std::getline(fields, controllers, ':') ||
            !std::getline(fields, path)) {
            continue;
        }
        const bool first = ("," + controllers + ",").find(",cpu,") != std::string::npos;
        if (!first && !controllers.empty()) {
            continue;
        }
        // A group's limit binds those below it. In a container the path may be the host's, and only the root is there.
        for (path = path == "/" ? "" : path;; path.resize(path.rfind('/'))) {
            const std::string mount = root + "/sys/fs/cgroup";
            if (first) {
                for (const std::string& name : {controllers, std::string("cpu")}) {
                    const std::string folder = mount + "/" + name + path;
                    consider(read_quota(folder + "/cpu.cfs_quota_us", folder + "/cpu.cfs_period_us"));
                }
            } else {
                consider(read_quota(mount + path + "/cpu.max", ""));
            }
            if (path.find('/') == std::string::npos) {
                break;
            }
        }
    }
    return static_cast<int>(std::min(std::ceil(least), 1e6));
}

int physical_cores() {
    int cores = cores_by_topology();
    cores = cores > 0 ? cores : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    const int quota = cpu_quota();
    return quota > 0 ? std::min(cores, quota) : cores;
}

}  // namespace pystaged
