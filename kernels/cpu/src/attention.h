// Paged causal attention over a ragged batch: cuts it into tasks, the same ones in every thread.
//
// A task takes some rows of one sequence and KV head through all their partitions. Where tasks are too few for the
// threads, each partition becomes a task and its results are folded afterwards, in the same order by the same function.
#pragma once
#include "attention_partition.h"

// Tasks per thread below which a row's partitions are shared out.
constexpr int kMinTasksPerThread = 6;
// Tasks of few rows are drawn in runs, about so many for each thread, so that it knows what it will read next.
constexpr int kRunsPerThread = 8;

INLINE void finish_row(const octavo::AttentionArgs& a, const Geometry& g, const Task& task, int row,
                       const RowState& state, const float* o) {
    int64_t token = a.query_starts[task.batch_row] + row / g.group;
    int head = task.kv_head * g.group + row % g.group;
    char* to = a.out + (token * a.num_heads + head) * g.head_bytes;
    F16 sum = set1(state.sum);
    for (int d = 0; d < g.dim; d += kLanes) store_as(to, d, a.dtype, div(load(o + d), sum));
}

// Partitions [first, limit) that any row of a task sees.
INLINE Span task_partitions(const octavo::AttentionArgs& a, const Geometry& g, const Task& task) {
    int64_t first = row_span(a, g, task, task.begin).first, limit = row_span(a, g, task, task.end - 1).limit;
    return {first / kPartition, (limit + kPartition - 1) / kPartition};
}

template <class Path>
static void run_whole(const octavo::AttentionArgs& a, const Geometry& g, const Task& task, const Task& next) {
    alignas(64) typename Path::Query queries[kMaxTaskRows * kMaxHeadDim];
    alignas(64) float o[kMaxTaskRows * kMaxHeadDim];
    RowState states[kMaxTaskRows] = {};
    gather_queries<Path>(a, g, task, queries);
    Span partitions = task_partitions(a, g, task);
    for (int64_t p = partitions.first; p < partitions.limit; p++) {
        Stretch then = {task.batch_row, task.kv_head, p + 1};
        if (p + 1 == partitions.limit) then = {next.batch_row, next.kv_head, task_partitions(a, g, next).first};
        attend_partition<Path>(a, g, task, p, then, queries, states, o);
    }
    for (int row = task.begin; row < task.end; row++)
        finish_row(a, g, task, row, states[row - task.begin], o + (row - task.begin) * g.dim);
}

// One partition of a task as work of its own, its rows' results kept for the fold.
struct Share {
    Task task;
    int64_t partition;
    RowState* states;
    float* o;
};

template <class Path>
static void run_share(const octavo::AttentionArgs& a, const Geometry& g, const Share& share, const Share& next) {
    alignas(64) typename Path::Query queries[kMaxTaskRows * kMaxHeadDim];
    gather_queries<Path>(a, g, share.task, queries);
    for (int row = 0; row < share.task.end - share.task.begin; row++) share.states[row].started = false;
    const Stretch then = {next.task.batch_row, next.task.kv_head, next.partition};
    attend_partition<Path>(a, g, share.task, share.partition, then, queries, share.states, share.o);
}

// As parallel_for over tasks, of which those with few rows are drawn together with their neighbours: body(i, next),
// where `next` is what the thread does after i, or i again.
template <class IsFew, class Body>
INLINE void parallel_runs(Walk& walk, int64_t count, const IsFew& is_few, const Body& body) {
    auto ends = static_cast<int64_t*>(octavo::thread_scratch(octavo::kRunScratch, count * sizeof(int64_t)));
    int64_t few = 0, runs = 0;
    for (int64_t i = 0; i < count; i++) few += is_few(i);
    const int64_t longest = walk.threads > 1 ? ceil_div(few, walk.threads * kRunsPerThread) : count;
    for (int64_t i = 0, length = 1; i < count; i++, length++) {
        if (i + 1 < count && length < longest && is_few(i) && is_few(i + 1)) continue;
        ends[runs++] = i + 1;
        length = 0;
    }
    parallel_for(walk, runs, [&](int64_t run) {
        for (int64_t i = run ? ends[run - 1] : 0; i < ends[run]; i++) body(i, i + 1 < ends[run] ? i + 1 : i);
    });
}

