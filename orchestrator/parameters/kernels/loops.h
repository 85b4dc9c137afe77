/* The inner loops, over rows of at most ROW_VALUES values that stay in the first-level cache.
 *
 * kernels.c includes this file once for each instruction set, with VARIANT(name) a name of its own and WIDTH the values of
 * its registers. Every variant does the same IEEE 754 operations on each value in the same order, so all have the same bits:
 * nothing here is contracted to fused multiply-adds, and sums are kept in LANES lanes whatever WIDTH is.
 */

typedef float VARIANT(lanes) __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t VARIANT(ints) __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint16_t VARIANT(halves) __attribute__((vector_size(2 * WIDTH), aligned(1), may_alias));
typedef uint32_t VARIANT(words) __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

#define lanes VARIANT(lanes)
#define ints VARIANT(ints)
#define words VARIANT(words)

/* WIDTH nibbles, the lower one of each byte first, in the lowest bits of as many words; there may be others above them. */
static inline __attribute__((always_inline)) words VARIANT(nibbles)(const uint8_t *codes)
{
    uint32_t a = 0;
    memcpy(&a, codes, WIDTH > 4 ? 4 : 2);
#if WIDTH == 16
    uint32_t b;
    memcpy(&b, codes + 4, 4);
    const words shifts = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    return (words){a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b} >> shifts;
#elif WIDTH == 8
    return (words){a, a, a, a, a, a, a, a} >> (words){0, 4, 8, 12, 16, 20, 24, 28};
#else
    return (words){a, a >> 4, a >> 8, a >> 12};
#endif
}

/* WIDTH codes of two bits, the lowest ones of each byte first, in the lowest bits of as many words; others are above them. */
static inline __attribute__((always_inline)) words VARIANT(quarters)(const uint8_t *codes)
{
    uint32_t a = 0;
    memcpy(&a, codes, WIDTH / 4);
#if WIDTH == 16
    const words shifts = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    return (words){a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a} >> shifts;
#elif WIDTH == 8
    return (words){a, a, a, a, a, a, a, a} >> (words){0, 2, 4, 6, 8, 10, 12, 14};
#else
    return (words){a, a >> 2, a >> 4, a >> 6};
#endif
}

/* A whole block's values. */
static inline __attribute__((always_inline)) void VARIANT(decode_block)(
    int codec, const uint8_t *codes, float scale, float *values)
{
    if (codec == INT8) {
        for (int i = 0; i < BLOCK_VALUES; i++)
            values[i] = (float)(int8_t)codes[i] * scale;
        return;
    }
    if (codec == INT2) {
        float small = 3 * scale, large = 10 * scale;
        ints few = (ints)((lanes){0} + small), other = few ^ (ints)((lanes){0} + large);
        for (int i = 0; i < BLOCK_VALUES; i += WIDTH) {
            ints pairs = (ints)VARIANT(quarters)(codes + i / 4);
            *(ints *)(values + i) = (few ^ (other & -(pairs & 1))) ^ ((pairs & 2) << 30);
        }
        return;
    }
#if WIDTH == 16 /* a register holds the values of all nibbles, and one instruction looks them up */
    const lanes int4 = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
    const lanes e3m0 = {0,    0x1p-6f,  0x1p-5f,  0x1p-4f,  0x1p-3f,  0x1p-2f,  0x1p-1f,  1,
                        -0.f, -0x1p-6f, -0x1p-5f, -0x1p-4f, -0x1p-3f, -0x1p-2f, -0x1p-1f, -1};
    lanes scaled = (codec == INT4 ? int4 : e3m0) * scale;
    for (int i = 0; i < BLOCK_VALUES; i += WIDTH)
        *(lanes *)(values + i) = __builtin_shuffle(scaled, VARIANT(nibbles)(codes + i / 2));
#else
    for (int i = 0; i < BLOCK_VALUES; i += WIDTH) {
        ints nibbles = (ints)(VARIANT(nibbles)(codes + i / 2) & 15);
        if (codec == INT4) {
            *(lanes *)(values + i) = __builtin_convertvector((nibbles ^ 8) - 8, lanes) * scale;
        } else {
            ints exponents = nibbles & 7;
            ints power = ((exponents + 120) << 23) & (exponents != 0);
            *(lanes *)(values + i) = (lanes)(power | ((nibbles & 8) << 28)) * scale;
        }
    }
#endif
}

