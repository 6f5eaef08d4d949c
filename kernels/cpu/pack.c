/* Weights into panels, one or a few a chunk of work, so that all threads of the team pack.
 *
 *   PACK            p  weight [N, K] of the op's dtype, packed (linear.c), weight of the ups
 *                   n  K, N
 *   PACK_QUANTIZED  p  codes as stored (blocks.c), packed (quantized_linear.c), scales and offsets
 *                      (float [N, groups]) or zeros (uint8) or 0, order or 0, the ups' codes, scales
 *                      and offsets or zeros, faults (uint8 [panels])
 *                   n  K, N, group, block, form: as there, layout, bits and outputs (side by side in
 *                      memory: of words, and of tall scales, offsets and zeros, [groups, outputs])
 *   flags  GATE_*: N / 2 gates and N / 2 ups, a matrix each, become panels of VW gates and VW ups
 *
 * Scales of GGUF's blocks are read from these. Scales and offsets are rounded to float16 unless the
 * form has WIDE_SCALES: more than half a step in the last place is a fault, and the matrix has to be
 * packed in that form.
 */
#include "blocks.c"
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
    for (; HAS_TRANSPOSE && i + VW <= count; i += VW)
        for (int half = 0; half < TILE; half += VW) {
            vi row[VW];
            for (int j = 0; j < VW; j++) {
                const char *from = rows[half + j];
                row[j] = from ? load_i32(from + 4 * i) : (vi){0};
            }
            transpose(row);
            for (int at = 0; at < VW; at++)
                store_i32(to + 4 * ((i + at) * TILE + half), row[at]);
        }
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
        return;
    }
    pack_words(to, rows, K / 2);
    for (int64_t j = 0; K % 2 && j < TILE; j++)
        ((uint32_t *)to)[K / 2 * TILE + j] = rows[j] ? ((const bf16 *)rows[j])[K - 1] : 0;
}

enum { ROUNDED = 1, NOT_FINITE = 2 }; /* faults */

/* With the layout: whether the outputs of a group lie side by side, not the groups of an output. */
enum { TALL_SCALES = 256, TALL_BESIDE = 512 };

/* Numbers of `size` bytes of group g, tall, p and that of the ups. The rows of VW outputs follow one
 * another. */
INLINE void tall_numbers(const Op *op, const Columns *it, int p, int64_t g, int64_t size, void *out) {
    memset(out, 0, (size_t)(TILE * size));
    for (int64_t j = 0; j < TILE; j += VW) {
        int64_t count = VW;
        while (count && it->rows[j + count - 1] < 0) count--;
        if (count == 0) continue;
        const char *matrix = op->p[it->of[j] ? p + 4 : p];
        const char *from = matrix + (g * op->n[7] + it->rows[j]) * size;
        /* a size that the compiler knows is a move */
        if (count == VW) memcpy((char *)out + j * size, from, (size_t)(VW * size));
        else memcpy((char *)out + j * size, from, (size_t)(count * size));
    }
}

/* Numbers from..to of each row of a matrix of floats [N, groups], p and that of the ups. */
static void pack_floats(const Op *op, const Columns *it, int p, int64_t from, int64_t to,
                        Floats *out) {
    const char *pieces[TILE];
    int64_t groups = divide_up(op->n[0], op->n[2]);
    if (op->n[5] & (p == 2 ? TALL_SCALES : TALL_BESIDE)) {
        for (int64_t g = from; g < to; g++) tall_numbers(op, it, p, g, 4, out[g - from]);
        return;
    }
    for (int64_t j = 0; j < TILE; j++) {
        const float *matrix = op->p[it->of[j] ? p + 4 : p];
        pieces[j] = it->rows[j] < 0 ? 0 : (const char *)(matrix + it->rows[j] * groups + from);
    }
    pack_words((char *)out, pieces, to - from);
}

/* 16 codes of each output into a panel. */
INLINE void pack_sixteen(char *to, const Words *c, int bits) {
    uint32_t *out = (uint32_t *)to;
    if (bits == 8) {
        memcpy(out, c, 4 * sizeof *c);
        return;
    }
    const uint32_t low = 0x0f0f0f0f, high = 0x03030303;
    EACH_ROW {
        vu four[4] = {OF(c[0]), OF(c[1]), OF(c[2]), OF(c[3])};
        OF(out) = (four[0] & low) | (four[1] & low) << 4;
        OF(out + TILE) = (four[2] & low) | (four[3] & low) << 4;
        if (bits == 6)
            OF(out + 2 * TILE) = (four[0] >> 4 & high) | (four[1] >> 4 & high) << 2 |
                                 (four[2] >> 4 & high) << 4 | (four[3] >> 4 & high) << 6;
    }
}

/* Lanes of what was rounded by too much, and of what is no number. */
typedef struct {
    vi rounded, strange;
} Lost;

/* Numbers of TILE outputs, as they are or as float16, to `to`. As they are they have to be numbers below
 * 2**120, so that with the largest code, a table's, weights are; as float16 what is no number, or too
 * large, is rounded by too much. */
INLINE void put_numbers(char *to, const float *from, int form, Lost *lost) {
    for (int j = 0; j < TILE; j += VW) {
        vf x = load_f32(from + j);
        if (form & WIDE_SCALES) {
            store_f32((float *)to + j, x);
            lost->strange |= ~(magnitude(x) * 256.0f < INFINITY);
            continue;
        }
        vh half = half_of(x);
        *(vh_any *)(to + 2 * j) = half;
        lost->rounded |= ~(magnitude(of_half(half) - x) <= magnitude(x) * 0x1p-11f);
    }
}

