"""The placement of an island on its node group: whether it fits, why not, and where it is. A pure decision on plain data.

Source: Ray would wait without end, and without a word, for a label or a resource that no node has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod
from typing import Protocol

from orchestrator.runtime.settings import CONTROL_GROUP

SLICE_LABEL, TOPOLOGY_LABEL, WORKER_LABEL = "ray.io/tpu-slice-name", "ray.io/tpu-topology", "ray.io/tpu-worker-id"
"""Ray's own, on every node with TPUs."""


@dataclass(frozen=True, slots=True)
class Node:
    """``total`` and ``free`` by Ray's resource names: CPU, GPU, TPU, memory (bytes).

    ``host`` is its machine's name, and ``address`` the one by which others reach it.
    """

    id: str
    name: str
    group: str
    region: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    host: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = ""


@dataclass(frozen=True, slots=True)
class Leaving:
    """A node takes nothing new, and goes at ``deadline`` (seconds since 1970), if anybody said when. ``cause`` says why."""

    cause: str
    deadline: float | None

    def seconds_left(self, now: float) -> float | None:
        return None if self.deadline is None else self.deadline - now


@dataclass(frozen=True, slots=True)
class Refusal:
    """``final`` when waiting cannot help."""

    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """A process that answers. At ``seen_at`` (seconds since its node was started) it had this pid.

    ``others`` are the other processes of its island, by rank, where that is of many hosts.
    """

    actor: str
    node_id: str
    node: str
    pid: int
    seen_at: float
    others: tuple[Placement, ...] = ()

    @property
    def ranks(self) -> tuple[Placement, ...]:
        """The processes of its island, this one first."""
        return (self, *self.others)


@dataclass(frozen=True, slots=True)
class Unplaced:
    """The attempt has failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Delayed:
    """No process has started, because no node has room for it. A controller of an older build never answers so."""

    reason: str


@dataclass(frozen=True, slots=True)
class Gang:
    """The nodes of an island of many hosts: the labels of each, in the order of their processes' ranks."""

    selectors: tuple[Mapping[str, str], ...]


class Booking(Protocol):
    """A section of the specification that describes a process that computes."""

    @property
    def accelerator(self) -> str: ...

    @property
    def accelerators(self) -> int: ...

    @property
    def cpus(self) -> float: ...


def resources_of(section: Booking) -> dict[str, float]:
    """Return what this section books on a node, for an evaluator, or for all processes that an island has there."""
    wanted = {"CPU": section.cpus}
    if section.accelerators:
        wanted[section.accelerator.upper()] = float(section.accelerators)
    return wanted


