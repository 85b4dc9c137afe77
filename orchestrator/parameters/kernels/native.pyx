# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The kernels in C, with the signatures of ``twin``, which says what each computes. None holds the GIL while it works.

Nothing is checked here: sizes, types and contiguity are the business of ``kernels``.
"""

import numpy as np
from crc32c import crc32c

from libc.stdint cimport int64_t, uint8_t, uint32_t

cdef extern from "kernels.h":
    enum:
        INPUTS_MAX
    ctypedef struct Input "struct input":
        int codec
        const uint8_t *data
    ctypedef struct Rule "struct rule":
        int kind
        float lr, decay, rest, decay_square, rest_square, scale, scale_square, epsilon
    ctypedef struct Step "struct step":
        int64_t n, matrix_count
        int input_count, down_codec
        const Input *inputs
        const float *mixing
        const float *anchor
        const float *moments
        const float *residue
        Rule rule
        float *next
        float *next_moments
        float *next_residue
        uint8_t *encoded
    const char *kernels_instructions()
    int kernels_has_crc()
    void kernels_encode(int, const float *, const float *, int64_t, uint8_t *, int) nogil
    void kernels_decode(int, const uint8_t *, int64_t, const float *, float *, int) nogil
    int kernels_gram(const Input *, int, int64_t, int64_t, double *, int) nogil
    int kernels_examine(Input, int64_t, float *, double *, uint32_t *, int) nogil
    float kernels_step(const Step *, int) nogil

CODECS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3, "e3m0": 4, "int2": 5}
INPUT_COUNT_MAX = INPUTS_MAX
INSTRUCTIONS = kernels_instructions().decode()


cdef const float *values_of(const float[::1] values):
    if values is None:
        return NULL
    return &values[0]


cdef float *written_of(float[::1] values):
    return NULL if values is None else &values[0]


cdef void fill(Input *filled, inputs):
    cdef const uint8_t[::1] data
    for m, (codec_name, data) in enumerate(inputs):
        filled[m].codec = CODECS[codec_name]
        filled[m].data = &data[0]


def encode(codec_name, const float[::1] values, const float[::1] base, uint8_t[::1] data, int threads):
    cdef int codec = CODECS[codec_name]
    cdef const float *from_base = values_of(base)
    with nogil:
        kernels_encode(codec, from_base, &values[0], values.shape[0], &data[0], threads)


def decode(codec_name, const uint8_t[::1] data, const float[::1] base, float[::1] values, int threads):
    cdef int codec = CODECS[codec_name]
    cdef const float *add_to = values_of(base)
    with nogil:
        kernels_decode(codec, &data[0], values.shape[0], add_to, &values[0], threads)


def examine(codec_name, const uint8_t[::1] data, int64_t value_count, checksum, int threads):
    cdef Input only
    cdef float largest
    cdef double square_norm
    cdef uint32_t running = 0
    cdef uint32_t *checked = NULL
    cdef int failed
    only.codec, only.data = CODECS[codec_name], &data[0]
    if checksum is not None:
        if not kernels_has_crc():
            checksum = crc32c(data, checksum)
        else:
            running = checksum
            checked = &running
    with nogil:
        failed = kernels_examine(only, value_count, &largest, &square_norm, checked, threads)
    if failed:
        raise MemoryError
    return largest, square_norm, checksum if checked == NULL else running


def gram(inputs, int64_t value_count, int64_t matrix_count, int threads):
    cdef Input filled[INPUTS_MAX]
    cdef int input_count = len(inputs), failed
    fill(filled, inputs)
    products = np.empty((matrix_count, input_count, input_count), np.float64)
    cdef double[:, :, ::1] written = products
    with nogil:
        failed = kernels_gram(filled, input_count, value_count, matrix_count, &written[0, 0, 0], threads)
    if failed:
        raise MemoryError
    return products


def step(
    inputs, const float[:, ::1] mixing, rule, down_codec, const float[::1] anchor, const float[:, ::1] moments,
    const float[::1] residue, float[::1] next_parameters, float[:, ::1] next_moments, float[::1] next_residue,
    uint8_t[::1] update, int threads,
):
    cdef Input filled[INPUTS_MAX]
    cdef Step described
    cdef float largest
    fill(filled, inputs)
    described.n, described.matrix_count = anchor.shape[0], mixing.shape[0]
    described.input_count, described.inputs = len(inputs), filled
    described.down_codec = CODECS[down_codec]
    described.mixing, described.anchor = &mixing[0, 0], &anchor[0]
    described.moments = NULL if moments is None else &moments[0, 0]
    described.residue = values_of(residue)
    described.rule.kind, described.rule.lr = rule.kind, rule.lr
    described.rule.decay, described.rule.rest = rule.decay, 1 - rule.decay
    described.rule.decay_square, described.rule.rest_square = rule.decay_square, 1 - rule.decay_square
    described.rule.scale, described.rule.scale_square = rule.scale, rule.scale_square
    described.rule.epsilon = rule.epsilon
    described.next = &next_parameters[0]
    described.next_moments = NULL if next_moments is None else &next_moments[0, 0]
    described.next_residue = written_of(next_residue)
    described.encoded = NULL if update is None else &update[0]
    with nogil:
        largest = kernels_step(&described, threads)
    return largest
