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

#include "machine/memory.h"

namespace pystaged {

// What a process has one of, never destroyed: threads may be asleep in it when the process ends. A child of fork() gets
// another one, without what the parent's threads, which it lacks, may have locked.
template <class T>
class OfProcess {
public:
    static T& get() {
        (void)registered_;
        return *current_;
    }

private:
    // Made when the library is loaded: a child of fork() would wait for ever for a thread that was just making it.
    static inline std::atomic<T*> current_{new T};
    static inline const int registered_ = in_children([] { current_ = new T; });
};

class ThreadPool {
public:
    static ThreadPool& shared() { return OfProcess<ThreadPool>::get(); }

    static constexpr int kMaxThreads = 256;

    // Tells sleeping workers that there will be work for so many threads in a moment, so that the first job need not
    // wait for them.
    void wake(int num_threads);

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

    friend class OfProcess<ThreadPool>;

    ThreadPool() = default;
    void dispatch(int count, int num_threads, Call call, const void* task);
    void grow(int num_workers);
    void work(int worker);
    bool has_work(int worker) const;
    bool claim_and_call(int worker);

    std::mutex run_mutex_;  // one job at a time

    // How many threads work on the job in hand, and how many of its indices nobody has claimed: num_threads << 32 |
    // left. Whoever counts `left` down by compare-and-swap has claimed index count_ - left.
    alignas(kCacheLine) std::atomic<uint64_t> ticket_{0};

    // The job: written when no index is left and none unfinished, read by who has claimed one and not finished it. So
    // no thread reads while another writes. Its values are the right ones: the compare-and-swap (acquire) reads what
    // dispatch() stored in ticket_ (release) after the fields, or what other claims made of that. And it is over when
    // dispatch() overwrites it: reading 0 in unfinished_ (acquire), it has seen the end (release) of every index.
    alignas(kCacheLine) int count_ = 0;
    Call call_ = nullptr;
    const void* task_ = nullptr;
    std::atomic<bool> failed_{false};
    std::exception_ptr error_;  // of whoever set failed_
    alignas(kCacheLine) std::atomic<int> unfinished_{0};

    // Sleep. Who falls asleep says so and then looks once more; who has something new stores it and then looks for
    // sleepers. As all four are sequentially consistent, one of the two sees the other.
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

}  // namespace pystaged
