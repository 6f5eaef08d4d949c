/* Attention of few queries over keys and values in bfloat16, by the dot product of pairs of them; part
 * of attention.c, which has the rest: tiles, addresses, the softmax. Keys are packed into a panel as
 * linear.c's weights are; codes are widened before.
 */

INLINE int is_in_pairs(int dtype) { return HAS_DOT && dtype == BF16; }

#if HAS_DOT
/* Whether the keys' codes are multiplied in pairs of elements 0 and 2, 1 and 3 of every four. */
INLINE int is_apart(int kind, int64_t D) { return HAS_LOOKUP && kind && D % 64 == 0; }

INLINE void take_pair_query(const Tile *tile, int64_t row, const void *x, int64_t D, int kind) {
    bf16 *to = (bf16 *)tile->q + row * D;
    memcpy(to, x, D * 2);
    if (!is_apart(kind, D)) return;
    for (bf16 *q = to; q < to + D; q += 4) {
        bf16 second = q[1];
        q[1] = q[2], q[2] = second;
    }
}

/* TILE keys -> a panel [D / 2][TILE][2]; fetches those of `next`. */
INLINE void pack_keys(char *panel, const char *const *keys, const char *const *next, int64_t D) {
    const int64_t words = D / 2; /* of 4 bytes */
    if (D % 32 == 0) {
        for (int half = 0; half < 2; half++)
            for (int64_t d = 0; d < words; d += VW) {
                vi row[VW];
                for (int i = 0; i < VW; i++) {
                    row[i] = load_i32(keys[half * VW + i] + d * 4);
                    /* a running pointer is faster in the cache and slower from memory */
                    const int64_t line = half * words + d + i;
                    fetch(next[line / (words / 16)] + line % (words / 16) * 64);
                }
                transpose(row);
                for (int i = 0; i < VW; i++)
                    store_i32(panel + ((d + i) * 2 + half) * VW * 4, row[i]);
            }
        return;
    }
    for (int i = 0; i < TILE; i++)
        for (int64_t b = 0; b < D * 2; b += 64) fetch(next[i] + b);
    for (int64_t d = 0; d < D; d++)
        for (int i = 0; i < TILE; i++)
            memcpy(panel + ((d / 2 * TILE + i) * 2 + d % 2) * 2, keys[i] + d * 2, 2);
    for (int i = 0; D % 2 && i < TILE; i++)
        memset(panel + ((D / 2 * TILE + i) * 2 + 1) * 2, 0, 2);
}

/* Codes of TILE keys -> a panel; fetches `next`. */
INLINE void pack_codes(const Tile *tile, const Keys *keys, const Keys *next, int64_t D, int kind) {
#if HAS_LOOKUP
    if (is_apart(kind, D)) {
        for (int half = 0; half < 2; half++)
            for (int64_t d = 0; d < D; d += 64) {
                vi row[16];
                __m512i pairs[2];
                for (int i = 0; i < 16; i++) {
                    row[i] = load_i32(keys->key[half * 16 + i] + d);
                    fetch(next->key[half * 16 + i] + d);
                }
                transpose(row);
                for (int i = 0; i < 16; i++) {
                    char *to = tile->panel + ((d / 2 + 2 * i) * 2 + half) * 64;
                    widen_apart((__m512i)row[i], pairs, kind);
                    _mm512_storeu_si512(to, pairs[0]);
                    _mm512_storeu_si512(to + 128, pairs[1]);
                }
            }
        return;
    }
#endif
    const char *widened[TILE];
    widen_tile(tile->keys, widened, keys, next, 0, tile->wide, D, kind, BF16);
    pack_keys(tile->panel, widened, widened, D);
}

/* sum[row][:] += weights[row][:] @ values, `tiles` of TILE columns at a time; fetches `next`. Two tokens
 * are taken at once, with weights in bfloat16, and the columns of a tile are in the order in which the
 * unpacking leaves them (see `settle`). */
