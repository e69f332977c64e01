// How methods of the Python module read their arguments, find the kernels of a variant and let go of the GIL.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>

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

// As run_released for a call that gives a whole number.
template <class Call>
PyObject* count_released(Args& args, const Call& call) {
    int64_t found = 0;
    PyObject* none = run_released(args, [&] { found = call(); });
    if (!none) return nullptr;
    Py_DECREF(none);
    return PyLong_FromLongLong(found);
}

}  // namespace
}  // namespace octavo
