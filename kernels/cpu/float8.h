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

/* The largest of FLOAT8_GROUP codes without their signs. */
INLINE int float8_largest(const uint8_t *from) {
    int largest = 0;
#if defined(__AVX2__)
    __m256i all = _mm256_and_si256(_mm256_loadu_si256((const void *)from), _mm256_set1_epi8(127));
    __m128i part = _mm_max_epu8(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    part = _mm_max_epu8(part, _mm_srli_epi16(part, 8));
    part = _mm_sub_epi16(_mm_set1_epi16(255), _mm_and_si128(part, _mm_set1_epi16(255)));
    largest = 255 - _mm_extract_epi16(_mm_minpos_epu16(part), 0);
#else
    for (int i = 0; i < FLOAT8_GROUP; i++)
        largest = (from[i] & 127) > largest ? from[i] & 127 : largest;
#endif
    return largest;
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

/* `K` codes of a row, with a scale for 16 columns, a multiple of it, or all; `left` columns have the
 * first one. Integers' scales are rounded to float16 where that rounds by little. */
static void float8_row(const uint8_t *from, const float *scale, int64_t K, int64_t columns,
                       int64_t left, uint8_t *codes, float *to) {
    const int64_t group = float8_group(columns);
    float scales[VW] = {0};
    int8_t largest[VW] = {0};
    int g = 0;
    for (int64_t k = 0; k < K; k += group, left -= group) {
        uint8_t some[FLOAT8_GROUP] = {0}, found[FLOAT8_GROUP];
        const int64_t count = min_int(group, K - k);
        const int is_whole = count == FLOAT8_GROUP;
        if (left <= 0) scale++, left = columns;
        if (!is_whole) memcpy(some, from + k, (size_t)count);
        const uint8_t *here = is_whole ? from + k : some;
        const int most = float8_largest(here);
        float8_integers(here, float8_levels[most], is_whole ? codes + k : found);
        if (!is_whole) memcpy(codes + k, found, (size_t)count);
        largest[g] = (int8_t)most;
        scales[g++] = *scale;
        if (g < VW && k + group < K) continue;
        vf wide = value_of(load_bytes(largest), FP8) * load_f32(scales) / 127.0f;
        vf narrow = of_half(half_of(wide));
        vf chosen = choose(magnitude(narrow - wide) <= wide * 0x1p-11f, narrow, wide);
        memcpy(to, &chosen, (size_t)g * sizeof *to);
        to += g, g = 0;
    }
}
