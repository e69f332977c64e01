// x @ weight.T + bias over panels.
//
// An output element is one chain of fp32 FMAs over depth in ascending order, then the bias: whatever the tile, the
// other rows and the threads. Tiles and tasks are free to suit registers and caches.
#pragma once
#include "panels.h"

// A tile is some rows against some panels, whole or a half at a time: as many chains as hide the latency of an FMA and
// as registers hold.
#if defined(__AVX512F__)
constexpr int kMaxLinearRows = 12;
constexpr int tile_halves(int) { return 2; }
constexpr int tile_panels(int rows) { return rows <= 2 ? 4 : rows <= 4 ? 2 : 1; }
#elif defined(__AVX2__)
constexpr int kMaxLinearRows = 6;
constexpr int tile_halves(int rows) { return rows <= 3 ? 2 : 1; }
constexpr int tile_panels(int) { return 1; }
#else
constexpr int kMaxLinearRows = 2;
constexpr int tile_halves(int) { return 1; }
constexpr int tile_panels(int) { return 1; }
#endif
// How far ahead of its place in a panel a tile asks for memory: the processor's own guesses come late at each panel.
constexpr int64_t kAheadBytes = 4096;
// Rows of a task are read once for each panel: so many bytes of them should stay in a second-level cache.
constexpr int64_t kMaxTaskBytes = 256 * 1024;
constexpr int64_t kMinTaskRows = 24;
// Tasks for each thread where there is enough to do, so that threads end together.
constexpr int64_t kTasksPerThread = 4;

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

// Rows [row, row + ROWS) of x against PANELS panels, of which HALVES halves from `half`.
template <class Panel, int ROWS, int PANELS, int HALVES>
static void linear_tile(const octavo::LinearArgs& a, const float* x, int64_t row, int64_t panel, int half) {
    using Element = typename Panel::Element;
    const int64_t panel_items = a.depth * kPanelColumns;
    const Element* weights = static_cast<const Element*>(a.panels) + panel * panel_items + half * kLanes;
    F16 sums[ROWS][PANELS * HALVES];
    const float* rows[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        rows[r] = x + (row + r) * a.depth;
#pragma GCC unroll 8
        for (int i = 0; i < PANELS * HALVES; i++) sums[r][i] = zero();
    }
    for (int64_t k = 0; k < a.depth; k++, weights += kPanelColumns) {
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++)
            __builtin_prefetch(reinterpret_cast<const char*>(weights + p * panel_items) + kAheadBytes);
#pragma GCC unroll 8
        for (int i = 0; i < PANELS * HALVES; i++) {
            F16 w = Panel::weights(weights + i / HALVES * panel_items + i % HALVES * kLanes);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) sums[r][i] = fma(set1(rows[r][k]), w, sums[r][i]);
            // Rows' inputs are loaded anew for each half: registers are for sums.
            if (ROWS > 1) forget_loads();
        }
    }
    alignas(64) float done[PANELS * HALVES * ROWS * kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < PANELS * HALVES; i++)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) store(done + (i * ROWS + r) * kLanes, sums[r][i]);
    for (int i = 0; i < PANELS * HALVES; i++)
        finish_columns(a, done + i * ROWS * kLanes, row, ROWS,
                       (panel + i / HALVES) * kPanelColumns + (half + i % HALVES) * kLanes);
}

template <class Panel, int ROWS, int PANELS>
INLINE void linear_panels(const octavo::LinearArgs& a, const float* x, int64_t row, int64_t panel) {
    constexpr int kTileHalves = tile_halves(ROWS);
    for (int half = 0; half < kHalves; half += kTileHalves)
        linear_tile<Panel, ROWS, PANELS, kTileHalves>(a, x, row, panel, half);
}

// `rows` rows against panels [begin, end).
template <class Panel, int ROWS = kMaxLinearRows>
INLINE void linear_rows(const octavo::LinearArgs& a, const float* x, int64_t row, int rows, int64_t begin, int64_t end) {
    if (rows == ROWS) {
        constexpr int kPanels = tile_panels(ROWS);
        for (; begin + kPanels <= end; begin += kPanels) linear_panels<Panel, ROWS, kPanels>(a, x, row, begin);
        for (; begin < end; begin++) linear_panels<Panel, ROWS, 1>(a, x, row, begin);
        return;
    }
    if constexpr (ROWS > 1) linear_rows<Panel, ROWS - 1>(a, x, row, rows, begin, end);
}

// Rows [row, limit) against panels [begin, end): each panel meets all rows while it is in the cache.
template <class Panel>
static void linear_task(const octavo::LinearArgs& a, const float* x, int64_t row, int64_t limit, int64_t begin,
                        int64_t end) {
    if (limit - row <= kMaxLinearRows) return linear_rows<Panel>(a, x, row, static_cast<int>(limit - row), begin, end);
    for (int64_t panel = begin; panel < end; panel++)
        for (int64_t r = row; r < limit; r += kMaxLinearRows) {
            int rows = static_cast<int>(limit - r < kMaxLinearRows ? limit - r : kMaxLinearRows);
            linear_rows<Panel>(a, x, r, rows, panel, panel + 1);
        }
}

INLINE int64_t max_task_rows(int64_t depth) {
    int64_t rows = kMaxTaskBytes / (depth * sizeof(float));
    return (rows < kMinTaskRows ? kMinTaskRows : rows) / kMaxLinearRows * kMaxLinearRows;
}

template <class Panel>
static void run_linear(const octavo::LinearArgs& a, const float* x, int threads) {
    const int64_t panels = num_panels(a.columns), rows_each = max_task_rows(a.depth);
    const int64_t row_tasks = (a.rows + rows_each - 1) / rows_each;
    int64_t panel_tasks = (threads * kTasksPerThread + row_tasks - 1) / row_tasks;
    if (panel_tasks > panels) panel_tasks = panels;
    parallel_for(row_tasks * panel_tasks, threads, [&](int64_t task) {
        int64_t row = task / panel_tasks * rows_each, share = task % panel_tasks;
        int64_t limit = row + rows_each < a.rows ? row + rows_each : a.rows;
        linear_task<Panel>(a, x, row, limit, panels * share / panel_tasks, panels * (share + 1) / panel_tasks);
    });
}

// x in fp32: itself, or a copy in memory of this thread's.
static const float* widened_rows(const octavo::LinearArgs& a, int threads) {
    if (a.dtype == octavo::kF32) return static_cast<const float*>(a.x);
    const int64_t items = a.rows * a.depth, vectors = (items + kLanes - 1) / kLanes;
    auto to = static_cast<float*>(
        octavo::thread_scratch(octavo::kInputScratch, vectors * kLanes * sizeof(float)));
    if (items < kMinParallelElements) threads = 1;
    parallel_ranges(vectors, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin * kLanes; i < end * kLanes; i += kLanes)
            store(to + i, load_some(a.x, i, a.dtype, items - i));
    });
    return to;
}

static void linear(const octavo::LinearArgs& a, int threads) {
    const float* x = widened_rows(a, threads);
    if (a.panel_dtype == octavo::kBf16) run_linear<Bf16Panel>(a, x, threads);
    if (a.panel_dtype == octavo::kF16) run_linear<F16Panel>(a, x, threads);
    if (a.panel_dtype == octavo::kF32) run_linear<F32Panel>(a, x, threads);
}
