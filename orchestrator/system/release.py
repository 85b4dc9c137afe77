"""The build of this installation, and which builds may work in one cluster.

    0.1.0_w1     a release and its wire number: what the label ``atoll-build`` of a node says

The *wire number* counts the changes of what processes of one cluster send each other: the actors' interfaces, commands,
reports and payloads. ``tests/test_release.py`` names a change that did not raise it.

A node may join a head of the same wire number whose release is the same, or the minor release before or after it. The order
of an upgrade is in docs/guide/upgrade.md.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Self

LABEL = "atoll-build"
WIRE = 1
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


def own() -> Build:
    """Return the build of this process."""
    import importlib.metadata  # late: most commands do not need it, and it imports much

    return Build(importlib.metadata.version("atoll").replace("+", "-"), WIRE)


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
    (major, minor), (other_major, other_minor) = _numbers(one), _numbers(other)
    return abs(minor - other_minor) if major == other_major else MINOR_DISTANCE_MAX + 1


def _numbers(release: str) -> tuple[int, int]:
    parts = re.match(r"(\d+)(?:\.(\d+))?", release)
    return (0, 0) if parts is None else (int(parts[1]), int(parts[2] or 0))
