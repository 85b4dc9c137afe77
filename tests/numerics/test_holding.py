"""What a process that has a part of the pieces is sent of them: its share of the bytes, and the bits of the whole."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.core.vocabulary import Version
from orchestrator.parameters import wire_format
from orchestrator.parameters.codec.registry import CODEC_NAMES
from orchestrator.parameters.holding import EVERYTHING, Holding, encoded_part
from orchestrator.parameters.tensors import digest
from orchestrator.parameters.wire_format import InvalidPayload

SHAPES = {"columns[0:4]": (4, 512), "odd": (13, 97), "rows": (64, 256), "whole": (300,), "elsewhere": (8, 8)}
HOLDINGS = [
    Holding((("columns[0:4]", ((0, 4), (256, 512))), ("odd", ((6, 13), (0, 97))), ("rows", ((32, 64), (0, 256))), *no))
    for no in ((), (("elsewhere", ((0, 0), (0, 8))),))
]


def drawn(seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def sent(content: wire_format.EncodedTensors, holding: Holding) -> wire_format.EncodedTensors:
    return wire_format.parse(wire_format.written(holding.part_of(content)))


@pytest.mark.parametrize("holding", HOLDINGS)
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_an_update_of_a_part_has_the_bits_of_the_whole(codec, holding):
    base, update = drawn(1), wire_format.encoded(drawn(2), codec, Version(3))
    own = holding.values_of(base)
    came = sent(update, holding)
    assert came.base == 3
    after = holding.added_to(own, came)
    wanted = EVERYTHING.added_to(base, update)
    assert digest(after) == holding.digest_of(wanted)
    assert len(after) == 5 - ("elsewhere" in holding.bounds())
    # a payload that came whole is cropped, and gives the same
    assert digest(holding.added_to(own, update)) == digest(after)


@pytest.mark.parametrize("holding", HOLDINGS)
def test_values_of_a_part_are_exactly_that_part(holding):
    values = drawn(1)
    own = holding.values_of(values)
    content = wire_format.parse(encoded_part(values, holding))
    assert content.value_bytes == sum(array.nbytes for array in own.values())
    assert digest(holding.own_values(content, own)) == digest(own)


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_of_a_matrix_whose_halves_end_between_blocks_half_of_the_bytes_are_sent(codec):
    update = wire_format.encoded({"rows": drawn(1)["rows"]}, codec, Version(0))
    for bounds in (((0, 32), (0, 256)), ((0, 64), (128, 256))):
        assert 2 * sent(update, Holding((("rows", bounds),))).value_bytes == update.value_bytes


def test_what_is_missing_or_is_another_part_is_refused():
    update = wire_format.encoded(drawn(1), "int4", Version(0))
    one = Holding((("rows", ((0, 32), (0, 256))),))
    other = Holding((("rows", ((32, 64), (0, 256))),))
    none = Holding((("rows", ((0, 0), (0, 256))),))
    base = one.values_of(drawn(2))
    for wrong, said in ((other, "the part .* of rows"), (none, "lacks rows")):
        with pytest.raises(InvalidPayload, match=said):
            one.added_to(base, sent(update, wrong))
        with pytest.raises(InvalidPayload, match=said):
            one.own_values(sent(update, wrong), base)
    with pytest.raises(InvalidPayload, match="but this process has all of it"):
        EVERYTHING.own_values(sent(update, one), SHAPES)
    torn = bytearray(wire_format.written(one.part_of(update)))
    torn[-30] ^= 4
    with pytest.raises(InvalidPayload, match="checksum"):
        one.added_to(base, wire_format.parse(torn))
