"""The agents of all nodes, as one job's controller calls them: looked up or started at first need, made again if they die.

Every call answers within seconds, but for those of chaos, which wait longer, so that what became of them is known. Refuses
to know islands: its callers say where a process is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Concatenate, ParamSpec, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.actors import ActorHandle
from orchestrator.errors import first_line
from orchestrator.runtime import cluster
from orchestrator.runtime.node_agent import NodeAgent
from orchestrator.runtime.placement import Placement
from orchestrator.runtime.supervision import Helper, Supervisor

ANSWER_TIMEOUT_S = 3.0
FAULT_TIMEOUT_S = 60.0
"""Of a node that lives but is busy; where none answers by then, nobody knows whether the fault was injected."""

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class NodeAgents:
    """Thread-safe. An agent is not made again on a node for which ``is_there`` is false."""

    def __init__(self, supervisor: Supervisor, is_there: Callable[[str], bool]) -> None:
        self._lock = threading.Lock()
        self._supervisor, self._is_there = supervisor, is_there
        self._node_agents: dict[str, Helper[NodeAgent]] = {}

    def ensure(self, placed: Placement) -> None:
        """There will be one on this node, so that a kill finds it there."""
        self._on(placed)

    def call(
        self,
        placed: Placement,
        method: Callable[Concatenate[NodeAgent, Arguments], Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> ray.ObjectRef[Answer]:
        """Call the agent of this process's node. Raises AttributeError for one of an earlier build."""
        return self._on(placed).call(method, *arguments, **named)

    def on(self, node_id: str, node: str) -> ActorHandle[NodeAgent]:
        """Return the agent of the node with this id and name."""
        return self._helper(node_id, node).handle

    def kill(self, placed: Placement, within_s: float = ANSWER_TIMEOUT_S) -> bool:
        """SIGKILL the process. False where no node agent answers."""
        try:
            call = self._on(placed).call(NodeAgent.kill, placed.pid, placed.seen_at)
            ray.get(call, timeout=within_s)
        except (RayError, TimeoutError):
            return False
        return True

    def signal(
        self,
        placed: Placement,
        method: Callable[Concatenate[NodeAgent, int, float, Arguments], bool],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> str:
        """``stop`` or ``go_on`` of the process. Empty when that is done, else why it could not be."""
        call = self._on(placed).call(method, placed.pid, placed.seen_at, *arguments, **named)
        try:
            return "" if ray.get(call, timeout=FAULT_TIMEOUT_S) else f"its process {placed.pid} is gone"
        except (RayError, TimeoutError) as error:
            return f"the node agent of {placed.node} did not answer: {first_line(error)}"

    def kill_node(self, placed: Placement) -> str:
        """SIGKILL the raylet of the process's node. Answers as ``signal``."""
        agent = self._on(placed)
        try:
            return ray.get(agent.call(NodeAgent.kill_node), timeout=FAULT_TIMEOUT_S)
        except (RayError, TimeoutError) as error:
            return f"the node agent of {placed.node} did not answer: {first_line(error)}"

    def leave(self, node_ids: Iterable[str]) -> None:
        """These nodes are being drained: their agents go as the last ones. Of those that were started or looked up here."""
        with self._lock:
            agents = [self._node_agents[node_id] for node_id in node_ids if node_id in self._node_agents]
        for agent in agents:
            agent.call(NodeAgent.leave)

    def _on(self, placed: Placement) -> Helper[NodeAgent]:
        return self._helper(placed.node_id, placed.node)

    def _helper(self, node_id: str, node: str) -> Helper[NodeAgent]:
        with self._lock:
            if node_id not in self._node_agents:
                name = f"node agent of {node}"
                helper = Helper(name, lambda: node_agent_of(node_id), wanted=lambda: self._is_there(node_id))
                self._node_agents[node_id] = self._supervisor.add(helper)
            return self._node_agents[node_id]


def node_agent_of(node_id: str) -> ActorHandle[NodeAgent]:
    """The node's agent; starts it if there is none. Returns at once."""
    options = {
        "name": f"warden:{node_id}",  # jobs of older builds share it by this name
        "get_if_exists": True,
        **cluster.NEXT_TO_NOTHING,
        "max_concurrency": 4,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }
    return cluster.start_actor(NodeAgent, options)
