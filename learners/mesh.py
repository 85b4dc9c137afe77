"""The mesh of an island's devices, and the part of each tensor that every device holds.

A model names the dimensions of its tensors (``Model.axes``), and ``specification.device_mesh`` says which mesh axis splits
which dimension. Of a tensor without names, the longest dimension that ``fsdp`` divides is split. A mesh that does not evenly
divide a batch, the devices or a tensor is refused before anything is allocated.

Source: fully sharded data parallelism as in ZeRO-3, arXiv:1910.02054; tensor parallelism as in Megatron-LM,
arXiv:1909.08053; both by annotation of shardings alone, GSPMD, arXiv:2105.04663.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, get_abstract_mesh

from learners.island_spec import IslandSpec
from orchestrator.errors import ConfigurationError, InvalidJobSpec, Problem
from orchestrator.parameters.pieces import BY_NAME, Roles, Shape
from orchestrator.specification import device_mesh
from orchestrator.specification.sections import IslandsSection

BATCH_AXES = ("data", "fsdp")

Axes = Mapping[str, tuple[str | None, ...]]


def of_island(spec: IslandSpec, devices: Sequence[jax.Device]) -> Mesh:
    """Return the mesh that the specification asks for, of these devices; all along ``data`` if it asks for none.

    Raises InvalidJobSpec if the devices are not those promised (CPUs instead of accelerators, for example), or if their
    number is not divisible.
    """
    section = {} if spec.own is None else _mesh_of(spec.own)
    promised = spec.accelerator_count * spec.process_count
    problems = list(device_mesh.mesh_problems(spec.path, section, len(devices), spec.batch_size, spec.accumulation))
    if spec.own is not None and promised and (promised != len(devices) or devices[0].platform == "cpu"):
        problems = [
            Problem(
                f"{spec.path}.accelerators",
                f"promises {promised} devices (accelerators x hosts) of kind {spec.own.accelerator!r}, but "
                f"there are {len(devices)} of kind {devices[0].device_kind!r}.",
                "Set accelerators to what each host has, or repair the host: without its driver, JAX uses the CPU.",
            )
        ]
    if problems:
        raise InvalidJobSpec(problems=tuple(problems))
    lengths = device_mesh.axis_lengths(section, len(devices))
    return Mesh(_grid([lengths[axis] for axis in device_mesh.AXES], devices), device_mesh.AXES)


def batch_sharding(mesh: Mesh, sequence_count: int) -> NamedSharding:
    """Split sequences along ``data`` and ``fsdp``. If these do not divide a batch, every device computes all of it."""
    divides = sequence_count % batch_ways(mesh) == 0
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES if divides else None))


def batch_ways(mesh: Mesh) -> int:
    """Return the number of parts into which a batch is split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def shardings(mesh: Mesh, shapes: Mapping[str, Shape], axes: Axes, roles: Roles = BY_NAME) -> dict[str, NamedSharding]:
    """Return the sharding of every tensor. The mesh must have passed ``require_division``."""
    named = {name: _dimensions(name, shape, axes, roles) for name, shape in shapes.items()}
    return {
        name: NamedSharding(mesh, PartitionSpec(*device_mesh.split(shape, named[name], mesh.shape)))
        for name, shape in shapes.items()
    }


def require_division(spec: IslandSpec, shapes: Mapping[str, Shape], axes: Axes, roles: Roles) -> None:
    """Raise InvalidJobSpec if the mesh of this island does not divide the model's tensors.

    In a process of no island, such as the evaluator, which gives the shapes before any island is placed, every island's mesh
    is checked.
    """
    meshes = {f"islands.{index}": _mesh_of(entry) for index, entry in enumerate(spec.job.islands)}
    if spec.own is not None:
        meshes = {spec.path: _mesh_of(spec.own)}
    named = {name: _dimensions(name, shape, axes, roles) for name, shape in shapes.items()}
    problems = [
        problem
        for entry, section in meshes.items()
        for problem in device_mesh.tensor_problems(entry, device_mesh.parameter_axes(section), shapes, named)
    ]
    if problems:
        raise InvalidJobSpec(problems=tuple(problems))


def _mesh_of(entry: IslandsSection) -> dict[str, Any]:
    return entry.mesh.model_dump()


