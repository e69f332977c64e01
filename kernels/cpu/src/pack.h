// How a matrix is packed: in the narrowest panels that give each of its weights back exactly.
#pragma once
#include "block_panels.h"
#include "coded_panels.h"

static int narrowest(const octavo::PackArgs& a, int threads) {
    if (a.dtype != octavo::kF32) return a.dtype;
    if (is_exact(a, threads, [](F16 x) INLINE_BODY { return rounded_to(x, octavo::kBf16); })) return octavo::kBf16;
    if (is_exact(a, threads, [](F16 x) INLINE_BODY { return rounded_to(x, octavo::kF16); })) return octavo::kF16;
    if (is_in_blocks<4>(a, threads)) return octavo::kBlocks4;
    if (is_in_blocks<8>(a, threads)) return octavo::kBlocks8;
    return octavo::kF32;
}

template <class Panel>
static void pack_as(Kind<Panel> kind, const octavo::PackArgs& a, Walk& walk) {
    auto panels = static_cast<char*>(a.panels);
    parallel_for(walk, num_panels(a.columns),
                 [&](int64_t panel) { pack_panel(kind, a, panel, panels + panel * Panel::bytes(a.depth)); });
}

static void pack(const octavo::PackArgs& a, Walk& walk) {
    with_kind(a.panel_dtype, [&](auto kind) INLINE_BODY { pack_as(kind, a, walk); });
}
