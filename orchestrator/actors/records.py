"""Node groups as the control port and the service exchange them."""

from __future__ import annotations

from typing import TypedDict


class NodeGroupRecord(TypedDict):
    """A set of nodes of one kind in one region. Capacities are totals over its nodes; ``cpus_free`` is right now."""

    name: str
    region: str
    nodes: int
    cpus: float
    cpus_free: float
    accelerators: int
