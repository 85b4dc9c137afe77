/* Threads, chunks and the order of sums; the loops themselves are in loops.h, once for each instruction set.
 *
 * Work is cut into chunks of CHUNK_VALUES, which threads take as they come. What a chunk yields depends on its place alone,
 * and partial sums are added in the order of their places, so the number of threads never shows.
 */

#include "kernels.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "codes and scales are little-endian"
#endif

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* The threshold of int2 in mean magnitudes, the float32 of codecs.py. */
#define INT2_THRESHOLD 0x1.3af1dep+0f

enum { LANES = 16, ROW_VALUES = 512, THREADS_MAX = 64 };

static inline int64_t block_count(int64_t n) { return (n + BLOCK_VALUES - 1) / BLOCK_VALUES; }

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* A bfloat16 as a float32. */
static inline float widened(const uint8_t *half)
{
    uint32_t bits = (uint32_t)half[0] << 16 | (uint32_t)half[1] << 24;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Write the scale of a block and return its reciprocal, 0 where all codes of the block are 0. */
static float scale_of(int codec, uint32_t largest_bits, uint8_t *stored)
{
    uint16_t half = 0x7FC0; /* not a number */
    float inverse = 0;
    if (largest_bits < 0x7F800000) {
        float largest;
        uint32_t bits;
        memcpy(&largest, &largest_bits, 4);
        largest /= codec == INT8 ? 127.0f : codec == INT4 ? 7.0f : 1.0f;
        memcpy(&bits, &largest, 4);
        half = (uint16_t)((bits + 0xFFFF) >> 16);
        uint8_t bytes[2] = {(uint8_t)half, (uint8_t)(half >> 8)};
        float scale = widened(bytes);
        if (scale < 0x1p-100f)
            half = 0;
        else if (half < 0x7F80)
            inverse = 1.0f / scale;
    }
    stored[0] = (uint8_t)half;
    stored[1] = (uint8_t)(half >> 8);
    return inverse;
}

/* Write the scale of a block of int2 that has this sum of |x|·q and this sum of q². Return whether its codes count. */
static bool int2_scale(float sum, float squares, uint8_t *stored)
{
    float scale = sum / squares;
    uint32_t bits;
    memcpy(&bits, &scale, 4);
    uint16_t half = 0x7FC0; /* not a number */
    bool finite = (bits & 0x7FFFFFFF) < 0x7F800000;
    if (finite) {
        half = (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16); /* to nearest, ties to even */
        uint8_t bytes[2] = {(uint8_t)half, (uint8_t)(half >> 8)};
        if (widened(bytes) < 0x1p-100f)
            half = 0;
    }
    stored[0] = (uint8_t)half;
    stored[1] = (uint8_t)(half >> 8);
    return finite && half != 0;
}

/* The bytes of so many codes. */
static inline int64_t code_bytes(int codec, int64_t count)
{
    return codec == INT8 ? count : codec == INT2 ? (count + 3) / 4 : (count + 1) / 2;
}

struct loops {
    void (*decode_row)(int codec, const uint8_t *data, int64_t n, int64_t start, int count, float *values);
    void (*encode_row)(int codec, const float *values, uint8_t *data, int64_t n, int64_t start, int count, float *decoded);
    void (*add_products)(const float *const *rows, int row_count, int count, float *sums);
    void (*examine)(const float *values, int count, float *sums, uint32_t *largest);
    uint32_t (*largest_bits)(const float *values, int count);
    void (*weighted_sum)(const float *const *rows, int row_count, const float *mixing, int from, int to, float *sum);
    void (*update)(
        const struct rule *rule, float *gradient, const float *first, const float *second, float *next_first,
        float *next_second, int count);
    void (*subtract)(const float *a, const float *b, int count, float *result);
    void (*add)(const float *a, const float *b, int count, float *result);
};

#define VARIANT(name) name##_baseline
#define WIDTH 4
#include "loops.h"
#undef VARIANT
#undef WIDTH

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
#define VARIANT(name) name##_avx2
#define WIDTH 8
#include "loops.h"
#undef VARIANT
#undef WIDTH
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define VARIANT(name) name##_avx512
#define WIDTH 16
#include "loops.h"
#undef VARIANT
#undef WIDTH
#pragma GCC pop_options
#endif

/* ── CRC-32C ───────────────────────────────────────────────────────────────────────────────────────────────────── */

#if defined(__x86_64__)
#define CRC_TARGET __attribute__((target("sse4.2,pclmul")))

/* The product of two polynomials of degree 31 and less, and x^33, modulo that of CRC-32C; x^0 is the highest bit. */
CRC_TARGET static inline uint32_t crc_product(uint32_t a, uint32_t b)
{
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(a), _mm_cvtsi64_si128(b), 0);
    return (uint32_t)_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

/* The remainder of what has the remainder crc, followed by size bytes that have the remainder of their own. */
CRC_TARGET static uint32_t crc_joined(uint32_t crc, int64_t size, uint32_t own)
{
    uint32_t power = 0xBF818109; /* x^(8 - 33), and its squares: every product has an x^33 too many */
    for (; size > 0; size >>= 1, power = crc_product(power, power))
        if (size & 1)
            crc = crc_product(crc, power);
    return crc ^ own;
}

/* Three parts at once, for the instruction takes three times as long as until the next can begin. */
CRC_TARGET static uint32_t crc_of(const uint8_t *data, int64_t size)
{
    uint64_t part[3] = {0}, word[3];
    int64_t length = size / 24 * 8;
    for (int64_t i = 0; i < length; i += 8)
        for (int p = 0; p < 3; p++) {
            memcpy(word + p, data + p * length + i, 8);
            part[p] = _mm_crc32_u64(part[p], word[p]);
        }
    uint32_t crc = crc_joined((uint32_t)part[0], length, (uint32_t)part[1]);
    crc = crc_joined(crc, length, (uint32_t)part[2]);
    for (int64_t i = 3 * length; i < size; i++)
        crc = _mm_crc32_u8(crc, data[i]);
    return crc;
}

enum { FOLD_BYTES = 256 };

static int64_t fold_factors[2]; /* for the earlier and the later half of 16 bytes */

/* x^exponent modulo the polynomial of CRC-32C, as a factor of a product of 64 bits: these have an x too many. */
static int64_t crc_factor(int exponent)
{
    uint32_t power = 0x80000000;
    while (exponent-- > 0)
        power = power >> 1 ^ (power & 1 ? 0x82F63B78 : 0);
    return (int64_t)power << 1;
}

/* The same remainder by products of whole registers, two to four times as fast: what precedes is multiplied by the power of x
 * that brings it FOLD_BYTES further, where the next bytes are added. Source: Gopal et al., "Fast CRC Computation for Generic
 * Polynomials Using PCLMULQDQ Instruction", Intel 2009. */
__attribute__((target("avx512f,vpclmulqdq,sse4.2,pclmul"))) static uint32_t crc_of_wide(const uint8_t *data, int64_t size)
{
    if (size < 4 * FOLD_BYTES)
        return crc_of(data, size);
    int64_t first = fold_factors[0], second = fold_factors[1], done = FOLD_BYTES;
    __m512i factors = _mm512_set_epi64(second, first, second, first, second, first, second, first), folded[4];
    for (int part = 0; part < 4; part++)
        folded[part] = _mm512_loadu_si512(data + 64 * part);
    for (; done + FOLD_BYTES <= size; done += FOLD_BYTES)
        for (int part = 0; part < 4; part++) {
            __m512i low = _mm512_clmulepi64_epi128(folded[part], factors, 0x00);
            __m512i high = _mm512_clmulepi64_epi128(folded[part], factors, 0x11);
            __m512i next = _mm512_loadu_si512(data + done + 64 * part);
            folded[part] = _mm512_ternarylogic_epi64(low, high, next, 0x96); /* the sum of all three */
        }
    uint64_t words[FOLD_BYTES / 8], crc = 0;
    memcpy(words, folded, sizeof words);
    for (int i = 0; i < FOLD_BYTES / 8; i++)
        crc = _mm_crc32_u64(crc, words[i]);
    for (; done < size; done++)
        crc = _mm_crc32_u8((uint32_t)crc, data[done]);
    return (uint32_t)crc;
}
#else
static uint32_t crc_joined(uint32_t crc, int64_t size, uint32_t own) { return 0; }
static uint32_t crc_of(const uint8_t *data, int64_t size) { return 0; }
#endif

static const struct loops *loops = &loops_baseline;
static const char *instructions = "baseline";
static bool has_crc;
static uint32_t (*fastest_crc)(const uint8_t *data, int64_t size) = crc_of;

__attribute__((constructor)) static void choose_loops(void)
{
#if defined(__x86_64__)
    const char *wanted = getenv("ATOLL_KERNELS"); /* a test of one instruction set */
    if (wanted != NULL && strcmp(wanted, "baseline") == 0)
        return;
    __builtin_cpu_init();
    has_crc = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512 && (wanted == NULL || strcmp(wanted, "avx2") != 0)) {
        loops = &loops_avx512;
        instructions = "avx512";
        if (has_crc && __builtin_cpu_supports("vpclmulqdq")) {
            fold_factors[0] = crc_factor(8 * FOLD_BYTES + 32);
            fold_factors[1] = crc_factor(8 * FOLD_BYTES - 32);
            fastest_crc = crc_of_wide;
        }
    } else if (__builtin_cpu_supports("avx2")) {
        loops = &loops_avx2;
        instructions = "avx2";
    }
#endif
}

