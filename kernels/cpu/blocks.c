/* Codes as files have them, of TILE outputs at once and 4 codes a word, and the scales of GGUF's
 * blocks: what kernels/weights.py defines, exactly. pack.c makes panels of them.
 *
 *   UNPACK  p  codes as stored, codes (uint8 [N, K]), scales or 0, offsets or 0 (both float), order
 *              or 0, scales as stored (of FLOAT8)
 *           n  K, N, layout (blocks.py's number), bits (of words; of FLOAT8 columns of a scale)
 *
 *   BYTES    uint8 [N, K]
 *   SIGNED   int8 [N, K], less 128
 *   NIBBLES  uint8 [N, K / 2], the low halves first
 *   WORDS    int32 [K * bits / 32, N], a word's lowest bits first (GPTQ); column k of the codes is
 *            order[k] of the words' (int64)
 *   OUTPUTS  int32 [K, N / 8]: a word has outputs 0, 2, 4, 6, 1, 3, 5, 7, the lowest bits first (AWQ)
 *   FLOAT8   e4m3 [N, K] and scales, float [N, K / columns]: they become integers, see float8.h
 *   others   GGUF's blocks; what each byte means is ggml's, model/gguf/blocks.py has it in torch
 *
 * Words of rows are transposed first, as they are stored; codes are then taken out of TILE words at
 * once, by the same shifts and masks.
 */
#pragma once
#include "common.h"
#include "float8.h"
#include "half.h"

enum {
    BYTES_LAYOUT, SIGNED_LAYOUT, NIBBLES_LAYOUT, WORDS_LAYOUT, OUTPUTS_LAYOUT, FLOAT8_LAYOUT,
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, MXFP4
};

typedef struct {
    int bytes, weights, groups; /* of a block */
} Sizes;

static const Sizes sizes_of[] = {
    [FLOAT8_LAYOUT] = {1, 1, 0},
    [BYTES_LAYOUT] = {1, 1, 0}, [SIGNED_LAYOUT] = {1, 1, 0}, [NIBBLES_LAYOUT] = {1, 2, 0},
    [Q4_0] = {18, 32, 1},       [Q4_1] = {20, 32, 1},        [Q5_0] = {22, 32, 1},
    [Q5_1] = {24, 32, 1},       [Q8_0] = {34, 32, 1},        [Q2_K] = {84, 256, 16},
    [Q3_K] = {110, 256, 16},    [Q4_K] = {144, 256, 8},      [Q5_K] = {176, 256, 8},
    [Q6_K] = {210, 256, 16},    [IQ4_NL] = {18, 32, 1},      [MXFP4] = {17, 32, 1},
};

INLINE int is_by_rows(int64_t layout) { return layout != WORDS_LAYOUT && layout != OUTPUTS_LAYOUT; }
INLINE int is_blocks(int64_t layout) { return layout > FLOAT8_LAYOUT; }
INLINE int has_scales(int64_t layout) { return layout >= FLOAT8_LAYOUT; }

/* Bytes of `count` columns, a multiple of 256 or all, in a layout that is_by_rows. */
INLINE int64_t bytes_of(int64_t layout, int64_t count) {
    int64_t weights = sizes_of[layout].weights;
    return divide_up(count, weights) * sizes_of[layout].bytes;
}

#define COLUMNS 512 /* at once: a multiple of every block */
#define COLUMN_GROUPS (COLUMNS / 16)
#define LINE_OUTPUTS 128 /* of OUTPUTS, in a cache line of a column's words */
#define CHUNK_BYTES (COLUMNS / 32 * 34) /* of a row, at most */

/* A number of each of TILE rows. */
typedef uint32_t Words[TILE];
typedef float Floats[TILE];

/* COLUMNS columns of TILE outputs: 4 codes a word, the first lowest; scales and offsets of groups.
 * Of each output the row of its matrix, or -1 where there is none, and which matrix that is. */
typedef struct {
    _Alignas(64) Words fours[COLUMNS / 4];
    _Alignas(64) Floats scales[COLUMN_GROUPS], offsets[COLUMN_GROUPS];
    int64_t rows[TILE];
    int of[TILE];
} Columns;

/* Matrices as they are stored, of one form: one, or gates and ups.
 *
 * beside   outputs that lie side by side, of words
 * further  rows to those that are read next
 */