/* Values start to start + count of n; start begins a block. */
static void VARIANT(decode_row)(int codec, const uint8_t *data, int64_t n, int64_t start, int count, float *values)
{
    if (codec == FLOAT32) {
        memcpy(values, data + 4 * start, 4 * (size_t)count);
        return;
    }
    if (codec == BFLOAT16) {
        const uint8_t *from = data + 2 * start;
        int i = 0;
        for (; i + WIDTH <= count; i += WIDTH)
            *(words *)(values + i) = __builtin_convertvector(*(const VARIANT(halves) *)(from + 2 * i), words) << 16;
        for (; i < count; i++)
            values[i] = widened(from + 2 * i);
        return;
    }
    const uint8_t *scales = data + 2 * (start / BLOCK_VALUES);
    const uint8_t *codes = data + 2 * block_count(n) + code_bytes(codec, start);
    for (int done = 0; done < count; done += BLOCK_VALUES, scales += 2, codes += code_bytes(codec, BLOCK_VALUES)) {
        float scale = widened(scales);
        int size = count - done < BLOCK_VALUES ? count - done : BLOCK_VALUES;
        if (size == BLOCK_VALUES) { /* each codec has a loop of its own */
            if (codec == INT4)
                VARIANT(decode_block)(INT4, codes, scale, values + done);
            else if (codec == E3M0)
                VARIANT(decode_block)(E3M0, codes, scale, values + done);
            else if (codec == INT2)
                VARIANT(decode_block)(INT2, codes, scale, values + done);
            else
                VARIANT(decode_block)(INT8, codes, scale, values + done);
        } else {
            uint8_t padded[BLOCK_VALUES] = {0};
            float block[BLOCK_VALUES];
            memcpy(padded, codes, (size_t)code_bytes(codec, size));
            VARIANT(decode_block)(codec, padded, scale, block);
            memcpy(values + done, block, 4 * (size_t)size);
        }
    }
}

/* The sum of a block's values, of LANES, which are then added in order. */
static inline __attribute__((always_inline)) float VARIANT(block_sum)(const float *values)
{
    lanes sums[LANES / WIDTH] = {{0}};
    for (int i = 0; i < BLOCK_VALUES; i += LANES)
        for (int part = 0; part < LANES / WIDTH; part++)
            sums[part] += *(const lanes *)(values + i + part * WIDTH);
    float each[LANES], total = 0;
    memcpy(each, sums, sizeof each);
    for (int lane = 0; lane < LANES; lane++)
        total += each[lane];
    return total;
}

/* Write the scale and the codes of a block in int2, of size values and zeros behind them. */
static void VARIANT(encode_int2)(const float *block, int size, uint8_t *scale, uint8_t *codes)
{
    float magnitudes[BLOCK_VALUES], products[BLOCK_VALUES];
    int32_t units[BLOCK_VALUES];
    for (int i = 0; i < BLOCK_VALUES; i += WIDTH)
        *(ints *)(magnitudes + i) = *(const ints *)(block + i) & 0x7FFFFFFF;
    float threshold = VARIANT(block_sum)(magnitudes) * (INT2_THRESHOLD / (float)size);
    ints larger = {0};
    for (int i = 0; i < BLOCK_VALUES; i += WIDTH) {
        lanes magnitude = *(const lanes *)(magnitudes + i);
        ints is_large = magnitude > threshold;
        larger -= is_large;
        *(lanes *)(products + i) = magnitude * __builtin_convertvector(3 + (is_large & 7), lanes);
        *(ints *)(units + i) = (is_large & 1) | ((ints)((words)*(const ints *)(block + i) >> 30) & 2);
    }
    int large = 0;
    for (int lane = 0; lane < WIDTH; lane++)
        large += larger[lane];
    uint8_t packed[BLOCK_VALUES / 4] = {0};
    if (int2_scale(VARIANT(block_sum)(products), (float)(9 * (size - large) + 100 * large), scale))
        for (int i = 0; i < BLOCK_VALUES / 4; i++)
            packed[i] = (uint8_t)(units[4 * i] | units[4 * i + 1] << 2 | units[4 * i + 2] << 4 | units[4 * i + 3] << 6);
    if (size % 4 != 0) /* nothing behind the last value */
        packed[size / 4] &= (uint8_t)((1 << 2 * (size % 4)) - 1);
    memcpy(codes, packed, (size_t)code_bytes(INT2, size));
}

