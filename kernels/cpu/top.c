/* The k largest of each row of x [S, V], the largest first, of equals the first ones first.
 *
 * The best so far are a heap in the outputs, the worst of them on top. Few values are compared with
 * it: the k-th largest among the maxima of groups is at most the k-th largest of all.
 *
 *   p  x, values (float [S, k]), ids (int64 [S, k])      n  V, stride of x, k: at most V
 */
#include "common.h"

#define MOST_GROUPS 1024

INLINE int is_worse(float a, int64_t i, float b, int64_t j) { return a < b || (a == b && i > j); }

/* Restore the heap of n below its entry `at`. */
static void sink(float *values, int64_t *ids, int64_t n, int64_t at) {
    float value = values[at];
    int64_t id = ids[at];
    for (int64_t child; (child = 2 * at + 1) < n; at = child) {
        int64_t other = child + 1;
        if (other < n && is_worse(values[other], ids[other], values[child], ids[child])) child++;
        if (!is_worse(values[child], ids[child], value, id)) break;
        values[at] = values[child], ids[at] = ids[child];
    }
    values[at] = value, ids[at] = id;
}

INLINE void offer(float value, int64_t id, float *values, int64_t *ids, int64_t k) {
    if (!is_worse(values[0], ids[0], value, id)) return; /* nor is a NaN taken */
    values[0] = value, ids[0] = id;
    sink(values, ids, k, 0);
}

static void clear(float *values, int64_t *ids, int64_t k) {
    for (int64_t i = 0; i < k; i++) values[i] = -INFINITY, ids[i] = INT64_MAX;
}

/* At least k values of the row are as large as this. */
INLINE float bound_of(const char *x, int64_t V, int64_t k, float *values, int64_t *ids, int dtype) {
    float most[MOST_GROUPS];
    int64_t groups = divide_up(4 * k, VW) * VW;
    if (groups > MOST_GROUPS || 2 * groups > V) return -INFINITY;
    for (int64_t i = 0; i < groups; i++) most[i] = -INFINITY;
    for (int64_t from = 0; from + groups <= V; from += groups)
        for (int64_t i = 0; i < groups; i += VW)
            store_f32(most + i, max_of(load(x, from + i, dtype), load_f32(most + i)));
    clear(values, ids, k);
    for (int64_t i = 0; i < groups; i++) offer(most[i], i, values, ids, k);
    return values[0];
}

INLINE void top_row(const Op *op, int64_t row, int dtype) {
    const char *x = at(op->p[0], row * op->n[1], dtype);
    int64_t V = op->n[0], k = op->n[2];
    float *values = (float *)op->p[1] + row * k;
    int64_t *ids = (int64_t *)op->p[2] + row * k;
    float bound = bound_of(x, V, k, values, ids, dtype);
    clear(values, ids, k);
    for (int64_t i = 0; i < V; i += VW) {
        if (i + VW <= V) {
            vi is_near = load(x, i, dtype) >= bound;
            int32_t any = 0;
            for (int j = 0; j < VW; j++) any |= is_near[j];
            if (!any) continue;
        }
        for (int64_t j = i; j < min_int(V, i + VW); j++) {
            float value = load_one(x, j, dtype);
            if (value >= bound) offer(value, j, values, ids, k);
        }
        if (values[0] > bound) bound = values[0];
    }
    for (int64_t n = k - 1; n > 0; n--) { /* the worst goes to the end */
        float value = values[n];
        int64_t id = ids[n];
        values[n] = values[0], ids[n] = ids[0];
        values[0] = value, ids[0] = id;
        sink(values, ids, n, 0);
    }
    for (int64_t n = 0; n < k; n++)
        if (ids[n] == INT64_MAX) ids[n] = 0; /* the row has a NaN */
}

static int64_t top_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return max_int(1, step->counts[op->count]);
}

static void top_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    if (chunk >= step->counts[op->count]) return;
    if (op->dtype == F32) top_row(op, chunk, F32);
    else top_row(op, chunk, BF16);
}
