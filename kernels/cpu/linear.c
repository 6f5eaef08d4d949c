/* y [R, N] = x [R, K] @ weight.T + bias, with the weight packed once into panels.
 *
 * A panel is TILE outputs, whole K: [panel][K][TILE], of bfloat16 [panel][K / 2][TILE][2], which the
 * dot product takes as it is and others widen by an instruction for VW numbers (one by one they are a
 * half slower with AVX2). Memory is read front to back once for any number of rows; at most ROWS_MAX
 * rows share a pass over a panel, and the passes fetch the next panel into the cache while they
 * compute; a single row is fast enough for the hardware's prefetcher alone (docs/kernels.md). Every
 * output is one chain of sums over K in order, so a row's result depends on that row alone.
 *
 *   p  x, weight, bias or 0, y      n  K, N, stride of x, stride of y
 *   flags  see panels.h
 */
#include "common.h"
#include "panels.h"

#define AHEAD 4096     /* bytes fetched ahead of a single pass of several rows */
#define DEPTH 512      /* of K at once where rows take several passes: stays in the L1 cache */

INLINE int64_t panel_bytes(int64_t K, int dtype) {
    return (dtype == BF16 ? (K + 1) / 2 * 2 : K) * TILE * size_of(dtype);
}

/* Two of K of VW outputs, or of a row of x for all of them. */
#if HAS_DOT
typedef __m512bh Pair;
#else
typedef vu Pair;
#endif
typedef Pair Pair_any __attribute__((may_alias));

/* sum += w * x, the first of K first. */
INLINE vf add_pair(vf sum, Pair w, Pair x) {
#if HAS_DOT
    return (vf)_mm512_dpbf16_ps((__m512)sum, w, x);
#else
    sum += (vf)(w << 16) * (vf)(x << 16);
    return sum + (vf)(w & 0xffff0000) * (vf)(x & 0xffff0000);
#endif
}

typedef void Kernel(float *sum, int is_first, const char *x, int64_t stride, const char *panel,
                    int64_t K, const char *next, int lines);

/* sum [rows][TILE] (+)= x [rows][K] @ panel; `lines` cache lines of what comes next are fetched
 * every 16 bytes of an output, past the L2 and L3 caches (docs/kernels.md). Inlined with constants for
 * rows and dtype. */
INLINE void multiply(float *sum, int is_first, const char *x, int64_t stride, const char *panel,
                     int64_t K, const char *next, int lines, int rows, int dtype) {
    vf s[ROWS_MAX][2];
    const char *from[ROWS_MAX];
    for (int r = 0; r < rows; r++) {
        from[r] = x + r * stride * size_of(dtype);
        for (int j = 0; j < 2; j++)
            s[r][j] = is_first ? (vf){0} : load_f32(sum + r * TILE + j * VW);
    }
    int64_t k = 0;
    const Pair_any *w = (const Pair_any *)panel;
    if (dtype == BF16) {
        for (; k + 8 <= K; k += 8) {
            for (int i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 0);
#pragma GCC unroll 4
            for (int u = 0; u < 16; u += 4, w += 2) {
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    Pair both = (Pair)splat_i(*(const int_any *)(from[r] + 2 * k + u));
                    for (int j = 0; j < 2; j++) s[r][j] = add_pair(s[r][j], w[j], both);
                }
            }
        }
        for (; k < K; k += 2, w += 2)
            for (int r = 0; r < rows; r++) {
                int32_t both = 0;
                memcpy(&both, from[r] + 2 * k, k + 2 <= K ? 4 : 2);
                for (int j = 0; j < 2; j++)
                    s[r][j] = add_pair(s[r][j], w[j], (Pair)splat_i(both));
            }
    }
    for (; k + 4 <= K; k += 4) {
        for (int i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 0);
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) {
            const float *at = (const float *)panel + (k + u) * TILE;
            vf w0 = load_f32(at), w1 = load_f32(at + VW);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                vf each = splat(((const float *)from[r])[k + u]);
                s[r][0] += w0 * each;
                s[r][1] += w1 * each;
            }
        }
    }
    for (; k < K; k++)
        for (int r = 0; r < rows; r++) {
            vf each = splat(((const float *)from[r])[k]);
            for (int j = 0; j < 2; j++)
                s[r][j] += load_f32((const float *)panel + k * TILE + j * VW) * each;
        }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2; j++) store_f32(sum + r * TILE + j * VW, s[r][j]);
}