const char *kernels_instructions(void) { return instructions; }

int kernels_has_crc(void) { return has_crc; }

/* ── chunks among threads ──────────────────────────────────────────────────────────────────────────────────────── */

enum { CHUNKS_AT_A_TIME = 16 };

struct work {
    void (*chunk)(void *context, int64_t number);
    void *context;
    int64_t chunk_count;
    atomic_llong next;
};

static void *worker(void *shared)
{
    struct work *work = shared;
    for (;;) {
        int64_t first = atomic_fetch_add(&work->next, CHUNKS_AT_A_TIME);
        if (first >= work->chunk_count)
            return NULL;
        for (int64_t number = first; number < smaller(first + CHUNKS_AT_A_TIME, work->chunk_count); number++)
            work->chunk(work->context, number);
    }
}

/* Call chunk for every number, in this thread and threads - 1 others; where those cannot be had, in fewer. */
static void in_threads(void (*chunk)(void *, int64_t), void *context, int64_t chunk_count, int threads)
{
    struct work work = {chunk, context, chunk_count, 0};
    pthread_t others[THREADS_MAX];
    int started = 0;
    int64_t useful = smaller(smaller(threads, THREADS_MAX), (chunk_count - 1) / CHUNKS_AT_A_TIME + 1);
    while (started + 1 < useful && pthread_create(&others[started], NULL, worker, &work) == 0)
        started++;
    worker(&work);
    while (started > 0)
        pthread_join(others[--started], NULL);
}

