/* Blocks from one pool to another, or within one.
 *
 *   p  source pool, destination pool, pairs (int64 [C, 2])      n  bytes a block
 */
#include "common.h"

static int64_t copy_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return max_int(1, step->counts[op->count]);
}

static void copy_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    if (chunk >= step->counts[op->count]) return;
    const int64_t *pair = (const int64_t *)op->p[2] + 2 * chunk;
    memcpy((char *)op->p[1] + pair[1] * op->n[0], (const char *)op->p[0] + pair[0] * op->n[0],
           op->n[0]);
}
