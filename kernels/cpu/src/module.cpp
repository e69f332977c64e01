// The Python module: reads arguments, releases the GIL, calls the kernels of the chosen variant.
//
// Tensors come as addresses; the caller (backend.py) has checked shapes and types. The first argument of every kernel
// is variant | threads << 8. Nothing here is linked against an OpenMP runtime: the kernels' GOMP_* symbols are those
// of the library that torch has loaded.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdlib>
#include <cstring>
#include <ctime>

#if defined(__unix__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "abi.h"

namespace octavo {

#define DECLARE(name) extern const Kernels kernels_##name;
VARIANTS(DECLARE)
#undef DECLARE

namespace {

#define TABLE(name) &kernels_##name,
const Kernels* const kVariants[] = {VARIANTS(TABLE)};
#undef TABLE
constexpr int kNumVariants = sizeof(kVariants) / sizeof(*kVariants);

bool runs_here(const char* name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (!strcmp(name, "avx512_bf16")) return avx512 && __builtin_cpu_supports("avx512bf16");
    if (!strcmp(name, "avx512")) return avx512;
    if (!strcmp(name, "avx2")) return avx2;
#endif
    return !strcmp(name, "portable");
}

// Reads positional arguments in order; an argument of the wrong type sets a Python error, seen by ok().
class Args {
public:
    Args(PyObject* const* args, Py_ssize_t count, Py_ssize_t expected) : next_(args) {
        if (count != expected) PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
    }
    bool ok() const { return !PyErr_Occurred(); }
    long long integer() { return PyErr_Occurred() ? 0 : PyLong_AsLongLong(*next_++); }
    double number() { return PyErr_Occurred() ? 0 : PyFloat_AsDouble(*next_++); }
    template <class T>
    operator T*() {
        return PyErr_Occurred() ? nullptr : static_cast<T*>(PyLong_AsVoidPtr(*next_++));
    }
    void context() {
        long long packed = integer();
        variant_ = packed & 255, threads = static_cast<int>(packed >> 8);
        if (ok() && (variant_ >= kNumVariants || threads < 1)) PyErr_SetString(PyExc_ValueError, "no such variant");
    }
    const Kernels& kernels() const { return *kVariants[variant_]; }
    int threads = 1;

private:
    PyObject* const* next_;
    int variant_ = 0;
};

template <class Call>
PyObject* run_released(Args& args, const Call& call) {
    if (!args.ok()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    call();
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

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
    if (!in.ok()) return nullptr;
    int type;
    Py_BEGIN_ALLOW_THREADS;
    type = in.kernels().narrowest(a, in.threads);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLong(type);
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
    int64_t used;
    if (!in.ok()) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    used = in.kernels().code_panels(a, in.threads);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLongLong(used);
}

// (context, x, out, rows, columns, depth, dtype, dtype of the panels, panels, coded panels or 0, bias)
PyObject* linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Args in(values, count, 11);
    in.context();
    LinearArgs a;
    a.x = in, a.out = in;
    a.rows = in.integer(), a.columns = in.integer(), a.depth = in.integer();
    a.dtype = in.integer(), a.panel_dtype = in.integer();
    a.panels = in, a.coded = in, a.bias = in;
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

enum Fault : int { kNoTokens, kTooManyTokens, kTableTooShort, kBlockOutside, kWrongPosition };

// Fills slots; a fault returns (fault, row, token, value) for the caller to word.
// (query_starts, context_lens, block_tables, positions, slots, num_rows, max_blocks, block_size, num_blocks)
PyObject* plan_slots(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Args in(values, count, 9);
    const int32_t *starts = in, *contexts = in, *tables = in, *positions = in;
    int64_t* slots = in;
    int64_t num_rows = in.integer(), max_blocks = in.integer(), size = in.integer(), num_blocks = in.integer();
    if (!in.ok()) return nullptr;
    auto fault = [](Fault kind, int64_t row, int64_t token, int64_t value) {
        return Py_BuildValue("(iLLL)", kind, (long long)row, (long long)token, (long long)value);
    };
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t tokens = starts[row + 1] - starts[row], context = contexts[row];
        if (tokens < 1) return fault(kNoTokens, row, 0, tokens);
        if (tokens > context) return fault(kTooManyTokens, row, tokens, context);
        if (context > max_blocks * size) return fault(kTableTooShort, row, tokens, context);
        const int32_t* table = tables + row * max_blocks;
        for (int64_t i = 0; i * size < context; i++)
            if (table[i] < 0 || table[i] >= num_blocks) return fault(kBlockOutside, row, i, table[i]);
        for (int64_t t = 0; t < tokens; t++) {
            int64_t token = starts[row] + t, position = context - tokens + t;
            if (positions[token] != position) return fault(kWrongPosition, row, token, position);
            slots[token] = static_cast<int64_t>(table[position / size]) * size + position % size;
        }
    }
    Py_RETURN_NONE;
}

// Each pair (src_ids[i], dst_ids[i]) in all layers; no block may be both source and destination.
// (src, dst, src_ids, dst_ids, count, num_layers, block_bytes, src_layer_bytes, dst_layer_bytes)
PyObject* copy_blocks(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Args in(values, count, 9);
    const char* src = in;
    char* dst = in;
    const int64_t *src_ids = in, *dst_ids = in;
    int64_t num_blocks = in.integer(), num_layers = in.integer(), bytes = in.integer();
    int64_t src_layer = in.integer(), dst_layer = in.integer();
    return run_released(in, [&] {
        for (int64_t layer = 0; layer < num_layers; layer++)
            for (int64_t i = 0; i < num_blocks; i++)
                memmove(dst + layer * dst_layer + dst_ids[i] * bytes, src + layer * src_layer + src_ids[i] * bytes,
                        bytes);
    });
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

// (address, bytes): asks for huge pages, which a cache read at random places needs. Advice: a refusal changes nothing.
PyObject* advise_huge_pages(PyObject*, PyObject* const* values, Py_ssize_t count) {
    Args in(values, count, 2);
    char* address = in;
    size_t num_bytes = in.integer();
    if (!in.ok()) return nullptr;
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = sysconf(_SC_PAGESIZE);
    uintptr_t begin = (reinterpret_cast<uintptr_t>(address) + page - 1) / page * page;
    uintptr_t end = (reinterpret_cast<uintptr_t>(address) + num_bytes) / page * page;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
    Py_RETURN_NONE;
}

// Names of the variants in this build, best first, and which of them this processor runs.
PyObject* variants(PyObject*, PyObject*) {
    PyObject* list = PyList_New(0);
    for (int i = 0; list && i < kNumVariants; i++) {
        PyObject* item = Py_BuildValue("(sO)", kVariants[i]->name, runs_here(kVariants[i]->name) ? Py_True : Py_False);
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, nullptr}
PyMethodDef kMethods[] = {
    FAST(norm), FAST(silu_mul), FAST(gelu_mul), FAST(soft_cap),
    FAST(narrowest), FAST(pack), FAST(code_panels), FAST(linear),
    FAST(rope_write_kv), FAST(attention), FAST(layers), FAST(plan_slots), FAST(copy_blocks),
    FAST(advise_huge_pages),
    FAST(sample), FAST(logprobs), {"variants", variants, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_native", "Octavo's CPU kernels.", -1, kMethods,
                       nullptr, nullptr, nullptr, nullptr};

struct Scratch {
    void* memory[kNumScratchSlots] = {};
    size_t sizes[kNumScratchSlots] = {};
    ~Scratch() {
        for (void* each : memory) free(each);
    }
};

}  // namespace

void* thread_scratch(ScratchSlot slot, size_t num_bytes) {
    static thread_local Scratch scratch;
    if (num_bytes > scratch.sizes[slot]) {
        free(scratch.memory[slot]);
        scratch.memory[slot] = nullptr, scratch.sizes[slot] = 0;
        size_t size = (num_bytes + num_bytes / 4 + 4095) / 4096 * 4096;
        void* memory = aligned_alloc(64, size);
        // Out of memory inside a kernel has no caller to tell.
        if (!memory) Py_FatalError("octavo: no memory for kernel scratch");
        memset(memory, 0, size);
        scratch.memory[slot] = memory, scratch.sizes[slot] = size;
    }
    return scratch.memory[slot];
}

// A nap, not sched_yield: only a core that idles fetches the thread that waits for another one.
void let_others_run() {
    const timespec nap = {0, 1000};
    nanosleep(&nap, nullptr);
}

}  // namespace octavo

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&octavo::kModule); }
