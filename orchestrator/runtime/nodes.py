"""The watch over a cluster's nodes, which finds those that are down or unreachable long before Ray does.

Ray is configured to tolerate a partition of 600 s, and takes 600 s to declare a node dead. A node is down when its machine
refuses connections to the raylet's port: what is left of its processes ends by itself within seconds, without a raylet. A
node is unreachable when nothing answers at all, as in a partition: what runs there runs on, and nothing new is placed there
until it answers again.

Nothing new is placed on a cordoned node, either. The service names those in the head's books, and islands there run on.

A node that is being drained is about to go: nothing new is placed there, and ``on_leaving`` is called at every look for as
long as it is there, because the listener may die and come back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from orchestrator.core.vocabulary import Life
from orchestrator.errors import in_words
from orchestrator.runtime import cluster
from orchestrator.runtime.placement import Leaving, Node, refusal
from orchestrator.runtime.settings import CONTROL_GROUP, NODE_ID_LABEL
from orchestrator.status import NodeGroupRecord
from orchestrator.system import release
from orchestrator.system.ports import Reach
from orchestrator.system.signals import left_label

log = logging.getLogger(__name__)

NOTHING: Mapping[str, float] = MappingProxyType({})
ACCELERATORS = ("GPU", "TPU")
WATCH_S = 1.0
LOOK_S = 5.0
"""A look is over within seconds; one that is not says nothing of the nodes."""
FINAL_REPORT_S = 10.0
"""Once the partition is over a link polls again within a second or so, while the controller notices at once."""


class NodeWatch:
    """Looks every second, and when asked to, as long as its process lives. ``on_down`` is called once for each node."""

    def __init__(
        self,
        on_down: Callable[[frozenset[str]], None] = lambda _: None,
        on_leaving: Callable[[Mapping[str, Leaving]], None] = lambda _: None,
    ) -> None:
        self._on_down, self._on_leaving = on_down, on_leaving
        self._leaving: Mapping[str, Leaving] = {}
        self._down: frozenset[str] = frozenset()
        self._unreachable: frozenset[str] = frozenset()
        self._cordoned: frozenset[str] = frozenset()
        self._present: frozenset[str] | None = None
        self._turn = threading.Condition()  # guards the three numbers of looks
        self._asked_for, self._begun, self._over = 1, 0, 0
        threading.Thread(target=self._watch, name="watch-nodes", daemon=True).start()

    def look_again(self) -> None:
        """Returns when a look is over that began after this call: what is known elsewhere may be newer than the last one.

        Takes milliseconds where all nodes answer, a second or two where one does not, and no longer than ``LOOK_S``.
        """
        with self._turn:
            wanted = self._begun + 1
            self._asked_for = max(self._asked_for, wanted)
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._over >= wanted, LOOK_S)

    def placeable(self) -> list[Node]:
        """The nodes of the cluster on which something can be placed.

        Nobody knows before the first look, which is waited for: Ray would place a job's first islands on what died before.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._over > 0, LOOK_S)
        return [node for node in cluster.nodes() if node.id not in self._excluded()]

    def is_there(self, node_id: str) -> bool:
        """Return whether a process may start on this node: it was not dead, down or about to go at the last look."""
        return self._present is None or (node_id in self._present and node_id not in self._down | self._leaving.keys())

    def is_down(self, node_id: str) -> bool:
        """Return whether the node's machine refused connections, and Ray does not know yet that the node is dead."""
        return node_id in self._down

    def is_unreachable(self, node_id: str) -> bool:
        return node_id in self._unreachable

    def selector(self, job: str = "", island: str = "", wanted: Mapping[str, float] = NOTHING) -> dict[str, str]:
        """Labels by which Ray places nothing where nobody answers, which it would, and wait, or on a cordoned node.

        If the island left a state on the machine of a node (``signals.left_label``), and that has ``wanted`` free, they name
        this node.
        """
        label = left_label(f"{job}.{island}")
        for node in self.placeable() if island else ():
            if label in node.labels and refusal(node.group, wanted, [node]) is None:
                return {NODE_ID_LABEL: node.id}
        excluded = self._excluded()
        return {NODE_ID_LABEL: f"!in({','.join(sorted(excluded))})"} if excluded else {}

    def _excluded(self) -> frozenset[str]:
        return self._down | self._unreachable | self._cordoned | self._leaving.keys()

    def _watch(self) -> None:
        trouble = ""
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._asked_for > self._begun, WATCH_S)
                self._begun += 1
            try:
                self._look()
                trouble = ""
            except Exception as error:  # the cluster itself does not answer, which says nothing of its nodes
                reason = in_words(error)
                if reason != trouble:  # it may stay so for hours
                    log.warning("whether all nodes are there cannot be told: %s", reason, exc_info=error)
                trouble = reason
            with self._turn:
                self._over = self._begun
                self._turn.notify_all()

    def _look(self) -> None:
        reaches = cluster.node_reaches()
        self._present = frozenset(reaches)
        silent = frozenset(node for node, reach in reaches.items() if reach is Reach.NOTHING)
        if silent != self._unreachable:
            log.warning("unreachable: the nodes %s", ", ".join(sorted(silent)) or "(none)")
            self._unreachable = silent
        fresh = frozenset(node for node, reach in reaches.items() if reach is Reach.REFUSED) - self._down
        if fresh:
            log.warning("down: the nodes %s", ", ".join(sorted(fresh)))
            self._on_down(fresh)
        self._down = (self._down | fresh) & self._present  # Ray itself knows the others to be dead by now
        cordoned = cluster.cordoned_nodes()
        if cordoned != self._cordoned:
            log.warning("cordoned: the nodes %s", ", ".join(sorted(cordoned)) or "(none)")
            self._cordoned = cordoned
        leaving = cluster.leaving_nodes()
        if news := leaving.keys() - self._leaving.keys():
            log.warning(
                "about to go: %s", "; ".join(f"the node {node} ({leaving[node].cause})" for node in sorted(news))
            )
        self._leaving = leaving
        if leaving:
            self._on_leaving(leaving)


