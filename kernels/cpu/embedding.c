/* out [T, H] = table[tokens].
 *
 *   p  tokens (int64 [T]), table, out      n  H
 */
#include "common.h"

static int64_t embedding_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return most(1, step->counts[op->count]);
}

static void embedding_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    if (chunk >= step->counts[op->count]) return;
    const int64_t *tokens = op->p[0];
    int64_t bytes = op->n[0] * size_of(op->dtype);
    memcpy((char *)op->p[2] + chunk * bytes, (const char *)op->p[1] + tokens[chunk] * bytes, bytes);
}