def environment_of(accelerator: str, cpus: float) -> dict[str, str]:
    """Return the variables that a process with so many CPUs sets before it imports JAX or PyTorch.

    Not Ray's ``runtime_env``, which costs a process of its own instead of a waiting one. CPU islands share cores with
    others: each gets as many threads as it books CPUs, or four of them would run eight threads on two cores.
    """
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    if accelerator != "cpu":
        return quiet
    threads = str(max(1, round(cpus)))
    names = ("PJRT_NPROC", "NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {**quiet, "JAX_PLATFORMS": "cpu", **dict.fromkeys(names, threads)}


def refusal(group: str, wanted: Mapping[str, float], nodes: Iterable[Node], section: str = "islands") -> Refusal | None:
    """``None`` if some node of ``group`` has ``wanted`` free; else what it books, what there is, and what to do.

    ``section`` is the one of the specification that asks for it.
    """
    all_nodes = list(nodes)
    candidates = [node for node in all_nodes if node.group == group]
    request = _text_of(wanted)
    if not candidates:
        others = ", ".join(sorted({n.group for n in all_nodes if n.group and n.group != CONTROL_GROUP})) or "none"
        return Refusal(
            f"no node belongs to the node group {group!r} (groups with nodes: {others}): change {section}.node_group, "
            f"or add a node with that label",
            final=True,
        )
    if not any(_covers(node.total, wanted) for node in candidates):
        best = " or ".join(
            sorted({_text_of({name: node.total.get(name, 0.0) for name in wanted}) for node in candidates})
        )
        return Refusal(
            f"asked for {request} on one node of {group!r}, whose nodes have {best} in all: ask for less "
            f"({section}.cpus, {section}.accelerators), or add a larger node",
            final=True,
        )
    if not any(_covers(node.free, wanted) for node in candidates):
        return Refusal(
            f"asked for {request} on one node of {group!r}, which has {_free(candidates, wanted)} free: cancel another "
            f"job, ask for less, or add a node; it is tried again",
            final=False,
        )
    return None


def gang(
    group: str, accelerator: str, wanted: Mapping[str, float], host_count: int, nodes: Iterable[Node]
) -> Gang | Refusal:
    """Return where an island of ``host_count`` hosts, each booking ``wanted``, fits as a whole, or why it does not fit.

    A TPU island is one slice, all of it: chosen here among the intact ones of the group, by name, so that its region is
    that of the group. Any other is as many nodes. What is free is a hint; Ray books all of it or nothing.
    """
    all_nodes = list(nodes)
    if (no := refusal(group, wanted, all_nodes)) is not None:
        return no
    candidates = [node for node in all_nodes if node.group == group and _covers(node.total, wanted)]
    if accelerator == "tpu":
        return _slice(group, wanted, host_count, candidates)
    request = f"asked for {host_count} nodes of {group!r} with {_text_of(wanted)} each"
    if len(candidates) < host_count:
        return Refusal(
            f"{request}, which has {len(candidates)} such: lower islands.hosts, ask for less, or add nodes",
            final=True,
        )
    if (free := sum(_covers(node.free, wanted) for node in candidates)) < host_count:
        return Refusal(
            f"{request}, which has {free} such with that free: cancel another job, ask for less, or add nodes; it is tried "
            "again",
            final=False,
        )
    return Gang(({},) * host_count)


def booked(group: str, wanted: Mapping[str, float], nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes as they will be once the first one of ``group`` with ``wanted`` free has booked it."""
    chosen = next((node for node in nodes if node.group == group and _covers(node.free, wanted)), None)
    return [
        replace(node, free={name: amount - wanted.get(name, 0.0) for name, amount in node.free.items()})
        if node is chosen
        else node
        for node in nodes
    ]


def _slice(group: str, wanted: Mapping[str, float], host_count: int, candidates: Sequence[Node]) -> Gang | Refusal:
    named = sorted(
        (node for node in candidates if SLICE_LABEL in node.labels), key=lambda node: node.labels[SLICE_LABEL]
    )
    slices = {name: list(members) for name, members in groupby(named, lambda node: node.labels[SLICE_LABEL])}
    request = f"asked for a TPU slice of {host_count} hosts with {_text_of(wanted)} each in {group!r}"
    sizes = {name: _host_count_of(members, wanted["TPU"]) for name, members in slices.items()}
    alike = [name for name in slices if sizes[name] == host_count]
    if not alike:
        there = ", ".join(f"{name} of {size} hosts" for name, size in sizes.items()) or f"no node with {SLICE_LABEL}"
        return Refusal(
            f"{request}, which has {there}: set islands.hosts and accelerators to those of a slice", final=True
        )
    intact = [name for name in alike if len(slices[name]) == host_count]
    if not intact:
        broken = ", ".join(f"{name} ({len(slices[name])} of {host_count} hosts)" for name in alike)
        return Refusal(f"{request}; of each such slice hosts are missing: {broken}; it is tried again", final=False)
    for name in intact:
        if all(_covers(node.free, wanted) for node in slices[name]):
            workers = sorted(node.labels.get(WORKER_LABEL, "") for node in slices[name])
            if workers == sorted(map(str, range(host_count))):  # ranks are numbered as the slice's own processes are
                return Gang(tuple({SLICE_LABEL: name, WORKER_LABEL: str(rank)} for rank in range(host_count)))
            return Gang(({SLICE_LABEL: name},) * host_count)
    return Refusal(
        f"{request}; in use are {', '.join(intact)}: cancel another job, or add a slice; it is tried again", final=False
    )


def _host_count_of(members: Sequence[Node], chips_per_host: float) -> int:
    """Return how many hosts the slice has when it is intact, by its topology if a label gives one."""
    extents = members[0].labels.get(TOPOLOGY_LABEL, "").split("x")
    if all(extent.isdecimal() for extent in extents):
        return max(1, round(prod(map(int, extents)) / chips_per_host))
    return len(members)


def _covers(has: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    return all(has.get(name, 0.0) >= amount for name, amount in wanted.items())


def _free(nodes: Sequence[Node], wanted: Mapping[str, float]) -> str:
    return " and ".join(
        ", ".join(f"{node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g} {name}" for name in wanted)
        for node in nodes
    )


def _text_of(amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items())
