/* Weights into panels, a panel a chunk of work, so that all threads of the team pack.
 *
 *   PACK            p  weight [N, K] of the op's dtype, packed (linear.c)
 *                   n  K, N
 *   PACK_QUANTIZED  p  codes as stored (blocks.c), packed (quantized_linear.c), scales, offsets or
 *                      zeros (uint8) or 0, order or 0
 *                   n  K, N, group, block, form: as there, layout, bits (of words);
 *                      scales [N, groups] are as wide as packed
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

/* 4-byte words of each row, or zeros where it is 0, to [count][TILE]. */
static void pack_words(char *to, const char *const *rows, int64_t count) {
    int64_t i = 0;
#if VW == 16
    for (; i + 16 <= count; i += 16)
        for (int half = 0; half < TILE; half += VW) {
            __m512i row[16];
            for (int j = 0; j < 16; j++) {
                const char *from = rows[half + j];
                row[j] = from ? _mm512_loadu_si512(from + 4 * i) : _mm512_setzero_si512();
            }
            transpose(row);
            for (int at = 0; at < 16; at++)
                _mm512_storeu_si512(to + 4 * ((i + at) * TILE + half), row[at]);
        }
#endif
    for (int64_t j = 0; j < TILE; j++)
        for (int64_t at = i; at < count; at++)
            ((int_any *)to)[at * TILE + j] = rows[j] ? ((const int_any *)rows[j])[at] : 0;
}

static void pack_run(const Op *op, const Step *step, int64_t panel, Worker *me) {
    (void)me;
    if (panel >= step->counts[op->count]) return;
    int64_t K = op->n[0];
    char *to = (char *)op->p[1] + panel * panel_bytes(K, op->dtype);
    const char *rows[TILE];
    for (int64_t j = 0; j < TILE; j++) {
        int64_t row = row_of(op, panel, j);
        rows[j] = row < 0 ? 0 : at(op->p[0], row * K, op->dtype);
    }
    if (op->dtype == F32) {
        pack_words(to, rows, K);
    } else if (HAS_DOT) {
        pack_words(to, rows, K / 2);
        for (int64_t j = 0; K % 2 && j < TILE; j++)
            ((uint32_t *)to)[K / 2 * TILE + j] = rows[j] ? ((const bf16 *)rows[j])[K - 1] : 0;
    } else {
        for (int64_t j = 0; j < TILE; j++)
            for (int64_t k = 0; k < K; k++)
                ((bf16 *)to)[k * TILE + j] = rows[j] ? ((const bf16 *)rows[j])[k] : 0;
    }
}

#define LATER 64 /* columns ahead that are fetched, since each is far from the one before it */
#define RUN (VW < 8 ? VW : 8) /* neighbours in OUTPUTS_LAYOUT that have one word */

#define UNPACK_COLUMNS 512 /* at once */

/* 4 codes of each output of a panel, the first lowest: [UNPACK_COLUMNS / 4][TILE]. */
typedef uint32_t Fours[UNPACK_COLUMNS / 4][TILE];

/* Of columns `first` to `last` from rows; beyond K, and where there is no row, codes are 0. The
 * same columns of the next panel's rows are fetched: they are far apart. */
static void fours_of_rows(const Op *op, const int64_t *rows, int64_t first, int64_t last,
                          Fours fours) {
    _Alignas(64) uint8_t codes[TILE][UNPACK_COLUMNS];
    const char *pieces[TILE];
    int64_t K = op->n[0], count = min_int(last, K) - first, layout = op->n[5];
    int64_t row_bytes = bytes_of(layout, K), bytes = bytes_of(layout, count);
    const uint8_t *column = (const uint8_t *)op->p[0] + bytes_of(layout, first);
    const int64_t further = (op->flags < GATE_SILU ? TILE : VW) * row_bytes;
    for (int64_t j = 0; j < TILE; j++) {
        int64_t known = rows[j] < 0 ? 0 : count;
        const uint8_t *from = column + rows[j] * row_bytes;
        if (known) {
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + further + i, 0, 2);
            codes_from(layout, from, known, codes[j]);
        }
        memset(codes[j] + known, 0, (size_t)(last - first - known));
        pieces[j] = (const char *)codes[j];
    }
    pack_words((char *)fours, pieces, (last - first) / 4);
}

