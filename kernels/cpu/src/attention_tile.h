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

// Addresses inside one partition for one KV head.
template <class T>
struct PartitionView {
    int num_tiles;
    const T* tiles[kPartition / 2 + 2];
    int tile_positions[kPartition / 2 + 2];  // of a tile's first lane, from the partition's start
    const T* pairs[kPartition / 2];          // value pairs at positions 2j, 2j + 1
};

// Scores of ROWS queries against TILES tiles: to[r][position of the tile + lane].
template <class Kv, int ROWS, int TILES>
static void score_block(const float* const* queries, const typename Kv::T* const* tiles, const int* positions, int dim,
                        float* const* to) {
    F16 sums[ROWS][TILES];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int t = 0; t < TILES; t++) sums[r][t] = zero();
    for (int i = 0; i < dim / 2; i++) {
        F16 even[TILES], odd[TILES];
#pragma GCC unroll 8
        for (int t = 0; t < TILES; t++) Kv::keys(tiles[t], i, even[t], odd[t]);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            F16 q = set1(queries[r][2 * i]);
#pragma GCC unroll 8
            for (int t = 0; t < TILES; t++) sums[r][t] = fma(q, even[t], sums[r][t]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            F16 q = set1(queries[r][2 * i + 1]);
#pragma GCC unroll 8
            for (int t = 0; t < TILES; t++) sums[r][t] = fma(q, odd[t], sums[r][t]);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < TILES; t++)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) store(to[r] + positions[t], sums[r][t]);
}

// sums[r][v] += weight r of one position times 16 * VECTORS dims of its value.
template <int ROWS, int VECTORS>
INLINE void accumulate(F16 (&sums)[ROWS][VECTORS], const float* const* weights, int position, const F16* value) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        F16 w = set1(weights[r][position]);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[r][v] = fma(w, value[v], sums[r][v]);
    }
}

// to[r][d .. d + 16 * VECTORS) += sum over positions [begin, end) of weights[r][position] * value.
template <class Kv, int ROWS, int VECTORS>
static void value_block(const float* const* weights, const typename Kv::T* const* pairs, int begin, int end, int d,
                        int dim, float* const* to) {
    F16 sums[ROWS][VECTORS], even[VECTORS], odd[VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[r][v] = load(to[r] + d + v * kLanes);
    int position = begin / 2 * 2;
    if (begin % 2 && begin < end) {
        for (int v = 0; v < VECTORS; v++) Kv::values(pairs[position / 2], d + v * kLanes, dim, even[v], odd[v]);
        accumulate<ROWS, VECTORS>(sums, weights, position + 1, odd);
        position += 2;
    }
    for (; position + 1 < end; position += 2) {
        const typename Kv::T* pair = pairs[position / 2];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) Kv::values(pair, d + v * kLanes, dim, even[v], odd[v]);
        accumulate<ROWS, VECTORS>(sums, weights, position, even);
        accumulate<ROWS, VECTORS>(sums, weights, position + 1, odd);
    }
    if (position < end) {
        for (int v = 0; v < VECTORS; v++) Kv::values(pairs[position / 2], d + v * kLanes, dim, even[v], odd[v]);
        accumulate<ROWS, VECTORS>(sums, weights, position, even);
    }
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
    template <int ROWS, int TILES>
    INLINE void scores(const Query* const* queries, const typename Kv::T* const* tiles, const int* positions, int dim,
                       float* const* to) {
        score_block<Kv, ROWS, TILES>(queries, tiles, positions, dim, to);
    }
    template <int ROWS, int VECTORS>
    INLINE void values(const Weight* const* weights, const typename Kv::T* const* pairs, int begin, int end, int d,
                       int dim, float* const* to) {
        value_block<Kv, ROWS, VECTORS>(weights, pairs, begin, end, d, dim, to);
    }
    // The weight as it will be multiplied, also for the sum of weights.
    INLINE F16 keep_weights(Weight* to, F16 weights) {
        store(to, weights);
        return weights;
    }
};
