/* Attention over INT8 keys and values by integers, for a model in bfloat16 on a CPU with AVX512-VNNI;
 * part of attention.c, which has the rest: tiles, addresses, what is masked.
 *
 * A query becomes integers of 16 bits with a scale of its own, and so do a tile's weights of the
 * softmax times the scales of their values: what that rounds is a hundredth of what bfloat16 does.
 * A value's scale is a power of 2, whose exponent is added to the score, times a rest from 1 to 2:
 * so integers are of the largest product, and one large scale takes no bits from other values.
 * High and low bytes are multiplied apart, sums are exact, and once a tile they are scaled and added
 * in float. So neither the number of queries nor the order within a tile makes a difference, and no
 * code is widened: few queries multiply keys as they lie in memory, many a panel of them.
 *
 * A tile of 32 keys of 128 with its data in cache, 1, 2, 4 and 8 queries: 141, 194, 354 and 643 ns;
 * widened to bfloat16 434, 448, 535 and 711. 512 queries of a prompt 4.7 ms and 4.3. One core of an
 * EPYC Zen 5, CPU time, 2026-11-23. With a branch where the maximum rises a prompt took 5.1.
 */

#if HAS_DOT && HAS_LOOKUP && defined(DOT_VNNI)
#define HAS_WHOLE 1
#else
#define HAS_WHOLE 0
#endif

#define WHOLE_MAX 512    /* the largest D: sums stay below 2**31 */
#define QUERY_TOP 32512.0f  /* 127 * 256: the high byte of a query has a sign */
#define WEIGHT_TOP 65280.0f /* 255 * 256: weights have none */
#define FEW_QUERIES 4    /* that multiply keys as they lie */

/* Whether keys and values of this kind are multiplied as integers. */
INLINE int is_whole(int kind, int64_t D, int dtype) {
    return HAS_WHOLE && kind == INT8 && dtype == BF16 && D % 64 == 0 && D <= WHOLE_MAX;
}

#if HAS_WHOLE
/* Beside the integers of a query: their scale times the scores', and their sum times 128, by which a
 * product is too large since codes are multiplied as unsigned numbers, 128 above themselves. */
typedef struct {
    float scale;
    int32_t excess;
} Query;

/* Beside the integers of a tile's weights: what the sums before are multiplied by, and they are. */
typedef struct {
    int8_t high[TILE], low[TILE];
    float kept, scale;
} Weights;

/* The scales of TILE tokens, values' apart: the exponents of powers of 2, what these are divided
 * by, and the rest, 1 to 2, times the unit of integers. */
typedef struct {
    vf keys[2], logs[2], inverse[2], rest[2];
} Scales;

INLINE const int8_t *high_of(const Tile *tile, int64_t row, int64_t D) {
    return (const int8_t *)tile->q + row * 2 * D;
}
INLINE Query *query_of(const Tile *tile, int64_t row, int64_t D) {
    return (Query *)(tile->q + tile->queries * tile->share * 2 * D) + row;
}
INLINE Weights *weights_of(const Tile *tile, int64_t row) {
    return (Weights *)((char *)tile->weights + row * TILE * 4);
}

/* x [D] -> the integers of a query: high bytes [D], low bytes [D]. What is not finite makes the
 * scale NaN. */
static void take_whole_query(const Tile *tile, int64_t row, const bf16 *x, int64_t D, float scale) {
    int8_t *to = (int8_t *)high_of(tile, row, D);
    float peak = peak_of(x, 0, D, BF16), unit = peak * (1.0f / QUERY_TOP);
    float inverse = unit < MIN_SCALE ? 0.0f : 1.0f / unit;
    if (!(peak < INFINITY)) unit = NAN, inverse = 0.0f;
    vi sum = {0};
    for (int64_t d = 0; d < D; d += VW) {
        vi whole = to_nearest(load_bf16(x + d) * splat(inverse));
        store_bytes(to + d, (whole + 128) >> 8);
        store_bytes(to + D + d, whole);
        sum += whole;
    }
    Query *query = query_of(tile, row, D);
    query->scale = unit * scale;
    query->excess = (int32_t)(128u * (uint32_t)sum_of_ints(sum)); /* NaN's sum has no bound */
}

