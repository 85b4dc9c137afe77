"""Codecs of blocks: how near arrives what was sent, what is said of values that are no numbers, and the bytes themselves."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from orchestrator.parameters.codec.registry import CODEC_NAMES, codec

ERROR_MAX = {"float32": 0.0, "bfloat16": 2**-8, "int8": 0.51 / 127, "int4": 0.51 / 7, "e3m0": 0.251}
"""Of a value, in proportion to the largest of its block."""
BLOCKWISE = [name for name in CODEC_NAMES if ERROR_MAX[name] > 2**-8 or name == "int8"]
BLOCK = 128

ARRAYS = hnp.arrays(np.float32, st.integers(0, 400), elements=st.floats(-(2.0**60), 2.0**60, width=32))


def trip(name, values):
    coder = codec(name)
    data = b"".join(coder.encode(values))
    assert len(data) == coder.data_bytes(values.size)
    return coder.decode(memoryview(data), values.size)


@pytest.mark.parametrize("name", CODEC_NAMES)
@given(ARRAYS)
def test_each_value_is_near_in_proportion_to_the_largest_of_its_block(name, values):
    received = trip(name, values)
    assert received.dtype == np.float32
    assert received.shape == values.shape
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK].astype(np.float64)
        error = np.abs(received[start : start + BLOCK] - block).max()
        assert error <= ERROR_MAX[name] * 1.01 * np.abs(block).max() + 2.0**-92


@pytest.mark.parametrize("name", CODEC_NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_arrives_as_one_that_is_none(name, bad):
    values = np.ones(300, np.float32)
    values[200] = bad
    received = trip(name, values)
    assert not np.isfinite(received[200])
    assert np.isfinite(received[:BLOCK]).all()
    assert np.isfinite(received[2 * BLOCK :]).all()


@pytest.mark.parametrize("name", BLOCKWISE)
def test_the_largest_of_a_block_is_not_clipped_however_its_scale_is_rounded(name):
    rng = np.random.default_rng(5)
    values = (rng.uniform(0.5, 1, 10_000) * 2.0 ** rng.integers(-60, 60, 10_000)).astype(np.float32)
    alone = np.zeros((values.size, BLOCK), np.float32)
    alone[:, 7] = values
    received = trip(name, alone.reshape(-1)).reshape(alone.shape)[:, 7]
    assert (np.abs(received - values) <= 2**-6.9 * values).all()


@pytest.mark.parametrize("name", BLOCKWISE)
def test_blocks_are_coded_apart_and_zeros_stay_zeros(name):
    values = np.random.default_rng(6).standard_normal(5 * BLOCK + 3).astype(np.float32)
    values[BLOCK : 2 * BLOCK] = 0
    received = trip(name, values)
    assert (received[BLOCK : 2 * BLOCK] == 0).all()
    for start in range(0, values.size, BLOCK):
        np.testing.assert_array_equal(received[start : start + BLOCK], trip(name, values[start : start + BLOCK]))


@pytest.mark.parametrize("name", BLOCKWISE)
def test_values_too_small_for_a_scale_decode_to_zeros(name):
    values = np.full(BLOCK, 1e-40, np.float32)
    assert (trip(name, values) == 0).all()


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_what_was_decoded_codes_to_itself_again(name):
    once = trip(name, np.random.default_rng(7).standard_normal(1000).astype(np.float32))
    again = trip(name, once)
    np.testing.assert_allclose(again, once, rtol=2**-6.9, atol=0)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("int8", "6c54c4813fc7aa03"), ("int4", "09b799dde59c9c78"), ("e3m0", "9f7d7785462e17d0")],
)
def test_bytes_are_the_same_in_every_build(name, wanted):
    values = (np.arange(-500, 500, dtype=np.float32) ** 3) * np.float32(1e-6)
    assert hashlib.sha256(b"".join(codec(name).encode(values))).hexdigest()[:16] == wanted
