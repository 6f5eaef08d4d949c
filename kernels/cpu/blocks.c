/* Codes as files have them, one a byte, and the float scales of GGUF's blocks: what
 * kernels/weights.py defines, exactly. pack.c makes panels of them, a few columns at a time.
 *
 *   UNPACK  p  codes as stored, codes (uint8 [N, K]) or 0, scales or 0, offsets or 0 (both float),
 *              order or 0
 *           n  K, N, layout (blocks.py's number), bits (of words)
 *
 *   BYTES    uint8 [N, K]
 *   SIGNED   int8 [N, K], less 128
 *   NIBBLES  uint8 [N, K / 2], the low halves first
 *   WORDS    int32 [K * bits / 32, N], a word's lowest bits first (GPTQ); column k of the codes is
 *            order[k] of the words' (int64)
 *   OUTPUTS  int32 [K, N / 8]: a word has outputs 0, 2, 4, 6, 1, 3, 5, 7, the lowest bits first (AWQ)
 *   others   GGUF's blocks; what each byte means is ggml's, model/gguf/blocks.py has it in torch
 */
#include "common.h"

#define UNPACK_ROWS 8 /* of a chunk */

enum {
    BYTES_LAYOUT, SIGNED_LAYOUT, NIBBLES_LAYOUT, WORDS_LAYOUT, OUTPUTS_LAYOUT,
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, MXFP4
};

/* The float16 of two bytes, subnormal numbers, infinities and NaN too. */
INLINE float half_at(const uint8_t *b) {
    uint32_t h = b[0] | (uint32_t)b[1] << 8;
    union { uint32_t u; float f; } bits = {(h & 0x7fff) << 13};
    if ((h & 0x7c00) == 0x7c00) bits.u |= 0x7f800000;
    else bits.f *= 0x1p112f;
    bits.u |= (h & 0x8000) << 16;
    return bits.f;
}

INLINE void half_to(float *to, const uint8_t *b) {
    if (to) *to = half_at(b);
}

/* 16 bytes, in words whose shifts need a mask. As single bytes GCC would take them one by one, since
 * codes could overlap what is read. */
typedef uint32_t Sixteen __attribute__((vector_size(16)));
typedef Sixteen sixteen_any __attribute__((aligned(1), may_alias));
#define EACH_BYTE(x) ((x) * 0x01010101u)

INLINE Sixteen sixteen_at(const uint8_t *b) { return *(const sixteen_any *)b; }
INLINE void put_sixteen(uint8_t *codes, Sixteen x) { *(sixteen_any *)codes = x; }

INLINE void nibbles(const uint8_t *b, uint8_t *codes, int count) {
    if (!codes) return;
    for (int i = 0; i < count; i += 16) {
        Sixteen x = sixteen_at(b + i);
        put_sixteen(codes + i, x & EACH_BYTE(15u));
        put_sixteen(codes + i + count, x >> 4 & EACH_BYTE(15u));
    }
}

/* codes |= 16 times the 32 bits at b. */
INLINE void fifth_bits(const uint8_t *b, uint8_t *codes) {
    uint8_t all[32];
    uint32_t bits;
    if (!codes) return;
    memcpy(&bits, b, 4);
    for (int i = 0; i < 32; i++) all[i] = (uint8_t)((bits >> i & 1) << 4);
    for (int i = 0; i < 32; i += 16)
        put_sixteen(codes + i, sixteen_at(codes + i) | sixteen_at(all + i));
}

/* Eight scales and mins of 6 bits each, in 12 bytes. */
INLINE void six_bits(const uint8_t *b, float *scales, float *offsets) {
    if (!scales) return;
    float d = half_at(b), lowest = -half_at(b + 2);
    const uint8_t *low = b + 4, *low_mins = b + 8, *both = b + 12;
    for (int i = 0; i < 4; i++) {
        scales[i] = d * (float)(low[i] & 63);
        offsets[i] = lowest * (float)(low_mins[i] & 63);
        scales[i + 4] = d * (float)((both[i] & 15) | (low[i] >> 2 & 48));
        offsets[i + 4] = lowest * (float)(both[i] >> 4 | (low_mins[i] >> 2 & 48));
    }
}

INLINE void q2_k(const uint8_t *b, uint8_t *codes, float *scales, float *offsets) {
    float d = half_at(b + 80), lowest = -half_at(b + 82);
    for (int i = 0; scales && i < 16; i++) {
        scales[i] = d * (float)(b[i] & 15);
        offsets[i] = lowest * (float)(b[i] >> 4);
    }
    for (int part = 0; codes && part < 8; part++)
        for (int i = 0; i < 32; i += 16) {
            Sixteen x = sixteen_at(b + 16 + part / 4 * 32 + i) >> (uint32_t)(part % 4 * 2);
            put_sixteen(codes + part * 32 + i, x & EACH_BYTE(3u));
        }
}

