/* Weights into panels, a panel a chunk of work, so that all threads of the team pack.
 *
 *   PACK            p  weight [N, K] of the op's dtype, packed (linear.c), weight of the ups
 *                   n  K, N
 *   PACK_QUANTIZED  p  codes as stored (blocks.c), packed (quantized_linear.c), scales and offsets
 *                      (float [N, groups]) or 0, order or 0, the first four of the ups without
 *                      `packed`, faults (uint8 [panels])
 *                   n  K, N, group, block, form: as there, layout, bits and outputs (of words: those
 *                      side by side in memory)
 *   flags  GATE_*: N / 2 gates and N / 2 ups, a matrix each, become panels of VW gates and VW ups
 *
 * Scales of GGUF's blocks are read from these. Scales and offsets are rounded to float16 unless the
 * form has WIDE_SCALES, and offsets divided by scales where it has ZEROS: what that loses is a fault,
 * and the matrix has to be packed in a form that holds it.
 */
#include "common.h"
#include "half.h"
#include "panels.h"

/* Panels, which are the rows that bound the op. */
static int64_t pack_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return max_int(1, step->counts[op->count]);
}

/* The row of its matrix that is output j of a panel, or -1 where there is none. */
INLINE int64_t row_of(const Op *op, int64_t panel, int64_t j) {
    int64_t N = op->n[1], row = panel * TILE + j;
    if (op->flags < GATE_SILU) return row < N ? row : -1;
    row = panel * VW + j % VW;
    return row < N / 2 ? row : -1;
}

/* Whether output j of a panel is an up, of the second matrix. */
INLINE int is_up(const Op *op, int64_t j) { return op->flags >= GATE_SILU && j >= VW; }

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
        rows[j] = row < 0 ? 0 : at(op->p[is_up(op, j) ? 2 : 0], row * K, op->dtype);
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
#define UNPACK_GROUPS (UNPACK_COLUMNS / 16)

enum { ROUNDED = 1, NO_ZEROS = 2, NOT_FINITE = 4 }; /* faults */

/* 4 codes of each output of a panel, the first lowest: [UNPACK_COLUMNS / 4][TILE]. */
typedef uint32_t Fours[UNPACK_COLUMNS / 4][TILE];

/* UNPACK_COLUMNS columns of a panel: its codes, and scales and offsets of their groups. */
typedef struct {
    _Alignas(64) Fours fours;
    float scales[UNPACK_GROUPS][TILE], offsets[UNPACK_GROUPS][TILE];
    int64_t rows[TILE];
} Columns;

/* Numbers from..to of each row of a matrix of floats [N, groups], p and that of the ups. */
static void pack_floats(const Op *op, const int64_t *rows, int p, int64_t from, int64_t to,
                        float out[][TILE]) {
    const char *pieces[TILE];
    int64_t groups = divide_up(op->n[0], op->n[2]);
    for (int64_t j = 0; j < TILE; j++) {
        const float *matrix = op->p[is_up(op, j) ? p + 4 : p];
        pieces[j] = rows[j] < 0 ? 0 : (const char *)(matrix + rows[j] * groups + from);
    }
    pack_words((char *)out, pieces, to - from);
}

/* Of columns `first` to `last` from rows; beyond K, and where there is no row, codes are 0. Scales
 * of blocks, too. The same columns of the next panel's rows are fetched: they are far apart. */
