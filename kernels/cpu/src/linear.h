// x @ weight.T + bias over panels, cut into tasks. What is computed, to the bit, tiles say (linear_tile.h).
#pragma once
#include "decoded_tile.h"

// Rows of a task are read once for each panel: so many bytes of them should stay in a second-level cache.
constexpr int64_t kMaxInputBytes = 256 * 1024;
constexpr int64_t kMinTaskRows = 24;
// A task reads so many bytes of weights, or makes so many products if that is less: some ten microseconds, beside which
// drawing it costs little. Of a large matrix it takes more: each thread's share of it is read in long runs.
constexpr int64_t kTaskBytes = 256 * 1024;
constexpr int64_t kTaskProducts = 2'000'000;
constexpr int64_t kMostPanelTasks = 24;
constexpr int64_t kWidenedDepths = 64;

// Rows [row, limit) against panels [begin, end): each panel meets all rows while it is in the second-level cache. Each
// tile asks for a part of what comes next, so that none waits; into that cache alone, for the first is full of this
// panel. Behind the last panel lies, as a rule, the matrix that is used next.
template <class Panel>
static void linear_task(Kind<Panel>, const octavo::LinearArgs& a, const float* x, int64_t row, int64_t limit,
                        int64_t begin, int64_t end) {
    const int first_rows = tile_rows(limit - row), most_panels = first_rows == limit - row ? tile_panels(first_rows) : 1;
    const int64_t tiles = num_tiles(row, limit), panel_items = a.depth * kPanelColumns;
    float* sums = tile_sums(limit - row, most_panels);
    for (int64_t panel = begin; panel < end;) {
        const int panels = panel + most_panels <= end ? most_panels : 1;
        auto weights = static_cast<const typename Panel::Element*>(a.panels) + panel * panel_items;
        Ahead ahead = {reinterpret_cast<const char*>(weights + panels * panel_items),
                       (kPanelColumns * static_cast<int64_t>(sizeof(*weights)) + tiles - 1) / tiles};
        linear_tiles<Panel>(a, x, row, limit, {weights, panel, 0, a.depth, sums}, panels, ahead);
        panel += panels;
    }
}

// As above over panels that are decoded in registers: the task has its rows, at most ROWS, in one tile.
template <int ROWS, class Panel>
static void decoded_task(Kind<Panel> kind, const octavo::LinearArgs& a, const void* panels, const float* x,
                         int64_t row, int64_t limit, int64_t begin, int64_t end) {
    const int64_t panel_bytes = Panel::bytes(a.depth);
    for (int64_t panel = begin; panel < end; panel++) {
        auto at = static_cast<const char*>(panels) + panel * panel_bytes;
        decoded_rows<ROWS>(kind, a, x, row, limit - row, at, panel, at + panel_bytes);
    }
}

static void linear_task(Kind<CodedPanel> kind, const octavo::LinearArgs& a, const float* x, int64_t row, int64_t limit,
                        int64_t begin, int64_t end) {
    decoded_task<kMaxCodedRows>(kind, a, a.coded, x, row, limit, begin, end);
}

// As above over panels of blocks. Of more rows than one tile's, as many depths as a first-level cache holds are widened
// and meet all of them.
template <int BITS>
static void linear_task(Kind<BlockPanel<BITS>> kind, const octavo::LinearArgs& a, const float* x, int64_t row,
                        int64_t limit, int64_t begin, int64_t end) {
    using Panel = BlockPanel<BITS>;
    if (limit - row <= kMaxBlockRows) return decoded_task<kMaxBlockRows>(kind, a, a.panels, x, row, limit, begin, end);
    const int64_t panel_bytes = Panel::bytes(a.depth), tiles = num_tiles(row, limit);
    const int64_t step_bytes = (panel_bytes / a.depth + tiles - 1) / tiles;
    float* sums = tile_sums(limit - row, 1);
    alignas(64) float widened[kWidenedDepths * kPanelColumns];
    for (int64_t panel = begin; panel < end; panel++) {
        auto at = static_cast<const char*>(a.panels) + panel * panel_bytes;
        Ahead ahead = {at + panel_bytes, step_bytes};
        for (int64_t k = 0; k < a.depth; k += kWidenedDepths) {
            const int64_t until = k + kWidenedDepths < a.depth ? k + kWidenedDepths : a.depth;
            for (int64_t block = k; block < until; block += kBlockDepths, at += Panel::kBlockBytes)
                Panel::widen(at, widened + (block - k) * kPanelColumns);
            linear_tiles<F32Panel>(a, x, row, limit, {widened, panel, k, until, sums}, 1, ahead);
        }
    }
}

INLINE int64_t max_task_rows(int64_t depth) {
    int64_t rows = kMaxInputBytes / (depth * sizeof(float));
    return (rows < kMinTaskRows ? kMinTaskRows : rows) / kMaxLinearRows * kMaxLinearRows;
}

// Panels of a task whose rows are `rows`.
template <class Panel>
INLINE int64_t num_task_panels(int64_t panels, int64_t depth, int64_t rows, int threads) {
    const int64_t weights = depth * kPanelColumns;
    const int64_t by_bytes = kTaskBytes / Panel::bytes(depth);
    const int64_t by_products = kTaskProducts / (weights * rows), fewest = panels / (threads * kMostPanelTasks);
    const int64_t wanted = by_bytes < by_products ? by_bytes : by_products;
    if (wanted >= fewest) return wanted > 1 ? wanted : 1;
    return fewest > 1 ? fewest : 1;
}

template <class Panel>
static void run_linear(Kind<Panel> kind, const octavo::LinearArgs& a, const float* x, Walk& walk) {
    const int64_t panels = num_panels(a.columns), rows_each = max_task_rows(a.depth);
    const int64_t row_tasks = (a.rows + rows_each - 1) / rows_each;
    const int64_t panels_each =
        num_task_panels<Panel>(panels, a.depth, a.rows < rows_each ? a.rows : rows_each, walk.threads);
    const int64_t panel_tasks = (panels + panels_each - 1) / panels_each;
    parallel_for(walk, row_tasks * panel_tasks, [&](int64_t task) {
        const int64_t row = task / panel_tasks * rows_each, panel = task % panel_tasks * panels_each;
        const int64_t limit = row + rows_each < a.rows ? row + rows_each : a.rows;
        const int64_t end = panel + panels_each < panels ? panel + panels_each : panels;
        linear_task(kind, a, x, row, limit, panel, end);
    });
}

// x in fp32: itself, or a copy.
static const float* widened_rows(const octavo::LinearArgs& a, Walk& walk) {
    if (a.dtype == octavo::kF32) return static_cast<const float*>(a.x);
    const int64_t items = a.rows * a.depth, vectors = (items + kLanes - 1) / kLanes;
    auto to = static_cast<float*>(shared_scratch(walk, octavo::kInputScratch, vectors * kLanes * sizeof(float)));
    parallel_ranges(walk, vectors, num_runs(items, 1), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin * kLanes; i < end * kLanes; i += kLanes)
            store(to + i, load_some(a.x, i, a.dtype, items - i));
    });
    return to;
}

static void linear(const octavo::LinearArgs& a, Walk& walk) {
    const float* x = widened_rows(a, walk);
    if (a.coded && a.rows <= kMaxCodedRows) return run_linear(Kind<CodedPanel>(), a, x, walk);
    with_kind(a.panel_dtype, [&](auto kind) INLINE_BODY { run_linear(kind, a, x, walk); });
}
