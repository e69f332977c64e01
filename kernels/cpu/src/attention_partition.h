// Attention of some rows over one partition of the cache, and the fold of partitions in ascending order.
//
// A row is one (query, head). What it computes over a partition, a maximum m, a sum of weights l and a weighted sum of
// values o, depends on its position alone, not on the rows computed beside it.
#pragma once
#include "attention_dot.h"
#include "rope.h"

constexpr int kMaxTaskRows = 48;
// Of a task that asks ahead. More stay with a tile long enough for the processor's own prefetching.
constexpr int kFewRows = 16;

// The rows [begin, end) of one batch row and KV head; row i is query token i / group, head i % group of the group.
struct Task {
    int64_t batch_row;
    int kv_head, begin, end;
};

// Running result of one row; o lies beside it.
struct RowState {
    float max, sum;
    bool started;
};

INLINE bool has_few_rows(const Task& task) { return task.end - task.begin <= kFewRows; }

INLINE int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

struct Geometry {
    int group, dim;
    int64_t head_bytes, token_bytes;
    float scale_log2;  // scores become exponents of two

    explicit Geometry(const octavo::AttentionArgs& a)
        : group(a.num_heads / a.kv.num_kv_heads), dim(a.kv.head_dim), head_bytes(dim * dtype_size(a.dtype)),
          token_bytes((a.num_heads + 2 * a.kv.num_kv_heads) * head_bytes),
          scale_log2(a.capped ? a.soft_cap * kLog2E : a.scale * kLog2E) {}
};

// Positions [first, limit) that a row sees.
struct Span {
    int64_t first, limit;
};

INLINE Span row_span(const octavo::AttentionArgs& a, const Geometry& g, const Task& task, int row) {
    int64_t num_queries = a.query_starts[task.batch_row + 1] - a.query_starts[task.batch_row];
    int64_t limit = a.context_lens[task.batch_row] - num_queries + row / g.group + 1;
    int64_t first = a.windowed && limit > a.window ? limit - a.window : 0;
    return {first, limit};
}

// A span clipped to a partition, from the partition's start.
struct Range {
    int begin, end;
};

INLINE Range clip(Span span, int64_t start) {
    int64_t begin = span.first > start ? span.first - start : 0;
    int64_t end = span.limit - start < kPartition ? span.limit - start : kPartition;
    return {static_cast<int>(begin), end > begin ? static_cast<int>(end) : static_cast<int>(begin)};
}

template <class T>
INLINE void fill_view(PartitionView<T>& view, const octavo::AttentionArgs& a, const Task& task, int64_t start,
                      Range range) {
    const int32_t* table = a.block_tables + task.batch_row * a.max_blocks;
    const int size = a.kv.block_size;
    const int64_t to_values = padded_positions(a.kv) * a.kv.head_dim;
    int64_t begin = start + range.begin, end = start + range.end;
    view.num_tiles = 0;
    for (int64_t index = begin / size; index * size < end; index++) {
        const T* keys = head_keys<T>(a.kv, table[index], task.kv_head);
        int64_t block_start = index * size;
        for (int offset = 0; offset < size; offset += kLanes) {
            int64_t position = block_start + offset;
            if (position >= end) break;
            if (position + kLanes <= begin || (size < kLanes && position + size <= begin)) continue;
            view.tiles[view.num_tiles] = keys + static_cast<int64_t>(offset) * a.kv.head_dim;
            view.tile_positions[view.num_tiles++] = static_cast<int>(position - start);
        }
        int64_t from = block_start > start ? block_start : start, to = block_start + size;
        if (to > start + kPartition) to = start + kPartition;
        for (int64_t position = from; position < to && position < end; position += 2)
            view.pairs[(position - start) / 2] = keys + to_values + (position - block_start) * a.kv.head_dim;
    }
}

// One row's partition of one KV head.
struct Stretch {
    int64_t batch_row;
    int kv_head;
    int64_t partition;
};

// Where the keys of the stretch after the view's lie; its first tile stands for those that it does not have.
template <class T>
INLINE void fill_next(PartitionView<T>& view, const octavo::AttentionArgs& a, const Stretch& next) {
    const int32_t* table = a.block_tables + next.batch_row * a.max_blocks;
    const int start = next.partition * kPartition, end = a.context_lens[next.batch_row], size = a.kv.block_size;
    for (int tile = 0; tile < kPartition / kLanes; tile++) {
        int position = start + tile * kLanes < end ? start + tile * kLanes : start;
        const T* keys = head_keys<T>(a.kv, table[position / size], next.kv_head);
        view.next_tiles[tile] = keys + static_cast<int64_t>(position % size) * a.kv.head_dim;
    }
}

