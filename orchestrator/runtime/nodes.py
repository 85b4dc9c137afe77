"""Which nodes are gone, though Ray believes them alive: told to bear long cuts, it takes as long to believe a death.

Gone is a node where somebody answers for the machine and nobody for the raylet: connections to its port are refused. One
that cannot be reached is not gone. What is left of its processes ends by itself within seconds, without a raylet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from orchestrator.runtime import cluster
from orchestrator.runtime.placement import Node

log = logging.getLogger(__name__)

WATCH_S = 1.0
NODE_ID_LABEL = "ray.io/node-id"
"""Every node has it by itself."""


class NodeWatch:
    """Looks every second, as long as its process lives. ``on_gone`` hears of each node once."""

    def __init__(self, on_gone: Callable[[frozenset[str]], None]) -> None:
        self._on_gone = on_gone
        self._gone: frozenset[str] = frozenset()
        threading.Thread(target=self._watch, name="watch-nodes", daemon=True).start()

    def known(self) -> list[Node]:
        """The nodes of the cluster, without those that are gone."""
        return [node for node in cluster.nodes() if node.id not in self._gone]

    def selector(self) -> dict[str, str]:
        """Labels by which Ray places nothing where nobody answers; it would, and wait."""
        return {NODE_ID_LABEL: f"!in({','.join(sorted(self._gone))})"} if self._gone else {}

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_S)
            try:
                fresh = cluster.gone_nodes() - self._gone
            except Exception:  # the cluster itself does not answer, which says nothing of its nodes
                log.exception("whether all nodes are there cannot be told")
                continue
            if fresh:
                log.warning("gone: the nodes %s", ", ".join(sorted(fresh)))
                self._gone |= fresh
                self._on_gone(fresh)
