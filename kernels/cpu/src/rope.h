// Norm and rotation of queries in place, of keys on their way into the cache, and the store of values.
// Tokens are independent; threads split tokens.
#pragma once
#include "dense.h"
#include "kv_layout.h"

constexpr int kMaxHeadDim = 512;

// x (fp32, dim elements, padded) becomes round(x / rms(x) * weight).
INLINE void norm_head(float* x, int dim, const void* weight, const octavo::RopeArgs& a) {
    F16 sum = zero();
    for (int d = 0; d < dim; d += kLanes) {
        F16 v = load(x + d);
        sum = fma(v, v, sum);
    }
    F16 rms = set1(__builtin_sqrtf(reduce_add(sum) / static_cast<float>(dim) + a.eps));
    for (int d = 0; d < dim; d += kLanes)
        store(x + d, rounded_to(mul(div(load(x + d), rms), load_as(weight, d, a.weight_dtype)), a.dtype));
}

// Rotates the pairs (i, half + i), i < half, of x. Products are rounded before they are added, as in the reference, so
// that both round a key to the same 16 bits.
INLINE void rotate_head(float* x, int half, const float* cos, const float* sin) {
    alignas(64) float high[kMaxHeadDim / 2 + kLanes];
    __builtin_memcpy(high, x + half, half * sizeof(float));
    for (int i = 0; i < half; i += kLanes) {
        int count = half - i;
        F16 c = load_some(cos, i, octavo::kF32, count), s = load_some(sin, i, octavo::kF32, count);
        F16 a = load_some(x, i, octavo::kF32, count), b = load_some(high, i, octavo::kF32, count);
        store_some(x, i, octavo::kF32, sub(mul(a, c), mul(b, s)), count);
        store_some(x, half + i, octavo::kF32, add(mul(b, c), mul(a, s)), count);
    }
}

INLINE void load_head(float* x, const char* head, int dim, int dtype) {
    for (int d = 0; d < dim; d += kLanes) store(x + d, load_as(head, d, dtype));
}

INLINE void store_head(void* head, const float* x, int dim, int dtype) {
    for (int d = 0; d < dim; d += kLanes) store_as(head, d, dtype, load(x + d));
}

INLINE void write_head(const octavo::KvLayer& kv, int64_t slot, int head, const float* k, const float* v) {
    alignas(64) char keys[kMaxHeadDim * 4], values[kMaxHeadDim * 4];
    store_head(keys, k, kv.head_dim, kv.dtype);
    store_head(values, v, kv.head_dim, kv.dtype);
    int64_t block = slot / kv.block_size;
    int offset = static_cast<int>(slot % kv.block_size), dim = kv.head_dim;
    int64_t to_values = padded_positions(kv) * dim;
    if (kv.dtype == octavo::kF32) {
        auto to = head_keys<float>(kv, block, head);
        write_plain(to, to + to_values, offset, dim, reinterpret_cast<float*>(keys), reinterpret_cast<float*>(values));
        return;
    }
    auto to = head_keys<uint16_t>(kv, block, head);
    auto k16 = reinterpret_cast<uint16_t*>(keys), v16 = reinterpret_cast<uint16_t*>(values);
    if (kv.dtype == octavo::kBf16)
        write_bf16(to, to + to_values, offset, dim, k16, v16);
    else
        write_plain(to, to + to_values, offset, dim, k16, v16);
}

INLINE void rope_token(const octavo::RopeArgs& a, int64_t token) {
    const int dim = a.kv.head_dim;
    const int64_t head_bytes = dim * dtype_size(a.dtype);
    char* heads = a.qkv + token * (a.num_heads + 2 * a.kv.num_kv_heads) * head_bytes;
    const float* cos = a.cos + static_cast<int64_t>(a.positions[token]) * a.half;
    const float* sin = a.sin + static_cast<int64_t>(a.positions[token]) * a.half;
    alignas(64) float x[kMaxHeadDim + kLanes], value[kMaxHeadDim];
    for (int h = 0; h < a.num_heads; h++) {
        load_head(x, heads + h * head_bytes, dim, a.dtype);
        if (a.q_weight) norm_head(x, dim, a.q_weight, a);
        rotate_head(x, a.half, cos, sin);
        store_head(heads + h * head_bytes, x, dim, a.dtype);
    }
    for (int h = 0; h < a.kv.num_kv_heads; h++) {
        load_head(x, heads + (a.num_heads + h) * head_bytes, dim, a.dtype);
        if (a.k_weight) norm_head(x, dim, a.k_weight, a);
        rotate_head(x, a.half, cos, sin);
        load_head(value, heads + (a.num_heads + a.kv.num_kv_heads + h) * head_bytes, dim, a.dtype);
        write_head(a.kv, a.slots[token], h, x, value);
    }
}

INLINE int64_t num_rope_runs(const octavo::RopeArgs& a) {
    return num_runs(a.num_tokens, 2 * (a.num_heads + 2 * a.kv.num_kv_heads) * a.kv.head_dim);
}

static void rope_write_kv(const octavo::RopeArgs& a, Walk& walk) {
    parallel_ranges(walk, a.num_tokens, num_rope_runs(a), [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; token++) rope_token(a, token);
    });
}
