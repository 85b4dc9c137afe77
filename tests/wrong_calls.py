"""Calls between processes that type checkers must refuse; nothing runs this.

``make lint`` reads it with the product: mypy complains of every ``type: ignore`` below that it does not need, so a name, an
argument, an answer or an implementation that it would let pass fails there.
"""

from __future__ import annotations

import ray

from api.jobs.control import ControlPort
from learners.evaluator import Evaluator
from orchestrator.actors import ActorHandle, IslandFactory, IslandInterface, SynchroniserInterface
from orchestrator.core.vocabulary import Epoch, IslandId
from orchestrator.runtime.cluster import start_actor
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.runtime.controller import Controller
from orchestrator.runtime.node_agent import NodeAgent
from orchestrator.runtime.report_link import ReportLink
from orchestrator.runtime.synchroniser_actor import SynchroniserActor


def calls(island: ActorHandle[IslandInterface], controller: ActorHandle[Controller], reports: ReportLink) -> None:
    island.call(IslandInterface.flush, Epoch(1))
    island.call(IslandInterface.flushed, Epoch(1))  # type: ignore[attr-defined]
    island.call(IslandInterface.flush, "1")  # type: ignore[arg-type]
    island.call(IslandInterface.flush)  # type: ignore[call-arg]
    island.call(IslandInterface.flush, Epoch(1), 2)  # type: ignore[call-arg]
    island.call(Controller.close)  # type: ignore[arg-type]
    controller.call(Controller.stop, IslandId("asia"), 1, 2.0)  # type: ignore[arg-type]
    reports.command(IslandInterface.start)  # type: ignore[call-arg]
    reports.command(IslandInterface.hello)  # type: ignore[arg-type]
    start_actor(NodeAgent, {}, "asia")  # type: ignore[call-arg]


def answers(island: ActorHandle[IslandInterface], synchroniser: ActorHandle[SynchroniserInterface]) -> None:
    reports: str = ray.get(island.call(IslandInterface.reports, Epoch(1), 0, 0, 0.5))  # type: ignore[assignment]
    name: int = ray.get(synchroniser.call(SynchroniserInterface.save_parameters))  # type: ignore[assignment]
    print(reports, name)


def implementations() -> None:
    island: IslandFactory = Evaluator  # type: ignore[assignment]
    synchroniser: type[SynchroniserInterface] = Controller  # type: ignore[assignment]
    synchroniser = SynchroniserActor
    port: ControlPort = RayControlPort()
    print(island, synchroniser, port)
