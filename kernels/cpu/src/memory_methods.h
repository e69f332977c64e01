// Methods of the Python module that plan and move memory, alike for every instruction set.
#pragma once
#if defined(__unix__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "arguments.h"

namespace octavo {
namespace {

enum Fault : int { kNoTokens, kTooManyTokens, kTableTooShort, kBlockOutside, kWrongPosition };

// Fills slots and returns the highest of them; a fault returns (fault, row, token, value) for the caller to word.
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
    int64_t highest = 0;
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
            if (slots[token] > highest) highest = slots[token];
        }
    }
    return PyLong_FromLongLong(highest);
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

}  // namespace
}  // namespace octavo
