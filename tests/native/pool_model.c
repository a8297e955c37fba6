// The thread pool's protocol (cpp/machine/pool.h), small enough for a model checker of weak memory, which tries every
// execution that C11 (RC11) or a CPU (IMM) allows and reports races of the plain fields, too. Needs GenMC (0.10):
//   for model in rc11 imm; do genmc --$model pool_model.c; genmc --$model -- -DSLEEPERS pool_model.c; done
// It must find an error with any one of -DPUBLISH, -DCLAIM, -DFINISH or -DWAIT=memory_order_relaxed, with -DEARLY, and
// with -DSLEEPERS -DSLEEP=memory_order_relaxed, so that we know it looks.
#include <assert.h>
#include <genmc.h>  // __VERIFIER_assume
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#ifndef PUBLISH
#define PUBLISH memory_order_seq_cst
#endif
#ifndef CLAIM
#define CLAIM memory_order_acquire
#endif
#ifndef FINISH
#define FINISH memory_order_seq_cst
#endif
#ifndef WAIT
#define WAIT memory_order_seq_cst
#endif
#ifndef SLEEP
#define SLEEP memory_order_seq_cst
#endif

enum { kWorkers = 2, kJobs = 2 };
// Of each job; the second has an index for more threads than it may use.
static const int kCounts[kJobs] = {1, 3}, kThreads[kJobs] = {3, 2};

static _Atomic uint64_t ticket;
static int count, task;
static atomic_int unfinished, calls[kJobs][3], parked, caller_asleep;
static int slept, wakes_caller;

static int has_work(int worker) {
    const uint64_t t = atomic_load_explicit(&ticket, SLEEP);
    return (uint32_t)t > 0 && (uint64_t)worker < t >> 32;
}

// A worker that leaves the rest to faster ones reads nothing that orders anything, and does not claim.
static int claim_and_call(int worker) {
    uint64_t t = atomic_load_explicit(&ticket, memory_order_relaxed);
    if ((uint32_t)t == 0 || (uint64_t)worker >= t >> 32) {
        return 0;
    }
#ifdef EARLY  // fields read before the claim, whose job may be over
    const int index = count - (int)(uint32_t)t, job = task;
#endif
    // One that fails is one that came later.
    __VERIFIER_assume(atomic_compare_exchange_strong_explicit(&ticket, &t, t - 1, CLAIM, memory_order_relaxed));
#ifndef EARLY
    const int index = count - (int)(uint32_t)t, job = task;
#endif
    assert(worker < kThreads[job] && index >= 0 && index < kCounts[job]);
    atomic_fetch_add_explicit(&calls[job][index], 1, memory_order_relaxed);
    atomic_fetch_sub_explicit(&unfinished, 1, FINISH);
    return 1;
}

static void dispatch(int job) {
    count = kCounts[job];
    task = job;
    atomic_store_explicit(&unfinished, kCounts[job], memory_order_relaxed);
    atomic_store_explicit(&ticket, (uint64_t)kThreads[job] << 32 | kCounts[job], PUBLISH);
    while (claim_and_call(0)) {
    }
    __VERIFIER_assume(atomic_load_explicit(&unfinished, WAIT) == 0);
    for (int i = 0; i < kCounts[job]; ++i) {
        assert(atomic_load_explicit(&calls[job][i], memory_order_relaxed) == 1);
    }
}

static void* work(void* worker) {
    for (int i = 0; i < 2; ++i) {
        claim_and_call((int)(intptr_t)worker);
    }
    return 0;
}

// Sleep, apart from the rest: whoever falls asleep although there is news is woken, once, and nobody else is.
static int take_bit(int worker) {
    return atomic_fetch_and_explicit(&parked, ~(1 << worker), SLEEP) >> worker & 1;
}
static void* fall_asleep(void* unused) {
    (void)unused;
    atomic_fetch_or_explicit(&parked, 1 << 1, SLEEP);
    slept = !has_work(1) || !take_bit(1);
    return 0;
}
static void* finish(void* unused) {
    (void)unused;
    atomic_fetch_sub_explicit(&unfinished, 1, FINISH);
    wakes_caller = atomic_load_explicit(&caller_asleep, SLEEP);
    return 0;
}

int main(void) {
    pthread_t threads[kWorkers];
#ifndef SLEEPERS
    for (int i = 0; i < kWorkers; ++i) {
        pthread_create(&threads[i], 0, work, (void*)(intptr_t)(i + 1));
    }
    for (int job = 0; job < kJobs; ++job) {
        dispatch(job);
    }
#else
    unfinished = 1;
    pthread_create(&threads[0], 0, fall_asleep, 0);
    pthread_create(&threads[1], 0, finish, 0);
    atomic_store_explicit(&ticket, (uint64_t)2 << 32 | 1, PUBLISH);
    const int wakes = (atomic_load_explicit(&parked, SLEEP) >> 1 & 1) && take_bit(1);
    atomic_store_explicit(&caller_asleep, 1, SLEEP);
    const int waits = atomic_load_explicit(&unfinished, WAIT) != 0;
    pthread_join(threads[0], 0);
    pthread_join(threads[1], 0);
    assert(wakes == slept);
    assert(wakes_caller || !waits);
#endif
    return 0;
}
