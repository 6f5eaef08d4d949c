/* GGUF's blocks as codes, one a byte, and float scales: what kernels/weights.py defines, exactly.
 *
 *   UNPACK  p  rows of blocks (uint8), codes (uint8), scales, offsets or 0 (both float)
 *           n  blocks of a row, the format (blocks.py's number)
 *
 * What each byte means is ggml's; model/gguf/blocks.py says the same in torch.
 */
#include "common.h"

#define UNPACK_ROWS 8 /* of a chunk */

enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, MXFP4 };

/* The float16 of two bytes, subnormal numbers, infinities and NaN too. */
INLINE float half_at(const uint8_t *b) {
    uint32_t h = b[0] | (uint32_t)b[1] << 8;
    union { uint32_t u; float f; } bits = {(h & 0x7fff) << 13};
    if ((h & 0x7c00) == 0x7c00) bits.u |= 0x7f800000;
    else bits.f *= 0x1p112f;
    bits.u |= (h & 0x8000) << 16;
    return bits.f;
}

INLINE void nibbles(const uint8_t *b, uint8_t *codes, int count) {
    for (int i = 0; i < count; i++) {
        codes[i] = b[i] & 15;
        codes[i + count] = b[i] >> 4;
    }
}

INLINE void fifth_bits(const uint8_t *b, uint8_t *codes) {
    uint32_t bits;
    memcpy(&bits, b, 4);
    for (int i = 0; i < 32; i++) codes[i] |= (uint8_t)((bits >> i & 1) << 4);
}

/* Eight scales and mins of 6 bits each, in 12 bytes. */
INLINE void six_bits(const uint8_t *b, float *scales, float *offsets) {
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
    for (int i = 0; i < 16; i++) {
        scales[i] = d * (float)(b[i] & 15);
        offsets[i] = lowest * (float)(b[i] >> 4);
    }
    for (int part = 0; part < 8; part++)
        for (int i = 0; i < 32; i++)
            codes[part * 32 + i] = b[16 + part / 4 * 32 + i] >> part % 4 * 2 & 3;
}

INLINE void q3_k(const uint8_t *b, uint8_t *codes, float *scales) {
    const uint8_t *packed = b + 96;
    float d = half_at(b + 108);
    for (int i = 0; i < 16; i++) {
        int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4;
        scales[i] = d * (float)((low | (packed[8 + i % 4] >> i / 4 * 2 & 3) << 4) - 32);
    }
    for (int part = 0; part < 8; part++)
        for (int i = 0; i < 32; i++) {
            int low = b[32 + part / 4 * 32 + i] >> part % 4 * 2 & 3;
            codes[part * 32 + i] = (uint8_t)(low | (b[i] >> part & 1) << 2);
        }
}

INLINE void q4_k(const uint8_t *b, uint8_t *codes, float *scales, float *offsets) {
    six_bits(b, scales, offsets);
    for (int part = 0; part < 4; part++) nibbles(b + 16 + part * 32, codes + part * 64, 32);
}

INLINE void q5_k(const uint8_t *b, uint8_t *codes, float *scales, float *offsets) {
    six_bits(b, scales, offsets);
    for (int part = 0; part < 4; part++) nibbles(b + 48 + part * 32, codes + part * 64, 32);
    for (int part = 0; part < 8; part++)
        for (int i = 0; i < 32; i++) codes[part * 32 + i] |= (uint8_t)((b[16 + i] >> part & 1) << 4);
}

INLINE void q6_k(const uint8_t *b, uint8_t *codes, float *scales) {
    float d = half_at(b + 208);
    for (int i = 0; i < 16; i++) scales[i] = d * (float)(int8_t)b[192 + i];
    for (int half = 0; half < 2; half++) {
        nibbles(b + half * 64, codes + half * 128, 64);
        for (int part = 0; part < 4; part++)
            for (int i = 0; i < 32; i++) {
                int high = b[128 + half * 32 + i] >> part * 2 & 3;
                codes[half * 128 + part * 32 + i] |= (uint8_t)(high << 4);
            }
    }
}

/* Half of 2 ** (e - 127): below 2, a subnormal number. */
INLINE float half_power(uint32_t e) {
    union { uint32_t u; float f; } bits = {e < 2 ? 0x200000u << e : (e - 1) << 23};
    return bits.f;
}

/* Every block of a row with `STEPS`, which sees b, codes, scales and offsets of the block. */
#define EACH(FORMAT, BYTES, WEIGHTS, GROUPS, STEPS)                           \
    case FORMAT:                                                              \
        for (int64_t i = 0; i < blocks; i++) {                                \
            const uint8_t *b = row + i * (BYTES);                             \
            uint8_t *c = codes + i * (WEIGHTS);                               \
            float *s = scales + i * (GROUPS);                                 \
            float *o = offsets ? offsets + i * (GROUPS) : 0;                  \
            (void)o;                                                          \
            STEPS                                                             \
        }                                                                     \
        return (Sizes){BYTES, WEIGHTS, GROUPS};

typedef struct {
    int bytes, weights, groups; /* of a block */
} Sizes;

static Sizes unpack_row(int64_t format, int64_t blocks, const uint8_t *row, uint8_t *codes,
                        float *scales, float *offsets) {
    switch (format) {
    EACH(Q4_0, 18, 32, 1, { s[0] = half_at(b); nibbles(b + 2, c, 16); })
    EACH(Q4_1, 20, 32, 1, { s[0] = half_at(b); o[0] = half_at(b + 2); nibbles(b + 4, c, 16); })
    EACH(Q5_0, 22, 32, 1, { s[0] = half_at(b); nibbles(b + 6, c, 16); fifth_bits(b + 2, c); })
    EACH(Q5_1, 24, 32, 1, {
        s[0] = half_at(b);
        o[0] = half_at(b + 2);
        nibbles(b + 8, c, 16);
        fifth_bits(b + 4, c);
    })
    EACH(Q8_0, 34, 32, 1, {
        s[0] = half_at(b);
        for (int j = 0; j < 32; j++) c[j] = b[2 + j] ^ 128;
    })
    EACH(Q2_K, 84, 256, 16, { q2_k(b, c, s, o); })
    EACH(Q3_K, 110, 256, 16, { q3_k(b, c, s); })
    EACH(Q4_K, 144, 256, 8, { q4_k(b, c, s, o); })
    EACH(Q5_K, 176, 256, 8, { q5_k(b, c, s, o); })
    EACH(Q6_K, 210, 256, 16, { q6_k(b, c, s); })
    EACH(IQ4_NL, 18, 32, 1, { s[0] = half_at(b); nibbles(b + 2, c, 16); })
    EACH(MXFP4, 17, 32, 1, { s[0] = half_power(b[0]); nibbles(b + 1, c, 16); })
    }
    return (Sizes){0, 0, 0};
}

static int64_t unpack_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return max_int(1, divide_up(step->counts[op->count], UNPACK_ROWS));
}

static void unpack_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    int64_t blocks = op->n[0], format = op->n[1];
    Sizes each = unpack_row(format, 0, 0, 0, 0, 0);
    int64_t last = min_int(step->counts[op->count], (chunk + 1) * UNPACK_ROWS);
    for (int64_t i = chunk * UNPACK_ROWS; i < last; i++) {
        int64_t first = i * blocks;
        float *offsets = op->p[3] ? (float *)op->p[3] + first * each.groups : 0;
        unpack_row(format, blocks, (const uint8_t *)op->p[0] + first * each.bytes,
                   (uint8_t *)op->p[1] + first * each.weights,
                   (float *)op->p[2] + first * each.groups, offsets);
    }
}
