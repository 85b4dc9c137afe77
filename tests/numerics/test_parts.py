"""Parts of a tensor in a codec, put together: the same values as if each had been decoded alone."""

import itertools

import numpy as np
import pytest

from orchestrator.parameters import parts
from orchestrator.parameters.codec.registry import CODEC_NAMES
from orchestrator.parameters.kernels import Encoded, decode, encode

CUTS = {
    "rows": ((4, 256), 0, 2),
    "columns": ((6, 512), 1, 2),
    "layers": ((4, 3, 128), 0, 4),
    "middle": ((2, 4, 64), 1, 2),
    "uneven": ((6, 128), 0, 4),
    "vector": ((1024,), 0, 4),
}


def pieces(shape, axis, count):
    """The bounds of ``count`` parts along an axis."""
    ends = [shape[axis] * number // count for number in range(count + 1)]
    return [
        tuple((start, stop) if own == axis else (0, extent) for own, extent in enumerate(shape))
        for start, stop in itertools.pairwise(ends)
    ]


@pytest.mark.parametrize("codec_name", CODEC_NAMES)
@pytest.mark.parametrize("cut", CUTS)
def test_parts_joined_decode_to_what_each_decodes_to(codec_name, cut):
    shape, axis, count = CUTS[cut]
    values = np.random.default_rng(1).standard_normal(shape, np.float32)
    bounds = pieces(shape, axis, count)
    coded = [encode(codec_name, np.ascontiguousarray(values[parts.index_of(one)])).data for one in bounds]
    wanted = np.empty(shape, np.float32)
    for one, data in zip(bounds, coded, strict=True):
        size = wanted[parts.index_of(one)].size
        wanted[parts.index_of(one)] = decode(Encoded(codec_name, data, size)).reshape(parts.shape_of(one))
    data = parts.joined(codec_name, list(zip(bounds, coded, strict=True)), shape)
    assert data is not None
    assert np.array_equal(decode(Encoded(codec_name, data, values.size)).reshape(shape), wanted)


def test_a_part_that_ends_within_a_block_is_not_joined():
    values = np.ones((4, 96), np.float32)
    bounds = pieces((4, 96), 1, 2)
    coded = [encode("int4", np.ascontiguousarray(values[parts.index_of(one)])).data for one in bounds]
    assert parts.joined("int4", list(zip(bounds, coded, strict=True)), (4, 96)) is None


@pytest.mark.parametrize(
    ("bounds", "right"),
    [
        ([((0, 2), (0, 4)), ((2, 4), (0, 4))], True),
        ([((0, 2), (0, 4))], False),
        ([((0, 3), (0, 4)), ((1, 2), (0, 4))], False),
        ([((0, 2), (0, 4)), ((1, 3), (0, 4))], False),
        ([((0, 2), (0, 4)), ((2, 5), (0, 4))], False),
        ([((0, 4),)], False),
        ([((0, 2), (0, 2)), ((0, 2), (2, 4)), ((2, 4), (0, 4))], True),
    ],
)
def test_parts_tile_a_tensor_once_or_are_refused(bounds, right):
    assert parts.tiles(bounds, (4, 4)) is right


@pytest.mark.parametrize("codec_name", CODEC_NAMES)
@pytest.mark.parametrize("shape", [(1000,), (300,), (10, 96), (7, 100), (4, 3, 128), (2, 6, 64), (5, 130, 3), ()])
def test_any_part_is_cut_from_an_encoding_with_the_same_values(codec_name, shape):
    generator = np.random.default_rng(2)
    values = generator.standard_normal(shape, np.float32)
    data, wanted = encode(codec_name, values).data, decode(Encoded(codec_name, encode(codec_name, values), values.size))
    wanted = wanted.reshape(shape)
    for _ in range(40):
        ends = [sorted(generator.integers(0, extent + 1, 2).tolist()) for extent in shape]
        whole = generator.random(len(shape)) < 0.3
        bounds = tuple((0, e) if all_of else tuple(own) for own, e, all_of in zip(ends, shape, whole, strict=True))
        larger = parts.between_units(codec_name, bounds, shape)
        size = int(np.prod(parts.shape_of(larger), dtype=int))
        assert size == 0 or all(a <= c <= d <= b for (a, b), (c, d) in zip(larger, bounds, strict=True))
        cut = parts.cut(codec_name, data, larger, shape)
        own = decode(Encoded(codec_name, cut, size)).reshape(parts.shape_of(larger))
        crop = own[parts.index_of(parts.within(bounds, larger))]
        assert np.array_equal(crop, wanted[parts.index_of(bounds)])


def test_half_of_a_tensor_is_half_of_its_bytes_where_blocks_allow_it():
    values = np.random.default_rng(3).standard_normal((8, 256), np.float32)
    for codec_name in CODEC_NAMES:
        data = encode(codec_name, values).data
        for bounds in (((0, 4), (0, 256)), ((0, 8), (128, 256))):
            assert parts.between_units(codec_name, bounds, (8, 256)) == bounds
            assert 2 * len(parts.cut(codec_name, data, bounds, (8, 256))) == len(data)
