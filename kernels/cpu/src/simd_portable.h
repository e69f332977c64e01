// Sixteen lanes in the compiler's own vectors, for any processor. Without a fused multiply-add fma() rounds twice, so
// this variant's bits are its own.
#pragma once

typedef float NativeF16 __attribute__((vector_size(64)));
typedef int32_t NativeI16 __attribute__((vector_size(64)));
typedef uint32_t NativeU16 __attribute__((vector_size(64)));
typedef uint16_t NativeH16 __attribute__((vector_size(32)));
struct F16 { NativeF16 v; };
struct I16 { NativeI16 v; };
struct M16 { NativeI16 v; };

INLINE F16 set1(float x) { return {NativeF16{} + x}; }
INLINE I16 iset1(int32_t x) { return {NativeI16{} + x}; }
INLINE F16 load(const float* p) { F16 x; __builtin_memcpy(&x, p, 64); return x; }
INLINE void store(float* p, F16 x) { __builtin_memcpy(p, &x, 64); }
INLINE I16 iload(const void* p) { I16 x; __builtin_memcpy(&x, p, 64); return x; }
INLINE void istore(void* p, I16 x) { __builtin_memcpy(p, &x, 64); }
INLINE I16 iload_u16(const uint16_t* p) {
    NativeH16 h;
    __builtin_memcpy(&h, p, 32);
    return {__builtin_convertvector(h, NativeI16)};
}
INLINE I16 iload_u8(const uint8_t* p) {
    I16 x;
    for (int i = 0; i < 16; i++) x.v[i] = p[i];
    return x;
}
INLINE I16 iload_s8(const uint8_t* p) {
    I16 x;
    for (int i = 0; i < 16; i++) x.v[i] = static_cast<int8_t>(p[i]);
    return x;
}
INLINE void istore_u16(uint16_t* p, I16 x) {
    NativeH16 h = __builtin_convertvector(x.v, NativeH16);
    __builtin_memcpy(p, &h, 32);
}

struct H16 { NativeH16 v; };
constexpr int bf16_place(int column) { return column; }
INLINE H16 hload(const uint16_t* p) { H16 x; __builtin_memcpy(&x, p, 32); return x; }
INLINE void hstore(uint16_t* p, H16 x) { __builtin_memcpy(p, &x, 32); }
INLINE F16 widen_bf16(H16 x) {
    return {(NativeF16)((NativeU16)__builtin_convertvector(x.v, NativeI16) << 16)};
}

struct Table { const uint8_t* bytes; };
constexpr int coded_place(int column) { return column; }
INLINE Table load_table(const uint8_t* p) { return {p}; }
INLINE void split_bf16(const uint16_t* p, uint8_t* low, uint8_t* high) {
    for (int i = 0; i < 32; i++) low[i] = static_cast<uint8_t>(p[i]), high[i] = p[i] >> 8;
}
INLINE void decode_bf16(const uint8_t* p, Table table, H16 weights[2]) {
    uint16_t values[32];
    for (int i = 0; i < 32; i++) values[i] = p[i] | table.bytes[p[32 + i % 16] >> i / 16 * 4 & 15] << 8;
    __builtin_memcpy(weights, values, sizeof values);
}

INLINE F16 add(F16 x, F16 y) { return {x.v + y.v}; }
INLINE F16 sub(F16 x, F16 y) { return {x.v - y.v}; }
INLINE F16 mul(F16 x, F16 y) { return {x.v * y.v}; }
INLINE F16 div(F16 x, F16 y) { return {x.v / y.v}; }
INLINE F16 fma(F16 x, F16 y, F16 z) { return {x.v * y.v + z.v}; }
INLINE F16 max(F16 x, F16 y) { return {x.v > y.v ? x.v : y.v}; }
INLINE F16 min(F16 x, F16 y) { return {x.v < y.v ? x.v : y.v}; }