/* 16 scales from their addresses; one that is not finite becomes NaN, whatever its codes are. */
INLINE vf scales_at(const char *const *scale, int64_t further) {
    float some[VW];
    const float *from = (const float *)(scale[0] + further);
    if (scale[VW - 1] - scale[0] != (VW - 1) * 4) { /* of several blocks, or the last one's again */
        for (int i = 0; i < VW; i++) memcpy(some + i, scale[i] + further, 4);
        from = some;
    }
    vf x = load_f32(from);
    return x + x * 0.0f;
}

INLINE Scales take_scales(const Keys *keys, const Keys *next, int64_t further) {
    Scales s;
    for (int j = 0; j < 2; j++) {
        s.keys[j] = scales_at(keys->scale + j * VW, 0);
        vf value = scales_at(keys->scale + j * VW, further);
        vi bits = (vi)max_of(value, splat(MIN_SCALE)), power = (bits >> 23) - 127;
        s.logs[j] = __builtin_convertvector(power, vf) + value * 0.0f; /* a NaN stays */
        s.inverse[j] = (vf)((127 - power) << 23);
        s.rest[j] = (vf)((bits & 0x7fffff) | 0x3f800000) * (WEIGHT_TOP / 2);
        fetch(next->scale[j * VW]);
        fetch(next->scale[j * VW] + further);
    }
    return s;
}

/* Each of 4 vectors' lanes added up within 128 bits: lanes 0 to 3 of these are of vectors 0 to 3. */
INLINE vi add_four(const vi x[4]) {
    const __m512i *y = (const __m512i *)x;
    __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(y[0], y[1]),
                                 _mm512_unpackhi_epi32(y[0], y[1]));
    __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(y[2], y[3]),
                                 _mm512_unpackhi_epi32(y[2], y[3]));
    return (vi)_mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}
/* Of two such, then of two of these: the whole sums of 16 vectors, in order. */
INLINE vi add_halves(vi a, vi b) {
    return (vi)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0x88) +
           (vi)_mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0xdd);
}

/* Products of `rows` queries from `row` on with the codes of TILE keys, `pieces` of 64; fetches
 * `next`. Inlined with a constant for rows, and mostly for pieces. */
INLINE void score_few(const Tile *tile, int64_t row, const Keys *keys, const Keys *next,
                      int64_t pieces, int rows) {
    const int8_t *queries = high_of(tile, row, 64 * pieces);
    int32_t *scores = (int32_t *)tile->scores + row * TILE;
    int half = 0;
    do {
        vi fours[2][4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            vi each[2][4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const char *key = keys->key[half + i * 4 + j];
                const char *fetched = next->key[half + i * 4 + j];
                vi high[2] = {{0}}, low[2] = {{0}};
                int64_t p = 0;
                do {
                    vi codes = load_i32(key + 64 * p) ^ (int32_t)0x80808080;
                    if (!row) fetch(fetched + 64 * p);
#pragma GCC unroll 2
                    for (int r = 0; r < rows; r++) {
                        const int8_t *query = queries + (r * 2 * pieces + p) * 64;
                        high[r] = DOT_VNNI(high[r], codes, load_i32(query));
                        low[r] = DOT_VNNI(low[r], codes, load_i32(query + pieces * 64));
                    }
                } while (++p < pieces);
#pragma GCC unroll 2
                for (int r = 0; r < rows; r++) each[r][j] = (high[r] << 8) + low[r];
            }
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++) fours[r][i] = add_four(each[r]);
        }
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) {
            vi a = add_halves(fours[r][0], fours[r][1]), b = add_halves(fours[r][2], fours[r][3]);
            store_i32(scores + r * TILE + half, add_halves(a, b));
        }
        half += VW;
    } while (half < TILE);
}

