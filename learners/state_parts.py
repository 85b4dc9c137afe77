"""Parts of a state on their way from the processes that have them to those that need them, by windows of arrays.

    giver      blocks (an array and its bounds) ─▶ windows: what of them lies in what is wanted
    receiver   blocks of all givers ─▶ put_together: what is wanted, once it is all there

Whoever gives and whoever wants may be cut differently: meshes, and numbers of hosts, may differ. Arrays keep their types.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from learners.contract import Arrays
from orchestrator.errors import DataError
from orchestrator.parameters.parts import Bounds, index_of, intersection, shape_of, tiles, whole, within

Block = tuple[str, Bounds, np.ndarray]
"""A name, where in the array of this name it lies, and the values."""


def blocks_of(arrays: Mapping[str, np.ndarray], bounds: Mapping[str, Bounds]) -> list[Block]:
    """These arrays as blocks; those without bounds are whole. Raises DataError where one has not its bounds' shape."""
    blocks = [(name, bounds.get(name, whole(array.shape)), array) for name, array in arrays.items()]
    for name, own, array in blocks:
        if shape_of(own) != array.shape:
            raise DataError(detail=f"{name} is said to be the part {own}, and has the shape {array.shape}.")
    return blocks


def windows(blocks: Iterable[Block], wanted: Mapping[str, Bounds] | None) -> list[Block]:
    """What of these blocks lies in what is wanted, as views; None wants all of them."""
    if wanted is None:
        return list(blocks)
    cut = []
    for name, bounds, array in blocks:
        if name in wanted and (common := intersection(bounds, wanted[name])) is not None:
            cut.append((name, common, _cut(array, within(common, bounds))))
    return cut


def put_together(blocks: Iterable[Block], wanted: Mapping[str, Bounds] | None) -> Arrays:
    """What is wanted, of these blocks; None: whole arrays, of all names. A block that comes twice counts once.

    Raises DataError where they are not all of it, each value once.
    """
    by_name: dict[str, dict[Bounds, np.ndarray]] = defaultdict(dict)
    for name, bounds, array in blocks:
        by_name[name][bounds] = array
    if wanted is None:
        wanted = {name: _hull(own) for name, own in by_name.items()}
    return {name: _one(name, by_name[name], bounds) for name, bounds in wanted.items()}


def _one(name: str, own: Mapping[Bounds, np.ndarray], wanted: Bounds) -> np.ndarray:
    if math.prod(shape_of(wanted)) == 0:
        return np.empty(shape_of(wanted), np.float32)
    if (array := own.get(wanted)) is not None:
        return array
    if not tiles([within(bounds, wanted) for bounds in own], shape_of(wanted)):
        raise DataError(detail=f"The parts that came of {name}, {sorted(own)}, are not all of {wanted} once.")
    together = np.empty(shape_of(wanted), next(iter(own.values())).dtype)
    for bounds, array in own.items():
        together[index_of(within(bounds, wanted))] = array
    return together


def _cut(array: np.ndarray, bounds: Bounds) -> np.ndarray:
    """A view, also of an array without axes."""
    return array[index_of(bounds)] if bounds else array


def _hull(own: Iterable[Bounds]) -> Bounds:
    """From the origin to where the last ends."""
    stops = zip(*([stop for _, stop in bounds] for bounds in own), strict=True)
    return tuple((0, max(each)) for each in stops)
