/* Where keys and values of a context lie in the pool, and fetching them before they are needed; part of
 * attention.c.
 *
 * A decode is bound by reading them, in pieces that the hardware's prefetcher does not follow. A tile's
 * lines are fetched while the tiles before it are computed, TILES_AHEAD of them, into the L2 cache. Both
 * matter: that it is in the order of their addresses, in which the hardware fetches along, and that it is
 * spread over all of the work, since a CPU that waits for as many lines as it can drops hints. One thread
 * of an EPYC Zen 3, fetching and reading 4 KiB pieces: in order of addresses 10 to 12 GB/s, with the
 * lines of every token one by one, as values are multiplied, 6 (docs/kernels.md).
 */
#pragma once
#include "codes.c"

#define TOKENS 32 /* of context at a time: a panel's with vectors of 16, several with smaller */

/* A tile is computed sooner than memory answers, most of all one of codes. A row of 8,192 tokens in
 * INT8, 6 layers: 4.0 ms of one core, 4.4 with one tile ahead, 4.8 with three (a Zen 5, 2026-11-23). */
#define TILES_AHEAD 2

/* A line that is needed soon, into the L2 cache: as many misses as the L1 cache may have at once are
 * too few for memory. */
INLINE void fetch(const char *line) { __builtin_prefetch(line, 0, 2); }

/* Addresses of TOKENS keys, and of their scales where they are codes; keys that follow each other in
 * memory are a run. The values and their scales lie `further` bytes further. */
typedef struct {
    const char *key[TOKENS], *scale[TOKENS];
    const char *run[TOKENS];
    int64_t bytes[TOKENS], further; /* of the runs */
    int runs;
} Keys;

INLINE int64_t values_further(const Op *op, int dtype) {
    return op->n[1] * head_rows(op->flags, op->n[3], op->n[2]) * op->n[2] *
           pool_size(op->flags, dtype);
}

/* The keys of TOKENS tokens from `start` on; beyond the context the last token's is repeated. */
INLINE void find_keys(const Op *op, const int64_t *table, int64_t head, int64_t start,
                      int64_t context, Keys *keys, int dtype) {
    int64_t B = op->n[3], D = op->n[2], block = start / B, offset = start % B;
    int64_t size = pool_size(op->flags, dtype), rows = head_rows(op->flags, B, D);
    const int64_t count = min_int(TOKENS, context - start);
    keys->runs = 0;
    keys->further = values_further(op, dtype);
    for (int64_t i = 0, end; i < count; i = end, block++, offset = 0) {
        const char *first = (char *)op->p[1] + (table[block] * op->n[4] + head * rows * D) * size;
        const char *scales = first + B * D;
        end = min_int(count, i + B - offset);
        keys->run[keys->runs] = first + offset * D * size;
        keys->bytes[keys->runs++] = (end - i) * D * size;
        for (int64_t j = i; j < end; j++) keys->key[j] = first + (offset + j - i) * D * size;
        if (op->flags)
            for (int64_t j = i; j < end; j++) keys->scale[j] = scales + (offset + j - i) * 4;
    }
    for (int64_t j = count; j < TOKENS; j++) {
        keys->key[j] = keys->key[count - 1];
        if (op->flags) keys->scale[j] = keys->scale[count - 1];
    }
}

/* What of a tile is not fetched yet, in the order of addresses: from `at` to `end`, then further runs of
 * keys, then those of values. */
typedef struct {
    const Keys *keys;
    const char *at, *end;
    int run;
} Ahead;

INLINE Ahead fetch_ahead(const Keys *keys) {
    return (Ahead){keys, keys->run[0], keys->run[0] + keys->bytes[0], 0};
}

/* Whether there are lines left. */
INLINE int has_line(Ahead *ahead) {
    const Keys *keys = ahead->keys;
    if (ahead->at < ahead->end) return 1;
    if (++ahead->run >= 2 * keys->runs) return ahead->run = 2 * keys->runs, 0;
    const int is_value = ahead->run >= keys->runs, run = ahead->run - (is_value ? keys->runs : 0);
    ahead->at = keys->run[run] + (is_value ? keys->further : 0);
    ahead->end = ahead->at + keys->bytes[run];
    return 1;
}

INLINE void fetch_lines(Ahead *ahead, int64_t lines) {
    for (; lines > 0 && has_line(ahead); lines--, ahead->at += 64) fetch(ahead->at);
}

/* Lines left, of full tiles. */
INLINE int64_t lines_left(const Ahead *ahead) {
    const Keys *keys = ahead->keys;
    int64_t bytes = ahead->end - ahead->at;
    for (int run = ahead->run + 1; run < 2 * keys->runs; run++)
        bytes += keys->bytes[run < keys->runs ? run : run - keys->runs];
    return divide_up(max_int(0, bytes), 64);
}

typedef struct {
    int64_t head, key;
} KeysPlace;

/* The tile of keys that is taken after this one of `heads` heads from `first` on; after their last,
 * the next heads' first ones, or where there are none that last one again. */
INLINE KeysPlace place_after(const Op *op, KeysPlace at, int64_t first, int64_t heads, int64_t begin,
                         int64_t end) {
    if (at.head >= first + heads) return (KeysPlace){min_int(at.head + 1, op->n[1] - 1), at.key};
    if (at.head + 1 < first + heads) return (KeysPlace){at.head + 1, at.key};
    if (at.key + TOKENS < end) return (KeysPlace){first, at.key + TOKENS};
    return first + heads < op->n[1] ? (KeysPlace){first + heads, begin} : at;
}
