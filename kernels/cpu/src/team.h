// Threads that walk together through the stages of a call.
//
// Every thread runs the call's whole code. Where the code says `parallel_for`, the threads draw the stage's tasks one by
// one and go on once all of them are done: done, not once all threads have come. So a thread that the system keeps from
// running between two tasks keeps nobody waiting before the call ends, and finds later that others did its share.
// Between stages a thread may read the call's arguments and its own memory alone; what a stage wrote is read in later
// stages.
#pragma once
#include "simd.h"

// Which tasks of a stage were drawn, and how many are done. Never used twice in a call, so that a late thread cannot
// take it for another.
struct alignas(64) Stage {
    int64_t drawn, done;
    void* memory;
};

// One thread's place among the stages. Without stages the thread is alone.
struct Walk {
    int threads;
    Stage* next_stage;
    Stage* last_stage;
};

// Turns of a waiting loop before the thread lets others run.
constexpr int kSpinTurns = 4096;

INLINE void wait_until_done(const Stage& stage, int64_t count) {
    for (int turn = 0; __atomic_load_n(&stage.done, __ATOMIC_ACQUIRE) < count; turn++) {
        if (turn >= kSpinTurns)
            octavo::let_others_run();
        else
            relax();
    }
}

// Calls body(i) for i in [0, count); any thread may run any i, so a body never sums over i.
template <class Body>
INLINE void parallel_for(Walk& walk, int64_t count, const Body& body) {
    if (!walk.next_stage) {
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
    if (walk.next_stage == walk.last_stage) __builtin_trap();
    Stage& stage = *walk.next_stage++;
    int64_t done = 0;
    for (int64_t i; (i = __atomic_fetch_add(&stage.drawn, 1, __ATOMIC_RELAXED)) < count; done++) body(i);
    if (done) __atomic_fetch_add(&stage.done, done, __ATOMIC_RELEASE);
    wait_until_done(stage, count);
}

// As parallel_for over the runs of [0, count), `most` of them at most: body(begin, end).
template <class Body>
INLINE void parallel_ranges(Walk& walk, int64_t count, int64_t most, const Body& body) {
    const int64_t runs = most < count ? most : count;
    parallel_for(walk, runs, [&](int64_t i) INLINE_BODY { body(count * i / runs, count * (i + 1) / runs); });
}

// Memory that all threads see, from the scratch of one of them.
INLINE void* shared_scratch(Walk& walk, octavo::ScratchSlot slot, size_t num_bytes) {
    if (!walk.next_stage) return octavo::thread_scratch(slot, num_bytes);
    Stage& stage = *walk.next_stage;
    parallel_for(walk, 1, [&](int64_t) { stage.memory = octavo::thread_scratch(slot, num_bytes); });
    return stage.memory;
}

// Calls body(walk) in each of `threads` threads, for at most `num_stages` stages.
template <class Body>
INLINE void in_team(int threads, int64_t num_stages, const Body& body) {
    if (threads <= 1) {
        Walk alone = {1, nullptr, nullptr};
        return body(alone);
    }
    auto stages = static_cast<Stage*>(octavo::thread_scratch(octavo::kStageScratch, num_stages * sizeof(Stage)));
    __builtin_memset(stages, 0, num_stages * sizeof(Stage));
#pragma omp parallel num_threads(threads)
    {
        Walk walk = {threads, stages, stages + num_stages};
        body(walk);
    }
}
