"""Moves pieces of sharded tensors between the host and the devices, shard by shard: no device ever holds a whole one.

   taken     a copy of a piece on the devices, each with its part
   on_host   what this process's devices hold of it, put together from their shards
   placed    a host array on the devices, each with its shard
   changed   a piece replaced, or added to, in the tensor's own memory

The programs are ``shard_map``s without communication, so every process of an island may run them at any time. If a
process has only some of an island's devices, a host array is this process's part of a piece (``held``), one block of
it. Arguments may be that part, or the whole piece.

A piece that is cut along the axis by which its tensor is sharded is on some devices only. Programs are the same on all
devices. So each works on a window of its shard that is large enough for its part of the piece, min(piece, shard) entries.
What the window contains besides the piece is left out, or left unchanged.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from learners.contract import Arrays, HeldPart
from orchestrator.errors import DataError
from orchestrator.parameters.pieces import Piece, Shape, piece_named

Box = tuple[slice, ...]


def held(sharding: NamedSharding, shape: Shape, piece: Piece) -> Box:
    """Return the part of the piece that the devices of this process hold: a block, maybe empty, in the piece's own indices.

    Copies on other devices, or of other processes, are the same block (``mesh.require_boxes``).
    """
    box = _hull(sharding.addressable_devices_indices_map(shape).values(), shape)
    if piece.bounds is not None:
        axis, start, stop = piece.bounds
        first, last = max(box[axis][0], start) - start, min(box[axis][1], stop) - start
        box[axis] = (min(first, stop - start), max(first, last)) if last > first else (0, 0)
    return tuple(slice(*bounds) for bounds in box)


def held_part(sharding: NamedSharding, shape: Shape, piece: Piece) -> HeldPart:
    """Return the same as ``held``, with the processes that hold it."""
    of_process: dict[int, list[Box | None]] = defaultdict(list)
    every: Mapping[Any, Box | None] = sharding.devices_indices_map(shape)
    for device, index in every.items():
        of_process[device.process_index].append(index)
    own = jax.process_index()
    boxes = {process: _hull(indices, shape) for process, indices in of_process.items()}
    part = tuple((side.start, side.stop) for side in held(sharding, shape, piece))
    alike = tuple(sorted(process for process, box in boxes.items() if box == boxes[own]))
    return HeldPart(part, alike, piece.shape(shape))


@dataclass(frozen=True, slots=True)
class Taken:
    """A piece of a tensor on the devices. A block is its place in the piece, its place in a shard, and the shard."""

    shape: Shape
    """The shape of the part that this process holds."""
    origin: tuple[int, ...]
    blocks: tuple[tuple[Box, Box, jax.Array], ...]
    dtype: Any

    def start(self) -> None:
        """Start the copy to the host."""
        for _, _, shard in self.blocks:
            shard.copy_to_host_async()

    def on_host(self) -> np.ndarray:
        """Wait until it is on the host. A single shard may be a view of the device's memory, which it keeps alive."""
        if len(self.blocks) == 1:
            (_, within, shard) = self.blocks[0]
            whole: np.ndarray = np.asarray(shard)
            return whole[within]
        array = np.empty(self.shape, self.dtype)
        for box, within, shard in self.blocks:
            at = tuple(slice(part.start - o, part.stop - o) for part, o in zip(box, self.origin, strict=True))
            array[at] = np.asarray(shard)[within]
        return array


