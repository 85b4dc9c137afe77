"""Check before the start whether the nodes have the memory that a job needs. Pure.

    shard     on the head, or each shard's part on a node of its group: Θ, its moments, the residue of updates; with
              staleness earlier versions; the fragments being merged, with the contributions of all islands to them
    evaluator on the head, unless a node group has it
    island    on the node of each of its hosts: Θ as published, a state while it is received, its own while it is saved;
              on CPU, parameters, moments and gradients as well. A host has its share of each of these (``ISLAND_TERMS``),
              as the island's mesh splits parameters

The figures are bytes per parameter, as measured by ``python -m tests.bench shard`` and ``island``, which check them. A
node's memory is what Ray reports: the minimum of its cgroup limit and what was free at its start, or ``memory_gib`` of a
groups file. Nodes on one host share the largest of their figures. Other jobs are not considered, nor are activations, which
only the model knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

from orchestrator.errors import Problem
from orchestrator.models.decoder import DecoderSection
from orchestrator.parameters.codec.registry import CodecName
from orchestrator.specification import training_sections
from orchestrator.specification.config import JobSpec
from orchestrator.specification.device_mesh import parameter_axes
from orchestrator.specification.sections import IslandsSection

FLOAT32_BYTES = 4.0
CODE_BYTES: Mapping[CodecName, float] = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "int8": 1 + 2 / 128,
    "int4": 0.5 + 2 / 128,
    "e3m0": 0.5 + 2 / 128,
    "int2": 0.25 + 2 / 128,
}
"""Bytes per parameter in each codec, scales included; a test compares them with the codecs."""
FRAGMENTS_AT_ONCE = 2
"""How many fragments are collected or merged at the same time, if merges keep up."""
HEAP_BYTES = 1.0
"""Freed memory that the allocator keeps."""
EVALUATOR_BYTES = 13.0
"""Θ as received, on the device, and as the model's initial parameters."""
TRAINER_STATE_BYTES, GRADIENT_BYTES = 12.0, 4.0
"""Parameters with two moments, and gradients; in host memory if an island computes on CPU."""
LESS = "use a group with larger nodes, give the nodes more memory, or train a smaller model."


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The memory that processes may use on a node. ``host`` is its machine, which may have several nodes.

    The group of the head's node is ``HEAD``.
    """

    host: str
    group: str
    memory_bytes: float


HEAD = ""
"""The group of the head's node."""


class Extent(Enum):
    """The part of an island's bytes that one of its hosts has."""

    SHARE = auto()
    """The part of each tensor that the host's devices hold, once."""
    COPIES = auto()
    """The part that each device holds: if a mesh repeats parameters along ``data``, memory holds them repeatedly."""


class When(Enum):
    """The islands to which a term applies."""

    ALWAYS = auto()
    SAVES = auto()
    ON_CPU = auto()


@dataclass(frozen=True, slots=True)
class Term:
    """One use of memory: its peak in bytes per parameter of an island."""

    what: str
    bytes_per_parameter: float
    extent: Extent
    when: When = When.ALWAYS


ISLAND_TERMS = (
    Term("Θ as it is published", 4.0, Extent.SHARE),
    Term("a state while it is taken or given", 16.0, Extent.SHARE),
    Term("its own while it is saved", TRAINER_STATE_BYTES, Extent.SHARE, When.SAVES),
    Term("parameters, moments and gradients", TRAINER_STATE_BYTES + GRADIENT_BYTES, Extent.COPIES, When.ON_CPU),
)
"""``tests.bench.island_memory`` measures them together. Peers and checkpoints give a host its share of a state: parameters,
moments and Θ."""


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """Peak bytes: on the head, for evaluator and shards that are there, on one host of an island of each entry, and of each
    shard on a node of the shard groups.
    """

    head: float
    islands: tuple[float, ...]
    shards: tuple[float, ...] = ()


def shard_bytes_per_parameter(
    island_count: int,
    fragment_count: int,
    up: CodecName,
    down: CodecName,
    *,
    moments: int = 1,
    clips: bool = False,
    staleness_max: int = 0,
) -> float:
    """Return the shard's bytes per parameter: 15.2 with eight islands, four bits both ways and 24 fragments.

    The optimizer keeps ``moments`` values for each; a merge that ``clips`` holds the average besides its inputs.
    """
    lossy = down != "float32"
    state = FLOAT32_BYTES * (1 + moments + lossy)
    update = CODE_BYTES[down] if lossy else 0.0
    merging = island_count * CODE_BYTES[up] + FLOAT32_BYTES * (1 + clips) + state + update
    at_once = min(FRAGMENTS_AT_ONCE, fragment_count) / fragment_count  # routers, if they are apart, are few
    return state * (1 + staleness_max) + update + merging * at_once + HEAP_BYTES


