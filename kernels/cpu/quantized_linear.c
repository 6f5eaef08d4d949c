/* y [R, N] = x [R, K] @ weight.T + bias, with weights of 4, 6 or 8 bits and x as int8.
 *
 *   weight[n, k] = scale[n, k / group] * (value(code[n, k]) - zero) + offset[n, k / group]
 *
 * A panel is TILE outputs, whole K, group by group: TILE scales, TILE offsets where there are any,
 * then the codes: 4 of K of VW outputs a vector, in 4 bits 8 of K: the low halves of its bytes hold
 * the first 4. In 6 bits each 16 of K are the lower 4 bits and then, in one vector, the upper 2. So a
 * line of memory feeds whole vectors, and no lane is ever moved. Where every group of an output has a
 * zero of its own, of 4 bits, those of 4 groups precede these in one vector: VW bytes a group, the
 * low halves for the first VW outputs.
 *
 * The products of a block of K are summed exactly, in integers; blocks are scaled and added in
 * order, in float: one chain a sum, so a row's result depends on that row alone, and it is the same
 * on every CPU that has fused multiply-add. A block is at most a group. x has a scale for every span
 * of one or more blocks, which multiplies their sum. Of bytes that span is one block: there what is
 * added up before a second factor are blocks of a group, whose scale is that factor; 2,048 tokens of
 * `half` in int8 took 1,031 ms of the largest matrices before, and 930 since (2 cores of an EPYC Zen 4,
 * in turn with bfloat16's 1,533 and 1,579, 2026-11-27).
 *
 *   p  x (records of quantize.c), weight, bias or 0, y, table (uint8 [16]) or 0
 *   n  K, N, bytes of a row of x, stride of y, group, block, span, form
 *   flags  see panels.h
 */
#include "dot.h"
#include "common.h"
#include "panels.h"

/* Bits of `form`; without the first two codes have 4 bits; from ZERO on it is the zero of all. */
enum { EIGHT_BITS = 1, SIX_BITS = 2, OFFSETS = 4, WIDE_SCALES = 8, ZEROS = 16, ZERO = 32 };
#define TOGETHER 4 /* groups whose zeros lie together */

#define DEPTH_BYTES 16384 /* of a panel at once where rows take several passes: stays in the L1 */
#define BLOCKS_WITHIN 16  /* of bytes: no more than is in the L1 at once */
/* Rows that are bound by memory, which the hardware fetches ahead only if it is read in order. With 16
 * registers there are none left to read scales first: Q4_0 compiled for AVX2 4 to 7% slower. */
#define FEW_ROWS (VW == 16 ? 2 : 0)
/* A single row's codes are left to the hardware's prefetcher by vectors of 64 bytes. With those of half
 * the size a line takes twice the instructions, which hide less of the next one's way. */
#define HINTS_ONE (VW == 8)
#define AT_ONCE (VW == 16 ? 6 : ROWS_MAX) /* rows whose sums fit into the registers */

/* What a panel looks like; bytes. */
typedef struct {
    int64_t blocks, per_group; /* blocks in a panel, in a group */
    int64_t per_sum; /* blocks that are added up before a second factor: a span, of bytes see most_within */
    int64_t block, header, block_bytes, group_bytes, panel_bytes;
    int32_t zero, form;
    vi table;
} Shape;

INLINE int bits_of(int64_t form) { return form & EIGHT_BITS ? 8 : form & SIX_BITS ? 6 : 4; }

/* The most blocks, of equal parts of a group, whose products are added up before its scale multiplies
 * them. */
INLINE int64_t most_within(int64_t per_group) {
    int64_t blocks = min_int(per_group, BLOCKS_WITHIN);
    while (per_group % blocks) blocks--;
    return blocks;
}

