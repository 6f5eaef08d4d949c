/* Weights into panels, a panel a chunk of work, so that all threads of the team pack.
 *
 *   PACK            p  weight [N, K] of the op's dtype, packed (linear.c)
 *                   n  K, N
 *   PACK_QUANTIZED  p  codes (uint8 [N, K]), packed (quantized_linear.c), scales, offsets or zeros
 *                      (uint8) or 0
 *                   n  K, N, group, block, form: as there; scales [N, groups] are as wide as packed
 *   flags  GATE_*: N / 2 gates and then N / 2 ups become panels of VW gates and VW ups
 */
#include "common.h"
#include "panels.h"

/* Panels, which are the rows that bound the op. */
static int64_t pack_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return max_int(1, step->counts[op->count]);
}

/* The row of the weight that is output j of a panel, or -1 where there is none. */
INLINE int64_t row_of(const Op *op, int64_t panel, int64_t j) {
    int64_t N = op->n[1], half = N / 2, row = panel * TILE + j;
    if (op->flags < GATE_SILU) return row < N ? row : -1;
    row = panel * VW + j % VW;
    return row >= half ? -1 : j < VW ? row : row + half;
}

/* `count` words of `size` bytes from a row, or zeros, to every TILE-th word. */
#define SCATTER(TYPE, to, from, count)                                           \
    for (int64_t i = 0; i < (count); i++)                                        \
        ((TYPE *)(to))[i * TILE] = (from) ? ((const TYPE *)(from))[i] : (TYPE)0;

static void pack_run(const Op *op, const Step *step, int64_t panel, Worker *me) {
    (void)me;
    if (panel >= step->counts[op->count]) return;
    int64_t K = op->n[0];
    char *to = (char *)op->p[1] + panel * panel_bytes(K, op->dtype);
    for (int64_t j = 0; j < TILE; j++) {
        int64_t row = row_of(op, panel, j);
        const char *from = row < 0 ? 0 : at(op->p[0], row * K, op->dtype);
        if (op->dtype == F32) {
            SCATTER(uint32_t, to + 4 * j, from, K)
        } else if (!HAS_DOT) {
            SCATTER(uint16_t, to + 2 * j, from, K)
        } else {
            SCATTER(int_any, to + 4 * j, from, K / 2)
            if (K % 2) {
                uint32_t last = from ? ((const uint16_t *)from)[K - 1] : 0;
                ((uint32_t *)to)[K / 2 * TILE + j] = last;
            }
        }
    }
}

/* 4 codes from k on; beyond K they are 0. */
INLINE uint32_t four_codes(const uint8_t *from, int64_t k, int64_t K) {
    uint32_t four = 0;
    if (k < K) memcpy(&four, from + k, (size_t)min_int(4, K - k));
    return four;
}

/* `first` to `last` of a row's codes, 16 at a time, into every TILE-th word from `to` on. */
INLINE void pack_row(uint32_t *to, const uint8_t *from, int64_t first, int64_t last, int64_t K,
                     int bits) {
    for (int64_t k = first; k < last; k += 16, to += TILE * bits / 2) {
        uint32_t c[4];
        if (k + 16 <= K) memcpy(c, from + k, 16);
        else
            for (int i = 0; i < 4; i++) c[i] = four_codes(from, k + 4 * i, K);
        if (bits == 8) {
            for (int i = 0; i < 4; i++) to[i * TILE] = c[i];
            continue;
        }
        const uint32_t low = 0x0f0f0f0f, high = 0x03030303;
        to[0] = (c[0] & low) | (c[1] & low) << 4;
        to[TILE] = (c[2] & low) | (c[3] & low) << 4;
        if (bits == 6) {
            for (int i = 0; i < 4; i++) c[i] = c[i] >> 4 & high;
            to[2 * TILE] = c[0] | c[1] << 2 | c[2] << 4 | c[3] << 6;
        }
    }
}

INLINE void pack_scale(char *to, int64_t j, const void *from, int64_t i, int is_wide) {
    if (is_wide) ((uint32_t *)to)[j] = ((const uint32_t *)from)[i];
    else ((uint16_t *)to)[j] = ((const uint16_t *)from)[i];
}

static void pack_quantized_run(const Op *op, const Step *step, int64_t panel, Worker *me) {
    (void)me;
    if (panel >= step->counts[op->count]) return;
    Op as_linear = {.p = {0, op->p[1], 0, 0, 0}};
    int64_t sizes[] = {op->n[0], op->n[1], 0, 0, op->n[2], op->n[3], op->n[3], op->n[4]};
    memcpy(as_linear.n, sizes, sizeof sizes);
    Shape shape = shape_of(&as_linear);
    int64_t K = op->n[0], groups = divide_up(K, op->n[2]);
    int is_wide = shape.form & WIDE_SCALES;
    char *to = (char *)op->p[1] + panel * shape.panel_bytes;
    memset(to, 0, (size_t)shape.panel_bytes);
    for (int64_t j = 0; j < TILE; j++) {
        int64_t row = row_of(op, panel, j);
        if (row < 0) continue;
        const uint8_t *from = (const uint8_t *)op->p[0] + row * K;
        for (int64_t g = 0; g < groups; g++) {
            char *group = to + group_at(&shape, g);
            pack_scale(group, j, op->p[2], row * groups + g, is_wide);
            if (shape.form & OFFSETS)
                pack_scale(group + shape.header / 2, j, op->p[3], row * groups + g, is_wide);
            if (shape.form & ZEROS) {
                uint8_t zero = ((const uint8_t *)op->p[3])[row * groups + g];
                to[zeros_at(&shape, g) + j % VW] |= (char)(zero << j / VW * 4);
            }
            int64_t first = g * op->n[2];
            int64_t last = min_int(first + op->n[2], shape.blocks * shape.block);
            pack_row((uint32_t *)(group + shape.header) + j, from, first, last, K,
                     bits_of(shape.form));
        }
    }
}
