// Tiles of x @ weight.T + bias over panels.
//
// An output element is one chain of fp32 FMAs over depth in ascending order, then the bias: whatever the tile, the
// other rows and the threads. Tiles and tasks are free to suit registers and caches.
#pragma once
#include "panels.h"

// A tile is some rows against some panels, whole or a half at a time: as many chains as hide the latency of an FMA and
// as registers hold.
#if defined(__AVX512F__)
constexpr int kMaxLinearRows = 12;
constexpr int kMinLinearRows = 6;
constexpr int tile_halves(int) { return 2; }
constexpr int tile_panels(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }
#elif defined(__AVX2__)
constexpr int kMaxLinearRows = 6;
constexpr int kMinLinearRows = 3;
constexpr int tile_halves(int rows) { return rows <= 3 ? 2 : 1; }
constexpr int tile_panels(int) { return 1; }
#else
constexpr int kMaxLinearRows = 2;
constexpr int kMinLinearRows = 1;
constexpr int tile_halves(int) { return 1; }
constexpr int tile_panels(int) { return 1; }
#endif

// Adds the bias to the sums of 16 columns, [rows][16], and stores what lies inside the matrix.
static __attribute__((noinline)) void finish_columns(const octavo::LinearArgs& a, const float* sums, int64_t row,
                                                     int rows, int64_t column) {
    const int64_t count = a.columns - column;
    if (count <= 0) return;
    F16 bias = a.bias ? load_some(a.bias, column, octavo::kF32, count) : zero();
    for (int r = 0; r < rows; r++) {
        F16 sum = load(sums + r * kLanes);
        store_some(a.out, (row + r) * a.columns + column, a.dtype, a.bias ? add(sum, bias) : sum, count);
    }
}

// To which cache memory is asked for, as __builtin_prefetch says it.
constexpr int kSecondLevel = 2;

// The memory that tiles ask for while they compute: `step_bytes` at each depth.
struct Ahead {
    const char* at;
    int64_t step_bytes;
};

// What tiles compute with at a time: depths [begin, end) of panel number `index` and of those behind it.
template <class Panel>
struct Weights {
    const typename Panel::Element* at;
    int64_t index, begin, end;
    // Where the tile of each row finds its sums up to `begin` and leaves them at `end`.
    float* sums;
};

// Rows [row, row + ROWS) of x against PANELS panels, of which HALVES halves from `half`.
template <class Panel, int ROWS, int PANELS, int HALVES>
static void linear_tile(const octavo::LinearArgs& a, const float* x, int64_t row, const Weights<Panel>& of, int half,
                        Ahead& ahead) {
    using Element = typename Panel::Element;
    const int64_t panel_items = a.depth * kPanelColumns, end = of.end, ahead_step = ahead.step_bytes;
    const Element* weights = of.at + half * kLanes;
    float* kept = of.sums + half * ROWS * kLanes;
    F16 sums[ROWS][PANELS * HALVES];
    const float* rows[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        rows[r] = x + (row + r) * a.depth;
#pragma GCC unroll 8
        for (int i = 0; i < PANELS * HALVES; i++)
            sums[r][i] = of.begin ? load(kept + (i * ROWS + r) * kLanes) : zero();
    }
    const char* ahead_at = ahead.at;
    for (int64_t k = of.begin; k < end; k++, weights += kPanelColumns, ahead_at += ahead_step) {
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++)
            __builtin_prefetch(ahead_at + p * panel_items * sizeof(Element), 0, kSecondLevel);
#pragma GCC unroll 8
        for (int i = 0; i < PANELS * HALVES; i++) {
            F16 w = Panel::weights(weights + i / HALVES * panel_items + i % HALVES * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) sums[r][i] = fma(set1(rows[r][k]), w, sums[r][i]);
            // Rows' inputs are loaded anew for each half: registers are for sums.
            if (ROWS > 1) forget_loads();
        }
    }
    ahead.at = ahead_at;
#pragma GCC unroll 8
    for (int i = 0; i < PANELS * HALVES; i++)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) store(kept + (i * ROWS + r) * kLanes, sums[r][i]);
    if (end < a.depth) return;
    for (int i = 0; i < PANELS * HALVES; i++)
        finish_columns(a, kept + i * ROWS * kLanes, row, ROWS,
                       (of.index + i / HALVES) * kPanelColumns + (half + i % HALVES) * kLanes);
}

// `rows` rows against `panels` panels, a number that `tile_panels` gives, or one.
template <class Panel, int ROWS = kMaxLinearRows>
INLINE void linear_rows(const octavo::LinearArgs& a, const float* x, int64_t row, int rows,
                        const Weights<Panel>& of, int panels, Ahead& ahead) {
    if (rows == ROWS) {
        constexpr int kTileHalves = tile_halves(ROWS);
        for (int half = 0; half < kHalves; half += kTileHalves) {
            if (panels == tile_panels(ROWS))
                linear_tile<Panel, ROWS, tile_panels(ROWS), kTileHalves>(a, x, row, of, half, ahead);
            else
                linear_tile<Panel, ROWS, 1, kTileHalves>(a, x, row, of, half, ahead);
        }
        return;
    }
    if constexpr (ROWS > 1) linear_rows<Panel, ROWS - 1>(a, x, row, rows, of, panels, ahead);
}

// Rows of the next tile, `left` being left. One of few rows has too few chains to hide an FMA's latency.
INLINE int tile_rows(int64_t left) {
    if (left <= kMaxLinearRows) return static_cast<int>(left);
    return left < kMaxLinearRows + kMinLinearRows ? static_cast<int>(left - kMinLinearRows) : kMaxLinearRows;
}

// Calls visit(row, rows) for the tiles of rows [row, limit).
template <class Visit>
INLINE void each_tile(int64_t row, int64_t limit, const Visit& visit) {
    while (row < limit) {
        int rows = tile_rows(limit - row);
        visit(row, rows);
        row += rows;
    }
}

// Rows [row, limit) against `panels` panels: tiles of rows, one after the other.
template <class Panel>
INLINE void linear_tiles(const octavo::LinearArgs& a, const float* x, int64_t row, int64_t limit, Weights<Panel> of,
                         int panels, Ahead& ahead) {
    each_tile(row, limit, [&](int64_t r, int rows) INLINE_BODY {
        linear_rows<Panel>(a, x, r, rows, of, panels, ahead);
        of.sums += rows * panels * kPanelColumns;
    });
}

// Tiles that meet a panel, whole or a half of it.
INLINE int64_t num_tiles(int64_t row, int64_t limit) {
    int64_t count = 0;
    each_tile(row, limit, [&](int64_t, int rows) { count += kHalves / tile_halves(rows); });
    return count;
}

// Memory for the sums of rows over `panels` panels.
INLINE float* tile_sums(int64_t rows, int panels) {
    return static_cast<float*>(
        octavo::thread_scratch(octavo::kPanelScratch, rows * panels * kPanelColumns * sizeof(float)));
}
