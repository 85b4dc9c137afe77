"""The placement of an island on its node group: whether it fits, why not, and where it is. A pure decision on plain data.

Source: Ray would wait without end, and without a word, for a label or a resource that no node has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.runtime.settings import CONTROL_GROUP


@dataclass(frozen=True, slots=True)
class Node:
    """``total`` and ``free`` by Ray's resource names: CPU, GPU, TPU, memory (bytes). ``host`` is its machine's name."""

    id: str
    name: str
    group: str
    region: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    host: str = ""


@dataclass(frozen=True, slots=True)
class Refusal:
    """``final`` when waiting cannot help."""

    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """A process that answers. At ``seen_at`` (seconds since its node was started) it had this pid."""

    actor: str
    node_id: str
    node: str
    pid: int
    seen_at: float


@dataclass(frozen=True, slots=True)
class Unplaced:
    reason: str


class Booking(Protocol):
    """What a section of the specification says of a process that computes."""

    @property
    def accelerator(self) -> str: ...

    @property
    def accelerators(self) -> int: ...

    @property
    def cpus(self) -> float: ...


def resources_of(section: Booking) -> dict[str, float]:
    """What one process of this section, an island or an evaluator, books on its node."""
    wanted = {"CPU": section.cpus}
    if section.accelerators:
        wanted[section.accelerator.upper()] = float(section.accelerators)
    return wanted


def environment_of(section: Booking) -> dict[str, str]:
    """What one process of this section sets before it imports JAX.

    Not Ray's ``runtime_env``, which costs a process of its own instead of a waiting one. CPU islands share cores with
    others: each gets as many threads as it books CPUs, or four of them would run eight threads on two cores.
    """
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    if section.accelerator != "cpu":
        return quiet
    threads = str(max(1, round(section.cpus)))
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


def _covers(has: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    return all(has.get(name, 0.0) >= amount for name, amount in wanted.items())


def _free(nodes: Sequence[Node], wanted: Mapping[str, float]) -> str:
    return " and ".join(
        ", ".join(f"{node.free.get(name, 0.0):g} of {node.total.get(name, 0.0):g} {name}" for name in wanted)
        for node in nodes
    )


def _text_of(amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items())
