/* Causal attention over the block pool, for prefill chunks and decodes alike.
 *
 * A chunk of work is a tile of one row's query tokens and one KV head with all its query heads.
 * TILE tokens of context at a time, from position 0 (or the window's start) on in steps of TILE:
 * their keys are packed into a panel as linear.c's weights are, multiplied by the queries, and enter
 * a running softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022). What a query
 * gets depends on its own context alone: not on its tile, its chunk or the other rows.
 *
 *   p  q [T, Hq, D], pool layer [N, 2, Hk, B, D], out [T, Hq, D], sinks (float [Hq]) or 0,
 *      tiles (int64 [tiles, 2]: row, first query of the row), query_starts [R + 1],
 *      context_lens [R], tables [R, W] (int64)
 *   n  Hq, Hk, D, B, elements from block to block, W, stride of q, window or 0
 *   f  scale, softcap or 0
 */
#include "common.h"

#define TILE_QUERIES 48  /* query heads times query tokens a tile has at most (or one token's) */
#define FLOOR -1e30f     /* below every score, and finite */

typedef struct {
    int64_t queries, share, first; /* of the tile: tokens, heads a token, position of token 0 */
    char *q;                       /* [queries * share, D] dtype */
    char *panel;                   /* TILE keys */
    char *values;                  /* [TILE, wide] dtype, where D is not a multiple of TILE */
    float *scores;                 /* [queries * share, TILE] */
    float *sum;                    /* [queries * share, wide] float */
    float *top, *total;            /* running maximum and sum of each query */
    int64_t wide;                  /* D, rounded up to TILE */
} Tile;

INLINE const char *token_at(const Op *op, const int64_t *table, int64_t position, int64_t head,
                            int dtype) {
    int64_t B = op->n[3];
    return at(op->p[1], table[position / B] * op->n[4] + (head * B + position % B) * op->n[2], dtype);
}

/* TILE keys, or bfloat16 pairs of them, one below the other -> [D][TILE]. */
INLINE void pack_keys(char *panel, const char *const *keys, int64_t D, int dtype) {
#if HAS_DOT
    if (dtype == BF16 && D % 32 == 0) {
        for (int half = 0; half < 2; half++)
            for (int64_t d = 0; d < D / 2; d += 16) {
                __m512i row[16], next[16];
                for (int i = 0; i < 16; i++)
                    row[i] = _mm512_loadu_si512(keys[half * 16 + i] + d * 4);
                for (int i = 0; i < 16; i += 2) {
                    next[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
                    next[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
                }
                for (int i = 0; i < 16; i += 4)
                    for (int j = 0; j < 2; j++) {
                        row[i + 2 * j] = _mm512_unpacklo_epi64(next[i + j], next[i + j + 2]);
                        row[i + 2 * j + 1] = _mm512_unpackhi_epi64(next[i + j], next[i + j + 2]);
                    }
                for (int i = 0; i < 16; i += 8)
                    for (int j = 0; j < 4; j++) {
                        next[i + j] = _mm512_shuffle_i32x4(row[i + j], row[i + j + 4], 0x88);
                        next[i + j + 4] = _mm512_shuffle_i32x4(row[i + j], row[i + j + 4], 0xdd);
                    }
                for (int j = 0; j < 8; j++) {
                    row[j] = _mm512_shuffle_i32x4(next[j], next[j + 8], 0x88);
                    row[j + 8] = _mm512_shuffle_i32x4(next[j], next[j + 8], 0xdd);
                }
                for (int i = 0; i < 16; i++)
                    _mm512_storeu_si512(panel + ((d + i) * 2 + half) * 64, row[i]);
            }
        return;
    }
    if (dtype == BF16) {
        for (int64_t d = 0; d < D; d++)
            for (int i = 0; i < TILE; i++)
                memcpy(panel + ((d / 2 * TILE + i) * 2 + d % 2) * 2, keys[i] + d * 2, 2);
        if (D % 2)
            for (int i = 0; i < TILE; i++) memset(panel + ((D / 2 * TILE + i) * 2 + 1) * 2, 0, 2);
        return;
    }
#endif
    for (int64_t d = 0; d < D; d++)
        for (int i = 0; i < TILE; i++)
            memcpy(panel + (d * TILE + i) * size_of(dtype), keys[i] + d * size_of(dtype), size_of(dtype));
}

/* sum[row][0:wide] += scores[row][:] @ values, four columns of vectors at a time. */
INLINE void add_values(const Tile *tile, int rows, int64_t row, const char *const *values,
                       int keys, int64_t columns, int dtype) {
    for (int64_t c = 0; c < columns; c += TILE) {
        vf sum[4][2];
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < 2; j++)
                sum[r][j] = load_f32(tile->sum + (row + r) * tile->wide + c + j * VW);
        for (int k = 0; k < keys; k++) {
            vf a = load(values[k], c, dtype), b = load(values[k], c + VW, dtype);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                vf p = splat(tile->scores[(row + r) * TILE + k]);
                sum[r][0] += p * a;
                sum[r][1] += p * b;
            }
        }
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < 2; j++)
                store_f32(tile->sum + (row + r) * tile->wide + c + j * VW, sum[r][j]);
    }
}

