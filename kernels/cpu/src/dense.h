// RMSNorm with and without residual, and SiLU times up. Rows are independent; threads split rows.
#pragma once
#include "vmath.h"

// Elements below which a second thread costs more than it brings.
constexpr int64_t kMinParallelElements = 32768;

// Adds x into residual row r, rounding there, and returns the sum of squares of the rounded row (or of x alone).
INLINE float accumulate_row(const octavo::NormArgs& a, int64_t offset) {
    F16 sums[4] = {zero(), zero(), zero(), zero()};
    int64_t j = 0;
    auto value = [&](int64_t at, int64_t count) {
        F16 x = load_some(a.x, offset + at, a.x_dtype, count);
        if (!a.residual) return x;
        F16 sum = add(load_some(a.residual, offset + at, a.residual_dtype, count), x);
        store_some(a.residual, offset + at, a.residual_dtype, sum, count);
        return load_some(a.residual, offset + at, a.residual_dtype, count);
    };
    for (; j + 4 * kLanes <= a.hidden; j += 4 * kLanes)
        for (int k = 0; k < 4; k++) {
            F16 x = value(j + k * kLanes, kLanes);
            sums[k] = fma(x, x, sums[k]);
        }
    for (; j < a.hidden; j += kLanes) {
        F16 x = value(j, a.hidden - j);
        sums[0] = fma(x, x, sums[0]);
    }
    return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

static void norm(const octavo::NormArgs& a, int threads) {
    if (a.rows * a.hidden < kMinParallelElements) threads = 1;
    const void* source = a.residual ? a.residual : a.x;
    int source_dtype = a.residual ? a.residual_dtype : a.x_dtype;
    parallel_ranges(a.rows, threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++) {
            int64_t offset = r * a.hidden;
            float mean = accumulate_row(a, offset) / static_cast<float>(a.hidden);
            F16 rms = set1(__builtin_sqrtf(mean + a.eps));
            for (int64_t j = 0; j < a.hidden; j += kLanes) {
                int64_t count = a.hidden - j;
                F16 x = load_some(source, offset + j, source_dtype, count);
                F16 y = mul(div(x, rms), load_some(a.weight, j, a.weight_dtype, count));
                store_some(a.out, offset + j, a.x_dtype, y, count);
            }
        }
    });
}

static void silu_mul(const octavo::SiluArgs& a, int threads) {
    if (a.rows * a.width < kMinParallelElements / 2) threads = 1;
    parallel_ranges(a.rows, threads, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; r++)
            for (int64_t j = 0; j < a.width; j += kLanes) {
                int64_t count = a.width - j;
                F16 gate = load_some(a.gate_up, 2 * r * a.width + j, a.dtype, count);
                F16 up = load_some(a.gate_up, (2 * r + 1) * a.width + j, a.dtype, count);
                F16 denominator = add(set1(1.0f), exp2(mul(gate, set1(-kLog2E))));
                store_some(a.out, r * a.width + j, a.dtype, mul(div(gate, denominator), up), count);
            }
    });
}
