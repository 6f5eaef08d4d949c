/* Attention of many queries over keys and values in bfloat16, on a CPU with its dot product; part of
 * attention.c, which has the rest: tiles, addresses, what few queries do.
 *
 * Queries lie across the vectors: they are packed once, keys are read as they lie in the pool, and the
 * softmax takes 16 queries a vector, without adding up lanes. Every number is computed by the same
 * operations in the same order as for few queries, so a query has the same bits in both.
 *
 * 512 queries at 2,048 tokens, 16/8 heads of 128, in turn with keys packed 48 queries at a time: 19.0
 * ms instead of 24.6; all of the next tile fetched at once 20.1; tiles of 32, 64 and 128 queries 19.4,
 * 19.0 and 18.7 (one core of an EPYC Zen 5, CPU time, others at work, 2026-11-23).
 */

/* Whether this many queries are taken across. */
INLINE int is_across(int kind, int64_t rows, int64_t D, int dtype) {
    return HAS_DOT && kind == PLAIN && dtype == BF16 && D % 32 == 0 && rows >= VW;
}

#if HAS_DOT
#define KEYS_AT_ONCE 8
#define TOKEN_PAIRS (TILE / 2) /* of tokens, whose values are multiplied together */

INLINE __m512i *panel_queries(const Tile *tile, int64_t panel, int64_t D) {
    return (__m512i *)(tile->q + panel * D * TILE * 2);
}
INLINE float *panel_sums(const Tile *tile, int64_t panel) {
    return tile->sum + panel * tile->wide * TILE;
}

/* The queries of a tile, whose elements are at `from` -> panels [D / 2][TILE][2]. */
static void take_across(const Tile *tile, const bf16 *const *from, int64_t D) {
    const int64_t rows = tile->queries * tile->share;
    for (int64_t first = 0; first < room_for(rows); first += VW) {
        __m512i *to = panel_queries(tile, first / TILE, D) + first / VW % 2;
        for (int64_t d = 0; d < D; d += 32) {
            vi row[16];
            for (int i = 0; i < 16; i++)
                row[i] = first + i < rows ? load_i32(from[first + i] + d) : (vi){0};
            transpose(row);
            for (int i = 0; i < 16; i++) to[d + 2 * i] = (__m512i)row[i];
        }
    }
}

/* Products of 8 keys with a panel of queries -> scores [8][TILE]; fetches `next`. */
KERNEL void score_across(float *scores, const char *const *key, const char *const *next,
                         const __m512i *queries, int64_t D) {
    __m512 s[KEYS_AT_ONCE][2];
    const char *from[KEYS_AT_ONCE];
    for (int k = 0; k < KEYS_AT_ONCE; k++) {
        from[k] = key[k];
        s[k][0] = s[k][1] = _mm512_setzero_ps();
    }
    for (int64_t d = 0; d < 2 * D; d += 16) {
        if (next) { /* 2 of 8 keys' lines */
            const char *const *at = next + d / 8 % KEYS_AT_ONCE;
            fetch(at[0] + d / 64 * 64);
            fetch(at[1] + d / 64 * 64);
        }
#pragma GCC unroll 4
        for (int u = 0; u < 16; u += 4, queries += 2) {
            __m512bh q0 = (__m512bh)queries[0], q1 = (__m512bh)queries[1];
#pragma GCC unroll 8
            for (int k = 0; k < KEYS_AT_ONCE; k++) {
                __m512bh pair = (__m512bh)_mm512_set1_epi32(*(const int_any *)(from[k] + d + u));
                s[k][0] = _mm512_dpbf16_ps(s[k][0], q0, pair);
                s[k][1] = _mm512_dpbf16_ps(s[k][1], q1, pair);
            }
        }
    }
    for (int k = 0; k < KEYS_AT_ONCE; k++)
        for (int j = 0; j < 2; j++) _mm512_store_ps(scores + k * TILE + j * VW, s[k][j]);
}

/* The positions of 16 queries from `row` on. */
INLINE vi positions_of(const Tile *tile, int64_t row) {
    vi at;
    for (int i = 0; i < VW; i++) at[i] = (int32_t)(tile->first + (row + i) / tile->share);
    return at;
}

