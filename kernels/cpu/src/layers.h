// A decoder's layers in one call: the kernels of each, in the order and with the arguments of one call a kernel.
//
// Between kernels there is nothing then, neither Python nor a tensor made; threads that spun for the next kernel find it.
#pragma once
#include "attention.h"
#include "linear.h"

// What lies between the kernels of a layer, a row a token; the same memory for all layers.
struct LayerBuffers {
    char *qkv, *attended, *gate_up, *gated;

    LayerBuffers(const octavo::LayersArgs& a, int64_t intermediate) {
        const int64_t size = dtype_size(a.dtype), head = a.kv.head_dim;
        const int64_t widths[] = {(a.num_heads + 2 * a.kv.num_kv_heads) * head, a.num_heads * head, 2 * intermediate,
                                  intermediate};
        int64_t offsets[4], num_bytes = 0;
        for (int i = 0; i < 4; i++) {
            offsets[i] = num_bytes;
            num_bytes += (a.num_tokens * widths[i] * size + 63) / 64 * 64;
        }
        auto memory = static_cast<char*>(octavo::thread_scratch(octavo::kLayerScratch, num_bytes));
        qkv = memory + offsets[0], attended = memory + offsets[1];
        gate_up = memory + offsets[2], gated = memory + offsets[3];
    }
};

INLINE void layer_linear(const octavo::LayersArgs& a, const octavo::Matrix& matrix, const void* x, void* out,
                         int threads) {
    octavo::LinearArgs args = {x,           out,
                               a.num_tokens, matrix.columns,
                               matrix.depth, a.dtype,
                               static_cast<int>(matrix.panel_dtype), matrix.panels,
                               matrix.bias};
    linear(args, threads);
}

// x becomes its norm or, with a residual, that of the sum. Without a weight nothing happens.
INLINE void layer_norm(const octavo::LayersArgs& a, const octavo::NormWeight& norm_weight, void* residual,
                       int threads) {
    if (!norm_weight.weight) return;
    octavo::NormArgs args = {a.x,    residual, norm_weight.weight, a.x, a.num_tokens, a.hidden, a.eps, a.dtype,
                             a.residual_dtype, static_cast<int>(norm_weight.dtype)};
    norm(args, threads);
}

static void layer_attention(const octavo::LayersArgs& a, const octavo::LayerWeights& layer, const octavo::KvLayer& kv,
                            const LayerBuffers& buffers, int threads) {
    const int num_heads = static_cast<int>(a.num_heads);
    octavo::RopeArgs rope = {buffers.qkv, a.num_tokens, num_heads, a.dtype, a.slots, a.positions, layer.cos, layer.sin,
                             static_cast<int>(layer.half), layer.q_norm.weight, layer.k_norm.weight,
                             static_cast<float>(layer.qk_eps), static_cast<int>(layer.q_norm.dtype), kv};
    rope_write_kv(rope, threads);
    octavo::AttentionArgs args = {buffers.qkv, buffers.attended, a.query_starts, a.context_lens, a.block_tables,
                                  a.num_rows, a.max_blocks, a.num_tokens, num_heads, a.dtype,
                                  static_cast<float>(layer.scale), layer.soft_cap != 0,
                                  static_cast<float>(layer.soft_cap), layer.window != 0, layer.window, kv};
    attention(args, threads);
}

static void layers(const octavo::LayersArgs& a, int threads) {
    if (!a.num_layers) return;
    const int64_t intermediate = a.layers[0].down.depth;
    const LayerBuffers buffers(a, intermediate);
    const octavo::GateArgs gate = {buffers.gate_up, buffers.gated, a.num_tokens, intermediate, a.dtype};
    octavo::KvLayer kv = a.kv;
    for (int64_t i = 0; i < a.num_layers; i++, kv.data += a.kv_layer_bytes) {
        const octavo::LayerWeights& layer = a.layers[i];
        layer_linear(a, layer.qkv, a.x, buffers.qkv, threads);
        layer_attention(a, layer, kv, buffers, threads);
        layer_linear(a, layer.output, buffers.attended, a.x, threads);
        layer_norm(a, layer.attention_out_norm, nullptr, threads);
        layer_norm(a, layer.mlp_norm, a.residual, threads);
        layer_linear(a, layer.gate_up, a.x, buffers.gate_up, threads);
        if (a.is_gelu)
            gelu_mul(gate, threads);
        else
            silu_mul(gate, threads);
        layer_linear(a, layer.down, buffers.gated, a.x, threads);
        layer_norm(a, layer.mlp_out_norm, nullptr, threads);
        layer_norm(a, layer.next_norm, a.residual, threads);
    }
}
