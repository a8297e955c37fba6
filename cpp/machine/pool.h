// One pool of workers for the process: starts and joins in about a microsecond while work is flowing, sleeps when idle.
//
// Work is claimed index by index, so a worker that the scheduler took off its core never holds up more than the index
// it has in hand, and a caller without any worker (on a machine with no free core) does all of it alone.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "machine/math.h"
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

// Who takes which index of a job. It has neither threads nor a clock, so that a simulation may drive it, too.
class Claims {
public:
    static constexpr int kMaxThreads = 256;

    // What claim() says instead of an index: there is none for this worker; or faster ones will have done what is left
    // before it had done one, so let it ask again.
    static constexpr int kNone = -1, kLeave = -2;

    // The next job, when no index of the last one is unfinished. `work`: what each index costs, in any unit, the same
    // for all jobs; 0 where indices differ.
    void open(int count, int num_threads, int work) {
        count_ = count;
        work_.store(work, std::memory_order_relaxed);
        is_first_.store(true, std::memory_order_relaxed);
        ticket_.store((work > 0 ? kAlike : 0) | uint64_t(num_threads) << 32 | uint32_t(count),
                      std::memory_order_seq_cst);
    }
    bool has_work(int worker) const {
        const uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
        return left_in(ticket) > 0 && worker < threads_of(ticket);
    }
    // now() are nanoseconds.
    template <class Now>
    int claim(int worker, const Now& now) {
        Pace& own = paces_[worker];
        uint64_t ticket = ticket_.load(std::memory_order_relaxed);
        do {
            const int left = left_in(ticket);
            if (left == 0 || worker >= threads_of(ticket)) {
                own.left = 0;
                return kNone;
            }
            if (ticket & kAlike && leaves(worker, threads_of(ticket), left)) {
                // Unless none was claimed for twice the time of the fastest: others may have lost their cores.
                const int64_t time = now();
                own.since = own.left == left ? own.since : time;
                own.left = left;
                if (time - own.since <
                    2 * least_.load(std::memory_order_relaxed) * work_.load(std::memory_order_relaxed)) {
                    return kLeave;
                }
            }
        } while (
            !ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acquire, std::memory_order_relaxed));
        own.left = 0;
        return count_ - left_in(ticket);
    }
    // Whether the indices of the job cost the same; then took() is to be called after each.
    bool alike() const { return work_.load(std::memory_order_relaxed) > 0; }
    void took(int worker, int64_t nanoseconds) {
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

private:
    static constexpr uint64_t kAlike = uint64_t(1) << 63;
    // How much slower than before a worker may look after an index.
    static constexpr float kRise = 0.25f;

    static int left_in(uint64_t ticket) { return static_cast<int>(uint32_t(ticket)); }
    static int threads_of(uint64_t ticket) { return static_cast<int>((ticket & ~kAlike) >> 32); }
    // Whether faster workers, if each had just begun one, would end all that are left before this one ended one.
    bool leaves(int worker, int num_threads, int left) const {
        const float own = slowness_[worker].load(std::memory_order_relaxed);
        int sooner = 0;
        for (int other = 0; own >= 2 && other < num_threads && sooner < left; ++other) {
            const float its = std::max(1.0f, slowness_[other].load(std::memory_order_relaxed));
            sooner += std::max(0, static_cast<int>(own / its) - 1);
        }
        return sooner >= left;
    }

    // How many threads work on the job in hand, and how many of its indices nobody has claimed: alike << 63 |
    // num_threads << 32 | left. Whoever counts `left` down by compare-and-swap has claimed index count_ - left.
    alignas(kCacheLine) std::atomic<uint64_t> ticket_{0};

    // Written as ThreadPool's fields of the job are.
    alignas(kCacheLine) int count_ = 0;
    std::atomic<int> work_{0};
    // Nanoseconds that one of the job took for each unit of work; before the first of it is done, of the job before.
    std::atomic<float> least_{0};
    std::atomic<bool> is_first_{false};

    // How many times longer than the job's fastest worker each takes.
    alignas(kCacheLine) std::atomic<float> slowness_[kMaxThreads] = {};
    struct alignas(kCacheLine) Pace {
        int64_t since = 0;  // when it left to others the `left` that there are
        int left = 0;       // or 0
    };
    Pace paces_[kMaxThreads];
};