typedef struct {
    const uint8_t *codes[2];
    const float *scales[2]; /* of FLOAT8 */
    const int64_t *order;
    int64_t layout, bits, K, beside, further;
} Stored;

/* VW words: of one piece of `size` words, or of as many pieces, `stride` bytes apart, as it takes. */
INLINE vi vector_of(const uint8_t *from, int64_t stride, int size) {
#if VW == 16
    if (size == 16) return load_i32(from);
    if (size == 8)
        return (vi)_mm512_inserti64x4(
            _mm512_castsi256_si512(_mm256_loadu_si256((const void *)from)),
            _mm256_loadu_si256((const void *)(from + stride)), 1);
    __m128i p[4];
    for (int n = 0; n < 4; n++) p[n] = _mm_loadu_si128((const void *)(from + n * stride));
    __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(p[0]), p[1], 1);
    __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(p[2]), p[3], 1);
    return (vi)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#elif VW == 8
    if (size >= 8) return load_i32(from);
    return (vi)_mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128((const void *)from)),
        _mm_loadu_si128((const void *)(from + stride)), 1);
#else
    (void)stride, (void)size;
    return load_i32(from);
#endif
}

/* Of every row `count` pieces of `size` words, `stride` bytes apart, from byte `start`. */
INLINE void words_of(const uint8_t *const *rows, int64_t start, int64_t stride, int size,
                     int64_t count, Words *to) {
    const int pieces = size < VW ? VW / size : 1;
    int64_t i = 0;
    for (; HAS_TRANSPOSE && size >= 4 && i + pieces <= count; i += pieces)
        for (int part = 0; part < size * pieces; part += VW)
            for (int half = 0; half < TILE; half += VW) {
                vi row[VW];
                for (int j = 0; j < VW; j++)
                    row[j] = vector_of(rows[half + j] + start + i * stride + 4 * part, stride, size);
                transpose(row);
                for (int at = 0; at < VW; at++)
                    store_i32(to[i * size + part + at] + half, row[at]);
            }
    for (int64_t j = 0; j < TILE; j++)
        for (int64_t n = i; n < count; n++)
            for (int at = 0; at < size; at++)
                to[n * size + at][j] =
                    (uint32_t)*(const int_any *)(rows[j] + start + n * stride + 4 * at);
}

/* float16 at byte `start` of each block, times `sign`. */
INLINE void halves_of(const uint8_t *const *rows, int64_t start, int64_t stride, int64_t blocks,
                      float sign, int per_block, Floats *to) {
    for (int64_t i = 0; i < blocks; i++)
        for (int j = 0; j < TILE; j += VW) {
            vh bits; /* not by way of memory, where so many small stores delay what loads them */
            for (int k = 0; k < VW; k++) {
                uint16_t one;
                memcpy(&one, rows[j + k] + start + i * stride, 2);
                bits[k] = one;
            }
            store_f32(to[i * per_block] + j, of_half(bits) * sign);
        }
}

#define EACH_BYTE(x) ((x) * 0x01010101u)
/* VW rows at a time, from j on; left to itself, GCC takes one after another where VW is 8. */
#define EACH_ROW for (int j = 0; j < TILE; j += VW)
#define OF(words) (*(vu_any *)((words) + j))
#define FLOATS(floats) (*(vf_any *)((floats) + j))

/* In each run of `size` words the low halves of their bytes, then the high ones. */
INLINE void nibbles(const Words *from, int size, int64_t count, Words *to) {
    for (int64_t i = 0; i < count; i++) {
        Words *low = to + i / size * 2 * size + i % size;
        EACH_ROW {
            vu both = OF(from[i]);
            OF(low[0]) = both & EACH_BYTE(15u);
            OF(low[size]) = both >> 4 & EACH_BYTE(15u);
        }
    }
}

/* to |= bit i of `bits` as the fifth of code i, 32 of them. */
INLINE void fifth_bits(const Words *bits, int64_t blocks, Words *to) {
    for (int64_t i = 0; i < blocks; i++)
        for (int n = 0; n < 8; n++)
            EACH_ROW OF(to[i * 8 + n]) |=
                ((OF(bits[i]) >> 4 * n & 15u) * 0x00204081u & EACH_BYTE(1u)) << 4;
}

