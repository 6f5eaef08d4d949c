/* Attention in float32 over keys and values as they lie in the pool; part of attention.c, which has the
 * rest: tiles, addresses, the softmax. For models in float32, and for bfloat16 on every CPU without a
 * dot product of it.
 *
 * A query and a key are multiplied lane by lane, and the lanes of VW such sums are added up together:
 * no key is packed. bfloat16 is widened by a shift and a mask, which take the even and the odd elements
 * of TILE apart: queries and sums are in that order, too. Many queries have codes widened before. What
 * packing keys took, and why lines are fetched as they are: docs/kernels.md.
 */

/* What keys and values are: F32, BF16, or codes. */
enum { CODES_INT8 = BF16 + INT8, CODES_FP8 = BF16 + FP8 };

INLINE int64_t element_bytes(int type) { return type == F32 ? 4 : type == BF16 ? 2 : 1; }

/* Whether even and odd elements are apart. */
INLINE int is_halved(int kind, int dtype) {
    return kind == PLAIN && dtype == BF16 && !is_in_pairs(dtype);
}

/* TILE elements; of bfloat16 the even and the odd ones. */
INLINE void take_elements(vf x[2], const char *from, int type) {
    if (type == BF16) {
        const vu both = (vu)load_i32(from);
        x[0] = (vf)(both << 16), x[1] = (vf)(both & 0xffff0000);
        return;
    }
    for (int j = 0; j < 2; j++)
        x[j] = type == F32 ? load_f32((const float *)from + j * VW)
                           : value_of(load_bytes(from + j * VW), type - BF16);
}

/* x [D] -> a query [wide]. */
INLINE void take_float_query(const Tile *tile, int64_t row, const void *x, int64_t D, int kind,
                             int dtype) {
    float *to = (float *)tile->q + row * tile->wide;
    for (int64_t d = 0; d < tile->wide; d += TILE, to += TILE) {
        char some[TILE * 4] = {0};
        vf part[2];
        memcpy(some, at(x, d, dtype), (size_t)(min_int(TILE, D - d) * size_of(dtype)));
        if (is_halved(kind, dtype)) take_elements(part, some, BF16);
        else
            for (int j = 0; j < 2; j++) part[j] = load(some, j * VW, dtype);
        for (int j = 0; j < 2; j++) store_f32(to + j * VW, part[j]);
    }
}

/* sum [wide] * factor -> element `to` of out. */
INLINE void put_floats(void *out, int64_t to, const float *sum, float factor, int64_t D, int kind,
                       int dtype) {
    int64_t d = 0;
    if (is_halved(kind, dtype)) {
        for (; d + TILE <= D; d += TILE) {
            vu even = round_bf16(load_f32(sum + d) * factor);
            vu odd = round_bf16(load_f32(sum + d + VW) * factor);
            store_i32(at(out, to + d, BF16), (vi)(even >> 16 | (odd & 0xffff0000)));
        }
        for (int64_t i = 0; d + i < D; i++)
            store_one(out, to + d + i, sum[d + i % 2 * VW + i / 2] * factor, BF16);
        return;
    }
    for (; d + VW <= D; d += VW) store(out, to + d, load_f32(sum + d) * factor, dtype);
    for (; d < D; d++) store_one(out, to + d, sum[d] * factor, dtype);
}

/* TILE keys or values, and those that are fetched meanwhile, if any, in the order of their addresses, in
 * which the hardware fetches along; `bytes` of each token. */
typedef struct {
    const char *from[TILE], *next[TILE];
    int64_t bytes;
    int is_next;
} Side;

/* Products of `rows` queries with TILE keys -> scores [rows][TILE]. As many sums at once as registers
 * hold: a sum waits for itself. */
INLINE void score_floats(float *scores, const float *q, int64_t wide, const Side *keys, int fetches,
                         int rows, int type) {
    const int at_once = (int)min_int(VW, rows == 1 ? 8 : 4);
    const int64_t ahead = at_once * element_bytes(type); /* bytes to fetch for an element of all */
    for (int first = 0; first < TILE; first += VW) {
        vf sums[3][VW];
        for (int k = 0; k < VW; k += at_once) {
            vf s[3][8] = {{{0}}};
            const char *from[8], *next = keys->next[first + k];
            for (int i = 0; i < at_once; i++) from[i] = keys->from[first + k + i];
            for (int64_t d = 0; d < wide; d += TILE) {
                vf y[3][2];
                if (fetches)
                    for (int64_t b = 0; b < TILE * ahead; b += 64) fetch(next + d * ahead + b);
                for (int r = 0; r < rows; r++)
                    for (int j = 0; j < 2; j++) y[r][j] = load_f32(q + r * wide + d + j * VW);
#pragma GCC unroll 8
                for (int i = 0; i < at_once; i++) {
                    vf x[2];
                    take_elements(x, from[i] + d * element_bytes(type), type);
                    for (int j = 0; j < 2; j++)
                        for (int r = 0; r < rows; r++) s[r][i] = fused(x[j], y[r][j], s[r][i]);
                }
            }
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < at_once; i++) sums[r][k + i] = s[r][i];
        }
        for (int r = 0; r < rows; r++)
            store_f32(scores + r * TILE + first, sums_of_lanes(sums[r]));
    }
}

