// Methods of the Python module that run kernels. The first argument of each is variant | threads << 8.
#pragma once
#include "arguments.h"

namespace octavo {
namespace {

// (context, x, residual, weight, out, rows, hidden, eps, x dtype, residual dtype, weight dtype)
PyObject* norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Args in(values, count, 11);
    in.context();
    NormArgs a;
    a.x = in, a.residual = in, a.weight = in, a.out = in;
    a.rows = in.integer(), a.hidden = in.integer();
    a.eps = static_cast<float>(in.number());
    a.x_dtype = in.integer(), a.residual_dtype = in.integer(), a.weight_dtype = in.integer();
    return run_released(in, [&] { in.kernels().norm(a, in.threads); });
}

// (context, gate_up, out, rows, width, dtype)
GateArgs read_gate(Args& in) {
    in.context();
    GateArgs a;
    a.gate_up = in, a.out = in;
    a.rows = in.integer(), a.width = in.integer(), a.dtype = in.integer();
    return a;
}

PyObject* silu_mul(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Args in(values, count, 6);
    GateArgs a = read_gate(in);
    return run_released(in, [&] { in.kernels().silu_mul(a, in.threads); });
}

PyObject* gelu_mul(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Args in(values, count, 6);
    GateArgs a = read_gate(in);
    return run_released(in, [&] { in.kernels().gelu_mul(a, in.threads); });
}

// (context, x, out, count, cap, dtype)
PyObject* soft_cap(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Args in(values, count, 6);
    in.context();
    SoftCapArgs a;
    a.x = in, a.out = in;
    a.count = in.integer(), a.cap = static_cast<float>(in.number()), a.dtype = in.integer();
    return run_released(in, [&] { in.kernels().soft_cap(a, in.threads); });
}

// (context, weight, panels, columns, depth, dtype, dtype of the panels)
PackArgs read_pack(Args& in) {
    in.context();
    PackArgs a;
    a.weight = in, a.panels = in;
    a.columns = in.integer(), a.depth = in.integer(), a.dtype = in.integer(), a.panel_dtype = in.integer();
    return a;
}

// The narrowest type that holds every weight exactly; panels and their type are not looked at.
PyObject* narrowest(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Args in(values, count, 7);
    PackArgs a = read_pack(in);
    return count_released(in, [&] { return in.kernels().narrowest(a, in.threads); });
}

PyObject* pack(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Args in(values, count, 7);
    PackArgs a = read_pack(in);
    return run_released(in, [&] { in.kernels().pack(a, in.threads); });
}

// The bytes that the coded panels take; 0: the capacity does not suffice.
// (context, panels of bf16, coded panels, columns, depth, capacity)
PyObject* code_panels(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Args in(values, count, 6);
    in.context();
    CodeArgs a;
    a.panels = in, a.coded = in;
    a.columns = in.integer(), a.depth = in.integer(), a.capacity = in.integer();
    return count_released(in, [&] { return in.kernels().code_panels(a, in.threads); });
}

// (context, x, out, rows, columns, depth, dtype, dtype of the panels, panels, where the coded panels' address or 0 stands,
//  bias)
PyObject* linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Args in(values, count, 11);
    in.context();
    LinearArgs a;
    a.x = in, a.out = in;
    a.rows = in.integer(), a.columns = in.integer(), a.depth = in.integer();
    a.dtype = in.integer(), a.panel_dtype = in.integer();
    a.panels = in;
    const void* const* coded = in;
    a.bias = in;
    if (in.ok()) a.coded = *coded;
    return run_released(in, [&] { in.kernels().linear(a, in.threads); });
}

// data of the layer, then (num_blocks, block_size, num_kv_heads, head_dim, dtype)
KvLayer read_layer(Args& in) {
    KvLayer kv;
    kv.data = in;
    kv.num_blocks = in.integer(), kv.block_size = in.integer(), kv.num_kv_heads = in.integer();
    kv.head_dim = in.integer(), kv.dtype = in.integer();
    return kv;
}

// (context, qkv, num_tokens, num_heads, dtype, slots, positions, cos, sin, half, q_weight, k_weight, eps, weight dtype,
//  layer...)
PyObject* rope_write_kv(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Args in(values, count, 20);
    in.context();
    RopeArgs a;
    a.qkv = in;
    a.num_tokens = in.integer(), a.num_heads = in.integer(), a.dtype = in.integer();
    a.slots = in, a.positions = in, a.cos = in, a.sin = in;
    a.half = in.integer();
    a.q_weight = in, a.k_weight = in;
    a.eps = static_cast<float>(in.number()), a.weight_dtype = in.integer();
    a.kv = read_layer(in);
    return run_released(in, [&] { in.kernels().rope_write_kv(a, in.threads); });
}

