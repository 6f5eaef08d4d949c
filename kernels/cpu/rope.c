/* Splits qkv [T, Hq + 2 * Hk, D]: q and k are normed (where there are weights) and rotated, q goes
 * to out [T, Hq, D], k and v into the tokens' slots of the pool's layer.
 *
 *   p  qkv, q_norm or 0, k_norm or 0, cos, sin [P, rotary], positions, slots (int64 [T]),
 *      pool layer [N, 2, Hk, rows, D], out
 *   n  Hq, Hk, D, rotary, B, elements from block to block, stride of qkv      f  eps of the norms
 *   flags  PLAIN, INT8 or FP8: the pool's elements
 */
#include "codes.c"

/* Where K or V of a token's head lie in the pool, and its scale; the V heads follow the K heads. */
typedef struct {
    char *elements;
    float *scale;
} Place;

INLINE Place place_of(void *pool, int64_t slot, int64_t h, int64_t block_stride, int64_t B,
                      int64_t D, int kind, int dtype) {
    int64_t start = slot / B * block_stride + h * head_rows(kind, B, D) * D, token = slot % B;
    char *head = (char *)pool + start * pool_size(kind, dtype);
    return (Place){head + token * D * pool_size(kind, dtype), (float *)(head + B * D) + token};
}

/* A head of K or V in dtype -> the pool. */
INLINE void store_head(Place to, const void *x, int64_t D, int kind, int dtype) {
    if (kind == PLAIN) memcpy(to.elements, x, D * size_of(dtype));
    else if (kind == INT8) store_codes((int8_t *)to.elements, to.scale, x, D, INT8, dtype);
    else store_codes((int8_t *)to.elements, to.scale, x, D, FP8, dtype);
}

INLINE void rotate(const float *x, const void *cos, const void *sin, int64_t D, int64_t rotary,
                   void *out, int dtype) {
    int64_t half = rotary / 2, i = 0;
    if (half % VW == 0)
        for (; i < rotary; i += VW) {
            vf other = load_f32(x + (i < half ? i + half : i - half));
            store(out, i, load_f32(x + i) * load(cos, i, dtype) + other * load(sin, i, dtype), dtype);
        }
    for (; i < rotary; i++) {
        float other = x[i < half ? i + half : i - half];
        store_one(out, i, x[i] * load_one(cos, i, dtype) + other * load_one(sin, i, dtype), dtype);
    }
    for (; i < D; i++) store_one(out, i, x[i], dtype);
}

/* Norm and rotate one head of one token into out or the pool; a head of v is stored as it is. */
INLINE void rope_head(const Op *op, int64_t t, int64_t h, int dtype) {
    int64_t Hq = op->n[0], Hk = op->n[1], D = op->n[2], rotary = op->n[3], B = op->n[4];
    int64_t position = ((const int64_t *)op->p[5])[t], slot = ((const int64_t *)op->p[6])[t];
    Place place = {0};
    if (h >= Hq) place = place_of(op->p[7], slot, h - Hq, op->n[5], B, D, op->flags, dtype);
    const void *x = at(op->p[0], t * op->n[6] + h * D, dtype);
    if (h >= Hq + Hk) {
        store_head(place, x, D, op->flags, dtype);
        return;
    }
    _Alignas(64) char rotated[HEAD_MAX * 4];
    void *to = h < Hq ? at(op->p[8], (t * Hq + h) * D, dtype) : place.elements;
    if (h >= Hq && op->flags) to = rotated;
    const void *weight = op->p[h < Hq ? 1 : 2];
    float wide[HEAD_MAX], factor = 1;
    int64_t i = 0;
    if (weight) {
        vf squares = {0};
        for (; i + VW <= D; i += VW) squares += load(x, i, dtype) * load(x, i, dtype);
        float total = sum_of(squares);
        for (; i < D; i++) total += load_one(x, i, dtype) * load_one(x, i, dtype);
        factor = 1.0f / sqrtf(total / (float)D + op->f[0]);
    }
    for (i = 0; i + VW <= D; i += VW) {
        vf v = load(x, i, dtype) * factor;
        store_f32(wide + i, weight ? v * load(weight, i, dtype) : v);
    }
    for (; i < D; i++) {
        float v = load_one(x, i, dtype) * factor;
        wide[i] = weight ? v * load_one(weight, i, dtype) : v;
    }
    rotate(wide, at(op->p[3], position * rotary, dtype), at(op->p[4], position * rotary, dtype), D,
           rotary, to, dtype);
    if (to == rotated) store_head(place, to, D, op->flags, dtype);
}

#define ROPE_TOKENS 16

/* Tokens a chunk: neighbours lie side by side in the pool, so they are taken head by head (2,048
 * tokens of 16/8 heads of 128: 1.3 ms, token by token 2.7; 2026-11-22). */
static int64_t rope_tokens(const Op *op, const Step *step, int threads) {
    return max_int(1, min_int(ROPE_TOKENS, step->counts[op->count] / (4 * threads)));
}

static int64_t rope_chunks(const Op *op, const Step *step, int threads) {
    return max_int(1, divide_up(step->counts[op->count], rope_tokens(op, step, threads)));
}

static void rope_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    int64_t tokens = rope_tokens(op, step, me->threads), heads = op->n[0] + 2 * op->n[1];
    int64_t first = chunk * tokens, last = min_int(step->counts[op->count], first + tokens);
    for (int64_t h = 0; h < heads; h++)
        for (int64_t t = first; t < last; t++)
            if (op->dtype == F32) rope_head(op, t, h, F32);
            else rope_head(op, t, h, BF16);
}

/* k and v [T, Hk, D] into the slots.
 *
 *   p  k, v, slots, pool layer      n  Hk, D, B, elements from block to block, strides of k: token,
 *      head, strides of v: token, head      flags  as above
 */
static int64_t store_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return max_int(1, step->counts[op->count]);
}

static void store_run(const Op *op, const Step *step, int64_t t, Worker *me) {
    (void)me;
    int64_t Hk = op->n[0], D = op->n[1], B = op->n[2];
    if (t >= step->counts[op->count]) return;
    int64_t slot = ((const int64_t *)op->p[2])[t];
    for (int64_t h = 0; h < 2 * Hk; h++) {
        const int64_t *stride = op->n + (h < Hk ? 4 : 6);
        const char *from = at(op->p[h / Hk], t * stride[0] + h % Hk * stride[1], op->dtype);
        Place to = place_of(op->p[3], slot, h, op->n[3], B, D, op->flags, op->dtype);
        if (op->dtype == F32) store_head(to, from, D, op->flags, F32);
        else store_head(to, from, D, op->flags, BF16);
    }
}
