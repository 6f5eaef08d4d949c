/* Dense weights as codes of 4 bits in groups of columns, with a scale and a zero point for each:
 * the search of model/quantization/on_the_fly.py (`fit` there, without importance), VW groups at
 * once. Sums run over a group in order, so a CPU's vectors make no difference. Or as codes of 8 bits
 * around 128, with a scale for each row.
 *
 *   FIT    p  x [N, K] of the op's dtype, scales, zeros (float [N, groups]); or x, scales, 0:
 *             the scale [N] under which the largest number of a row is the largest code
 *   ROUND  p  x, scales, zeros or 0, codes (uint8 [N, K])
 *   n  K, columns of a group (at most 128)
 */
#include "dot.h"
#include "common.h"

#define FIT_GROUP_MAX 128
#define FIT_LEVELS 15.0f
#define FIT_LARGEST 127.0f
#define FIT_TINY 1e-12f
#define SHARES 3
#define FIT_STEPS 2 /* from each share of the group's range */
#define FIT_ROWS 4  /* a chunk of work */

static const float fit_shares[SHARES] = {1.0f, 0.9f, 0.8f};

INLINE vf at_least(vf x, float low) { return max_of(x, splat(low)); }

INLINE vf nearest_level(vf x) {
#if VW == 16
    x = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    x = (x + 12582912.0f) - 12582912.0f; /* 1.5 * 2**23; ties to even */
#endif
    return min_of(splat(FIT_LEVELS), at_least(x, 0.0f));
}

/* What the search keeps of VW groups: x, sums of x and of its squares. */
typedef struct {
    vf x[FIT_GROUP_MAX], total, square, low, high;
    int64_t size;
} Groups;

/* Sums over each group: of the codes' steps from `zero`, of steps * x and of steps squared. */
typedef struct {
    vf steps, by_x, by_step;
} Sums;

INLINE void take_groups(Groups *it, const void *x, int64_t first, int64_t K, int dtype) {
    int64_t whole = 0; /* of each group, taken as vectors that are turned */
    if (HAS_TRANSPOSE && (first + VW) * it->size <= K) whole = it->size / VW * VW;
    for (int64_t i = 0; i < whole; i += VW) {
        vi turned[VW];
        for (int g = 0; g < VW; g++) turned[g] = (vi)load(x, (first + g) * it->size + i, dtype);
        transpose(turned);
        for (int j = 0; j < VW; j++) it->x[i + j] = (vf)turned[j];
    }
    for (int64_t i = whole; i < it->size; i++)
        for (int g = 0; g < VW; g++) {
            int64_t k = (first + g) * it->size + i;
            it->x[i][g] = k < K ? load_one(x, k, dtype) : 0.0f;
        }
    it->total = it->square = (vf){0};
    it->low = splat(INFINITY), it->high = splat(-INFINITY);
    for (int64_t i = 0; i < it->size; i++) {
        vf each = it->x[i];
        it->total += each;
        it->square += each * each;
        it->low = min_of(each, it->low);
        it->high = max_of(each, it->high);
    }
}

/* Of every share at once: each sum is a chain, for which the next number would wait. */
INLINE void sums_of(const Groups *it, const vf scale[SHARES], const vf zero[SHARES], Sums s[SHARES]) {
    vf inverse[SHARES];
    for (int j = 0; j < SHARES; j++) {
        inverse[j] = 1.0f / scale[j];
        s[j] = (Sums){{0}, {0}, {0}};
    }
    for (int64_t i = 0; i < it->size; i++)
#pragma GCC unroll 3
        for (int j = 0; j < SHARES; j++) {
            vf step = nearest_level(it->x[i] * inverse[j] + zero[j]) - zero[j];
            s[j].steps += step;
            s[j].by_x += step * it->x[i];
            s[j].by_step += step * step;
        }
}

/* Scale and zero point of least squares for the codes of which these are the sums. */
INLINE void refit(const Groups *it, const Sums *s, vf *scale, vf *zero) {
    const float size = (float)it->size, each = 1.0f / size;
    vf spread = s->by_step - s->steps * s->steps * each;
    vf slope = (s->by_x - s->steps * it->total * each) / at_least(spread, FIT_TINY);
    slope = choose((spread > 0.0f) & (slope > 0.0f), slope, *scale);
    vf moved = nearest_level(*zero - (it->total - slope * s->steps) * each / slope);
    vf change = *zero - moved;
    vf by_x = s->by_x + change * it->total;
    vf by_step = s->by_step + 2.0f * change * s->steps + size * change * change;
    slope = by_x / at_least(by_step, FIT_TINY);
    *scale = choose((by_step > 0.0f) & (slope > 0.0f), slope, *scale);
    *zero = moved;
}

/* A scale is NaN where no error is finite: the group has an infinity or a NaN. Of equal errors that of
 * the first share counts, and of its first step. */