static void columns_of_rows(const Op *op, int64_t first, int64_t last, Columns *it) {
    _Alignas(64) uint8_t codes[TILE][UNPACK_COLUMNS];
    float scales[TILE][UNPACK_GROUPS], offsets[TILE][UNPACK_GROUPS];
    const char *pieces[TILE], *of_scales[TILE], *of_offsets[TILE];
    int64_t K = op->n[0], count = min_int(last, K) - first, layout = op->n[5];
    int64_t row_bytes = bytes_of(layout, K), bytes = bytes_of(layout, count);
    const int is_blocks = layout > OUTPUTS_LAYOUT && !op->p[2], has_offsets = op->n[4] & OFFSETS;
    const int64_t further = (op->flags < GATE_SILU ? TILE : VW) * row_bytes;
    for (int64_t j = 0; j < TILE; j++) {
        int64_t known = it->rows[j] < 0 ? 0 : count;
        const uint8_t *from = (const uint8_t *)op->p[is_up(op, j) ? 5 : 0] +
                              bytes_of(layout, first) + it->rows[j] * row_bytes;
        if (known) {
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + further + i, 0, 2);
            if (is_blocks)
                unpack_row(layout, known / sizes_of[layout].weights, from, codes[j], scales[j],
                           has_offsets ? offsets[j] : 0);
            else codes_from(layout, from, known, codes[j]);
        }
        memset(codes[j] + known, 0, (size_t)(last - first - known));
        pieces[j] = (const char *)codes[j];
        of_scales[j] = known ? (const char *)scales[j] : 0;
        of_offsets[j] = known ? (const char *)offsets[j] : 0;
    }
    pack_words((char *)it->fours, pieces, (last - first) / 4);
    if (!is_blocks) return;
    int64_t groups = count / sizes_of[layout].weights * sizes_of[layout].groups;
    pack_words((char *)it->scales, of_scales, groups);
    if (has_offsets) pack_words((char *)it->offsets, of_offsets, groups);
}

