"""Parts of encoded tensors: blocks that are put together without decoding them.

A codec writes values in *units*: single values, or blocks of 128 that share a scale, row-major. Where a part begins and ends
between units along the innermost run of its tensor, its encoding is made of the very same units, so to join moves
bytes and rounds nothing. Where it does not, values are put together (``assembled``).

A part of a tensor is named by its bounds: start and stop along every axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from orchestrator.parameters.codec.registry import CodecName, codec
from orchestrator.parameters.roles import Shape
from orchestrator.parameters.tensors import Array

Bounds = tuple[tuple[int, int], ...]


def shape_of(bounds: Bounds) -> Shape:
    return tuple(stop - start for start, stop in bounds)


def index_of(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in bounds)


def whole(shape: Shape) -> Bounds:
    return tuple((0, extent) for extent in shape)


def tiles(bounds: Sequence[Bounds], shape: Shape) -> bool:
    """Whether these parts lie in a tensor of this shape, and cover it, each value once."""
    if not all(len(part) == len(shape) for part in bounds):
        return False
    sides = [(side, extent) for part in bounds for side, extent in zip(part, shape, strict=True)]
    if not all(0 <= start <= stop <= extent for (start, stop), extent in sides):
        return False
    if sum(math.prod(shape_of(part)) for part in bounds) != math.prod(shape):
        return False
    return not any(_overlap(one, other) for number, one in enumerate(bounds) for other in bounds[:number])


def _overlap(one: Bounds, other: Bounds) -> bool:
    return all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True))


def joined(codec_name: CodecName, parts: Sequence[tuple[Bounds, memoryview]], shape: Shape) -> memoryview | None:
    """The encoding of the tensor that these parts cover; None where one does not lie between units."""
    boxes = [_unit_box(codec_name, shape, bounds) for bounds, _ in parts]
    # each part says by its own bounds how much of the tensor is one run: all must be laid out alike
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


def assembled(parts: Sequence[tuple[Bounds, Array]], shape: Shape) -> Array:
    """The tensor that these values cover."""
    out = np.empty(shape, np.float32)
    for bounds, values in parts:
        out[index_of(bounds)] = values
    return out


def _run_axis(bounds: Bounds, shape: Shape) -> int:
    """The axis from which on the part's values are one run in each row before: the last that it does not have whole."""
    cut_axes = [axis for axis, (side, extent) in enumerate(zip(bounds, shape, strict=True)) if side != (0, extent)]
    return max(cut_axes, default=0)


def _unit_box(codec_name: CodecName, shape: Shape, bounds: Bounds) -> tuple[Shape, tuple[slice, ...]] | None:
    """The tensor as a grid of units, and the part in it."""
    if not shape:
        return (1,), (slice(0, 1),)
    unit, axis = codec(codec_name).unit_values, _run_axis(bounds, shape)
    below = math.prod(shape[axis + 1 :])
    run, start, stop = shape[axis] * below, bounds[axis][0] * below, bounds[axis][1] * below
    if run % unit or start % unit or stop % unit:
        return None
    return (*shape[:axis], run // unit), (*index_of(bounds[:axis]), slice(start // unit, stop // unit))


def _columns(codec_name: CodecName, data: memoryview, grid: Shape) -> list[NDArray[np.uint8]]:
    """What a codec writes of all units, one kind after another: scales, codes."""
    flat, at, columns = np.frombuffer(data, np.uint8), 0, []
    for size in codec(codec_name).unit_bytes:
        end = at + math.prod(grid) * size
        columns.append(flat[at:end].reshape(*grid, size))
        at = end
    return columns