static int64_t chunk_count(int64_t n) { return (n + CHUNK_VALUES - 1) / CHUNK_VALUES; }

/* ── encode and decode ─────────────────────────────────────────────────────────────────────────────────────────── */

struct coding {
    int codec;
    int64_t n;
    const float *base, *source;
    const uint8_t *encoded;
    uint8_t *data;
    float *values;
};

static void encode_chunk(void *context, int64_t number)
{
    const struct coding *coding = context;
    int64_t start = number * CHUNK_VALUES, count = smaller(CHUNK_VALUES, coding->n - start);
    float difference[ROW_VALUES];
    for (int64_t done = 0; done < count; done += ROW_VALUES) {
        int size = (int)smaller(ROW_VALUES, count - done);
        const float *values = coding->source + start + done;
        if (coding->base != NULL) {
            loops->subtract(coding->base + start + done, values, size, difference);
            values = difference;
        }
        loops->encode_row(coding->codec, values, coding->data, coding->n, start + done, size, NULL);
    }
}

void kernels_encode(int codec, const float *base, const float *values, int64_t n, uint8_t *data, int threads)
{
    struct coding coding = {.codec = codec, .n = n, .base = base, .source = values, .data = data};
    in_threads(encode_chunk, &coding, chunk_count(n), threads);
}

static void decode_chunk(void *context, int64_t number)
{
    const struct coding *coding = context;
    int64_t start = number * CHUNK_VALUES, count = smaller(CHUNK_VALUES, coding->n - start);
    float row[ROW_VALUES];
    for (int64_t done = 0; done < count; done += ROW_VALUES) {
        int size = (int)smaller(ROW_VALUES, count - done);
        float *values = coding->values + start + done;
        loops->decode_row(coding->codec, coding->encoded, coding->n, start + done, size, coding->base ? row : values);
        if (coding->base != NULL)
            loops->add(coding->base + start + done, row, size, values);
    }
}

void kernels_decode(int codec, const uint8_t *data, int64_t n, const float *add_to, float *values, int threads)
{
    struct coding coding = {.codec = codec, .n = n, .base = add_to, .encoded = data, .values = values};
    in_threads(decode_chunk, &coding, chunk_count(n), threads);
}

/* ── the next bytes ────────────────────────────────────────────────────────────────────────────────────────────── */