/* Scores of TILE keys from `start` on -> weights; the running maximum, sum and values follow. */
INLINE void soften(const Op *op, const Tile *tile, int64_t row, int64_t start) {
    float *s = tile->scores + row * TILE, scale = op->f[0], cap = op->f[1];
    int64_t position = tile->first + row / tile->share, window = op->n[7];
    vf x[2];
    float top = tile->top[row];
    for (int j = 0; j < 2; j++) {
        x[j] = load_f32(s + j * VW) * scale;
        if (cap != 0) x[j] = cap * tanh_of(x[j] / cap);
        int64_t key = start + j * VW;
        if (key + VW - 1 > position || (window && key <= position - window))
            for (int i = 0; i < VW; i++)
                if (key + i > position || (window && key + i <= position - window))
                    x[j][i] = -INFINITY;
        for (int i = 0; i < VW; i++) top = x[j][i] > top ? x[j][i] : top;
    }
    float kept = 1;
    if (top != tile->top[row]) {
        kept = exp_of(splat(tile->top[row] - top))[0];
        for (int64_t c = 0; c < tile->wide; c += VW) {
            float *sum = tile->sum + row * tile->wide + c;
            store_f32(sum, load_f32(sum) * kept);
        }
    }
    vf a = exp_of(x[0] - top), b = exp_of(x[1] - top);
    store_f32(s, a);
    store_f32(s + VW, b);
    tile->top[row] = top;
    tile->total[row] = tile->total[row] * kept + sum_of(a + b);
}

INLINE void attend_keys(const Op *op, const Tile *tile, const int64_t *table, int64_t head,
                        int64_t start, int64_t context, int dtype) {
    const char *keys[TILE], *values[TILE];
    int64_t Hk = op->n[1], D = op->n[2], rows = tile->queries * tile->share;
    for (int i = 0; i < TILE; i++) { /* the last token again, for what lies beyond the context */
        keys[i] = token_at(op, table, least(start + i, context - 1), head, dtype);
        values[i] = token_at(op, table, least(start + i, context - 1), Hk + head, dtype);
        for (int64_t b = 0; b < D * size_of(dtype); b += 64) __builtin_prefetch(values[i] + b);
    }
    pack_keys(tile->panel, keys, D, dtype);
    if (start + TILE < context)
        for (int i = 0; i < TILE; i++) {
            const char *next = token_at(op, table, least(start + TILE + i, context - 1), head, dtype);
            for (int64_t b = 0; b < D * size_of(dtype); b += 64) __builtin_prefetch(next + b);
        }
    if (tile->wide != D)
        for (int i = 0; i < TILE; i++) {
            char *to = tile->values + i * tile->wide * size_of(dtype);
            memcpy(to, values[i], D * size_of(dtype));
            values[i] = to;
        }
    int64_t r = 0;
    for (; r < rows; r += ROWS_MAX) {
        const char *q = tile->q + r * D * size_of(dtype);
        multiply_rows[dtype][least(ROWS_MAX, rows - r)](tile->scores + r * TILE, 1, q, D,
                                                        tile->panel, D, q, 0);
    }
    for (r = 0; r < rows; r++) soften(op, tile, r, start);
    int used = (int)least(TILE, context - start);
    for (r = 0; r + 4 <= rows; r += 4) add_values(tile, 4, r, values, used, tile->wide, dtype);
    for (; r + 2 <= rows; r += 2) add_values(tile, 2, r, values, used, tile->wide, dtype);
    for (; r < rows; r++) add_values(tile, 1, r, values, used, tile->wide, dtype);
}

