/* What every op shares: vectors, bfloat16, and the records that Python fills in.
 *
 * VW floats a vector, TILE columns of a packed weight (two vectors), ROWS_MAX rows multiplied at
 * once: as many accumulators as the registers hold. All of it is written with GCC's vector types,
 * which GCC and Clang compile for any CPU; intrinsics are for what these lack: dot products, transposing,
 * adding up lanes, looking up bytes, some conversions.
 */
#pragma once
#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define VW 16
#define ROWS_MAX 8
#elif defined(__AVX2__)
#define VW 8
#define ROWS_MAX 4
#else
#define VW 4
#define ROWS_MAX 8
#endif
#define TILE (2 * VW)

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define HAS_DOT 1 /* products of bfloat16 pairs, summed in float */
#else
#define HAS_DOT 0
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef uint16_t vh __attribute__((vector_size(VW * 2)));
typedef int8_t vb __attribute__((vector_size(VW)));
typedef uint16_t bf16;

/* The same vectors without alignment to their size. */
typedef vf vf_any __attribute__((aligned(4), may_alias));
typedef vu vu_any __attribute__((aligned(4), may_alias));
typedef vi vi_any __attribute__((aligned(1), may_alias));
typedef int32_t int_any __attribute__((aligned(1), may_alias));
typedef vh vh_any __attribute__((aligned(2), may_alias));
typedef vb vb_any __attribute__((aligned(1), may_alias));

/* What changes from run to run: how many tokens, drawn rows and tiles of attention. */
enum { COUNT_TOKENS, COUNT_DRAWN, COUNT_TILES, COUNTS };

typedef struct {
    int64_t counts[COUNTS];
} Step;

/* One call of an op: its kind, which count bounds its rows, and arguments as the op's file lists
 * them. */
typedef struct {
    int32_t kind;
    int32_t count;
    int32_t dtype; /* F32 or BF16, of every float tensor of the call */
    int32_t flags;
    void *p[10];
    int64_t n[8];
    float f[4];
} Op;

enum { F32, BF16 };

/* A thread of a team of `threads`, and its own scratch memory. */
typedef struct {
    struct Team *team;
    int32_t threads;
    char *scratch;
} Worker;

#define SCRATCH_BYTES (2 << 20) /* touched on first use */

INLINE float to_float(bf16 x) {
    union { uint32_t u; float f; } bits = {(uint32_t)x << 16};
    return bits.f;
}

/* Round to nearest, ties to even; NaN stays NaN. With a dot product by its instruction, which also makes
 * zeros of numbers below 2**-126; so one number and a vector have the same bits. */
INLINE bf16 to_bf16(float x) {
#if HAS_DOT
    __m256i lanes = (__m256i)_mm512_cvtneps_pbh(_mm512_set1_ps(x));
    return (bf16)_mm256_extract_epi16(lanes, 0);
#endif
    union { float f; uint32_t u; } bits = {x};
    if (x != x) return 0x7fc0;
    return (bf16)((bits.u + 0x7fff + ((bits.u >> 16) & 1)) >> 16);
}

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vi splat_i(int32_t x) { return x - (vi){0}; }

INLINE vf load_f32(const float *p) { return *(const vf_any *)p; }
INLINE void store_f32(float *p, vf x) { *(vf_any *)p = x; }
INLINE vi load_i32(const void *p) { return *(const vi_any *)p; }
INLINE void store_i32(void *p, vi x) { *(vi_any *)p = x; }

/* 16 bits each, as integers. As conversions of vectors GCC 12 makes these and the two below of
 * halves, or of single numbers. */
INLINE vu of_halves(vh halves) {
#if VW == 8
    return (vu)_mm256_cvtepu16_epi32((__m128i)halves);
#else
    return __builtin_convertvector(halves, vu);
#endif
}

INLINE vu load_halves(const void *p) { return of_halves(*(const vh_any *)p); }

/* Integers below 2**16. */
INLINE void store_halves(void *p, vu x) {
#if VW == 8
    __m256i both = _mm256_packus_epi32((__m256i)x, (__m256i)x);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(both, 8)));
#else
    *(vh_any *)p = __builtin_convertvector(x, vh);
#endif
}

INLINE vf load_bf16(const bf16 *p) { return (vf)(load_halves(p) << 16); }

/* As to_bf16 without the dot product; a number's upper half. */
INLINE vu round_bf16(vf x) {
    vu bits = (vu)x, rounded = bits + 0x7fff + ((bits >> 16) & 1);
    vu is_nan = (vu)(x != x);
    return (rounded & ~is_nan) | (is_nan & 0x7fc00000);
}

INLINE void store_bf16(bf16 *p, vf x) {
#if HAS_DOT
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
    return;
#endif
    store_halves(p, round_bf16(x) >> 16);
}

/* VW bytes, as integers. */
INLINE vi load_bytes(const void *p) {
#if VW == 16
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif VW == 8
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return __builtin_convertvector(*(const vb_any *)p, vi);
#endif
}

