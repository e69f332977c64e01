// Weight matrices as the products read them: panels of 32 columns, interleaved over depth.
//
// A panel holds, for each depth k, the weights of its columns side by side (in bf16 a cache line), in the narrowest type
// that gives each of them back exactly, and bf16 in fewer bits still (CodedPanel); they are widened in registers. Columns
// past the matrix's are zero.
#pragma once
#include "dense.h"

constexpr int kHalves = 2;
constexpr int kPanelColumns = kHalves * kLanes;
constexpr int64_t num_panels(int64_t columns) { return (columns + kPanelColumns - 1) / kPanelColumns; }
constexpr int64_t whole_lines(int64_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

// What panels of one number a weight have in common.
template <class Number>
struct PlainPanel {
    using Element = Number;
    static constexpr int64_t bytes(int64_t depth) { return depth * kPanelColumns * sizeof(Number); }
};

struct Bf16Panel : PlainPanel<uint16_t> {
    INLINE F16 weights(const Element* at) { return widen_bf16(hload(at)); }
    static int place(int column) { return bf16_place(column); }
    INLINE Element narrow(float x) {
        uint32_t raw;
        __builtin_memcpy(&raw, &x, 4);
        return static_cast<Element>(raw >> 16);
    }
};

struct F16Panel : PlainPanel<uint16_t> {
    INLINE F16 weights(const Element* at) { return load_half(at); }
    static int place(int column) { return column; }
    INLINE Element narrow(float x) {
        uint16_t halves[kLanes];
        store_half(halves, set1(x));
        return halves[0];
    }
};

struct F32Panel : PlainPanel<float> {
    INLINE F16 weights(const Element* at) { return load(at); }
    static int place(int column) { return column; }
    INLINE Element narrow(float x) { return x; }
};

// Says which kind of panels a function is for.
template <class Panel>
struct Kind {};

// Panel number `panel` of a matrix.
template <class Panel>
static void pack_panel(Kind<Panel>, const octavo::PackArgs& a, int64_t panel, char* packed) {
    auto to = reinterpret_cast<typename Panel::Element*>(packed);
    const size_t row_bytes = a.depth * dtype_size(a.dtype);
    for (int c = 0; c < kPanelColumns; c++) {
        int64_t column = panel * kPanelColumns + c;
        auto row = static_cast<const char*>(a.weight) + column * row_bytes;
        auto place = to + c / kLanes * kLanes + Panel::place(c % kLanes);
        for (int64_t k = 0; k < a.depth; k += kLanes) {
            int64_t count = a.depth - k < kLanes ? a.depth - k : kLanes;
            float values[kLanes];
            store(values, column < a.columns ? load_some(row, k, a.dtype, count) : zero());
            for (int64_t i = 0; i < count; i++) place[(k + i) * kPanelColumns] = Panel::narrow(values[i]);
        }
    }
}

// Whether every row of an fp32 matrix passes; looks no further than the first rows that do not.
template <class Passes>
static bool every_row(const octavo::PackArgs& a, int threads, const Passes& passes) {
    int failed = 0;
    auto weights = static_cast<const float*>(a.weight);
    auto check = [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end && !__atomic_load_n(&failed, __ATOMIC_RELAXED); row++)
            if (!passes(weights + row * a.depth)) __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
    };
    in_team(threads, 1, [&](Walk& walk) {
        parallel_ranges(walk, a.columns, num_runs(a.columns, a.depth), check);
    });
    return !failed;
}

// Whether every weight of an fp32 matrix is one of a narrower type.
template <class Narrow>
static bool is_exact(const octavo::PackArgs& a, int threads, const Narrow& narrow) {
    return every_row(a, threads, [&](const float* row) {
        I16 differing = iset1(0);
        each_run(a.depth, [&](int64_t k, int64_t count) INLINE_BODY {
            F16 x = load_some(row, k, octavo::kF32, count);
            differing = ior(differing, ixor(bits(x), bits(narrow(x))));
        });
        return mask_bits(iequal(differing, iset1(0))) == 0xFFFF;
    });
}