def _parts(hosts: int, mesh: Mapping[str, Any]) -> dict[Extent, float]:
    """Return the parts of a tensor that one host has. A host's devices form a box of the mesh, ``data`` outermost."""
    ways = math.prod(parameter_axes(mesh).values())
    held = 1 / min(hosts, ways)
    return {Extent.SHARE: held, Extent.COPIES: max(held, (mesh.get("data") or 1) / hosts)}


def island_bytes_per_parameter(
    *, on_cpu: bool, saves: bool, hosts: int = 1, mesh: Mapping[str, Any] = MappingProxyType({})
) -> float:
    """Return an island's bytes per parameter on each host."""
    parts = _parts(hosts, mesh)
    there = {When.ALWAYS: True, When.SAVES: saves, When.ON_CPU: on_cpu}
    return math.fsum(term.bytes_per_parameter * parts[term.extent] for term in ISLAND_TERMS if there[term.when])


def parameter_count_of(spec: JobSpec) -> int | None:
    """Return the number of trained parameters from the specification; None if only the package of model or trainer knows."""
    if spec.trainer.is_synthetic:
        return spec.synthetic.parameters
    shapes = spec.trained_shapes
    return None if shapes is None else sum(map(math.prod, shapes.values()))


def router_parameter_count_of(spec: JobSpec) -> int:
    """Return the number of trained parameters of routers; 0 if only the package of model or trainer knows."""
    return sum(map(math.prod, training_sections.routers_of(spec.trained_shapes or {}).values()))


def has_frozen(spec: JobSpec) -> bool:
    """Return whether islands hold tensors that are not trained: the rest of the model, or the model of before."""
    return spec.trainable is not None or spec.training.objective is not None


def frozen_bytes_of(spec: JobSpec) -> float:
    """Return the bytes of the parameters that are not trained, once; 0 if only a package knows them.

    A decoder's are held in the type in which it computes, all others in float32.
    """
    network = spec.model.network if spec.trainer.is_built_in else None
    if network is None or not has_frozen(spec):
        return 0.0
    trained = spec.trainable.trained_shapes(network) if spec.trainable is not None else {}
    if spec.training.objective is not None and not (spec.trainable is not None and spec.trainable.lora is not None):
        trained = {}  # what is trained is also held as it was before
    count = sum(math.prod(shape) for name, shape in network.shapes.items() if name not in trained)
    halved = isinstance(network, DecoderSection) and spec.model.compute_dtype == "bfloat16"
    return count * (FLOAT32_BYTES / 2 if halved else FLOAT32_BYTES)


def demand_of(spec: JobSpec, parameter_count: int) -> MemoryDemand:
    """Return the memory that the job's processes need, with so many trained parameters.

    Frozen ones take host memory only where the model computes on CPU.
    """
    sync, frozen = spec.synchroniser, frozen_bytes_of(spec)
    shard = shard_bytes_per_parameter(
        spec.island_count,
        sync.schedule.shared_count,
        sync.wire.up,
        sync.wire.down,
        moments=sync.outer_optimizer.moment_count,
        clips=sync.outer_optimizer.clip_norm is not None,
        staleness_max=sync.staleness_max,
    )
    evaluator = EVALUATOR_BYTES if spec.evaluation.on == "head" else 0.0
    saves = bool(spec.checkpoints.every_merges or spec.checkpoints.every_s)
    elsewhere = sync.shards if sync.shard_groups else 0
    head = parameter_count * (evaluator + (0.0 if elsewhere else shard))

    def on_a_host(entry: IslandsSection) -> float:
        mesh, on_cpu = entry.mesh.model_dump(), not entry.accelerators
        trained = island_bytes_per_parameter(on_cpu=on_cpu, saves=saves, hosts=entry.hosts, mesh=mesh)
        held = frozen * _parts(entry.hosts, mesh)[Extent.COPIES] if on_cpu else 0.0
        return (parameter_count * trained + held) * entry.processes_per_host

    return MemoryDemand(
        head + (frozen if spec.evaluation.on == "head" else 0.0),
        tuple(map(on_a_host, spec.islands)),
        (parameter_count * shard / sync.shards,) * elsewhere,
    )