/* As limit_scores, of 16 queries from `row` on: scores [TILE][16], TILE apart. */
INLINE void limit_across(const Op *op, const Tile *tile, int64_t row, int64_t start, float *scores) {
    const int64_t window = op->n[7], last = (row + VW - 1) / tile->share;
    const float cap = op->f[1];
    if (cap != 0)
        for (int k = 0; k < TILE; k++) {
            vf x = load_f32(scores + k * TILE) * op->f[0];
            store_f32(scores + k * TILE, cap * tanh_of(x / cap));
        }
    if (start + TILE - 1 <= tile->first + row / tile->share &&
        (!window || start > tile->first + last - window))
        return;
    const vi at = positions_of(tile, row);
    for (int k = 0; k < TILE; k++) {
        vi ahead = (int32_t)(start + k) - at; /* of the query */
        vi hidden = ahead > 0;
        if (window) hidden |= ahead <= (int32_t)-window;
        vf x = choose(hidden, splat(-INFINITY), load_f32(scores + k * TILE));
        store_f32(scores + k * TILE, x);
    }
}

/* The sum of every `step`th of TILE vectors, in the order in which sum_of adds up lanes. */
INLINE vf sum_across(const vf *x) {
    vf part[VW];
    for (int i = 0; i < VW; i++) part[i] = x[i] + x[i + VW];
#pragma GCC unroll 4
    for (int n = VW / 2; n; n /= 2)
        for (int i = 0; i < n; i++) part[i] += part[i + n];
    return part[0];
}

/* As soften, of 16 queries from `row` on -> weights in pairs [TOKEN_PAIRS][16], TILE apart, and what the
 * sums before are multiplied by. */
KERNEL vf soften_across(const Op *op, const Tile *tile, int64_t row, int64_t start, float *scores,
                        int32_t *weights) {
    const float factor = exponent_of(op);
    float *top = tile->top + row, *total = tile->total + row;
    limit_across(op, tile, row, start, scores);
    vf peaks[4], x[TILE];
    for (int i = 0; i < 4; i++) peaks[i] = load_f32(scores + i * TILE);
    for (int k = 4; k < TILE; k += 4)
        for (int i = 0; i < 4; i++)
            peaks[i] = max_of(peaks[i], load_f32(scores + (k + i) * TILE));
    vf before = load_f32(top);
    vf now = max_of(max_of(max_of(peaks[0], peaks[1]), max_of(peaks[2], peaks[3])), before);
    vf kept = exp2_of((before - now) * factor);
    store_f32(top, now);
#pragma GCC unroll 4
    for (int k = 0; k < TILE; k++) x[k] = exp2_of((load_f32(scores + k * TILE) - now) * factor);
    vf sum = load_f32(total);
    store_f32(total, sum * kept + sum_across(x));
    __m512i order = _mm512_or_si512(_mm512_slli_epi32((__m512i)(lane_numbers() + 16), 16),
                                    (__m512i)lane_numbers());
    for (int k = 0; k < TILE; k += 2) {
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)x[k + 1], (__m512)x[k]);
        _mm512_store_si512(weights + k / 2 * TILE, _mm512_permutexvar_epi16(order, both));
    }
    return kept;
}

/* Values of TILE tokens, two tokens a pair [TOKEN_PAIRS][D]; columns are in the order that `settle` undoes.
 */
static void pair_values(int32_t *to, const char *const *values, int64_t D) {
    for (int k = 0; k < TILE; k += 2)
        for (int64_t d = 0; d < D; d += 32, to += 32) {
            __m512i one = _mm512_loadu_si512(values[k] + 2 * d);
            __m512i two = _mm512_loadu_si512(values[k + 1] + 2 * d);
            _mm512_store_si512(to, _mm512_unpacklo_epi16(one, two));
            _mm512_store_si512(to + 16, _mm512_unpackhi_epi16(one, two));
        }
}

