// The kernels for one instruction set, chosen by compiler flags; VARIANT names it. Everything but the table has
// internal linkage, so that code of one variant cannot stand in for another's.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "abi.h"

namespace {
#include "sampling.h"
#include "layers.h"
#include "calls.h"
}  // namespace

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

namespace octavo {
extern const Kernels JOIN(kernels_, VARIANT);
const Kernels JOIN(kernels_, VARIANT) = {
    TEXT(VARIANT), calls::norm,   calls::silu_mul,      calls::gelu_mul,  calls::soft_cap, ::narrowest,    calls::pack,
    ::code_panels,    calls::linear, calls::rope_write_kv, calls::attention, calls::layers,   calls::sample,   calls::logprobs};
}  // namespace octavo
