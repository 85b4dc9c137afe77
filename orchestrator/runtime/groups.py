"""The node groups of an embedded cluster, as ``atoll up --groups FILE`` reads them.

Responsible for validating the file, all problems at once. Refuses to know how nodes are started.

    node_groups:
      - {name: us-east, region: us-east1, cpus: 4}
      - {name: asia, region: asia-east1, nodes: 2, cpus: 4, accelerators: 1, accelerator: gpu}
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from orchestrator.errors import ConfigurationError
from orchestrator.runtime.settings import CONTROL_GROUP
from orchestrator.specification.bounds import AcceleratorCount, CpuCount, MemoryGib, Name, NodeCount
from orchestrator.specification.config import read_document
from orchestrator.specification.validation import problems_of

EXAMPLE = "groups.yaml"
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
