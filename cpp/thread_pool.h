// One pool of workers for the process: starts and joins in about a microsecond while work is flowing, sleeps when idle.
//
// Work is claimed index by index, so a worker that the scheduler took off its core never holds up more than the index
// it has in hand, and a caller without any worker (on a machine with no free core) does all of it alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>

#include "memory.h"

namespace pystaged {

class ThreadPool {
public:
    // Never destroyed: workers may be asleep in it when the process ends. A child of fork() has one of its own.
    static ThreadPool& shared();

    static constexpr int kMaxThreads = 256;

    // Tells sleeping workers that there will be work in a moment, so that the first job need not wait for them.
    void wake();

    // Calls task(index, worker) for every index in [0, count), worker in [0, num_threads). The caller is worker 0.
    // Throws the first exception of a task, once none is running; what had not begun by then is left out.
    template <class Task>
    void run(int count, int num_threads, const Task& task) {
        if (count <= 1 || num_threads <= 1) {
            for (int i = 0; i < count; ++i) {
                task(i, 0);
            }
            return;
        }
        dispatch(count, num_threads, [](const void* t, int i, int w) { (*static_cast<const Task*>(t))(i, w); }, &task);
    }

private:
    using Call = void (*)(const void* task, int index, int worker);

    ThreadPool() = default;
    static std::atomic<ThreadPool*>& current();
    void dispatch(int count, int num_threads, Call call, const void* task);
    void grow(int num_workers);
    void work(int worker);
    bool claim_and_call(uint64_t ticket, int worker);

    std::mutex run_mutex_;  // one job at a time

    // The job in hand. `ticket_` is (job number << 32 | next index); the fields are written while it holds kClosed, so
    // whoever then claims an index by compare-and-swap has read fields of that very job.
    static constexpr uint64_t kClosed = 0xffffffffu;
    alignas(kCacheLine) std::atomic<uint64_t> ticket_{kClosed};
    alignas(kCacheLine) std::atomic<int> count_{0};
    std::atomic<int> num_threads_{0};
    std::atomic<Call> call_{nullptr};
    std::atomic<const void*> task_{nullptr};
    std::atomic<bool> failed_{false};
    std::exception_ptr error_;  // of whoever set failed_; read when nothing is unfinished
    alignas(kCacheLine) std::atomic<int> unfinished_{0};
    std::atomic<bool> caller_asleep_{false};

    alignas(kCacheLine) std::mutex sleep_mutex_;
    std::condition_variable work_ready_, work_done_;
    std::atomic<int> num_asleep_{0};
    uint64_t wakes_ = 0;  // calls of wake() that found somebody asleep
    int num_workers_ = 0;
};

// Floats as the language promises them, rounded to nearest and with subnormals, while it lives: other libraries change
// that for threads which then call us.
class FloatEnvironment {
public:
    FloatEnvironment();
    ~FloatEnvironment();
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;

private:
    uint64_t before_;
};

// CPUs that control groups (Linux, version 1 or 2) grant this process, rounded up, or 0 where they set no limit. Their
// files are looked for under `root`.
int cpu_quota(const std::string& root = "");

// Number of physical cores this process may keep busy, at least 1.
int physical_cores();

}  // namespace pystaged
