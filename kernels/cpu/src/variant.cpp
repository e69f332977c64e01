// The kernels for one instruction set, chosen by compiler flags; VARIANT names it. Everything but the table has
// internal linkage, so that code of one variant cannot stand in for another's.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "abi.h"

namespace {
#include "sampling.h"
#include "layers.h"
}  // namespace

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

namespace octavo {
extern const Kernels JOIN(kernels_, VARIANT);
const Kernels JOIN(kernels_, VARIANT) = {
    TEXT(VARIANT), ::norm,   ::silu_mul,      ::gelu_mul,  ::soft_cap, ::narrowest, ::pack,
    ::linear,      ::rope_write_kv, ::attention, ::layers, ::sample,   ::logprobs};
}  // namespace octavo
