// The products of attention_tile.h on bf16 dot-product instructions: queries, keys, values and weights in bf16, sums
// in fp32, two products a step.
#pragma once
#include "attention_tile.h"

#if defined(__AVX512BF16__)
INLINE I16 broadcast_pair(const uint16_t* p) {
    int32_t word;
    __builtin_memcpy(&word, p, 4);
    return iset1(word);
}

template <int ROWS, int TILES, bool AHEAD>
static void score_block_dot(const uint16_t* const* queries, const uint16_t* const* tiles, const int* positions, int dim,
                            int64_t to_values, float* const* to) {
    F16 sums[ROWS][TILES];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int t = 0; t < TILES; t++) sums[r][t] = zero();
    for (int i = 0; i < dim / 2; i++) {
        if constexpr (AHEAD)
            for (int t = 0; t < TILES; t++) fetch<2 * kLanes>(tiles[t] + to_values + i * 2 * kLanes);
        I16 keys[TILES];
#pragma GCC unroll 8
        for (int t = 0; t < TILES; t++) keys[t] = iload(tiles[t] + i * 32);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            I16 q = broadcast_pair(queries[r] + 2 * i);
#pragma GCC unroll 8
            for (int t = 0; t < TILES; t++) sums[r][t] = dot_bf16(q, keys[t], sums[r][t]);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < TILES; t++)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) store(to[r] + positions[t], sums[r][t]);
}

// One pair of positions; `keep` clears the half that the range does not hold, in weights and values alike, so that
// what lies in unwritten memory cannot reach the sum.
template <int ROWS, int VECTORS>
INLINE void accumulate_dot(F16 (&sums)[ROWS][VECTORS], const uint16_t* const* weights, int position,
                           const uint16_t* pair, int d, I16 keep) {
    I16 value[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) value[v] = iand(iload(pair + 2 * (d + v * kLanes)), keep);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        I16 w = iand(broadcast_pair(weights[r] + position), keep);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[r][v] = dot_bf16(w, value[v], sums[r][v]);
    }
}

template <int ROWS, int VECTORS, bool AHEAD>
static void value_block_dot(const uint16_t* const* weights, const PartitionView<uint16_t>& view, int begin, int end,
                            int d, int dim, float* const* to) {
    F16 sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) sums[r][v] = load(to[r] + d + v * kLanes);
    const int32_t high = static_cast<int32_t>(0xFFFF0000), low = 0x0000FFFF;
    int position = begin / 2 * 2;
    if (begin % 2 && begin < end) {
        accumulate_dot<ROWS, VECTORS>(sums, weights, position, view.pairs[position / 2], d, iset1(high));
        position += 2;
    }
    for (; position + 1 < end; position += 2) {
        if constexpr (AHEAD) fetch_next<VECTORS>(view, position / 2, d, dim);
        accumulate_dot<ROWS, VECTORS>(sums, weights, position, view.pairs[position / 2], d, iset1(-1));
    }
    if (position < end) accumulate_dot<ROWS, VECTORS>(sums, weights, position, view.pairs[position / 2], d, iset1(low));
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) store(to[r] + d + v * kLanes, sums[r][v]);
}

struct DotPath {
    using Kv = KvBf16;
    using Query = uint16_t;
    using Weight = uint16_t;
    template <int ROWS, int TILES, bool AHEAD>
    INLINE void scores(const Query* const* queries, const uint16_t* const* tiles, const int* positions, int dim,
                       int64_t to_values, float* const* to) {
        score_block_dot<ROWS, TILES, AHEAD>(queries, tiles, positions, dim, to_values, to);
    }
    template <int ROWS, int VECTORS, bool AHEAD>
    INLINE void values(const Weight* const* weights, const PartitionView<uint16_t>& view, int begin, int end, int d,
                       int dim, float* const* to) {
        value_block_dot<ROWS, VECTORS, AHEAD>(weights, view, begin, end, d, dim, to);
    }
    INLINE F16 keep_weights(Weight* to, F16 weights) {
        I16 rounded = to_bf16(weights);
        istore_u16(to, rounded);
        return low_bf16(rounded);
    }
};
#endif
