/* What both linear ops (linear.c, quantized_linear.c) have in common: how panels and rows are
 * divided into work, and what is done with the sums: bias, gates, the residual, rows of y.
 *
 *   p[2] bias or 0, p[3] y;  n[1] N, n[3] stride of y
 *   flags  STORE y, ADD_TO y, or GATE: panels hold TILE / 2 gates and then their ups, and
 *          y [R, N / 2] is act(gate) * up
 */
#pragma once
#include "common.h"

enum { STORE = 0, ADD_TO = 1, GATE_SILU = 2, GATE_GELU = 3, GATE_GELU_TANH = 4 };

#define MAX_PANELS 8   /* a chunk of work */
#define FETCHING (TILE / 4) /* passes that fetch: together they bring the next DEPTH */
/* Rows at once: they and their sums stay in the L2 cache between the panels of a chunk. 2,048
 * rows of the half model's matrices in 1.81 s, with 480 rows whatever K 1.97 (2 cores of an EPYC Zen
 * 5, 2026-11-22); 256 and 512 KiB, and DEPTH 256 and 384, within 1%. */
#define BLOCK_BYTES (384 << 10)
#define BLOCK_ROWS 480
#define BLOCK_ROWS_MIN 96

/* Separate functions, since inlined together they run out of registers; and without GCC's rewriting
 * of the row pointers, which costs 3%. Where a product and its sum are two instructions, GCC also
 * makes all products of a row before it adds them, in memory: without that, 4 bits are 15 to 20% faster
 * with AVX2 (GCC 12, EPYC Zen 3, 2026-11-27). 8 rows by two vectors reach 460 GFLOP/s on a core
 * of an EPYC Zen 5 (2 bfloat16 dot products a cycle); 12 rows do so with GCC, and Clang spills. */
#if VW == 16
#define IN_ORDER
#else
#define IN_ORDER , "no-tree-ter"
#endif
#if defined(__clang__)
#define KERNEL static __attribute__((noinline))
#else
#define KERNEL static __attribute__((noinline, optimize("no-ivopts" IN_ORDER)))
#endif

/* Few rows are read rather than computed: a chunk may be small, since a thread's next one follows it
 * in memory, and threads end nearly together. */
static int64_t panels_at_once(const Op *op, const Step *step, int threads) {
    int64_t chunks = (step->counts[op->count] > ROWS_MAX ? 6 : 16) * threads;
    return max_int(1, min_int(MAX_PANELS, divide_up(op->n[1], TILE) / chunks));
}

static int64_t linear_chunks(const Op *op, const Step *step, int threads) {
    return divide_up(divide_up(op->n[1], TILE), panels_at_once(op, step, threads));
}

static int64_t rows_at_once(int64_t row_bytes) {
    int64_t rows = max_int(BLOCK_ROWS_MIN, min_int(BLOCK_ROWS, BLOCK_BYTES / row_bytes));
    return rows / ROWS_MAX * ROWS_MAX;
}

INLINE vf silu(vf x) { return x / (1.0f + exp_of(-x)); }

INLINE vf tanh_of(vf x) { return 1.0f - 2.0f / (exp_of(2.0f * x) + 1.0f); }

INLINE vf gelu(vf x, int by_tanh) {
    if (by_tanh) return 0.5f * x * (1.0f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x)));
    vf y = x;
    for (int i = 0; i < VW; i++) y[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    return y;
}

INLINE void put(const Op *op, int64_t row, int64_t column, vf x, int dtype, int is_whole) {
    void *y = at(op->p[3], row * op->n[3] + column, dtype);
    int64_t outputs = op->flags >= GATE_SILU ? op->n[1] / 2 : op->n[1];
    if (is_whole) {
        if (op->flags == ADD_TO) x += load(y, 0, dtype);
        store(y, 0, x, dtype);
        return;
    }
    for (int i = 0; i < VW && column + i < outputs; i++)
        store_one(y, i, op->flags == ADD_TO ? x[i] + load_one(y, i, dtype) : x[i], dtype);
}

INLINE void finish(const Op *op, const float *sum, int64_t rows, int64_t row, int64_t panel,
                   int dtype) {
    const float *bias = op->p[2];
    for (int64_t r = 0; r < rows; r++) {
        vf a = load_f32(sum + r * TILE), b = load_f32(sum + r * TILE + VW);
        if (bias) a += load_f32(bias + panel * TILE), b += load_f32(bias + panel * TILE + VW);
        if (op->flags >= GATE_SILU) {
            vf act = op->flags == GATE_SILU ? silu(a) : gelu(a, op->flags == GATE_GELU_TANH);
            put(op, row + r, panel * VW, act * b, dtype, (panel + 1) * VW <= op->n[1] / 2);
        } else {
            put(op, row + r, panel * TILE, a, dtype, panel * TILE + VW <= op->n[1]);
            if (panel * TILE + VW < op->n[1])
                put(op, row + r, panel * TILE + VW, b, dtype, (panel + 1) * TILE <= op->n[1]);
        }
    }
}