/* Encode values start to start + count of n. Where decoded is not NULL it becomes what a receiver will read. */
static void VARIANT(encode_row)(
    int codec, const float *values, uint8_t *data, int64_t n, int64_t start, int count, float *decoded)
{
    if (codec == FLOAT32) {
        memcpy(data + 4 * start, values, 4 * (size_t)count);
    } else if (codec == BFLOAT16) {
        uint8_t *to = data + 2 * start;
        for (int i = 0; i < count; i++) {
            uint32_t bits;
            memcpy(&bits, values + i, 4);
            uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16; /* to nearest, ties to even */
            uint16_t half = (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? (bits >> 16 & 0x8000) | 0x7FC0 : rounded);
            memcpy(to + 2 * i, &half, 2);
        }
    } else {
        uint8_t *scales = data + 2 * (start / BLOCK_VALUES);
        uint8_t *codes = data + 2 * block_count(n) + code_bytes(codec, start);
        for (int done = 0; done < count; done += BLOCK_VALUES, scales += 2, codes += code_bytes(codec, BLOCK_VALUES)) {
            int size = count - done < BLOCK_VALUES ? count - done : BLOCK_VALUES;
            const float *block = values + done;
            float padded[BLOCK_VALUES] = {0};
            int32_t units[BLOCK_VALUES];
            if (size < BLOCK_VALUES) {
                memcpy(padded, block, 4 * (size_t)size);
                block = padded;
            }
            if (codec == INT2) {
                VARIANT(encode_int2)(block, size, scales, codes);
                continue;
            }
            ints largest = {0};
            for (int i = 0; i < BLOCK_VALUES; i += WIDTH) {
                ints bits = *(const ints *)(block + i) & 0x7FFFFFFF;
                ints larger = bits > largest;
                largest = (bits & larger) | (largest & ~larger);
            }
            int32_t largest_bits = 0;
            for (int lane = 0; lane < WIDTH; lane++)
                largest_bits = largest[lane] > largest_bits ? largest[lane] : largest_bits;
            float inverse = scale_of(codec, (uint32_t)largest_bits, scales);
            if (inverse == 0) {
                memset(units, 0, sizeof units);
            } else if (codec == E3M0) {
                for (int i = 0; i < BLOCK_VALUES; i += WIDTH) {
                    lanes scaled = *(const lanes *)(block + i) * inverse;
                    lanes magnitude = (lanes)((ints)scaled & 0x7FFFFFFF);
                    ints code = -(magnitude >= 0x1p-7f) - (magnitude >= 0x1.8p-6f) - (magnitude >= 0x1.8p-5f);
                    code = code - (magnitude >= 0x1.8p-4f) - (magnitude >= 0x1.8p-3f) - (magnitude >= 0x1.8p-2f);
                    code = code - (magnitude >= 0x1.8p-1f);
                    *(ints *)(units + i) = code | ((scaled < 0) & (code > 0) & 8);
                }
            } else {
                ints most = (ints){0} + (codec == INT8 ? 127 : 7);
                for (int i = 0; i < BLOCK_VALUES; i += WIDTH) {
                    /* adding 1.5 · 2^23 leaves the integer, rounded half to even, in the lowest bits */
                    lanes sum = *(const lanes *)(block + i) * inverse + 0x1.8p23f;
                    ints code = (ints)sum - 0x4B400000;
                    code = (most & (code > most)) | (code & (code <= most));
                    *(ints *)(units + i) = (-most & (code < -most)) | (code & (code >= -most));
                }
            }
            uint8_t packed[BLOCK_VALUES];
            if (codec == INT8) {
                for (int i = 0; i < BLOCK_VALUES; i++)
                    packed[i] = (uint8_t)units[i];
            } else {
                for (int i = 0; i < BLOCK_VALUES / 2; i++)
                    packed[i] = (uint8_t)((units[2 * i] & 15) | (units[2 * i + 1] & 15) << 4);
            }
            memcpy(codes, packed, (size_t)code_bytes(codec, size));
        }
    }
    if (decoded != NULL)
        VARIANT(decode_row)(codec, data, n, start, count, decoded);
}