INLINE Shape shape_of(const Op *op) {
    Shape s = {.block = op->n[5], .form = (int32_t)op->n[7]};
    s.zero = s.form / ZERO;
    s.blocks = divide_up(op->n[0], s.block);
    s.per_group = op->n[4] / s.block;
    s.per_sum = s.form & EIGHT_BITS ? most_within(s.per_group) : op->n[6] / s.block;
    s.header = TILE * (s.form & WIDE_SCALES ? 4 : 2) * (s.form & OFFSETS ? 2 : 1);
    s.block_bytes = s.block * TILE / 8 * bits_of(s.form);
    s.group_bytes = s.header + s.per_group * s.block_bytes;
    const int64_t groups = divide_up(s.blocks, s.per_group);
    s.panel_bytes = groups * s.header + s.blocks * s.block_bytes;
    if (s.form & ZEROS) s.panel_bytes += divide_up(groups, TOGETHER) * VW * TOGETHER;
    if (op->p[4])
        for (int i = 0; i < VW * 4; i += 16) memcpy((char *)&s.table + i, op->p[4], 16);
    return s;
}

/* Where a group begins in its panel, and the zeros of its outputs. */
INLINE int64_t group_at(const Shape *s, int64_t group) {
    int64_t zeros = s->form & ZEROS ? (group / TOGETHER + 1) * VW * TOGETHER : 0;
    return group * s->group_bytes + zeros;
}
INLINE int64_t zeros_at(const Shape *s, int64_t group) {
    int64_t place = group % TOGETHER;
    return group_at(s, group - place) + (place - TOGETHER) * VW;
}

/* The zeros of a group of TILE outputs. */
INLINE void load_zeros(vf zero[2], const char *p) {
    vi both = load_bytes(p);
    zero[0] = __builtin_convertvector(both & 15, vf);
    zero[1] = __builtin_convertvector(both >> 4 & 15, vf);
}

/* What the sum of a block begins with: less its zeros times the sum of activations, which as floats
 * are exact and have the bits of the integers: a step less than to subtract the products at the
 * end. */
INLINE vi start_less(vf zero, float activations) {
    return (vi)(splat(12582912.0f) - zero * splat(activations));
}

/* A group's header. */
typedef struct {
    vf scale[2], offset[2];
} Header;

INLINE Header load_header(const char *p, int64_t offsets, int is_wide) {
    Header h = {{{0}}, {{0}}};
    const int64_t apart = is_wide ? VW * 4 : VW * 2;
    for (int j = 0; j < 2; j++) {
        h.scale[j] = load_scales(p + j * apart, is_wide);
        if (offsets) h.offset[j] = load_scales(p + offsets + j * apart, is_wide);
    }
    return h;
}

/* LONG_BYTES: several blocks are added up before their group's scale multiplies them. A group of a prime
 * number of blocks above 16 is BYTES: 298 GOP/s of 79 blocks, 348 of 80 (EPYC Zen 4, 2026-11-27). */
enum { NIBBLES, LOOKED_UP, SIXES, BYTES, LONG_BYTES, KINDS };

typedef void QuantizedKernel(float *sum, const char *x, int64_t stride, const char *panel,
                             int64_t first, int64_t last, const Shape *shape, const char *next,
                             int64_t lines);

/* s [rows][2] += 4 of K; `in_parts`: s are sums of 16 bits (dot.h). */
INLINE void dot_rows(vi s[][2], vi c0, vi c1, const char *const *from, int64_t at, int rows,
                     int is_small, int in_parts) {
    Four w0 = split(c0, is_small), w1 = split(c1, is_small);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        Four a = spread(from[r] + at, is_small);
        if (in_parts) {
            s[r][0] = dot_part(s[r][0], c0, a.even);
            s[r][1] = dot_part(s[r][1], c1, a.even);
            continue;
        }
        s[r][0] = dot(s[r][0], w0, a, is_small);
        s[r][1] = dot(s[r][1], w1, a, is_small);
    }
}

