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

/* A group's numbers as integers around 128 under the scale of its largest, which is rounded to
 * float16 where that rounds by little. */
INLINE void float8_group(const vf *x, int64_t count, uint8_t *codes, float *scale) {
    vf most = {0};
    for (int i = 0; i < FLOAT8_GROUP / VW; i++) most = max_of(magnitude(x[i]), most);
    float wide = largest_of(most) / 127.0f, narrow = of_half(half_of(splat(wide)))[0];
    *scale = fabsf(narrow - wide) <= wide * 0x1p-11f ? narrow : wide;
    float inverse = *scale > 0 ? 1.0f / *scale : 0.0f;
    int8_t all[FLOAT8_GROUP];
    for (int i = 0; i < FLOAT8_GROUP / VW; i++) {
        vf level = min_of(splat(127.0f), max_of(splat(-127.0f), x[i] * inverse));
        vi code = (vi)(level + 12582912.0f) - (vi)splat(12582912.0f) + 128;
        *(vb_any *)(all + i * VW) = __builtin_convertvector(code, vb);
    }
    memcpy(codes, all, (size_t)count);
}

static void float8_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    int64_t K = op->n[0], group = op->n[1], groups = divide_up(K, FLOAT8_GROUP);
    int64_t last = min_int(step->counts[op->count], (chunk + 1) * SCALES_ROWS);
    for (int64_t row = chunk * SCALES_ROWS; row < last; row++) {
        const int8_t *from = (const int8_t *)op->p[0] + row * K;
        const float *scales = (const float *)op->p[1] + row * divide_up(K, group);
        for (int64_t g = 0; g < groups; g++) {
            int64_t first = g * FLOAT8_GROUP, count = min_int(FLOAT8_GROUP, K - first);
            int8_t some[FLOAT8_GROUP] = {0};
            float own[2]; /* a group is 16 columns or more */
            memcpy(some, from + first, (size_t)count);
            for (int i = 0; i < 2; i++) own[i] = scales[min_int(first + 16 * i, K - 1) / group];
            vf x[FLOAT8_GROUP / VW];
            for (int i = 0; i < FLOAT8_GROUP / VW; i++)
                x[i] = value_of(*(const vb_any *)(some + i * VW), FP8) * own[i * VW / 16];
            float8_group(x, count, (uint8_t *)op->p[2] + row * K + first,
                         (float *)op->p[3] + row * groups + g);
        }
    }
}
