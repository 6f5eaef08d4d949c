/* FP8 as integers, which the linear layers multiply: groups of 32, or of 16 where a scale is for so
 * many, see quantized_linear.py. In a group the scale is one number, so an integer depends on two codes
 * alone, its own and the largest: it is looked up. */
#pragma once
#include "codes.c"
#include "common.h"
#include "half.h"

#define FLOAT8_GROUP 32 /* columns of an integer's scale, at most */

/* 127 times a code over the largest of its group, both without their signs, to the nearest. */
static _Alignas(64) uint8_t float8_levels[128][128];

__attribute__((constructor)) static void fill_float8_levels(void) {
    float values[128];
    for (int code = 0; code < 128; code++) values[code] = value_of((vi){0} + code, FP8)[0];
    for (int largest = 1; largest < 128; largest++)
        for (int code = 0; code <= largest; code++)
            float8_levels[largest][code] = (uint8_t)lrint(127.0 * values[code] / values[largest]);
}

INLINE int64_t float8_group(int64_t columns) { return columns == 16 ? 16 : FLOAT8_GROUP; }

#if VW == 16 && defined(__AVX512BW__)
#define SIMD(name) _mm512_##name
typedef __m512i Bytes;
#elif VW == 8
#define SIMD(name) _mm256_##name
typedef __m256i Bytes;
#endif

#ifdef SIMD
/* Of VW groups, two or one in each of 8 vectors: of every two vectors words are compared side by side,
 * then pairs of them, then of all the bytes in a word, at last a group's halves. */
