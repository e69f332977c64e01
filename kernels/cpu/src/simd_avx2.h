// Sixteen lanes as two AVX2 registers.
#pragma once
struct F16 { __m256 a, b; };
struct I16 { __m256i a, b; };
struct M16 { __m256 a, b; };

INLINE F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE I16 iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, F16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
INLINE I16 iload(const void* p) {
    auto q = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
INLINE void istore(void* p, I16 x) {
    auto q = static_cast<__m256i*>(p);
    _mm256_storeu_si256(q, x.a);
    _mm256_storeu_si256(q + 1, x.b);
}
INLINE I16 iload_u16(const uint16_t* p) {
    auto q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
}
INLINE I16 iload_u8(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
INLINE I16 iload_s8(const uint8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
INLINE void istore_u16(uint16_t* p, I16 x) {
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.a, x.b), 0xD8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
INLINE F16 load_half(const uint16_t* p) {
    auto q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
INLINE void store_half(uint16_t* p, F16 x) {
    auto q = reinterpret_cast<__m128i*>(p);
    _mm_storeu_si128(q, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}

// Sixteen bf16 as panels store them, so that widening takes one instruction a register: column i and i + 8 share a word.
struct H16 { __m256i v; };
constexpr int bf16_place(int column) { return column % 8 * 2 + column / 8; }
INLINE H16 hload(const uint16_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
INLINE void hstore(uint16_t* p, H16 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.v); }
INLINE F16 widen_bf16(H16 x) {
    __m256i high = _mm256_and_si256(x.v, _mm256_set1_epi32(static_cast<int32_t>(0xFFFF0000)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(x.v, 16)), _mm256_castsi256_ps(high)};
}

// A depth of a coded panel (coded_panels.h); which of its low bytes, and of its codes, are column i's.
struct Table { __m256i v; };
constexpr int coded_place(int column) {
    return column % 8 / 4 * 16 + column / 16 * 8 + column % 4 * 2 + column % 16 / 8;
}
INLINE Table load_table(const uint8_t* p) {
    return {_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// The weights' low and high bytes, each at its coded_place.
INLINE void split_bf16(const uint16_t* p, uint8_t* low, uint8_t* high) {
    __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
    __m256i byte = _mm256_set1_epi16(255);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low),
                        _mm256_packus_epi16(_mm256_and_si256(first, byte), _mm256_and_si256(second, byte)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high),
                        _mm256_packus_epi16(_mm256_srli_epi16(first, 8), _mm256_srli_epi16(second, 8)));
}
INLINE void decode_bf16(const uint8_t* p, Table table, H16 weights[2]) {
    __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    __m256i pairs = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 32)));
    __m256i codes = _mm256_srlv_epi32(pairs, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    __m256i high = _mm256_shuffle_epi8(table.v, _mm256_and_si256(codes, _mm256_set1_epi8(15)));
    weights[0].v = _mm256_unpacklo_epi8(low, high), weights[1].v = _mm256_unpackhi_epi8(low, high);
}

INLINE F16 add(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F16 sub(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F16 mul(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F16 div(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }

INLINE I16 bits(F16 x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
INLINE F16 from_bits(I16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
INLINE I16 round_to_int(F16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE F16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE I16 iadd(I16 x, I16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE I16 imul(I16 x, I16 y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
INLINE I16 iand(I16 x, I16 y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
INLINE I16 ior(I16 x, I16 y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
INLINE I16 ixor(I16 x, I16 y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int N> INLINE I16 shl(I16 x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N> INLINE I16 shr(I16 x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }

INLINE M16 less(F16 x, F16 y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)}; }
INLINE M16 at_least(F16 x, F16 y) {
    return {_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)};
}
INLINE M16 iequal(I16 x, I16 y) {
    return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(x.a, y.a)), _mm256_castsi256_ps(_mm256_cmpeq_epi32(x.b, y.b))};
}
INLINE F16 select(M16 m, F16 yes, F16 no) {
    return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
}
INLINE I16 iselect(M16 m, I16 yes, I16 no) { return bits(select(m, from_bits(yes), from_bits(no))); }
INLINE uint32_t mask_bits(M16 m) {
    return static_cast<uint32_t>(_mm256_movemask_ps(m.a)) | static_cast<uint32_t>(_mm256_movemask_ps(m.b)) << 8;
}

// Lane i with lane i + 8, then + 4, + 2, + 1: the same tree in every variant.
INLINE float reduce_add(F16 x) {
    __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
INLINE float reduce_max(F16 x) {
    __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}
