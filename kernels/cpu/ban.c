/* What a grammar excludes of rows of x becomes -inf, in place, with the best of what is left.
 *
 *   p  x [S, V], rows (int64 [F]) of x, words (uint32 [F, W]: bit t % 32 of word t / 32 is token
 *      t), values (float [F]), ids (int64 [F]): the first of equals
 *   n  V, stride of x, W
 */
#include "common.h"

static int64_t ban_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return max_int(1, step->counts[op->count]);
}

INLINE void ban_row(const Op *op, int64_t row, int dtype) {
    char *x = at(op->p[0], ((const int64_t *)op->p[1])[row] * op->n[1], dtype);
    const uint32_t *words = (const uint32_t *)op->p[2] + row * op->n[2];
    int64_t V = op->n[0], best = 0;
    float top = -INFINITY, left[32];
    for (int64_t from = 0; from < V; from += 32) {
        uint32_t word = words[from / 32];
        int64_t count = min_int(32, V - from);
        if (!word) {
            for (int64_t i = 0; i < count; i++) store_one(x, from + i, -INFINITY, dtype);
            continue;
        }
        for (int64_t i = 0; i < count; i++) {
            left[i] = word >> i & 1 ? load_one(x, from + i, dtype) : -INFINITY;
            store_one(x, from + i, left[i], dtype);
        }
        float largest = -INFINITY;
        for (int64_t i = 0; i < count; i++) largest = left[i] > largest ? left[i] : largest;
        if (!(largest > top)) continue;
        top = largest;
        for (best = from; left[best - from] != top;) best++;
    }
    ((float *)op->p[3])[row] = top;
    ((int64_t *)op->p[4])[row] = best;
}

static void ban_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    if (chunk >= step->counts[op->count]) return;
    if (op->dtype == F32) ban_row(op, chunk, F32);
    else ban_row(op, chunk, BF16);
}