#define BYTE(words, i) (OF((words)[(i) / 4]) >> 8 * ((i) % 4) & 255u)

INLINE vf number_of(vu integer) { return __builtin_convertvector((vi)integer, vf); }

/* Eight scales and offsets of 6 bits each, in the 3 words behind their factors. */
INLINE void six_bits(const uint8_t *const *rows, int64_t stride, int64_t blocks, Columns *it) {
    Words w[4 * COLUMNS / 256];
    Floats d, lowest;
    words_of(rows, 0, stride, 4, blocks, w);
    for (int64_t b = 0; b < blocks; b++) {
        const Words *low = w + 4 * b + 1, *low_mins = low + 1, *both = low + 2;
        halves_of(rows, b * stride, 0, 1, 1.0f, 1, &d);
        halves_of(rows, b * stride + 2, 0, 1, -1.0f, 1, &lowest);
        for (int i = 0; i < 4; i++) {
            Floats *s = it->scales + 8 * b + i, *o = it->offsets + 8 * b + i;
            EACH_ROW {
                vu scale = BYTE(low, i), min = BYTE(low_mins, i), further = BYTE(both, i);
                FLOATS(s[0]) = FLOATS(d) * number_of(scale & 63);
                FLOATS(o[0]) = FLOATS(lowest) * number_of(min & 63);
                FLOATS(s[4]) = FLOATS(d) * number_of((further & 15) | (scale >> 2 & 48));
                FLOATS(o[4]) = FLOATS(lowest) * number_of(further >> 4 | (min >> 2 & 48));
            }
        }
    }
}

/* Two bits a code, of 8 parts of 32 codes, 4 parts in the same bytes. */
INLINE void pairs(const Words *from, Words *to) {
    for (int part = 0; part < 8; part++)
        for (int i = 0; i < 8; i++)
            EACH_ROW OF(to[8 * part + i]) =
                OF(from[part / 4 * 8 + i]) >> part % 4 * 2 & EACH_BYTE(3u);
}

/* to |= bit `part` of each byte, for 8 parts of 32 codes. */
INLINE void further_bits(const Words *from, int shift, Words *to) {
    for (int part = 0; part < 8; part++)
        for (int i = 0; i < 8; i++)
            EACH_ROW OF(to[8 * part + i]) |= (OF(from[i]) >> part & EACH_BYTE(1u)) << shift;
}

static void q2_k(const uint8_t *const *rows, int64_t blocks, Columns *it) {
    Words w[16], s[4];
    Floats d, lowest;
    for (int64_t b = 0; b < blocks; b++) {
        words_of(rows, 84 * b + 16, 0, 16, 1, w);
        pairs(w, it->fours + 64 * b);
        words_of(rows, 84 * b, 0, 4, 1, s);
        halves_of(rows, 84 * b + 80, 0, 1, 1.0f, 1, &d);
        halves_of(rows, 84 * b + 82, 0, 1, -1.0f, 1, &lowest);
        for (int i = 0; i < 16; i++)
            EACH_ROW {
                vu both = BYTE(s, i);
                FLOATS(it->scales[16 * b + i]) = FLOATS(d) * number_of(both & 15);
                FLOATS(it->offsets[16 * b + i]) = FLOATS(lowest) * number_of(both >> 4);
            }
    }
}

static void q3_k(const uint8_t *const *rows, int64_t blocks, Columns *it) {
    Words w[16], high[8], s[4];
    Floats d;
    for (int64_t b = 0; b < blocks; b++) {
        words_of(rows, 110 * b + 32, 0, 16, 1, w);
        words_of(rows, 110 * b, 0, 8, 1, high);
        pairs(w, it->fours + 64 * b);
        further_bits(high, 2, it->fours + 64 * b);
        words_of(rows, 110 * b + 94, 0, 4, 1, s); /* two bytes before, since none are behind */
        for (int i = 0; i < 3; i++) EACH_ROW OF(s[i]) = OF(s[i]) >> 16 | OF(s[i + 1]) << 16;
        halves_of(rows, 110 * b + 108, 0, 1, 1.0f, 1, &d);
        for (int i = 0; i < 16; i++)
            EACH_ROW {
                vu low = BYTE(s, i % 8) >> (i < 8 ? 0 : 4) & 15;
                vu top = BYTE(s, 8 + i % 4) >> i / 4 * 2 & 3;
                FLOATS(it->scales[16 * b + i]) = FLOATS(d) * number_of((low | top << 4) - 32);
            }
    }
}

