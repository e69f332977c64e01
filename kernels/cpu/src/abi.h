// The border between the Python module (module.cpp, baseline instructions) and the kernel variants (variant.cpp, one
// object per instruction set). Plain structs and one table of functions per variant.
//
// No templates or inline functions of the standard library may be used in a variant: the linker keeps one copy of
// each weak symbol, possibly the AVX-512 one, and hands it to everybody.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

// Codes of element types, as passed from Python.
enum DType : int { kBf16 = 0, kF16 = 1, kF32 = 2 };
// Types of panels alone: fp32 in blocks with codes of so many bits (see block_panels.h).
constexpr int kBlocks4 = 3, kBlocks8 = 4;

// One layer of the paged cache. A block holds, for each KV head, its keys and then its values (see kv_layout.h).
struct KvLayer {
    char* data;
    int64_t num_blocks;
    int block_size, num_kv_heads, head_dim, dtype;
};

struct NormArgs {
    const void* x;
    void* residual;  // null: plain norm
    const void* weight;
    void* out;
    int64_t rows, hidden;
    float eps;
    int x_dtype, residual_dtype, weight_dtype;
};

struct GateArgs {
    const void* gate_up;
    void* out;
    int64_t rows, width;
    int dtype;
};

struct SoftCapArgs {
    const void* x;
    float* out;
    int64_t count;
    float cap;
    int dtype;
};

// A matrix [columns, depth] to be packed into panels of type `panel_dtype` (see panels.h).
struct PackArgs {
    const void* weight;
    void* panels;
    int64_t columns, depth;
    int dtype, panel_dtype;
};

// Panels of bf16 to be coded again, in at most `capacity` bytes (see coded_panels.h).
struct CodeArgs {
    const uint16_t* panels;
    char* coded;
    int64_t columns, depth, capacity;
};

struct LinearArgs {
    const void* x;  // [rows, depth] of dtype, as out
    void* out;      // [rows, columns]
    int64_t rows, columns, depth;
    int dtype, panel_dtype;
    const void* panels;
    const void* coded;  // the same weights in coded panels, or null
    const float* bias;  // null: none
};

struct RopeArgs {
    char* qkv;
    int64_t num_tokens;
    int num_heads, dtype;
    const int64_t* slots;  // [num_tokens]: block * block_size + offset of each token's place in the cache
    const int32_t* positions;
    const float *cos, *sin;
    int half;                           // rotary_dim / 2
    const void *q_weight, *k_weight;    // null: no norm
    float eps;
    int weight_dtype;
    KvLayer kv;
};

struct AttentionArgs {
    const char* qkv;
    char* out;
    const int32_t *query_starts, *context_lens, *block_tables;
    int64_t num_rows, max_blocks, num_tokens;
    int num_heads, dtype;
    float scale;
    bool capped;
    float soft_cap;
    bool windowed;
    int64_t window;
    KvLayer kv;
};

// A matrix as `LinearArgs` has it, but for the rows.
struct Matrix {
    int64_t columns, depth, panel_dtype;
    const void* panels;
    const void* const* coded;  // where LinearArgs' stands: it may come between two calls
    const float* bias;
};

struct NormWeight {
    const void* weight;  // null: no norm
    int64_t dtype;
};

// One layer of a decoder, as kernels/cpu/layers.py packs it: 8-byte fields alone.
struct LayerWeights {
    Matrix qkv, output, gate_up, down;
    NormWeight q_norm, k_norm, attention_out_norm, mlp_norm, mlp_out_norm, next_norm;
    const float *cos, *sin;
    int64_t half, window;  // a window of 0: none
    double scale, soft_cap, qk_eps;  // a soft cap of 0: none
};

// Layers [0, num_layers) of a decoder, over one batch.
struct LayersArgs {
    const LayerWeights* layers;
    int64_t num_layers, num_heads, is_gelu;
    float eps;
    int64_t num_tokens, hidden;
    void *x, *residual;  // [num_tokens, hidden], both changed: of x, its norm goes in and that of the sum comes out
    int dtype, residual_dtype;
    const int64_t* slots;
    const int32_t* positions;
    const int32_t *query_starts, *context_lens, *block_tables;
    int64_t num_rows, max_blocks;
    int64_t kv_layer_bytes;
    KvLayer kv;  // of the first layer
};

constexpr int kMaxAlternatives = 256;

struct LogprobArgs {
    int64_t count;
    const int32_t* rows;  // row of the logits of entry i; null: i
    const int64_t* token_ids;
    int num_top;
    float* token_logprobs;
    int32_t* top_ids;
    float* top_logprobs;
};

struct SampleArgs {
    const char* logits;
    int64_t rows, row_stride;
    int dtype;
    int32_t vocab;
    const float* temperatures;
    const int32_t* top_ks;
    const float *top_ps, *min_ps;
    const int64_t *seeds, *positions;
    const float *repetition, *frequency, *presence;
    const int32_t *history_starts, *history_ids, *history_prompt_lens;
    const int32_t *bias_starts, *bias_ids;
    const float* bias_values;
    const int32_t *forbidden_starts, *forbidden_ids;
    int64_t* token_ids;
    bool* finite;
};

struct Kernels {
    const char* name;
    void (*norm)(const NormArgs&, int threads);
    void (*silu_mul)(const GateArgs&, int threads);
    void (*gelu_mul)(const GateArgs&, int threads);
    void (*soft_cap)(const SoftCapArgs&, int threads);
    int (*narrowest)(const PackArgs&, int threads);
    void (*pack)(const PackArgs&, int threads);
    int64_t (*code_panels)(const CodeArgs&, int threads);
    void (*linear)(const LinearArgs&, int threads);
    void (*rope_write_kv)(const RopeArgs&, int threads);
    void (*attention)(const AttentionArgs&, int threads);
    void (*layers)(const LayersArgs&, int threads);
    void (*sample)(const SampleArgs&, int threads);
    void (*logprobs)(const SampleArgs&, const LogprobArgs&, int threads);
};

enum ScratchSlot {
    kRowScratch,
    kCountScratch,
    kSortScratch,
    kTaskScratch,
    kRunScratch,
    kAttentionScratch,
    kInputScratch,
    kPanelScratch,
    kLayerScratch,
    kStageScratch,
    kNumScratchSlots
};
// Memory of the calling thread, kept between calls; zeroed when it is first handed out or grown.
void* thread_scratch(ScratchSlot slot, size_t num_bytes);

// Lets the system run another thread on this one's core, for as long as it takes to look around.
void let_others_run();

}  // namespace octavo
