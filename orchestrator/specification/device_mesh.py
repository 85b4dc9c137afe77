"""The axes of an island's device mesh: how long each is, what they split, and whether they divide that. Pure.

    a tensor's dimension        mesh axis            a batch's          mesh axes
    vocabulary, heads, hidden   tensor               sequences          data and fsdp
    experts                     expert
    width, else the longest     fsdp
    that is left

The product of their lengths is the island's devices; ``data`` takes what the others leave, unless it is given. Devices next
to each other along ``tensor`` communicate most, so it is the last. Only the model knows the dimensions of its tensors: the
service checks the built-in models before a job starts, and every process that builds a model checks it. Layers are never
split: a loop runs them one after the other on all devices. Vectors, stacked or not, are not split along ``fsdp``: they are
small.

Besides, the rules by which a batch is divided: into microbatches, into the parts of a growing batch, and among islands; and
what a framework lacks (``framework_problems``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.errors import Problem
from orchestrator.specification.bounds import STEP_TOKENS_MAX
from orchestrator.system.plain import brief, counted

if TYPE_CHECKING:
    from orchestrator.specification.training_sections import (
        ModelSection,
        TrainableSection,
        TrainerSection,
        TrainingSection,
    )

AXES = ("data", "fsdp", "expert", "tensor")

SPLIT_ALONG: Mapping[str, str] = {"vocabulary": "tensor", "heads": "tensor", "hidden": "tensor", "experts": "expert"}
NAMED_MAX = 4
"""How many tensors a message names."""

AxisLengths = Mapping[str, int]
Shape = tuple[int, ...]
Dimensions = tuple[str | None, ...]
"""What each dimension of a tensor is: a name of ``learners.models.model.AXES``, or None."""


def parameter_axes(mesh: Mapping[str, Any]) -> dict[str, int]:
    """Return the lengths of the axes along which parameters are split, from a specification's ``mesh``."""
    return {axis: int(mesh.get(axis) or 1) for axis in AXES if axis != "data"}


