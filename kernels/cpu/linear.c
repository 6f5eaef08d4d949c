/* y [R, N] = x [R, K] @ weight.T + bias, with the weight packed once into panels.
 *
 * A panel is TILE outputs, whole K: [panel][K][TILE], or with the dot product [panel][K / 2][TILE]
 * [2]. Memory is read front to back once for any number of rows; at most ROWS_MAX rows share a pass
 * over a panel, and the passes fetch the next panel into the cache while they compute. Every output
 * is one chain of sums over K in order, so a row's result depends on that row alone.
 *
 *   p  x, weight, bias or 0, y      n  K, N, stride of x, stride of y
 *   flags  what is done with y: STORE it, ADD_TO y, or GATE: panels hold TILE / 2 gates and then
 *          their ups, and y [R, N / 2] is act(gate) * up
 */
#include "common.h"

enum { STORE = 0, ADD_TO = 1, GATE_SILU = 2, GATE_GELU = 3, GATE_GELU_TANH = 4 };

#define AHEAD 2048     /* bytes fetched ahead of a single pass */
#define DEPTH 512      /* of K at once where rows take several passes: stays in the L1 cache */
#define MAX_PANELS 8   /* a chunk of work */
#define FETCHING 8     /* passes that fetch: together they bring the next DEPTH */
/* Rows at once: they and their sums stay in the L2 cache between the panels of a chunk. 2,048
 * rows of the half model's matrices in 1.81 s, with 480 rows whatever K 1.97 (2 cores of an EPYC Zen
 * 5, 2026-11-22); 256 and 512 KiB, and DEPTH 256 and 384, within 1%. */
#define BLOCK_BYTES (384 << 10)
#define BLOCK_ROWS 480
#define BLOCK_ROWS_MIN 96

INLINE int64_t panel_bytes(int64_t K, int dtype) {
    return (HAS_DOT && dtype == BF16 ? (K + 1) / 2 * 2 : K) * TILE * size_of(dtype);
}

typedef void Kernel(float *sum, int is_first, const char *x, int64_t stride, const char *panel,
                    int64_t K, const char *next, int lines);

/* sum [rows][TILE] (+)= x [rows][K] @ panel; `lines` cache lines of what comes next are fetched
 * every 4 steps. Inlined with constants for rows and dtype. */
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
#if HAS_DOT
    const __m512bh *w = (const __m512bh *)panel;
    if (dtype == BF16)
        for (; k + 8 <= K; k += 8) {
            for (int i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 4
            for (int u = 0; u < 16; u += 4, w += 2) {
                __m512bh w0 = w[0], w1 = w[1];
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    __m512bh pair = (__m512bh)_mm512_set1_epi32(*(const int_any *)(from[r] + 2 * k + u));
                    s[r][0] = (vf)_mm512_dpbf16_ps((__m512)s[r][0], w0, pair);
                    s[r][1] = (vf)_mm512_dpbf16_ps((__m512)s[r][1], w1, pair);
                }
            }
        }
    if (dtype == BF16)
        for (; k < K; k += 2, w += 2)
            for (int r = 0; r < rows; r++) {
                int32_t both = 0;
                memcpy(&both, from[r] + 2 * k, k + 2 <= K ? 4 : 2);
                __m512bh pair = (__m512bh)_mm512_set1_epi32(both);
                s[r][0] = (vf)_mm512_dpbf16_ps((__m512)s[r][0], w[0], pair);
                s[r][1] = (vf)_mm512_dpbf16_ps((__m512)s[r][1], w[1], pair);
            }
#endif
    for (; k + 4 <= K; k += 4) {
        for (int i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) {
            vf w0 = load(panel, (k + u) * TILE, dtype), w1 = load(panel, (k + u) * TILE + VW, dtype);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                vf each = splat(load_one(from[r], k + u, dtype));
                s[r][0] += w0 * each;
                s[r][1] += w1 * each;
            }
        }
    }
    for (; k < K; k++)
        for (int r = 0; r < rows; r++) {
            vf each = splat(load_one(from[r], k, dtype));
            s[r][0] += load(panel, k * TILE, dtype) * each;
            s[r][1] += load(panel, k * TILE + VW, dtype) * each;
        }
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2; j++) store_f32(sum + r * TILE + j * VW, s[r][j]);
}

