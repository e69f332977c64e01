// Where keys and values lie inside a block of the paged cache.
//
//   layer:  block 0 | block 1 | ...      block:  head 0 | head 1 | ...      head:  keys | values
//   keys:   tiles of 16 positions. fp32, fp16: [tile][dim][16 positions]
//                                  bf16:       [tile][dim / 2][16 positions][2 dims]
//   values: fp32, fp16: [position][dim]        bf16: [position / 2][dim][2 positions]
//
// Scores of 16 positions are then sums over dims with no horizontal step, and the two bf16 of a 32-bit word come apart
// with one shift and one AND, or feed a bf16 dot product as they are. A block's positions are padded to whole tiles.
#pragma once
#include "simd.h"

INLINE int64_t padded_positions(const octavo::KvLayer& kv) { return (kv.block_size + kLanes - 1) / kLanes * kLanes; }
INLINE int64_t head_elements(const octavo::KvLayer& kv) { return 2 * padded_positions(kv) * kv.head_dim; }

// First element of a head's keys in a block; its values lie padded_positions * head_dim elements after.
template <class T>
INLINE T* head_keys(const octavo::KvLayer& kv, int64_t block, int head) {
    return reinterpret_cast<T*>(kv.data) + (block * kv.num_kv_heads + head) * head_elements(kv);
}

// Views of K tiles and V pairs as fp32 lanes, one struct an element type. PART 0 or 1 takes dim 2i + PART of a tile's
// 16 positions, or 16 dims at d of position 2j + PART, `pair` pointing at the first element of positions 2j and 2j + 1.
struct KvBf16 {
    using T = uint16_t;
    template <int PART>
    INLINE F16 keys(const T* tile, int i) {
        return half<PART>(iload(tile + i * 32));
    }
    template <int PART>
    INLINE F16 values(const T* pair, int d, int) {
        return half<PART>(iload(pair + 2 * d));
    }
    template <int PART>
    INLINE F16 half(I16 words) {
        return PART ? high_bf16(words) : low_bf16(words);
    }
};
struct KvF16 {
    using T = uint16_t;
    template <int PART>
    INLINE F16 keys(const T* tile, int i) {
        return load_half(tile + i * 32 + PART * 16);
    }
    template <int PART>
    INLINE F16 values(const T* pair, int d, int dim) {
        return load_half(pair + PART * dim + d);
    }
};
struct KvF32 {
    using T = float;
    template <int PART>
    INLINE F16 keys(const T* tile, int i) {
        return load(tile + i * 32 + PART * 16);
    }
    template <int PART>
    INLINE F16 values(const T* pair, int d, int dim) {
        return load(pair + PART * dim + d);
    }
};

// Scatters one head's key and value, `dim` elements of the cache's type each, to an offset in a block.
INLINE void write_bf16(uint16_t* keys, uint16_t* values, int offset, int dim, const uint16_t* k, const uint16_t* v) {
    uint16_t* tile = keys + offset / kLanes * kLanes * dim + offset % kLanes * 2;
    for (int d = 0; d < dim; d += 2) __builtin_memcpy(tile + d * kLanes, k + d, 4);
    uint16_t* pair = values + offset / 2 * 2 * dim + offset % 2;
    for (int d = 0; d < dim; d++) pair[2 * d] = v[d];
}
template <class T>
INLINE void write_plain(T* keys, T* values, int offset, int dim, const T* k, const T* v) {
    T* tile = keys + offset / kLanes * kLanes * dim + offset % kLanes;
    for (int d = 0; d < dim; d++) tile[d * kLanes] = k[d];
    __builtin_memcpy(values + static_cast<int64_t>(offset) * dim, v, dim * sizeof(T));
}