/* Where the bytes of the values start to end lie in the data: those of their scales, and those of their codes. */
static void regions_of(int codec, int64_t n, int64_t start, int64_t end, int64_t from[2], int64_t size[2])
{
    bool blocks = codec != FLOAT32 && codec != BFLOAT16;
    int bits = codec == FLOAT32 ? 32 : codec == BFLOAT16 ? 16 : codec == INT8 ? 8 : codec == INT2 ? 2 : 4;
    from[0] = blocks ? 2 * block_count(start) : 0;
    size[0] = blocks ? 2 * block_count(end) - from[0] : 0;
    from[1] = (blocks ? 2 * block_count(n) : 0) + start * bits / 8;
    size[1] = (end * bits + 7) / 8 - start * bits / 8;
}

/* Begin to read bytes into the second-level cache. Loops that make several passes over a row leave memory idle meanwhile. */
static inline void prefetch(const void *data, int64_t size)
{
    for (int64_t at = 0; at < size; at += 64)
        __builtin_prefetch((const uint8_t *)data + at, 0, 2);
}

/* The same for the codes of count values from start on, or of the last ones. */
static void prefetch_codes(const struct input *input, int64_t n, int64_t start, int count)
{
    int64_t from[2], size[2], begin = smaller(start, n - count);
    regions_of(input->codec, n, begin, begin + count, from, size);
    prefetch(input->data + from[1], size[1]);
}

/* ── products ──────────────────────────────────────────────────────────────────────────────────────────────────── */

/* Each matrix has chunks of its own, from its first value on, and each of these a partial sum. */
struct gram {
    const struct input *inputs;
    int input_count, pair_count;
    int64_t n, length, chunks_each;
    double *partials;
    atomic_int failed;
};

enum { ROW_ROOM = ROW_VALUES + BLOCK_VALUES };

/* The rows of the values start to start + count: those in float32 where they lie, others decoded into scratch, which has room
 * for ROW_ROOM values of each. */
static void rows_of(
    const struct input *inputs, int input_count, int64_t n, int64_t start, int count, float *scratch, const float **rows)
{
    int before = (int)(start % BLOCK_VALUES); /* values of the first block that are another matrix's */
    for (int m = 0; m < input_count; m++) {
        if (inputs[m].codec == FLOAT32 && (uintptr_t)inputs[m].data % sizeof(float) == 0) {
            rows[m] = (const float *)(const void *)(inputs[m].data + 4 * start);
            continue;
        }
        float *row = scratch + (size_t)m * ROW_ROOM;
        loops->decode_row(inputs[m].codec, inputs[m].data, n, start - before, before + count, row);
        rows[m] = row + before;
    }
}

/* Add the products of rows of count values; the last group of lanes is filled up with zeros in padded. */
static void add_rows(const float *const *rows, int row_count, int count, float *sums, float *padded)
{
    const float *ends[INPUTS_MAX];
    int whole = count / LANES * LANES, rest = count - whole;
    loops->add_products(rows, row_count, whole, sums);
    if (rest == 0)
        return;
    memset(padded, 0, sizeof(float) * LANES * (size_t)row_count);
    for (int m = 0; m < row_count; m++) {
        memcpy(padded + m * LANES, rows[m] + whole, sizeof(float) * (size_t)rest);
        ends[m] = padded + m * LANES;
    }
    loops->add_products(ends, row_count, LANES, sums);
}

static double sum_of(const float *lanes)
{
    double sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += lanes[lane];
    return sum;
}

static void gram_chunk(void *context, int64_t number)
{
    struct gram *gram = context;
    const float *rows[INPUTS_MAX];
    int inputs = gram->input_count, pairs = gram->pair_count;
    float *scratch = malloc(sizeof(float) * ((size_t)inputs * (ROW_ROOM + LANES) + (size_t)pairs * LANES));
    if (scratch == NULL) {
        atomic_store(&gram->failed, 1);
        return;
    }
    float *padded = scratch + (size_t)inputs * ROW_ROOM, *sums = padded + (size_t)inputs * LANES;
    int64_t within = number % gram->chunks_each * CHUNK_VALUES, count = smaller(CHUNK_VALUES, gram->length - within);
    int64_t start = number / gram->chunks_each * gram->length + within;
    memset(sums, 0, sizeof(float) * LANES * (size_t)pairs);
    for (int64_t done = 0; done < count; done += ROW_VALUES) {
        int size = (int)smaller(ROW_VALUES, count - done);
        rows_of(gram->inputs, inputs, gram->n, start + done, size, scratch, rows);
        add_rows(rows, inputs, size, sums, padded);
    }
    for (int pair = 0; pair < pairs; pair++)
        gram->partials[number * pairs + pair] = sum_of(sums + pair * LANES);
    free(scratch);
}