INLINE void float8_largest_of_all(const uint8_t *from, uint8_t *to) {
    Bytes v[8], all;
    for (int i = 0; i < 8; i++)
        v[i] = (Bytes)(load_i32(from + i * (int)sizeof *v) & 0x7f7f7f7f);
    for (int i = 0; i < 4; i++)
        v[i] = SIMD(max_epu8)(SIMD(unpacklo_epi32)(v[2 * i], v[2 * i + 1]),
                              SIMD(unpackhi_epi32)(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 2; i++) {
        v[i] = SIMD(max_epu8)(SIMD(unpacklo_epi64)(v[2 * i], v[2 * i + 1]),
                              SIMD(unpackhi_epi64)(v[2 * i], v[2 * i + 1]));
        v[i] = SIMD(max_epu8)(v[i], (Bytes)((vu)v[i] >> 16));
        v[i] = (Bytes)((vu)SIMD(max_epu8)(v[i], (Bytes)((vu)v[i] >> 8)) & 255);
    }
    all = SIMD(packus_epi32)(v[0], v[1]);
#if VW == 16
    all = _mm512_max_epu8(all, _mm512_shuffle_i32x4(all, all, 0xb1));
    __m128i even = _mm512_castsi512_si128(all), odd = _mm512_extracti32x4_epi32(all, 2);
    _mm_storeu_si128((void *)to, _mm_or_si128(even, _mm_slli_epi16(odd, 8)));
#else
    __m128i words = _mm_max_epu8(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    _mm_storel_epi64((void *)to, _mm_packus_epi16(words, words));
#endif
}
#endif

/* The largest of FLOAT8_GROUP codes without their signs, of each of `count` groups, at most VW. */
INLINE void float8_largest(const uint8_t *from, int count, uint8_t *largest) {
#ifdef SIMD
    if (count == VW) {
        float8_largest_of_all(from, largest);
        return;
    }
#endif
    for (int g = 0; g < count; g++, from += FLOAT8_GROUP) {
        largest[g] = 0;
        for (int i = 0; i < FLOAT8_GROUP; i++)
            largest[g] = (from[i] & 127) > largest[g] ? from[i] & 127 : largest[g];
    }
}

/* FLOAT8_GROUP codes as integers around 128. */
INLINE void float8_integers(const uint8_t *from, const uint8_t *levels, uint8_t *to) {
#if VW == 16 && defined(__AVX512VBMI__) && defined(__AVX512BW__)
    __m256i codes = _mm256_loadu_si256((const void *)from); /* a look up uses 7 bits */
    __m256i found = _mm512_castsi512_si256(
        _mm512_permutex2var_epi8(_mm512_load_si512(levels), _mm512_castsi256_si512(codes),
                                 _mm512_load_si512(levels + 64)));
    found = _mm256_mask_sub_epi8(found, _mm256_movepi8_mask(codes), _mm256_setzero_si256(), found);
    _mm256_storeu_si256((void *)to, _mm256_xor_si256(found, _mm256_set1_epi8((char)128)));
#elif defined(__AVX2__)
    /* 16 levels at a time: a code of others gets its top bit, for which a look up finds 0. */
    __m256i codes = _mm256_loadu_si256((const void *)from), found = _mm256_setzero_si256();
    __m256i unsigned_codes = _mm256_and_si256(codes, _mm256_set1_epi8(127));
    for (int i = 0; i < 128; i += 16) {
        __m256i some = _mm256_broadcastsi128_si256(_mm_load_si128((const void *)(levels + i)));
        __m256i at = _mm256_xor_si256(unsigned_codes, _mm256_set1_epi8((char)i));
        at = _mm256_adds_epu8(at, _mm256_set1_epi8(127 - 15));
        found = _mm256_or_si256(found, _mm256_shuffle_epi8(some, at));
    }
    found = _mm256_sign_epi8(found, codes);
    _mm256_storeu_si256((void *)to, _mm256_xor_si256(found, _mm256_set1_epi8((char)128)));
#else
    for (int i = 0; i < FLOAT8_GROUP; i++) {
        int level = levels[from[i] & 127];
        to[i] = (uint8_t)(from[i] & 128 ? 128 - level : 128 + level);
    }
#endif
}

/* Groups of fewer codes, or the last one, each followed by zeros to FLOAT8_GROUP. */
INLINE void float8_spread(uint8_t *to, const uint8_t *from, int64_t count, int64_t group) {
    for (int64_t k = 0; k < count; k += group, to += FLOAT8_GROUP) {
        memset(to, 0, FLOAT8_GROUP);
        memcpy(to, from + k, (size_t)min_int(group, count - k));
    }
}

/* `K` codes of a row, with a scale for 16 columns, a multiple of it, or all; `left` columns have the
 * first one. Integers' scales are rounded to float16 where that rounds by little; that of a group with
 * a code which is no number is none. */
static void float8_row(const uint8_t *from, const float *scale, int64_t K, int64_t columns,
                       int64_t left, uint8_t *codes, float *to) {
    const int64_t group = float8_group(columns);
    const int is_whole = group == FLOAT8_GROUP && K % FLOAT8_GROUP == 0;
    uint8_t some[VW * FLOAT8_GROUP], found[VW * FLOAT8_GROUP];
    for (int64_t k = 0; k < K; k += VW * group) {
        const int count = (int)min_int(VW, divide_up(K - k, group));
        const uint8_t *here = from + k;
        uint8_t *there = is_whole ? codes + k : found;
        uint8_t largest[VW] = {0};
        float scales[VW] = {0};
        if (!is_whole) here = some, float8_spread(some, from + k, min_int(K - k, VW * group), group);
        float8_largest(here, count, largest);
        for (int g = 0; g < count; g++, left -= group) {
            if (left <= 0) scale++, left = columns;
            scales[g] = *scale;
            float8_integers(here + g * FLOAT8_GROUP, float8_levels[largest[g]],
                            there + g * FLOAT8_GROUP);
            if (!is_whole)
                memcpy(codes + k + g * group, found + g * FLOAT8_GROUP,
                       (size_t)min_int(group, K - k - g * group));
        }
        vi most = load_bytes(largest);
        vf wide = value_of(most, FP8) * load_f32(scales) / 127.0f;
        wide = choose(most == 127, splat(NAN), wide);
        vf narrow = of_half(half_of(wide));
        vf chosen = choose(magnitude(narrow - wide) <= wide * 0x1p-11f, narrow, wide);
        memcpy(to + k / group, &chosen, (size_t)count * sizeof *to);
    }
}
