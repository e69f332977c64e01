// Tiles of x @ weight.T + bias over panels that are decoded in registers: the sums that linear_tile.h makes of the
// weights that they stand for.
//
// For few rows: then reading weights is what takes the time, and decoding them costs little beside it.
#pragma once
#include "block_panels.h"
#include "coded_panels.h"
#include "linear_tile.h"

// As many rows as leave room in registers for decoding, beside their sums of whole panels.
#if defined(__AVX512F__)
constexpr int kMaxCodedRows = 6;
constexpr int kMaxBlockRows = 6;
#elif defined(__AVX2__)
constexpr int kMaxCodedRows = 3;
constexpr int kMaxBlockRows = 2;
#else
constexpr int kMaxCodedRows = 1;
constexpr int kMaxBlockRows = 1;
#endif

// The chains of ROWS rows of x over one panel.
template <int ROWS>
struct PanelSums {
    F16 sums[ROWS][kHalves];
    const float* rows[ROWS];

    INLINE_MEMBER PanelSums(const float* x, int64_t depth) {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            rows[r] = x + r * depth;
#pragma GCC unroll 2
            for (int half = 0; half < kHalves; half++) sums[r][half] = zero();
        }
    }

    // The weights of depth k, of one half of the panel's columns.
    INLINE_MEMBER void add(int64_t k, int half, F16 weights) {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) sums[r][half] = fma(set1(rows[r][k]), weights, sums[r][half]);
        if (ROWS > 2) forget_loads();
    }

    // Rows [row, row + ROWS) of panel number `index`.
    INLINE_MEMBER void finish(const octavo::LinearArgs& a, int64_t row, int64_t index) const {
        alignas(64) float done[kHalves * ROWS * kLanes];
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; half++)
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) store(done + (half * ROWS + r) * kLanes, sums[r][half]);
        for (int half = 0; half < kHalves; half++)
            finish_columns(a, done + half * ROWS * kLanes, row, ROWS, index * kPanelColumns + half * kLanes);
    }
};

// Adds the products of a panel at `at`; may ask, as it goes, for the memory at `ahead_at`.
template <int ROWS>
INLINE void add_panel(Kind<CodedPanel>, const octavo::LinearArgs& a, const char* at, const char* ahead_at,
                      PanelSums<ROWS>& to) {
    auto& panel = *reinterpret_cast<const CodedPanel*>(at);
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
        for (int half = 0; half < kHalves; half++) to.add(k, half, widen_bf16(weights[half]));
    }
}

// Asks for nothing: the processor follows blocks by itself, and asked into the second level it stops, in some runs for
// good, to bring them into the first.
template <int BITS, int ROWS>
INLINE void add_panel(Kind<BlockPanel<BITS>>, const octavo::LinearArgs& a, const char* at, const char*,
                      PanelSums<ROWS>& to) {
    using Panel = BlockPanel<BITS>;
    const int64_t depth = a.depth;
    for (int64_t block = 0; block < depth; block += kBlockDepths) {
        const typename Panel::Head head(at);
        at += Panel::kHeadBytes;
        for (int64_t k = block; k < block + kBlockDepths; k++, at += Panel::kStepBytes) {
            F16 weights[kHalves];
            head.decode(at, weights);
#pragma GCC unroll 2
            for (int half = 0; half < kHalves; half++) to.add(k, half, weights[half]);
        }
    }
}

// Rows [row, row + rows) of x, at most ROWS, against the panel at `at`, number `index`.
template <int ROWS, class Panel>
INLINE void decoded_rows(Kind<Panel> kind, const octavo::LinearArgs& a, const float* x, int64_t row, int64_t rows,
                         const char* at, int64_t index, const char* ahead_at) {
    if (rows == ROWS) {
        PanelSums<ROWS> sums(x + row * a.depth, a.depth);
        add_panel(kind, a, at, ahead_at, sums);
        return sums.finish(a, row, index);
    }
    if constexpr (ROWS > 1) decoded_rows<ROWS - 1>(kind, a, x, row, rows, at, index, ahead_at);
}
