"""Which nodes are gone or out of reach, though Ray believes them alive: told to bear long cuts, it takes as long to believe
a death.

Gone is a node where somebody answers for the machine and nobody for the raylet: connections to its port are refused. What
is left of its processes ends by itself within seconds, without a raylet. Out of reach is a node where nothing answers at
all, as behind a cut line: what runs there runs on, and nothing new is placed there until it can be reached again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from orchestrator.errors import first_line
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
        self._out_of_reach: frozenset[str] = frozenset()
        threading.Thread(target=self._watch, name="watch-nodes", daemon=True).start()

    def known(self) -> list[Node]:
        """The nodes of the cluster on which something can be placed."""
        return [node for node in cluster.nodes() if node.id not in self._gone | self._out_of_reach]

    def out_of_reach(self, node_id: str) -> bool:
        return node_id in self._out_of_reach

    def selector(self) -> dict[str, str]:
        """Labels by which Ray places nothing where nobody answers; it would, and wait."""
        away = self._gone | self._out_of_reach
        return {NODE_ID_LABEL: f"!in({','.join(sorted(away))})"} if away else {}

    def _watch(self) -> None:
        trouble = ""
        while True:
            time.sleep(WATCH_S)
            try:
                self._look()
                trouble = ""
            except Exception as error:  # the cluster itself does not answer, which says nothing of its nodes
                reason = f"{type(error).__name__}: {first_line(error)}"
                if reason != trouble:  # it may stay so for hours
                    log.warning("whether all nodes are there cannot be told: %s", reason, exc_info=error)
                trouble = reason

    def _look(self) -> None:
        reaches = cluster.node_reaches()
        silent = frozenset(node for node, reach in reaches.items() if reach is cluster.Reach.NOTHING)
        if silent != self._out_of_reach:
            log.warning("out of reach: the nodes %s", ", ".join(sorted(silent)) or "(none)")
            self._out_of_reach = silent
        fresh = frozenset(node for node, reach in reaches.items() if reach is cluster.Reach.REFUSED) - self._gone
        if fresh:
            log.warning("gone: the nodes %s", ", ".join(sorted(fresh)))
            self._on_gone(fresh)
            self._gone |= fresh