class Orphans:
    """The lives whose processes end once their nodes can be reached again. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orphans: dict[Life, _Orphan] = {}

    def add(self, life: Life, node_id: str) -> bool:
        """False if it is one already."""
        with self._lock:
            if life in self._orphans:
                return False
            self._orphans[life] = _Orphan(node_id)
            return True

    def discard(self, lives: Iterable[Life]) -> None:
        with self._lock:
            for life in lives:
                self._orphans.pop(life, None)

    def due(self, is_unreachable: Callable[[str], bool], now: float) -> list[Life]:
        """Return the lives whose processes are to be ended now."""
        with self._lock:
            for orphan in self._orphans.values():
                if is_unreachable(orphan.node_id):
                    orphan.reachable_since = None
                elif orphan.reachable_since is None:
                    orphan.reachable_since = now
            return sorted(
                life
                for life, orphan in self._orphans.items()
                if orphan.reachable_since is not None and now - orphan.reachable_since >= FINAL_REPORT_S
            )


@dataclass(slots=True)
class _Orphan:
    node_id: str
    reachable_since: float | None = None


def node_groups_of(nodes: Iterable[Node], down: Collection[str], leaving: Collection[str]) -> list[NodeGroupRecord]:
    """Return every group that has a node, by name, without the head's own. ``down`` and ``leaving`` are ids of nodes."""
    groups: dict[str, NodeGroupRecord] = {}
    for node in nodes:
        if not node.group or node.group == CONTROL_GROUP:
            continue
        empty = NodeGroupRecord(
            name=node.group,
            region=node.region,
            nodes=0,
            cpus=0.0,
            cpus_free=0.0,
            accelerators=0,
            nodes_leaving=0,
            nodes_down=0,
            node_names=[],
            builds=[],
        )
        group = groups.setdefault(node.group, empty)
        if node.id in down:
            group["nodes_down"] += 1
            continue
        group["nodes"] += 1
        group["builds"] = sorted({*group["builds"], node.labels.get(release.LABEL, release.UNKNOWN)})
        group["nodes_leaving"] += node.id in leaving
        if node.id not in leaving:
            group["node_names"] = sorted({*group["node_names"], node.host or node.name})
        group["cpus"] += node.total.get("CPU", 0.0)
        group["cpus_free"] += node.free.get("CPU", 0.0)
        group["accelerators"] += int(sum(node.total.get(kind, 0.0) for kind in ACCELERATORS))
    return [groups[name] for name in sorted(groups)]