/* Zero points of group g, two a byte. */
INLINE void put_zeros(uint8_t *to, const Op *op, const Columns *it, int64_t g) {
    int64_t groups = divide_up(op->n[0], op->n[2]);
    uint8_t zeros[TILE];
    if (op->n[5] & TALL_BESIDE) tall_numbers(op, it, 3, g, 1, zeros);
    else
        for (int j = 0; j < TILE; j++) {
            const uint8_t *matrix = op->p[it->of[j] ? 7 : 3];
            zeros[j] = it->rows[j] < 0 ? 0 : matrix[it->rows[j] * groups + g];
        }
    for (int j = 0; j < VW; j++) to[j] = (uint8_t)(zeros[j] | zeros[j + VW] << 4);
}

/* What precedes the codes of group g, the one `here` of the columns. */
INLINE void pack_header(const Op *op, const Shape *shape, char *to, const Columns *it, int64_t g,
                        int64_t here, Lost *lost) {
    char *group = to + group_at(shape, g);
    put_numbers(group, it->scales[here], shape->form, lost);
    if (shape->form & OFFSETS)
        put_numbers(group + shape->header / 2, it->offsets[here], shape->form, lost);
    if (shape->form & ZEROS) {
        uint8_t *zeros = (uint8_t *)to + zeros_at(shape, g);
        if (g % TOGETHER == 0) memset(zeros, 0, VW * TOGETHER);
        put_zeros(zeros, op, it, g);
    }
}

/* Panels of a chunk. A cache line has codes of 128 outputs of a column of OUTPUTS, the next column's are
 * in another page: the panels that it serves are made together. */
INLINE int64_t panels_of_chunk(const Op *op) {
    return columns_at_once(op->n[5] % TALL_SCALES, op->flags >= GATE_SILU);
}

static int64_t pack_quantized_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return divide_up(max_int(1, step->counts[op->count]), panels_of_chunk(op));
}

/* Where in a panel columns begin: the next group, columns left of the one before, and bytes. */
typedef struct {
    int64_t group, left, bytes;
} Reached;

/* COLUMNS columns of a panel from `first` on, which have been read; faults. */
static int pack_columns(const Op *op, const Shape *shape, Columns *it, int64_t panel, int64_t first,
                        Reached *at) {
    const int64_t group = op->n[2], groups = divide_up(op->n[0], group);
    const int64_t last = min_int(shape->blocks * shape->block, first + COLUMNS);
    const int64_t from = divide_up(first, group), until = min_int(groups, divide_up(last, group));
    char *to = (char *)op->p[1] + panel * shape->panel_bytes, *out = to + at->bytes;
    int64_t g = at->group, left = at->left, here = 0;
    int bits = bits_of(shape->form);
    Lost lost = {{0}, {0}};
    if (!has_scales(op->n[5] % TALL_SCALES) && from < until)
        pack_floats(op, it, 2, from, until, it->scales);
    if (op->p[3] && shape->form & OFFSETS && from < until)
        pack_floats(op, it, 3, from, until, it->offsets);
    for (int64_t k = first; k < last; k += 16, left -= 16, out += 2 * TILE * bits) {
        Words *c = it->fours + (k - first) / 4;
        if (left == 0) {
            pack_header(op, shape, to, it, g, here, &lost);
            out = to + group_at(shape, g) + shape->header;
            left = group;
            g++, here++;
        }
        if (bits == 4) pack_sixteen(out, c, 4);
        else pack_sixteen(out, c, bits);
    }
    *at = (Reached){g, left, out - to};
    return (any_of(lost.rounded) ? ROUNDED : 0) | (any_of(lost.strange) ? NOT_FINITE : 0);
}

static void pack_quantized_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    const int64_t size = panels_of_chunk(op), from = chunk * size;
    const int64_t count = min_int(size, step->counts[op->count] - from);
    Op as_linear = {.p = {0, op->p[1], 0, 0, 0}};
    int64_t sizes[] = {op->n[0], op->n[1], 0, 0, op->n[2], op->n[3], op->n[3], op->n[4]};
    memcpy(as_linear.n, sizes, sizeof sizes);
    Shape shape = shape_of(&as_linear);
    Stored s = {.codes = {op->p[0], op->p[5]}, .scales = {op->p[2], op->p[6]}, .order = op->p[4],
                .layout = op->n[5] % TALL_SCALES, .bits = op->n[6], .K = op->n[0], .beside = op->n[7],
                .further = op->flags < GATE_SILU ? TILE : VW};
    uint8_t *faults = op->p[8];
    Columns *its = (Columns *)me->scratch; /* a panel each */
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < TILE; j++)
            its[i].rows[j] = row_of(op, from + i, j), its[i].of[j] = is_up(op, j);
    Reached start = {0}, end = {0};
    for (int64_t first = 0; first < shape.blocks * shape.block; first += COLUMNS, start = end) {
        read_together(&s, first, its, count);
        for (int64_t i = 0; i < count; i++) {
            end = start;
            faults[from + i] |= (uint8_t)pack_columns(op, &shape, its + i, from + i, first, &end);
        }
    }
}
