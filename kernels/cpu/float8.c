/* FP8 as integers, which the linear layers multiply; see quantized_linear.py.
 *
 *   FLOAT8  p  codes (e4m3 [N, K]), scales (float [N, G]), codes (uint8 [N, K]), their scales
 *              (float [N, K / 32])
 *           n  K, columns of a scale
 */
#include "codes.c"
#include "common.h"
#include "half.h"

#define FLOAT8_ROWS 16  /* a chunk of work */
#define FLOAT8_GROUP 32 /* columns of an integer's scale */

static int64_t float8_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return max_int(1, divide_up(step->counts[op->count], FLOAT8_ROWS));
}

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

/* A row of codes, with a scale for 16 columns, a multiple of it, or all. */
static void float8_row(const int8_t *from, const float *scale, int64_t K, int64_t columns,
                       uint8_t *codes, float *to) {
    vf x[VW * PER_GROUP];
    int64_t left = columns; /* until the next scale */
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

static void float8_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    int64_t K = op->n[0], columns = op->n[1], groups = divide_up(K, FLOAT8_GROUP);
    int64_t last = min_int(step->counts[op->count], (chunk + 1) * FLOAT8_ROWS);
    for (int64_t row = chunk * FLOAT8_ROWS; row < last; row++)
        float8_row((const int8_t *)op->p[0] + row * K,
                   (const float *)op->p[1] + row * divide_up(K, columns), K, columns,
                   (uint8_t *)op->p[2] + row * K, (float *)op->p[3] + row * groups);
}
