// RMSNorm with and without residual, for any mix of types and fast for one; gated activations; the soft cap.
// Rows are independent; threads split rows.
#pragma once
#include "team.h"
#include "vmath.h"

// Elements of a task: fewer cost more to share out than to compute.
constexpr int64_t kTaskElements = 4096;

// Runs of rows of so many elements each.
INLINE int64_t num_runs(int64_t rows, int64_t row_elements) {
    return (rows * row_elements + kTaskElements - 1) / kTaskElements;
}

// The types of a norm's tensors: TYPE for all of them where it is one of DType, else each as its arguments say.
template <int TYPE>
struct NormTypes {
    int x, residual, weight;
    explicit NormTypes(const octavo::NormArgs& a)
        : x(TYPE < 0 ? a.x_dtype : TYPE), residual(TYPE < 0 ? a.residual_dtype : TYPE),
          weight(TYPE < 0 ? a.weight_dtype : TYPE) {}
};

// Calls visit(index, count) over a row, 16 elements at a time.
template <class Visit>
INLINE void each_run(int64_t length, const Visit& visit) {
    int64_t j = 0;
    for (; j + kLanes <= length; j += kLanes) visit(j, kLanes);
    if (j < length) visit(j, length - j);
}

// Adds x into the residual row, rounding there, and returns the sum of squares of the rounded row (or of x alone).
template <int TYPE>
INLINE float accumulate_row(const octavo::NormArgs& a, int64_t offset) {
    const NormTypes<TYPE> types(a);
    F16 sums[2] = {zero(), zero()};
    each_run(a.hidden, [&](int64_t j, int64_t count) INLINE_BODY {
        F16 x = load_some(a.x, offset + j, types.x, count);
        if (a.residual) {
            F16 sum = add(load_some(a.residual, offset + j, types.residual, count), x);
            x = rounded_to(sum, types.residual);
            store_some(a.residual, offset + j, types.residual, sum, count);
        }
        sums[0] = fma(x, x, sums[0]);
        F16 swapped = sums[0];
        sums[0] = sums[1], sums[1] = swapped;
    });
    return reduce_add(add(sums[0], sums[1]));
}

template <int TYPE>
static void norm_rows(const octavo::NormArgs& a, int64_t begin, int64_t end) {
    const NormTypes<TYPE> types(a);
    const void* source = a.residual ? a.residual : a.x;
    const int source_type = a.residual ? types.residual : types.x;
    for (int64_t r = begin; r < end; r++) {
        int64_t offset = r * a.hidden;
        float mean = accumulate_row<TYPE>(a, offset) / static_cast<float>(a.hidden);
        F16 rms = set1(__builtin_sqrtf(mean + a.eps));
        each_run(a.hidden, [&](int64_t j, int64_t count) INLINE_BODY {
            F16 x = load_some(source, offset + j, source_type, count);
            F16 y = mul(div(x, rms), load_some(a.weight, j, types.weight, count));
            store_some(a.out, offset + j, types.x, y, count);
        });
    }
}

static void norm(const octavo::NormArgs& a, Walk& walk) {
    bool same = a.x_dtype == a.weight_dtype && (!a.residual || a.residual_dtype == a.x_dtype);
    int type = same ? a.x_dtype : -1;
    parallel_ranges(walk, a.rows, num_runs(a.rows, a.hidden), [&](int64_t begin, int64_t end) {
        if (type == octavo::kBf16) return norm_rows<octavo::kBf16>(a, begin, end);
        if (type == octavo::kF32) return norm_rows<octavo::kF32>(a, begin, end);
        norm_rows<-1>(a, begin, end);
    });
}

// gate * logistic(inner(gate)) * up; `scaled_inner` is -log2(e) * inner.
template <int TYPE, class Inner>
static void gated_rows(const octavo::GateArgs& a, int64_t begin, int64_t end, const Inner& scaled_inner) {
    for (int64_t r = begin; r < end; r++)
        each_run(a.width, [&](int64_t j, int64_t count) INLINE_BODY {
            F16 gate = load_some(a.gate_up, 2 * r * a.width + j, TYPE, count);
            F16 up = load_some(a.gate_up, (2 * r + 1) * a.width + j, TYPE, count);
            F16 denominator = add(set1(1.0f), exp2(scaled_inner(gate)));
            store_some(a.out, r * a.width + j, TYPE, mul(div(gate, denominator), up), count);
        });
}

template <class Inner>
static void gated(const octavo::GateArgs& a, Walk& walk, const Inner& scaled_inner) {
    parallel_ranges(walk, a.rows, num_runs(a.rows, 2 * a.width), [&](int64_t begin, int64_t end) {
        if (a.dtype == octavo::kBf16) return gated_rows<octavo::kBf16>(a, begin, end, scaled_inner);
        if (a.dtype == octavo::kF16) return gated_rows<octavo::kF16>(a, begin, end, scaled_inner);
        gated_rows<octavo::kF32>(a, begin, end, scaled_inner);
    });
}

static void silu_mul(const octavo::GateArgs& a, Walk& walk) {
    gated(a, walk, [](F16 gate) INLINE_BODY { return mul(gate, set1(-kLog2E)); });
}

// GELU's tanh form: (1 + tanh(z)) / 2 is the logistic function of 2z, z = sqrt(2 / pi) * (x + 0.044715 x^3).
static void gelu_mul(const octavo::GateArgs& a, Walk& walk) {
    constexpr float kTwiceRoot = 1.59576912160573071176f;
    gated(a, walk, [](F16 gate) INLINE_BODY {
        F16 cubic = fma(mul(gate, gate), set1(0.044715f), set1(1.0f));
        return mul(mul(cubic, gate), set1(-kLog2E * kTwiceRoot));
    });
}

static void soft_cap(const octavo::SoftCapArgs& a, Walk& walk) {
    F16 inverse = set1(1.0f / a.cap), cap = set1(a.cap);
    parallel_ranges(walk, (a.count + kLanes - 1) / kLanes, num_runs(a.count, 2), [&](int64_t begin, int64_t end) {
        for (int64_t j = begin * kLanes; j < end * kLanes && j < a.count; j += kLanes) {
            int64_t count = a.count - j;
            F16 x = load_some(a.x, j, a.dtype, count);
            store_some(a.out, j, octavo::kF32, mul(cap, tanh(mul(x, inverse))), count);
        }
    });
}