/* Codes of TILE keys -> a panel [D / 4][TILE][4]; fetches `next`. */
static void pack_whole_keys(const Tile *tile, const Keys *keys, const Keys *next, int64_t D) {
    for (int half = 0; half < 2; half++)
        for (int64_t d = 0; d < D; d += 64) {
            vi row[16];
            for (int i = 0; i < 16; i++) {
                row[i] = load_i32(keys->key[half * 16 + i] + d) ^ (int32_t)0x80808080;
                fetch(next->key[half * 16 + i] + d);
            }
            transpose(row);
            for (int i = 0; i < 16; i++)
                store_i32(tile->panel + ((d / 4 + i) * 2 + half) * 64, row[i]);
        }
}

/* Products of `rows` queries from `row` on with a panel of keys. */
INLINE void score_many(const Tile *tile, int64_t row, int64_t D, int rows) {
    vi high[4][2], low[4][2];
    const int8_t *query = high_of(tile, row, D);
    const char *panel = tile->panel, *end = panel + D * TILE;
    int32_t *scores = (int32_t *)tile->scores + row * TILE;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2; j++) high[r][j] = low[r][j] = (vi){0};
    do {
        vi w[2] = {load_i32(panel), load_i32(panel + 64)};
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            vi a = splat_i(*(const int_any *)(query + r * 2 * D));
            vi b = splat_i(*(const int_any *)(query + (r * 2 + 1) * D));
            high[r][0] = DOT_VNNI(high[r][0], w[0], a);
            low[r][0] = DOT_VNNI(low[r][0], w[0], b);
            high[r][1] = DOT_VNNI(high[r][1], w[1], a);
            low[r][1] = DOT_VNNI(low[r][1], w[1], b);
        }
        panel += 128, query += 4;
    } while (panel < end);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 2; j++)
            store_i32(scores + r * TILE + j * VW, (vi)(((vu)high[r][j] << 8) + (vu)low[r][j]));
}

KERNEL void score_few_1(const Tile *t, int64_t row, const Keys *k, const Keys *next, int64_t D) {
    if (D == 128) score_few(t, row, k, next, 2, 1);
    else if (D == 64) score_few(t, row, k, next, 1, 1);
    else score_few(t, row, k, next, D / 64, 1);
}
KERNEL void score_few_2(const Tile *t, int64_t row, const Keys *k, const Keys *next, int64_t D) {
    if (D == 128) score_few(t, row, k, next, 2, 2);
    else if (D == 64) score_few(t, row, k, next, 1, 2);
    else score_few(t, row, k, next, D / 64, 2);
}
KERNEL void score_many_1(const Tile *t, int64_t row, int64_t D) { score_many(t, row, D, 1); }
KERNEL void score_many_4(const Tile *t, int64_t row, int64_t D) { score_many(t, row, D, 4); }

/* Where the second and then the lowest bytes of the integers of two vectors are. */
static _Alignas(64) uint8_t apart[64];

__attribute__((constructor)) static void fill_apart(void) {
    for (int i = 0; i < 64; i++) apart[i] = (uint8_t)(i % 32 * 4 + (i < 32));
}

/* Scores of TILE keys from `start` on -> the integers of their weights, which are of the tile's own
 * maximum; the running maximum, which logarithms are part of, and sum follow. One function for all,
 * so that all have the same bits. */