/* The lowest byte of each. */
INLINE void store_bytes(int8_t *to, vi x) {
#if VW == 16
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)x));
#elif VW == 8
    const __m256i lowest = _mm256_set1_epi32(0x0c080400);
    __m256i four = _mm256_shuffle_epi8((__m256i)x, lowest);
    four = _mm256_permutevar8x32_epi32(four, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
    _mm_storel_epi64((__m128i *)to, _mm256_castsi256_si128(four));
#else
    for (int i = 0; i < VW; i++) to[i] = (int8_t)x[i];
#endif
}

INLINE vf load(const void *p, int64_t i, int dtype) {
    return dtype == F32 ? load_f32((const float *)p + i) : load_bf16((const bf16 *)p + i);
}

INLINE void store(void *p, int64_t i, vf x, int dtype) {
    if (dtype == F32) store_f32((float *)p + i, x);
    else store_bf16((bf16 *)p + i, x);
}

INLINE float load_one(const void *p, int64_t i, int dtype) {
    return dtype == F32 ? ((const float *)p)[i] : to_float(((const bf16 *)p)[i]);
}

INLINE void store_one(void *p, int64_t i, float x, int dtype) {
    if (dtype == F32) ((float *)p)[i] = x;
    else ((bf16 *)p)[i] = to_bf16(x);
}

INLINE int64_t size_of(int dtype) { return dtype == F32 ? 4 : 2; }

INLINE char *at(const void *p, int64_t i, int dtype) { return (char *)p + i * size_of(dtype); }

/* Halves are added (or compared) until one lane is left, so the order is the same everywhere. */
INLINE float sum_of(vf x) {
#if defined(__AVX2__)
#if VW == 16
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)x),
                                _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)x, 1)));
#else
    __m256 half = (__m256)x;
#endif
    __m128 part = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    part = _mm_add_ps(part, _mm_movehl_ps(part, part));
    return _mm_cvtss_f32(_mm_add_ss(part, _mm_movehdup_ps(part)));
#else
    float lane[VW];
    store_f32(lane, x);
    for (int n = VW / 2; n; n /= 2)
        for (int i = 0; i < n; i++) lane[i] += lane[i + n];
    return lane[0];
#endif
}

INLINE float largest_of(vf x) {
#if VW == 16
    return _mm512_reduce_max_ps((__m512)x);
#elif VW == 8
    __m128 part = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    part = _mm_max_ps(part, _mm_movehl_ps(part, part));
    return _mm_cvtss_f32(_mm_max_ss(part, _mm_movehdup_ps(part)));
#else
    float lane[VW];
    store_f32(lane, x);
    for (int i = 1; i < VW; i++) lane[0] = lane[i] > lane[0] ? lane[i] : lane[0];
    return lane[0];
#endif
}

