/* Causal attention over the block pool, for prefill chunks and decodes alike.
 *
 * A chunk of work is a tile of one row's query tokens and one KV head with all its query heads.
 * TILE tokens of context at a time, from position 0 (or the window's start) on in steps of TILE:
 * their keys are multiplied by the queries, and enter a running softmax (Milakov and Gimelshein 2018;
 * FlashAttention, Dao et al. 2022). A query's output depends on its own context alone: not on its
 * tile, its chunk or the other rows. How products are made is in files of their own:
 *
 *   attention_floats.c   in float32
 *   attention_pairs.c    bfloat16 by its dot product, few queries
 *   attention_prompts.c  likewise, many
 *   attention_codes.c    INT8 keys and values as integers
 *
 *   p  q [T, Hq, D], pool layer [N, 2, Hk, rows, D], out [T, Hq, D], sinks (float [Hq]) or 0,
 *      tiles (int64 [tiles, 2]: row, first query of the row), query_starts [R + 1],
 *      context_lens [R], tables [R, W] (int64)
 *   n  Hq, Hk, D, B, elements from block to block, W, stride of q, window or 0
 *   f  scale, softcap or 0
 *   flags  PLAIN, INT8 or FP8: the pool's elements. Codes are widened to dtype, a tile at a time
 */
#include "codes.c"

/* A decode is bound by reading keys and values, which lie in pieces of 4 KiB that the hardware's
 * prefetcher does not follow: TILES_AHEAD tiles ahead lines are fetched in order, spread over all
 * the work, keys while they are packed or multiplied and values while adding, into the L2 cache
 * (docs/kernels.md). Older, at 128 rows: 7.2 ms without fetching ahead and 4.6 with it, all at once
 * instead of spread 6.9, every other line 6.6; masks and maxima lane by lane took 1.1 times and values
 * in float 1.2 times as long as what replaced them. */
#define TILE_QUERIES 64  /* query heads times query tokens a tile has at most (or one token's) */
#define FLOOR -1e30f     /* below every score, and finite */

typedef struct {
    int64_t queries, share, first; /* of the tile: tokens, heads a token, position of token 0 */
    char *q;                       /* [queries * share, D] dtype; [.., wide] float */
    char *panel;                   /* TILE keys */
    char *keys;                    /* [TILE, wide], where the pool holds codes or D is no multiple of TILE */
    char *values;                  /* likewise */
    float *scales;                 /* [2, TILE] of the codes of keys and values, or 0 */
    float *scores;                 /* [queries * share, TILE] */
    void *weights;                 /* of the softmax, likewise; bfloat16 for the dot product */
    float *sum;                    /* [queries * share, wide] float */
    float *top, *total;            /* running maximum and sum of each query */
    int64_t wide;                  /* D, rounded up to TILE */
} Tile;

/* Rows that a tile has memory for: many are taken across vectors (attention_prompts.c). */
INLINE int64_t room_for(int64_t rows) {
    return rows < VW ? rows : divide_up(rows, TILE) * TILE;
}

/* A weight of the softmax is 2 to the power of (score - maximum) times this. */
#define LOG2_E 1.44269504088896341f

INLINE float exponent_of(const Op *op) { return op->f[1] != 0 ? LOG2_E : op->f[0] * LOG2_E; }

/* A line that is needed soon, into the L2 cache: as many misses as the L1 cache may have at once are
 * too few for memory. */
INLINE void fetch(const char *line) { __builtin_prefetch(line, 0, 2); }

/* Addresses of TILE keys, and of their scales where they are codes. The values and their scales lie
 * `values_further` bytes further. */
typedef struct {
    const char *key[TILE], *scale[TILE];
} Keys;

INLINE int64_t values_further(const Op *op, int dtype) {
    return op->n[1] * head_rows(op->flags, op->n[3], op->n[2]) * op->n[2] *
           pool_size(op->flags, dtype);
}