KERNEL void soften_whole(const Op *op, const Tile *tile, int64_t row, int64_t start,
                         const Scales *scales) {
    const Query *query = query_of(tile, row, op->n[2]);
    const vi *scores = (const vi *)tile->scores + row * 2;
    Weights *weights = weights_of(tile, row);
    vf x[2], y[2];
    for (int j = 0; j < 2; j++) {
        vi product = (vi)_mm512_sub_epi32((__m512i)scores[j], _mm512_set1_epi32(query->excess));
        x[j] = __builtin_convertvector(product, vf) * query->scale * scales->keys[j];
    }
    int is_limited = limit_scores(op, tile, row, start, x);
    if (op->f[1] != 0)
        for (int j = 0; j < 2; j++) x[j] *= LOG2_E;
    for (int j = 0; j < 2; j++) y[j] = x[j] + scales->logs[j];
    if (is_limited) /* what it does not see makes no difference */
        for (int j = 0; j < 2; j++) y[j] = choose(x[j] == -INFINITY, x[j], y[j]);
    float peak = largest_of(max_of(y[0], y[1])), before = tile->top[row];
    peak = peak > FLOOR ? peak : FLOOR;
    __m128 both = _mm_unpacklo_ps(_mm_set_ss(before), _mm_set_ss(peak));
    float top = _mm_cvtss_f32(_mm_max_ss(_mm_set_ss(peak), _mm_set_ss(before)));
    both = _mm_sub_ps(both, _mm_set1_ps(top)); /* without a branch, which would be a coin's throw */
    both = _mm512_castps512_ps128((__m512)exp2_of((vf)_mm512_zextps128_ps512(both)));
    float kept = _mm_cvtss_f32(both), share = _mm_cvtss_f32(_mm_movehdup_ps(both));
    vf a = exp2_of(y[0] - peak), b = exp2_of(y[1] - peak);
    tile->top[row] = top;
    float sum = sum_of(a * scales->inverse[0] + b * scales->inverse[1]);
    tile->total[row] = fmaf(tile->total[row], kept, share * sum);
    weights->kept = kept;
    weights->scale = share * (2 / WEIGHT_TOP);
    __m512i first = (__m512i)to_nearest(a * scales->rest[0]);
    __m512i second = (__m512i)to_nearest(b * scales->rest[1]);
    first = _mm512_permutex2var_epi8(first, _mm512_load_si512(apart), second);
    _mm512_storeu_si512(weights->high, first);
}

/* 64 codes of 4 tokens -> 4 codes of each column; `settle_whole` undoes the columns' order. */
INLINE void interleave(vi out[4], const char *const *key, int64_t further) {
    __m512i x[4];
    for (int i = 0; i < 4; i++) x[i] = _mm512_loadu_si512(key[i] + further);
    __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpackhi_epi8(x[0], x[1]);
    __m512i c = _mm512_unpacklo_epi8(x[2], x[3]), d = _mm512_unpackhi_epi8(x[2], x[3]);
    out[0] = (vi)_mm512_unpacklo_epi16(a, c), out[1] = (vi)_mm512_unpackhi_epi16(a, c);
    out[2] = (vi)_mm512_unpacklo_epi16(b, d), out[3] = (vi)_mm512_unpackhi_epi16(b, d);
}

/* The values of TILE tokens, interleaved: [D / 64][TILE / 4][4] vectors. */
static void pack_whole_values(const Tile *tile, const Keys *keys, const Keys *next, int64_t further,
                              int64_t D) {
    char *to = tile->values;
    for (int64_t d = 0; d < D; d += 64)
        for (int k = 0; k < TILE; k += 4, to += 256) {
            vi four[4];
            interleave(four, keys->key + k, further + d);
            for (int i = 0; i < 4; i++) {
                store_i32(to + 64 * i, four[i]);
                fetch(next->key[k + i] + further + d);
            }
        }
}

/* sum[row][:] = sum * kept + weights @ values, for `rows` queries; without `next` the values are
 * those that pack_whole_values left, else they are fetched too. */
