/* Rows of x as int8 codes with a scale for every `span` of them, for quantized_linear.c.
 *
 * A span is one block or several. A row is ceil(K / block) records: scale, sum of the codes (float),
 * MAGIC - zero * sum, sum (int32), then `block` codes, zero beyond K. scale = max |x| / 127, code =
 * x / scale, rounded to the nearest, ties to even (quantized.py's scheme). Where a span has a NaN or
 * an infinity its codes are 0 and its scale is NaN, so that all that is computed from the row is NaN.
 *
 *   p  x, records, permutation (int64 [K]: code k is of x[permutation[k]]) or 0
 *   n  K, block (a multiple of 16), stride of x, bytes of a row of records, zero of the weights,
 *      span
 */
#include "dot.h"
#include "common.h"

#define RECORD_BYTES 16    /* before the codes */
#define QUANTIZED_ROWS 8   /* a chunk of work */

typedef struct {
    float scale, as_float;
    int32_t start, sum;
    int8_t codes[];
} Record;

static int64_t quantize_chunks(const Op *op, const Step *step, int threads) {
    (void)threads;
    return max_int(1, divide_up(step->counts[op->count], QUANTIZED_ROWS));
}

INLINE int32_t sum_of_ints(vi x) {
#if VW == 16
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = 0;
    for (int i = 0; i < VW; i++) sum += x[i];
    return sum;
#endif
}

/* max |x| of `size` numbers, a multiple of 16; a NaN is more than an infinity. */
INLINE float peak_of(const void *x, int64_t first, int64_t size, int dtype) {
#if VW == 16 && defined(__AVX512BW__)
    if (dtype == BF16 && size % 32 == 0) {
        __m512i most = _mm512_setzero_si512();
        for (const bf16 *p = (const bf16 *)x + first, *end = p + size; p < end; p += 32) {
            __m512i bits = _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi16(0x7fff));
            most = _mm512_max_epu16(most, bits);
        }
        __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(most),
                                        _mm512_extracti64x4_epi64(most, 1));
        __m128i part = _mm_max_epu16(_mm256_castsi256_si128(half),
                                     _mm256_extracti128_si256(half, 1));
        part = _mm_minpos_epu16(_mm_xor_si128(part, _mm_set1_epi16(-1))); /* the least complement */
        return to_float((bf16)~_mm_cvtsi128_si32(part));
    }
#endif
    vi largest = {0}; /* of the bits without their sign: ordered as the numbers are */
    for (int64_t k = first; k < first + size; k += VW) {
        vi bits = (vi)load(x, k, dtype) & 0x7fffffff;
#if VW == 16
        largest = (vi)_mm512_max_epi32((__m512i)bits, (__m512i)largest);
#elif VW == 8
        largest = (vi)_mm256_max_epi32((__m256i)bits, (__m256i)largest);
#else
        vi is_more = bits > largest;
        largest = (bits & is_more) | (largest & ~is_more);
#endif
    }
    union { int32_t i; float f; } peak = {0};
#if VW == 16
    peak.i = _mm512_reduce_max_epi32((__m512i)largest);
#else
    for (int i = 0; i < VW; i++) peak.i = largest[i] > peak.i ? largest[i] : peak.i;
#endif
    return peak.f;
}

INLINE void store_block(Record *to, const void *x, int64_t first, int64_t size, float inverse,
                        int32_t zero, int dtype) {
    vi sum = {0};
#if VW == 16
    if (inverse != 0.0f && dtype == BF16 && size % 32 == 0) {
        for (int64_t k = 0; k < size; k += 32) {
            vi both = (vi)_mm512_loadu_si512((const bf16 *)x + first + k);
            vi even = to_nearest((vf)(both << 16) * splat(inverse));
            vi odd = to_nearest((vf)(both & (int32_t)0xffff0000) * splat(inverse));
            sum += even + odd;
            both = (even & 255) | odd << 8;
            _mm256_storeu_si256((__m256i *)(to->codes + k), _mm512_cvtepi32_epi16((__m512i)both));
        }
    } else
#endif
    if (inverse == 0.0f) memset(to->codes, 0, (size_t)size); /* an infinity times 0 is NaN */
    else
        for (int64_t k = 0; k < size; k += 16)
#pragma GCC unroll 4
            for (int64_t i = k; i < k + 16; i += VW) {
                vi codes = to_nearest(load(x, first + i, dtype) * splat(inverse));
                sum += codes;
                store_bytes(to->codes + i, codes);
            }
    to->sum = sum_of_ints(sum);
    to->start = MAGIC - zero * to->sum;
}

/* `size` numbers, whole blocks, from `x`. */
INLINE void quantize_span(const Op *op, char *to, const void *x, int64_t first, int64_t size,
                          int dtype) {
    const int64_t block = op->n[1];
    const int32_t zero = (int32_t)op->n[4];
    float peak = peak_of(x, first, size, dtype), scale = peak * (1.0f / 127.0f);
    float inverse = scale < MIN_SCALE ? 0.0f : 1.0f / scale;
    if (!(peak < INFINITY)) {
        scale = NAN;
        inverse = 0.0f;
    }
    for (int64_t k = 0; k < size; k += block, to += RECORD_BYTES + block) {
        Record *record = (Record *)to;
        store_block(record, x, first + k, block, inverse, zero, dtype);
        record->scale = scale;
        record->as_float = (float)record->sum;
    }
}

INLINE void quantize_row(const Op *op, int64_t row, float *scratch, int dtype) {
    int64_t K = op->n[0], block = op->n[1], span = op->n[5];
    const void *x = at(op->p[0], row * op->n[2], dtype);
    const int64_t *order = op->p[2];
    char *to = (char *)op->p[1] + row * op->n[3];
    const int64_t bytes = span / block * (RECORD_BYTES + block);
    for (int64_t k = 0; k < K; k += span, to += bytes) {
        int64_t size = min_int(span, divide_up(K - k, block) * block);
        if (!order && k + size <= K) {
            quantize_span(op, to, x, k, size, dtype);
            continue;
        }
        for (int64_t i = 0; i < size; i++)
            scratch[i] = k + i < K ? load_one(x, order ? order[k + i] : k + i, dtype) : 0.0f;
        quantize_span(op, to, scratch, 0, size, F32);
    }
}

static void quantize_run(const Op *op, const Step *step, int64_t chunk, Worker *me) {
    int64_t first = chunk * QUANTIZED_ROWS;
    int64_t last = min_int(step->counts[op->count], first + QUANTIZED_ROWS);
    for (int64_t row = first; row < last; row++)
        if (op->dtype == F32) quantize_row(op, row, (float *)me->scratch, F32);
        else quantize_row(op, row, (float *)me->scratch, BF16);
}
