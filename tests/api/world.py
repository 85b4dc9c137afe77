"""The small world of one job: the real core and the real folds, with islands that run like clockwork.

Its course is a heap of events and what the effects add to it, worked out from the beginning; nothing is kept, and nothing
waits for a clock. Refuses to know files and services (``clockwork``).
"""

from __future__ import annotations

import heapq
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.actors.records import CommandRecord, NodeGroupRecord, StatusRecord
from orchestrator.config import JobSpec
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core import saving
from orchestrator.core.commands import Command, Inject, Kill, Scale, island_of, kind_of
from orchestrator.core.messages import IslandReport, Offer, Progress
from orchestrator.core.report_events import contribution_of, event_of
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import CommandId, Incarnation, IslandId, JobPolicy, NodeGroupId
from orchestrator.replica.replica import Publication, Replica, ReplicaPolicy, reports_of
from orchestrator.tape import command_codec
from orchestrator.tape.driver import Driver, MemorySink

GROUPS = [
    NodeGroupRecord(name=name, region=name, nodes=1, cpus=4.0, cpus_free=3.0, accelerators=0)
    for name in ("us-east", "us-west", "europe", "asia")
]
STEP_S = 0.05


@dataclass(frozen=True)
class Taken:
    """A command as the job was given it, at that instant."""

    at: float
    command: CommandId
    caller: str
    request: Command

    @classmethod
    def of(cls, record: dict[str, Any]) -> Taken:
        return cls(record["at"], record["id"], record["caller"], command_codec.decode(record["request"]))


