/* FP8 as integers, which the linear layers multiply: groups of 32, see quantized_linear.py. */
#pragma once
#include "codes.c"
#include "common.h"
#include "half.h"

#define FLOAT8_GROUP 32 /* columns of an integer's scale */
#define PER_GROUP (FLOAT8_GROUP / VW) /* vectors of a group */

/* Numbers as integers around 128, a group under the scale of its largest, which is rounded to
 * float16 where that rounds by little. At most VW groups at once, of `count` numbers; x has zeros
 * beyond. */
static void float8_groups(const vf *x, int64_t count, uint8_t *codes, float *scales) {
    float largest[VW] = {0}, inverses[VW];
    int8_t all[VW * FLOAT8_GROUP];
    int64_t groups = divide_up(count, FLOAT8_GROUP);
    for (int64_t g = 0; g < groups; g++) {
        vf most = {0};
        for (int i = 0; i < PER_GROUP; i++) most = max_of(magnitude(x[g * PER_GROUP + i]), most);
        largest[g] = largest_of(most);
    }
    vf wide = load_f32(largest) / 127.0f, narrow = of_half(half_of(wide));
    vf scale = choose(magnitude(narrow - wide) <= wide * 0x1p-11f, narrow, wide);
    store_f32(inverses, choose(scale > 0.0f, 1.0f / scale, (vf){0}));
    memcpy(scales, &scale, (size_t)groups * sizeof *scales);
    for (int64_t i = 0; i < groups * PER_GROUP; i++) {
        vf level = x[i] * splat(inverses[i / PER_GROUP]);
        level = min_of(splat(127.0f), max_of(splat(-127.0f), level));
        vi code = (vi)(level + 12582912.0f) - (vi)splat(12582912.0f) + 128;
        *(vb_any *)(all + i * VW) = __builtin_convertvector(code, vb);
    }
    memcpy(codes, all, (size_t)count);
}

/* `K` codes of a row, with a scale for 16 columns, a multiple of it, or all; `left` columns have the
 * first one. */
static void float8_row(const int8_t *from, const float *scale, int64_t K, int64_t columns,
                       int64_t left, uint8_t *codes, float *to) {
    vf x[VW * PER_GROUP];
    for (int64_t k = 0; k < K; k += VW * FLOAT8_GROUP, to += VW) {
        int64_t count = min_int(VW * FLOAT8_GROUP, K - k);
        memset(x, 0, sizeof x);
        for (int64_t i = 0; i < count; i += VW, left -= VW) {
            vb some = {0};
            if (left == 0) scale++, left = columns;
            if (count - i >= VW) some = *(const vb_any *)(from + k + i);
            else memcpy(&some, from + k + i, (size_t)(count - i));
            x[i / VW] = value_of(some, FP8) * *scale;
        }
        float8_groups(x, count, codes + k, to);
    }
}