#define SCORE(ROWS)                                                                           \
    (score_floats(tile->scores + r * TILE, (const float *)tile->q + r * tile->wide, tile->wide, \
                  keys, keys->is_next && !r, ROWS, type),                                    \
     r += ROWS)

/* Scores of all queries. */
INLINE void score_all_floats(const Tile *tile, const Side *keys, int type) {
    const int64_t rows = tile->queries * tile->share;
    int64_t r = 0;
    while (rows - r == 3 || rows - r > 4) SCORE(3);
    while (rows - r > 1) SCORE(2);
    if (rows > r) SCORE(1);
}
#undef SCORE

#define TOKENS_AT_ONCE 4 /* between two times that lines are fetched */

/* sum[row][:] += weights[row][:] @ values, `tiles` of TILE columns at a time. */
INLINE void add_floats(const Tile *tile, int64_t row, const Side *values, int fetches, int rows,
                       int tiles, int type) {
    const float *weights = (const float *)tile->weights + row * TILE;
    float *to = tile->sum + row * tile->wide;
    const int64_t ahead = tiles * TILE * TOKENS_AT_ONCE * element_bytes(type); /* bytes to fetch */
    int64_t token = 0, line = 0;
    for (int64_t c = 0; c < tile->wide; c += tiles * TILE) {
        const char *next = values->next[token % TILE] + line;
        vf sum[8][8];
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < 2 * tiles; j++)
                sum[r][j] = load_f32(to + r * tile->wide + c + j * VW);
        for (int at = 0; at < TILE; at += TOKENS_AT_ONCE) {
            if (fetches)
                for (int64_t b = 0; b < ahead; b += 64, next += 64) fetch(next);
#pragma GCC unroll 4
            for (int k = at; k < at + TOKENS_AT_ONCE; k++)
#pragma GCC unroll 4
                for (int t = 0; t < tiles; t++) {
                    vf x[2];
                    const int64_t column = c + t * TILE;
                    take_elements(x, values->from[k] + column * element_bytes(type), type);
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) {
                        vf weight = splat(weights[r * TILE + k]);
                        for (int j = 0; j < 2; j++)
                            sum[r][2 * t + j] = fused(x[j], weight, sum[r][2 * t + j]);
                    }
                }
        }
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < 2 * tiles; j++)
                store_f32(to + r * tile->wide + c + j * VW, sum[r][j]);
        for (line += ahead * (TILE / TOKENS_AT_ONCE); line >= values->bytes; line -= values->bytes)
            token++;
    }
}

#define ADD(ROWS, TILES)                                                                      \
    for (; tile->wide % (TILES * TILE) == 0 && r + ROWS <= rows; r += ROWS)                    \
        add_floats(tile, r, values, values->is_next && !r, ROWS, TILES, type);

/* Values of all queries, 8 sums at once, too; vectors of 64 bytes have registers for 16. */
INLINE void add_all_floats(const Tile *tile, const Side *values, int type) {
    const int64_t rows = tile->queries * tile->share;
    int64_t r = 0;
    if (VW == 16) {
        ADD(8, 1)
    }
    ADD(4, 1)
    ADD(2, 2)
    ADD(1, 4)
    ADD(1, 1)
}
#undef ADD

INLINE void compute_floats(const Op *op, const Tile *tile, const Side *keys, const Side *values,
                           int64_t start, int type) {
    score_all_floats(tile, keys, type);
    for (int64_t r = 0; r < tile->queries * tile->share; r++) soften(op, tile, r, start, F32);
    add_all_floats(tile, values, type);
}

#define DIRECT_ROWS 4 /* that widen codes once more each time rather than before */

INLINE void attend_type(const Op *op, const Tile *tile, const Keys *keys, const Keys *next,
                        int64_t start, int dtype, int type) {
    const int64_t D = op->n[2], wide = tile->wide, further = values_further(op, dtype);
    Side sides[2]; /* keys, values */
    const int is_before = type > BF16 && tile->queries * tile->share > DIRECT_ROWS;
    if (type > BF16) take_code_scales(op, tile, keys, next, dtype);
    for (int side = 0; side < 2; side++) {
        Side *to = &sides[side];
        char *own = side ? tile->values : tile->keys;
        to->bytes = D * element_bytes(type);
        to->is_next = !is_before;
        if (is_before) {
            widen_tile(own, to->from, keys, next, side * further, wide, D, type - BF16, F32);
            continue;
        }
        find_tile(own, to->from, keys, side * further, wide, D, element_bytes(type));
        for (int i = 0; i < TILE; i++) to->next[i] = next->key[i] + side * further;
    }
    if (is_before) compute_floats(op, tile, &sides[0], &sides[1], start, F32);
    else compute_floats(op, tile, &sides[0], &sides[1], start, type);
}

/* As attend_keys. */
INLINE void attend_floats(const Op *op, const Tile *tile, const Keys *keys, const Keys *next,
                          int64_t start, int dtype) {
    if (op->flags == INT8) attend_type(op, tile, keys, next, start, dtype, CODES_INT8);
    else if (op->flags == FP8) attend_type(op, tile, keys, next, start, dtype, CODES_FP8);
    else attend_type(op, tile, keys, next, start, dtype, dtype);
}