/* Separate functions, since inlined together they run out of registers; and without GCC's
 * rewriting of the row pointers, which costs 3%. 8 rows by two vectors reach 460 GFLOP/s on a core
 * of an EPYC Zen 5 (2 bfloat16 dot products a cycle); 12 rows do so with GCC, and Clang spills. */
#if defined(__clang__)
#define KERNEL static __attribute__((noinline))
#else
#define KERNEL static __attribute__((noinline, optimize("no-ivopts")))
#endif
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

static int64_t linear_panels_at_once(const Op *op, int threads) {
    return most(1, least(MAX_PANELS, divide_up(op->n[1], TILE) / (6 * threads)));
}

static int64_t linear_chunks(const Op *op, const Step *step, int threads) {
    (void)step;
    return divide_up(divide_up(op->n[1], TILE), linear_panels_at_once(op, threads));
}

INLINE void linear_panel(const Op *op, int64_t panel, int64_t from, int64_t rows, float *sum,
                         int dtype) {
    int64_t K = op->n[0], bytes = panel_bytes(K, dtype), passes = divide_up(rows, ROWS_MAX);
    int64_t each = divide_up(rows, passes), depth = passes == 1 ? K : DEPTH;
    int64_t ahead = passes == 1 ? AHEAD : depth * TILE * size_of(dtype);
    int64_t fetching = least(passes, FETCHING);
    for (int64_t k = 0; k < K; k += depth) {
        const char *w = (const char *)op->p[1] + panel * bytes + k * TILE * size_of(dtype);
        const char *x = at(op->p[0], from * op->n[2] + k, dtype);
        for (int64_t row = 0, pass = 0; row < rows; row += each, pass++)
            multiply_rows[dtype][least(each, rows - row)](
                sum + row * TILE, k == 0, x + row * op->n[2] * size_of(dtype), op->n[2], w,
                least(depth, K - k), w + ahead + ahead * pass / fetching,
                pass < fetching ? (int)divide_up(FETCHING, fetching) : 0);
    }
    finish(op, sum, rows, from, panel, dtype);
}

static void linear_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    int64_t rows = step->counts[op->count], panels = divide_up(op->n[1], TILE);
    int64_t at_once = linear_panels_at_once(op, me->threads);
    int64_t first = chunk * at_once, last = least(panels, first + at_once);
    float *sum = (float *)me->scratch;
    int64_t fitting = BLOCK_BYTES / (op->n[0] * size_of(op->dtype));
    int64_t block = most(BLOCK_ROWS_MIN, least(BLOCK_ROWS, fitting)) / ROWS_MAX * ROWS_MAX;
    for (int64_t row = 0; row < rows; row += block)
        for (int64_t panel = first; panel < last; panel++)
            if (op->dtype == F32)
                linear_panel(op, panel, row, least(rows - row, block), sum, F32);
            else linear_panel(op, panel, row, least(rows - row, block), sum, BF16);
}

/* weight [N, K] (row-major, dtype) -> panels; rows beyond N are zero. With `gate`, N / 2 gates
 * and then N / 2 ups become panels of VW gates and VW ups. */
void pack_weight(const void *weight, void *packed, int64_t N, int64_t K, int dtype, int gate) {
    int is_paired = HAS_DOT && dtype == BF16;
    int64_t half = N / 2, size = size_of(dtype), bytes = panel_bytes(K, dtype);
    int64_t panels = gate ? divide_up(half, VW) : divide_up(N, TILE);
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t j = 0; j < TILE; j++) {
            int64_t row = panel * TILE + j, end = N;
            if (gate) {
                row = panel * VW + j % VW;
                end = row < half ? N : 0;
                row += j < VW ? 0 : half;
            }
            char *to = (char *)packed + panel * bytes;
            for (int64_t k = 0; k < (is_paired ? (K + 1) / 2 * 2 : K); k++) {
                int64_t place = is_paired ? k / 2 * TILE * 2 + j * 2 + k % 2 : k * TILE + j;
                if (row < end && k < K)
                    memcpy(to + place * size, (const char *)weight + (row * K + k) * size, size);
                else memset(to + place * size, 0, size);
            }
        }
}

/* Floats in a vector: a panel has 2 * VW outputs. */
int lanes(void) { return VW; }
