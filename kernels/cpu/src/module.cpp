// The Python module: its methods read arguments, release the GIL and call the kernels of the chosen variant.
//
// Tensors come as addresses; the caller (backend.py) has checked shapes and types. Nothing here is linked against an
// OpenMP runtime: the kernels' GOMP_* symbols are those of the library that torch has loaded.
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "kernel_methods.h"
#include "memory_methods.h"

namespace octavo {
namespace {

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
