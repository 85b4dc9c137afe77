"""The small world of one job: the real core, folds and replicas, with islands that run like clockwork.

Its course is a heap of events and what the effects add to it, worked out from the beginning; nothing is kept, and nothing
waits for a clock. Refuses to know files and services (``clockwork``).
"""

from __future__ import annotations

import heapq
from dataclasses import asdict, replace
from typing import Any

from api.jobs.control import CommandRecord, NodeGroupRecord, StatusRecord
from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.config import JobSpec
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core import saving
from orchestrator.core.hearing import contribution_of, event_of
from orchestrator.core.messages import Letter, Offer, Progress
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import CommandId, Incarnation, IslandId, JobPolicy, NodeGroupId
from orchestrator.replica.replica import Publication, Replica, ReplicaPolicy, reports_of
from orchestrator.tape.driver import Driver, MemorySink

GROUPS = [
    NodeGroupRecord(name=name, region=name, nodes=1, cpus=4.0, cpus_free=3.0, accelerators=0)
    for name in ("us-east", "us-west", "europe", "asia")
]
STEP_S = 0.05


class World:
    """One job from its beginning up to ``until``: a heap of events, and what the effects add to it."""

    def __init__(self, spec: JobSpec, commands: list[dict[str, Any]], until: float) -> None:
        self.policy: JobPolicy = spec.policy(
            {group["name"]: group["region"] for group in GROUPS}, spares=True, standbys=True
        )
        self.sink, self.goodput, self.statistics = MemorySink(), Goodput(self.policy), Statistics(self.policy)
        self.core = Synchroniser(self.policy)
        self.commands: dict[str, CommandRecord] = {}
        self._tokens_per_step = spec.tokens_per_step
        self._driver = Driver(self.core, (self.goodput, self.statistics), self.sink)
        self._heap: list[tuple[float, int, Any]] = []
        self._count = 0
        self._lives: dict[str, Life] = {}
        for command in commands:
            self.take(command)
        for group, count in spec.wanted_counts().items():
            about = {"at": 0.0, "kind": "scale", "id": f"scale {group}", "caller": "the specification", "island": None}
            self.take(about | {"node_group": group, "count": count})
        self._push(e.JobStarted(0.0))
        self._push(e.OuterStateSeeded(0.02, parameter_count=1000, digest="seed"))
        self.advance(until)

    def take(self, command: dict[str, Any]) -> None:
        """The command will be heard when its time has come."""
        if "dose" in command:
            self._push(fault_event(command))
        if "dose" not in command or command["kind"] == "kill":
            self._push(command_event(command))
        self.commands[command["id"]] = CommandRecord(
            kind=command["kind"],
            island=command["island"],
            caller=command["caller"],
            at=command["at"],
            accepted=None,
            detail="",
        )

    def advance(self, until: float) -> None:
        """Everything up to ``until`` has happened."""
        while self._heap and self._heap[0][0] <= until:
            at, _, event = heapq.heappop(self._heap)
            if isinstance(event, Tick):
                self._tick(at, event)
            elif isinstance(event, e.FaultInjected):
                self._strike(event)
            else:
                for effect in self._driver.step(event):
                    self._act(at, effect)

    def status(self, job_id: str, started_at: float, now: float) -> StatusRecord:
        view = self.core.view(now)
        return StatusRecord(
            job_id=job_id,
            name=job_id,
            started_at=started_at,
            at=now,
            view=asdict(view),
            goodput=self.goodput.summary(now),
            statistics=self.statistics.summary(now),
            loss_curve=[[view.tokens_trained, loss, at] for at, loss in self._losses()],
            commands=self.commands,
        )

    def _losses(self) -> list[tuple[float, float]]:
        return [(r.event.at, r.event.loss) for r in self.sink.records if isinstance(r.event, e.EvaluationCompleted)]

    def _push(self, event: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (event.at, self._count, event))

    def _act(self, at: float, effect: f.Effect) -> None:
        match effect:
            case f.SetTimer():
                self._push(e.TimerFired(max(at, effect.due_at), effect.timer, effect.serial))
            case f.PlaceIsland():
                who = (effect.island, effect.incarnation)
                self._lives[effect.island] = Life(*who, self.policy.fragment_count)
                self._push(e.IslandPlaced(at + 0.05, *who, node="here", pid=1000 + effect.incarnation))
                self._push(e.IslandReady(at + 0.1, *who, device_count=1, start_seconds=0.05))
            case f.BeginCatchUp():
                if (life := self._lives.get(effect.island)) is None or life.incarnation != effect.incarnation:
                    return  # it was killed an instant ago: nobody is there to be told
                donor = effect.donor[0] if effect.donor else None
                versions = tuple(fragment.version for fragment in self.core.view(at).fragments)
                who = (effect.island, effect.incarnation)
                self._push(e.IslandCaughtUp(at + 0.02, *who, donor, versions, step=0, transfer_seconds=0.01))
                life.replica.hold(versions, 0)
            case f.StartTraining():
                if (life := self._lives.get(effect.island)) and life.incarnation == effect.incarnation:
                    life.replica.start(effect.fix)
                self._push(Tick(at + STEP_S, effect.island, effect.incarnation))
            case f.MergeFragment():
                made = (effect.fragment, effect.version, "digest")
                self._push(e.MergeCompleted(at + 0.005, *made, merge_seconds=0.004, journal_seconds=0.002))
            case f.PublishFragment():
                for to in effect.recipients:
                    self._adopt(at + 0.01, to, effect)
            case f.KillIsland() | f.StopIsland():
                if (life := self._lives.get(effect.island)) and life.incarnation == effect.incarnation:
                    del self._lives[effect.island]
                    self._push(e.ConnectionLost(at + 0.01, effect.island, effect.incarnation, True, "killed"))
            case f.DrainIsland():
                self._drain(at, self._lives[effect.island], effect.island)
            case f.FlushIsland():
                self._lives.pop(effect.island, None)
                self._push(e.IslandFlushed(at + 0.01, effect.island, effect.incarnation))
            case f.Evaluate():
                loss = 5.5 / (1 + effect.global_version / 50)
                self._push(e.EvaluationCompleted(at + 0.02, effect.global_version, loss))
            case f.ResolveCommand():
                outcome = self.commands[effect.command]
                outcome["accepted"], outcome["detail"] = effect.accepted, effect.detail

    def _adopt(self, at: float, to: f.Recipient, published: f.PublishFragment) -> None:
        """At once, for whoever runs like clockwork is at a boundary whenever one is wanted."""
        life = self._lives.get(to.island)
        if life is None or life.incarnation != to.incarnation:
            return
        terms = (published.fragment, published.version, published.step, to.merged_offer, published.fix)
        life.replica.publication_arrived(Publication(*terms))
        for report in reports_of(life.replica.adopt()):
            self._push(life.event_of(report, at))

    def _strike(self, fault: e.FaultInjected) -> None:
        """A stopped island steps on when its time is over; it is never so long that it would be missed."""
        life = self._lives.get(fault.island)
        if life is not None:
            if fault.kind in ("stop", "continue"):
                life.stopped_until = fault.at + fault.duration
            self._driver.step(replace(fault, incarnation=Incarnation(life.incarnation)))
        elif not fault.island:
            self._driver.step(fault)
        if fault.kind != "kill":
            detail = f"{fault.kind} {fault.island}" if life or not fault.island else f"{fault.island} has no process"
            self.commands[fault.command].update(accepted=life is not None or not fault.island, detail=detail)

    def _tick(self, at: float, tick: Tick) -> None:
        """One inner step; then the progress report, and one fragment is offered in turn."""
        life = self._lives.get(tick.island)
        if life is None or life.incarnation != tick.incarnation:
            return
        if at < life.stopped_until:
            self._push(Tick(at + STEP_S, tick.island, tick.incarnation))
            return
        life.replica.step_taken(self._tokens_per_step)
        steps, tokens = life.replica.steps_total, life.replica.tokens_total
        progress = Progress(life.replica.step, steps, tokens, steps * STEP_S, STEP_S, STEP_S, 5.5 / (1 + steps / 100))
        self._step_all(at, life.event_of(progress, at))
        for report in life.replica.boundary().reports():
            self._step_all(at, life.event_of(report, at))
        self._push(Tick(at + STEP_S, tick.island, tick.incarnation))

    def _drain(self, at: float, life: Life, island: IslandId) -> None:
        """It gives what is left, and soon after that is merged."""
        del self._lives[island]
        life.replica.drain()
        for report in life.replica.boundary().reports():
            self._step_all(at, life.event_of(report, at))
        self._push(e.IslandDrained(at + 0.2, island, Incarnation(life.incarnation)))

    def _step_all(self, at: float, event: e.Event) -> None:
        for effect in self._driver.step(event):
            self._act(at, effect)


