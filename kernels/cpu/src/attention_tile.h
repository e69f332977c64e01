// The two products of attention for a few queries over one partition of the cache.
//
// A score is one chain of FMAs over dims in ascending order; an output element one chain over positions in ascending
// order (with bf16 dot products: over pairs of them). Neither chain depends on how many queries or tiles are computed
// at once, so these counts are free to suit the registers.
#pragma once
#include "kv_layout.h"
#include "vmath.h"

constexpr int kPartition = 256;
// A block size that does not divide by 16 starts tiles before the partition and ends them after it.
constexpr int kScoreStride = kLanes + kPartition + kLanes;

#if defined(__AVX512F__)
constexpr int kMaxTileRows = 6;
constexpr int score_tiles(int rows) { return rows == 1 ? 8 : 4; }
constexpr int value_vectors(int) { return 4; }
#elif defined(__AVX2__)
constexpr int kMaxTileRows = 6;
constexpr int score_tiles(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
constexpr int value_vectors(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#else
constexpr int kMaxTileRows = 2;
constexpr int score_tiles(int) { return 1; }
constexpr int value_vectors(int) { return 1; }
#endif

// Few rows compute faster than memory brings what they read. Products with AHEAD ask for the next of it as they go, for
// blocks lie anywhere and the processor cannot guess where: scores for values, values for the keys of view.next_tiles.

// Asks for COUNT elements. A few at a time, between other work: many at once keep the loads of that work waiting.
template <int COUNT, class T>
INLINE void fetch(const T* elements) {
    auto bytes = reinterpret_cast<const char*>(elements);
#pragma GCC unroll 16
    for (size_t at = 0; at < COUNT * sizeof(T); at += 64) __builtin_prefetch(bytes + at, 0, 2);
}

// Addresses inside one partition for one KV head.
template <class T>
struct PartitionView {
    int num_tiles;
    const T* tiles[kPartition / 2 + 2];
    int tile_positions[kPartition / 2 + 2];  // of a tile's first lane, from the partition's start
    const T* pairs[kPartition / 2];            // value pairs at positions 2j, 2j + 1
    const T* next_tiles[kPartition / kLanes];  // keys that will be read after these values
};

// sums[r][t] += dim 2i + PART of query r times that of the keys of tile t.
template <class Kv, int PART, int ROWS, int TILES>
INLINE void add_scores(F16 (&sums)[ROWS][TILES], const float* const (&queries)[ROWS],
                       const typename Kv::T* const (&tiles)[TILES], int i) {
#pragma GCC unroll 8
    for (int t = 0; t < TILES; t++) {
        F16 keys = Kv::template keys<PART>(tiles[t], i);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) sums[r][t] = fma(set1(queries[r][2 * i + PART]), keys, sums[r][t]);
    }
}

// Scores of ROWS queries against TILES tiles: to[r][position of the tile + lane]. Values lie `to_values` behind keys.
template <class Kv, int ROWS, int TILES, bool AHEAD>
static void score_block(const float* const* query_rows, const typename Kv::T* const* tile_list, const int* positions,
                        int dim, int64_t to_values, float* const* to) {
    F16 sums[ROWS][TILES];
    const float* queries[ROWS];
    const typename Kv::T* tiles[TILES];
#pragma GCC unroll 8
    for (int t = 0; t < TILES; t++) tiles[t] = tile_list[t];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        queries[r] = query_rows[r];
#pragma GCC unroll 8
        for (int t = 0; t < TILES; t++) sums[r][t] = zero();
    }
    for (int i = 0; i < dim / 2; i++) {
        if constexpr (AHEAD)
            for (int t = 0; t < TILES; t++) fetch<2 * kLanes>(tiles[t] + to_values + i * 2 * kLanes);
        add_scores<Kv, 0>(sums, queries, tiles, i);
        forget_loads();
        add_scores<Kv, 1>(sums, queries, tiles, i);
    }
#pragma GCC unroll 8
    for (int t = 0; t < TILES; t++)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) store(to[r] + positions[t], sums[r][t]);
}

// sums[r][v] += weight r of position 2j + PART times 16 * VECTORS dims, from d, of its value.
template <class Kv, int PART, int ROWS, int VECTORS>
INLINE void add_values(F16 (&sums)[ROWS][VECTORS], const float* const (&weights)[ROWS], const typename Kv::T* pair,
                       int j, int d, int dim) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
        F16 values = Kv::template values<PART>(pair, d + v * kLanes, dim);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) sums[r][v] = fma(set1(weights[r][2 * j + PART]), values, sums[r][v]);
    }
}

// Asks for what lies in the next keys where position 2j lies in these.
template <int VECTORS, class T>
INLINE void fetch_next(const PartitionView<T>& view, int j, int d, int dim) {
    fetch<2 * VECTORS * kLanes>(view.next_tiles[2 * j / kLanes] + j % (kLanes / 2) * 2 * dim + 2 * d);
}

// to[r][d .. d + 16 * VECTORS) += sum over positions [begin, end) of weights[r][position] * value; begin < end.
template <class Kv, int ROWS, int VECTORS, bool AHEAD>
static void value_block(const float* const* weight_rows, const PartitionView<typename Kv::T>& view, int begin, int end,
                        int d, int dim, float* const* to) {
    F16 sums[ROWS][VECTORS];
    const float* weights[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        weights[r] = weight_rows[r];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[r][v] = load(to[r] + d + v * kLanes);
    }
    int j = begin / 2;
    if (begin % 2) {
        add_values<Kv, 1>(sums, weights, view.pairs[j], j, d, dim);
        j++;
    }
    for (; j < end / 2; j++) {
        const typename Kv::T* pair = view.pairs[j];
        if constexpr (AHEAD) fetch_next<VECTORS>(view, j, d, dim);
        add_values<Kv, 0>(sums, weights, pair, j, d, dim);
        forget_loads();
        add_values<Kv, 1>(sums, weights, pair, j, d, dim);
    }
    if (end % 2 && j == end / 2) add_values<Kv, 0>(sums, weights, view.pairs[j], j, d, dim);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) store(to[r] + d + v * kLanes, sums[r][v]);
}

// How one cache type computes: fp32 queries and weights, FMAs in fp32.
template <class Cache>
struct FmaPath {
    using Kv = Cache;
    using Query = float;
    using Weight = float;
    template <int ROWS, int TILES, bool AHEAD>
    INLINE void scores(const Query* const* queries, const typename Kv::T* const* tiles, const int* positions, int dim,
                       int64_t to_values, float* const* to) {
        score_block<Kv, ROWS, TILES, AHEAD>(queries, tiles, positions, dim, to_values, to);
    }
    template <int ROWS, int VECTORS, bool AHEAD>
    INLINE void values(const Weight* const* weights, const PartitionView<typename Kv::T>& view, int begin, int end,
                       int d, int dim, float* const* to) {
        value_block<Kv, ROWS, VECTORS, AHEAD>(weights, view, begin, end, d, dim, to);
    }
    // The weight as it will be multiplied, also for the sum of weights.
    INLINE F16 keep_weights(Weight* to, F16 weights) {
        store(to, weights);
        return weights;
    }
};