/* The same codes from words, which have a column's outputs side by side. */
static void columns_of_words(const Op *op, int64_t first, int64_t last, Columns *it) {
    int64_t K = op->n[0], N = op->n[7], bits = op->n[6], layout = op->n[5];
    const int64_t *rows = it->rows;
    uint32_t shifts[TILE] = {0}, present[TILE]; /* of an output, beside its column's */
    int64_t places[TILE] = {0}; /* from the first output of the first matrix */
    const int64_t ups = (const uint32_t *)op->p[5] - (const uint32_t *)op->p[0];
    for (int64_t j = 0; j < TILE; j++) {
        int shift = 0;
        present[j] = rows[j] < 0 ? 0 : ~0u;
        if (rows[j] < 0) continue;
        places[j] = word_of(op, layout, bits, N, rows[j], 0, &shift) -
                    word_of(op, layout, bits, N, 0, 0, &shift) + (is_up(op, j) ? ups : 0);
        word_of(op, layout, bits, N, rows[j], 0, &shift);
        if (layout == OUTPUTS_LAYOUT) shifts[j] = (uint32_t)shift;
    }
    const int is_along = layout == WORDS_LAYOUT && places[VW - 1] - places[0] == VW - 1 &&
                         places[TILE - 1] - places[VW] == VW - 1;
    const int is_in_runs = layout == OUTPUTS_LAYOUT;
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
            store_f32((float *)it->fours[i] + half, (vf)four);
        }
        for (int64_t run = 0; is_in_runs && run < TILE; run += RUN) {
            uint32_t word[4];
            for (int at = 0; at < 4; at++) word[at] = from[at][places[run]];
            for (int64_t j = run; j < run + RUN; j++) {
                uint32_t four = 0;
                for (int at = 0; at < 4; at++)
                    four |= (word[at] >> shifts[j] & masks[at]) << (8 * at);
                it->fours[i][j] = four & present[j];
            }
        }
        for (int64_t j = 0; !is_in_runs && !is_along && j < TILE; j++) {
            uint32_t four = 0;
            for (int at = 0; at < 4; at++)
                four |= (from[at][places[j]] >> (down[at] + shifts[j]) & masks[at]) << (8 * at);
            it->fours[i][j] = four & present[j];
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

/* Numbers of TILE outputs, as they are or as float16, to `to`; what is lost. */
INLINE int put_numbers(char *to, const float *from, int form) {
    if (form & WIDE_SCALES) {
        memcpy(to, from, TILE * sizeof *from);
        return 0;
    }
    vi faults = {0};
    for (int j = 0; j < TILE; j += VW) {
        vf x = load_f32(from + j);
        vi half = half_of(x);
        faults |= ~(magnitude(of_half(half) - x) <= magnitude(x) * 0x1p-11f);
        vh narrow = __builtin_convertvector((vu)half, vh);
        memcpy(to + 2 * j, &narrow, sizeof narrow);
    }
    return any_of(faults) ? ROUNDED : 0;
}

/* Offsets as zero points from 0 to 15, two a byte; what is lost. */
INLINE int put_zeros(uint8_t *to, const float *scales, const float *offsets) {
    vi both = {0}, faults = {0};
    for (int half = 0; half < 2; half++) {
        vf scale = load_f32(scales + half * VW), offset = load_f32(offsets + half * VW);
        vi is_none = (scale == 0.0f) & (offset == 0.0f);
        vf zero = choose(is_none, (vf){0}, offset / scale);
        zero = splat(12582912.0f) - (zero + 12582912.0f); /* to the nearest, less than 0 */
        faults |= ~((zero >= 0.0f) & (zero <= 15.0f) & (-(zero * scale) == offset));
        both |= (__builtin_convertvector(zero, vi) & 15) << 4 * half;
    }
    vb narrow = __builtin_convertvector(both, vb);
    memcpy(to, &narrow, sizeof narrow);
    return any_of(faults) ? NO_ZEROS : 0;
}

INLINE int are_finite(const float *x) {
    vi strange = {0};
    for (int j = 0; j < TILE; j += VW) strange |= ~(magnitude(load_f32(x + j)) < INFINITY);
    return !any_of(strange);
}

/* What precedes the codes of group g, of TILE outputs; what is lost. */
static int pack_header(const Shape *shape, char *to, int64_t g, const float *scales,
                       const float *offsets) {
    char *group = to + group_at(shape, g);
    int faults = put_numbers(group, scales, shape->form);
    if (shape->form & (OFFSETS | ZEROS) && !are_finite(offsets)) faults |= NOT_FINITE;
    if (!are_finite(scales)) faults |= NOT_FINITE;
    if (shape->form & OFFSETS)
        faults |= put_numbers(group + shape->header / 2, offsets, shape->form);
    if (shape->form & ZEROS) {
        uint8_t *zeros = (uint8_t *)to + zeros_at(shape, g);
        if (g % TOGETHER == 0) memset(zeros, 0, VW * TOGETHER);
        faults |= put_zeros(zeros, scales, offsets);
    }
    return faults;
}

/* Codes, scales and offsets of columns `first` to `last`. */
static void read_columns(const Op *op, int64_t first, int64_t last, Columns *it) {
    int64_t group = op->n[2], groups = divide_up(op->n[0], group);
    int64_t from = divide_up(first, group), to = min_int(groups, divide_up(last, group));
    if (is_by_rows(op->n[5])) columns_of_rows(op, first, last, it);
    else columns_of_words(op, first, last, it);
    if (!op->p[2] || from >= to) return;
    pack_floats(op, it->rows, 2, from, to, it->scales);
    if (op->p[3]) pack_floats(op, it->rows, 3, from, to, it->offsets);
}

static void pack_quantized_run(const Op *op, const Step *step, int64_t panel, Worker *me) {
    (void)me;
    if (panel >= step->counts[op->count]) return;
    Op as_linear = {.p = {0, op->p[1], 0, 0, 0}};
    int64_t sizes[] = {op->n[0], op->n[1], 0, 0, op->n[2], op->n[3], op->n[3], op->n[4]};
    memcpy(as_linear.n, sizes, sizeof sizes);
    Shape shape = shape_of(&as_linear);
    char *to = (char *)op->p[1] + panel * shape.panel_bytes, *out = 0;
    int64_t columns = shape.blocks * shape.block, g = 0;
    int bits = bits_of(shape.form), faults = 0;
    Columns it;
    for (int64_t j = 0; j < TILE; j++) it.rows[j] = row_of(op, panel, j);
    for (int64_t first = 0, left = 0; first < columns; first += UNPACK_COLUMNS) {
        int64_t last = min_int(columns, first + UNPACK_COLUMNS), here = 0;
        read_columns(op, first, last, &it);
        for (int64_t k = first; k < last; k += 16, left -= 16, out += 2 * TILE * bits) {
            uint32_t(*c)[TILE] = it.fours + (k - first) / 4;
            if (left == 0) {
                faults |= pack_header(&shape, to, g, it.scales[here], it.offsets[here]);
                out = to + group_at(&shape, g) + shape.header;
                left = op->n[2];
                g++, here++;
            }
            if (bits == 4) pack_sixteen(out, c, 4);
            else pack_sixteen(out, c, bits);
        }
    }
    ((uint8_t *)op->p[8])[panel] = (uint8_t)faults;
}