/* s += 16 of K, from a panel's codes. */
INLINE void dot_codes(vi s[][2], const char *data, const char *const *from, int64_t at, vi table,
                      int rows, int kind, int in_parts) {
    const vi_any *codes = (const vi_any *)data;
    const int is_small = kind == NIBBLES || kind == SIXES;
    const int bytes = TILE * (kind >= BYTES ? 16 : kind == SIXES ? 12 : 8);
    for (int i = 0; HINTS_ONE && rows == 1 && i < bytes; i += 64)
        __builtin_prefetch(data + AHEAD + i, 0, 0);
    if (kind >= BYTES) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            dot_rows(s, codes[2 * i], codes[2 * i + 1], from, at + 4 * i, rows, 0, 0);
        return;
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vi c[2];
        for (int j = 0; j < 2; j++) {
            vi both = codes[i / 2 * 2 + j];
            c[j] = (i % 2 ? (vi)((vu)both >> 4) : both) & 0x0f0f0f0f;
            if (kind == LOOKED_UP) c[j] = values_of(table, c[j]);
            if (kind == SIXES) {
                vu upper = (vu)codes[4 + j];
                upper = i < 2 ? upper << (4 - 2 * i) : upper >> (2 * i - 4);
                c[j] |= (vi)upper & 0x30303030;
            }
        }
        dot_rows(s, c[0], c[1], from, at + 4 * i, rows, is_small, in_parts);
    }
}

/* s = `count` of K, PART at most, of codes below 16; where the codes end. */
INLINE const char *dot_parts(vi s[][2], const char *data, const char *const *from, int64_t at,
                             int64_t count, int rows) {
    vi part[ROWS_MAX][2];
    memset(part, 0, sizeof part);
    if (count == PART) {
        dot_codes(part, data, from, at, splat_i(0), rows, NIBBLES, 1);
        dot_codes(part, data + TILE * 8, from, at + 16, splat_i(0), rows, NIBBLES, 1);
    } else
        for (int64_t k = 0; k < count; k += 16)
            dot_codes(part, data + k / 2 * TILE, from, at + k, splat_i(0), rows, NIBBLES, 1);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2; j++) s[r][j] = widen_part(part[r][j]);
    return data + count / 2 * TILE;
}

/* sum [rows][TILE] += x @ panel, blocks `first` to `last`; every block fetches `lines` lines of what
 * comes next. Inlined with constants for rows and kind. */