static void q4_k(const uint8_t *const *rows, int64_t blocks, Columns *it) {
    Words w[32];
    six_bits(rows, 144, blocks, it);
    for (int64_t b = 0; b < blocks; b++) {
        words_of(rows, 144 * b + 16, 64, 16, 2, w);
        nibbles(w, 8, 32, it->fours + 64 * b);
    }
}

static void q5_k(const uint8_t *const *rows, int64_t blocks, Columns *it) {
    Words w[32], high[8];
    six_bits(rows, 176, blocks, it);
    for (int64_t b = 0; b < blocks; b++) {
        words_of(rows, 176 * b + 48, 64, 16, 2, w);
        words_of(rows, 176 * b + 16, 0, 8, 1, high);
        nibbles(w, 8, 32, it->fours + 64 * b);
        further_bits(high, 4, it->fours + 64 * b);
    }
}

static void q6_k(const uint8_t *const *rows, int64_t blocks, Columns *it) {
    Words w[32], high[16], s[4];
    Floats d;
    for (int64_t b = 0; b < blocks; b++) {
        Words *to = it->fours + 64 * b;
        words_of(rows, 210 * b, 64, 16, 2, w);
        words_of(rows, 210 * b + 128, 0, 16, 1, high);
        nibbles(w, 16, 32, to);
        for (int i = 0; i < 64; i++)
            EACH_ROW OF(to[i]) |=
                (OF(high[i / 32 * 8 + i % 8]) >> i / 8 % 4 * 2 & EACH_BYTE(3u)) << 4;
        words_of(rows, 210 * b + 192, 0, 4, 1, s);
        halves_of(rows, 210 * b + 208, 0, 1, 1.0f, 1, &d);
        for (int i = 0; i < 16; i++)
            EACH_ROW FLOATS(it->scales[16 * b + i]) =
                FLOATS(d) * number_of((BYTE(s, i) ^ 128) - 128); /* signed */
    }
}

/* Blocks of 32 codes of 4 bits, 16 bytes from byte `start`. */
INLINE void small_blocks(const uint8_t *const *rows, int64_t start, int64_t stride, int64_t blocks,
                         Columns *it) {
    Words w[COLUMNS / 8];
    words_of(rows, start, stride, 4, blocks, w);
    nibbles(w, 4, 4 * blocks, it->fours);
}

static void q5_small(const uint8_t *const *rows, int64_t start, int64_t stride, int64_t blocks,
                     Columns *it) {
    Words bits[COLUMNS / 32];
    small_blocks(rows, start + 4, stride, blocks, it);
    words_of(rows, start, stride, 1, blocks, bits);
    fifth_bits(bits, blocks, it->fours);
}

/* 2 ** (e - 127) / 2 by the byte that begins a block: below 2, a subnormal number. */
static void exponents(const uint8_t *const *rows, int64_t stride, int64_t blocks, Floats *to) {
    for (int64_t i = 0; i < blocks; i++)
        for (int j = 0; j < TILE; j++) {
            uint32_t e = rows[j][i * stride];
            union { uint32_t u; float f; } bits = {e < 2 ? 0x200000u << e : (e - 1) << 23};
            to[i][j] = bits.f;
        }
}

static void blocks_of(int64_t format, const uint8_t *const *rows, int64_t n, Columns *it) {
    const int64_t stride = sizes_of[format].bytes;
    switch (format) {
    case Q2_K: q2_k(rows, n, it); return;
    case Q3_K: q3_k(rows, n, it); return;
    case Q4_K: q4_k(rows, n, it); return;
    case Q5_K: q5_k(rows, n, it); return;
    case Q6_K: q6_k(rows, n, it); return;
    case Q4_0:
    case IQ4_NL: small_blocks(rows, 2, 18, n, it); break;
    case Q4_1: small_blocks(rows, 4, 20, n, it); break;
    case Q5_0: q5_small(rows, 2, 22, n, it); break;
    case Q5_1: q5_small(rows, 4, 24, n, it); break;
    case MXFP4:
        small_blocks(rows, 1, 17, n, it);
        exponents(rows, 17, n, it->scales);
        return;
    case Q8_0:
        words_of(rows, 2, 34, 8, n, it->fours);
        for (int64_t i = 0; i < 8 * n; i++) EACH_ROW OF(it->fours[i]) ^= EACH_BYTE(128u);
    }
    halves_of(rows, 0, stride, n, 1.0f, 1, it->scales);
    if (format == Q4_1 || format == Q5_1) halves_of(rows, 2, stride, n, 1.0f, 1, it->offsets);
}

