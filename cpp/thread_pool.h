// One pool of workers for the process: starts and joins in about a microsecond while work is flowing, sleeps when idle.
//
// Work is claimed index by index, so a worker that the scheduler took off its core never holds up more than the index
// it has in hand, and a caller without any worker (after fork, or on a machine with no free core) does all of it alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace pystaged {

class ThreadPool {
public:
    // Never destroyed: workers may be asleep in it when the process ends.
    static ThreadPool& shared();

    static constexpr int kMaxThreads = 256;

    // Calls task(index, worker) for every index in [0, count), worker in [0, num_threads). The caller is worker 0.
    // Tasks must not throw.
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
    void dispatch(int count, int num_threads, Call call, const void* task);
    void grow(int num_workers);
    void work(int worker);
    bool claim_and_call(uint64_t ticket, int worker);

    std::mutex run_mutex_;  // one job at a time

    // The job in hand. `ticket_` is (job number << 32 | next index); the fields are written while it holds kClosed, so
    // whoever then claims an index by compare-and-swap has read fields of that very job.
    static constexpr uint64_t kClosed = 0xffffffffu;
    std::atomic<uint64_t> ticket_{kClosed};
    std::atomic<int> count_{0};
    std::atomic<int> num_threads_{0};
    std::atomic<Call> call_{nullptr};
    std::atomic<const void*> task_{nullptr};
    std::atomic<int> unfinished_{0};

    std::mutex sleep_mutex_;
    std::condition_variable work_ready_, work_done_;
    std::atomic<int> num_asleep_{0};
    std::atomic<bool> caller_asleep_{false};
    int num_workers_ = 0;
};

// Number of physical cores this process may run on, at least 1.
int physical_cores();

}  // namespace pystaged
