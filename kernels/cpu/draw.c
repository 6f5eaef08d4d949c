/* One token a row by Gumbel-max over the tokens that its filters leave; philox.py defines the
 * noise, ops.py's CpuBackend.draw the filters.
 *
 * The cut of top_k and top_p is found by counting, not by sorting: a radix descent over the bits of
 * the distance to the best, with weights 1 or exp(-distance), which is exact and takes three passes
 * over the candidates. Few tokens are near the best, so the first candidates are those alone.
 *
 *   p  x [S, V], rows (int64 [F]) of x, top_k (int64 [F]), settings (float [F, 3]: temperature,
 *      top_p, log_min_p), origin (uint32 [F, 5]), out (int64 [F])
 *   n  V, stride of x
 */
#include <float.h>
#include "common.h"

#define SPAN 19.5f /* GUMBEL_SPAN: no token further below the best can be drawn */
#define BINS 2048
#define GROUPS 16  /* counters at a time, 4 tokens each */

typedef struct {
    float *distance; /* of each candidate from the best, divided by the temperature */
    double *bin;     /* [BINS] */
    int64_t count;
} Candidates;

/* log of positive x within 2 units in the last place (Cephes' logf). */
INLINE vf log_of(vf x) {
    vi bits = (vi)x;
    vi exponent = ((bits >> 23) & 0xff) - 126;
    vf m = (vf)((bits & 0x007fffff) | 0x3f000000); /* 0.5 to 1 */
    vi is_low = m < 0.707106781f;
    exponent += is_low; /* true is -1 */
    m = m + choose(is_low, m, (vf){0}) - 1.0f;
    vf e = __builtin_convertvector(exponent, vf), z = m * m;
    vf y = splat(7.0376836292e-2f);
    y = y * m - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    y = y * m * z;
    y += e * -2.12194440e-4f;
    y -= 0.5f * z;
    return m + y + e * 0.693359375f;
}

/* Philox4x32-10 (Salmon et al. 2011) of GROUPS counters from token group `first` on -> noise of
 * their tokens in order. */
static void noise_of(const uint32_t *origin, int64_t first, float *noise) {
    uint32_t c[4][GROUPS], low = origin[0], high = origin[1];
    for (int i = 0; i < GROUPS; i++) {
        c[0][i] = origin[2], c[1][i] = origin[3], c[2][i] = origin[4];
        c[3][i] = (uint32_t)(first + i);
    }
    for (int round = 0; round < 10; round++, low += 0x9E3779B9u, high += 0xBB67AE85u)
        for (int i = 0; i < GROUPS; i++) {
            uint64_t a = (uint64_t)0xD2511F53u * c[0][i], b = (uint64_t)0xCD9E8D57u * c[2][i];
            c[0][i] = (uint32_t)(b >> 32) ^ c[1][i] ^ low;
            c[1][i] = (uint32_t)b;
            c[2][i] = (uint32_t)(a >> 32) ^ c[3][i] ^ high;
            c[3][i] = (uint32_t)a;
        }
    for (int i = 0; i < GROUPS; i++)
        for (int lane = 0; lane < 4; lane++)
            noise[4 * i + lane] = ((float)(c[lane][i] >> 9) + 0.5f) * 0x1p-23f;
    for (int i = 0; i < 4 * GROUPS; i += VW) {
        vf u = load_f32(noise + i);
        store_f32(noise + i, -log_of(-log_of(u)));
    }
}

/* The smallest distance within which the candidates' weights add up to `target`; infinity where all
 * of them add up to less. */
static float reach(const Candidates *near, double target, int is_mass) {
    static const int shifts[] = {20, 9, 0}, widths[] = {11, 11, 9};
    uint32_t prefix = 0, known = 0;
    double before = 0;
    for (int level = 0; level < 3; level++) {
        uint32_t mask = (1u << widths[level]) - 1;
        memset(near->bin, 0, BINS * sizeof(double));
        for (int64_t i = 0; i < near->count; i++) {
            uint32_t bits;
            memcpy(&bits, near->distance + i, 4);
            if ((bits & known) == prefix)
                near->bin[bits >> shifts[level] & mask] += is_mass ? exp(-near->distance[i]) : 1;
        }
        uint32_t bin = 0;
        for (; bin < mask && before + near->bin[bin] < target; bin++) before += near->bin[bin];
        if (before + near->bin[bin] < target && !level) return INFINITY;
        prefix |= bin << shifts[level];
        known |= mask << shifts[level];
    }
    float found;
    memcpy(&found, &prefix, 4);
    return found;
}