template <class Path, int ROWS, bool AHEAD>
static void score_rows(const typename Path::Query* const* queries, const PartitionView<typename Path::Kv::T>& view,
                       int dim, int64_t to_values, float* const* to) {
    constexpr int kTiles = score_tiles(ROWS);
    int t = 0;
    for (; t + kTiles <= view.num_tiles; t += kTiles)
        Path::template scores<ROWS, kTiles, AHEAD>(queries, view.tiles + t, view.tile_positions + t, dim, to_values, to);
    for (; t < view.num_tiles; t++)
        Path::template scores<ROWS, 1, AHEAD>(queries, view.tiles + t, view.tile_positions + t, dim, to_values, to);
}

template <class Path, int ROWS, bool AHEAD>
static void value_rows(const typename Path::Weight* const* weights, const PartitionView<typename Path::Kv::T>& view,
                       Range range, int dim, float* const* to) {
    constexpr int kVectors = value_vectors(ROWS);
    if (range.begin >= range.end) return;
    int d = 0;
    for (; d + kVectors * kLanes <= dim; d += kVectors * kLanes)
        Path::template values<ROWS, kVectors, AHEAD>(weights, view, range.begin, range.end, d, dim, to);
    for (; d < dim; d += kLanes)
        Path::template values<ROWS, 1, AHEAD>(weights, view, range.begin, range.end, d, dim, to);
}

// Weights of one row in place of its scores; returns the exponent of their common factor and their sum.
template <class Path>
INLINE RowState softmax_row(float* scores, typename Path::Weight* weights, Range range, float scale_log2,
                            const octavo::AttentionArgs& a) {
    int begin = range.begin / kLanes * kLanes, end = (range.end + kLanes - 1) / kLanes * kLanes;
    const float hidden = -__builtin_inff();
    for (int i = begin; i < range.begin; i++) scores[i] = hidden;
    for (int i = range.end; i < end; i++) scores[i] = hidden;
    if (a.capped) {
        F16 inner = set1(a.scale / a.soft_cap);
        for (int i = begin; i < end; i += kLanes) store(scores + i, tanh(mul(load(scores + i), inner)));
        for (int i = begin; i < range.begin; i++) scores[i] = hidden;
        for (int i = range.end; i < end; i++) scores[i] = hidden;
    }
    F16 highest = load(scores + begin);
    for (int i = begin + kLanes; i < end; i += kLanes) highest = max(highest, load(scores + i));
    float top = reduce_max(highest) * scale_log2;
    F16 sum = zero(), scale = set1(scale_log2), shift = set1(-top);
    for (int i = begin; i < end; i += kLanes)
        sum = add(sum, Path::keep_weights(weights + i, exp2(fma(load(scores + i), scale, shift))));
    return {top, reduce_add(sum), true};
}

// Folds a later partition into a row's state.
INLINE void fold(RowState& state, float* o, const RowState& part, const float* part_o, int dim) {
    if (!state.started) {
        state = part;
        __builtin_memcpy(o, part_o, dim * sizeof(float));
        return;
    }
    float top = state.max > part.max ? state.max : part.max;
    float old_factor = exp2(state.max - top), new_factor = exp2(part.max - top);
    state.sum = state.sum * old_factor + part.sum * new_factor;
    state.max = top;
    F16 keep = set1(old_factor), take = set1(new_factor);
    for (int d = 0; d < dim; d += kLanes) store(o + d, fma(load(o + d), keep, mul(load(part_o + d), take)));
}

// Queries of a task as the path wants them.
template <class Path>
INLINE void gather_queries(const octavo::AttentionArgs& a, const Geometry& g, const Task& task,
                           typename Path::Query* to) {
    for (int row = task.begin; row < task.end; row++, to += g.dim) {
        int64_t token = a.query_starts[task.batch_row] + row / g.group;
        int head = task.kv_head * g.group + row % g.group;
        const char* from = a.qkv + token * g.token_bytes + head * g.head_bytes;
        if (sizeof(*to) == 2)
            __builtin_memcpy(to, from, g.dim * sizeof(*to));
        else
            load_head(reinterpret_cast<float*>(to), from, g.dim, a.dtype);
    }
}

// Partial results of up to kMaxTileRows rows over one partition.
struct TileResult {
    RowState states[kMaxTileRows];
    alignas(64) float o[kMaxTileRows][kMaxHeadDim];
};

