/* Codes in words of several outputs' or several columns' (GPTQ, AWQ), of TILE outputs at once; part of
 * blocks.c, which says what the layouts are.
 */

#if VW == 16 && defined(__AVX512VBMI__) && defined(__AVX512BW__)
#define CAN_PLACE_BYTES 1
#else
#define CAN_PLACE_BYTES 0
#endif
#define LATER 64 /* columns ahead that are fetched, since each is far from the one before it */

static const uint8_t output_places[] = {0, 4, 1, 5, 2, 6, 3, 7}; /* of OUTPUTS_LAYOUT */

/* Where a code lies in words: the word's place, and its shift. */
INLINE int64_t word_of(const Stored *s, int64_t row, int64_t k, int *shift) {
    if (s->layout == OUTPUTS_LAYOUT) {
        *shift = 4 * output_places[row % 8];
        return k * (s->beside / 8) + row / 8;
    }
    int64_t bit = (s->order ? s->order[k] : k) * s->bits;
    *shift = (int)(bit % 32);
    return bit / 32 * s->beside + row;
}

/* Where TILE outputs lie in words.
 *
 * places    of an output's word, from that of the first matrix's first output
 * shifts    of OUTPUTS: of its code in the word
 * present   ~0 where there is such an output, else 0
 * is_along  there are all, and each half of them side by side, a word each
 */
typedef struct {
    const uint32_t *words;
    int64_t places[TILE];
    uint32_t shifts[TILE], present[TILE];
    int is_along;
} Outputs;

static void find_outputs(const Stored *s, const Columns *it, Outputs *to) {
    int are_all = 1;
    memset(to, 0, sizeof *to);
    to->words = (const uint32_t *)s->codes[0];
    for (int64_t j = 0; j < TILE; j++) {
        int shift = 0, none;
        if (it->rows[j] < 0) {
            are_all = 0;
            continue;
        }
        to->present[j] = ~0u;
        to->places[j] = word_of(s, it->rows[j], 0, &shift) - word_of(s, 0, 0, &none) +
                        ((const uint32_t *)s->codes[it->of[j]] - to->words);
        if (s->layout == OUTPUTS_LAYOUT) to->shifts[j] = (uint32_t)shift;
    }
    to->is_along = s->layout == WORDS_LAYOUT && are_all &&
                   to->places[VW - 1] - to->places[0] == VW - 1 &&
                   to->places[TILE - 1] - to->places[VW] == VW - 1;
}

/* Words of outputs that are along, 4 or 8 codes each, whose columns are in order. */
static void whole_words(const Stored *s, const Outputs *o, int64_t first, int64_t last, Words *to) {
    const int64_t columns = 32 / s->bits, end = s->K / columns;
    for (int64_t k = first / columns; k < last / columns; k++, to += columns / 4)
        for (int64_t half = 0; half < TILE; half += VW) {
            const uint32_t *from = o->words + k * s->beside + o->places[half];
            vu w = *(const vu_any *)from, both[2] = {w & 0xffff, w >> 16};
            __builtin_prefetch(from + min_int(LATER / columns, end - 1 - k) * s->beside, 0, 2);
            if (columns == 4) *(vu_any *)(to[0] + half) = w;
            for (int i = 0; columns == 8 && i < 2; i++)
                *(vu_any *)(to[i] + half) = halves_apart(both[i]);
        }
}

#if CAN_PLACE_BYTES
/* 4 columns of OUTPUTS, 128 of each, as words of the 4 panels that these are, `apart` from each other:
 * the low and high halves of a panel's 64 bytes are put in their places at once. */
INLINE void place_outputs(const __m512i *c, const __m512i *where, Columns *its, int apart, int64_t i) {
    const __m512i low[2] = {_mm512_shuffle_i32x4(c[0], c[1], 0x44),
                            _mm512_shuffle_i32x4(c[2], c[3], 0x44)};
    const __m512i high[2] = {_mm512_shuffle_i32x4(c[0], c[1], 0xee),
                             _mm512_shuffle_i32x4(c[2], c[3], 0xee)};
    const __m512i panels[4] = {
        _mm512_shuffle_i32x4(low[0], low[1], 0x88), _mm512_shuffle_i32x4(low[0], low[1], 0xdd),
        _mm512_shuffle_i32x4(high[0], high[1], 0x88), _mm512_shuffle_i32x4(high[0], high[1], 0xdd)};
    for (int p = 0; p < 4; p++) {
        __m512i even = _mm512_and_si512(panels[p], _mm512_set1_epi8(15));
        __m512i odd = _mm512_and_si512(_mm512_srli_epi16(panels[p], 4), _mm512_set1_epi8(15));
        uint32_t *to = its[p * apart].fours[i];
        for (int half = 0; half < 2; half++)
            _mm512_store_si512(to + half * VW, _mm512_permutex2var_epi8(even, where[half], odd));
    }
}
#endif

/* Columns of all the panels that lines of OUTPUTS have codes of, 4 at a time; of gates and ups twice as
 * many as of a matrix. Whether it could. */