/* 4 codes a byte each of the low 16 bits. */
INLINE vu halves_apart(vu x) {
    x = (x | x << 8) & 0x00ff00ffu;
    return (x | x << 4) & EACH_BYTE(15u);
}

static void plain_codes(int64_t layout, const uint8_t *const *rows, Words *to) {
    Words w[COLUMNS / 8];
    if (layout != NIBBLES_LAYOUT) {
        words_of(rows, 0, 64, 16, COLUMNS / 64, to);
        for (int64_t i = 0; layout == SIGNED_LAYOUT && i < COLUMNS / 4; i++)
            EACH_ROW OF(to[i]) ^= EACH_BYTE(128u);
        return;
    }
    words_of(rows, 0, 64, 16, COLUMNS / 128, w);
    for (int64_t i = 0; i < COLUMNS / 8; i++) {
        EACH_ROW OF(to[2 * i]) = halves_apart(OF(w[i]) & 0xffff);
        EACH_ROW OF(to[2 * i + 1]) = halves_apart(OF(w[i]) >> 16);
    }
}

/* `count` codes of FLOAT8 from column `first` on as integers, and their scales. */
static void integers_of(const Stored *s, const uint8_t *const *rows, int64_t first, int64_t count,
                        Columns *it) {
    _Alignas(64) uint8_t codes[TILE][COLUMNS];
    _Alignas(64) float scales[TILE][COLUMN_GROUPS];
    const uint8_t *of_codes[TILE], *of_scales[TILE];
    int64_t columns = s->bits, per_row = divide_up(s->K, columns), scale = first / columns;
    for (int j = 0; j < TILE; j++) {
        of_codes[j] = codes[j], of_scales[j] = (const uint8_t *)scales[j];
        if (count < COLUMNS || it->rows[j] < 0) {
            memset(codes[j], 0, sizeof codes[j]);
            memset(scales[j], 0, sizeof scales[j]);
        }
        if (it->rows[j] >= 0)
            float8_row(rows[j], s->scales[it->of[j]] + it->rows[j] * per_row + scale, count, columns,
                       (scale + 1) * columns - first, codes[j], scales[j]);
    }
    words_of(of_codes, 0, 64, 16, COLUMNS / 64, it->fours);
    words_of(of_scales, 0, 64, 16, COLUMN_GROUPS / 16, (Words *)it->scales);
}

/* Columns from `first` on, at most COLUMNS, of rows. What is beyond K, and rows that are none, are
 * codes and scales of 0. The same columns of the rows that are read next are fetched: they are
 * far apart. */
static void columns_of_rows(const Stored *s, int64_t first, Columns *it) {
    _Alignas(64) uint8_t padded[TILE][CHUNK_BYTES];
    static const uint8_t none[CHUNK_BYTES];
    const uint8_t *rows[TILE];
    int64_t layout = s->layout, count = min_int(COLUMNS, s->K - first);
    int64_t row_bytes = bytes_of(layout, s->K), bytes = bytes_of(layout, count);
    for (int j = 0; j < TILE; j++) {
        rows[j] = none;
        if (it->rows[j] < 0) continue;
        rows[j] = s->codes[it->of[j]] + it->rows[j] * row_bytes + bytes_of(layout, first);
        for (int64_t i = 0; i < bytes; i += 64)
            __builtin_prefetch(rows[j] + s->further * row_bytes + i, 0, 2);
        if (count < COLUMNS && !is_blocks(layout)) {
            memcpy(padded[j], rows[j], (size_t)bytes);
            memset(padded[j] + bytes, layout == SIGNED_LAYOUT ? 128 : 0, (size_t)(CHUNK_BYTES - bytes));
            rows[j] = padded[j];
        }
    }
    if (layout == FLOAT8_LAYOUT) integers_of(s, rows, first, count, it);
    else if (!is_blocks(layout)) plain_codes(layout, rows, it->fours);
    else blocks_of(layout, rows, count / sizes_of[layout].weights, it);
    for (int64_t i = count / 4; is_blocks(layout) && i < COLUMNS / 4; i++)
        memset(it->fours[i], 0, sizeof it->fours[i]);
    for (int j = 0; j < TILE; j++) {
        for (int i = 0; it->rows[j] < 0 && i < COLUMNS / 4; i++) it->fours[i][j] = 0;
        for (int i = 0; it->rows[j] < 0 && i < COLUMN_GROUPS; i++)
            it->scales[i][j] = it->offsets[i][j] = 0;
    }
}

