/* Merge arithmetic over encoded displacements. What each function computes, and in which order it adds, is written in
 * twin.py, which has the same bits. */

#ifndef ATOLL_KERNELS_H
#define ATOLL_KERNELS_H

#include <stdint.h>

enum { FLOAT32, BFLOAT16, INT8, INT4, E3M0, INT2 };
enum { BLOCK_VALUES = 128, CHUNK_VALUES = 4096, INPUTS_MAX = 256 };

/* The values of one piece of one island, n of them, as their codec writes them. */
struct input {
    int codec;
    const uint8_t *data;
};

/* One step of an optimizer; outer_optimizer.Rule says what each number is, and rest is 1 minus a decay. */
enum { SGD, MOMENTUM, NESTEROV, ADAM };
enum { MOMENTS_MAX = 2 };
struct rule {
    int kind;
    float lr, decay, rest, decay_square, rest_square, scale, scale_square, epsilon;
};

/* An outer step. Arrays of n values, but mixing: (matrix_count, input_count), row by row, and moments and next_moments: n values
 * of each. These are NULL for plain gradient descent, next_residue and encoded where the downlink is float32; residue may be
 * NULL for zeros. */
struct step {
    int64_t n, matrix_count;
    int input_count, down_codec;
    const struct input *inputs;
    const float *mixing, *anchor, *moments, *residue;
    struct rule rule;
    float *next, *next_moments, *next_residue;
    uint8_t *encoded;
};

const char *kernels_instructions(void);
int kernels_has_crc(void); /* else checksum is NULL wherever it may be */
void kernels_encode(int codec, const float *base, const float *values, int64_t n, uint8_t *data, int threads);
void kernels_decode(int codec, const uint8_t *data, int64_t n, const float *add_to, float *values, int threads);

/* The return values that are int are 0, or -1 where memory for sums is lacking. checksum, unless NULL, is the CRC-32C of what
 * comes before the data, and becomes that with the data. */
int kernels_gram(const struct input *inputs, int input_count, int64_t n, int64_t matrix_count, double *products, int threads);
int kernels_examine(struct input input, int64_t n, float *largest, double *square_norm, uint32_t *checksum, int threads);
float kernels_step(const struct step *step, int threads);

#endif
