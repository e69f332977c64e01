// A decoder's layers in one call: the kernels of each, in the order and with the arguments of one call a kernel.
//
// Between kernels there is nothing then, neither Python nor a tensor made. How threads share the work follows the batch,
// and no bit follows from it, for a row's result depends on no other row:
//
//   few rows, or a long prompt among them: all threads walk through the stages of all layers together (team.h)
//   a batch of many decoding rows:         it is cut into parts, and a part's layer is a thread's work by itself
//
//        part 0   layer 0 > layer 1 > layer 2 > ...      a thread takes the part that is furthest behind of those that
//        part 1   layer 0 > layer 1 > ...                no thread has; one that the system keeps from running holds up
//        part 2   layer 0 > layer 1 > ...                its part alone
#pragma once
#include "attention.h"
#include "linear.h"

// Consecutive rows of a batch, and their tokens.
struct Part {
    int64_t first_row, num_rows, first_token, num_tokens;
};

// What lies between the kernels of a layer, a row a token; the same memory for all layers.
struct LayerBuffers {
    char *qkv, *attended, *gate_up, *gated;

    explicit LayerBuffers(const octavo::LayersArgs& a) {
        const int64_t intermediate = a.layers[0].down.depth;
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

// The tokens of one part in the layers' tensors: row `first_token` of any of them.
struct PartView {
    const octavo::LayersArgs& a;
    const LayerBuffers& buffers;
    const Part& part;

    INLINE_MEMBER char* tokens(void* tensor, int64_t width, int dtype) const {
        return static_cast<char*>(tensor) + part.first_token * width * dtype_size(dtype);
    }
    INLINE_MEMBER char* x() const { return tokens(a.x, a.hidden, a.dtype); }
    INLINE_MEMBER char* residual() const { return tokens(a.residual, a.hidden, a.residual_dtype); }

    INLINE_MEMBER void linear(const octavo::Matrix& matrix, void* from, void* to, Walk& walk) const {
        octavo::LinearArgs args = {tokens(from, matrix.depth, a.dtype),
                                   tokens(to, matrix.columns, a.dtype),
                                   part.num_tokens,
                                   matrix.columns,
                                   matrix.depth,
                                   a.dtype,
                                   static_cast<int>(matrix.panel_dtype),
                                   matrix.panels,
                                   *matrix.coded,
                                   matrix.bias};
        ::linear(args, walk);
    }

    // x becomes its norm or, with a residual, that of the sum. Without a weight nothing happens.
    INLINE_MEMBER void norm(const octavo::NormWeight& norm_weight, void* with_residual, Walk& walk) const {
        if (!norm_weight.weight) return;
        octavo::NormArgs args = {x(),  with_residual, norm_weight.weight, x(), part.num_tokens, a.hidden, a.eps,
                                 a.dtype, a.residual_dtype, static_cast<int>(norm_weight.dtype)};
        ::norm(args, walk);
    }

    INLINE_MEMBER void attention(const octavo::LayerWeights& layer, const octavo::KvLayer& kv, Walk& walk) const {
        const int num_heads = static_cast<int>(a.num_heads);
        const int64_t qkv_width = (a.num_heads + 2 * kv.num_kv_heads) * kv.head_dim;
        octavo::RopeArgs rope = {tokens(buffers.qkv, qkv_width, a.dtype), part.num_tokens, num_heads, a.dtype,
                                 a.slots + part.first_token, a.positions + part.first_token, layer.cos, layer.sin,
                                 static_cast<int>(layer.half), layer.q_norm.weight, layer.k_norm.weight,
                                 static_cast<float>(layer.qk_eps), static_cast<int>(layer.q_norm.dtype), kv};
        rope_write_kv(rope, walk);
        // Query starts count from the batch's first token, so the tensors are the batch's.
        octavo::AttentionArgs args = {buffers.qkv, buffers.attended, a.query_starts + part.first_row,
                                      a.context_lens + part.first_row, a.block_tables + part.first_row * a.max_blocks,
                                      part.num_rows, a.max_blocks, a.num_tokens, num_heads, a.dtype,
                                      static_cast<float>(layer.scale), layer.soft_cap != 0,
                                      static_cast<float>(layer.soft_cap), layer.window != 0, layer.window, kv};
        ::attention(args, walk);
    }
};

// One layer over one part.
static void run_layer(const PartView& view, int64_t index, Walk& walk) {
    const octavo::LayersArgs& a = view.a;
    const LayerBuffers& buffers = view.buffers;
    const octavo::LayerWeights& layer = a.layers[index];
    octavo::KvLayer kv = a.kv;
    kv.data += index * a.kv_layer_bytes;
    view.linear(layer.qkv, a.x, buffers.qkv, walk);
    view.attention(layer, kv, walk);
    view.linear(layer.output, buffers.attended, a.x, walk);
    view.norm(layer.attention_out_norm, nullptr, walk);
    view.norm(layer.mlp_norm, view.residual(), walk);
    view.linear(layer.gate_up, a.x, buffers.gate_up, walk);
    const int64_t intermediate = layer.down.depth;
    const octavo::GateArgs gate = {view.tokens(buffers.gate_up, 2 * intermediate, a.dtype),
                                   view.tokens(buffers.gated, intermediate, a.dtype), view.part.num_tokens,
                                   intermediate, a.dtype};
    if (a.is_gelu)
        gelu_mul(gate, walk);
    else
        silu_mul(gate, walk);
    view.linear(layer.down, buffers.gated, a.x, walk);
    view.norm(layer.mlp_out_norm, nullptr, walk);
    view.norm(layer.next_norm, view.residual(), walk);
}

// Parts of a batch, each with the layer that is next. A part is held by one thread at a time.
struct Parts {
    static constexpr int kMost = 256;
    struct alignas(64) Progress {
        Part part;
        int64_t next_layer;
        bool is_held;
    };
    Progress each[kMost];
    int count = 0;

    // The batch as a whole where parts would leave threads idle or read weights for too few rows.
    Parts(const octavo::LayersArgs& a, int threads) {
        // One more than threads, so that there is something to do while a thread holds a part and does not run.
        const int most = threads < kMost ? threads + 1 : kMost;
        const int64_t by_rows = a.num_tokens / kMinPartTokens;
        const int64_t wanted = by_rows < most ? by_rows : most;
        if (threads > 1 && wanted >= threads && a.num_tokens <= kMaxTokensInParts) cut(a, wanted);
        int64_t longest = 0;
        for (int i = 0; i < count; i++) longest = each[i].part.num_tokens > longest ? each[i].part.num_tokens : longest;
        if (count < threads || longest * wanted > a.num_tokens * kMaxUnevenness) {
            each[0] = {{0, a.num_rows, 0, a.num_tokens}, 0, false};
            count = 1;
        }
    }

    // Holds the part that is furthest behind of those that nobody holds; null if there is none.
    Progress* take(int64_t num_layers) {
        for (;;) {
            Progress* found = nullptr;
            int64_t found_layer = num_layers;
            for (int i = 0; i < count; i++) {
                const int64_t layer = __atomic_load_n(&each[i].next_layer, __ATOMIC_RELAXED);
                if (layer < found_layer && !__atomic_load_n(&each[i].is_held, __ATOMIC_RELAXED))
                    found = &each[i], found_layer = layer;
            }
            if (!found) return nullptr;
            if (__atomic_test_and_set(&found->is_held, __ATOMIC_ACQUIRE)) continue;
            if (__atomic_load_n(&found->next_layer, __ATOMIC_RELAXED) < num_layers) return found;
            __atomic_clear(&found->is_held, __ATOMIC_RELEASE);
        }
    }

private:
    // Fewer rows a part would read the weights too often for what is computed with them.
    static constexpr int64_t kMinPartTokens = 4;
    // With more tokens stages are so long that a thread which does not run costs little at their ends.
    static constexpr int64_t kMaxTokensInParts = 256;
    // How much longer than the mean the longest part may be.
    static constexpr double kMaxUnevenness = 1.3;

    void cut(const octavo::LayersArgs& a, int64_t wanted) {
        int64_t row = 0;
        for (int64_t i = 1; i <= wanted && row < a.num_rows; i++) {
            const int64_t first = row, end = a.num_tokens * i / wanted;
            while (row < a.num_rows && a.query_starts[row] < end) row++;
            const int64_t token = a.query_starts[first];
            if (row > first) each[count++] = {{first, row - first, token, a.query_starts[row] - token}, 0, false};
        }
    }
};

// Takes parts a layer further until none is left to take: the last ones are then in other threads' hands.
static void run_parts(const octavo::LayersArgs& a, const LayerBuffers& buffers, Parts& parts) {
    Walk alone = {1, nullptr, nullptr};
    while (Parts::Progress* progress = parts.take(a.num_layers)) {
        const int64_t layer = progress->next_layer;
        run_layer({a, buffers, progress->part}, layer, alone);
        __atomic_store_n(&progress->next_layer, layer + 1, __ATOMIC_RELAXED);
        __atomic_clear(&progress->is_held, __ATOMIC_RELEASE);
    }
}

static void run_stages(const octavo::LayersArgs& a, const LayerBuffers& buffers, const Part& part, Walk& walk) {
    for (int64_t i = 0; i < a.num_layers; i++) run_layer({a, buffers, part}, i, walk);
}
