/* Scales of a quantized matrix into the form in which panels have them; see quantized_linear.py.
 *
 *   NARROW  p  x (float [N, G]), x as float16, faults (uint8 [N]): 1 where that rounds by more than
 *              2**-11 of a number of the row
 *           n  G
 *   ZEROS   p  scales, offsets (float [N, G]), zero points (uint8 [N, G]), faults: 1 where an offset
 *              is not a scale times a zero point from 0 to 15
 *           n  G
 *   FLOAT8  p  codes (e4m3 [N, K]), scales (float [N, G]), codes (uint8 [N, K]), their scales
 *              (float [N, K / 32])
 *           n  K, columns of a scale
 */
#include "codes.c"
#include "common.h"

#define SCALES_ROWS 16  /* a chunk of work */
#define FLOAT8_GROUP 32 /* columns of an integer's scale */

/* float16's bits, to the nearest and ties to even; beyond its largest, infinity. */
INLINE vi half_of(vf x) {
    vi bits = (vi)x & 0x7fffffff;
    vi normal = ((bits + 0xfff + ((bits >> 13) & 1)) >> 13) - (112 << 10);
    vi small = (vi)((vf)bits + 0.5f) - (vi)splat(0.5f); /* to 2**-24, the subnormals' step */
    vi code = (vi)choose((vf)bits < 0x1p-14f, (vf)small, (vf)normal);
    vi is_large = bits >= 0x477ff000;
    code = (code & ~is_large) | (is_large & 0x7c00);
    return code | ((vi)((vu)x >> 16) & 0x8000);
}

INLINE vf of_half(vi h) {
    vf x = (vf)((h & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vi)x | (h & 0x8000) << 16);
}

INLINE vf magnitude(vf x) { return (vf)((vi)x & 0x7fffffff); }

INLINE vf load_some(const float *p, int64_t count) {
    vf x = {0};
    if (count >= VW) return load_f32(p);
    memcpy(&x, p, (size_t)count * sizeof *p);
    return x;
}

INLINE int any_of(vi x) {
    int32_t any = 0;
    for (int i = 0; i < VW; i++) any |= x[i];
    return any != 0;
}

static int64_t scales_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return max_int(1, divide_up(step->counts[op->count], SCALES_ROWS));
}

static void narrow_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    int64_t G = op->n[0], last = min_int(step->counts[op->count], (chunk + 1) * SCALES_ROWS);
    for (int64_t row = chunk * SCALES_ROWS; row < last; row++) {
        const float *x = (const float *)op->p[0] + row * G;
        uint16_t *out = (uint16_t *)op->p[1] + row * G;
        vi faults = {0};
        for (int64_t g = 0; g < G; g += VW) {
            vf some = load_some(x + g, G - g);
            vi half = half_of(some);
            /* Not <=, so that NaN is a fault. */
            faults |= ~(magnitude(of_half(half) - some) <= magnitude(some) * 0x1p-11f);
            vh narrow = __builtin_convertvector((vu)half, vh);
            memcpy(out + g, &narrow, (size_t)min_int(VW, G - g) * sizeof *out);
        }
        ((uint8_t *)op->p[2])[row] = (uint8_t)any_of(faults);
    }
}

static void zeros_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    int64_t G = op->n[0], last = min_int(step->counts[op->count], (chunk + 1) * SCALES_ROWS);
    for (int64_t row = chunk * SCALES_ROWS; row < last; row++) {
        const float *scales = (const float *)op->p[0] + row * G;
        const float *offsets = (const float *)op->p[1] + row * G;
        uint8_t *out = (uint8_t *)op->p[2] + row * G, fault = 0;
        for (int64_t g = 0; g < G; g++) {
            float zero = -rintf(offsets[g] / scales[g]);
            int is_one = zero >= 0 && zero <= 15;
            fault |= !(is_one && -(zero * scales[g]) == offsets[g]);
            out[g] = is_one ? (uint8_t)zero : 0;
        }
        ((uint8_t *)op->p[3])[row] = fault;
    }
}

#define PER_GROUP (FLOAT8_GROUP / VW) /* vectors of a group */

/* Numbers as integers around 128, a group under the scale of its largest, which is rounded to
 * float16 where that rounds by little. At most VW groups at once, of `count` numbers; x has zeros
 * beyond. */
static void float8_groups(const vf *x, int64_t count, uint8_t *codes, float *scales) {
    float largest[VW] = {0}, inverses[VW];
    int8_t all[VW * FLOAT8_GROUP];
    int64_t groups = divide_up(count, FLOAT8_GROUP);
    for (int64_t g = 0; g < groups; g++) {
        vf most = {0};
        for (int i = 0; i < PER_GROUP; i++) most = max_of(magnitude(x[g * PER_GROUP + i]), most);
        largest[g] = largest_of(most);
    }
    vf wide = load_f32(largest) / 127.0f, narrow = of_half(half_of(wide));
    vf scale = choose(magnitude(narrow - wide) <= wide * 0x1p-11f, narrow, wide);
    store_f32(inverses, choose(scale > 0.0f, 1.0f / scale, (vf){0}));
    memcpy(scales, &scale, (size_t)groups * sizeof *scales);
    for (int64_t i = 0; i < groups * PER_GROUP; i++) {
        vf level = x[i] * splat(inverses[i / PER_GROUP]);
        level = min_of(splat(127.0f), max_of(splat(-127.0f), level));
        vi code = (vi)(level + 12582912.0f) - (vi)splat(12582912.0f) + 128;
        *(vb_any *)(all + i * VW) = __builtin_convertvector(code, vb);
    }
    memcpy(codes, all, (size_t)count);
}

/* A row of codes, with a scale for 16 columns, a multiple of it, or all. */
static void float8_row(const int8_t *from, const float *scale, int64_t K, int64_t columns,
                       uint8_t *codes, float *to) {
    vf x[VW * PER_GROUP];
    int64_t left = columns; /* until the next scale */
    for (int64_t k = 0; k < K; k += VW * FLOAT8_GROUP, to += VW) {
        int64_t count = min_int(VW * FLOAT8_GROUP, K - k);
        memset(x, 0, sizeof x);
        for (int64_t i = 0; i < count; i += VW, left -= VW) {
            vb some = {0};
            if (left == 0) scale++, left = columns;
            if (count - i >= VW) some = *(const vb_any *)(from + k + i);
            else memcpy(&some, from + k + i, (size_t)(count - i));
            x[i / VW] = value_of(some, FP8) * *scale;
        }
        float8_groups(x, count, codes + k, to);
    }
}

static void float8_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    int64_t K = op->n[0], columns = op->n[1], groups = divide_up(K, FLOAT8_GROUP);
    int64_t last = min_int(step->counts[op->count], (chunk + 1) * SCALES_ROWS);
    for (int64_t row = chunk * SCALES_ROWS; row < last; row++)
        float8_row((const int8_t *)op->p[0] + row * K,
                   (const float *)op->p[1] + row * divide_up(K, columns), K, columns,
                   (uint8_t *)op->p[2] + row * K, (float *)op->p[3] + row * groups);
}