def taken(array: jax.Array, piece: Piece, *, copied: bool = True) -> Taken:
    """Copy the piece of ``array`` on the devices. A whole tensor is not copied if ``copied`` is false."""
    sharding, shape = named(array), array.shape
    on_devices = array
    window = _Window.of(sharding, shape, piece)
    if piece.bounds is not None:
        on_devices = _take(array, window.start, sharding=sharding, axis=window.axis, length=window.length)
    elif copied:
        on_devices = _copy(array, sharding=sharding)
    part = held(sharding, shape, piece)
    blocks: dict[tuple[tuple[int, int], ...], tuple[Box, Box, jax.Array]] = {}
    for shard in on_devices.addressable_shards:
        box, within = window.block(_bounds(shard.index, on_devices.shape))
        key = tuple((side.start, side.stop) for side in box)
        if all(start < stop for start, stop in key) and key not in blocks:
            # an object of its own: a view of the host's memory that the array itself kept would keep the next step from
            # updating it in place
            blocks[key] = (box, within, shard.data.addressable_data(0))
    origin = tuple(side.start for side in part)
    return Taken(tuple(side.stop - side.start for side in part), origin, tuple(blocks.values()), array.dtype)


def placed(array: np.ndarray, sharding: NamedSharding, shape: Shape, dtype: Any, *, owned: bool = True) -> jax.Array:
    """Put all of a tensor on the devices, in its own memory if ``owned``, otherwise perhaps in the caller's.

    Raises DataError unless ``array`` is the tensor, or this process's part of it.
    """
    on_devices = _put(_fitting(array, sharding, shape, dtype), sharding)
    return _copy(on_devices, sharding=sharding) if owned else on_devices


def put_in_place_of(current: jax.Array, array: np.ndarray) -> jax.Array:
    """Put ``array`` on the devices like ``current``, in its own memory. Raises as ``placed``."""
    return placed(array, named(current), current.shape, current.dtype)


def require_fitting(array: np.ndarray, current: jax.Array) -> None:
    """Raise DataError unless ``array`` can replace ``current``."""
    _fitting(array, named(current), current.shape, current.dtype)


