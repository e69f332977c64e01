// The kernels as the table has them: each opens a team, of no more threads than it has tasks for, and walks through it.
#pragma once
#include "layers.h"
#include "pack.h"
#include "sampling.h"

namespace calls {

// Most stages of a kernel by itself, and of a layer.
constexpr int64_t kKernelStages = 8;
constexpr int64_t kLayerStages = 32;

template <class Body>
INLINE void with_team(int threads, int64_t most_tasks, const Body& body) {
    in_team(most_tasks < threads ? static_cast<int>(most_tasks) : threads, kKernelStages, body);
}

void norm(const octavo::NormArgs& a, int threads) {
    with_team(threads, num_runs(a.rows, a.hidden), [&](Walk& walk) { ::norm(a, walk); });
}

void silu_mul(const octavo::GateArgs& a, int threads) {
    with_team(threads, num_runs(a.rows, 2 * a.width), [&](Walk& walk) { ::silu_mul(a, walk); });
}

void gelu_mul(const octavo::GateArgs& a, int threads) {
    with_team(threads, num_runs(a.rows, 2 * a.width), [&](Walk& walk) { ::gelu_mul(a, walk); });
}

void soft_cap(const octavo::SoftCapArgs& a, int threads) {
    with_team(threads, num_runs(a.count, 2), [&](Walk& walk) { ::soft_cap(a, walk); });
}

void pack(const octavo::PackArgs& a, int threads) {
    with_team(threads, num_panels(a.columns), [&](Walk& walk) { ::pack(a, walk); });
}

void linear(const octavo::LinearArgs& a, int threads) {
    with_team(threads, num_panels(a.columns), [&](Walk& walk) { ::linear(a, walk); });
}

void rope_write_kv(const octavo::RopeArgs& a, int threads) {
    with_team(threads, num_rope_runs(a), [&](Walk& walk) { ::rope_write_kv(a, walk); });
}

void attention(const octavo::AttentionArgs& a, int threads) {
    with_team(threads, threads, [&](Walk& walk) { ::attention(a, walk); });
}

void layers(const octavo::LayersArgs& a, int threads) {
    if (!a.num_layers) return;
    const LayerBuffers buffers(a);
    Parts parts(a, threads);
    in_team(threads, a.num_layers * kLayerStages, [&](Walk& walk) {
        if (parts.count > 1)
            run_parts(a, buffers, parts);
        else
            run_stages(a, buffers, parts.each[0].part, walk);
    });
}

void sample(const octavo::SampleArgs& a, int threads) {
    with_team(threads, a.rows, [&](Walk& walk) { ::sample(a, walk); });
}

void logprobs(const octavo::SampleArgs& a, const octavo::LogprobArgs& l, int threads) {
    with_team(threads, l.count, [&](Walk& walk) { ::logprobs(a, l, walk); });
}

}  // namespace calls