/* VW rows of VW elements of 4 bytes -> their columns. */
#if VW == 16
#define HAS_TRANSPOSE 1
INLINE void transpose(vi rows[VW]) {
    __m512i row[16], other[16];
    for (int i = 0; i < 16; i++) row[i] = (__m512i)rows[i];
    for (int i = 0; i < 16; i += 2) {
        other[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
        other[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            row[i + 2 * j] = _mm512_unpacklo_epi64(other[i + j], other[i + j + 2]);
            row[i + 2 * j + 1] = _mm512_unpackhi_epi64(other[i + j], other[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            other[i + j] = _mm512_shuffle_i32x4(row[i + j], row[i + j + 4], 0x88);
            other[i + j + 4] = _mm512_shuffle_i32x4(row[i + j], row[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        rows[j] = (vi)_mm512_shuffle_i32x4(other[j], other[j + 8], 0x88);
        rows[j + 8] = (vi)_mm512_shuffle_i32x4(other[j], other[j + 8], 0xdd);
    }
}
#elif VW == 8
#define HAS_TRANSPOSE 1
INLINE void transpose(vi rows[VW]) {
    __m256i row[8], other[8];
    for (int i = 0; i < 8; i += 2) {
        other[i] = _mm256_unpacklo_epi32((__m256i)rows[i], (__m256i)rows[i + 1]);
        other[i + 1] = _mm256_unpackhi_epi32((__m256i)rows[i], (__m256i)rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            row[i + 2 * j] = _mm256_unpacklo_epi64(other[i + j], other[i + j + 2]);
            row[i + 2 * j + 1] = _mm256_unpackhi_epi64(other[i + j], other[i + j + 2]);
        }
    for (int j = 0; j < 4; j++) {
        rows[j] = (vi)_mm256_permute2x128_si256(row[j], row[j + 4], 0x20);
        rows[j + 4] = (vi)_mm256_permute2x128_si256(row[j], row[j + 4], 0x31);
    }
}
#else
#define HAS_TRANSPOSE 0
INLINE void transpose(vi rows[VW]) { (void)rows; }
#endif

/* Lane i: the sum of the lanes of x[i]. Vectors are added in pairs that share theirs: 21 instructions with
 * vectors of 32 bytes, 31 to turn them first, which was as fast. */
INLINE vf sums_of_lanes(const vf x[VW]) {
#if VW == 16
    __m512 four[4];
    for (int i = 0; i < 4; i++) {
        __m512d two[2];
        for (int j = 0; j < 2; j++) {
            __m512 a = (__m512)x[4 * i + 2 * j], b = (__m512)x[4 * i + 2 * j + 1];
            two[j] = (__m512d)(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
        }
        four[i] = (__m512)_mm512_unpacklo_pd(two[0], two[1]) +
                  (__m512)_mm512_unpackhi_pd(two[0], two[1]);
    }
    for (int i = 0; i < 4; i += 2) /* quarters of the sums of 8 */
        four[i] = _mm512_shuffle_f32x4(four[i], four[i + 1], 0x88) +
                  _mm512_shuffle_f32x4(four[i], four[i + 1], 0xdd);
    return (vf)(_mm512_shuffle_f32x4(four[0], four[2], 0x88) +
                _mm512_shuffle_f32x4(four[0], four[2], 0xdd));
#elif VW == 8
    __m256 four[2];
    for (int i = 0; i < 2; i++) {
        __m256d two[2];
        for (int j = 0; j < 2; j++) {
            __m256 a = (__m256)x[4 * i + 2 * j], b = (__m256)x[4 * i + 2 * j + 1];
            two[j] = (__m256d)(_mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b));
        }
        four[i] = (__m256)_mm256_unpacklo_pd(two[0], two[1]) +
                  (__m256)_mm256_unpackhi_pd(two[0], two[1]);
    }
    return (vf)(_mm256_permute2f128_ps(four[0], four[1], 0x20) +
                _mm256_permute2f128_ps(four[0], four[1], 0x31));
#elif defined(__aarch64__)
    return (vf)vpaddq_f32(vpaddq_f32((float32x4_t)x[0], (float32x4_t)x[1]),
                          vpaddq_f32((float32x4_t)x[2], (float32x4_t)x[3]));
#else
    vf sums;
    for (int i = 0; i < VW; i++) sums[i] = sum_of(x[i]);
    return sums;
#endif
}

/* 0, 1, 2 ... */
INLINE vi lane_numbers(void) {
    vi n;
    for (int i = 0; i < VW; i++) n[i] = i;
    return n;
}

/* a * b + c, rounded once where the CPU can. Compilers mostly make that of the expression, too; Clang
 * 14 does not always. */
INLINE vf fused(vf a, vf b, vf c) {
#if VW == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VW == 8 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

INLINE vf choose(vi where, vf yes, vf no) { return (vf)((where & (vi)yes) | (~where & (vi)no)); }
/* b where either is NaN. */
#if defined(__AVX512F__)
INLINE vf max_of(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vf min_of(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
#elif VW == 8
INLINE vf max_of(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE vf min_of(vf a, vf b) { return (vf)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE vf max_of(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf min_of(vf a, vf b) { return choose(a < b, a, b); }
#endif
#define MIN_SCALE 1e-30f /* what has a smaller scale is stored as zeros, as in quantized.py */

INLINE int64_t min_int(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_int(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* exp by 2**n * 2**f, f from -0.5 to 0.5: a polynomial of degree 6, within 2 units in the last
 * place from -87 to 88. Smaller arguments give 0 and NaN gives NaN: both clamps keep a NaN, and
 * 2**n is a factor, because adding n to the exponent's bits would turn some NaNs into numbers. */
INLINE vf exp_of(vf x) {
    const vf magic = splat(12582912.0f); /* 1.5 * 2**23: adding it rounds to an integer */
    vf low = splat(-87.33654f), high = splat(88.37f);
    vi is_tiny = x < low;
    x = max_of(low, x);
    x = choose(x > high, high, x);
    vf n = x * 1.44269504088896341f + magic;
    vf power = (vf)(((vi)n - (vi)magic + 127) << 23);
    n -= magic;
    vf r = x - n * 0.693359375f;
    r -= n * -2.12194440e-4f;
    vf y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    return (vf)((vi)(y * power) & ~is_tiny);
}

/* 2**x by 2**n * 2**f, f from -0.5 to 0.5: a polynomial of degree 5, within 2 units in the last place
 * up to 126. Below -150 it is 0 (smaller numbers than the normal ones are exact with AVX512 alone);
 * NaN gives NaN. */
INLINE vf exp2_of(vf x) {
#if VW == 16
    x = max_of(splat(-160.0f), x);
    vf n = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    vi is_tiny = x < splat(-126.0f);
    x = choose(is_tiny, splat(-126.0f), x);
    vf magic = splat(12582912.0f), n = x + magic;
    vf power = (vf)(((vi)n - (vi)magic + 127) << 23);
    n -= magic;
#endif
    vf f = x - n;
    vf y = splat(1.3264727e-3f);
    y = y * f + 9.671513e-3f;
    y = y * f + 5.5507336e-2f;
    y = y * f + 2.4022242e-1f;
    y = y * f + 6.93147e-1f;
    y = y * f + 1.0f;
#if VW == 16
    return (vf)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
    return (vf)((vi)(y * power) & ~is_tiny);
#endif
}
