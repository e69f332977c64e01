// Sixteen logical lanes for every instruction set, and loads and stores of the three element types.
//
// A lane's result never depends on other lanes or on where a row ends: tails are loaded into a zero-padded vector and
// go through the same instructions.
#pragma once
#include "abi.h"

#define INLINE static inline __attribute__((always_inline))
// After a lambda's parameters.
#define INLINE_BODY __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE_STATIC static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

constexpr int kLanes = 16;

INLINE F16 zero() { return set1(0.0f); }
INLINE bool any(M16 m) { return mask_bits(m) != 0; }
// Keeps the compiler from holding what it has loaded in registers that sums need: it is loaded anew.
INLINE void forget_loads() { asm volatile("" ::: "memory"); }
INLINE void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    forget_loads();
#endif
}
INLINE size_t dtype_size(int dtype) { return dtype == octavo::kF32 ? 4 : 2; }

INLINE I16 lane_numbers() {
    static const int32_t numbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return iload(numbers);
}

// bf16 values held in the low and high halves of 32-bit words.
INLINE F16 low_bf16(I16 words) { return from_bits(shl<16>(words)); }
INLINE F16 high_bf16(I16 words) { return from_bits(iand(words, iset1(static_cast<int32_t>(0xFFFF0000)))); }

// The bf16 bits of x, rounded to nearest even; NaN stays NaN.
INLINE I16 to_bf16(F16 x) {
    I16 raw = bits(x);
    I16 odd = iand(shr<16>(raw), iset1(1));
    I16 rounded = shr<16>(iadd(iadd(raw, iset1(0x7FFF)), odd));
    M16 is_number = at_least(from_bits(iand(raw, iset1(0x7FFFFFFF))), zero());
    return iselect(is_number, rounded, iset1(0x7FC0));
}

INLINE F16 load_as(const void* p, int64_t index, int dtype) {
    if (dtype == octavo::kF32) return load(static_cast<const float*>(p) + index);
    auto halves = static_cast<const uint16_t*>(p) + index;
    return dtype == octavo::kBf16 ? from_bits(shl<16>(iload_u16(halves))) : load_half(halves);
}

INLINE void store_as(void* p, int64_t index, int dtype, F16 x) {
    if (dtype == octavo::kF32) return store(static_cast<float*>(p) + index, x);
    auto halves = static_cast<uint16_t*>(p) + index;
    if (dtype == octavo::kBf16)
        istore_u16(halves, to_bf16(x));
    else
        store_half(halves, x);
}

// x rounded to a type and widened again.
INLINE F16 rounded_to(F16 x, int dtype) {
    if (dtype == octavo::kF32) return x;
    if (dtype == octavo::kBf16) return low_bf16(to_bf16(x));
    uint16_t halves[kLanes];
    store_half(halves, x);
    return load_half(halves);
}

// Elements [index, index + count), count <= 16; the other lanes are zero.
INLINE F16 load_some(const void* p, int64_t index, int dtype, int64_t count) {
    if (count >= kLanes) return load_as(p, index, dtype);
    alignas(64) char padded[64] = {};
    size_t size = dtype_size(dtype);
    __builtin_memcpy(padded, static_cast<const char*>(p) + index * size, count * size);
    return load_as(padded, 0, dtype);
}

INLINE void store_some(void* p, int64_t index, int dtype, F16 x, int64_t count) {
    if (count >= kLanes) return store_as(p, index, dtype, x);
    alignas(64) char padded[64];
    store_as(padded, 0, dtype, x);
    size_t size = dtype_size(dtype);
    __builtin_memcpy(static_cast<char*>(p) + index * size, padded, count * size);
}