INLINE void add_whole(const Tile *tile, int64_t row, const Keys *keys, const Keys *next,
                      int64_t further, int rows) {
    const char *packed = tile->values;
    for (int64_t d = 0; d < tile->wide; d += 64) {
        vi high[2][4], low[2][4];
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < 4; i++) high[r][i] = low[r][i] = (vi){0};
        int k = 0;
        do {
            vi four[4];
            if (next) interleave(four, keys->key + k, further + d);
            for (int i = 0; i < 4; i++)
                if (next) fetch(next->key[k + i] + further + d);
                else four[i] = load_i32(packed + 64 * i);
#pragma GCC unroll 2
            for (int r = 0; r < rows; r++) {
                const Weights *weights = weights_of(tile, row + r);
                vi a = splat_i(*(const int_any *)(weights->high + k));
                vi b = splat_i(*(const int_any *)(weights->low + k));
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    high[r][i] = DOT_VNNI(high[r][i], a, four[i]);
                    low[r][i] = DOT_VNNI(low[r][i], b, four[i]);
                }
            }
            k += 4, packed += 256;
        } while (k < TILE);
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) {
            const Weights *weights = weights_of(tile, row + r);
            __m512 kept = _mm512_set1_ps(weights->kept), scale = _mm512_set1_ps(weights->scale);
            float *sum = tile->sum + (row + r) * tile->wide + d;
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++, sum += VW) {
                __m512 whole = _mm512_cvtepi32_ps((__m512i)((high[r][i] << 8) + low[r][i]));
                __m512 before = _mm512_mul_ps(_mm512_loadu_ps(sum), kept);
                _mm512_storeu_ps(sum, _mm512_fmadd_ps(whole, scale, before));
            }
        }
    }
}
KERNEL void add_whole_1(const Tile *t, int64_t row, const Keys *k, const Keys *next, int64_t to) {
    add_whole(t, row, k, next, to, 1);
}
KERNEL void add_whole_2(const Tile *t, int64_t row, const Keys *k, const Keys *next, int64_t to) {
    add_whole(t, row, k, next, to, 2);
}
KERNEL void add_packed_1(const Tile *t, int64_t row) { add_whole(t, row, 0, 0, 0, 1); }
KERNEL void add_packed_2(const Tile *t, int64_t row) { add_whole(t, row, 0, 0, 0, 2); }

/* Put the columns of a query's sums in order: 128 bits of 4 vectors across each other. */
INLINE void settle_whole(float *sum, int64_t wide) {
    for (float *end = sum + wide; sum < end; sum += 64) {
        __m512 x[4], y[4];
        for (int i = 0; i < 4; i++) x[i] = _mm512_loadu_ps(sum + i * VW);
        y[0] = _mm512_shuffle_f32x4(x[0], x[1], 0x44), y[1] = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
        y[2] = _mm512_shuffle_f32x4(x[0], x[1], 0xee), y[3] = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
        for (int i = 0; i < 4; i += 2) {
            _mm512_storeu_ps(sum + i * VW, _mm512_shuffle_f32x4(y[i], y[i + 1], 0x88));
            _mm512_storeu_ps(sum + (i + 1) * VW, _mm512_shuffle_f32x4(y[i], y[i + 1], 0xdd));
        }
    }
}

/* As attend_keys. */
static void attend_whole(const Op *op, const Tile *tile, const Keys *keys, const Keys *next,
                         int64_t start) {
    int64_t D = op->n[2], rows = tile->queries * tile->share, further = values_further(op, BF16);
    int64_t r = 0;
    const Scales scales = take_scales(keys, next, further);
    if (rows <= FEW_QUERIES) {
        for (; r + 2 <= rows; r += 2) score_few_2(tile, r, keys, next, D);
        if (r < rows) score_few_1(tile, r, keys, next, D);
    } else {
        pack_whole_keys(tile, keys, next, D);
        for (; r + 4 <= rows; r += 4) score_many_4(tile, r, D);
        for (; r < rows; r++) score_many_1(tile, r, D);
    }
    for (r = 0; r < rows; r++) soften_whole(op, tile, r, start, &scales);
    if (rows <= FEW_QUERIES) {
        for (r = 0; r + 2 <= rows; r += 2) add_whole_2(tile, r, keys, next, further);
        if (r < rows) add_whole_1(tile, r, keys, next, further);
    } else {
        pack_whole_values(tile, keys, next, further, D);
        for (r = 0; r + 2 <= rows; r += 2) add_packed_2(tile, r);
        if (r < rows) add_packed_1(tile, r);
    }
}
#else /* never called */
INLINE void attend_whole(const Op *op, const Tile *tile, const Keys *keys, const Keys *next,
                         int64_t start) {
    (void)op, (void)tile, (void)keys, (void)next, (void)start;
}
INLINE void take_whole_query(const Tile *tile, int64_t row, const bf16 *x, int64_t D, float scale) {
    (void)tile, (void)row, (void)x, (void)D, (void)scale;
}
INLINE void settle_whole(float *sum, int64_t wide) { (void)sum, (void)wide; }
#endif
