"""The wardens of all nodes, as one job's controller calls them: found or made when first needed, forgotten when they fail.

Every call answers within seconds. Refuses to know islands: it is told where a process is.
"""

from __future__ import annotations

import threading
from typing import Any

import ray
from ray.exceptions import RayError

from orchestrator.errors import first_line
from orchestrator.runtime.placement import Placement
from orchestrator.runtime.warden import warden_of

ANSWER_TIMEOUT_S = 3.0


class Wardens:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wardens: dict[str, Any] = {}

    def ensure(self, node_id: str) -> None:
        """There will be one on this node, so that a kill finds it there."""
        self._on(node_id)

    def kill(self, placed: Placement) -> bool:
        """SIGKILL the process. False where no warden is within reach."""
        try:
            ray.get(self._on(placed.node_id).kill.remote(placed.pid, placed.seen_at), timeout=ANSWER_TIMEOUT_S)
        except (RayError, TimeoutError):
            self._forget(placed.node_id)
            return False
        return True

    def signal(self, placed: Placement, what: str, *arguments: Any) -> str:
        """``stop`` or ``go_on`` of the process. Empty when that is done, else why it could not be."""
        asked = getattr(self._on(placed.node_id), what).remote(placed.pid, placed.seen_at, *arguments)
        try:
            return "" if ray.get(asked, timeout=ANSWER_TIMEOUT_S) else f"its process {placed.pid} is gone"
        except (RayError, TimeoutError) as error:
            return f"the warden of {placed.node} did not answer: {first_line(error)}"

    def kill_node(self, placed: Placement) -> str:
        """SIGKILL the raylet of the process's node. Answers as ``signal``."""
        warden = self._on(placed.node_id)
        self._forget(placed.node_id)  # it dies, too
        try:
            return str(ray.get(warden.kill_node.remote(), timeout=ANSWER_TIMEOUT_S))
        except (RayError, TimeoutError) as error:
            return f"the warden of {placed.node} did not answer: {first_line(error)}"

    def _on(self, node_id: str) -> Any:
        with self._lock:
            if node_id not in self._wardens:
                self._wardens[node_id] = warden_of(node_id)
            return self._wardens[node_id]

    def _forget(self, node_id: str) -> None:
        with self._lock:
            self._wardens.pop(node_id, None)
