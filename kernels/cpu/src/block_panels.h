// Panels of fp32 weights that were dequantized: blocks of 32 depths of a column, each weight step * code + least.
//
// A GGUF file keeps most weights so. What was widened can be told from the weights themselves: the least of a block is
// `least`, the greatest lies 15 steps above it (or, with codes of eight bits and no `least`, 127 steps from zero), and
// step and least are fp16. A matrix is kept so only if every weight of it comes back to the bit.
#pragma once
#include "panels.h"

constexpr int64_t kBlockDepths = 32;

// One block of one column.
struct Block {
    uint16_t step, least;
    int32_t codes[kBlockDepths];
};

INLINE float rounded_half(float x, uint16_t* half) {
    uint16_t halves[kLanes];
    store_half(halves, set1(x));
    *half = halves[0];
    float values[kLanes];
    store(values, load_half(halves));
    return values[0];
}

// False where the 32 weights are not such a block.
template <int BITS>
static bool find_block(const float* weights, Block& to) {
    constexpr int kLeastCode = BITS == 4 ? 0 : -127, kMostCode = BITS == 4 ? 15 : 127;
    const F16 x[2] = {load(weights), load(weights + kLanes)};
    const float greatest = reduce_max(max(x[0], x[1]));
    const float smallest = -reduce_max(max(sub(zero(), x[0]), sub(zero(), x[1])));
    const float least = rounded_half(BITS == 4 ? smallest : 0, &to.least);
    const float reach = BITS == 4 ? greatest - least : greatest > -smallest ? greatest : -smallest;
    const float step = rounded_half(reach / kMostCode, &to.step);
    const F16 inverse = set1(step > 0 ? 1 / step : 0);
    I16 differing = iset1(0);
    for (int i = 0; i < 2; i++) {
        I16 codes = round_to_int(mul(sub(x[i], set1(least)), inverse));
        differing = ior(differing, ixor(bits(x[i]), bits(fma(set1(step), to_float(codes), set1(least)))));
        istore(to.codes + i * kLanes, codes);
    }
    if (mask_bits(iequal(differing, iset1(0))) != 0xFFFF) return false;
    for (int32_t code : to.codes)
        if (code < kLeastCode || code > kMostCode) return false;
    return true;
}

// The steps of its 32 columns, their leasts, then the columns' codes depth by depth: of four bits, those of columns 0
// to 15 in the low halves of bytes.
template <int BITS>
struct BlockPanel {
    static constexpr int64_t kHeadBytes = 2 * kPanelColumns * sizeof(uint16_t);
    static constexpr int64_t kStepBytes = kPanelColumns * BITS / 8;
    static constexpr int64_t kBlockBytes = kHeadBytes + kBlockDepths * kStepBytes;
    static constexpr int64_t bytes(int64_t depth) { return depth / kBlockDepths * kBlockBytes; }

    static void put(const Block& block, int column, char* to) {
        auto head = reinterpret_cast<uint16_t*>(to);
        head[column] = block.step, head[kPanelColumns + column] = block.least;
        auto codes = reinterpret_cast<uint8_t*>(to + kHeadBytes);
        for (int64_t k = 0; k < kBlockDepths; k++)
            if (BITS == 4)
                codes[k * kStepBytes + column % kLanes] |= block.codes[k] << column / kLanes * 4;
            else
                codes[k * kStepBytes + column] = static_cast<uint8_t>(block.codes[k]);
    }

    // What a block's codes stand for.
    struct Head {
        F16 steps[kHalves], leasts[kHalves];

        explicit INLINE_MEMBER Head(const char* from) {
            auto head = reinterpret_cast<const uint16_t*>(from);
#pragma GCC unroll 2
            for (int half = 0; half < kHalves; half++) {
                steps[half] = load_half(head + half * kLanes);
                leasts[half] = BITS == 4 ? load_half(head + kPanelColumns + half * kLanes) : zero();
            }
        }

        // The weights of one depth.
        INLINE_MEMBER void decode(const char* from, F16 weights[kHalves]) const {
            auto codes = reinterpret_cast<const uint8_t*>(from);
            I16 first, second;
            if (BITS == 4) {
                I16 both = iload_u8(codes);
                first = iand(both, iset1(15)), second = shr<4>(both);
            } else {
                first = iload_s8(codes), second = iload_s8(codes + kLanes);
            }
            weights[0] = fma(steps[0], to_float(first), leasts[0]);
            weights[1] = fma(steps[1], to_float(second), leasts[1]);
        }
    };

    // The weights of a block, [kBlockDepths][kPanelColumns].
    INLINE_STATIC void widen(const char* from, float* to) {
        const Head head(from);
        from += kHeadBytes;
        for (int64_t k = 0; k < kBlockDepths; k++, from += kStepBytes, to += kPanelColumns) {
            F16 weights[kHalves];
            head.decode(from, weights);
            store(to, weights[0]);
            store(to + kLanes, weights[1]);
        }
    }
};

template <int BITS>
static void pack_panel(Kind<BlockPanel<BITS>>, const octavo::PackArgs& a, int64_t panel, char* to) {
    using Panel = BlockPanel<BITS>;
    __builtin_memset(to, 0, Panel::bytes(a.depth));
    for (int c = 0; c < kPanelColumns; c++) {
        const int64_t column = panel * kPanelColumns + c;
        if (column >= a.columns) break;
        auto weights = static_cast<const float*>(a.weight) + column * a.depth;
        for (int64_t k = 0; k < a.depth; k += kBlockDepths) {
            Block block;
            find_block<BITS>(weights + k, block);
            Panel::put(block, c, to + k / kBlockDepths * Panel::kBlockBytes);
        }
    }
}

// Calls visit with the kind of panels that a type of them is.
template <class Visit>
INLINE void with_kind(int panel_dtype, const Visit& visit) {
    if (panel_dtype == octavo::kBf16) visit(Kind<Bf16Panel>());
    if (panel_dtype == octavo::kF16) visit(Kind<F16Panel>());
    if (panel_dtype == octavo::kF32) visit(Kind<F32Panel>());
    if (panel_dtype == octavo::kBlocks4) visit(Kind<BlockPanel<4>>());
    if (panel_dtype == octavo::kBlocks8) visit(Kind<BlockPanel<8>>());
}

// Whether every block of an fp32 matrix is one.
template <int BITS>
static bool is_in_blocks(const octavo::PackArgs& a, int threads) {
    if (a.depth % kBlockDepths) return false;
    return every_row(a, threads, [&](const float* row) {
        Block block;
        for (int64_t k = 0; k < a.depth; k += kBlockDepths)
            if (!find_block<BITS>(row + k, block)) return false;
        return true;
    });
}
