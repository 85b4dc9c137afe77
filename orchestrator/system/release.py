"""The build of this installation, and which builds may work in one cluster.

    0.1.0_w1     a release and its wire number: what the label ``atoll-build`` of a node says

The *wire number* counts the changes of what processes of one cluster send each other: the actors' interfaces, commands,
reports and payloads. ``tests/test_release.py`` names a change that did not raise it.

A node may join a head of the same wire number whose release is the same, or the minor release before or after it. The order
of an upgrade is in docs/guide/upgrade.md.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from typing import NamedTuple, Self

LABEL = "atoll-build"
WIRE = 3
UNKNOWN = "unknown"
MINOR_DISTANCE_MAX = 1


class Build(NamedTuple):
    """``release`` is the version of the package, ``wire`` the wire number."""

    release: str
    wire: int

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the build that a label names, or None if it names none."""
        parts = re.fullmatch(r"([0-9A-Za-z.-]+)_w(\d{1,9})", text)
        return None if parts is None else cls(parts[1], int(parts[2]))

    def __str__(self) -> str:
        return f"{self.release}_w{self.wire}"


@cache
def own() -> Build:
    """Return the build of this process."""
    import importlib.metadata  # late: most commands do not need it, and it imports much

    return Build(importlib.metadata.version("atoll").replace("+", "-"), WIRE)


def is_older(one: Build, other: Build) -> bool:
    """Return whether ``one`` comes before ``other``. A release may have letters behind its numbers, which do not count."""
    return _numbers(one.release) < _numbers(other.release)


def upgrade_refusal(job: str, own: Build, others: Collection[tuple[str, str]]) -> str | None:
    """Return why a job of the build ``job`` cannot be upgraded to ``own``, with the remedy, or None if it can.

    ``others`` are the places that the job's synchroniser speaks with, each with the build that its nodes name.
    """
    before = Build.parse(job)
    if before == own:
        return f"it runs as {own} already. Start the service of a newer release first."
    if before is None:
        return f"its synchroniser does not name its release. Restart head and nodes with atoll {own.release} instead."
    if not is_older(before, own):
        return (
            f"it runs as {before}, and this service is {own}, which is not newer. Start the service of a newer release."
        )
    for place, name in others:
        build = Build.parse(name)
        if build is None:
            return f"{place} does not name its release. Restart it with atoll {before.release} or {own.release}."
        if build.wire != own.wire:
            return (
                f"{place} has {build}, which does not understand {own}: their wire numbers differ. Restart head and nodes "
                f"with atoll {own.release} instead."
            )
        if _distance(build.release, own.release) > MINOR_DISTANCE_MAX:
            return (
                f"{place} has {build}, more than one minor release from {own}. Restart it with a release between first."
            )
    return None


def refusal(node: Build, head: Build) -> str | None:
    """Return why this node may not join this head, with the remedy, or None if it may."""
    if node.wire != head.wire:
        what = (
            f"the head has atoll {head.release} (wire {head.wire}), and this machine {node.release} (wire {node.wire})"
        )
        return f"{what}: their processes do not understand each other. Install atoll {head.release} here."
    if _distance(node.release, head.release) > MINOR_DISTANCE_MAX:
        what = f"the head has atoll {head.release}, and this machine {node.release}"
        return f"{what}: they must be at most one minor release apart. Install atoll {head.release} here."
    return None


def _distance(one: str, other: str) -> int:
    """Return how many minor releases lie between two releases; a major release is further than any of them."""
    (major, minor, _), (other_major, other_minor, _) = _numbers(one), _numbers(other)
    return abs(minor - other_minor) if major == other_major else MINOR_DISTANCE_MAX + 1


def _numbers(release: str) -> tuple[int, int, int]:
    parts = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", release)
    return (0, 0, 0) if parts is None else (int(parts[1]), int(parts[2] or 0), int(parts[3] or 0))