// Values of a tile: the positions that all its rows see are summed together, what a row sees before and after alone.
// The borders are even, so that pairs stay whole.
template <class Path, int ROWS, bool AHEAD>
INLINE void tile_values(const typename Path::Weight* const* weights, const PartitionView<typename Path::Kv::T>& view,
                        const Range* ranges, int dim, float* const* o) {
    int begin = 0, end = kPartition;
    for (int r = 0; r < ROWS; r++) {
        begin = ranges[r].begin > begin ? ranges[r].begin : begin;
        end = ranges[r].end < end ? ranges[r].end : end;
    }
    bool same = true;
    for (int r = 0; r < ROWS; r++) same = same && ranges[r].begin == begin && ranges[r].end == end;
    if (!same) begin = (begin + 1) / 2 * 2, end = end / 2 * 2;
    if (begin >= end) {
        for (int r = 0; r < ROWS; r++) value_rows<Path, 1, AHEAD>(weights + r, view, ranges[r], dim, o + r);
        return;
    }
    if (!same)
        for (int r = 0; r < ROWS; r++)
            if (ranges[r].begin < begin) value_rows<Path, 1, AHEAD>(weights + r, view, {ranges[r].begin, begin}, dim, o + r);
    value_rows<Path, ROWS, AHEAD>(weights, view, {begin, end}, dim, o);
    if (!same)
        for (int r = 0; r < ROWS; r++)
            if (end < ranges[r].end) value_rows<Path, 1, AHEAD>(weights + r, view, {end, ranges[r].end}, dim, o + r);
}

template <class Path, int ROWS, bool AHEAD>
static void attend_tile(const octavo::AttentionArgs& a, const Geometry& g, const typename Path::Query* queries,
                        const PartitionView<typename Path::Kv::T>& view, const Range* ranges, TileResult& result) {
    alignas(64) float scores[ROWS][kScoreStride];
    alignas(64) uint16_t rounded[sizeof(typename Path::Weight) == 2 ? ROWS : 1][kPartition];
    const typename Path::Query* query_rows[ROWS];
    const typename Path::Weight* weights[ROWS];
    float *score_to[ROWS], *o[ROWS];
    for (int r = 0; r < ROWS; r++) {
        query_rows[r] = queries + r * g.dim;
        score_to[r] = scores[r] + kLanes;
        o[r] = result.o[r];
        for (int d = 0; d < g.dim; d += kLanes) store(o[r] + d, zero());
    }
    score_rows<Path, ROWS, AHEAD>(query_rows, view, g.dim, padded_positions(a.kv) * g.dim, score_to);
    for (int r = 0; r < ROWS; r++) {
        auto to = sizeof(typename Path::Weight) == 2 ? static_cast<void*>(rounded[r]) : static_cast<void*>(score_to[r]);
        weights[r] = static_cast<typename Path::Weight*>(to);
        result.states[r] = {0, 0, false};
        if (ranges[r].begin < ranges[r].end)
            result.states[r] =
                softmax_row<Path>(score_to[r], static_cast<typename Path::Weight*>(to), ranges[r], g.scale_log2, a);
    }
    tile_values<Path, ROWS, AHEAD>(weights, view, ranges, g.dim, o);
}

template <class Path, bool AHEAD, int ROWS = 1>
INLINE void attend_rows(int rows, const octavo::AttentionArgs& a, const Geometry& g,
                        const typename Path::Query* queries, const PartitionView<typename Path::Kv::T>& view,
                        const Range* ranges, TileResult& result) {
    if (rows == ROWS) return attend_tile<Path, ROWS, AHEAD>(a, g, queries, view, ranges, result);
    if constexpr (ROWS < kMaxTileRows) attend_rows<Path, AHEAD, ROWS + 1>(rows, a, g, queries, view, ranges, result);
}

// One partition of all rows of a task, folded into states[row], o[row * dim ..]. `next` will be read after it.
template <class Path>
static void attend_partition(const octavo::AttentionArgs& a, const Geometry& g, const Task& task, int64_t partition,
                             const Stretch& next, const typename Path::Query* queries, RowState* states, float* o) {
    const int64_t start = partition * kPartition;
    const int rows = task.end - task.begin;
    Range ranges[kMaxTaskRows];
    PartitionView<typename Path::Kv::T> view;
    TileResult result;
    int tiles = ceil_div(rows, kMaxTileRows);
    for (int t = 0; t < tiles; t++) {
        int begin = rows * t / tiles, end = rows * (t + 1) / tiles;
        Range all = {kPartition, 0};
        for (int r = begin; r < end; r++) {
            ranges[r] = clip(row_span(a, g, task, task.begin + r), start);
            if (ranges[r].begin >= ranges[r].end) continue;
            all.begin = ranges[r].begin < all.begin ? ranges[r].begin : all.begin;
            all.end = ranges[r].end > all.end ? ranges[r].end : all.end;
        }
        if (all.begin >= all.end) continue;
        fill_view(view, a, task, start, all);
        if (has_few_rows(task)) {
            fill_next(view, a, next);
            attend_rows<Path, true>(end - begin, a, g, queries + begin * g.dim, view, ranges + begin, result);
        } else {
            attend_rows<Path, false>(end - begin, a, g, queries + begin * g.dim, view, ranges + begin, result);
        }
        for (int r = begin; r < end; r++)
            if (result.states[r - begin].started)
                fold(states[r], o + r * g.dim, result.states[r - begin], result.o[r - begin], g.dim);
    }
}