INLINE void multiply_codes(float *sum, const char *x, int64_t stride, const char *panel,
                           int64_t first, int64_t last, const Shape *shape, const char *next,
                           int64_t lines, int rows, int kind) {
    const int is_small = kind == NIBBLES || kind == SIXES, is_wide = shape->form & WIDE_SCALES;
    const int64_t block = shape->block, record = RECORD_BYTES + block;
    const int bits = kind >= BYTES ? 8 : kind == SIXES ? 6 : 4, in_parts = HAS_PARTS && kind == NIBBLES;
    const int64_t offsets = shape->form & OFFSETS ? shape->header / 2 : 0;
    const vi table = shape->table;
    const char *from[ROWS_MAX];
    vf total[ROWS_MAX][2]; /* of per_sum blocks; BYTES have one factor after the other, and one sum */
    float activations[ROWS_MAX] = {0}; /* of per_sum blocks of LONG_BYTES */
    for (int r = 0; r < rows; r++) {
        from[r] = x + r * stride + first * record;
        for (int j = 0; j < 2; j++)
            total[r][j] = kind == BYTES ? load_f32(sum + r * TILE + j * VW) : (vf){0};
    }
    int64_t of_sum = shape->per_sum; /* blocks until it is complete */
    int64_t group = first / shape->per_group, begun = first % shape->per_group;
    int64_t left = shape->per_group - begun; /* blocks of this group */
    const char *header = panel + group_at(shape, group);
    const char *zeros = 0;
    if (kind == NIBBLES && shape->form & ZEROS) zeros = panel + zeros_at(shape, group);
    const char *data = header + shape->header + begun * shape->block_bytes;
    const int is_few = rows <= FEW_ROWS;
    Header read_first = {{{0}}, {{0}}};
    if (is_few) read_first = load_header(header, offsets, is_wide);
    for (int64_t b = first, at = 0; b < last; b++, at += record) {
        for (int64_t i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 0);
        vi s[ROWS_MAX][2];
        vf zero[2] = {{0}};
        if (zeros) load_zeros(zero, zeros);
        int64_t k = at + RECORD_BYTES;
        /* Before the sums begin, which would take its registers: 14% slower (64 rows of Q4_0). */
        if (in_parts) data = dot_parts(s, data, from, k, min_int(PART, block), rows);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const Record *a = (const Record *)(from[r] + at);
            for (int j = 0; j < 2; j++) {
                vi begin = zeros ? start_less(zero[j], a->as_float)
                                 : start(a->start, a->sum, is_small);
                s[r][j] = in_parts ? begin + s[r][j] : begin;
            }
        }
        if (!in_parts)
            for (; k < at + record; k += 16, data += TILE * 2 * bits)
                dot_codes(s, data, from, k, table, rows, kind, 0);
        for (k += PART; in_parts && k < at + record; k += PART) {
            vi more[ROWS_MAX][2];
            data = dot_parts(more, data, from, k, min_int(PART, at + record - k), rows);
            for (int r = 0; r < rows; r++)
                for (int j = 0; j < 2; j++) s[r][j] += more[r][j];
        }
        const int is_end = kind != BYTES && (--of_sum == 0 || b + 1 == last);
        Header h = read_first;
        if (!is_few && (kind != LONG_BYTES || is_end)) h = load_header(header, offsets, is_wide);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const Record *a = (const Record *)(from[r] + at);
            const float own = kind >= BYTES ? a->scale * a->as_float : a->as_float;
            for (int j = 0; j < 2; j++) {
                vf product = to_floats(s[r][j]);
                if (kind == BYTES) product *= splat(a->scale);
                vf factor = kind == LONG_BYTES ? splat(a->scale) : h.scale[j];
                total[r][j] = fused(product, factor, total[r][j]);
                if (kind != LONG_BYTES && offsets)
                    total[r][j] = fused(h.offset[j], splat(own), total[r][j]);
            }
            if (kind == LONG_BYTES && offsets) activations[r] += own;
        }
        if (is_end) {
            of_sum = shape->per_sum;
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const float of_x = ((const Record *)(from[r] + at))->scale;
                for (int j = 0; j < 2; j++) {
                    float *to = sum + r * TILE + j * VW;
                    vf factor = kind == LONG_BYTES ? h.scale[j] : splat(of_x);
                    vf all = fused(total[r][j], factor, load_f32(to));
                    if (kind == LONG_BYTES && offsets)
                        all = fused(h.offset[j], splat(activations[r]), all);
                    store_f32(to, all);
                    total[r][j] = (vf){0};
                }
                activations[r] = 0;
            }
        }
        if (--left == 0) {
            left = shape->per_group;
            header = data;
            if (zeros) zeros += VW;
            if (zeros && ++group % TOGETHER == 0) {
                zeros = data;
                header = data + VW * TOGETHER;
            }
            data = header + shape->header;
            if (is_few && b + 1 < last) read_first = load_header(header, offsets, is_wide);
        }
    }
    if (kind == BYTES)
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < 2; j++) store_f32(sum + r * TILE + j * VW, total[r][j]);
}

#define QUANTIZED_KERNEL(ROWS, KIND)                                                             \
    KERNEL void codes_##KIND##_##ROWS(float *sum, const char *x, int64_t stride,                 \
                                      const char *panel, int64_t first, int64_t last,            \
                                      const Shape *shape, const char *next, int64_t lines) {     \
        multiply_codes(sum, x, stride, panel, first, last, shape, next, lines, ROWS, KIND);      \
    }