/* sums [D][TILE] = sums * kept + values @ weights. */
KERNEL void add_across(float *sums, const int32_t *values, const int32_t *weights, const vf kept[2],
                       int has_risen, const char *const *next, int64_t D) {
    for (int64_t d = 0; d < D; d += 8, sums += 8 * TILE, values += 8) {
        if (next) /* a quarter of a line of each */
            for (int k = 0; k < 8; k++) fetch(next[d % 32 + k] + d / 32 * 64);
        vf s[8][2];
        for (int r = 0; r < 8; r++)
            for (int j = 0; j < 2; j++) s[r][j] = load_f32(sums + r * TILE + j * VW);
        if (has_risen)
            for (int r = 0; r < 8; r++)
                for (int j = 0; j < 2; j++) s[r][j] *= kept[j];
#pragma GCC unroll 4
        for (int k = 0; k < TOKEN_PAIRS; k++) {
            __m512bh w0 = (__m512bh)_mm512_load_si512(weights + k * TILE);
            __m512bh w1 = (__m512bh)_mm512_load_si512(weights + k * TILE + VW);
#pragma GCC unroll 8
            for (int r = 0; r < 8; r++) {
                __m512bh pair = (__m512bh)_mm512_set1_epi32(values[k * D + r]);
                s[r][0] = (vf)_mm512_dpbf16_ps((__m512)s[r][0], w0, pair);
                s[r][1] = (vf)_mm512_dpbf16_ps((__m512)s[r][1], w1, pair);
            }
        }
        for (int r = 0; r < 8; r++)
            for (int j = 0; j < 2; j++) store_f32(sums + r * TILE + j * VW, s[r][j]);
    }
}

/* As attend_keys. Panels whose queries all come before these keys are left out: they would add
 * zeros. */
static void attend_across(const Op *op, const Tile *tile, const Keys *keys, const Keys *next,
                          int64_t start) {
    const int64_t D = op->n[2], rows = tile->queries * tile->share;
    const int64_t further = values_further(op, BF16);
    int32_t *values = (int32_t *)tile->values, *weights = tile->weights;
    const char *value[TILE], *next_value[TILE];
    for (int i = 0; i < TILE; i++) {
        value[i] = keys->key[i] + further;
        next_value[i] = next->key[i] + further;
    }
    pair_values(values, value, D);
    const char *const *fetched = next->key, *const *then = next_value;
    for (int64_t row = 0; row < rows; row += TILE) {
        if (tile->first + min_int(row + TILE - 1, rows - 1) / tile->share < start) continue;
        for (int k = 0; k < TILE; k += KEYS_AT_ONCE)
            score_across(tile->scores + k * TILE, keys->key + k, fetched ? fetched + k : 0,
                         panel_queries(tile, row / TILE, D), D);
        vf kept[2];
        for (int j = 0; j < 2; j++)
            kept[j] = soften_across(op, tile, row + j * VW, start, tile->scores + j * VW,
                                    weights + j * VW);
        __m512 least = _mm512_min_ps((__m512)kept[0], (__m512)kept[1]);
        int has_risen = _mm512_cmp_ps_mask(least, _mm512_set1_ps(1), _CMP_NEQ_UQ) != 0;
        add_across(panel_sums(tile, row / TILE), values, weights, kept, has_risen, then, D);
        fetched = then = 0;
    }
}

/* The sums of a tile over their totals -> out, whose rows are at `to`. */
static void put_across(const Tile *tile, bf16 *const *to, int64_t D) {
    const int64_t rows = tile->queries * tile->share;
    for (int64_t first = 0; first < rows; first += VW) {
        const float *sums = panel_sums(tile, first / TILE) + first % TILE;
        vf factor = 1.0f / load_f32(tile->total + first);
        for (int64_t d = 0; d < D; d += 32) {
            vi low[16], high[16];
            for (int i = 0; i < 16; i++) {
                low[i] = (vi)(load_f32(sums + (d + i) * TILE) * factor);
                high[i] = (vi)(load_f32(sums + (d + 16 + i) * TILE) * factor);
            }
            transpose(low);
            transpose(high);
            for (int i = 0; i < 16 && first + i < rows; i++) {
                _Alignas(64) float sum[TILE];
                store_f32(sum, (vf)low[i]);
                store_f32(sum + VW, (vf)high[i]);
                settle(sum, TILE);
                for (int j = 0; j < 2; j++) store_bf16(to[first + i] + d + j * VW, load_f32(sum + j * VW));
            }
        }
    }
}
#else /* never called */
INLINE void attend_across(const Op *op, const Tile *tile, const Keys *keys, const Keys *next,
                          int64_t start) {
    (void)op, (void)tile, (void)keys, (void)next, (void)start;
}
INLINE void take_across(const Tile *tile, const bf16 *const *from, int64_t D) {
    (void)tile, (void)from, (void)D;
}
INLINE void put_across(const Tile *tile, bf16 *const *to, int64_t D) {
    (void)tile, (void)to, (void)D;
}
#endif
