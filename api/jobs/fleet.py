"""A check of a specification against the fleet: could this job ever run on it? Made before anything is started. Pure.

Responsible for what the specification and the node groups say about each other: unknown groups, a host of an island too
large for any one node of its group, more hosts than it has nodes, and more than a group has in total. What is free right now
is not its business: a job may wait for room, and says so itself. A group's record does not tell kinds of accelerators apart,
so neither does this check.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from orchestrator.actors.records import NodeGroupRecord
from orchestrator.config import too_many_entries
from orchestrator.errors import Problem
from orchestrator.plain import brief, some_of
from orchestrator.sections import IslandsSection
from orchestrator.validation import closest


def group_problems(document: Mapping[str, Any], groups: Sequence[NodeGroupRecord]) -> tuple[Problem, ...]:
    """Every node group that the specification names and the fleet has not. The specification may be wrong elsewhere."""
    if too_many_entries(document):
        return ()
    names = sorted(group["name"] for group in groups)
    islands, evaluation = document.get("islands"), document.get("evaluation")
    entries = list(islands) if isinstance(islands, list | tuple) else []
    sections = [(f"islands.{index}", entry) for index, entry in enumerate(entries)] + [("evaluation", evaluation)]
    named = [(path, section.get("node_group")) for path, section in sections if isinstance(section, Mapping)]
    return tuple(
        Problem(
            f"{path}.node_group",
            f"is {brief(group)}, but the fleet has {some_of(names) or 'none at all'}.",
            f"{_meant(group, names)}, or start the service with --groups and a file that has it.",
        )
        for path, group in named
        if isinstance(group, str) and group not in names
    )


def _meant(group: str, names: Sequence[str]) -> str:
    meant = closest(group, names)
    return f"Use {meant}, if that is meant" if meant else "Use one of these"


def fleet_problems(
    islands: Mapping[int, IslandsSection] | Sequence[IslandsSection], groups: Sequence[NodeGroupRecord]
) -> tuple[Problem, ...]:
    """Everything these islands ask for that their node groups can never give, each with its remedy."""
    groups_by_name = {group["name"]: group for group in groups}
    problems: list[Problem] = []
    entries_of: dict[str, list[int]] = defaultdict(list)
    islands = islands if isinstance(islands, Mapping) else dict(enumerate(islands))
    with_accelerators = [group["name"] for group in groups if group["accelerators"]]
    for index, section in islands.items():
        if section.node_group in groups_by_name:
            entries_of[section.node_group].append(index)
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
                if not has:
                    message = (
                        f"asks for {getattr(islands[index], field):g} {field} on node group {name!r}, which has none."
                    )
                    others = some_of(sorted(with_accelerators))
                    remedy = f"Use a group that has: {others}." if others else "No group here has: set it to 0."
                    if field == "accelerators":
                        remedy += " With accelerator: cpu an island needs none."
                    problems.append(Problem(f"islands.{index}.{field}", message, remedy))
                    continue
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


def sections_of(document: Mapping[str, Any]) -> dict[int, IslandsSection]:
    """The entries of a specification's islands that are right, by their number; it may be wrong elsewhere."""
    islands = document.get("islands")
    if too_many_entries(document) or not isinstance(islands, list | tuple):
        return {}
    sections = {}
    for index, entry in enumerate(islands):
        with suppress(ValidationError):
            sections[index] = IslandsSection.model_validate(entry)
    return sections
