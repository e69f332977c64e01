// Tiles of x @ weight.T + bias over coded panels: the sums that linear_tile.h makes of the panels that they code.
//
// For few rows: then reading weights is what takes the time, and decoding them costs nothing beside it.
#pragma once
#include "coded_panels.h"
#include "linear_tile.h"

// The sums of whole panels, with room in registers for decoding.
#if defined(__AVX512F__)
constexpr int kMaxCodedRows = 6;
#elif defined(__AVX2__)
constexpr int kMaxCodedRows = 3;
#else
constexpr int kMaxCodedRows = 1;
#endif

// Rows [row, row + ROWS) of x against panel number `index`.
template <int ROWS>
static void coded_tile(const octavo::LinearArgs& a, const float* x, int64_t row, const CodedPanel& panel, int64_t index,
                       const char* ahead_at) {
    F16 sums[ROWS][kHalves];
    const float* rows[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        rows[r] = x + (row + r) * a.depth;
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; half++) sums[r][half] = zero();
    }
    const Table table = load_table(panel.table);
    const CodedPanel::Apart apart = panel.apart(a.coded);
    const int64_t depth = a.depth;
    const uint8_t* step = panel.steps();
    int64_t num_met = 0, next_apart = apart.depths[0];
    for (int64_t k = 0; k < depth; k++, step += CodedPanel::kStepBytes, ahead_at += CodedPanel::kStepBytes) {
        __builtin_prefetch(ahead_at, 0, kSecondLevel);
        H16 weights[kHalves];
        decode_bf16(step, table, weights);
        if (__builtin_expect(k == next_apart, false)) {
            const uint16_t* whole = apart.steps + num_met++ * kPanelColumns;
            weights[0] = hload(whole), weights[1] = hload(whole + kLanes);
            next_apart = apart.depths[num_met];
        }
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; half++) {
            F16 w = widen_bf16(weights[half]);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) sums[r][half] = fma(set1(rows[r][k]), w, sums[r][half]);
            if (ROWS > 2) forget_loads();
        }
    }
    alignas(64) float done[kHalves * ROWS * kLanes];
#pragma GCC unroll 2
    for (int half = 0; half < kHalves; half++)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) store(done + (half * ROWS + r) * kLanes, sums[r][half]);
    for (int half = 0; half < kHalves; half++)
        finish_columns(a, done + half * ROWS * kLanes, row, ROWS, index * kPanelColumns + half * kLanes);
}

template <int ROWS = kMaxCodedRows>
INLINE void coded_rows(const octavo::LinearArgs& a, const float* x, int64_t row, int64_t rows, const CodedPanel& panel,
                       int64_t index, const char* ahead_at) {
    if (rows == ROWS) return coded_tile<ROWS>(a, x, row, panel, index, ahead_at);
    if constexpr (ROWS > 1) coded_rows<ROWS - 1>(a, x, row, rows, panel, index, ahead_at);
}
