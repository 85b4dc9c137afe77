"""The memory that a job needs on its hosts, and whether its nodes have it: decided before anything is started. Pure.

    shard     on the head: Θ, μ, what updates lost; with staleness the versions before; the fragments that are merging, with
              what all islands sent of them
    evaluator on the head, unless a node group has it
    island    on the node of each of its hosts: Θ as published, a state while it is taken, its own while it is saved;
              where it computes on CPU, parameters, moments and gradients as well. A host has its share of each of these
              (``ISLAND_TERMS``), as the island's mesh splits parameters

The figures are bytes a parameter, as ``python -m tests.bench shard`` and ``island`` measure them and judge them by these.
What a node has is what Ray says of it, which is the node's own look at its cgroup's limit, its installed memory and what of
that was free as it started, or what its group is said to have (``memory_gib`` of a groups file). Nodes on one host share
the largest of their figures. What other jobs need is not its business, nor activations: only the model knows those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

from orchestrator.errors import Problem
from orchestrator.parameters.codec.registry import CodecName
from orchestrator.specification.config import BUILT_IN_TRAINER, JobSpec
from orchestrator.specification.device_mesh import parameter_axes

FLOAT32_BYTES = 4.0
CODE_BYTES: Mapping[CodecName, float] = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "int8": 1 + 2 / 128,
    "int4": 0.5 + 2 / 128,
    "e3m0": 0.5 + 2 / 128,
}
"""A parameter in each codec, scales included; a test holds them against the codecs."""
FRAGMENTS_AT_ONCE = 2
"""So many are collected or merged at the same time, in a job whose merges keep up."""
HEAP_BYTES = 1.0
"""What the allocator holds of memory that was given back."""
EVALUATOR_BYTES = 13.0
"""Θ as it came, on the device, and as the model begins."""
TRAINER_STATE_BYTES, GRADIENT_BYTES = 12.0, 4.0
"""Of parameters and two moments, and of gradients: in host memory where an island computes on CPU."""
SYNTHETIC = "learners.synthetic:create"
LESS = "use a group with larger nodes, give the nodes more memory, or train a smaller model."


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """``memory_bytes`` is all that processes may use on the node; ``host`` is its machine, which may have several nodes.

    The node of the head is of no group.
    """

    host: str
    group: str
    memory_bytes: float


HEAD = ""
"""As the group of a node."""


class Extent(Enum):
    """How much of an island's bytes one of its hosts has."""

    SHARE = auto()
    """Of each tensor what the host's devices hold, once."""
    COPIES = auto()
    """What its devices hold, each for itself: where a mesh repeats parameters along ``data``, so does the memory."""


class When(Enum):
    """In which islands a term is."""

    ALWAYS = auto()
    SAVES = auto()
    ON_CPU = auto()


@dataclass(frozen=True, slots=True)
class Term:
    """``bytes_per_parameter`` of an island, in host memory at the highest."""

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
"""Each is measured by ``tests.bench.island_memory`` with the others. Peers and checkpoints give a host its share of a
state: parameters, moments and Θ."""


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """Bytes at the highest: on the head of the shard and the evaluator, and of one host of an island of each entry."""

    head: float
    islands: tuple[float, ...]


def shard_bytes_per_parameter(
    island_count: int,
    fragment_count: int,
    up: CodecName,
    down: CodecName,
    *,
    momentum: bool = True,
    staleness_max: int = 0,
) -> float:
    """With eight islands in four bits both ways and 24 fragments 15.2."""
    lossy = down != "float32"
    state = FLOAT32_BYTES * (1 + momentum + lossy)
    update = CODE_BYTES[down] if lossy else 0.0
    merging = island_count * CODE_BYTES[up] + FLOAT32_BYTES + state + update
    at_once = min(FRAGMENTS_AT_ONCE, fragment_count) / fragment_count
    return state * (1 + staleness_max) + update + merging * at_once + HEAP_BYTES


def island_bytes_per_parameter(
    *, on_cpu: bool, saves: bool, hosts: int = 1, mesh: Mapping[str, Any] = MappingProxyType({})
) -> float:
    """In the memory of each of its hosts, whose devices lie in boxes of the mesh, the parameters' axes innermost."""
    ways = math.prod(parameter_axes(mesh).values())
    held = 1 / min(hosts, ways)
    parts = {Extent.SHARE: held, Extent.COPIES: max(held, (mesh.get("data") or 1) / hosts)}
    there = {When.ALWAYS: True, When.SAVES: saves, When.ON_CPU: on_cpu}
    return math.fsum(term.bytes_per_parameter * parts[term.extent] for term in ISLAND_TERMS if there[term.when])