def axis_lengths(mesh: Mapping[str, Any], device_count: int) -> dict[str, int]:
    """Return the lengths of all axes on so many devices, for a mesh without ``mesh_problems``."""
    others = parameter_axes(mesh)
    return {"data": int(mesh.get("data") or device_count // math.prod(others.values())), **others}


def is_plain(mesh: Mapping[str, Any]) -> bool:
    """Return whether the mesh is unspecified: all devices are along ``data``, and each computes an indivisible batch."""
    return mesh.get("data") is None and set(parameter_axes(mesh).values()) == {1}


def mesh_problems(
    entry: str, mesh: Mapping[str, Any], device_count: int | None, batch_size: int, accumulation: int = 1
) -> Iterable[Problem]:
    """Yield the problems of the mesh of the islands at the path ``entry``, which train on ``batch_size`` sequences each.

    With ``accumulation`` the batch is cut into that many microbatches, and each of them is split. If the number of devices
    is unknown (None), only problems with any number are reported.
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
            where, f"{axes}: {product} devices, but an island has {device_count} (accelerators x hosts).", remedy
        )
        return
    lengths = axis_lengths(mesh, device_count or product)
    ways = lengths["data"] * lengths["fsdp"]
    part = "batch" if accumulation == 1 else "microbatch"
    if batch_size % (ways * accumulation):
        yield Problem(
            where,
            f"{axes}: a {part} is split {ways} ways (data {lengths['data']} x fsdp {lengths['fsdp']}), but has "
            f"{batch_size // accumulation} sequences.",
            f"Set batch_size to a multiple of {ways * accumulation} (the nearest are "
            f"{_nearest(batch_size, ways * accumulation)}), or make data or fsdp shorter.",
        )


def cut_problems(path: str, batch_size: int, accumulation: int) -> Iterable[Problem]:
    """Yield a problem if the batch cannot be cut into its microbatches."""
    if batch_size % accumulation:
        message = f"is {accumulation:,}, which does not divide the batch of {batch_size:,} sequences."
        fitting = max(count for count in range(1, accumulation) if batch_size % count == 0)
        yield Problem(path, message, f"Use {fitting:,}, or another batch_size.")


def step_problems(sequence_length: int, path: str, sequences: int, what: str) -> Iterable[Problem]:
    """Yield a problem if the product of sequences and their length is too large."""
    if sequences * sequence_length > STEP_TOKENS_MAX:
        message = f"is {sequences:,} sequences of {sequence_length:,} tokens, but {what}"
        message += f" may have at most {STEP_TOKENS_MAX:,}."
        yield Problem(path, message, "Lower it, or data.sequence_length.")


def share_problems(
    tokens: int, sequence_length: int, island_count: int, batch_sizes: Mapping[str, int]
) -> Iterable[Problem]:
    """Yield a problem if islands cannot share ``tokens`` of a step in whole sequences, or if they have other batches.

    ``batch_sizes`` are by the entry that sets them, such as ``islands.1.``; that of ``training`` has no name.
    """
    unit = sequence_length * island_count
    each, rest = divmod(tokens, unit)
    if rest or not each:
        islands = counted(island_count, "island")
        message = f"is {tokens:,}, which {islands} cannot share evenly in sequences of {sequence_length:,} tokens."
        near = f"{each * unit:,} or {(each + 1) * unit:,}" if each else f"{unit:,}"
        yield Problem("training.tokens_per_step", message, f"Set it to a multiple of {unit:,}, such as {near}.")
        return
    for entry, batch_size in batch_sizes.items():
        if batch_size != each:
            message = f"is {batch_size:,}, but training.tokens_per_step gives each island {each:,} sequences."
            yield Problem(f"{entry or 'training.'}batch_size", message, "Leave one of the two out.")


def ramp_problems(
    entry: str, mesh: Mapping[str, Any], parts: int, batch_size: int, accumulation: int
) -> Iterable[Problem]:
    """Yield a problem if a batch does not have so many equal parts, each for all microbatches and devices."""
    ways = accumulation if is_plain(mesh) else accumulation * (mesh.get("data") or 1) * (mesh.get("fsdp") or 1)
    if batch_size % (unit := parts * ways):
        cut = f", and each part is cut into {ways:,}" if ways > 1 else ""
        message = f"is {parts:,}, but the batch of {entry} has {batch_size:,} sequences{cut}."
        remedy = (
            f"Set batch_size to a multiple of {unit:,} (the nearest are {_nearest(batch_size, unit)}), or change parts."
        )
        yield Problem("training.batch_ramp.parts", message, remedy)


def tensor_problems(
    entry: str, lengths: AxisLengths, shapes: Mapping[str, Shape], named: Mapping[str, Dimensions]
) -> Iterable[Problem]:
    """Yield a problem for each axis that does not divide the tensors it splits, or splits none; ``named`` has dimensions."""
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
                f"is {length}, but splits nothing: no tensor of the model has a dimension named {dimensions}.",
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
            f"is {length}, which divides none of the remaining dimensions of {listed}.",
            _divisor(longest),
        )


def host_problems(entry: str, mesh: Mapping[str, Any], host_count: int, devices_per_host: int) -> Iterable[Problem]:
    """Yield a problem if a host's devices are not a box of the mesh, so that its part of a tensor would not be a block.

    Devices are assumed to be in the order of their hosts, as on machines without an interconnect of another order.
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
        f"is {listed}, which gives each of {host_count} hosts with {devices_per_host} devices more than one block.",
        f"Choose lengths that divide {devices_per_host}, or are multiples of it.",
    )


def process_problems(entry: str, island: Placed, *, of_jax: bool) -> Iterable[Problem]:
    """Yield a problem if a host of an island that does not train in PyTorch cannot have this many processes."""
    count, where = island.processes_per_host, f"{entry}.processes_per_host"
    if count > 1 and of_jax:
        message = f"is {count}, but a process that trains in JAX uses all accelerators of its host."
        yield Problem(where, message, "Leave it out; see islands.mesh.")
    elif count > 1 and island.accelerator == "tpu":
        yield Problem(where, f"is {count}, but one process uses all chips of a TPU host.", "Leave it out.")
    elif island.accelerators % count:
        message = f"is {count}, which does not divide the {island.accelerators} accelerators of a host."
        yield Problem(where, message, "Use a divisor of accelerators.")


class Placed(Protocol):
    """The fields of an entry of ``islands`` that ``framework_problems`` reads."""

    @property
    def hosts(self) -> int: ...

    @property
    def processes_per_host(self) -> int: ...

    @property
    def accelerators(self) -> int: ...

    @property
    def accelerator(self) -> str: ...

    @property
    def mesh(self) -> Any: ...

    @property
    def framework(self) -> str | None: ...

    @property
    def batch_size(self) -> int | None: ...

    @property
    def accumulation(self) -> int | None: ...


def torch_problems(
    entry: str, island: Placed, optimizer: str, base: str | None, batch_size: int, accumulation: int
) -> Iterable[Problem]:
    """Yield the problems of an island that trains in PyTorch: one device in each process, and FSDP2 over several.

    ``optimizer`` is a kind or a factory, ``base`` the format of frozen weights, if they have one of their own.
    """
    count = island.hosts * island.processes_per_host
    where = f"{entry}.{'hosts' if island.hosts > 1 else 'processes_per_host'}"
    if count > 1 and optimizer != "adamw":
        message = f"gives an island {count} processes, but the optimizer is {optimizer}, and torch splits only adamw."
        yield Problem(where, message, "Set it to 1, or use training.inner_optimizer.kind adamw.")
    if count > 1 and base is not None:
        message = f"gives an island {count} processes, but trainable.base is {base}, which FSDP2 does not split."
        yield Problem(where, message, "Set it to 1, or leave trainable.base out.")
    if count > 1 and batch_size % (parts := count * accumulation):
        message = (
            f"gives an island {count} processes, but its batch has {batch_size} sequences, in {accumulation} parts."
        )
        remedy = f"Set batch_size to a multiple of {parts} (the nearest are {_nearest(batch_size, parts)})."
        yield Problem(where, message, remedy)
    if island.accelerators and island.accelerators != island.processes_per_host:
        message = f"is {island.accelerators}, but a process of PyTorch uses one GPU."
        remedy = f"Set {entry}.processes_per_host to {island.accelerators}, or use more islands."
        yield Problem(f"{entry}.accelerators", message, remedy)
    if island.accelerator == "tpu":
        message = "is tpu, but PyTorch trains on GPUs and CPUs."
        yield Problem(f"{entry}.accelerator", message, "Use gpu or cpu, or a model in JAX.")
    if not is_plain(island.mesh.model_dump()):
        message = "is set, but PyTorch splits the rows of parameters over an island's processes."
        yield Problem(f"{entry}.mesh", message, "Leave it out.")


def split(shape: Shape, dimensions: Sequence[str | None], lengths: AxisLengths) -> Dimensions:
    """Return the mesh axis along which each dimension is split. An axis that does not divide its dimension is left out."""
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


def framework_problems(
    trainer: TrainerSection,
    model: ModelSection,
    training: TrainingSection,
    islands: Iterable[Placed],
    part: TrainableSection | None,
) -> Iterator[Problem]:
    """Yield a problem for everything that is set and that the trainer does not have, such as settings of JAX with torch.

    ``part`` is what is trained.
    """
    if trainer.kind != "torch":
        for index, entry in enumerate(islands):
            if entry.framework is None:
                yield from process_problems(f"islands.{index}", entry, of_jax=trainer.is_built_in)
            else:
                yield from _shared_problems(f"islands.{index}", entry, trainer, model, training, part)
        return
    of_jax = {
        "preset": None if model.preset == "nano" else model.preset,
        "decoder": model.decoder,
        "factory": model.factory,
        "initial_weights": model.initial_weights,
        "vocabulary_size": model.vocabulary_size,
    }
    for name in (name for name, value in of_jax.items() if value is not None):
        message = "is set, but trainer.kind is torch, which trains trainer.model."
        yield Problem(f"model.{name}", message, "Leave it out, or leave out the trainer.")
    yield from _jax_only_problems(model)
    optimizer, base = training.inner_optimizer, None if part is None else part.base
    if optimizer.factory is None and optimizer.kind not in ("adamw", "muon"):
        message = f"is {optimizer.kind}, but trainer.kind is torch, which has adamw and muon."
        remedy = "Use one of these, or a factory such as torch.optim:Adafactor."
        yield Problem("training.inner_optimizer.kind", message, remedy)
    for index, entry in enumerate(islands):
        sizes = entry.batch_size or training.batch_size, entry.accumulation or training.accumulation
        named = optimizer.factory or optimizer.kind
        yield from torch_problems(f"islands.{index}", entry, named, base, *sizes)


def _jax_only_problems(model: ModelSection) -> Iterator[Problem]:
    if model.remat == "dots":
        yield Problem("model.remat", "is dots, but torch recomputes all or nothing.", "Use full, or none.")
    if model.attention != "auto":
        message = f"is {model.attention}, but torch chooses its kernel of attention itself."
        yield Problem("model.attention", message, "Leave it out.")


def _shared_problems(
    where: str,
    entry: Placed,
    trainer: TrainerSection,
    model: ModelSection,
    training: TrainingSection,
    part: TrainableSection | None,
) -> Iterator[Problem]:
    """Yield the problems of an island in PyTorch in a job in JAX: both need the same tensors, and the same state."""
    optimizer = training.inner_optimizer
    chosen = optimizer.factory or optimizer.kind
    without, instead = "Leave framework out", "train the whole job in PyTorch (trainer.kind)"
    if not trainer.is_built_in:
        message = f"is torch, but the trainer {trainer.factory} decides itself in which framework it trains."
        yield Problem(f"{where}.framework", message, f"{without}.")
        return
    if model.initial_weights is None or "://" in model.initial_weights:
        folder = brief(model.initial_weights)
        message = f"is torch, but transformers reads a model from a folder, and model.initial_weights is {folder}."
        yield Problem(f"{where}.framework", message, f"Set that to a folder of Hugging Face's libraries, or {instead}.")
    if model.decoder is not None and model.decoder.experts is not None:
        message = "is torch, but a mixture of experts has other tensors in transformers, and another loss of balance."
        yield Problem(f"{where}.framework", message, f"{without}, or {instead}.")
    if chosen != "adamw":
        message = f"is torch, but the state of the optimizer {chosen} differs between JAX and PyTorch."
        yield Problem(
            f"{where}.framework", message, "Set training.inner_optimizer.kind to adamw, or leave framework out."
        )
    if part is not None:
        message = "is torch, but trainable is set, and frozen parts are created differently in JAX and PyTorch."
        yield Problem(f"{where}.framework", message, f"{without}, or {instead}.")
    if training.objective is not None:
        message = f"is torch, but training.objective.kind is {training.objective.kind}, which only JAX has."
        yield Problem(f"{where}.framework", message, f"{without}.")
    yield from _jax_only_problems(model)
    if (count := entry.hosts * entry.processes_per_host) > 1:
        message = (
            f"is torch, but the island has {count} processes, whose rows of the decoder's tensors FSDP2 cannot split."
        )
        yield Problem(f"{where}.framework", message, f"Give the island one process, or {without.lower()}.")
        return
    sizes = entry.batch_size or training.batch_size, entry.accumulation or training.accumulation
    yield from torch_problems(where, entry, chosen, None, *sizes)