INLINE void add_pairs(const Tile *tile, int rows, int tiles, int64_t row,
                      const char *const *values, const char *const *next) {
    float *to = tile->sum + row * tile->wide;
    for (int64_t c = 0; c < tile->wide; c += tiles * TILE) {
        vf sum[8][4];
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < 2 * tiles; j++)
                sum[r][j] = load_f32(to + r * tile->wide + c + j * VW);
        for (int k = 0; k < TILE; k += 2) {
            if (next)
                for (int b = 0; b < tiles * TILE * 2; b += 64) {
                    fetch(next[k] + c * 2 + b);
                    fetch(next[k + 1] + c * 2 + b);
                }
#pragma GCC unroll 2
            for (int j = 0; j < tiles; j++) {
                int64_t column = (c + j * TILE) * 2;
                __m512i one = _mm512_loadu_si512(values[k] + column);
                __m512i two = _mm512_loadu_si512(values[k + 1] + column);
                __m512bh low = (__m512bh)_mm512_unpacklo_epi16(one, two);
                __m512bh high = (__m512bh)_mm512_unpackhi_epi16(one, two);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    const bf16 *weight = (const bf16 *)tile->weights + (row + r) * TILE + k;
                    __m512bh pair = (__m512bh)_mm512_set1_epi32(*(const int_any *)weight);
                    vf *s = &sum[r][2 * j];
                    s[0] = (vf)_mm512_dpbf16_ps((__m512)s[0], low, pair);
                    s[1] = (vf)_mm512_dpbf16_ps((__m512)s[1], high, pair);
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < 2 * tiles; j++)
                store_f32(to + r * tile->wide + c + j * VW, sum[r][j]);
    }
}

/* Put the columns of a query's sums, which add_pairs left interleaved, in order. */
INLINE void settle(float *sum, int64_t wide) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int64_t c = 0; c < wide; c += TILE) {
        __m512 low = _mm512_load_ps(sum + c), high = _mm512_load_ps(sum + c + VW);
        _mm512_store_ps(sum + c, _mm512_permutex2var_ps(low, first, high));
        _mm512_store_ps(sum + c + VW, _mm512_permutex2var_ps(low, second, high));
    }
}

#define ADD(ROWS, TILES)                                                               \
    for (; tile->wide % (TILES * TILE) == 0 && r + ROWS <= rows; r += ROWS)             \
        add_pairs(tile, ROWS, TILES, r, values, r ? 0 : fetched);

/* As attend_keys. */
INLINE void attend_pairs(const Op *op, const Tile *tile, const Keys *keys, const Keys *next,
                         int64_t start) {
    const char *values[TILE], *next_values[TILE];
    const int64_t D = op->n[2], rows = tile->queries * tile->share;
    const int64_t further = values_further(op, BF16);
    int64_t r = 0;
    if (op->flags) {
        take_code_scales(op, tile, keys, next, BF16);
        if (op->flags == INT8) {
            pack_codes(tile, keys, next, D, INT8);
            widen_tile(tile->values, values, keys, next, further, tile->wide, D, INT8, BF16);
        } else {
            pack_codes(tile, keys, next, D, FP8);
            widen_tile(tile->values, values, keys, next, further, tile->wide, D, FP8, BF16);
        }
    } else {
        pack_keys(tile->panel, keys->key, next->key, D);
        find_tile(tile->values, values, keys, further, tile->wide, D, 2);
        for (int i = 0; i < TILE; i++) next_values[i] = next->key[i] + further;
    }
    for (; r < rows; r += ROWS_MAX)
        multiply_rows[BF16][min_int(ROWS_MAX, rows - r)](tile->scores + r * TILE, 1, tile->q + r * D * 2,
                                                        D, tile->panel, D, 0, 0);
    for (r = 0; r < rows; r++) soften(op, tile, r, start, BF16);
    const char *const *fetched = op->flags ? 0 : next_values;
    r = 0;
    ADD(8, 1)
    ADD(4, 1)
    ADD(2, 2)
    ADD(1, 2)
    ADD(2, 1)
    ADD(1, 1)
}
#undef ADD
#else /* never called */
INLINE void take_pair_query(const Tile *tile, int64_t row, const void *x, int64_t D, int kind) {
    (void)tile, (void)row, (void)x, (void)D, (void)kind;
}
INLINE void settle(float *sum, int64_t wide) { (void)sum, (void)wide; }
INLINE void attend_pairs(const Op *op, const Tile *tile, const Keys *keys, const Keys *next,
                         int64_t start) {
    (void)op, (void)tile, (void)keys, (void)next, (void)start;
}
#endif
