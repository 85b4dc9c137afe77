"""What may not enter a merge is refused with the reason; what may is measured."""

import numpy as np
import pytest

from orchestrator.core.vocabulary import RefusalReason, Version
from orchestrator.parameters import wire_format
from orchestrator.parameters.codec.registry import CODEC_NAMES
from orchestrator.parameters.kernels.twin import CHUNK_VALUES
from orchestrator.parameters.validation import HEADER_BYTES_MAX, validated
from orchestrator.parameters.wire_format import InvalidPayload, displacement

ANCHOR = {
    "kernel": np.random.default_rng(0).standard_normal((40, 7), dtype=np.float32),
    "scale": np.ones(3, np.float32),
}
VERSION = Version(3)


def moved(by: float = 0.5) -> dict[str, np.ndarray]:
    return {name: array + np.float32(by) for name, array in ANCHOR.items()}


def spoilt(value: float) -> dict[str, np.ndarray]:
    arrays = moved()
    arrays["kernel"][17, 3] = value
    return arrays


def flipped(payload: memoryview) -> bytes:
    half = len(payload) // 2
    return bytes([*payload[:half], payload[half] ^ 1, *payload[half + 1 :]])


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_good_payload_is_measured(codec):
    content, far = validated(wire_format.written(displacement(ANCHOR, moved(), VERSION, codec)), ANCHOR, VERSION)
    assert list(content.tensors) == ["kernel", "scale"]
    assert (content.codec, content.base) == (codec, VERSION)
    tolerance = {"int4": 0.25, "e3m0": 0.25, "int2": 0.4}.get(codec, 1e-2)
    assert far == pytest.approx(0.5 * np.sqrt(283), rel=tolerance)


def test_the_displacement_of_many_blocks_is_that_of_the_whole():
    generator = np.random.default_rng(3)
    anchor, other = generator.standard_normal((2, 3 * CHUNK_VALUES + 11), dtype=np.float32)
    whole = np.linalg.norm((anchor - other).astype(np.float64))
    values = wire_format.encode({"a": other})
    content, far = validated(values, {"a": anchor}, VERSION)
    assert far == pytest.approx(whole, rel=1e-5)
    assert content.base == VERSION
    np.testing.assert_array_equal(content.decoded("a"), anchor - other)
    assert validated(values, {"a": other}, VERSION)[1] == 0.0


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (flipped(wire_format.encode(moved())), RefusalReason.CORRUPT),
        (wire_format.encode(moved())[:-1], RefusalReason.CORRUPT),
        (wire_format.encode(moved())[:30], RefusalReason.CORRUPT),
        (b"", RefusalReason.CORRUPT),
        (bytes(wire_format.encode(moved())) + b"tail", RefusalReason.CORRUPT),
        (bytes(wire_format.encode(moved())) + bytes(2 * HEADER_BYTES_MAX), RefusalReason.CORRUPT),
        (wire_format.encode({**moved(), "more": np.zeros(9, np.float32)}), RefusalReason.WRONG_SHAPE),
        (wire_format.encode({"kernel": moved()["kernel"]}), RefusalReason.WRONG_SHAPE),
        (wire_format.encode({**moved(), "scale": np.ones(4, np.float32)}), RefusalReason.WRONG_SHAPE),
        (wire_format.encode(spoilt(np.nan)), RefusalReason.NON_FINITE),
        (wire_format.encode(spoilt(-np.inf)), RefusalReason.NON_FINITE),
        (wire_format.encode(spoilt(1e16)), RefusalReason.NON_FINITE),
        (wire_format.encode(spoilt(np.nan), "bfloat16"), RefusalReason.NON_FINITE),
    ],
)
def test_anything_else_is_refused_with_its_reason(payload, reason):
    with pytest.raises(InvalidPayload) as refused:
        validated(payload, ANCHOR, VERSION)
    assert refused.value.reason is reason


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_a_changed_byte_is_damage_whatever_else_it_makes_of_the_payload(codec):
    """Another shape, a NaN, another codec: none of these is what its island sent."""
    payload = wire_format.encode(moved(), codec)
    for position in range(0, len(payload), 3):
        for change in (1, 0x7F, 0x80):
            damaged = bytearray(payload)
            damaged[position] ^= change
            with pytest.raises(InvalidPayload) as refused:
                validated(memoryview(damaged), ANCHOR, VERSION)
            assert refused.value.reason is RefusalReason.CORRUPT


def test_what_came_as_a_payload_is_written_as_that():
    payload = wire_format.written(displacement(ANCHOR, moved(), VERSION, "int4"))
    content, _ = validated(payload, ANCHOR, VERSION)
    assert np.shares_memory(np.frombuffer(wire_format.written(content), np.uint8), np.frombuffer(payload, np.uint8))
    assert validated(wire_format.encode(moved()), ANCHOR, VERSION)[0].payload is None  # values became a difference


def test_what_is_far_too_long_is_not_even_read():
    with pytest.raises(InvalidPayload, match="arrived for a fragment of 1132"):
        validated(bytes(2 * HEADER_BYTES_MAX), ANCHOR, VERSION)
