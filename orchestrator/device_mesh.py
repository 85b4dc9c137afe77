"""The axes of an island's device mesh: how long each is, and whether they divide what they split. Pure.

    data     batches                        expert   the experts of a mixture
    fsdp     batches and parameters         tensor   matrices

The product of their lengths is the island's devices; ``data`` takes what the others leave, unless it is given. Devices next
to each other along ``tensor`` talk most, so it is the last. Which dimension of a tensor an axis splits is
``learners.mesh``'s business, for only a model knows its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.errors import Problem

AXES = ("data", "fsdp", "expert", "tensor")

AxisLengths = Mapping[str, int]


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


def _nearest(size: int, factor: int) -> str:
    below = size // factor * factor
    return f"{below} and {below + factor}" if below else f"{factor}"