/* Make the tokens no further than `limit` from `top` the candidates. */
static void collect(const Op *op, const char *x, float top, float scale, float limit,
                    Candidates *near, int dtype) {
    int64_t V = op->n[0];
    near->count = 0;
    for (int64_t i = 0; i < V; i += VW) {
        if (i + VW <= V) {
            vi is_near = (top - load(x, i, dtype)) * scale <= limit;
            int32_t any = 0;
            for (int j = 0; j < VW; j++) any |= is_near[j];
            if (!any) continue;
        }
        for (int64_t j = i; j < min_int(V, i + VW); j++) {
            float distance = (top - load_one(x, j, dtype)) * scale;
            if (distance <= limit && distance < INFINITY) near->distance[near->count++] = distance;
        }
    }
}

static double mass_of(const Op *op, const char *x, float top, float scale, int dtype) {
    int64_t V = op->n[0], i = 0;
    double mass = 0;
    while (i + VW <= V) { /* 64 vectors in float, their sum in double */
        vf part = {0};
        for (int n = 0; n < 64 && i + VW <= V; n++, i += VW)
            part += exp_of((load(x, i, dtype) - top) * scale);
        mass += sum_of(part);
    }
    for (; i < V; i++) mass += exp((load_one(x, i, dtype) - top) * scale);
    return mass;
}

static double mass_within(const Candidates *near, float limit) {
    double mass = 0;
    for (int64_t i = 0; i < near->count; i++)
        if (near->distance[i] <= limit) mass += exp(-near->distance[i]);
    return mass;
}

/* The largest distance from the best that the row's filters keep. */
static float cut_of(const Op *op, const char *x, int64_t row, float top, float scale, Worker *me,
                    int dtype) {
    static const float limits[] = {8, 24, INFINITY};
    const float *settings = (const float *)op->p[3] + 3 * row;
    int64_t top_k = ((const int64_t *)op->p[2])[row];
    float least_p = -settings[2], top_p = settings[1], cut = INFINITY;
    Candidates near = {(float *)(me->scratch + BINS * sizeof(double)), (double *)me->scratch, 0};
    double all = top_p < 1 && !top_k && least_p == INFINITY ? mass_of(op, x, top, scale, dtype) : 0;
    for (int i = 0; i < 3; i++) {
        int is_all = limits[i] == INFINITY;
        collect(op, x, top, scale, limits[i], &near, dtype);
        if (top_k && near.count < top_k && !is_all) continue;
        cut = top_k ? reach(&near, (double)top_k, 0) : INFINITY;
        cut = cut < least_p ? cut : least_p;
        if (cut < INFINITY && cut > limits[i]) continue; /* min_p keeps more than was collected */
        if (top_p < 1) {
            int is_whole = !top_k && least_p == INFINITY;
            double mass = is_whole ? all : mass_within(&near, cut);
            float nucleus = reach(&near, mass * top_p, 1);
            if (nucleus > limits[i] && !is_all) continue;
            cut = nucleus < cut ? nucleus : cut;
        }
        if (cut < INFINITY || is_all) return cut;
    }
    return cut;
}

INLINE void draw_row(const Op *op, int64_t row, Worker *me, int dtype) {
    int64_t V = op->n[0], best = 0;
    const char *x = at(op->p[0], ((const int64_t *)op->p[1])[row] * op->n[1], dtype);
    const float *settings = (const float *)op->p[3] + 3 * row;
    const uint32_t *origin = (const uint32_t *)op->p[4] + 5 * row;
    float top = -INFINITY, noise[4 * GROUPS], score = -INFINITY;
    float scale = fminf(1 / settings[0], FLT_MAX); /* 0 times infinity would be NaN */
    int64_t i = 0;
    vf tops = splat(-INFINITY);
    for (; i + VW <= V; i += VW) tops = max_of(load(x, i, dtype), tops);
    top = largest_of(tops);
    for (; i < V; i++) top = load_one(x, i, dtype) > top ? load_one(x, i, dtype) : top;
    float cut = SPAN;
    if (((const int64_t *)op->p[2])[row] || settings[1] < 1 || settings[2] > -INFINITY) {
        float found = cut_of(op, x, row, top, scale, me, dtype);
        cut = found < cut ? found : cut;
    }
    for (int64_t from = 0; from < V; from += 4 * GROUPS) {
        int32_t any = 0;
        int64_t last = min_int(V, from + 4 * GROUPS);
        for (i = from; i + VW <= last; i += VW) {
            vi is_near = (top - load(x, i, dtype)) * scale <= cut;
            for (int j = 0; j < VW; j++) any |= is_near[j];
        }
        if (!any && last == from + 4 * GROUPS) continue;
        noise_of(origin, from / 4, noise);
        for (i = from; i < last; i++) {
            float distance = (top - load_one(x, i, dtype)) * scale;
            if (distance <= cut && noise[i - from] - distance > score) {
                score = noise[i - from] - distance;
                best = i;
            }
        }
    }
    ((int64_t *)op->p[5])[row] = best;
}

static int64_t draw_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return max_int(1, step->counts[op->count]);
}

static void draw_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    if (chunk >= step->counts[op->count]) return;
    if (op->dtype == F32) draw_row(op, chunk, me, F32);
    else draw_row(op, chunk, me, BF16);
}