INLINE void q3_k(const uint8_t *b, uint8_t *codes, float *scales) {
    const uint8_t *packed = b + 96;
    float d = half_at(b + 108);
    for (int i = 0; scales && i < 16; i++) {
        int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4;
        scales[i] = d * (float)((low | (packed[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32);
    }
    for (int part = 0; codes && part < 8; part++)
        for (int i = 0; i < 32; i += 16) {
            Sixteen low = sixteen_at(b + 32 + part / 4 * 32 + i) >> (uint32_t)(part % 4 * 2);
            Sixteen high = sixteen_at(b + i) >> (uint32_t)part;
            put_sixteen(codes + part * 32 + i, (low & EACH_BYTE(3u)) | (high & EACH_BYTE(1u)) << 2);
        }
}

INLINE void q4_k(const uint8_t *b, uint8_t *codes, float *scales, float *offsets) {
    six_bits(b, scales, offsets);
    if (!codes) return;
    for (int part = 0; part < 4; part++) nibbles(b + 16 + part * 32, codes + part * 64, 32);
}

INLINE void q5_k(const uint8_t *b, uint8_t *codes, float *scales, float *offsets) {
    six_bits(b, scales, offsets);
    if (!codes) return;
    for (int part = 0; part < 4; part++) nibbles(b + 48 + part * 32, codes + part * 64, 32);
    for (int part = 0; part < 8; part++)
        for (int i = 0; i < 32; i += 16) {
            uint8_t *to = codes + part * 32 + i;
            Sixteen high = sixteen_at(b + 16 + i) >> (uint32_t)part & EACH_BYTE(1u);
            put_sixteen(to, sixteen_at(to) | high << 4);
        }
}

INLINE void q6_k(const uint8_t *b, uint8_t *codes, float *scales) {
    float d = half_at(b + 208);
    for (int i = 0; scales && i < 16; i++) scales[i] = d * (float)(int8_t)b[192 + i];
    for (int half = 0; codes && half < 2; half++) {
        nibbles(b + half * 64, codes + half * 128, 64);
        for (int part = 0; part < 4; part++)
            for (int i = 0; i < 32; i += 16) {
                uint8_t *to = codes + half * 128 + part * 32 + i;
                Sixteen high = sixteen_at(b + 128 + half * 32 + i) >> (uint32_t)(part * 2);
                put_sixteen(to, sixteen_at(to) | (high & EACH_BYTE(3u)) << 4);
            }
    }
}

/* Half of 2 ** (e - 127): below 2, a subnormal number. */
INLINE float half_power(uint32_t e) {
    union { uint32_t u; float f; } bits = {e < 2 ? 0x200000u << e : (e - 1) << 23};
    return bits.f;
}

typedef struct {
    int bytes, weights, groups; /* of a block */
} Sizes;

static const Sizes sizes_of[] = {
    [BYTES_LAYOUT] = {1, 1, 0}, [SIGNED_LAYOUT] = {1, 1, 0}, [NIBBLES_LAYOUT] = {1, 2, 0},
    [Q4_0] = {18, 32, 1},       [Q4_1] = {20, 32, 1},        [Q5_0] = {22, 32, 1},
    [Q5_1] = {24, 32, 1},       [Q8_0] = {34, 32, 1},        [Q2_K] = {84, 256, 16},
    [Q3_K] = {110, 256, 16},    [Q4_K] = {144, 256, 8},      [Q5_K] = {176, 256, 8},
    [Q6_K] = {210, 256, 16},    [IQ4_NL] = {18, 32, 1},      [MXFP4] = {17, 32, 1},
};

/* Every block of a row with `STEPS`, which sees b, codes, scales and offsets of the block. */
#define EACH(FORMAT, STEPS)                                                   \
    case FORMAT:                                                              \
        for (int64_t i = 0; i < blocks; i++) {                                \
            const Sizes each = sizes_of[FORMAT];                              \
            const uint8_t *b = row + i * each.bytes;                          \
            uint8_t *c = codes ? codes + i * each.weights : 0;                \
            float *s = scales ? scales + i * each.groups : 0;                 \
            float *o = offsets ? offsets + i * each.groups : 0;               \
            (void)o;                                                          \
            STEPS                                                             \
        }                                                                     \
        return;

static void unpack_row(int64_t format, int64_t blocks, const uint8_t *row, uint8_t *codes,
                       float *scales, float *offsets) {
    switch (format) {
    EACH(Q4_0, { half_to(s, b); nibbles(b + 2, c, 16); })
    EACH(Q4_1, { half_to(s, b); half_to(o, b + 2); nibbles(b + 4, c, 16); })
    EACH(Q5_0, { half_to(s, b); nibbles(b + 6, c, 16); fifth_bits(b + 2, c); })
    EACH(Q5_1, {
        half_to(s, b);
        half_to(o, b + 2);
        nibbles(b + 8, c, 16);
        fifth_bits(b + 4, c);
    })
    EACH(Q8_0, {
        half_to(s, b);
        for (int j = 0; c && j < 32; j += 16)
            put_sixteen(c + j, sixteen_at(b + 2 + j) ^ EACH_BYTE(128u));
    })
    EACH(Q2_K, { q2_k(b, c, s, o); })
    EACH(Q3_K, { q3_k(b, c, s); })
    EACH(Q4_K, { q4_k(b, c, s, o); })
    EACH(Q5_K, { q5_k(b, c, s, o); })
    EACH(Q6_K, { q6_k(b, c, s); })
    EACH(IQ4_NL, { half_to(s, b); nibbles(b + 2, c, 16); })
    EACH(MXFP4, {
        if (s) *s = half_power(b[0]);
        nibbles(b + 1, c, 16);
    })
    }
}

INLINE int is_by_rows(int64_t layout) { return layout != WORDS_LAYOUT && layout != OUTPUTS_LAYOUT; }

/* Bytes of `count` columns, a multiple of 256 or all, in a layout that is_by_rows. */
INLINE int64_t bytes_of(int64_t layout, int64_t count) {
    return count / sizes_of[layout].weights * sizes_of[layout].bytes;
}

/* `count` codes in such a layout. */
static void codes_from(int64_t layout, const uint8_t *from, int64_t count, uint8_t *codes) {
    if (layout == BYTES_LAYOUT) {
        memcpy(codes, from, (size_t)count);
    } else if (layout == SIGNED_LAYOUT) {
        for (int64_t i = 0; i < count; i++) codes[i] = from[i] ^ 128;
    } else if (layout == NIBBLES_LAYOUT) {
        for (int64_t i = 0; i < count / 2; i++) {
            codes[2 * i] = from[i] & 15;
            codes[2 * i + 1] = from[i] >> 4;
        }
    } else {
        unpack_row(layout, count / sizes_of[layout].weights, from, codes, 0, 0);
    }
}

/* Where a code lies in words: the word's place, and its shift. */
INLINE int64_t word_of(const Op *op, int64_t layout, int64_t bits, int64_t N, int64_t row, int64_t k,
                       int *shift) {
    static const uint8_t places[] = {0, 4, 1, 5, 2, 6, 3, 7}; /* of OUTPUTS_LAYOUT */
    const int64_t *order = op->p[4];
    if (layout == OUTPUTS_LAYOUT) {
        *shift = 4 * places[row % 8];
        return k * (N / 8) + row / 8;
    }
    int64_t bit = (order ? order[k] : k) * bits;
    *shift = (int)(bit % 32);
    return bit / 32 * N + row;
}

static int64_t unpack_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return max_int(1, divide_up(step->counts[op->count], UNPACK_ROWS));
}

static void unpack_words(const Op *op, int64_t first, int64_t last, int64_t N) {
    int64_t K = op->n[0], layout = op->n[2], bits = op->n[3];
    const uint32_t *words = op->p[0];
    uint8_t *codes = op->p[1];
    for (int64_t k = 0; k < K; k++)
        for (int64_t row = first; row < last; row++) {
            int shift;
            int64_t word = word_of(op, layout, bits, N, row, k, &shift);
            codes[row * K + k] = (uint8_t)(words[word] >> shift & ((1u << bits) - 1));
        }
}

static void unpack_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    int64_t K = op->n[0], N = op->n[1], layout = op->n[2];
    int64_t first = chunk * UNPACK_ROWS;
    int64_t last = min_int(step->counts[op->count], first + UNPACK_ROWS);
    uint8_t *codes = op->p[1];
    float *scales = op->p[2], *offsets = op->p[3];
    if (!is_by_rows(layout)) {
        unpack_words(op, first, last, N);
        return;
    }
    const uint8_t *stored = op->p[0];
    const int64_t blocks = K / sizes_of[layout].weights, groups = blocks * sizes_of[layout].groups;
    for (int64_t row = first; row < last; row++) {
        const uint8_t *from = stored + row * bytes_of(layout, K);
        if (codes) codes_from(layout, from, K, codes + row * K);
        if (scales)
            unpack_row(layout, blocks, from, 0, scales + row * groups,
                       offsets ? offsets + row * groups : 0);
    }
}
