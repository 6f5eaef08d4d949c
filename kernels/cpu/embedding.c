/* out [T, H] = table[tokens], rows of a table, or of a packed weight.
 *
 *   EMBEDDING       p  tokens (int64 [T]), table (row by row), out;  n  H
 *   DENSE_ROWS      p  tokens, panels of linear.c, out;  n  H
 *   QUANTIZED_ROWS  p  tokens, panels of quantized_linear.c, 0, out, table of codes or 0,
 *                      permutation (int64 [H]) or 0;  n  as there
 */
#include "dot.h"
#include "common.h"

static int64_t embedding_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return max_int(1, step->counts[op->count]);
}

static void embedding_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    if (chunk >= step->counts[op->count]) return;
    const int64_t *tokens = op->p[0];
    int64_t bytes = op->n[0] * size_of(op->dtype);
    memcpy((char *)op->p[2] + chunk * bytes, (const char *)op->p[1] + tokens[chunk] * bytes, bytes);
}

static void dense_rows_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    if (chunk >= step->counts[op->count]) return;
    int64_t token = ((const int64_t *)op->p[0])[chunk], H = op->n[0], size = size_of(op->dtype);
    int64_t each = op->dtype == BF16 ? 2 : 1; /* numbers that lie together */
    const char *from = (const char *)op->p[1] + token / TILE * panel_bytes(H, op->dtype);
    char *to = (char *)op->p[2] + chunk * H * size;
    from += token % TILE * each * size;
    for (int64_t k = 0; k < H; k += each, from += TILE * each * size)
        memcpy(to + k * size, from, (size_t)(min_int(each, H - k) * size));
}

INLINE float scale_at(const char *p, int64_t i, int is_wide) {
    float all[VW];
    store_f32(all, load_scales(p + i / VW * VW * (is_wide ? 4 : 2), is_wide));
    return all[i % VW];
}

/* Code i of 16. */
INLINE int code_at(const uint8_t *codes, int64_t i, int bits) {
    if (bits == 8) return codes[i / 4 * TILE * 4 + i % 4];
    int both = codes[i / 8 * TILE * 4 + i % 4], code = i % 8 < 4 ? both & 15 : both >> 4;
    if (bits == 6) code |= (codes[TILE * 8 + i % 4] >> i / 4 * 2 & 3) << 4;
    return code;
}

static void quantized_rows_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    if (chunk >= step->counts[op->count]) return;
    Shape shape = shape_of(op);
    int64_t token = ((const int64_t *)op->p[0])[chunk], H = op->n[0], j = token % TILE;
    const char *panel = (const char *)op->p[1] + token / TILE * shape.panel_bytes;
    const uint8_t *table = op->p[4];
    const int64_t *order = op->p[5];
    int is_wide = shape.form & WIDE_SCALES, bits = bits_of(shape.form);
    int64_t group = shape.per_group * shape.block;
    for (int64_t k = 0, g = 0; k < H; g++) {
        const char *from = panel + group_at(&shape, g);
        float scale = scale_at(from, j, is_wide), offset = 0.0f;
        int zero = shape.zero;
        if (shape.form & OFFSETS) offset = scale_at(from + shape.header / 2, j, is_wide);
        if (shape.form & ZEROS) zero = panel[zeros_at(&shape, g) + j % VW] >> j / VW * 4 & 15;
        for (int64_t end = min_int(H, k + group), first = k; k < end; k++) {
            int64_t i = k - first;
            const char *codes = from + shape.header + i / 16 * TILE * 2 * bits;
            int code = code_at((const uint8_t *)codes + 4 * j, i % 16, bits);
            if (table) code = table[code];
            float w = scale * (float)(code - zero) + offset;
            store_one(op->p[3], chunk * H + (order ? order[k] : k), w, op->dtype);
        }
    }
}
