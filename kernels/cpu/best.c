/* The best of each row of x [S, V], the first of equals; NaN where the row has a NaN.
 *
 *   p  x, values (float [S]), ids (int64 [S])      n  V, stride of x
 */
#include "common.h"

static int64_t best_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return max_int(1, step->counts[op->count]);
}

INLINE void best_row(const Op *op, int64_t row, int dtype) {
    const char *x = at(op->p[0], row * op->n[1], dtype);
    int64_t V = op->n[0], i = 0, best = -1;
    vf top = splat(-INFINITY), sum = {0};
    for (; i + VW <= V; i += VW) {
        vf v = load(x, i, dtype);
        top = max_of(v, top); /* never takes a NaN */
        sum += v * 0.0f;      /* NaN where v is NaN or infinite */
    }
    float value = -INFINITY, doubt = 0;
    for (int j = 0; j < VW; j++) {
        if (top[j] > value) value = top[j];
        doubt += sum[j];
    }
    for (; i < V; i++) {
        float v = load_one(x, i, dtype);
        if (v > value) value = v;
        doubt += v * 0.0f;
    }
    for (i = 0; i < V && best < 0; i++) {
        vi equal = i + VW <= V ? load(x, i, dtype) == value : (vi){0};
        int64_t any = 0;
        if (i + VW <= V)
            for (int j = 0; j < VW; j++) any |= equal[j];
        if (i + VW <= V && !any) {
            i += VW - 1;
            continue;
        }
        if (load_one(x, i, dtype) == value) best = i;
    }
    if (doubt != 0) /* only a NaN, not -inf (a banned token), makes the value NaN */
        for (i = 0; i < V; i++)
            if (load_one(x, i, dtype) != load_one(x, i, dtype)) value = NAN;
    ((float *)op->p[1])[row] = value;
    ((int64_t *)op->p[2])[row] = max_int(best, 0);
}

static void best_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    if (chunk >= step->counts[op->count]) return;
    if (op->dtype == F32) best_row(op, chunk, F32);
    else best_row(op, chunk, BF16);
}
