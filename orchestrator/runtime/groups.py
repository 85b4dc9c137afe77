"""The node groups of an embedded cluster, as ``atoll up --groups FILE`` reads them, and the prices of node groups.

Responsible for validating the files, all problems at once. Refuses to know how nodes are started, and what a job costs.

    node_groups:
      - {name: us-east, region: us-east1, cpus: 4}
      - {name: asia, region: asia-east1, nodes: 2, cpus: 4, accelerators: 1, accelerator: gpu}

``--prices FILE``, with the ``PriceSection`` of each group:

    currency: EUR
    node_groups:
      us-east: {chip_hour: 2.1, kind: spot}
      asia: {node_hour: 31.2}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from orchestrator.errors import ConfigurationError
from orchestrator.runtime.settings import CONTROL_GROUP
from orchestrator.specification.bounds import AcceleratorCount, CpuCount, Currency, MemoryGib, Name, NodeCount, Section
from orchestrator.specification.documents import read_document
from orchestrator.specification.sections import PriceSection
from orchestrator.specification.validation import closest, problems_of
from orchestrator.system.plain import some_of

EXAMPLE, PRICES_EXAMPLE = "groups.yaml", "prices.yaml"
GROUPS_MAX = 1000
"""Of a fleet: each is at least one raylet of this machine."""


class NodeGroup(BaseModel):
    """``nodes`` raylets. ``cpus`` and ``accelerators`` are of one node: a capacity to book, no limit on its use.

    With TPUs, so many nodes after one another, ``slice_hosts``, are one slice.
    So is ``memory_gib``, which jobs are held against before they begin; absent: what is free when the node begins.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: Name
    region: Name
    nodes: NodeCount = 1
    cpus: CpuCount = 4
    accelerators: AcceleratorCount = 0
    accelerator: Literal["gpu", "tpu"] = "gpu"
    slice_hosts: NodeCount = 1
    memory_gib: MemoryGib | None = None


DEFAULT_GROUPS = (
    NodeGroup(name="us-east", region="us-east1"),
    NodeGroup(name="us-west", region="us-west1"),
    NodeGroup(name="europe", region="europe-west4"),
    NodeGroup(name="asia", region="asia-east1"),
)


def read_groups(path: Path | None) -> tuple[NodeGroup, ...]:
    """The groups of ``path``, or the four default ones. Raises ConfigurationError with every problem at once."""
    if path is None:
        return DEFAULT_GROUPS
    entries: Any = read_document(path, EXAMPLE).get("node_groups")
    if not isinstance(entries, list) or not 0 < len(entries) <= GROUPS_MAX:
        raise ConfigurationError(
            detail=f"{path} needs a list of 1 to {GROUPS_MAX} under 'node_groups', each with a name and a region, "
            f"as in deploy/configs/{EXAMPLE}."
        )
    groups: list[NodeGroup] = []
    problems: list[str] = []
    for index, entry in enumerate(entries):
        try:
            groups.append(NodeGroup.model_validate(entry))
        except ValidationError as error:
            under = f"node_groups.{index}"
            problems += map(str, problems_of(error, unknown="Remove it.", under=under, model=NodeGroup))
    names = [group.name for group in groups]
    problems += [
        f"node_groups: {name!r} is given twice" for name in sorted(n for n, uses in Counter(names).items() if uses > 1)
    ]
    if CONTROL_GROUP in names:
        problems.append(f"node_groups: {CONTROL_GROUP!r} is the head's own group; choose another name")
    if problems:
        raise ConfigurationError(detail=f"{path} cannot be used:\n" + "\n".join(f"  - {p}" for p in problems))
    return tuple(groups)


class PriceFile(Section):
    """The prices of node groups, in ``currency`` unless a group says otherwise."""

    currency: Currency = "USD"
    node_groups: Annotated[dict[Name, PriceSection], Field(min_length=1, max_length=GROUPS_MAX)]


def read_prices(path: Path) -> dict[str, PriceSection]:
    """Return the prices in the file by node group. Raises ConfigurationError with every problem at once."""
    try:
        file = PriceFile.model_validate(read_document(path, PRICES_EXAMPLE))
    except ValidationError as error:
        problems = problems_of(error, unknown="Remove it.", missing="Give it.", model=PriceFile)
        raise ConfigurationError(
            detail=f"{path} cannot be used:\n" + "\n".join(f"  - {problem}" for problem in problems)
        ) from None
    own = {name: price.model_fields_set for name, price in file.node_groups.items()}
    return {
        name: price if "currency" in own[name] else price.model_copy(update={"currency": file.currency})
        for name, price in file.node_groups.items()
    }


def unknown_prices(path: Path, prices: Mapping[str, PriceSection], groups: Collection[str]) -> str:
    """Return a sentence about the node groups of the price file that the cluster does not have; empty if it has all."""
    unknown = sorted(prices.keys() - groups)
    if not unknown:
        return ""
    meant = closest(unknown[0], sorted(groups))
    remedy = f"write {meant!r}" if meant else f"name one of {some_of(groups)}" if groups else "join its machines"
    more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
    return f"{path}: node_groups.{unknown[0]}{more} is no node group of the cluster. Remove it, or {remedy}."
