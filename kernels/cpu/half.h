/* float16 as bits, for the scales of quantized matrices. */
#pragma once
#include "common.h"

/* float16's bits, to the nearest and ties to even; beyond its largest, infinity. */
INLINE vh half_of(vf x) {
#if VW == 16
    return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif VW == 8 && defined(__F16C__)
    return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    vi bits = (vi)x & 0x7fffffff;
    vi normal = ((bits + 0xfff + ((bits >> 13) & 1)) >> 13) - (112 << 10);
    vi small = (vi)((vf)bits + 0.5f) - (vi)splat(0.5f); /* to 2**-24, the subnormals' step */
    vi code = (vi)choose((vf)bits < 0x1p-14f, (vf)small, (vf)normal);
    vi is_large = bits >= 0x477ff000;
    code = (code & ~is_large) | (is_large & 0x7c00);
    return __builtin_convertvector(code | ((vi)((vu)x >> 16) & 0x8000), vh);
#endif
}

/* The number of such bits, subnormal numbers, infinities and NaN too. */
INLINE vf of_half(vh half) {
#if VW == 16
    return (vf)_mm512_cvtph_ps((__m256i)half);
#elif VW == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)half);
#else
    vi h = (vi)of_halves(half), is_large = (h & 0x7c00) == 0x7c00, bits = (h & 0x7fff) << 13;
    vf x = choose(is_large, (vf)(bits | 0x7f800000), (vf)bits * 0x1p112f);
    return (vf)((vi)x | (h & 0x8000) << 16);
#endif
}

INLINE vf magnitude(vf x) { return (vf)((vi)x & 0x7fffffff); }

INLINE int any_of(vi x) {
#if VW == 16
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0;
#elif VW == 8
    return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
    int32_t any = 0;
    for (int i = 0; i < VW; i++) any |= x[i];
    return any != 0;
#endif
}