// (context, qkv, out, query_starts, context_lens, block_tables, num_rows, max_blocks, num_tokens, num_heads, dtype,
//  scale, window or None, soft_cap or None, layer...)
PyObject* attention(PyObject*, PyObject* const* values, Py_ssize_t count) {
    if (count != 20) return PyErr_Format(PyExc_TypeError, "expected 20 arguments, got %zd", count);
    Args in(values, count, count), layer(values + 14, 6, 6);
    in.context();
    AttentionArgs a;
    a.qkv = in, a.out = in, a.query_starts = in, a.context_lens = in, a.block_tables = in;
    a.num_rows = in.integer(), a.max_blocks = in.integer(), a.num_tokens = in.integer();
    a.num_heads = in.integer(), a.dtype = in.integer();
    a.scale = static_cast<float>(in.number());
    a.windowed = values[12] != Py_None, a.capped = values[13] != Py_None;
    a.window = a.windowed ? PyLong_AsLongLong(values[12]) : 0;
    a.soft_cap = a.capped ? static_cast<float>(PyFloat_AsDouble(values[13])) : 0;
    a.kv = read_layer(layer);
    return run_released(in, [&] { in.kernels().attention(a, in.threads); });
}

// (context, packed layers, their bytes, num_layers, num_heads, is_gelu, eps, num_tokens, hidden, x, residual, dtype,
//  residual dtype, slots, positions, query_starts, context_lens, block_tables, num_rows, max_blocks, kv_layer_bytes,
//  first layer...)
PyObject* layers(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Args in(values, count, 27);
    in.context();
    LayersArgs a;
    a.layers = in;
    long long num_bytes = in.integer();
    a.num_layers = in.integer(), a.num_heads = in.integer(), a.is_gelu = in.integer();
    a.eps = static_cast<float>(in.number());
    a.num_tokens = in.integer(), a.hidden = in.integer();
    a.x = in, a.residual = in;
    a.dtype = in.integer(), a.residual_dtype = in.integer();
    a.slots = in, a.positions = in;
    a.query_starts = in, a.context_lens = in, a.block_tables = in;
    a.num_rows = in.integer(), a.max_blocks = in.integer();
    a.kv_layer_bytes = in.integer();
    a.kv = read_layer(in);
    if (in.ok() && num_bytes < a.num_layers * static_cast<long long>(sizeof(LayerWeights)))
        return PyErr_Format(PyExc_ValueError, "%lld layers take %zu bytes each, got %lld in all", (long long)a.num_layers,
                            sizeof(LayerWeights), num_bytes);
    return run_released(in, [&] { in.kernels().layers(a, in.threads); });
}

SampleArgs read_logits(Args& in) {
    SampleArgs a = {};
    a.logits = in;
    a.rows = in.integer(), a.row_stride = in.integer(), a.dtype = in.integer(), a.vocab = in.integer();
    return a;
}

// (context, logits, rows, row_stride, dtype, vocab, the tensors of SamplingBatch in its order up to forbidden_ids,
//  token_ids, finite)
PyObject* sample(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Args in(values, count, 25);
    in.context();
    SampleArgs a = read_logits(in);
    a.temperatures = in, a.top_ks = in, a.top_ps = in, a.min_ps = in, a.seeds = in, a.positions = in;
    a.repetition = in, a.frequency = in, a.presence = in;
    a.history_starts = in, a.history_ids = in, a.history_prompt_lens = in;
    a.bias_starts = in, a.bias_ids = in, a.bias_values = in;
    a.forbidden_starts = in, a.forbidden_ids = in;
    a.token_ids = in, a.finite = in;
    return run_released(in, [&] { in.kernels().sample(a, in.threads); });
}

// (context, logits, rows, row_stride, dtype, vocab, count, rows of the logits or 0, token_ids, num_top,
//  token_logprobs, top_ids, top_logprobs)
PyObject* logprobs(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Args in(values, count, 13);
    in.context();
    SampleArgs a = read_logits(in);
    LogprobArgs l;
    l.count = in.integer();
    l.rows = in, l.token_ids = in;
    l.num_top = in.integer();
    l.token_logprobs = in, l.top_ids = in, l.top_logprobs = in;
    if (in.ok() && (l.num_top < 0 || l.num_top > kMaxAlternatives))
        return PyErr_Format(PyExc_ValueError, "num_top %d must be in 0..%d", l.num_top, kMaxAlternatives);
    return run_released(in, [&] { in.kernels().logprobs(a, l, in.threads); });
}

}  // namespace
}  // namespace octavo
