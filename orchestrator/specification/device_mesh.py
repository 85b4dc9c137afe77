"""The axes of an island's device mesh: how long each is, what they split, and whether they divide that. Pure.

    a tensor's dimension        mesh axis            a batch's          mesh axes
    vocabulary, heads, hidden   tensor               sequences          data and fsdp
    experts                     expert
    width, else the longest     fsdp
    that is left

The product of their lengths is the island's devices; ``data`` takes what the others leave, unless it is given. Devices next
to each other along ``tensor`` talk most, so it is the last. What a tensor's dimensions are only its model knows: the service
asks here of the built-in ones, before a job begins, and whoever has built a model of all. Layers are never split: a loop
over them takes one after the other on all devices. Vectors are not split along ``fsdp``, stacked or not: they are small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orchestrator.errors import Problem

AXES = ("data", "fsdp", "expert", "tensor")

SPLIT_ALONG: Mapping[str, str] = {"vocabulary": "tensor", "heads": "tensor", "hidden": "tensor", "experts": "expert"}
NAMED_MAX = 4
"""So many tensors are named in a refusal."""

AxisLengths = Mapping[str, int]
Shape = tuple[int, ...]
Dimensions = tuple[str | None, ...]
"""What each dimension of a tensor is: a name of ``learners.models.model.AXES``, or None."""


def parameter_axes(mesh: Mapping[str, Any]) -> dict[str, int]:
    """The lengths of the axes along which parameters are split, by a specification's ``mesh``."""
    return {axis: int(mesh.get(axis) or 1) for axis in AXES if axis != "data"}


