/* A pool's K and V in eight bits, INT8 or FP8 (e4m3), as kernels/quantized.py defines them; used by
 * rope.c, which stores codes, and by attention.c, which reads them.
 *
 * The D codes of a token's head lie where its elements would; the float scales of a head's B tokens
 * lie in further rows of D bytes below the last. Every code is exact in bfloat16 and in float, so
 * codes are widened as they are, and scales multiply scores and weights: one factor a key.
 */
#pragma once
#include "common.h"

enum { PLAIN, INT8, FP8 }; /* an op's flags: the pool's elements are the op's floats, or codes */

#define HEAD_MAX 1024 /* the largest D */

INLINE int64_t pool_size(int kind, int dtype) { return kind ? 1 : size_of(dtype); }

/* Rows of D elements that a head of a block has: its tokens', then those of the scales. */
INLINE int64_t head_rows(int kind, int64_t B, int64_t D) {
    return kind ? B + divide_up(4 * B, D) : B;
}

/* x / scale, rounded to the nearest and ties to even -> codes. */
INLINE vi code_of(vf x, int kind) {
    if (kind == INT8) return (vi)(x + 12582912.0f) - (vi)splat(12582912.0f); /* 1.5 * 2**23 */
    vi bits = (vi)x & 0x7fffffff;
    vi normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3); /* 3 bits of mantissa */
    vi small = (vi)((vf)bits + 24576.0f) - (vi)splat(24576.0f); /* to 2**-9, the subnormals' step */
    vi code = (vi)choose((vf)bits < 0.015625f, (vf)small, (vf)normal);
    vi is_nan = x != x;
    return (code & ~is_nan) | (is_nan & 0x7f) | ((vi)((vu)x >> 24) & 0x80);
}

/* One head x [D] -> codes [D] and their scale. Every operation is exact or rounded once. */
INLINE void store_codes(int8_t *codes, float *scale, const void *x, int64_t D, int kind,
                        int dtype) {
    float scaled[HEAD_MAX + VW], top = 0;
    vf tops = {0};
    vi nans = {0};
    int64_t i = 0;
    for (; i + VW <= D; i += VW) {
        vf v = load(x, i, dtype);
        tops = max_of((vf)((vi)v & 0x7fffffff), tops); /* never takes a NaN */
        nans |= v != v;
    }
    top = largest_of(tops);
    for (int j = 0; j < VW; j++) top = nans[j] ? NAN : top;
    for (; i < D; i++) {
        float v = load_one(x, i, dtype);
        top = fabsf(v) > top || v != v ? fabsf(v) : top;
    }
    *scale = top * (1.0f / (kind == INT8 ? 127.0f : 448.0f));
    float inverse = *scale < MIN_SCALE ? 0.0f : 1.0f / *scale;
    for (i = 0; i + VW <= D; i += VW) store_f32(scaled + i, load(x, i, dtype) * inverse);
    for (; i < D; i++) scaled[i] = load_one(x, i, dtype) * inverse;
    for (int j = 0; j < VW; j++) scaled[D + j] = 0;
    __asm__ volatile("" : : "r"(scaled) : "memory"); /* else the product is fused with a sum */
    for (i = 0; i + VW <= D; i += VW)
        store_bytes(codes + i, code_of(load_f32(scaled + i), kind));
    if (i < D) {
        vi rest = code_of(load_f32(scaled + i), kind);
        for (int j = 0; i + j < D; j++) codes[i + j] = (int8_t)rest[j];
    }
}

/* The values of codes, which were widened with their signs. */
INLINE vf value_of(vi wide, int kind) {
    if (kind == INT8) return __builtin_convertvector(wide, vf);
    vi bits = (vi)((vu)wide << 20) & (int32_t)0x87f00000;
    return (vf)bits * 0x1p120f; /* the exponent's bias: 127 instead of 7; subnormals, too */
}

#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
/* The two bytes of the bfloat16 of every code without its sign. */
static _Alignas(64) uint8_t halves[2][2][128];

__attribute__((constructor)) static void fill_halves(void) {
    for (int kind = INT8; kind <= FP8; kind++)
        for (int code = 0; code < 128; code++) {
            bf16 value = to_bf16(value_of((vi){0} + code, kind)[0]);
            halves[kind - 1][0][code] = (uint8_t)value;
            halves[kind - 1][1][code] = (uint8_t)(value >> 8);
        }
}

/* The low and the high bytes of the bfloat16 of 64 codes. */
INLINE void look_up(__m512i codes, __m512i *low, __m512i *high, int kind) {
    const uint8_t(*table)[128] = halves[kind - 1];
    __m512i index = kind == INT8 ? _mm512_abs_epi8(codes) : codes;
    *low = _mm512_permutex2var_epi8(_mm512_load_si512(table[0]), index,
                                    _mm512_load_si512(table[0] + 64));
    *high = _mm512_permutex2var_epi8(_mm512_load_si512(table[1]), index,
                                     _mm512_load_si512(table[1] + 64));
    *high = _mm512_ternarylogic_epi64(*high, codes, _mm512_set1_epi8((char)0x80), 0xf8); /* sign */
}

/* 64 codes -> 64 bfloat16, in 8 instructions, where converting 16 at a time takes 24. */
INLINE void widen_64(__m512i codes, __m512i out[2], int kind) {
    const __m512i spread = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); /* unpacking undoes it */
    __m512i low, high;
    look_up(_mm512_permutexvar_epi64(spread, codes), &low, &high, kind);
    out[0] = _mm512_unpacklo_epi8(low, high);
    out[1] = _mm512_unpackhi_epi8(low, high);
}

/* 64 codes -> the 32 bfloat16 of the even ones, and those of the odd ones; without shuffles. */
INLINE void widen_apart(__m512i codes, __m512i out[2], int kind) {
    const __m512i even = _mm512_set1_epi16(0xff), odd = _mm512_set1_epi16((short)0xff00);
    __m512i low, high;
    look_up(codes, &low, &high, kind);
    out[0] = _mm512_ternarylogic_epi64(_mm512_slli_epi16(high, 8), low, even, 0xf8);
    out[1] = _mm512_ternarylogic_epi64(_mm512_srli_epi16(low, 8), high, odd, 0xf8);
}
#define HAS_LOOKUP 1
#else
#define HAS_LOOKUP 0
#endif

/* The values of D codes -> out, in dtype; what follows them up to the next multiple of VW, or of 64,
 * is written too: zeros' values. */
INLINE void widen(void *out, const char *codes, int64_t D, int kind, int dtype) {
    int64_t i = 0;
#if HAS_LOOKUP
    if (dtype == BF16) {
        for (; i < D; i += 64) {
            __m512i both[2], some;
            if (i + 64 <= D) some = _mm512_loadu_si512(codes + i);
            else some = _mm512_maskz_loadu_epi8(~0ull >> (64 - (D - i)), codes + i);
            widen_64(some, both, kind);
            _mm512_storeu_si512((bf16 *)out + i, both[0]);
            if (i + 32 < D) _mm512_storeu_si512((bf16 *)out + i + 32, both[1]);
        }
        return;
    }
#endif
    for (; i < D; i += VW) {
        vb some = {0};
        if (i + VW > D) memcpy(&some, codes + i, (size_t)(D - i));
        vf x = value_of(load_bytes(i + VW > D ? (const char *)&some : codes + i), kind);
        if (dtype == F32) store_f32((float *)out + i, x);
        else store_halves((bf16 *)out + i, (vu)x >> 16);
    }
}