def parameter_count_of(spec: JobSpec) -> int | None:
    """The model's parameters where the specification says them; None for a model or trainer that only its package knows."""
    if spec.trainer == SYNTHETIC:
        return spec.synthetic.parameters
    network = spec.model.network if spec.trainer == BUILT_IN_TRAINER else None
    return network.parameter_count if network else None


def demand_of(spec: JobSpec, parameter_count: int) -> MemoryDemand:
    """What the job's processes need."""
    sync = spec.synchroniser
    shard = shard_bytes_per_parameter(
        spec.island_count,
        sync.fragments,
        sync.wire.up,
        sync.wire.down,
        momentum=sync.outer_optimizer.kind == "nesterov",
        staleness_max=sync.staleness_max,
    )
    evaluator = EVALUATOR_BYTES if spec.evaluation.on == "head" else 0.0
    saves = bool(spec.checkpoints.every_merges or spec.checkpoints.every_s)
    islands = (
        island_bytes_per_parameter(
            on_cpu=not entry.accelerators, saves=saves, hosts=entry.hosts, mesh=entry.mesh.model_dump()
        )
        for entry in spec.islands
    )
    return MemoryDemand(parameter_count * (shard + evaluator), tuple(parameter_count * island for island in islands))


def memory_problems(spec: JobSpec, parameter_count: int, nodes: Sequence[NodeMemory]) -> tuple[Problem, ...]:
    """Everything for which these nodes have too little memory, each with what is needed, what there is, and what to do.

    Of a group whose nodes do not say what they have, and of the head if it does not, nothing is decided.
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
                f"is {model}: merging what {spec.island_count} islands send in {wire.up} needs {_text(demand.head)} of "
                f"the head's memory, which has {_text(has)}.",
                f"Give the head more memory, use fewer islands or a codec of fewer bits (synchroniser.wire),{elsewhere} "
                "or train a smaller model.",
            )
        )
    for index, (entry, island) in enumerate(zip(spec.islands, demand.islands, strict=True)):
        process_count = entry.hosts * (entry.count + entry.standby)
        amounts[entry.node_group] = amounts.get(entry.node_group, 0.0) + island * process_count
        there = sorted((node.memory_bytes for node in nodes if node.group == entry.node_group), reverse=True)
        if there and there[0] and len(there) >= entry.hosts and island > there[entry.hosts - 1]:
            one = "one island" if entry.hosts == 1 else f"each of the {entry.hosts} hosts of an island"
            which = "whose largest node has" if entry.hosts == 1 else f"of whose {entry.hosts} largest nodes one has"
            problems.append(
                Problem(
                    f"islands.{index}.node_group",
                    f"is {entry.node_group!r}, {which} {_text(there[entry.hosts - 1])} of memory: {one} of "
                    f"{parameter_count:,} parameters needs {_text(island)}.",
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
            problems.append(
                Problem(
                    "islands",
                    f"need {_text(needed)} of memory for {parameter_count:,} parameters on {where}{head}, whose machines "
                    f"have {_text(has)} together.",
                    f"Use fewer islands there, {LESS}",
                )
            )
            break
    return tuple(problems)


def _model(spec: JobSpec, parameter_count: int) -> tuple[str, str]:
    """The field that makes the model as large as it is, and what it says."""
    if spec.trainer == SYNTHETIC:
        return "synthetic.parameters", f"{parameter_count:,}"
    if spec.trainer != BUILT_IN_TRAINER:
        return "trainer", f"{spec.trainer!r}, whose model has {parameter_count:,} parameters"
    if spec.model.factory is not None:
        return "model.factory", f"{spec.model.factory!r}, whose model has {parameter_count:,} parameters"
    if spec.model.decoder is not None:
        return "model.decoder", f"of {parameter_count:,} parameters"
    return "model.preset", f"{spec.model.preset!r}, {parameter_count:,} parameters"


def _bytes_of(nodes: Sequence[NodeMemory], groups: Set[str]) -> float:
    """What the machines of these groups have: of each the largest figure of its nodes, which share it."""
    hosts: dict[str, float] = {}
    for node in nodes:
        if node.group in groups:
            hosts[node.host] = max(hosts.get(node.host, 0.0), node.memory_bytes)
    return math.fsum(hosts.values())


def _text(amount: float) -> str:
    """In GiB, or MiB below."""
    return f"{amount / (1 << 30):.1f} GiB" if amount >= 1 << 30 else f"{amount / (1 << 20):,.1f} MiB"