int kernels_gram(const struct input *inputs, int input_count, int64_t n, int64_t matrix_count, double *products, int threads)
{
    int pairs = input_count * (input_count + 1) / 2;
    int64_t length = n / matrix_count, chunks_each = chunk_count(length);
    double *partials = malloc(sizeof(double) * (size_t)(matrix_count * chunks_each * pairs));
    if (partials == NULL)
        return -1;
    struct gram gram = {inputs, input_count, pairs, n, length, chunks_each, partials, 0};
    in_threads(gram_chunk, &gram, matrix_count * chunks_each, threads);
    memset(products, 0, sizeof(double) * (size_t)(matrix_count * input_count * input_count));
    const double *partial = partials;
    for (int64_t matrix = 0; matrix < matrix_count && !gram.failed; matrix++) {
        double *own = products + matrix * input_count * input_count;
        for (int64_t chunk = 0; chunk < chunks_each; chunk++)
            for (int i = 0; i < input_count; i++)
                for (int j = i; j < input_count; j++)
                    own[i * input_count + j] += *partial++;
        for (int i = 0; i < input_count; i++)
            for (int j = 0; j < i; j++)
                own[i * input_count + j] = own[j * input_count + i];
    }
    free(partials);
    return gram.failed ? -1 : 0;
}

/* ── examination ───────────────────────────────────────────────────────────────────────────────────────────────── */

static void raise_to(atomic_uint *largest, uint32_t bits)
{
    unsigned before = atomic_load(largest);
    while (bits > before && !atomic_compare_exchange_weak(largest, &before, bits)) {
    }
}

/* So many chunks have one checksum for each region: they are in the second-level cache when they are examined. */
enum { GROUP_CHUNKS = 8 };

struct examination {
    struct input input;
    int64_t n;
    bool checked;
    double *partials;
    uint32_t (*checksums)[2];
    atomic_uint largest;
};

static void examine_group(void *context, int64_t number)
{
    struct examination *own = context;
    float scratch[ROW_ROOM];
    int64_t start = number * GROUP_CHUNKS * CHUNK_VALUES, end = smaller(start + GROUP_CHUNKS * CHUNK_VALUES, own->n);
    uint32_t largest = 0;
    if (own->checked) {
        int64_t from[2], size[2];
        regions_of(own->input.codec, own->n, start, end, from, size);
        for (int region = 0; region < 2; region++)
            own->checksums[number][region] = fastest_crc(own->input.data + from[region], size[region]);
    }
    for (; start < end; start += CHUNK_VALUES) {
        float sums[LANES] = {0};
        int64_t stop = smaller(start + CHUNK_VALUES, end);
        for (int64_t at = start; at < stop; at += ROW_VALUES) {
            int size = (int)smaller(ROW_VALUES, stop - at);
            const float *row;
            if (own->checked && own->input.codec == FLOAT32) /* others are limited by their arithmetic */
                prefetch_codes(&own->input, own->n, at + GROUP_CHUNKS * CHUNK_VALUES, size);
            rows_of(&own->input, 1, own->n, at, size, scratch, &row);
            loops->examine(row, size, sums, &largest);
        }
        own->partials[start / CHUNK_VALUES] = sum_of(sums);
    }
    raise_to(&own->largest, largest);
}

int kernels_examine(struct input input, int64_t n, float *largest, double *square_norm, uint32_t *checksum, int threads)
{
    int64_t chunks = chunk_count(n), groups = (chunks + GROUP_CHUNKS - 1) / GROUP_CHUNKS;
    struct examination own = {input, n, checksum != NULL, NULL, NULL, 0};
    own.partials = malloc((size_t)chunks * sizeof *own.partials + (size_t)groups * sizeof *own.checksums);
    if (own.partials == NULL)
        return -1;
    own.checksums = (void *)(own.partials + chunks);
    in_threads(examine_group, &own, groups, threads);
    *square_norm = 0;
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        *square_norm += own.partials[chunk];
    uint32_t bits = own.largest;
    memcpy(largest, &bits, 4);
    for (int region = 0; region < 2 && checksum != NULL; region++)
        for (int64_t group = 0; group < groups; group++) {
            int64_t start = group * GROUP_CHUNKS * CHUNK_VALUES, end = smaller(start + GROUP_CHUNKS * CHUNK_VALUES, n);
            int64_t from[2], size[2];
            regions_of(input.codec, n, start, end, from, size);
            *checksum = ~crc_joined(~*checksum, size[region], own.checksums[group][region]);
        }
    free(own.partials);
    return 0;
}

