/* Sums of products of unsigned 8-bit weights with int8 activations, exact on every CPU.
 *
 * A vector of weights holds 4 consecutive codes of VW outputs, 32 bits an output; it is multiplied
 * by the same 4 activations for all of them. `split` and `spread` prepare both, `dot` adds to int32
 * sums, `start` is what a sum begins with. With `is_small` all weights are below 64.
 *
 *   AVX512-VNNI, AVX-VNNI  one instruction
 *   AVX2, SSSE3            pmaddubsw, which adds pairs of products of unsigned and signed bytes in 16
 *                          bits and saturates beyond 32,767. 255 * 127 twice exceeds that, so
 *                          weights are signed, as with NEON, and give their signs to the activations
 *   AVX512BW               has no instruction for that: products of 16 bits
 *   NEON dotprod           signed weights: 128 is subtracted, and added again by `start`
 *   others                 vectors of 32 bits
 *
 * Small weights need no signs, and where pmaddubsw serves, those below 16 are added up in 16 bits.
 */
#pragma once
#include "common.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if VW == 16 && defined(__AVX512VNNI__)
#define DOT_VNNI(s, w, a) (vi)_mm512_dpbusd_epi32((__m512i)(s), (__m512i)(w), (__m512i)(a))
#elif VW == 8 && defined(__AVXVNNI__)
#define DOT_VNNI(s, w, a) (vi)_mm256_dpbusd_avx_epi32((__m256i)(s), (__m256i)(w), (__m256i)(a))
#elif VW == 16 && defined(__AVX512BW__)
#define PAIRS(w, a) (vi)_mm512_madd_epi16((__m512i)(w), (__m512i)(a))
#define SMALL_PAIRS(w, a) (vi)_mm512_maddubs_epi16((__m512i)(w), (__m512i)(a))
#elif VW == 8 && defined(__AVX2__)
#define PAIRS(w, a) (vi)_mm256_madd_epi16((__m256i)(w), (__m256i)(a))
#define SMALL_PAIRS(w, a) (vi)_mm256_maddubs_epi16((__m256i)(w), (__m256i)(a))
#define SIZE(w) (vi)_mm256_abs_epi8((__m256i)(w))
#define SIGNED(a, w) (vi)_mm256_sign_epi8((__m256i)(a), (__m256i)(w))
#elif VW == 4 && defined(__SSSE3__)
#define PAIRS(w, a) (vi)_mm_madd_epi16((__m128i)(w), (__m128i)(a))
#define SMALL_PAIRS(w, a) (vi)_mm_maddubs_epi16((__m128i)(w), (__m128i)(a))
#define SIZE(w) (vi)_mm_abs_epi8((__m128i)(w))
#define SIGNED(a, w) (vi)_mm_sign_epi8((__m128i)(a), (__m128i)(w))
#elif VW == 4 && defined(__ARM_FEATURE_DOTPROD)
#define DOT_SIGNED(s, w, a) (vi)vdotq_s32((int32x4_t)(s), (int8x16_t)(w), (int8x16_t)(a))
#endif

typedef uint8_t bytes __attribute__((vector_size(VW * 4)));
typedef int16_t shorts __attribute__((vector_size(VW * 4)));

/* 4 codes of VW outputs, or 4 activations. Of products of 16 bits `even` and `odd` are the even and
 * the odd ones, of signed weights these without and with their signs. */
typedef struct {
    vi even, odd;
} Four;

INLINE Four split(vi codes, int is_small) {
    Four w = {codes, codes};
#if defined(SIGNED)
    if (!is_small) w.odd = codes ^ (int32_t)0x80808080, w.even = SIZE(w.odd);
#elif defined(PAIRS)
    if (!is_small) w = (Four){codes & 0x00ff00ff, (vi)((vu)codes >> 8) & 0x00ff00ff};
#elif defined(DOT_SIGNED)
    if (!is_small) w.even = codes ^ (int32_t)0x80808080;
#endif
    (void)is_small;
    return w;
}

INLINE Four spread(const char *four, int is_small) {
    vi codes = splat_i(*(const int_any *)four);
    Four a = {codes, codes};
#if defined(PAIRS) && !defined(SIGNED)
    vi high = (vi)((vu)codes & 0xff00ff00); /* the odd ones, times 256 */
    if (!is_small) a = (Four){(vi)((shorts)((vu)codes << 8) >> 8), (vi)((shorts)high >> 8)};
#endif
    (void)is_small;
    return a;
}