class ThreadPool {
public:
    static ThreadPool& shared() { return OfProcess<ThreadPool>::get(); }

    static constexpr int kMaxThreads = Claims::kMaxThreads;

    // Tells sleeping workers that there will be work for so many threads in a moment, so that the first job need not
    // wait for them.
    void wake(int num_threads) {
        num_threads = std::min(num_threads, kMaxThreads);
        // Perhaps of a job of another thread, which is not cut short.
        int wanted = wanted_.load(std::memory_order_relaxed);
        while (wanted < num_threads && !wanted_.compare_exchange_weak(wanted, num_threads, std::memory_order_relaxed)) {
        }
        wake_two();
    }

    // Calls task(index, worker) for every index in [0, count), worker in [0, num_threads), of which kMaxThreads count
    // at most. The caller is worker 0. Throws the first exception of a task, once none is running; what had not begun
    // by then is left out. `work`: as Claims has it.
    template <class Task>
    void run(int count, int num_threads, const Task& task, int work = 0) {
        if (count <= 1 || num_threads <= 1) {
            for (int i = 0; i < count; ++i) {
                task(i, 0);
            }
            return;
        }
        const Call call = [](const void* t, int i, int w) { (*static_cast<const Task*>(t))(i, w); };
        dispatch(count, std::min(num_threads, kMaxThreads), work, call, &task);
    }

private:
    using Call = void (*)(const void* task, int index, int worker);

    // Long enough to cover the gaps inside a pass, short enough that nobody notices it between passes.
    static constexpr auto kSpin = std::chrono::microseconds(50);

    static void relax() {
#ifdef __x86_64__
        __builtin_ia32_pause();
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

    friend class OfProcess<ThreadPool>;

    ThreadPool() = default;
    void dispatch(int count, int num_threads, int work, Call call, const void* task) {
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
    void grow(int num_workers) {
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
    void work(int worker) {
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
    // Returns false when there is nothing more for this worker.
    bool claim_and_call(int worker) {
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
        if (unfinished_.fetch_sub(1, std::memory_order_seq_cst) == 1 &&
            caller_asleep_.load(std::memory_order_seq_cst)) {
            std::lock_guard<std::mutex> lock(caller_mutex_);
            work_done_.notify_one();
        }
        return true;
    }
    void park(int worker) {
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
    void wake_two() {
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

    std::mutex run_mutex_;  // one job at a time

    // The job: written when no index is left and none unfinished, read by who has claimed one and not finished it. So
    // no thread reads while another writes. Its values are the right ones: the compare-and-swap (acquire) of a claim
    // reads what dispatch() stored in the ticket (release) after the fields, or what other claims made of that. And it
    // is over when dispatch() overwrites it: reading 0 in unfinished_ (acquire), it has seen the end (release) of every
    // index.
    Claims claims_;
    alignas(kCacheLine) Call call_ = nullptr;
    const void* task_ = nullptr;
    std::atomic<bool> failed_{false};
    std::exception_ptr error_;  // of whoever set failed_
    alignas(kCacheLine) std::atomic<int> unfinished_{0};

    // Sleep. Who falls asleep says so and then looks once more; who has something new stores it and then looks for
    // sleepers. As all four are sequentially consistent, one of the two sees the other. A sleeper's bit is taken back
    // by itself or by who wakes it, whoever comes first; each that is woken wakes two more, as far as a job needs them.
    std::atomic<bool> caller_asleep_{false};
    std::mutex caller_mutex_;
    std::condition_variable work_done_;
    alignas(kCacheLine) std::atomic<uint64_t> parked_[kMaxThreads / 64] = {};
    std::atomic<int> wanted_{0};  // threads, by the last job or wake()
    struct alignas(kCacheLine) Bed {
        std::mutex mutex;
        std::condition_variable woken;
        bool is_woken = false;
    };
    Bed beds_[kMaxThreads];
    int num_workers_ = 0;
};

}  // namespace pystaged