#define ONE_KERNEL(NAME, ROWS, DTYPE)                                                     \
    KERNEL void NAME(float *sum, int is_first, const char *x, int64_t stride,             \
                     const char *panel, int64_t K, const char *next, int lines) {         \
        multiply(sum, is_first, x, stride, panel, K, next, lines, ROWS, DTYPE);           \
    }
#define KERNELS(ROWS)                           \
    ONE_KERNEL(multiply_f32_##ROWS, ROWS, F32)  \
    ONE_KERNEL(multiply_bf16_##ROWS, ROWS, BF16)
#define NAMES(DTYPE, ROWS) multiply_##DTYPE##_##ROWS

KERNELS(1) KERNELS(2) KERNELS(3) KERNELS(4)
#if ROWS_MAX >= 8
KERNELS(5) KERNELS(6) KERNELS(7) KERNELS(8)
#endif
#if ROWS_MAX >= 8
#define UP_TO_MAX(D) \
    {0, NAMES(D, 1), NAMES(D, 2), NAMES(D, 3), NAMES(D, 4), NAMES(D, 5), NAMES(D, 6), NAMES(D, 7), \
     NAMES(D, 8)}
#else
#define UP_TO_MAX(D) {0, NAMES(D, 1), NAMES(D, 2), NAMES(D, 3), NAMES(D, 4)}
#endif
static Kernel *const multiply_rows[2][ROWS_MAX + 1] = {UP_TO_MAX(f32), UP_TO_MAX(bf16)};

INLINE void linear_panel(const Op *op, int64_t panel, int64_t from, int64_t rows, float *sum,
                         int dtype) {
    int64_t K = op->n[0], bytes = panel_bytes(K, dtype), passes = divide_up(rows, ROWS_MAX);
    int64_t each = divide_up(rows, passes), depth = passes == 1 ? K : DEPTH;
    int64_t ahead = passes == 1 ? AHEAD : depth * TILE * size_of(dtype);
    int64_t fetching = min_int(passes, FETCHING), lines = divide_up(FETCHING, fetching);
    for (int64_t k = 0; k < K; k += depth) {
        const char *w = (const char *)op->p[1] + panel * bytes + k * TILE * size_of(dtype);
        const char *x = at(op->p[0], from * op->n[2] + k, dtype);
        for (int64_t row = 0, pass = 0; row < rows; row += each, pass++)
            multiply_rows[dtype][min_int(each, rows - row)](
                sum + row * TILE, k == 0, x + row * op->n[2] * size_of(dtype), op->n[2], w,
                min_int(depth, K - k), w + ahead + ahead * pass / fetching,
                rows > 1 && pass < fetching ? (int)lines : 0);
    }
    finish(op, sum, rows, from, panel, dtype);
}

static void linear_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    int64_t rows = step->counts[op->count], panels = divide_up(op->n[1], TILE);
    int64_t at_once = panels_at_once(op, step, me->threads);
    int64_t first = chunk * at_once, last = min_int(panels, first + at_once);
    int64_t block = rows_at_once(op->n[0] * size_of(op->dtype));
    float *sum = (float *)me->scratch;
    for (int64_t row = 0; row < rows; row += block)
        for (int64_t panel = first; panel < last; panel++)
            if (op->dtype == F32)
                linear_panel(op, panel, row, min_int(rows - row, block), sum, F32);
            else linear_panel(op, panel, row, min_int(rows - row, block), sum, BF16);
}

/* Floats in a vector: a panel has 2 * VW outputs. */
int lanes(void) { return VW; }