// Calls visit(task) for every task, the longest contexts of a prompt first so that threads end together.
template <class Visit>
INLINE void each_task(const octavo::AttentionArgs& a, const Geometry& g, const Visit& visit) {
    for (int64_t b = 0; b < a.num_rows; b++) {
        int rows = (a.query_starts[b + 1] - a.query_starts[b]) * g.group;
        int chunks = ceil_div(rows, kMaxTaskRows);
        for (int c = chunks - 1; c >= 0; c--)
            for (int h = 0; h < a.kv.num_kv_heads; h++) {
                int begin = c * kMaxTaskRows;
                visit(Task{b, h, begin, rows < begin + kMaxTaskRows ? rows : begin + kMaxTaskRows});
            }
    }
}

INLINE void fold_shares(const octavo::AttentionArgs& a, const Geometry& g, const Share* shares, int64_t count) {
    alignas(64) float o[kMaxHeadDim];
    for (int64_t first = 0; first < count;) {
        int64_t last = first;
        const Task& task = shares[first].task;
        while (last < count && shares[last].task.batch_row == task.batch_row &&
               shares[last].task.kv_head == task.kv_head && shares[last].task.begin == task.begin)
            last++;
        for (int row = 0; row < task.end - task.begin; row++) {
            RowState state = {};
            for (int64_t i = first; i < last; i++)
                if (shares[i].states[row].started)
                    fold(state, o, shares[i].states[row], shares[i].o + row * g.dim, g.dim);
            finish_row(a, g, task, task.begin + row, state, o);
        }
        first = last;
    }
}

template <class Path>
static void run_shared(const octavo::AttentionArgs& a, const Geometry& g, Walk& walk) {
    int64_t count = 0, rows = 0;
    each_task(a, g, [&](const Task& task) {
        Span p = task_partitions(a, g, task);
        count += p.limit - p.first;
        rows += (p.limit - p.first) * (task.end - task.begin);
    });
    size_t row_bytes = sizeof(RowState) + g.dim * sizeof(float);
    auto shares = static_cast<Share*>(octavo::thread_scratch(octavo::kTaskScratch, count * sizeof(Share)));
    auto o = static_cast<float*>(shared_scratch(walk, octavo::kAttentionScratch, rows * row_bytes));
    auto states = reinterpret_cast<RowState*>(o + rows * g.dim);
    int64_t i = 0;
    each_task(a, g, [&](const Task& task) {
        Span partitions = task_partitions(a, g, task);
        for (int64_t p = partitions.first; p < partitions.limit; p++, i++) {
            shares[i] = {task, p, states, o};
            states += task.end - task.begin;
            o += (task.end - task.begin) * g.dim;
        }
    });
    parallel_runs(
        walk, count, [&](int64_t s) { return has_few_rows(shares[s].task); },
        [&](int64_t s, int64_t next) { run_share<Path>(a, g, shares[s], shares[next]); });
    parallel_for(walk, 1, [&](int64_t) { fold_shares(a, g, shares, count); });
}

template <class Path>
static void run_attention(const octavo::AttentionArgs& a, Walk& walk) {
    const Geometry g(a);
    int64_t count = 0, partitions = 0;
    each_task(a, g, [&](const Task& task) {
        Span p = task_partitions(a, g, task);
        count++;
        partitions += p.limit - p.first;
    });
    if (walk.threads > 1 && count < walk.threads * kMinTasksPerThread && partitions > count)
        return run_shared<Path>(a, g, walk);
    auto tasks = static_cast<Task*>(octavo::thread_scratch(octavo::kTaskScratch, count * sizeof(Task)));
    int64_t i = 0;
    each_task(a, g, [&](const Task& task) { tasks[i++] = task; });
    parallel_runs(
        walk, count, [&](int64_t t) { return has_few_rows(tasks[t]); },
        [&](int64_t t, int64_t next) { run_whole<Path>(a, g, tasks[t], tasks[next]); });
}

static void attention(const octavo::AttentionArgs& a, Walk& walk) {
    if (a.kv.dtype == octavo::kF32) return run_attention<FmaPath<KvF32>>(a, walk);
    if (a.kv.dtype == octavo::kF16) return run_attention<FmaPath<KvF16>>(a, walk);
#if defined(__AVX512BF16__)
    if (a.dtype == octavo::kBf16) return run_attention<DotPath>(a, walk);
#endif
    run_attention<FmaPath<KvBf16>>(a, walk);
}