def memory_problems(spec: JobSpec, parameter_count: int, nodes: Sequence[NodeMemory]) -> tuple[Problem, ...]:
    """Return a problem for everything for which these nodes have too little memory.

    Groups whose nodes do not report their memory are not checked; likewise the head.
    """
    field, model = _model(spec, parameter_count)
    demand, wire = demand_of(spec, parameter_count), spec.synchroniser.wire
    problems: list[Problem] = []
    amounts: dict[str, float] = {HEAD: demand.head}
    if (has := _bytes_of(nodes, {HEAD})) and demand.head > has:
        elsewhere = " evaluate elsewhere (evaluation.on)," if spec.evaluation.on == "head" else ""
        problems.append(
            Problem(
                field,
                f"is {model}: merging contributions of {spec.island_count} islands in {wire.up} needs {_text(demand.head)} "
                f"on the head, which has {_text(has)}.",
                f"Give the head more memory, use fewer islands or a codec of fewer bits (synchroniser.wire),{elsewhere} "
                "or train a smaller model.",
            )
        )
    for index, group in enumerate(spec.synchroniser.shard_groups):
        own = demand.shards[index :: len(spec.synchroniser.shard_groups)]
        amounts[group] = amounts.get(group, 0.0) + math.fsum(own)
        largest = max((node.memory_bytes for node in nodes if node.group == group), default=0.0)
        if largest and own[0] > largest:
            problems.append(
                Problem(
                    f"synchroniser.shard_groups.{index}",
                    f"is {group!r}, whose largest node has {_text(largest)} of memory: one of {len(demand.shards)} shards "
                    f"of {parameter_count:,} parameters needs {_text(own[0])}.",
                    f"Raise synchroniser.shards, {LESS}",
                )
            )
    for index, (entry, island) in enumerate(zip(spec.islands, demand.islands, strict=True)):
        host_count = entry.hosts * (entry.count + entry.standby)
        amounts[entry.node_group] = amounts.get(entry.node_group, 0.0) + island * host_count
        there = sorted((node.memory_bytes for node in nodes if node.group == entry.node_group), reverse=True)
        if there and there[0] and len(there) >= entry.hosts and island > there[entry.hosts - 1]:
            one = "one island" if entry.hosts == 1 else f"each of the {entry.hosts} hosts of an island"
            which = "whose largest node has" if entry.hosts == 1 else f"of whose {entry.hosts} largest nodes one has"
            problems.append(
                Problem(
                    f"islands.{index}.node_group",
                    f"is {entry.node_group!r}, {which} {_text(there[entry.hosts - 1])} of memory: {one} of "
                    f"{parameter_count:,} parameters{_and_frozen(spec)} needs {_text(island)}.",
                    f"A host of an island is one node: {LESS}",
                )
            )
    if problems:
        return tuple(problems)
    for groups in (*({group} for group in amounts if group != HEAD), set(amounts)):
        stated = {node.group for node in nodes if node.memory_bytes > 0}
        needed, has = sum(amounts[group] for group in groups), _bytes_of(nodes, groups)
        if groups <= stated and needed > has:
            where = " and ".join(f"node group {group!r}" for group in sorted(groups - {HEAD}))
            head = " and the head" if HEAD in groups else ""
            has_islands = any(entry.node_group in groups for entry in spec.islands)
            problems.append(
                Problem(
                    "islands" if has_islands else "synchroniser.shard_groups",
                    f"need {_text(needed)} of memory for {parameter_count:,} parameters on {where}{head}, whose machines "
                    f"have {_text(has)} together.",
                    f"Use fewer islands there, {LESS}" if has_islands else f"Name more groups, {LESS}",
                )
            )
            break
    return tuple(problems)


def _model(spec: JobSpec, parameter_count: int) -> tuple[str, str]:
    """Return the field that determines the model's size, and its value."""
    if spec.trainable is not None:
        return "trainable", f"set, with {parameter_count:,} trained parameters"
    if spec.trainer.is_synthetic:
        return "synthetic.parameters", f"{parameter_count:,}"
    if not spec.trainer.is_built_in:
        return "trainer", f"{spec.trainer.factory!r}, whose model has {parameter_count:,} parameters"
    if spec.model.factory is not None:
        return "model.factory", f"{spec.model.factory!r}, whose model has {parameter_count:,} parameters"
    if spec.model.decoder is not None:
        return "model.decoder", f"of {parameter_count:,} parameters"
    return "model.preset", f"{spec.model.preset!r}, {parameter_count:,} parameters"


def _and_frozen(spec: JobSpec) -> str:
    frozen = frozen_bytes_of(spec)
    return f" and {_text(frozen)} of frozen ones" if frozen else ""


def _bytes_of(nodes: Sequence[NodeMemory], groups: Set[str]) -> float:
    """Return the memory of the machines of these groups; for each machine, the largest figure of its nodes."""
    hosts: dict[str, float] = {}
    for node in nodes:
        if node.group in groups:
            hosts[node.host] = max(hosts.get(node.host, 0.0), node.memory_bytes)
    return math.fsum(hosts.values())


def _text(amount: float) -> str:
    """Return an amount in GiB, or in MiB if it is smaller."""
    return f"{amount / (1 << 30):.1f} GiB" if amount >= 1 << 30 else f"{amount / (1 << 20):,.1f} MiB"