/* Where the sums of rows i and j of M lie among those of all pairs: (0,0) (0,1) … (1,1) …, LANES of each. */
static inline __attribute__((always_inline)) float *VARIANT(sums_of)(float *sums, int row_count, int i, int j)
{
    return sums + (i * row_count - i * (i - 1) / 2 + j - i) * LANES;
}

/* Some rows from i on times some from j on: so many values are read once for several products. The largest tile of a square
 * has as many sums as half of the registers of AVX-512. */
static inline __attribute__((always_inline)) void VARIANT(add_tile)(
    const float *const *rows, int row_count, int i, int height, int j, int width, int count, float *sums)
{
    for (int lane = 0; lane < LANES; lane += WIDTH) {
        lanes total[4][4];
        for (int p = 0; p < height; p++)
            for (int q = 0; q < width; q++)
                total[p][q] = i + p > j + q ? (lanes){0} : *(lanes *)(VARIANT(sums_of)(sums, row_count, i + p, j + q) + lane);
        for (int k = lane; k < count; k += LANES)
            for (int p = 0; p < height; p++)
                for (int q = 0; q < width; q++)
                    if (height == 1 || i != j || p <= q)
                        total[p][q] += *(const lanes *)(rows[i + p] + k) * *(const lanes *)(rows[j + q] + k);
        for (int p = 0; p < height; p++)
            for (int q = 0; q < width; q++)
                if (i + p <= j + q)
                    *(lanes *)(VARIANT(sums_of)(sums, row_count, i + p, j + q) + lane) = total[p][q];
    }
}

/* Add the products of all pairs of rows to their sums; count is a multiple of LANES. */
static void VARIANT(add_products)(const float *const *rows, int row_count, int count, float *sums)
{
    int i = 0;
#if WIDTH == 16 /* the others have too few registers */
    for (; i + 4 <= row_count; i += 4) {
        VARIANT(add_tile)(rows, row_count, i, 4, i, 4, count, sums);
        int j = i + 4;
        for (; j + 4 <= row_count; j += 4)
            VARIANT(add_tile)(rows, row_count, i, 4, j, 4, count, sums);
        for (; j < row_count; j++)
            VARIANT(add_tile)(rows, row_count, i, 4, j, 1, count, sums);
    }
#endif
    for (; i < row_count; i += 2) {
        if (i + 1 == row_count) {
            VARIANT(add_tile)(rows, row_count, i, 1, i, 1, count, sums);
            return;
        }
        VARIANT(add_tile)(rows, row_count, i, 2, i, 2, count, sums);
        int j = i + 2;
        for (; j + 4 <= row_count; j += 4)
            VARIANT(add_tile)(rows, row_count, i, 2, j, 4, count, sums);
        for (; j + 2 <= row_count; j += 2)
            VARIANT(add_tile)(rows, row_count, i, 2, j, 2, count, sums);
        if (j < row_count)
            VARIANT(add_tile)(rows, row_count, i, 2, j, 1, count, sums);
    }
}