#include "words.c"

static void read_columns(const Stored *s, int64_t first, Columns *it) {
    if (is_by_rows(s->layout)) columns_of_rows(s, first, it);
    else columns_of_words(s, first, it);
}

/* What is read together, TILE outputs each, of one matrix or of gates and ups. */
INLINE int64_t columns_at_once(int64_t layout, int has_ups) {
    return layout == OUTPUTS_LAYOUT ? LINE_OUTPUTS / (has_ups ? VW : TILE) : 1;
}

_Static_assert(LINE_OUTPUTS / VW * sizeof(Columns) <= SCRATCH_BYTES, "a worker's scratch is too small");

/* The same columns of `count` neighbours, as many as are read together or the last ones. */
static void read_together(const Stored *s, int64_t first, Columns *its, int64_t count) {
    const int is_line = s->layout == OUTPUTS_LAYOUT && count == columns_at_once(s->layout, its->of[VW]);
    if (is_line && lines_of_outputs(s, first, its)) return;
    for (int64_t i = 0; i < count; i++) read_columns(s, first, its + i);
}

static int64_t unpack_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    int64_t outputs = TILE * columns_at_once(op->n[2], 0);
    return max_int(1, divide_up(step->counts[op->count], outputs));
}

/* Columns from `first` on, which have been read, to codes and, of a layout that has them, scales and
 * offsets of `per` columns. */
static void put_columns(const Op *op, const Columns *it, int64_t first, int64_t per) {
    const int64_t K = op->n[0], count = min_int(COLUMNS, K - first);
    const int64_t groups = has_scales(op->n[2]) ? divide_up(count, per) : 0;
    uint8_t *codes = op->p[1];
    float *scales = op->p[2], *offsets = op->p[3];
    for (int64_t j = 0; j < TILE && it->rows[j] >= 0; j++) {
        int64_t group = it->rows[j] * divide_up(K, per) + first / per;
        for (int64_t k = 0; k < count; k += 4)
            memcpy(codes + it->rows[j] * K + first + k, it->fours[k / 4] + j,
                   (size_t)min_int(4, count - k));
        for (int64_t g = 0; scales && g < groups; g++) scales[group + g] = it->scales[g][j];
        for (int64_t g = 0; offsets && g < groups; g++) offsets[group + g] = it->offsets[g][j];
    }
}

static void unpack_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    int64_t K = op->n[0], N = op->n[1], layout = op->n[2], size = columns_at_once(layout, 0);
    Stored s = {.codes = {op->p[0]}, .scales = {op->p[5]}, .order = op->p[4], .layout = layout,
                .bits = op->n[3], .K = K, .beside = N, .further = TILE};
    const Sizes sizes = sizes_of[layout];
    const int64_t per = is_blocks(layout) ? sizes.weights / sizes.groups /* columns of a scale */
                                          : float8_group(op->n[3]);
    Columns *its = (Columns *)me->scratch;
    for (int64_t j = 0; j < size * TILE; j++) {
        int64_t row = chunk * size * TILE + j;
        its[j / TILE].rows[j % TILE] = row < min_int(N, step->counts[op->count]) ? row : -1;
        its[j / TILE].of[j % TILE] = 0;
    }
    for (int64_t first = 0; first < K; first += COLUMNS) {
        read_together(&s, first, its, size);
        for (int64_t i = 0; i < size; i++) put_columns(op, its + i, first, per);
    }
}