def axis_lengths(mesh: Mapping[str, Any], device_count: int) -> dict[str, int]:
    """The lengths of all axes on so many devices, of a mesh that ``mesh_problems`` finds nothing wrong with."""
    others = parameter_axes(mesh)
    return {"data": int(mesh.get("data") or device_count // math.prod(others.values())), **others}


def is_plain(mesh: Mapping[str, Any]) -> bool:
    """Whether nothing is said of it: all devices are along ``data``, and a batch that they do not divide each computes."""
    return mesh.get("data") is None and set(parameter_axes(mesh).values()) == {1}


def mesh_problems(
    entry: str, mesh: Mapping[str, Any], device_count: int | None, batch_size: int, accumulation: int = 1
) -> Iterable[Problem]:
    """What is wrong with the mesh of the islands at the path ``entry``, each of which trains on ``batch_size`` sequences.

    With ``accumulation`` these are so many microbatches, and each of them is split.

    Where nobody knows the number of devices yet (None), only what is wrong with any number.
    """
    if is_plain(mesh):
        return
    others, data = parameter_axes(mesh), mesh.get("data")
    lengths_text = ", ".join(
        f"{axis} {length}" for axis, length in {"data": data, **others}.items() if length not in (None, 1)
    )
    product = math.prod(others.values()) * (data or 1)
    where, axes = f"{entry}.mesh", f"is {lengths_text or 'data 1'}"
    if device_count is not None and (device_count % product or (data is not None and device_count != product)):
        remedy = f"Choose lengths whose product is {device_count}, or give the island other devices."
        if data is None:
            remedy = f"Choose lengths whose product divides {device_count}, or give the island other devices."
        yield Problem(
            where, f"{axes}: {product} devices, and an island has {device_count} (accelerators x hosts).", remedy
        )
        return
    lengths = axis_lengths(mesh, device_count or product)
    ways = lengths["data"] * lengths["fsdp"]
    part = "batch" if accumulation == 1 else "microbatch"
    if batch_size % (ways * accumulation):
        yield Problem(
            where,
            f"{axes}: a {part} is split {ways} ways (data {lengths['data']} x fsdp {lengths['fsdp']}), and has "
            f"{batch_size // accumulation} sequences.",
            f"Set batch_size to a multiple of {ways * accumulation} (the nearest are "
            f"{_nearest(batch_size, ways * accumulation)}), or make data or fsdp shorter.",
        )


def tensor_problems(
    entry: str, lengths: AxisLengths, shapes: Mapping[str, Shape], named: Mapping[str, Dimensions]
) -> Iterable[Problem]:
    """Each axis that does not divide the tensors which it is to split, or splits none; ``named`` says what they are."""
    for axis in ("expert", "tensor"):
        sizes = {
            name: size
            for name, shape in shapes.items()
            for dimension, size in zip(named[name], shape, strict=True)
            if SPLIT_ALONG.get(dimension or "") == axis
        }
        length = lengths[axis]
        if length > 1 and not sizes:
            dimensions = " or ".join(dimension for dimension, along in SPLIT_ALONG.items() if along == axis)
            yield Problem(
                f"{entry}.mesh.{axis}",
                f"is {length}, and splits nothing: no tensor of the model has a dimension named {dimensions}.",
                "Use fsdp instead, or name the dimensions in Model.axes.",
            )
        elif uneven := {name: size for name, size in sizes.items() if size % length}:
            listed = _listed(f"{name} ({size} of {shapes[name]})" for name, size in uneven.items())
            yield Problem(
                f"{entry}.mesh.{axis}",
                f"is {length}, which does not divide {listed}.",
                _divisor(sizes.values()),
            )
    length = lengths["fsdp"]
    whole = {
        name: shape
        for name, shape in shapes.items()
        if length > 1 and is_matrix(named[name]) and "fsdp" not in split(shape, named[name], lengths)
    }
    if whole:
        listed = _listed(f"{name} {shape}" for name, shape in whole.items())
        longest = (max(shape[at] for at in _splittable(named[name])) for name, shape in whole.items())
        yield Problem(
            f"{entry}.mesh.fsdp",
            f"is {length}, which divides no dimension that is left to it of {listed}.",
            _divisor(longest),
        )


def host_problems(entry: str, mesh: Mapping[str, Any], host_count: int, devices_per_host: int) -> Iterable[Problem]:
    """A mesh that gives a host devices which are no box of it, so that its part of a tensor would be no block.

    Devices are in the order of their hosts: so it is where no wires say another one.
    """
    lengths = axis_lengths(mesh, host_count * devices_per_host)
    run = devices_per_host
    for axis in reversed(AXES):
        if run <= lengths[axis]:
            if lengths[axis] % run == 0:
                return
            break
        if run % lengths[axis]:
            break
        run //= lengths[axis]
    listed = ", ".join(f"{axis} {lengths[axis]}" for axis in AXES)
    yield Problem(
        f"{entry}.mesh",
        f"is {listed}, of which each of {host_count} hosts with {devices_per_host} devices has no block.",
        f"Choose lengths of which each divides {devices_per_host}, or is a multiple of it.",
    )


def split(shape: Shape, dimensions: Sequence[str | None], lengths: AxisLengths) -> Dimensions:
    """The mesh axis along which each dimension is split. An axis that does not divide its dimension is left out."""
    along: list[str | None] = [None] * len(shape)
    for index, dimension in enumerate(dimensions):
        axis = SPLIT_ALONG.get(dimension or "")
        if axis and axis not in along and lengths[axis] > 1 and shape[index] % lengths[axis] == 0:
            along[index] = axis
    if lengths["fsdp"] > 1 and is_matrix(dimensions):
        free = [i for i in _splittable(dimensions) if along[i] is None and shape[i] % lengths["fsdp"] == 0]
        free.sort(key=lambda index: (dimensions[index] != "width", -shape[index], index))
        if free:
            along[free[0]] = "fsdp"
    return tuple(along)


def is_matrix(dimensions: Sequence[str | None]) -> bool:
    return sum(dimension not in ("layers", "experts") for dimension in dimensions) > 1


def _splittable(dimensions: Sequence[str | None]) -> list[int]:
    return [index for index, dimension in enumerate(dimensions) if dimension != "layers"]


def _divisor(sizes: Iterable[int]) -> str:
    common = math.gcd(*sizes)
    return f"Use a divisor of {common}." if common > 1 else "Leave it out: nothing divides all of them."


def _listed(items: Iterable[str]) -> str:
    every = list(items)
    more = f" and {len(every) - NAMED_MAX} more" if len(every) > NAMED_MAX else ""
    return ", ".join(every[:NAMED_MAX]) + more


def _nearest(size: int, factor: int) -> str:
    below = size // factor * factor
    return f"{below} and {below + factor}" if below else f"{factor}"