class Life:
    """One incarnation: a replica that offers one fragment in turn at every step, and whose offers arrive at once."""

    def __init__(self, island: IslandId, incarnation: Incarnation, fragment_count: int) -> None:
        self.island, self.incarnation = island, incarnation
        self.stopped_until = 0.0
        self.replica = Replica(
            ReplicaPolicy(
                fragment_count=fragment_count,
                interval_steps=fragment_count,
                adoption="replace",
                tokens_per_schedule_step=1,
                snapshots_max=1,
            )
        )

    def event_of(self, report: Letter, at: float) -> e.Event:
        if isinstance(report, Offer):
            return e.ContributionArrived(at, contribution_of(report, self.island, self.incarnation))
        return event_of(report, at, self.island, self.incarnation)


class Tick:
    """The end of an inner step of one island."""

    def __init__(self, at: float, island: IslandId, incarnation: Any) -> None:
        self.at, self.island, self.incarnation = at, island, incarnation


def command_event(command: dict[str, Any]) -> e.Command:
    at, name, caller = command["at"], CommandId(command["id"]), command["caller"]
    match command["kind"]:
        case "kill":
            return e.KillRequested(at, name, caller, IslandId(command["island"]), command["restart"])
        case "scale":
            return e.ScaleRequested(at, name, caller, NodeGroupId(command["node_group"]), command["count"])
        case "cordon":
            return e.CordonRequested(at, name, caller, NodeGroupId(command["node_group"]))
        case "uncordon":
            return e.UncordonRequested(at, name, caller, NodeGroupId(command["node_group"]))
        case "drain":
            return e.DrainRequested(at, name, caller, IslandId(command["island"]))
        case "rollback":
            return saving.RollbackRequested(at, name, caller, command["count"])
        case "checkpoint":
            return saving.CheckpointRequested(at, name, caller)
        case "readd":
            return e.ReaddRequested(at, name, caller, IslandId(command["island"]))
    return e.CancelRequested(at, name, caller)


def fault_event(command: dict[str, Any]) -> e.FaultInjected:
    name, whom = CommandId(command["id"]), IslandId(command["island"] or "")
    head = (command["at"], name, command["caller"], command["kind"], whom, Incarnation(0))
    return e.FaultInjected(*head, **command["dose"])
