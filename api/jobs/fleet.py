"""A check of a specification against the fleet: could this job ever run on it? Made before anything is started. Pure.

Responsible for what the specification and the node groups say about each other: unknown groups, a host of an island too
large for any one node of its group, more hosts than it has nodes, and more than a group has in total. What is free right now
is not its business: a job may wait for room, and says so itself. A group's record does not tell kinds of accelerators apart,
so neither does this check.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from orchestrator.actors.records import NodeGroupRecord
from orchestrator.bounds import ISLANDS_MAX
from orchestrator.config import too_many_entries
from orchestrator.errors import Problem
from orchestrator.plain import some_of
from orchestrator.sections import IslandsSection

_SECTIONS: TypeAdapter[tuple[IslandsSection, ...]] = TypeAdapter(
    Annotated[tuple[IslandsSection, ...], Field(max_length=ISLANDS_MAX)]
)


def fleet_problems(islands: Sequence[IslandsSection], groups: Sequence[NodeGroupRecord]) -> tuple[Problem, ...]:
    """Everything these islands ask for that these node groups can never give, each with its remedy."""
    groups_by_name = {group["name"]: group for group in groups}
    problems: list[Problem] = []
    entries_of: dict[str, list[int]] = defaultdict(list)
    names = some_of(sorted(groups_by_name)) or "none at all"
    for index, section in enumerate(islands):
        if section.node_group in groups_by_name:
            entries_of[section.node_group].append(index)
            continue
        problems.append(
            Problem(
                f"islands.{index}.node_group",
                f"is {section.node_group!r}, but the fleet has {names}.",
                "Use one of these, or start the service with --groups and a file that has it.",
            )
        )
    for name, indices in entries_of.items():
        group, sections = groups_by_name[name], [islands[i] for i in indices]
        where = f"islands.{indices[0]}" if len(indices) == 1 else "islands"
        few = [index for index in indices if islands[index].hosts > group["nodes"]]
        problems += [
            Problem(
                f"islands.{index}.hosts",
                f"is {islands[index].hosts}, and node group {name!r} has {group['nodes']} nodes: each host is one of them.",
                f"Set it to at most {group['nodes']}, or give the group more nodes.",
            )
            for index in few
        ]
        for field in ("cpus", "accelerators"):
            has: float = group[field]
            one_node = has / max(1, group["nodes"])  # they are of one kind
            too_large = [index for index in indices if getattr(islands[index], field) > one_node]
            for index in too_large:
                problems.append(
                    Problem(
                        f"islands.{index}.{field}",
                        f"asks for {getattr(islands[index], field):g} {field} on one node of {name!r}, "
                        f"whose nodes have {one_node:g} each.",
                        f"It is of one host of an island: ask for at most {one_node:g}, or use a group with larger nodes.",
                    )
                )
            amount = sum(getattr(one, field) * one.hosts * (one.count + one.standby) for one in sections)
            if amount > has and not too_large and not few:
                problems.append(
                    Problem(
                        f"{where}.{field}",
                        f"asks for {amount:g} {field} on node group {name!r}, which has {has:g} in total.",
                        f"Ask for at most {has:g} there, move islands to another group, or give the group more.",
                    )
                )
    return tuple(problems)


def sections_of(document: Mapping[str, Any]) -> tuple[IslandsSection, ...]:
    """The islands of a specification that may be wrong elsewhere; none if they cannot be read themselves."""
    if too_many_entries(document):
        return ()
    try:
        return _SECTIONS.validate_python(document.get("islands", ()))
    except ValidationError:
        return ()