/* The keys of TILE tokens from `start` on; beyond the context the last token's is repeated. */
INLINE void find_keys(const Op *op, const int64_t *table, int64_t head, int64_t start,
                      int64_t context, Keys *keys, int dtype) {
    int64_t B = op->n[3], D = op->n[2], block = start / B, offset = start % B;
    int64_t size = pool_size(op->flags, dtype), rows = head_rows(op->flags, B, D);
    const int64_t count = min_int(TILE, context - start);
    for (int64_t i = 0, end; i < count; i = end, block++, offset = 0) {
        const char *first = (char *)op->p[1] + (table[block] * op->n[4] + head * rows * D) * size;
        const char *scales = first + B * D;
        end = min_int(count, i + B - offset);
        for (int64_t j = i; j < end; j++) keys->key[j] = first + (offset + j - i) * D * size;
        if (op->flags)
            for (int64_t j = i; j < end; j++) keys->scale[j] = scales + (offset + j - i) * 4;
    }
    for (int64_t j = count; j < TILE; j++) {
        keys->key[j] = keys->key[count - 1];
        if (op->flags) keys->scale[j] = keys->scale[count - 1];
    }
}

/* All keys and values at once, of tiles that nothing came before. */
INLINE void fetch_tile(const Op *op, const Keys *keys, int dtype) {
    for (int side = 0; side < 2; side++)
        for (int i = 0; i < TILE; i++)
            for (int64_t b = 0; b < op->n[2] * pool_size(op->flags, dtype); b += 64)
                fetch(keys->key[i] + side * values_further(op, dtype) + b);
}

/* The soft cap of scores of TILE keys from `start` on; what the query does not see of them gets
 * -infinity. Whether there is any such. */
INLINE int limit_scores(const Op *op, const Tile *tile, int64_t row, int64_t start, vf x[2]) {
    int64_t position = tile->first + row / tile->share, window = op->n[7];
    float cap = op->f[1];
    if (cap != 0)
        for (int j = 0; j < 2; j++) x[j] = cap * tanh_of(x[j] / cap);
    if (start + TILE - 1 <= position && (!window || start > position - window)) return 0;
    for (int j = 0; j < 2; j++) {
        vi ahead = lane_numbers() + (int32_t)(start + j * VW - position); /* of the query */
        vi hidden = ahead > 0;
        if (window) hidden |= ahead <= (int32_t)-window;
        x[j] = choose(hidden, splat(-INFINITY), x[j]);
    }
    return 1;
}

/* Scores of TILE keys from `start` on -> weights; the running maximum, sum and values follow. The
 * scale is a part of the exponent's factor, unless the cap needs scaled scores. */
