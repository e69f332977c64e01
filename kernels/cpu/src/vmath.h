// 2^x, ln and tanh of sixteen lanes, from polynomials fitted here (Remez, relative error) so that their bits depend
// on no library. NaN in, NaN out.
#pragma once
#include "simd.h"

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

// 2^x, relative error about 1e-7; 0 below 2^-126, about 2^127.5 at most.
INLINE F16 exp2(F16 x) {
    // The operand order lets NaN through: max and min return their second operand then.
    F16 clamped = max(set1(-127.0f), min(set1(127.49f), x));
    I16 n = round_to_int(clamped);
    F16 f = sub(clamped, to_float(n));
    F16 y = set1(0.00015345812f);
    y = fma(y, f, set1(0.0013399931f));
    y = fma(y, f, set1(0.009618489f));
    y = fma(y, f, set1(0.055503288f));
    y = fma(y, f, set1(0.24022647f));
    y = fma(y, f, set1(0.6931472f));
    y = fma(y, f, set1(1.0f));
    F16 scaled = from_bits(iadd(bits(y), shl<23>(n)));
    return select(less(x, set1(-126.0f)), zero(), scaled);
}

// ln x for normal positive x: 2 atanh((m - 1) / (m + 1)) + e ln 2 with m in [sqrt(1/2), sqrt(2)).
INLINE F16 log(F16 x) {
    I16 raw = bits(x);
    F16 m = from_bits(ior(iand(raw, iset1(0x007FFFFF)), iset1(0x3F800000)));
    F16 e = to_float(iadd(shr<23>(raw), iset1(-127)));
    M16 big = at_least(m, set1(1.41421356f));
    m = select(big, mul(m, set1(0.5f)), m);
    e = select(big, add(e, set1(1.0f)), e);
    F16 s = div(sub(m, set1(1.0f)), add(m, set1(1.0f)));
    F16 z = mul(s, s);
    F16 p = set1(0.22222222f);
    p = fma(p, z, set1(0.28571429f));
    p = fma(p, z, set1(0.4f));
    p = fma(p, z, set1(0.66666667f));
    F16 tail = mul(mul(p, z), s);
    return fma(e, set1(0.693359375f), add(fma(e, set1(-2.12194440e-4f), tail), add(s, s)));
}

INLINE F16 tanh(F16 x) {
    F16 magnitude = from_bits(iand(bits(x), iset1(0x7FFFFFFF)));
    I16 sign = iand(bits(x), iset1(INT32_MIN));
    F16 e = exp2(mul(magnitude, set1(2.0f * kLog2E)));
    F16 large = sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
    F16 z = mul(x, x);
    F16 p = set1(-0.0061131868f);
    p = fma(p, z, set1(0.021010077f));
    p = fma(p, z, set1(-0.05385407f));
    p = fma(p, z, set1(0.13332795f));
    p = fma(p, z, set1(-0.33333329f));
    F16 small = fma(mul(p, z), magnitude, magnitude);
    return from_bits(ior(sign, bits(select(less(magnitude, set1(0.625f)), small, large))));
}

INLINE float exp2(float x) {
    float lanes[kLanes];
    store(lanes, exp2(set1(x)));
    return lanes[0];
}

INLINE float log(float x) {
    float lanes[kLanes];
    store(lanes, log(set1(x)));
    return lanes[0];
}