static Tile make_tile(const Op *op, int64_t queries, int64_t first, Worker *me) {
    int64_t share = op->n[0] / op->n[1], rows = queries * share;
    Tile tile = {.queries = queries, .share = share, .first = first};
    tile.wide = divide_up(op->n[2], TILE) * TILE;
    char *next = me->scratch;
    tile.panel = next, next += tile.wide * TILE * 4;
    tile.values = next, next += tile.wide * TILE * 4;
    tile.sum = (float *)next, next += rows * tile.wide * 4;
    tile.scores = (float *)next, next += rows * TILE * 4;
    tile.q = next, next += divide_up(rows * op->n[2] * 4, 64) * 64;
    tile.top = (float *)next, next += rows * 4;
    tile.total = (float *)next;
    memset(tile.sum, 0, rows * tile.wide * 4);
    if (tile.wide != op->n[2]) memset(tile.values, 0, tile.wide * TILE * 4);
    return tile;
}

INLINE void attend(const Op *op, int64_t row, int64_t start, int64_t head, Worker *me, int dtype) {
    const int64_t *starts = op->p[5], *table = (const int64_t *)op->p[7] + row * op->n[5];
    int64_t D = op->n[2], share = op->n[0] / op->n[1], window = op->n[7];
    int64_t count = starts[row + 1] - starts[row], context = ((const int64_t *)op->p[6])[row];
    int64_t queries = least(count - start, most(1, TILE_QUERIES / share));
    int64_t token = starts[row] + start, first = context - count + start;
    const float *sinks = op->p[3];
    Tile tile = make_tile(op, queries, first, me);
    for (int64_t i = 0; i < queries * share; i++) {
        int64_t from = (token + i / share) * op->n[6] + (head * share + i % share) * D;
        memcpy(tile.q + i * D * size_of(dtype), at(op->p[0], from, dtype), D * size_of(dtype));
        tile.top[i] = sinks ? sinks[head * share + i % share] : FLOOR;
        tile.total[i] = sinks ? 1 : 0;
    }
    int64_t key = window ? most(0, first - window + 1) / TILE * TILE : 0;
    int64_t end = first + queries; /* what the last query sees */
    for (; key < end; key += TILE) attend_keys(op, &tile, table, head, key, end, dtype);
    for (int64_t i = 0; i < queries * share; i++) {
        int64_t to = ((token + i / share) * op->n[0] + head * share + i % share) * D;
        float factor = 1.0f / tile.total[i];
        const float *sum = tile.sum + i * tile.wide;
        int64_t d = 0;
        for (; d + VW <= D; d += VW) store(op->p[2], to + d, load_f32(sum + d) * factor, dtype);
        for (; d < D; d++) store_one(op->p[2], to + d, sum[d] * factor, dtype);
    }
}

static int64_t attention_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return most(1, step->counts[op->count] * op->n[1]);
}

static void attention_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    int64_t tile = chunk / op->n[1], head = chunk % op->n[1];
    if (tile >= step->counts[op->count]) return;
    const int64_t *tiles = (const int64_t *)op->p[4] + 2 * tile;
    if (op->dtype == F32) attend(op, tiles[0], tiles[1], head, me, F32);
    else attend(op, tiles[0], tiles[1], head, me, BF16);
}
