"""A job whose islands train in virtual time: the product's simulated world, with commands and a status like a real job.

The islands follow the island protocol (``orchestrator.replica``), and the core is behind the real driver with the real
folds. Everything follows from the specification, the plan and the commands, and nothing waits for a clock, so a job can
be recomputed from its start at any time. Files and services come from the control ports (``tests.api.clockwork``,
``tests.web.live``, ``tests.metrics.voyage``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.commands import Command, Inject, Kill, Scale, island_of, kind_of
from orchestrator.core.vocabulary import CommandId, Incarnation, Instant, IslandId, NodeGroupId
from orchestrator.host.state_view import core_status
from orchestrator.simulation.plan import Capacity, WorldPlan
from orchestrator.simulation.world import World
from orchestrator.specification.config import JobSpec
from orchestrator.status import CommandStatus, JobStatus, NodeGroupRecord, StatusDocument
from orchestrator.tape import codec
from orchestrator.tape.driver import Fold

GROUPS = [
    NodeGroupRecord(name=name, region=name, nodes=1, cpus=4.0, cpus_free=3.0, accelerators=0, builds=[])
    for name in ("us-east", "us-west", "europe", "asia")
]
STEP_S, JOURNAL_S = 0.05, 0.002
CLOCKWORK = WorldPlan(
    step_s=(STEP_S,),
    step_jitter_ratio=0.0,
    place_s=(0.05, 0.05),
    start_s=(0.05, 0.05),
    transfer_s=(0.02, 0.02),
    letter_s=(0.0, 0.0),
    pull_s=(0.0, 0.0),
    delivery_s=(0.01, 0.01),
    merge_s=(0.005, 0.005),
    evaluate_s=(0.02, 0.02),
    detect_s=(0.01, 0.01),
    seed_s=0.02,
)
"""A plan without chance, in which nothing is late."""


@dataclass(frozen=True)
class Taken:
    """A command and the instant at which the job received it."""

    at: float
    command: CommandId
    caller: str
    request: Command

    @classmethod
    def of(cls, record: dict[str, Any]) -> Taken:
        return cls(record["at"], record["id"], record["caller"], codec.decode_command(record["request"]))


class SimulatedJob(World):
    """One job from its start up to ``until``. The plan's step times are assigned to the islands in turn."""

    def __init__(
        self,
        spec: JobSpec,
        commands: Iterable[Taken],
        until: Instant,
        plan: WorldPlan = CLOCKWORK,
        folds: tuple[Fold, ...] = (),
    ) -> None:
        policy = spec.policy({group["name"]: group["region"] for group in GROUPS}, slots=True, standbys=True)
        step_s = tuple(plan.step_s[n % len(plan.step_s)] for n in range(len(policy.islands)))
        plan = replace(plan, step_s=step_s, tokens_per_step=spec.tokens_per_step)
        super().__init__(policy, plan, seed=1, checked=False, folds=folds)
        self.commands: dict[str, CommandStatus] = {}
        self._stopped_until: dict[IslandId, Instant] = {}
        for command in commands:
            self.take(command)
        for group, count in spec.wanted_counts().items():
            self.take(Taken(0.0, CommandId(f"scale {group}"), "the specification", Scale(NodeGroupId(group), count)))
        self.run(until)

    def take(self, taken: Taken) -> None:
        """Take a command, to be told at its time, or at once if that is past."""
        self.later(max(0.0, taken.at - self.now), partial(self._hear, taken))
        self.commands[taken.command] = CommandStatus(
            kind=kind_of(taken.request),
            island=island_of(taken.request),
            caller=taken.caller,
            at=taken.at,
            accepted=None,
            detail="",
        )

    def status(self, job_id: str, started_at: float, now: Instant) -> StatusDocument:
        """Return the job's status as a real one answers."""
        return JobStatus.model_construct(
            job_id=job_id,
            name=job_id,
            started_at=started_at,
            at=now,
            view=core_status(self.core.state, now, self.goodput.ledger.trained),
            goodput=self.goodput.summary(now),
            statistics=self.statistics.summary(now),
            loss_curve=self.statistics.evaluations.curve.all(),
            commands=dict(self.commands),
        ).document()

    def tell(self, event: e.Event) -> None:
        """Tell an event as the world does, but give merges a time to become durable, which a world without files lacks."""
        if isinstance(event, e.MergeCompleted):
            event = replace(event, journal_seconds=JOURNAL_S)
        super().tell(event)

    # ── core.effects.Shell, where it differs from the world's ─────────────────────────────────────────────────────

    def resolve_command(self, effect: f.ResolveCommand) -> None:
        self._resolve(effect.command, effect.accepted, effect.detail)

    def place_island(self, effect: f.PlaceIsland) -> None:
        """Place an island. Its stopped process, if any, is over."""
        self._stopped_until.pop(effect.island, None)
        self._go_on_stepping(effect.island)
        super().place_island(effect)

    # ── commands ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _hear(self, taken: Taken) -> None:
        about = (self.now, taken.command, taken.caller)
        if not isinstance(taken.request, Inject):
            self.tell(e.CommandRequested(*about, taken.request))
            return
        request, island = taken.request, taken.request.island or IslandId("")
        host = self.latest(island) if island else None
        struck = not island or (host is not None and host.alive)
        if struck:
            incarnation = host.process.incarnation if host is not None else Incarnation(0)
            numbers = (request.duration, request.bytes_per_second, request.payloads)
            self.tell(e.FaultInjected(*about, request.fault, island, incarnation, *numbers, host=request.host))
        if request.fault == "kill":
            self.tell(e.CommandRequested(*about, Kill(island)))
            return
        if struck and request.fault in ("stop", "continue"):
            self._stop(island, request.duration)
        self._resolve(taken.command, struck, f"{request.fault} {island}" if struck else f"{island} has no process")

    def _resolve(self, command: CommandId, accepted: bool, detail: str) -> None:
        self.commands[command] = self.commands[command].resolved(accepted, detail)

    def _stop(self, island: IslandId, duration: float) -> None:
        """Stop an island from stepping for a while. It still answers, so it is not missed; other faults are only
        reported.
        """
        self._stopped_until[island] = self.now + duration
        self._change_capacity(Capacity(self.now, island, 0.0))
        self.later(duration, partial(self._go_on_stepping, island))

    def _go_on_stepping(self, island: IslandId) -> None:
        if self.now >= self._stopped_until.get(island, 0.0):
            self._change_capacity(Capacity(self.now, island, 1.0))