/* The same from words, which have a column's outputs side by side. */
static void fours_of_words(const Op *op, const int64_t *rows, int64_t first, int64_t last,
                           Fours fours) {
    int64_t K = op->n[0], N = op->n[1], bits = op->n[6], layout = op->n[5];
    uint32_t shifts[TILE] = {0}, present[TILE]; /* of an output, beside its column's */
    int32_t places[TILE] = {0};
    for (int64_t j = 0; j < TILE; j++) {
        int shift = 0;
        present[j] = rows[j] < 0 ? 0 : ~0u;
        if (rows[j] < 0) continue;
        places[j] = (int32_t)(word_of(op, layout, bits, N, rows[j], 0, &shift) -
                              word_of(op, layout, bits, N, 0, 0, &shift));
        word_of(op, layout, bits, N, rows[j], 0, &shift);
        if (layout == OUTPUTS_LAYOUT) shifts[j] = (uint32_t)shift;
    }
    const int is_along = layout == WORDS_LAYOUT && places[VW - 1] - places[0] == VW - 1 &&
                         places[TILE - 1] - places[VW] == VW - 1;
    const int is_in_runs = layout == OUTPUTS_LAYOUT && (op->flags < GATE_SILU || N / 2 % RUN == 0);
    for (int64_t i = 0; i < (last - first) / 4; i++) {
        const uint32_t *from[4];
        uint32_t masks[4], down[4];
        for (int at = 0; at < 4; at++) {
            int64_t k = first + 4 * i + at;
            int shift;
            masks[at] = k < K ? (1u << bits) - 1 : 0;
            from[at] = (const uint32_t *)op->p[0] +
                       word_of(op, layout, bits, N, 0, min_int(k, K - 1), &shift);
            down[at] = (uint32_t)shift;
            int64_t ahead = word_of(op, layout, bits, N, 0, min_int(k + LATER, K - 1), &shift);
            const uint32_t *later = (const uint32_t *)op->p[0] + places[0] + ahead;
            __builtin_prefetch(later, 0, 2);
            if (is_along) __builtin_prefetch(later + VW, 0, 2);
        }
        for (int64_t half = 0; is_along && half < TILE; half += VW) {
            vu four = {0};
            for (int at = 0; at < 4; at++) {
                vu words = (vu)load_f32((const float *)from[at] + places[half]);
                four |= (words >> down[at] & masks[at]) << (8 * at);
            }
            store_f32((float *)fours[i] + half, (vf)four);
        }
        for (int64_t run = 0; is_in_runs && run < TILE; run += RUN) {
            uint32_t word[4];
            for (int at = 0; at < 4; at++) word[at] = from[at][places[run]];
            for (int64_t j = run; j < run + RUN; j++) {
                uint32_t four = 0;
                for (int at = 0; at < 4; at++)
                    four |= (word[at] >> shifts[j] & masks[at]) << (8 * at);
                fours[i][j] = four & present[j];
            }
        }
        for (int64_t j = 0; !is_in_runs && !is_along && j < TILE; j++) {
            uint32_t four = 0;
            for (int at = 0; at < 4; at++)
                four |= (from[at][places[j]] >> (down[at] + shifts[j]) & masks[at]) << (8 * at);
            fours[i][j] = four & present[j];
        }
    }
}

/* 16 codes of each output into a panel. */
INLINE void pack_sixteen(char *to, uint32_t c[4][TILE], int bits) {
    uint32_t *out = (uint32_t *)to;
    if (bits == 8) {
        memcpy(out, c, 4 * sizeof *c);
        return;
    }
    const uint32_t low = 0x0f0f0f0f, high = 0x03030303;
    for (int64_t j = 0; j < TILE; j++) {
        out[j] = (c[0][j] & low) | (c[1][j] & low) << 4;
        out[TILE + j] = (c[2][j] & low) | (c[3][j] & low) << 4;
        if (bits == 6)
            out[2 * TILE + j] = (c[0][j] >> 4 & high) | (c[1][j] >> 4 & high) << 2 |
                                (c[2][j] >> 4 & high) << 4 | (c[3][j] >> 4 & high) << 6;
    }
}

/* A number a row, of a group, to its place in the panel; 0 where there is no row. */
#define GATHER(TYPE, to, from, groups, g)                                      \
    for (int j = 0; j < TILE; j++)                                            \
        ((TYPE *)(to))[j] = rows[j] < 0 ? 0 : ((const TYPE *)(from))[rows[j] * (groups) + (g)];

/* What precedes the codes of group g. */
static void pack_header(const Op *op, const int64_t *rows, const Shape *shape, char *to,
                        int64_t g) {
    int64_t groups = divide_up(op->n[0], op->n[2]);
    char *group = to + group_at(shape, g), *beside = group + shape->header / 2;
    if (shape->form & WIDE_SCALES) {
        GATHER(uint32_t, group, op->p[2], groups, g)
        if (shape->form & OFFSETS) GATHER(uint32_t, beside, op->p[3], groups, g)
    } else {
        GATHER(uint16_t, group, op->p[2], groups, g)
        if (shape->form & OFFSETS) GATHER(uint16_t, beside, op->p[3], groups, g)
    }
    if (shape->form & ZEROS) {
        uint8_t zeros[TILE], *both = (uint8_t *)to + zeros_at(shape, g);
        GATHER(uint8_t, zeros, op->p[3], groups, g)
        if (g % TOGETHER == 0) memset(both, 0, VW * TOGETHER);
        for (int j = 0; j < VW; j++) both[j] = (uint8_t)(zeros[j] | zeros[j + VW] << 4);
    }
}

static void pack_quantized_run(const Op *op, const Step *step, int64_t panel, Worker *me) {
    (void)me;
    if (panel >= step->counts[op->count]) return;
    Op as_linear = {.p = {0, op->p[1], 0, 0, 0}};
    int64_t sizes[] = {op->n[0], op->n[1], 0, 0, op->n[2], op->n[3], op->n[3], op->n[4]};
    memcpy(as_linear.n, sizes, sizeof sizes);
    Shape shape = shape_of(&as_linear);
    char *to = (char *)op->p[1] + panel * shape.panel_bytes, *out = 0;
    int64_t columns = shape.blocks * shape.block, rows[TILE], g = 0;
    int bits = bits_of(shape.form);
    _Alignas(64) Fours fours;
    for (int64_t j = 0; j < TILE; j++) rows[j] = row_of(op, panel, j);
    for (int64_t first = 0, left = 0; first < columns; first += UNPACK_COLUMNS) {
        int64_t last = min_int(columns, first + UNPACK_COLUMNS);
        if (is_by_rows(op->n[5])) fours_of_rows(op, rows, first, last, fours);
        else fours_of_words(op, rows, first, last, fours);
        for (int64_t k = first; k < last; k += 16, left -= 16, out += 2 * TILE * bits) {
            uint32_t(*c)[TILE] = fours + (k - first) / 4;
            if (left == 0) {
                pack_header(op, rows, &shape, to, g);
                out = to + group_at(&shape, g++) + shape.header;
                left = op->n[2];
            }
            if (bits == 4) pack_sixteen(out, c, 4);
            else pack_sixteen(out, c, bits);
        }
    }
}