#define QUANTIZED_KERNELS(ROWS) \
    QUANTIZED_KERNEL(ROWS, NIBBLES) QUANTIZED_KERNEL(ROWS, LOOKED_UP) \
    QUANTIZED_KERNEL(ROWS, SIXES) QUANTIZED_KERNEL(ROWS, BYTES) QUANTIZED_KERNEL(ROWS, LONG_BYTES)
#define CODES(KIND, ROWS) codes_##KIND##_##ROWS

QUANTIZED_KERNELS(1) QUANTIZED_KERNELS(2) QUANTIZED_KERNELS(3) QUANTIZED_KERNELS(4)
#if ROWS_MAX >= 8
QUANTIZED_KERNELS(5) QUANTIZED_KERNELS(6) QUANTIZED_KERNELS(7) QUANTIZED_KERNELS(8)
#define CODES_UP_TO_MAX(K) \
    {0, CODES(K, 1), CODES(K, 2), CODES(K, 3), CODES(K, 4), CODES(K, 5), CODES(K, 6), CODES(K, 7), \
     CODES(K, 8)}
#else
#define CODES_UP_TO_MAX(K) {0, CODES(K, 1), CODES(K, 2), CODES(K, 3), CODES(K, 4)}
#endif
static QuantizedKernel *const codes_rows[KINDS][ROWS_MAX + 1] = {
    CODES_UP_TO_MAX(NIBBLES), CODES_UP_TO_MAX(LOOKED_UP), CODES_UP_TO_MAX(SIXES),
    CODES_UP_TO_MAX(BYTES), CODES_UP_TO_MAX(LONG_BYTES)};

static void quantized_panel(const Op *op, const Shape *shape, int64_t panel, int64_t from,
                            int64_t rows, float *sum) {
    int kind = op->p[4] ? LOOKED_UP : NIBBLES;
    if (shape->form & SIX_BITS) kind = SIXES;
    if (shape->form & EIGHT_BITS) kind = shape->per_sum > 1 ? LONG_BYTES : BYTES;
    int64_t passes = divide_up(rows, AT_ONCE);
    int64_t depth = shape->blocks;
    if (passes > 1) /* whole spans, so that sums are rounded as they are in a single pass */
        depth = min_int(depth, divide_up(DEPTH_BYTES / shape->block_bytes, shape->per_sum) *
                                   shape->per_sum);
    const char *w = (const char *)op->p[1] + panel * shape->panel_bytes;
    const char *x = (const char *)op->p[0] + from * op->n[2];
    int64_t bytes = divide_up(shape->panel_bytes * depth, shape->blocks), read = 0;
    int64_t fetching = min_int(passes, FETCHING), share = passes == 1 ? 0 : bytes / fetching;
    int64_t lines = rows == 1 ? 0 : divide_up(divide_up(bytes, 64 * fetching), depth);
    memset(sum, 0, (size_t)(rows * TILE) * sizeof(float));
    for (int64_t b = 0; b < shape->blocks; b += depth, read += bytes) {
        const char *next = w + read + (passes == 1 ? AHEAD : bytes);
        for (int64_t row = 0, pass = 0, end; pass < passes; row = end, pass++) {
            end = rows * (pass + 1) / passes;
            codes_rows[kind][end - row](sum + row * TILE, x + row * op->n[2], op->n[2], w, b,
                                        min_int(b + depth, shape->blocks), shape,
                                        next + share * pass, pass < fetching ? lines : 0);
        }
    }
    finish(op, sum, rows, from, panel, op->dtype);
}

static void quantized_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    int64_t rows = step->counts[op->count], panels = divide_up(op->n[1], TILE);
    int64_t at_once = panels_at_once(op, step, me->threads);
    int64_t first = chunk * at_once, last = min_int(panels, first + at_once);
    Shape shape = shape_of(op);
    int64_t block = rows_at_once(op->n[2]);
    for (int64_t row = 0; row < rows; row += block)
        for (int64_t panel = first; panel < last; panel++)
            quantized_panel(op, &shape, panel, row, min_int(rows - row, block),
                            (float *)me->scratch);
}