INLINE void search(const Groups *it, vf *best, vf *best_zero) {
    vf smallest[SHARES], scale[SHARES], zero[SHARES], found[SHARES], found_zero[SHARES];
    for (int j = 0; j < SHARES; j++) {
        smallest[j] = splat(INFINITY), found[j] = splat(NAN), found_zero[j] = splat(0.0f);
        scale[j] = at_least((it->high - it->low) * (fit_shares[j] / FIT_LEVELS), FIT_TINY);
        zero[j] = nearest_level(FIT_LEVELS / 2 - (it->high + it->low) / 2.0f / scale[j]);
    }
    for (int step = 0; step <= FIT_STEPS; step++) {
        Sums s[SHARES];
        sums_of(it, scale, zero, s);
        for (int j = 0; j < SHARES; j++) {
            vf error = it->square - 2.0f * scale[j] * s[j].by_x + scale[j] * scale[j] * s[j].by_step;
            vi is_less = error < smallest[j];
            smallest[j] = choose(is_less, error, smallest[j]);
            found[j] = choose(is_less, scale[j], found[j]);
            found_zero[j] = choose(is_less, zero[j], found_zero[j]);
            if (step < FIT_STEPS) refit(it, &s[j], &scale[j], &zero[j]);
        }
    }
    for (int j = 1; j < SHARES; j++) {
        vi is_less = smallest[j] < smallest[0];
        smallest[0] = choose(is_less, smallest[j], smallest[0]);
        found[0] = choose(is_less, found[j], found[0]);
        found_zero[0] = choose(is_less, found_zero[j], found_zero[0]);
    }
    *best = found[0], *best_zero = found_zero[0];
}

/* The groups of `K` numbers, VW at once: of several rows where these are whole groups. */
INLINE void fit_groups(const char *x, float *scales, float *zeros, int64_t K, int64_t group, int dtype) {
    int64_t groups = divide_up(K, group);
    for (int64_t first = 0; first < groups; first += VW) {
        Groups it;
        it.size = group;
        take_groups(&it, x, first, K, dtype);
        float found[2][VW];
        vf scale, zero;
        search(&it, &scale, &zero);
        store_f32(found[0], scale);
        store_f32(found[1], zero);
        size_t bytes = (size_t)min_int(VW, groups - first) * sizeof(float);
        memcpy(scales + first, found[0], bytes);
        memcpy(zeros + first, found[1], bytes);
    }
}

INLINE void fit_rows(const Op *op, int64_t row, int64_t rows, int dtype) {
    int64_t K = op->n[0], group = op->n[1], groups = divide_up(K, group);
    int64_t each = K % group ? 1 : rows; /* rows as one */
    for (int64_t last = row + rows; row < last; row += each)
        fit_groups(at(op->p[0], row * K, dtype), (float *)op->p[1] + row * groups,
                   (float *)op->p[2] + row * groups, each * K, group, dtype);
}

/* Codes of 4 bits around a zero, or where there is none of 8 bits around 128. */
INLINE vi codes_of(vf x, float scale, const float *zero) {
    if (zero) return to_nearest(nearest_level(x * (1.0f / scale) + *zero));
    vf largest = splat(FIT_LARGEST);
    return to_nearest(max_of(-largest, min_of(largest, x / scale))) + 128;
}

INLINE void round_row(const Op *op, int64_t row, int dtype) {
    int64_t K = op->n[0], group = op->p[2] ? op->n[1] : K, groups = divide_up(K, group);
    const char *x = at(op->p[0], row * K, dtype);
    int8_t *codes = (int8_t *)op->p[3] + row * K;
    for (int64_t g = 0; g < groups; g++) {
        const float scale = ((float *)op->p[1])[row * groups + g];
        const float *zero = op->p[2] ? (float *)op->p[2] + row * groups + g : 0;
        int64_t k = g * group, last = min_int(K, k + group);
        for (; k + VW <= last; k += VW)
            store_bytes(codes + k, codes_of(load(x, k, dtype), scale, zero));
        for (; k < last; k++)
            codes[k] = (int8_t)codes_of(splat(load_one(x, k, dtype)), scale, zero)[0];
    }
}

INLINE void largest_row(const Op *op, int64_t row, int dtype) {
    int64_t K = op->n[0], k = 0;
    const char *x = at(op->p[0], row * K, dtype);
    vi most = {0}; /* of magnitudes' bits, which are in order, and NaN's beyond them */
    for (; k + VW <= K; k += VW) {
        vi bits = (vi)load(x, k, dtype) & 0x7fffffff, is_more = bits > most;
        most = (is_more & bits) | (~is_more & most);
    }
    union { int32_t bits; float number; } largest = {0}, one;
    for (int i = 0; i < VW; i++) largest.bits = most[i] > largest.bits ? most[i] : largest.bits;
    for (; k < K; k++) {
        one.number = load_one(x, k, dtype);
        one.bits &= 0x7fffffff;
        largest.bits = one.bits > largest.bits ? one.bits : largest.bits;
    }
    ((float *)op->p[1])[row] = largest.number / FIT_LARGEST;
}

static int64_t fit_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return max_int(1, divide_up(step->counts[op->count], FIT_ROWS));
}

static void fit_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    int64_t row = chunk * FIT_ROWS, last = min_int(step->counts[op->count], row + FIT_ROWS);
    if (op->p[2]) {
        if (op->dtype == F32) fit_rows(op, row, last - row, F32);
        else fit_rows(op, row, last - row, BF16);
        return;
    }
    for (; row < last; row++)
        if (op->dtype == F32) largest_row(op, row, F32);
        else largest_row(op, row, BF16);
}

static void round_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    (void)me;
    int64_t last = min_int(step->counts[op->count], (chunk + 1) * FIT_ROWS);
    for (int64_t row = chunk * FIT_ROWS; row < last; row++)
        if (op->dtype == F32) round_row(op, row, F32);
        else round_row(op, row, BF16);
}
