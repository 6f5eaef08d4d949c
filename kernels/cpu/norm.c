/* out [R, H] = x / sqrt(mean(x**2) + eps) * weight, of all rows of x or of the given ones.
 *
 *   p  x, weight, out, rows or 0 (int64 [R])      n  H, stride of x      f  eps
 */
#include "common.h"

#define NORM_ROWS 4 /* rows a chunk */

/* One row; `weight` 0 for none. The sum always runs over VW lanes in one order. */
INLINE void norm_row(const void *x, const void *weight, void *out, int64_t H, float eps,
                     int dtype) {
    vf squares = {0};
    int64_t i = 0;
    for (; i + VW <= H; i += VW) {
        vf v = load(x, i, dtype);
        squares += v * v;
    }
    float total = sum_of(squares);
    for (; i < H; i++) {
        float v = load_one(x, i, dtype);
        total += v * v;
    }
    float factor = 1.0f / sqrtf(total / (float)H + eps);
    for (i = 0; i + VW <= H; i += VW)
        store(out, i, load(x, i, dtype) * factor * load(weight, i, dtype), dtype);
    for (; i < H; i++)
        store_one(out, i, load_one(x, i, dtype) * factor * load_one(weight, i, dtype), dtype);
}

static int64_t norm_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return max_int(1, divide_up(step->counts[op->count], NORM_ROWS));
}

static void norm_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    const int64_t *rows = op->p[3];
    int64_t last = min_int(step->counts[op->count], (chunk + 1) * NORM_ROWS);
    for (int64_t r = chunk * NORM_ROWS; r < last; r++) {
        const void *x = at(op->p[0], (rows ? rows[r] : r) * op->n[1], op->dtype);
        void *out = at(op->p[2], r * op->n[0], op->dtype);
        if (op->dtype == F32) norm_row(x, op->p[1], out, op->n[0], op->f[0], F32);
        else norm_row(x, op->p[1], out, op->n[0], op->f[0], BF16);
    }
}