INLINE vi dot(vi sum, Four w, Four a, int is_small) {
#if defined(DOT_VNNI)
    (void)is_small;
    return DOT_VNNI(sum, w.even, a.even);
#elif defined(SIGNED)
    vi by = is_small ? a.even : SIGNED(a.even, w.odd);
    return sum + PAIRS(SMALL_PAIRS(w.even, by), splat_i(0x00010001));
#elif defined(PAIRS)
    if (is_small) return sum + PAIRS(SMALL_PAIRS(w.even, a.even), splat_i(0x00010001));
    return sum + PAIRS(w.even, a.even) + PAIRS(w.odd, a.odd);
#elif defined(DOT_SIGNED)
    (void)is_small;
    return DOT_SIGNED(sum, w.even, a.even);
#else
    (void)is_small;
    for (int i = 0; i < 32; i += 8) /* the sign of an activation is its byte's highest bit */
        sum += (vi)((vu)w.even >> i & 255) * ((vi)((vu)a.even << (24 - i)) >> 24);
    return sum;
#endif
}

/* Sums of products of weights below 16 in 16 bits, of PART of K at most, where those are faster. */
#define PART 32
#if defined(SMALL_PAIRS)
#define HAS_PARTS 1
INLINE vi dot_part(vi part, vi w, vi a) { return (vi)((shorts)part + (shorts)SMALL_PAIRS(w, a)); }
INLINE vi widen_part(vi part) { return PAIRS(part, splat_i(0x00010001)); }
#else
#define HAS_PARTS 0
INLINE vi dot_part(vi part, vi w, vi a) { return part + w + a; } /* none is made */
INLINE vi widen_part(vi part) { return part; }
#endif

/* What a sum begins with: `first`, with what makes signed weights unsigned again. */
INLINE vi start(int32_t first, int32_t activations, int is_small) {
#if defined(DOT_SIGNED) || defined(SIGNED)
    if (!is_small) first += 128 * activations;
#endif
    (void)is_small, (void)activations;
    return splat_i(first);
}

/* Each 16-byte piece of a vector holds the whole table. */
INLINE vi values_of(vi table, vi codes) {
#if VW == 16 && defined(__AVX512BW__)
    return (vi)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif VW == 8 && defined(__AVX2__)
    return (vi)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#elif VW == 4 && defined(__SSSE3__)
    return (vi)_mm_shuffle_epi8((__m128i)table, (__m128i)codes);
#elif VW == 4 && defined(__aarch64__)
    return (vi)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)codes);
#else
    bytes from = (bytes)table, at = (bytes)codes, to;
    for (int i = 0; i < VW * 4; i++) to[i] = from[at[i] & 15];
    return (vi)to;
#endif
}

/* VW numbers of 16 bits (IEEE's binary16, finite) or of 32, exactly. */
INLINE vf load_scales(const char *p, int is_wide) {
    if (is_wide) return load_f32((const float *)p);
#if VW == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif VW == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vu bits = load_halves(p);
    vf size = (vf)((bits & 0x7fff) << 13) * 0x1p112f; /* the exponent's bias is 127, not 15 */
    return (vf)((vu)size | (bits & 0x8000) << 16);
#endif
}

/* Sums begin at MAGIC, the bits of 1.5 * 2**23: below 2**22 a sum's own bits are then that number
 * plus the sum, and one subtraction makes it a float, exactly. */
#define MAGIC 0x4b400000

INLINE vf to_floats(vi x) { return (vf)x - splat(12582912.0f); }

/* To the nearest integer, ties to even; |x| is below 2**22. */
INLINE vi to_nearest(vf x) {
#if VW == 16
    return (vi)_mm512_cvtps_epi32((__m512)x);
#elif VW == 8
    return (vi)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
    return (vi)_mm_cvtps_epi32((__m128)x);
#elif defined(__aarch64__)
    return (vi)vcvtnq_s32_f32((float32x4_t)x);
#else
    vi n;
    for (int i = 0; i < VW; i++) n[i] = (int32_t)lrintf(x[i]);
    return n;
#endif
}
