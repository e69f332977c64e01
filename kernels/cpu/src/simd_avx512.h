// Sixteen lanes as one AVX-512 register. Every function gives the bits that simd_avx2.h gives.
#pragma once
struct F16 { __m512 v; };
struct I16 { __m512i v; };
struct M16 { __mmask16 m; };

INLINE F16 set1(float x) { return {_mm512_set1_ps(x)}; }
INLINE I16 iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE void store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
INLINE I16 iload(const void* p) { return {_mm512_loadu_si512(p)}; }
INLINE void istore(void* p, I16 x) { _mm512_storeu_si512(p, x.v); }
INLINE I16 iload_u16(const uint16_t* p) {
    return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
INLINE I16 iload_u8(const uint8_t* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
INLINE I16 iload_s8(const uint8_t* p) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
INLINE void istore_u16(uint16_t* p, I16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x.v));
}
INLINE F16 load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
INLINE void store_half(uint16_t* p, F16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}

struct H16 { __m256i v; };
constexpr int bf16_place(int column) { return column; }
INLINE H16 hload(const uint16_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
INLINE void hstore(uint16_t* p, H16 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.v); }
INLINE F16 widen_bf16(H16 x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x.v), 16))}; }

struct Table { __m256i v; };
constexpr int coded_place(int column) { return column; }
INLINE Table load_table(const uint8_t* p) {
    return {_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
INLINE void split_bf16(const uint16_t* p, uint8_t* low, uint8_t* high) {
    __m512i words = _mm512_loadu_si512(p);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm512_cvtepi16_epi8(words));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), _mm512_cvtepi16_epi8(_mm512_srli_epi16(words, 8)));
}
INLINE void decode_bf16(const uint8_t* p, Table table, H16 weights[2]) {
    __m256i pairs = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 32)));
    __m256i codes = _mm256_srlv_epi32(pairs, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    __m256i high = _mm256_shuffle_epi8(table.v, _mm256_and_si256(codes, _mm256_set1_epi8(15)));
    __m512i low = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    __m512i words = _mm512_or_si512(low, _mm512_slli_epi16(_mm512_cvtepu8_epi16(high), 8));
    weights[0].v = _mm512_castsi512_si256(words), weights[1].v = _mm512_extracti64x4_epi64(words, 1);
}

INLINE F16 add(F16 x, F16 y) { return {_mm512_add_ps(x.v, y.v)}; }
INLINE F16 sub(F16 x, F16 y) { return {_mm512_sub_ps(x.v, y.v)}; }
INLINE F16 mul(F16 x, F16 y) { return {_mm512_mul_ps(x.v, y.v)}; }
INLINE F16 div(F16 x, F16 y) { return {_mm512_div_ps(x.v, y.v)}; }
INLINE F16 fma(F16 x, F16 y, F16 z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
INLINE F16 max(F16 x, F16 y) { return {_mm512_max_ps(x.v, y.v)}; }
INLINE F16 min(F16 x, F16 y) { return {_mm512_min_ps(x.v, y.v)}; }

INLINE I16 bits(F16 x) { return {_mm512_castps_si512(x.v)}; }
INLINE F16 from_bits(I16 x) { return {_mm512_castsi512_ps(x.v)}; }
INLINE I16 round_to_int(F16 x) { return {_mm512_cvtps_epi32(x.v)}; }
INLINE F16 to_float(I16 x) { return {_mm512_cvtepi32_ps(x.v)}; }
INLINE I16 iadd(I16 x, I16 y) { return {_mm512_add_epi32(x.v, y.v)}; }
INLINE I16 imul(I16 x, I16 y) { return {_mm512_mullo_epi32(x.v, y.v)}; }
INLINE I16 iand(I16 x, I16 y) { return {_mm512_and_si512(x.v, y.v)}; }
INLINE I16 ior(I16 x, I16 y) { return {_mm512_or_si512(x.v, y.v)}; }
INLINE I16 ixor(I16 x, I16 y) { return {_mm512_xor_si512(x.v, y.v)}; }
template <int N> INLINE I16 shl(I16 x) { return {_mm512_slli_epi32(x.v, N)}; }
template <int N> INLINE I16 shr(I16 x) { return {_mm512_srli_epi32(x.v, N)}; }

INLINE M16 less(F16 x, F16 y) { return {_mm512_cmp_ps_mask(x.v, y.v, _CMP_LT_OQ)}; }
INLINE M16 at_least(F16 x, F16 y) { return {_mm512_cmp_ps_mask(x.v, y.v, _CMP_GE_OQ)}; }
INLINE M16 iequal(I16 x, I16 y) { return {_mm512_cmpeq_epi32_mask(x.v, y.v)}; }
INLINE F16 select(M16 m, F16 yes, F16 no) { return {_mm512_mask_blend_ps(m.m, no.v, yes.v)}; }
INLINE I16 iselect(M16 m, I16 yes, I16 no) { return {_mm512_mask_blend_epi32(m.m, no.v, yes.v)}; }
INLINE uint32_t mask_bits(M16 m) { return m.m; }

INLINE float reduce_add(F16 x) {
    __m256 s = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
INLINE float reduce_max(F16 x) {
    __m256 s = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}
#if defined(__AVX512BF16__)
// sum += odd products + even products of pairs of bf16, each lane on its own.
INLINE F16 dot_bf16(I16 x, I16 y, F16 sum) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)x.v, (__m512bh)y.v)};
}
#endif