INLINE void soften(const Op *op, const Tile *tile, int64_t row, int64_t start, int dtype) {
    const float *s = tile->scores + row * TILE, factor = exponent_of(op);
    vf x[2] = {load_f32(s), load_f32(s + VW)};
    if (tile->scales)
        for (int j = 0; j < 2; j++) x[j] *= load_f32(tile->scales + j * VW);
    if (op->f[1] != 0)
        for (int j = 0; j < 2; j++) x[j] *= op->f[0];
    limit_scores(op, tile, row, start, x);
    float top = largest_of(max_of(x[0], x[1])), kept = 1;
    if (top > tile->top[row]) {
        kept = exp2_of(splat((tile->top[row] - top) * factor))[0];
        for (int64_t c = 0; c < tile->wide; c += VW) {
            float *sum = tile->sum + row * tile->wide + c;
            store_f32(sum, load_f32(sum) * kept);
        }
        tile->top[row] = top;
    }
    vf a = exp2_of((x[0] - tile->top[row]) * factor), b = exp2_of((x[1] - tile->top[row]) * factor);
    tile->total[row] = tile->total[row] * kept + sum_of(a + b);
    if (tile->scales) {
        a *= load_f32(tile->scales + TILE);
        b *= load_f32(tile->scales + TILE + VW);
    }
#if HAS_DOT
    if (dtype == BF16)
        _mm512_store_si512((bf16 *)tile->weights + row * TILE,
                           (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
#endif
    if (!HAS_DOT || dtype != BF16) {
        store_f32((float *)tile->weights + row * TILE, a);
        store_f32((float *)tile->weights + row * TILE + VW, b);
    }
}

/* The scales of the codes of TILE keys and values; fetches those of `next`. One that is not finite
 * becomes NaN, whatever its codes are. */
INLINE void take_code_scales(const Op *op, const Tile *tile, const Keys *keys, const Keys *next,
                             int dtype) {
    const int64_t further = values_further(op, dtype);
    for (int i = 0; i < TILE; i++) {
        float scales[2];
        for (int side = 0; side < 2; side++) {
            memcpy(scales + side, keys->scale[i] + side * further, 4);
            tile->scales[side * TILE + i] = scales[side] + scales[side] * 0.0f;
            if (i % 16 == 0) fetch(next->scale[i] + side * further);
        }
    }
}

/* Codes of TILE tokens, `further` bytes beyond their keys -> to [TILE][wide] in dtype, and where each
 * is; fetches `next`. */
INLINE void widen_tile(char *to, const char **where, const Keys *keys, const Keys *next,
                       int64_t further, int64_t wide, int64_t D, int kind, int dtype) {
    for (int i = 0; i < TILE; i++, to += wide * size_of(dtype)) {
        for (int64_t b = 0; b < D; b += 64) fetch(next->key[i] + further + b);
        widen(to, keys->key[i] + further, D, kind, dtype);
        where[i] = to;
    }
}

/* Where TILE tokens are, `further` bytes beyond their keys, `size` bytes an element; in `to`, with zeros
 * up to `wide`, if D is no multiple of TILE. */
INLINE void find_tile(char *to, const char **where, const Keys *keys, int64_t further, int64_t wide,
                      int64_t D, int64_t size) {
    for (int i = 0; i < TILE; i++, to += wide * size) {
        where[i] = keys->key[i] + further;
        if (wide == D) continue;
        memcpy(to, where[i], D * size);
        where[i] = to;
    }
}

#include "attention_pairs.c"
#include "attention_floats.c"
#include "attention_codes.c"
#include "attention_prompts.c"

INLINE void attend_keys(const Op *op, const Tile *tile, const Keys *keys, const Keys *next,
                        int64_t start, int dtype) {
    const int64_t D = op->n[2], rows = tile->queries * tile->share;
    if (is_whole(op->flags, D, dtype)) attend_whole(op, tile, keys, next, start);
    else if (is_across(op->flags, rows, D, dtype)) attend_across(op, tile, keys, next, start);
    else if (is_in_pairs(dtype)) attend_pairs(op, tile, keys, next, start);
    else attend_floats(op, tile, keys, next, start, dtype);
}

#define HEADS_MAX 16              /* taken together */
#define TOGETHER_BYTES (64 << 10) /* of their queries and sums, beside which the keys stay in cache */

/* Bytes of what a tile keeps of each of its heads. */
INLINE int64_t head_bytes(int64_t rows, int64_t wide) {
    const int64_t room = room_for(rows);
    return 2 * room * wide * 4 + divide_up(room * 8, 64) * 64;
}

/* The `index`th of the heads that are taken together: each has its queries and sums. */
static Tile make_tile(const Op *op, int64_t queries, int64_t first, int64_t index, Worker *me) {
    int64_t share = op->n[0] / op->n[1], rows = queries * share, D = op->n[2];
    const int64_t room = room_for(rows);
    Tile tile = {.queries = queries, .share = share, .first = first};
    tile.wide = divide_up(D, TILE) * TILE;
    char *next = me->scratch;
    tile.panel = next, next += tile.wide * TILE * 4;
    tile.keys = next, next += tile.wide * TILE * 4;
    tile.values = next, next += tile.wide * TILE * 4;
    tile.scales = op->flags ? (float *)next : 0, next += 2 * TILE * 4;
    tile.scores = (float *)next, next += room * TILE * 4;
    tile.weights = next, next += room * TILE * 4;
    next += index * head_bytes(rows, tile.wide);
    tile.sum = (float *)next, next += room * tile.wide * 4;
    tile.q = next, next += room * tile.wide * 4;
    tile.top = (float *)next, next += room * 4;
    tile.total = (float *)next;
    memset(tile.sum, 0, room * tile.wide * 4);
    if (tile.wide != D && !index) memset(tile.keys, 0, 2 * tile.wide * TILE * 4); /* and values */
    return tile;
}

INLINE void take_query(const Op *op, const Tile *tile, int64_t row, const void *x, int dtype) {
    const int64_t D = op->n[2];
    if (is_whole(op->flags, D, dtype))
        take_whole_query(tile, row, x, D, op->f[1] != 0 ? op->f[0] : exponent_of(op));
    else if (is_in_pairs(dtype)) take_pair_query(tile, row, x, D, op->flags);
    else take_float_query(tile, row, x, D, op->flags, dtype);
}

/* A query's sums over their total -> element `to` of out. */
INLINE void put_sum(const Op *op, const Tile *tile, int64_t row, int64_t to, int dtype) {
    const int64_t D = op->n[2];
    float factor = 1.0f / tile->total[row], *sum = tile->sum + row * tile->wide;
    if (is_whole(op->flags, D, dtype)) settle_whole(sum, tile->wide);
    else if (is_in_pairs(dtype)) settle(sum, tile->wide);
    put_floats(op->p[2], to, sum, factor, D, op->flags, dtype);
}

#define ACROSS_MAX 128 /* queries of a tile: TILE_QUERIES, or one token's */

/* The queries of one KV head, whose first is token `token` of the step. */
INLINE void take_queries(const Op *op, const Tile *tile, int64_t token, int64_t head, int dtype) {
    const float *sinks = op->p[3];
    int64_t D = op->n[2], share = tile->share, rows = tile->queries * share;
    const int is_few = !is_across(op->flags, rows, D, dtype);
    const int has_logs = is_whole(op->flags, D, dtype); /* of scores, to the base 2 */
    const float scale = has_logs ? 1 / LOG2_E : op->f[1] != 0 ? 1.0f : op->f[0];
    const bf16 *queries[ACROSS_MAX];
    for (int64_t i = 0; i < rows; i++) {
        int64_t from = (token + i / share) * op->n[6] + (head * share + i % share) * D;
        tile->top[i] = sinks ? sinks[head * share + i % share] / scale : FLOOR;
        tile->total[i] = sinks ? 1 : 0;
        if (is_few) take_query(op, tile, i, at(op->p[0], from, dtype), dtype);
        else queries[i] = (const bf16 *)op->p[0] + from;
    }
    if (is_few) return;
    for (int64_t i = rows; i < room_for(rows); i++) tile->top[i] = 0, tile->total[i] = 1;
    take_across(tile, queries, D);
}

INLINE void put_sums(const Op *op, const Tile *tile, int64_t token, int64_t head, int dtype) {
    int64_t D = op->n[2], share = tile->share, rows = tile->queries * share;
    const int is_few = !is_across(op->flags, rows, D, dtype);
    bf16 *outs[ACROSS_MAX];
    for (int64_t i = 0; i < rows; i++) {
        int64_t to = ((token + i / share) * op->n[0] + head * share + i % share) * D;
        if (is_few) put_sum(op, tile, i, to, dtype);
        else outs[i] = (bf16 *)op->p[2] + to;
    }
    if (!is_few) put_across(tile, outs, D);
}

/* A tile is computed sooner than memory answers, most of all one of codes. A row of 8,192 tokens in
 * INT8, 6 layers: 4.0 ms of one core, 4.4 with one tile ahead, 4.8 with three (a Zen 5, 2026-11-23). */
#define TILES_AHEAD 2

typedef struct {
    int64_t head, key;
} KeysPlace;

/* The tile of keys that is taken after this one of `heads` heads from `first` on; after their last,
 * the next heads' first ones, or where there are none that last one again. */
INLINE KeysPlace place_after(const Op *op, KeysPlace at, int64_t first, int64_t heads, int64_t begin,
                         int64_t end) {
    if (at.head >= first + heads) return (KeysPlace){min_int(at.head + 1, op->n[1] - 1), at.key};
    if (at.head + 1 < first + heads) return (KeysPlace){at.head + 1, at.key};
    if (at.key + TILE < end) return (KeysPlace){first, at.key + TILE};
    return first + heads < op->n[1] ? (KeysPlace){first + heads, begin} : at;
}

/* KV heads `head` to `last` of a tile of queries. Few queries take all heads of TILE tokens before
 * the next tokens, since a block's heads lie side by side: memory is read in order. One row of 8,192
 * tokens, 12 layers: 9.7 ms in bfloat16 and 6.8 in INT8, a head at a time in chunks of one head 11.4
 * and 7.2; in one chunk a thread 9.2 and 6.6, but then a thread that the system deschedules has half
 * of the work. 32 rows of 200: 14.4 and 12.8, a head at a time 14.3 and 13.5 (2 cores, 2026-11-22). */
INLINE void attend(const Op *op, int64_t row, int64_t start, int64_t head, int64_t last, Worker *me,
                   int dtype) {
    const int64_t *starts = op->p[5], *table = (const int64_t *)op->p[7] + row * op->n[5];
    int64_t D = op->n[2], share = op->n[0] / op->n[1], window = op->n[7];
    int64_t count = starts[row + 1] - starts[row], context = ((const int64_t *)op->p[6])[row];
    int64_t queries = min_int(count - start, max_int(1, TILE_QUERIES / share));
    int64_t token = starts[row] + start, first = context - count + start;
    int64_t each = head_bytes(queries * share, divide_up(D, TILE) * TILE);
    int64_t together = min_int(HEADS_MAX, max_int(1, TOGETHER_BYTES / each));
    int64_t begin = window ? max_int(0, first - window + 1) / TILE * TILE : 0;
    int64_t end = first + queries; /* what the last query sees */
    for (; head <= last; head += together) {
        Tile tiles[HEADS_MAX];
        int64_t heads = min_int(together, last + 1 - head), h = 0, key = begin;
        KeysPlace next = {head, begin};
        for (int64_t i = 0; i < heads; i++) {
            tiles[i] = make_tile(op, queries, first, i, me);
            take_queries(op, &tiles[i], token, head + i, dtype);
        }
        Keys keys[TILES_AHEAD + 1];
        for (int i = 0; i < TILES_AHEAD; i++) {
            find_keys(op, table, next.head, next.key, end, &keys[i], dtype);
            fetch_tile(op, &keys[i], dtype);
            next = place_after(op, next, head, heads, begin, end);
        }
        for (int i = 0; key < end; i = i == TILES_AHEAD ? 0 : i + 1) {
            Keys *later = &keys[i ? i - 1 : TILES_AHEAD];
            find_keys(op, table, next.head, next.key, end, later, dtype);
            next = place_after(op, next, head, heads, begin, end);
            attend_keys(op, &tiles[h], &keys[i], later, key, dtype);
            if (++h == heads) h = 0, key += TILE;
        }
        for (int64_t h = 0; h < heads; h++) put_sums(op, &tiles[h], token, head + h, dtype);
    }
}

/* Chunks that the heads of a tile are divided into. A chunk of several heads reads memory in order;
 * with few tiles there are more chunks, so that all threads have work although one row may be longer
 * than the others. One tile alone has no such neighbour. */
static int64_t attention_groups(const Op *op, const Step *step, int threads) {
    int64_t tiles = max_int(1, step->counts[op->count]);
    return min_int(op->n[1], divide_up((tiles == 1 ? 2 : 16) * threads, tiles));
}

static int64_t attention_chunks(const Op *op, const Step *step, int threads) {
    return max_int(1, step->counts[op->count]) * attention_groups(op, step, threads);
}

static void attention_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    int64_t groups = attention_groups(op, step, me->threads), heads = op->n[1];
    int64_t tile = chunk / groups, group = chunk % groups;
    if (tile >= step->counts[op->count]) return;
    const int64_t *tiles = (const int64_t *)op->p[4] + 2 * tile;
    int64_t last = (group + 1) * heads / groups - 1;
    if (op->dtype == F32) attend(op, tiles[0], tiles[1], group * heads / groups, last, me, F32);
    else attend(op, tiles[0], tiles[1], group * heads / groups, last, me, BF16);
}