def batch_placed(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Put it on the devices, perhaps still in the caller's memory. Every process has the whole array."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def changed(current: jax.Array, piece: Piece, array: np.ndarray, *, added: bool) -> jax.Array:
    """Return ``current`` with the piece replaced by ``array``, or increased by it. It consumes ``current``."""
    sharding, shape = named(current), current.shape
    source = _fitting(array, sharding, shape, current.dtype, piece)
    window = _Window.of(sharding, shape, piece)
    if piece.bounds is None and not added:
        return put_in_place_of(current, array)
    if piece.bounds is None:
        result: jax.Array = _increase(current, _put(source, sharding), sharding=sharding)
        return result
    part = jax.make_array_from_callback(window.taken_shape, sharding, partial(window.part, source))
    changed: jax.Array = _change(
        current, part, window.start, window.stop, sharding=sharding, axis=window.axis, added=added, cut=window.ways > 1
    )
    return changed


def programs(tensor: jax.Array, name: str) -> list[str | None]:
    """Return XLA's programs for taking this piece of ``tensor``, for replacing it and for adding to it, as text."""
    piece, sharding = piece_named(name), named(tensor)
    if piece.bounds is None:
        compiled = [_copy.lower(tensor, sharding=sharding), _increase.lower(tensor, tensor, sharding=sharding)]
        return [program.compile().as_text() for program in compiled]
    window = _Window.of(sharding, tensor.shape, piece)
    part = jax.ShapeDtypeStruct(window.taken_shape, tensor.dtype, sharding=sharding)
    where = {"sharding": sharding, "axis": window.axis}
    changes = [
        _change.lower(tensor, part, window.start, window.stop, added=added, cut=window.ways > 1, **where)
        for added in (False, True)
    ]
    return [
        program.compile().as_text()
        for program in (_take.lower(tensor, window.start, length=window.length, **where), *changes)
    ]


class DeviceCopy:
    """A ``Snapshot`` of device arrays of its own, never donated, on their way to the host.

    It holds device memory until the arrays are requested; after that only host memory.
    """

    def __init__(self, pieces: Mapping[str, Taken]) -> None:
        self._lock = threading.Lock()
        self._pieces, self._arrays = dict(pieces), Arrays()
        for piece in self._pieces.values():
            piece.start()

    def arrays(self) -> Arrays:
        """Return read-only arrays. On CPU these may be views of a device's memory, which they keep alive."""
        with self._lock:
            while self._pieces:
                name = next(iter(self._pieces))
                self._arrays[name] = self._pieces[name].on_host()
                del self._pieces[name]
            return dict(self._arrays)


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Window:
    """The work of each device on a piece along ``axis``, by which its tensor is sharded ``ways`` ways.

    ``length`` entries of a shard of ``shard_length``, beginning at ``first``; for a whole tensor, the whole shard.
    """

    shape: Shape
    axis: int
    start: int
    stop: int
    ways: int

    @classmethod
    def of(cls, sharding: NamedSharding, shape: Shape, piece: Piece) -> _Window:
        if piece.bounds is None:
            return cls(shape, -1, 0, 0, 1)
        axis, start, stop = piece.bounds
        return cls(shape, axis, start, stop, shape[axis] // sharding.shard_shape(shape)[axis] if shape[axis] else 1)

    @property
    def shard_length(self) -> int:
        return self.shape[self.axis] // self.ways

    @property
    def length(self) -> int:
        return min(self.stop - self.start, self.shard_length)

    @property
    def taken_shape(self) -> Shape:
        return (*self.shape[: self.axis], self.ways * self.length, *self.shape[self.axis + 1 :])

    def first(self, shard: int) -> int:
        """Return where in the tensor the window of this shard begins."""
        begins = shard * self.shard_length
        return begins + min(max(self.start - begins, 0), self.shard_length - self.length)

    def block(self, bounds: list[tuple[int, int]]) -> tuple[Box, Box]:
        """Return the place in the piece of a taken shard, and the place in that shard."""
        box, within = [slice(*side) for side in bounds], [slice(0, stop - start) for start, stop in bounds]
        if self.axis >= 0 and self.length:
            first = self.first(bounds[self.axis][0] // self.length)
            valid = max(first, self.start), min(first + self.length, self.stop)
            box[self.axis] = slice(valid[0] - self.start, valid[1] - self.start)
            within[self.axis] = slice(valid[0] - first, valid[1] - first)
        return tuple(box), tuple(within)

    def part(self, source: _HostArray, index: Box) -> np.ndarray:
        """Return the window's content for a device: the piece's values from ``source``, and zeros elsewhere."""
        bounds = _bounds(index, self.taken_shape)
        box, within = self.block(bounds)
        inside = all(side.start < side.stop for side in box)
        shape = tuple(stop - start for start, stop in bounds)
        if inside and all(side.stop - side.start == size for side, size in zip(within, shape, strict=True)):
            return source.at(box)
        padded = np.zeros(shape, source.array.dtype)
        if inside:
            padded[within] = source.at(box)
        return padded


@dataclass(frozen=True, slots=True)
class _HostArray:
    """An array of the host, at ``origin`` of its piece."""

    array: np.ndarray
    origin: tuple[int, ...]
    shape: Shape
    """The shape of the whole piece."""

    def at(self, box: Box) -> np.ndarray:
        part: np.ndarray = self.array[
            tuple(slice(side.start - o, side.stop - o) for side, o in zip(box, self.origin, strict=True))
        ]
        return part


WHOLE = Piece("")
"""A whole tensor as a piece."""


def _fitting(array: np.ndarray, sharding: NamedSharding, shape: Shape, dtype: Any, piece: Piece = WHOLE) -> _HostArray:
    whole = piece.shape(shape)
    part = held(sharding, shape, piece)
    if array.shape == whole:
        origin = (0,) * len(whole)
    elif array.shape == tuple(side.stop - side.start for side in part):
        origin = tuple(side.start for side in part)
    else:
        raise DataError(detail=f"an array of shape {array.shape} cannot replace one of shape {whole}")
    return _HostArray(array.astype(dtype, copy=False), origin, whole)


def _hull(indices: Iterable[Box | None], shape: Shape) -> list[tuple[int, int]]:
    """Return the smallest block around these, by its start and stop along every axis."""
    every = [_bounds(index, shape) for index in indices]
    along = (zip(*sides, strict=True) for sides in zip(*every, strict=True))
    return [(min(starts), max(stops)) for starts, stops in along]


def _put(source: _HostArray, sharding: NamedSharding) -> jax.Array:
    """Put it on the devices, perhaps still in the caller's memory."""

    def shard(index: Box | None) -> np.ndarray:
        return source.at(tuple(slice(*side) for side in _bounds(index, source.shape)))

    return jax.make_array_from_callback(source.shape, sharding, shard)


def named(array: jax.Array) -> NamedSharding:
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    return sharding


def _bounds(index: Box | None, shape: Shape) -> list[tuple[int, int]]:
    """Return start and stop along every axis."""
    assert index is not None
    return [side.indices(size)[:2] for side, size in zip(index, shape, strict=True)]


@partial(jax.jit, static_argnames="sharding")
def _copy(array: jax.Array, *, sharding: NamedSharding) -> jax.Array:
    copy: jax.Array = jax.lax.with_sharding_constraint(jnp.copy(array), sharding)
    return copy


@partial(jax.jit, static_argnames=("sharding", "axis", "length"))
def _take(array: jax.Array, start: int, *, sharding: NamedSharding, axis: int, length: int) -> Any:
    """Take the window. The start is an argument, so that all pieces of one length share one program."""

    def of_shard(shard: jax.Array, start: jax.Array) -> jax.Array:
        first = _first(shard, start, length, sharding, axis)
        return jax.lax.dynamic_slice_in_dim(shard, first, length, axis)

    return _on_each(of_shard, sharding, 2)(array, start)


@partial(jax.jit, static_argnames=("sharding", "axis", "added", "cut"), donate_argnums=0)
def _change(
    array: jax.Array,
    part: jax.Array,
    start: int,
    stop: int,
    *,
    sharding: NamedSharding,
    axis: int,
    added: bool,
    cut: bool,
) -> Any:
    def of_shard(shard: jax.Array, part: jax.Array, start: jax.Array, stop: jax.Array) -> jax.Array:
        length = part.shape[axis]
        first = _first(shard, start, length, sharding, axis)
        if not added and not cut:
            return jax.lax.dynamic_update_slice_in_dim(shard, part, first, axis)
        current = jax.lax.dynamic_slice_in_dim(shard, first, length, axis)
        new = current + part if added else part
        if cut:
            entry = _shard_start(shard, sharding, axis) + first + jax.lax.broadcasted_iota(jnp.int32, part.shape, axis)
            new = jnp.where((entry >= start) & (entry < stop), new, current)
        return jax.lax.dynamic_update_slice_in_dim(shard, new, first, axis)

    return _on_each(of_shard, sharding, 4)(array, part, start, stop)


@partial(jax.jit, static_argnames="sharding", donate_argnums=0)
def _increase(array: jax.Array, part: jax.Array, *, sharding: NamedSharding) -> jax.Array:
    increased: jax.Array = jax.lax.with_sharding_constraint(array + part, sharding)
    return increased


def _on_each(of_shard: Any, sharding: NamedSharding, argument_count: int) -> Any:
    """Map the function over shards: arrays are sharded alike, numbers are replicated."""
    everywhere = PartitionSpec()
    arrays = 1 if argument_count == 2 else 2
    specs = (sharding.spec,) * arrays + (everywhere,) * (argument_count - arrays)
    return jax.shard_map(of_shard, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec)


def _shard_start(shard: jax.Array, sharding: NamedSharding, axis: int) -> Any:
    """Return where in the tensor the shard of this device begins."""
    along = sharding.spec[axis] if axis < len(sharding.spec) else None
    return 0 if along is None else jax.lax.axis_index(along) * shard.shape[axis]


def _first(shard: jax.Array, start: jax.Array, length: int, sharding: NamedSharding, axis: int) -> Any:
    """Return where in the shard its window begins: ``_Window.first``."""
    return jnp.clip(start - _shard_start(shard, sharding, axis), 0, shard.shape[axis] - length)
