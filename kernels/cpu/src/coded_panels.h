// Panels of bf16 in twelve bits a weight instead of sixteen, without loss.
//
// The weights of a matrix lie within few powers of two, so their high bytes (the sign and most of the exponent) are
// mostly the same few. A panel begins with a table of its sixteen most frequent ones; a depth then takes the low bytes of
// its 32 columns and 32 codes of four bits into the table. Depths that need a byte outside the table are few: what their
// codes give means nothing, and the true bf16 lie behind all panels, after the list of those depths.
#pragma once
#include "panels.h"

struct CodedPanel {
    uint8_t table[16];
    // Where the list of depths kept apart begins, counted from the first panel, and how many they are.
    int64_t apart_offset, num_apart;
    char unused[32];

    static constexpr int64_t kStepBytes = kPanelColumns + kPanelColumns / 2;
    static constexpr int64_t kApartStepBytes = kPanelColumns * sizeof(uint16_t);

    static constexpr int64_t bytes(int64_t depth) { return whole_lines(sizeof(CodedPanel) + depth * kStepBytes); }
    // Of the list, which ends with the panel's depth; its steps follow it.
    static constexpr int64_t list_bytes(int64_t num_apart) { return whole_lines((num_apart + 1) * sizeof(int32_t)); }
    INLINE_MEMBER const uint8_t* steps() const { return reinterpret_cast<const uint8_t*>(this + 1); }

    // A panel's depths kept apart, ascending, and their weights as Bf16Panel has them.
    struct Apart {
        const int32_t* depths;
        const uint16_t* steps;
    };
    INLINE_MEMBER Apart apart(const void* panels) const {
        const char* list = static_cast<const char*>(panels) + apart_offset;
        return {reinterpret_cast<const int32_t*>(list),
                reinterpret_cast<const uint16_t*>(list + list_bytes(num_apart))};
    }
};
static_assert(sizeof(CodedPanel) == 64, "steps begin at a cache line");

// The sixteen high bytes that are most frequent, of a hundred depths or two: more would change little.
static void find_frequent(const uint16_t* weights, int64_t depth, uint8_t table[16]) {
    int32_t seen[256] = {};
    for (int64_t k = 0; k < depth; k += depth / 128 + 1)
        for (int c = 0; c < kPanelColumns; c++) seen[weights[k * kPanelColumns + c] >> 8]++;
    for (int code = 0; code < 16; code++) {
        int32_t most = -1;
        for (int byte = 0; byte < 256; byte++)
            if (seen[byte] > most) most = seen[byte], table[code] = static_cast<uint8_t>(byte);
        seen[table[code]] = -1;
    }
}

// A byte for each column, in the compiler's own vectors.
typedef uint8_t Bytes __attribute__((vector_size(kPanelColumns)));

// Codes one depth's weights; false where one has no code.
INLINE bool code_step(const uint16_t* weights, const uint8_t table[16], uint8_t* to) {
    Bytes high, found = {};  // a code and one; 0: none
    split_bf16(weights, to, reinterpret_cast<uint8_t*>(&high));
#pragma GCC unroll 16
    for (int code = 0; code < 16; code++) found |= (Bytes)(high == table[code]) & static_cast<uint8_t>(code + 1);
    const Bytes codes = (found - static_cast<uint8_t>(1)) & static_cast<uint8_t>(15);
    for (int i = 0; i < 16; i++) to[kPanelColumns + i] = codes[i] | codes[i + 16] << 4;
    const Bytes none = (Bytes)(found == static_cast<uint8_t>(0));
    uint64_t missing[kPanelColumns / 8];
    __builtin_memcpy(missing, &none, sizeof none);
    return !(missing[0] | missing[1] | missing[2] | missing[3]);
}

// Codes a panel. `end` is where the bytes in use end so far: what is kept apart goes there. False where it would pass
// the capacity.
static bool code_panel(const octavo::CodeArgs& a, int64_t panel, int64_t* end) {
    const uint16_t* weights = a.panels + panel * a.depth * kPanelColumns;
    auto depths = static_cast<int32_t*>(
        octavo::thread_scratch(octavo::kPanelScratch, (a.depth + 1) * sizeof(int32_t)));
    auto to = reinterpret_cast<CodedPanel*>(a.coded + panel * CodedPanel::bytes(a.depth));
    find_frequent(weights, a.depth, to->table);
    auto steps = reinterpret_cast<uint8_t*>(to + 1);
    int64_t apart = 0;
    for (int64_t k = 0; k < a.depth; k++)
        if (!code_step(weights + k * kPanelColumns, to->table, steps + k * CodedPanel::kStepBytes))
            depths[apart++] = static_cast<int32_t>(k);
    depths[apart] = static_cast<int32_t>(a.depth);
    const int64_t list_bytes = CodedPanel::list_bytes(apart), bytes = list_bytes + apart * CodedPanel::kApartStepBytes;
    to->num_apart = apart, to->apart_offset = __atomic_fetch_add(end, bytes, __ATOMIC_RELAXED);
    if (to->apart_offset + bytes > a.capacity) return false;
    char* list = a.coded + to->apart_offset;
    __builtin_memcpy(list, depths, (apart + 1) * sizeof(int32_t));
    for (int64_t i = 0; i < apart; i++)
        __builtin_memcpy(list + list_bytes + i * CodedPanel::kApartStepBytes, weights + depths[i] * kPanelColumns,
                         CodedPanel::kApartStepBytes);
    return true;
}

// Codes panels of bf16; returns the bytes used, or 0 where the capacity does not suffice.
static int64_t code_panels(const octavo::CodeArgs& a, int threads) {
    const int64_t panels = num_panels(a.columns);
    int64_t end = panels * CodedPanel::bytes(a.depth);
    int too_many = end > a.capacity;
    in_team(threads, 1, [&](Walk& walk) {
        parallel_for(walk, panels, [&](int64_t panel) {
            if (!__atomic_load_n(&too_many, __ATOMIC_RELAXED) && !code_panel(a, panel, &end))
                __atomic_store_n(&too_many, 1, __ATOMIC_RELAXED);
        });
    });
    return too_many ? 0 : end;
}