/* ── the outer step ────────────────────────────────────────────────────────────────────────────────────────────── */

struct stepping {
    const struct step *step;
    atomic_uint largest;
};

enum { VALUES_AHEAD = 2 * ROW_VALUES };

static const float zeros[ROW_VALUES];

/* Copy past the caches: what an outer step makes is not read again before it is out of them, and a line that is written
 * whole need not be fetched first. */
static void streamed(const float *from, int count, float *to)
{
#if defined(__x86_64__)
    if ((uintptr_t)to % 16 == 0) {
        int i = 0;
        for (; i + 4 <= count; i += 4)
            _mm_stream_ps(to + i, _mm_loadu_ps(from + i));
        memcpy(to + i, from + i, sizeof(float) * (size_t)(count - i));
        return;
    }
#endif
    memcpy(to, from, sizeof(float) * (size_t)count);
}

static void step_chunk(void *context, int64_t number)
{
    struct stepping *stepping = context;
    const struct step *step = stepping->step;
    int64_t start = number * CHUNK_VALUES, count = smaller(CHUNK_VALUES, step->n - start);
    const float *rows[INPUTS_MAX];
    float scratch[16 * ROW_ROOM], update[ROW_VALUES], made[ROW_VALUES], decoded[ROW_VALUES]; /* more than 16 inputs are rare */
    float moments[MOMENTS_MAX][ROW_VALUES];
    int moment_count = step->rule.kind == SGD ? 0 : step->rule.kind == ADAM ? 2 : 1;
    float *decoding = step->input_count <= 16 ? scratch : malloc(sizeof(float) * ROW_ROOM * (size_t)step->input_count);
    uint32_t largest = decoding == NULL ? 0x7FC00000 : 0;
    int64_t length = step->n / step->matrix_count;
    for (int64_t done = 0; done < count && decoding != NULL; done += ROW_VALUES) {
        int size = (int)smaller(ROW_VALUES, count - done);
        int64_t at = start + done, later = smaller(at + VALUES_AHEAD, step->n - size);
        for (int m = 0; m < step->input_count; m++)
            prefetch_codes(step->inputs + m, step->n, later, size);
        for (int moment = 0; moment < moment_count; moment++)
            prefetch(step->moments + moment * step->n + later, (int64_t)sizeof(float) * size);
        prefetch(step->anchor + later, (int64_t)sizeof(float) * size);
        rows_of(step->inputs, step->input_count, step->n, at, size, decoding, rows);
        for (int from = 0; from < size;) {
            int64_t matrix = (at + from) / length;
            int to = (int)smaller(size, (matrix + 1) * length - at);
            loops->weighted_sum(rows, step->input_count, step->mixing + matrix * step->input_count, from, to, update);
            from = to;
        }
        const float *first = moment_count > 0 ? step->moments + at : NULL;
        const float *second = moment_count > 1 ? step->moments + step->n + at : NULL;
        loops->update(&step->rule, update, first, second, moments[0], moments[1], size);
        for (int moment = 0; moment < moment_count; moment++)
            streamed(moments[moment], size, step->next_moments + moment * step->n + at);
        const float *residue = step->residue == NULL ? NULL : step->residue + at;
        if (step->encoded == NULL) {
            loops->subtract(step->anchor + at, update, size, made);
            if (residue != NULL)
                loops->add(made, residue, size, made);
        } else {
            loops->subtract(residue == NULL ? zeros : residue, update, size, update);
            loops->encode_row(step->down_codec, update, step->encoded, step->n, at, size, decoded);
            loops->subtract(update, decoded, size, made);
            streamed(made, size, step->next_residue + at);
            loops->add(step->anchor + at, decoded, size, made);
        }
        streamed(made, size, step->next + at);
        uint32_t bits = loops->largest_bits(made, size);
        largest = bits > largest ? bits : largest;
    }
    if (decoding != scratch)
        free(decoding);
#if defined(__x86_64__)
    _mm_sfence();
#endif
    raise_to(&stepping->largest, largest);
}

float kernels_step(const struct step *step, int threads)
{
    struct stepping stepping = {step, 0};
    in_threads(step_chunk, &stepping, chunk_count(step->n), threads);
    uint32_t bits = stepping.largest;
    float largest;
    memcpy(&largest, &bits, 4);
    return largest;
}