def like_parameters(
    state: Any, shapes: Mapping[str, Shape], sharding_of: Mapping[str, NamedSharding], mesh: Mesh
) -> Any:
    """Return the shardings of an optimizer's state, found by structure. ``state`` has shapes, abstract or not.

    A leaf that belongs to a tensor (``tensor_of``) is sharded like it. Of any other leaf the longest dimension is split
    along ``fsdp`` if that divides it; vectors and counts are replicated.
    """

    def of_leaf(path: Any, leaf: Any) -> NamedSharding:
        name = tensor_of(path, leaf.shape, shapes)
        if name is not None:
            return sharding_of[name]
        return NamedSharding(mesh, PartitionSpec(*device_mesh.split(leaf.shape, (None,) * len(leaf.shape), mesh.shape)))

    return jax.tree_util.tree_map_with_path(of_leaf, state)


def tensor_of(path: Any, shape: Shape, shapes: Mapping[str, Shape]) -> str | None:
    """Return the tensor to which a leaf of an optimizer's state belongs: it has its shape, and its path ends in its name.

    Moments are kept in trees like that of the parameters. A statistic with another shape, such as the factors of the second
    moment, belongs to no tensor, because it cannot be cut like one.
    """
    key = getattr(path[-1], "key", None) if path else None
    return key if isinstance(key, str) and shapes.get(key) == shape else None


def constrained(value: jax.Array, *dimensions: str | None) -> jax.Array:
    """Constrain ``value`` to the mesh's sharding (``split``). A model's loss uses it to keep activations split."""
    if math.prod(dict(get_abstract_mesh().shape).values()) == 1:
        return value
    placed: jax.Array = jax.lax.with_sharding_constraint(value, split(value.shape, *dimensions))
    return placed


def split(shape: Sequence[int], *dimensions: str | None) -> PartitionSpec:
    """Return how the mesh in use splits an activation.

    Each dimension is ``"batch"``, a name of ``Model.axes`` or None. Of an activation, unlike of a tensor, ``width`` is not
    split: ``fsdp`` splits its sequences. Without a mesh, or if a size is not divisible, a dimension stays whole.
    """
    lengths = dict(get_abstract_mesh().shape)
    if math.prod(lengths.values()) == 1:
        return PartitionSpec(*([None] * len(shape)))
    parts: list[Any] = []
    for dimension, size in zip(dimensions, shape, strict=True):
        along = BATCH_AXES if dimension == "batch" else device_mesh.SPLIT_ALONG.get(dimension or "")
        ways = math.prod(lengths[axis] for axis in ((along,) if isinstance(along, str) else along or ()))
        parts.append(along if along and along not in parts and size % ways == 0 else None)
    return PartitionSpec(*parts)


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _grid(lengths: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Arrange the devices in an array of these lengths: along their interconnect, if each process then has a box of it."""
    plain = np.array(sorted(devices, key=lambda device: (device.process_index, device.id))).reshape(lengths)
    if devices[0].platform != "tpu":
        return plain
    try:
        wired = mesh_utils.create_device_mesh(lengths, devices, allow_split_physical_axes=True)
    except (NotImplementedError, ValueError, AssertionError):  # no such mesh on this interconnect: slower, but correct
        return plain
    return wired if _boxes(wired) else plain


def require_boxes(mesh: Mesh) -> None:
    """Raise ConfigurationError unless the devices of each process form a box, so that its part of a tensor is one block."""
    if not _boxes(mesh.devices):
        lengths = ", ".join(f"{axis} {length}" for axis, length in mesh.shape.items())
        raise ConfigurationError(
            detail=f"In the mesh {lengths}, the devices of a process do not form a box, so its part of a tensor is not one "
            "block. Choose lengths that each divide the number of devices of a host, or are a multiple of it."
        )


def _boxes(grid: np.ndarray) -> bool:
    processes = np.vectorize(lambda device: device.process_index, otypes=[int])(grid)
    for process in np.unique(processes):
        at = np.argwhere(processes == process)
        if math.prod((at.max(axis=0) - at.min(axis=0) + 1).tolist()) != len(at):
            return False
    return True


def _dimensions(name: str, shape: Shape, axes: Axes, roles: Roles) -> tuple[str | None, ...]:
    """Return the names of the tensor's dimensions: those of the model, or only those of stacked dimensions."""
    if name in axes:
        if len(axes[name]) != len(shape):
            raise ConfigurationError(
                detail=f"Model.axes names {len(axes[name])} dimensions of {name}, whose shape is {shape}. Name each one, "
                "or use None for those without a name."
            )
        return axes[name]
    stacked = roles[name].stacked_axes if name in roles else 0
    return ("layers",) * stacked + (None,) * (len(shape) - stacked)
