"""Parts of encoded tensors: blocks that are joined, or cut out, without decoding them.

A codec writes values in *units*: single values, or blocks of 128 that share a scale, row-major. If a part begins and ends
between units along the innermost run of its tensor, its encoding consists of the very same units, so joining and cutting
only move bytes and round nothing. Otherwise values are put together (``assembled``), and a part is cut as the
smallest larger one that does (``between_units``).

A part of a tensor is named by its bounds: start and stop along every axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from orchestrator.parameters.codec.registry import CodecName, codec
from orchestrator.parameters.pieces import Shape
from orchestrator.parameters.tensors import Array

Bounds = tuple[tuple[int, int], ...]


def shape_of(bounds: Bounds) -> Shape:
    return tuple(stop - start for start, stop in bounds)


def index_of(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in bounds)


def whole(shape: Shape) -> Bounds:
    return tuple((0, extent) for extent in shape)


def tiles(bounds: Sequence[Bounds], shape: Shape) -> bool:
    """Return whether these parts are within a tensor of this shape and cover each of its values once."""
    if not all(len(part) == len(shape) for part in bounds):
        return False
    sides = [(side, extent) for part in bounds for side, extent in zip(part, shape, strict=True)]
    if not all(0 <= start <= stop <= extent for (start, stop), extent in sides):
        return False
    if sum(math.prod(shape_of(part)) for part in bounds) != math.prod(shape):
        return False
    return not any(
        intersection(one, other) is not None for number, one in enumerate(bounds) for other in bounds[:number]
    )


def joined(codec_name: CodecName, parts: Sequence[tuple[Bounds, memoryview]], shape: Shape) -> memoryview | None:
    """Return the encoding of the tensor that these parts cover; None if one is not between units."""
    boxes = [_unit_box(codec_name, shape, bounds) for bounds, _ in parts]
    # the bounds of each part determine how much of the tensor is one run: all must be laid out alike
    if any(box is None for box in boxes) or len({_run_axis(bounds, shape) for bounds, _ in parts}) > 1:
        return None
    grid = next(box[0] for box in boxes if box is not None)
    units = math.prod(grid)
    out = np.empty(units * sum(codec(codec_name).unit_bytes), np.uint8).data
    columns = _columns(codec_name, out, grid)
    for (_, data), box in zip(parts, boxes, strict=True):
        assert box is not None
        index = box[1]
        own = tuple(len(range(*side.indices(extent))) for side, extent in zip(index, grid, strict=True))
        for column, part in zip(columns, _columns(codec_name, data, own), strict=True):
            column[index] = part
    return out


def between_units(codec_name: CodecName, bounds: Bounds, shape: Shape) -> Bounds:
    """Return the smallest part of the tensor that contains this one and is between units: perhaps all of it."""
    if bounds == whole(shape) or math.prod(shape_of(bounds)) == 0:
        return bounds
    unit, axis = codec(codec_name).unit_values, _run_axis(bounds, shape)
    for along in range(axis, -1, -1):
        below = math.prod(shape[along + 1 :])
        if along == 0 or shape[along] * below % unit == 0:  # otherwise units cross the runs of this axis
            step, (start, stop) = unit // math.gcd(unit, below), bounds[along]
            own = (start - start % step, min(-(-stop // step) * step, shape[along]))
            return (*bounds[:along], own, *whole(shape[along + 1 :]))
    return whole(shape)


def cut(codec_name: CodecName, data: memoryview, bounds: Bounds, shape: Shape) -> memoryview:
    """Return the encoding of a part of the tensor that ``data`` encodes. The part must be ``between_units``."""
    part = math.prod(shape_of(bounds))
    if part == math.prod(shape):
        return data
    if part == 0:
        return data[:0]
    unit, axis = codec(codec_name).unit_values, _run_axis(bounds, shape)
    below = math.prod(shape[axis + 1 :])
    if axis == 0:  # one run, whose last unit may be short
        first, end = bounds[0][0] * below // unit, -(-bounds[0][1] * below // unit)
        spans, at = [], 0
        for size in codec(codec_name).unit_bytes:
            spans.append(np.frombuffer(data, np.uint8)[at + first * size : at + end * size])
            at += -(-math.prod(shape) // unit) * size
        *full, last = spans
        missing = codec(codec_name).data_bytes(part) - sum(span.size for span in full)
        return np.concatenate([*full, last[:missing]]).data
    grid = (*shape[:axis], shape[axis] * below // unit)
    index = (*index_of(bounds[:axis]), slice(bounds[axis][0] * below // unit, bounds[axis][1] * below // unit))
    return np.concatenate([column[index].ravel() for column in _columns(codec_name, data, grid)]).data


def intersection(one: Bounds, other: Bounds) -> Bounds | None:
    """Return the block within both; None if there is none."""
    sides = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return sides if all(start < stop for start, stop in sides) else None


def within(bounds: Bounds, outer: Bounds) -> Bounds:
    """Return these bounds relative to the beginning of ``outer``."""
    return tuple((start - origin, stop - origin) for (start, stop), (origin, _) in zip(bounds, outer, strict=True))


def assembled(parts: Sequence[tuple[Bounds, Array]], shape: Shape) -> Array:
    """Return the tensor that these values cover."""
    out = np.empty(shape, np.float32)
    for bounds, values in parts:
        out[index_of(bounds)] = values
    return out


def _run_axis(bounds: Bounds, shape: Shape) -> int:
    """Return the axis from which the part's values are one run in each row: the last axis that it cuts."""
    cut_axes = [axis for axis, (side, extent) in enumerate(zip(bounds, shape, strict=True)) if side != (0, extent)]
    return max(cut_axes, default=0)


def _unit_box(codec_name: CodecName, shape: Shape, bounds: Bounds) -> tuple[Shape, tuple[slice, ...]] | None:
    """Return the tensor as a grid of units, and the part in it."""
    if not shape:
        return (1,), (slice(0, 1),)
    unit, axis = codec(codec_name).unit_values, _run_axis(bounds, shape)
    below = math.prod(shape[axis + 1 :])
    run, start, stop = shape[axis] * below, bounds[axis][0] * below, bounds[axis][1] * below
    if run % unit or start % unit or stop % unit:
        return None
    return (*shape[:axis], run // unit), (*index_of(bounds[:axis]), slice(start // unit, stop // unit))


def _columns(codec_name: CodecName, data: memoryview, grid: Shape) -> list[NDArray[np.uint8]]:
    """Return the data as columns, one for each kind that a codec writes of all units: scales, codes."""
    flat, at, columns = np.frombuffer(data, np.uint8), 0, []
    for size in codec(codec_name).unit_bytes:
        end = at + math.prod(grid) * size
        columns.append(flat[at:end].reshape(*grid, size))
        at = end
    return columns