/* The largest magnitude as the bits of a float32: NaN is above infinity, and that above all numbers. */
static uint32_t VARIANT(largest_bits)(const float *values, int count)
{
    uint32_t largest = 0;
    for (int i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, 4);
        bits &= 0x7FFFFFFF;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* Add the squares of a row to their sums, and raise largest to the bits of its largest magnitude. */
static void VARIANT(examine)(const float *values, int count, float *sums, uint32_t *largest)
{
    lanes total[LANES / WIDTH];
    memcpy(total, sums, sizeof total);
    int whole = count / LANES * LANES;
    for (int i = 0; i < whole; i += LANES)
        for (int part = 0; part < LANES / WIDTH; part++) {
            lanes own = *(const lanes *)(values + i + part * WIDTH);
            total[part] += own * own;
        }
    memcpy(sums, total, sizeof total);
    for (int i = whole; i < count; i++)
        sums[i - whole] += values[i] * values[i];
    uint32_t own = VARIANT(largest_bits)(values, count);
    *largest = own > *largest ? own : *largest;
}

/* Σ a_m Δ_m, added up in the order of the rows. */
static void VARIANT(weighted_sum)(
    const float *const *rows, int row_count, const float *mixing, int from, int to, float *restrict sum)
{
    const float *first = rows[0];
    float a = mixing[0];
    for (int i = from; i < to; i++)
        sum[i] = a * first[i];
    int m = 1;
    for (; m + 3 <= row_count; m += 3) {
        const float *p = rows[m], *q = rows[m + 1], *r = rows[m + 2];
        float b = mixing[m], c = mixing[m + 1], d = mixing[m + 2];
        for (int i = from; i < to; i++)
            sum[i] = ((sum[i] + b * p[i]) + c * q[i]) + d * r[i];
    }
    for (; m < row_count; m++) {
        const float *p = rows[m];
        float b = mixing[m];
        for (int i = from; i < to; i++)
            sum[i] = sum[i] + b * p[i];
    }
}

/* gradient becomes what is subtracted from Θ. first and second are the moments that the rule has. */
static void VARIANT(update)(
    const struct rule *rule, float *restrict gradient, const float *restrict first, const float *restrict second,
    float *restrict next_first, float *restrict next_second, int count)
{
    struct rule r = *rule;
    if (r.kind == SGD) {
        for (int i = 0; i < count; i++)
            gradient[i] = r.lr * gradient[i];
    } else if (r.kind == MOMENTUM) {
        for (int i = 0; i < count; i++) {
            float next = first[i] * r.decay + gradient[i];
            next_first[i] = next;
            gradient[i] = next * r.lr;
        }
    } else if (r.kind == NESTEROV) {
        for (int i = 0; i < count; i++) {
            float next = first[i] * r.decay + gradient[i];
            next_first[i] = next;
            gradient[i] = (next * r.decay + gradient[i]) * r.lr;
        }
    } else {
        for (int i = 0; i < count; i++) {
            float mean = r.decay * first[i] + r.rest * gradient[i];
            float square = r.decay_square * second[i] + r.rest_square * (gradient[i] * gradient[i]);
            next_first[i] = mean;
            next_second[i] = square;
            float width = __builtin_sqrtf(square * r.scale_square) + r.epsilon;
            gradient[i] = r.lr * ((mean * r.scale) / width);
        }
    }
}

static void VARIANT(subtract)(const float *a, const float *b, int count, float *result)
{
    for (int i = 0; i < count; i++)
        result[i] = a[i] - b[i];
}

static void VARIANT(add)(const float *a, const float *b, int count, float *result)
{
    for (int i = 0; i < count; i++)
        result[i] = a[i] + b[i];
}

static const struct loops VARIANT(loops) = {
    VARIANT(decode_row), VARIANT(encode_row), VARIANT(add_products), VARIANT(examine), VARIANT(largest_bits),
    VARIANT(weighted_sum), VARIANT(update), VARIANT(subtract), VARIANT(add),
};

#undef lanes
#undef ints
#undef words