class World:
    """One job from its beginning up to ``until``: a heap of events, and what the effects add to it."""

    def __init__(self, spec: JobSpec, commands: list[Taken], until: float) -> None:
        self.policy: JobPolicy = spec.policy(
            {group["name"]: group["region"] for group in GROUPS}, slots=True, standbys=True
        )
        self.sink, self.goodput, self.statistics = MemorySink(), Goodput(self.policy), Statistics(self.policy)
        self.core = Synchroniser(self.policy)
        self.commands: dict[str, CommandRecord] = {}
        self._tokens_per_step = spec.tokens_per_step
        self._driver = Driver(self.core, (self.goodput, self.statistics), self.sink)
        self._heap: list[tuple[float, int, Any]] = []
        self._count, self._now = 0, 0.0
        self._lives: dict[str, Life] = {}
        for command in commands:
            self.take(command)
        for group, count in spec.wanted_counts().items():
            self.take(Taken(0.0, CommandId(f"scale {group}"), "the specification", Scale(NodeGroupId(group), count)))
        self._push(e.JobStarted(0.0))
        self._push(e.OuterStateSeeded(0.02, parameter_count=1000, digest="seed"))
        self.advance(until)

    def take(self, taken: Taken) -> None:
        """The command will be heard when its time has come."""
        about, request = (taken.at, taken.command, taken.caller), taken.request
        if isinstance(request, Inject):
            dose = (request.duration, request.bytes_per_second, request.payloads)
            whom = request.island or IslandId("")
            self._push(e.FaultInjected(*about, request.fault, whom, Incarnation(0), *dose))
            if request.fault == "kill":
                self._push(e.CommandRequested(*about, Kill(whom)))
        else:
            self._push(e.CommandRequested(*about, request))
        self.commands[taken.command] = CommandRecord(
            kind=kind_of(request),
            island=island_of(request),
            caller=taken.caller,
            at=taken.at,
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
                self._step_all(at, event)

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

    # ── core.effects.Shell ────────────────────────────────────────────────────────────────────────────────────────

    def set_timer(self, effect: f.SetTimer) -> None:
        self._push(e.TimerFired(max(self._now, effect.due_at), effect.timer, effect.serial))

    def merge_fragment(self, effect: f.MergeFragment) -> None:
        made = (effect.fragment, effect.version, "digest")
        self._push(e.MergeCompleted(self._now + 0.005, *made, merge_seconds=0.004, journal_seconds=0.002))

    def publish_fragment(self, effect: f.PublishFragment) -> None:
        for to in effect.recipients:
            self._adopt(self._now + 0.01, to, effect)

    def release_payload(self, effect: f.ReleasePayload) -> None:
        """There are no bytes in this world."""

    def place_island(self, effect: f.PlaceIsland) -> None:
        who = (effect.island, effect.incarnation)
        self._lives[effect.island] = Life(*who, self.policy.fragment_count)
        self._push(e.IslandPlaced(self._now + 0.05, *who, node="here", pid=1000 + effect.incarnation))
        self._push(e.IslandReady(self._now + 0.1, *who, device_count=1, start_seconds=0.05))

    def begin_catch_up(self, effect: f.BeginCatchUp) -> None:
        if (life := self._lives.get(effect.island)) is None or life.incarnation != effect.incarnation:
            return  # it was killed an instant ago: nobody is there to be told
        donor = effect.donor[0] if effect.donor else None
        versions = tuple(fragment.version for fragment in self.core.view(self._now).fragments)
        who = (effect.island, effect.incarnation)
        self._push(e.IslandCaughtUp(self._now + 0.02, *who, donor, versions, step=0, transfer_seconds=0.01))
        life.replica.hold(versions, 0)

    def start_training(self, effect: f.StartTraining) -> None:
        if (life := self._lives.get(effect.island)) and life.incarnation == effect.incarnation:
            life.replica.start(effect.fix)
        self._push(Tick(self._now + STEP_S, effect.island, effect.incarnation))

    def flush_island(self, effect: f.FlushIsland) -> None:
        self._lives.pop(effect.island, None)
        self._push(e.IslandFlushed(self._now + 0.01, effect.island, effect.incarnation))

    def drain_island(self, effect: f.DrainIsland) -> None:
        self._drain(self._now, self._lives[effect.island], effect.island)

    def kill_island(self, effect: f.KillIsland) -> None:
        self._end(effect.island, effect.incarnation)

    def stop_island(self, effect: f.StopIsland) -> None:
        self._end(effect.island, effect.incarnation)

    def evaluate(self, effect: f.Evaluate) -> None:
        loss = 5.5 / (1 + effect.global_version / 50)
        self._push(e.EvaluationCompleted(self._now + 0.02, effect.global_version, loss))

    def resolve_command(self, effect: f.ResolveCommand) -> None:
        outcome = self.commands[effect.command]
        outcome["accepted"], outcome["detail"] = effect.accepted, effect.detail

    def begin_checkpoint(self, effect: saving.BeginCheckpoint) -> None:
        """A job of this world has nothing to save, and says nothing: its checkpoints end with their deadline."""

    def seal_checkpoint(self, effect: saving.SealCheckpoint) -> None:
        """See ``begin_checkpoint``."""

    def drop_checkpoint(self, effect: saving.DropCheckpoint) -> None:
        """See ``begin_checkpoint``."""

    def restore_fragments(self, effect: saving.RestoreFragments) -> None:
        """See ``begin_checkpoint``: there is none to go back to."""

    def finish_job(self, effect: f.FinishJob) -> None:
        """Whoever looks sees it in the core's view, and leaves the results."""

    # ── what becomes of it ────────────────────────────────────────────────────────────────────────────────────────

    def _end(self, island: IslandId, incarnation: Incarnation) -> None:
        if (life := self._lives.get(island)) and life.incarnation == incarnation:
            del self._lives[island]
            self._push(e.ConnectionLost(self._now + 0.01, island, incarnation, True, "killed"))

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
            outcome = self.commands[fault.command]
            outcome["accepted"], outcome["detail"] = life is not None or not fault.island, detail

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
        self._now = at
        for effect in self._driver.step(event):
            f.carry_out(effect, self)


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

    def event_of(self, report: IslandReport, at: float) -> e.Event:
        if isinstance(report, Offer):
            return e.ContributionArrived(at, contribution_of(report, self.island, self.incarnation))
        return event_of(report, at, self.island, self.incarnation)


class Tick:
    """The end of an inner step of one island."""

    def __init__(self, at: float, island: IslandId, incarnation: Any) -> None:
        self.at, self.island, self.incarnation = at, island, incarnation
