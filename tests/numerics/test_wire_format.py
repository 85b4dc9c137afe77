"""The wire format: what was sent arrives bit for bit, and nothing else is ever accepted."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from orchestrator.core.vocabulary import RefusalReason
from orchestrator.parameters import tensors, validation, wire_format
from orchestrator.parameters.codec.registry import CODEC_NAMES
from orchestrator.parameters.wire_format import InvalidPayload

SMALL = {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3) - 2.5, "scale": np.float32([1.0, -1.0])}

FINITE = st.floats(-(2.0**49), 2.0**49, width=32)
TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=8),
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4), elements=FINITE),
    max_size=5,
)


def rounded_to_bfloat16(array):
    """Round to nearest, ties to even, on the bits: the upper half of a float32 is the bfloat16."""
    bits = array.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("base", [None, 0, 7])
def test_what_a_payload_is_the_difference_from_arrives_with_it(base):
    assert wire_format.parse(wire_format.encode(SMALL, "int4", base)).base == base


def sealed(header: object, data: bytes) -> bytes:
    """A payload whose checksum holds, whatever its header says."""
    text = (
        header
        if isinstance(header, bytes)
        else json.dumps({"base": None, **header} if isinstance(header, dict) else header).encode()
    )
    body = struct.pack("<8sIQ", b"atollw2\n", len(text), len(data)) + text + data
    return body + struct.pack("<I", crc32c(body))


def refusal_of(payload: bytes) -> RefusalReason | None:
    try:
        wire_format.decode(payload)
    except InvalidPayload as error:
        return error.reason
    return None


@given(TENSORS)
def test_float32_arrives_bit_for_bit_in_the_order_sent(arrays):
    received = wire_format.decode(wire_format.encode(arrays))
    assert list(received) == list(arrays)
    for name, array in arrays.items():
        assert received[name].dtype == np.float32
        assert received[name].shape == array.shape
        assert received[name].tobytes() == array.tobytes()
    assert validation.check_numbers(received) is None
    assert tensors.digest(received) == tensors.digest(arrays)


@given(hnp.arrays(np.float32, st.integers(0, 64), elements=FINITE))
def test_bfloat16_arrives_rounded_to_nearest_even(array):
    received = wire_format.decode(wire_format.encode({"x": array}, "bfloat16"))["x"]
    np.testing.assert_array_equal(received, array.astype(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(received, rounded_to_bfloat16(array))


def test_bfloat16_halves_the_data_and_survives_a_second_trip_unchanged():
    arrays = {"x": np.random.default_rng(4).standard_normal(10_000, dtype=np.float32)}
    once = wire_format.encode(arrays, "bfloat16")
    assert len(once) < 0.51 * len(wire_format.encode(arrays))
    assert wire_format.encode(wire_format.decode(once), "bfloat16") == once


def error_max(codec):
    """Return the most by which a value may differ, as a ratio of the largest: two bits have four values for a block."""
    return 1.0 if codec == "int2" else 0.26


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_strided_and_transposed_arrays_arrive_as_they_look(codec):
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    views = {"t": base.T, "s": base[::2, 1::2]}
    copies = {name: view.copy(order="C") for name, view in views.items()}
    assert wire_format.encode(views, codec) == wire_format.encode(copies, codec)
    received = wire_format.decode(wire_format.encode(views, codec))
    for name, view in views.items():
        np.testing.assert_allclose(received[name], view, atol=error_max(codec) * view.max())


@pytest.mark.parametrize("carrier", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8).data])
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_decoded_arrays_cannot_be_written_whatever_carried_them(codec, carrier):
    received = wire_format.decode(carrier(wire_format.encode(SMALL, codec)))
    np.testing.assert_allclose(received["kernel"], SMALL["kernel"], atol=error_max(codec) * SMALL["kernel"].max())
    with pytest.raises(ValueError, match="read-only"):
        received["kernel"][0] = 0


def test_float32_is_decoded_without_a_copy():
    payload = np.frombuffer(wire_format.encode(SMALL), np.uint8)
    assert all(np.shares_memory(array, payload) for array in wire_format.decode(payload.data).values())


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_every_change_of_any_single_byte_is_refused(codec):
    payload = wire_format.encode(SMALL, codec)
    accepted = []
    for position in range(len(payload)):
        for change in range(1, 256):
            damaged = bytearray(payload)
            damaged[position] ^= change
            if refusal_of(damaged) is not RefusalReason.CORRUPT:
                accepted.append((position, change))
    assert not accepted


def test_every_cut_and_every_tail_is_refused():
    payload = wire_format.encode(SMALL)
    for damaged in [*(payload[:length] for length in range(len(payload))), bytes(payload) + b"\0", bytes(payload) * 2]:
        with pytest.raises(InvalidPayload):
            wire_format.decode(damaged)


@given(st.integers(0), st.integers(1, 255))
def test_a_changed_byte_of_a_large_payload_is_refused(position, change):
    payload = bytearray(wire_format.encode({"x": np.ones((100, 100), np.float32)}))
    payload[position % len(payload)] ^= change
    assert refusal_of(payload) is RefusalReason.CORRUPT


@given(st.binary(max_size=200))
def test_bytes_that_were_never_a_payload_are_refused(data):
    with pytest.raises(InvalidPayload):
        wire_format.decode(data)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"\xff\xfe", b""),
        (b"[" * 50_000, b""),
        ([], b""),
        ({"codec": "float32"}, b""),
        ({"codec": "of another build", "tensors": []}, b""),
        ({"codec": ["float32"], "tensors": []}, b""),
        ({"codec": "float32", "tensors": [["x", [2]]]}, bytes(4)),
        ({"codec": "float32", "tensors": []}, bytes(4)),
        ({"codec": "float32", "tensors": [["x", [1]], ["x", [1]]]}, bytes(8)),
        ({"codec": "float32", "tensors": [["x", [3]], ["y", [-1]], ["z", [1]]]}, bytes(12)),
        ({"codec": "float32", "tensors": [["x", [1.0]]]}, bytes(4)),
        ({"codec": "float32", "tensors": [["x", [True]]]}, bytes(4)),
        ({"codec": "float32", "tensors": [["x", [2**62, 2**62, 0]]]}, b""),
        ({"codec": "float32", "tensors": [[["x"], [1]]]}, bytes(4)),
        ({"codec": "float32", "tensors": [[1, [1]]]}, bytes(4)),
        ({"codec": "float32", "tensors": [["x"]]}, bytes(4)),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_header_that_lies_under_a_good_checksum_is_refused(header, data):
    with pytest.raises(InvalidPayload):
        wire_format.decode(sealed(header, data))


def test_the_same_header_told_truly_is_accepted():
    (array,) = wire_format.decode(sealed({"codec": "float32", "tensors": [["x", [2]]]}, bytes(8))).values()
    np.testing.assert_array_equal(array, [0, 0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -1.01e15])
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_values_that_are_not_finite_or_have_diverged_arrive_but_are_refused(value, codec):
    arrays = {"kernel": np.ones((3, 4), np.float32), "scale": np.ones(2, np.float32)}
    arrays["kernel"][1, 2] = 3.0 * value if codec == "int2" and value == -1.01e15 else value  # less than half arrives
    refusal = validation.check_numbers(wire_format.decode(wire_format.encode(arrays, codec)))
    assert refusal is not None
    assert "kernel" in refusal


@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        ({"kernel": (3, 2)}, "kernel has the shape [3, 2]"),
        ({"kernel": (6,)}, "kernel has the shape [6]"),
        ({}, "kernel are missing"),
        ({"kernel": (2, 3), "bias": (1,)}, "bias are not of this fragment"),
    ],
)
def test_other_tensors_than_the_fragments_are_refused_by_name(shapes, named):
    refusal = validation.check_shapes(shapes, {"kernel": (2, 3)})
    assert refusal is not None
    assert named in refusal


def test_a_digest_names_every_bit_name_and_shape_but_not_the_order():
    names = {
        tensors.digest(arrays)
        for arrays in (
            SMALL,
            {**SMALL, "scale": np.float32([1.0, -1.0000001])},
            {**SMALL, "scale": np.float32([[1.0, -1.0]])},
            {"kernel": SMALL["kernel"], "bias": SMALL["scale"]},
            {"zero": np.float32([0.0])},
            {"zero": np.float32([-0.0])},
        )
    }
    assert len(names) == 6
    assert tensors.digest(dict(reversed(SMALL.items()))) == tensors.digest(SMALL)