INLINE I16 bits(F16 x) { return {(NativeI16)x.v}; }
INLINE F16 from_bits(I16 x) { return {(NativeF16)x.v}; }
// Adding 1.5 * 2^23 leaves the nearest integer in the low bits, for |x| < 2^22.
INLINE I16 round_to_int(F16 x) { return {(NativeI16)(x.v + 12582912.0f) - 0x4B400000}; }
INLINE F16 to_float(I16 x) { return {__builtin_convertvector(x.v, NativeF16)}; }
INLINE I16 iadd(I16 x, I16 y) { return {(NativeI16)((NativeU16)x.v + (NativeU16)y.v)}; }
INLINE I16 imul(I16 x, I16 y) { return {(NativeI16)((NativeU16)x.v * (NativeU16)y.v)}; }
INLINE I16 iand(I16 x, I16 y) { return {x.v & y.v}; }
INLINE I16 ior(I16 x, I16 y) { return {x.v | y.v}; }
INLINE I16 ixor(I16 x, I16 y) { return {x.v ^ y.v}; }
template <int N> INLINE I16 shl(I16 x) { return {(NativeI16)((NativeU16)x.v << N)}; }
template <int N> INLINE I16 shr(I16 x) { return {(NativeI16)((NativeU16)x.v >> N)}; }

INLINE M16 less(F16 x, F16 y) { return {x.v < y.v}; }
INLINE M16 at_least(F16 x, F16 y) { return {x.v >= y.v}; }
INLINE M16 iequal(I16 x, I16 y) { return {x.v == y.v}; }
INLINE F16 select(M16 m, F16 yes, F16 no) { return {m.v ? yes.v : no.v}; }
INLINE I16 iselect(M16 m, I16 yes, I16 no) { return {m.v ? yes.v : no.v}; }
INLINE uint32_t mask_bits(M16 m) {
    uint32_t out = 0;
    for (int i = 0; i < 16; i++) out |= static_cast<uint32_t>(m.v[i] & 1) << i;
    return out;
}
INLINE float reduce_add(F16 x) {
    float lanes[16];
    store(lanes, x);
    for (int n = 8; n > 0; n /= 2)
        for (int i = 0; i < n; i++) lanes[i] += lanes[i + n];
    return lanes[0];
}
INLINE float reduce_max(F16 x) {
    float lanes[16];
    store(lanes, x);
    for (int n = 8; n > 0; n /= 2)
        for (int i = 0; i < n; i++) lanes[i] = lanes[i] > lanes[i + n] ? lanes[i] : lanes[i + n];
    return lanes[0];
}

// fp16 through integers: exact when widening, round to nearest even when narrowing.
INLINE F16 load_half(const uint16_t* p) {
    I16 h = iload_u16(p);
    I16 sign = shl<16>(iand(h, iset1(0x8000)));
    I16 magnitude = iand(h, iset1(0x7FFF));
    F16 normal = from_bits(shl<13>(magnitude));
    // Multiplying by 2^112 moves the exponent's bias from 15 to 127 and normalises subnormals.
    I16 scaled = bits(mul(normal, set1(0x1p112f)));
    I16 special = ior(shl<13>(magnitude), iset1(0x7F800000));
    M16 finite = less(to_float(magnitude), set1(31744.0f));
    return from_bits(ior(sign, iselect(finite, scaled, special)));
}
INLINE void store_half(uint16_t* p, F16 x) {
    I16 sign = shr<16>(iand(bits(x), iset1(INT32_MIN)));
    F16 magnitude = from_bits(iand(bits(x), iset1(0x7FFFFFFF)));
    // Normal results: round the 13 dropped bits to even in integers, rebias by 112.
    I16 raw = bits(magnitude);
    I16 odd = iand(shr<13>(raw), iset1(1));
    I16 normal = shr<13>(iadd(iadd(raw, iset1(0xFFF - (112 << 23))), odd));
    // Below 2^-14: adding 0.5 lets the float adder round at the subnormal's last place.
    I16 small = iadd(bits(add(magnitude, set1(0.5f))), iset1(-0x3F000000));
    I16 out = iselect(less(magnitude, set1(0x1p-14f)), small, normal);
    out = iselect(less(magnitude, set1(65520.0f)), out, iset1(0x7C00));
    M16 is_number = at_least(magnitude, set1(0.0f));
    istore_u16(p, ior(sign, iselect(is_number, out, iset1(0x7E00))));
}