static int lines_of_outputs(const Stored *s, int64_t first, Columns *its) {
#if CAN_PLACE_BYTES
    const int64_t further = s->beside / 8, last = min_int(first + COLUMNS, s->K);
    const int64_t start = first * further + its->rows[0] / 8;
    const uint32_t *from = (const uint32_t *)s->codes[its->of[0]] + start;
    const uint32_t *ups = its->of[VW] ? (const uint32_t *)s->codes[1] + start : 0;
    const Columns *end = its + (ups ? 8 : 4) - 1;
    if (last % 4 || end->rows[VW - 1] < 0 || end->rows[TILE - 1] < 0) return 0;
    uint8_t bytes[TILE][4]; /* of an output's code: its byte, 64 further in a high half */
    __m512i where[2];
    for (int j = 0; j < TILE; j++)
        for (int at = 0; at < 4; at++) {
            int place = output_places[j % 8];
            bytes[j][at] = (uint8_t)(16 * at + j / 8 * 4 + place / 2 + place % 2 * 64);
        }
    memcpy(where, bytes, sizeof bytes);
    for (int64_t k = first; k < last; k += 4) {
        __m512i gate[4], up[4];
        for (int at = 0; at < 4; at++, from += further) {
            const int64_t later = min_int(LATER, s->K - 1 - k - at) * further;
            gate[at] = _mm512_loadu_si512(from);
            __builtin_prefetch(from + later, 0, 2);
            if (!ups) continue;
            up[at] = _mm512_loadu_si512(ups);
            __builtin_prefetch(ups + later, 0, 2);
            ups += further;
        }
        if (!ups) {
            place_outputs(gate, where, its, 1, (k - first) / 4);
            continue;
        }
        for (int odd = 0; odd < 2; odd++) {
            __m512i both[4];
            for (int at = 0; at < 4; at++)
                both[at] = odd ? _mm512_unpackhi_epi64(gate[at], up[at])
                               : _mm512_unpacklo_epi64(gate[at], up[at]);
            place_outputs(both, where, its + odd, 2, (k - first) / 4);
        }
    }
    for (int64_t i = (last - first) / 4; i < COLUMNS / 4; i++)
        for (int p = 0; its + p <= end; p++) memset(its[p].fours[i], 0, sizeof its[p].fours[i]);
    return 1;
#else
    (void)s, (void)first, (void)its;
    return 0;
#endif
}

/* Some columns: the first words, their codes' masks, and shifts that are a column's own. */
typedef struct {
    const uint32_t *from[COLUMNS + LATER];
    uint32_t masks[COLUMNS], down[COLUMNS];
} WordColumns;

static void find_columns(const Stored *s, const Outputs *o, int64_t first, WordColumns *to) {
    for (int64_t i = 0, k = first; i < COLUMNS + LATER; i++, k++) {
        int shift;
        to->from[i] = o->words + word_of(s, 0, min_int(k, s->K - 1), &shift);
        if (i >= COLUMNS) continue;
        to->masks[i] = k < s->K ? (1u << s->bits) - 1 : 0;
        to->down[i] = (uint32_t)shift;
    }
}

/* 4 columns of VW outputs of OUTPUTS, from the output `half` on. */
INLINE vu four_in_runs(const uint32_t *const *from, const Outputs *o, int64_t half,
                       const uint32_t *mask) {
    const vi is_first = lane_numbers() < 8; /* outputs of the first of two words */
    vu four = {0}, shift = *(const vu_any *)(o->shifts + half);
    for (int at = 0; at < 4; at++) {
        vu w = (vu){0} + from[at][o->places[half]];
        vu second = (vu){0} + from[at][o->places[half + VW - 1]];
        w = (vu)choose(is_first, (vf)w, (vf)second);
        four |= (w >> shift & mask[at]) << (8 * at);
    }
    return four & *(const vu_any *)(o->present + half);
}

/* 4 columns of VW outputs that are along. */
INLINE vu four_along(const uint32_t *const *from, int64_t place, const uint32_t *low,
                     const uint32_t *mask) {
    vu four = {0};
    for (int at = 0; at < 4; at++) {
        vu w = *(const vu_any *)(from[at] + place);
        four |= (w >> low[at] & mask[at]) << (8 * at);
    }
    return four;
}

/* As columns_of_rows, of words, which have a column's outputs side by side. */
static void columns_of_words(const Stored *stored, int64_t first, Columns *it) {
    const Stored local = *stored, *s = &local; /* what is stored can't be what is written */
    const int64_t last = min_int(first + COLUMNS, s->K), whole = (last - first) / 4;
    const int is_in_runs = s->layout == OUTPUTS_LAYOUT;
    Outputs o;
    WordColumns columns;
    find_outputs(s, it, &o);
    for (int64_t i = whole; i < COLUMNS / 4; i++) memset(it->fours[i], 0, sizeof it->fours[i]);
    if (o.is_along && !s->order && (s->bits == 4 || s->bits == 8) && last % (32 / s->bits) == 0) {
        whole_words(s, &o, first, last, it->fours);
        return;
    }
    find_columns(s, &o, first, &columns);
    for (int64_t i = 0; i < divide_up(last - first, 4); i++) {
        const uint32_t *const *from = columns.from + 4 * i;
        const uint32_t *mask = columns.masks + 4 * i, *low = columns.down + 4 * i;
        for (int at = 0; at < 4; at++) {
            if (from[LATER + at] == from[LATER + at - 1]) continue;
            __builtin_prefetch(from[LATER + at] + o.places[0], 0, 2);
            __builtin_prefetch(from[LATER + at] + o.places[VW], 0, 2);
        }
        for (int64_t half = 0; (o.is_along || is_in_runs) && half < TILE; half += VW)
            *(vu_any *)(it->fours[i] + half) =
                is_in_runs ? four_in_runs(from, &o, half, mask)
                           : four_along(from, o.places[half], low, mask);
        for (int64_t j = 0; !o.is_along && !is_in_runs && j < TILE; j++) {
            uint32_t four = 0;
            for (int at = 0; at < 4; at++)
                four |= (from[at][o.places[j]] >> low[at] & mask[at]) << (8 * at);
            it->fours[i][j] = four & o.present[j];
        }
    }
}
