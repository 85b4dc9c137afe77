"""The one view through which a job's process reads the core's state, whatever thread asks.

    pump     with view.changing(): driver.step(event) ──▶ the core's state, and the accounts folded from the same events
    others   view.phase, view.islands(), …               each under the same lock: what stands between two events
    status   with view.unchanged(timeout_s):              several reads that belong to one moment, accounts included

The rule: only the pump changes the state, inside ``changing``; everybody else, and the pump outside of it, reads through
this view. What it returns is frozen, or a copy. Before a view is made, the code that opens the job's files has the core to
itself (``job_files``), and a snapshot is taken inside ``changing`` (``retry.SnapshotWriter``). A test holds this.

Beside it are the job's commands with their outcomes, which a status shows together with that state (``CommandTable``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from orchestrator.core import invariants
from orchestrator.core.commands import ChangedSettings, island_of, kind_of
from orchestrator.core.effects import ResolveCommand
from orchestrator.core.events import FaultInjected
from orchestrator.core.island_record import Island
from orchestrator.core.messages import Announcement, MergedWork
from orchestrator.core.state import Checkpoints, JobState
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import (
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    IslandState,
    JobOutcome,
    JobPhase,
    Version,
    offer_number,
)
from orchestrator.status import CheckpointFacts, CommandStatus, CoreStatus, FragmentStatus, IslandStatus, SettingsNow
from orchestrator.tape.replay import Recovered

FOREVER = -1.0


ISLANDS_PER_EVENT = 8
"""A check looks at every island, so with more islands it is made after several events: its cost per event is bounded."""


class StateView:
    """``island_ids`` are those of the job's policy, standbys included: they never change, and need no lock."""

    def __init__(self, core: Synchroniser) -> None:
        self._core = core
        self._checked: dict[IslandId, Island] = {}
        self._lock = threading.RLock()  # reads inside ``unchanged`` and ``changing`` take it again
        self.island_ids = tuple(core.state.islands)
        self.events_per_check = max(1, len(self.island_ids) // ISLANDS_PER_EVENT)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Lock the state while the pump changes it. Readers wait until the event is decided and recorded."""
        with self._lock:
            yield

    @contextmanager
    def unchanged(self, timeout_s: float = FOREVER) -> Iterator[bool]:
        """Nothing changes inside. False, and no promise, where the pump was still at one event after ``timeout_s``."""
        held = self._lock.acquire(timeout=timeout_s)
        try:
            yield held
        finally:
            if held:
                self._lock.release()

    def check(self) -> None:
        """Raise InternalError where the core's invariants do not hold."""
        with self._lock:
            invariants.check(self._core.state, self._checked)

    @property
    def phase(self) -> JobPhase:
        with self._lock:
            return self._core.state.phase

    @property
    def seeded(self) -> bool:
        """Return whether there is Θ."""
        with self._lock:
            return self._core.state.seeded

    @property
    def outcome(self) -> JobOutcome | None:
        with self._lock:
            return self._core.state.outcome

    def status(self, at: Instant, trained: Mapping[IslandId, int]) -> CoreStatus:
        """Return the core's part of the job's status. ``trained`` has the tokens of islands, as in ``core_status``."""
        with self._lock:
            return core_status(self._core.state, at, trained)

    def islands(self) -> dict[IslandId, Island]:
        with self._lock:
            return dict(self._core.state.islands)

    def incarnation_of(self, island: IslandId) -> Incarnation:
        with self._lock:
            return self._core.state.islands[island].incarnation

    def announcement(self, fragment: FragmentId, version: Version) -> Announcement | None:
        """Return what islands are told of the fragment's present version, but for its digest; None if another is present."""
        with self._lock:
            current, islands = self._core.state.rounds[fragment], self._core.state.islands.values()
            if current.version != version:
                return None
            merged = [
                MergedWork(i.id, i.incarnation, offer_number(i.current.merged_offer[fragment]))
                for i in islands
                if fragment in i.current.merged_offer
            ]
            return Announcement(fragment, version, "", current.step, tuple(merged))

    def step_counts(self) -> dict[IslandId, int]:
        """Return how many steps each island has trained, those of its earlier incarnations included."""
        with self._lock:
            state = self._core.state
            pairs = [(i, state.totals_of(i)) for i in state.islands.values()]
            return {island.id: island.steps_before + (totals.steps_total if totals else 0) for island, totals in pairs}

    def changed(self) -> ChangedSettings:
        """Return the settings that operators changed."""
        with self._lock:
            return self._core.state.changed

    def checkpoints(self) -> Checkpoints:
        with self._lock:
            return self._core.state.checkpoints


def core_status(state: JobState, at: Instant, trained: Mapping[IslandId, int] = MappingProxyType({})) -> CoreStatus:
    """Return what the status of a job says of its core, in a copy that is safe to keep.

    ``trained`` has the tokens of each island by the ledger, which also counts what a lost incarnation reported with an
    adoption. Without it they are counted by reports of progress.
    """
    return CoreStatus(
        at=at,
        phase=state.phase.value,
        outcome=state.outcome.value if state.outcome else None,
        reason=state.reason,
        pause_reason=state.pause_reason(),
        paused=state.paused is not None,
        epoch=state.epoch,
        quorum=state.quorum,
        settings=SettingsNow(
            lr_ratio=state.lr_ratio,
            quorum=state.policy.quorum,
            grace=state.policy.grace_cap_steps,
            interval=state.policy.sync_interval_steps,
            changed=state.changed.count > 0,
            changes=state.changed.count,
            cost=state.changed.cost_max,
        ),
        checkpoint=_checkpoint_facts(state, at),
        token_budget=state.policy.token_budget,
        tokens_trained=state.tokens_trained,
        global_version=state.global_version,
        cordoned=sorted(state.cordoned),
        islands=[_island_status(state, island, trained.get(island.id)) for island in state.islands.values()],
        fragments=[
            FragmentStatus(
                fragment=current.fragment,
                version=current.version,
                phase=current.phase.value,
                offered=sorted(current.offered),
                step=current.step,
            )
            for current in state.rounds
        ],
    )


def _checkpoint_facts(state: JobState, at: Instant) -> CheckpointFacts:
    own, policy, trouble = state.checkpoints, state.policy.checkpoints, None
    retry_at = own.retry_at if own.retry_at > at else None
    if own.failures_in_a_row:
        failed = f"the last {own.failures_in_a_row} checkpoints" if own.failures_in_a_row > 1 else "the last checkpoint"
        if state.paused is not None:
            again = "the next one is tried once the job continues"
        else:
            again = (
                f"the next one begins in {retry_at - at:.0f} s at the earliest" if retry_at else "the next one is tried"
            )
            again += ", or at once by `atoll checkpoint JOB`"
        trouble = f"{failed} failed: {own.failure.rstrip('.')}; {again}"
    return CheckpointFacts(
        scheduled=bool(policy.every_merges or policy.every_s),
        taken_at=own.taken_at,
        bytes=own.byte_count,
        failures=own.failures,
        failures_in_a_row=own.failures_in_a_row,
        retry_at=retry_at,
        trouble=trouble,
    )


def _island_status(state: JobState, island: Island, tokens: int | None) -> IslandStatus:
    report = state.reports.get(island.id)
    totals = state.totals_of(island)
    if tokens is None:
        tokens = island.tokens_before + (totals.tokens_total if totals else 0)
    return IslandStatus(
        island=island.id,
        node_group=island.plan.node_group,
        region=island.plan.region,
        accelerator_count=island.plan.accelerator_count,
        state=island.state.value,
        reason=island.reason,
        incarnation=island.incarnation,
        node=island.current.node,
        pid=island.current.pid,
        step=report.step if report else island.step,
        steps_total=island.steps_before + (totals.steps_total if totals else 0),
        tokens_total=tokens,
        step_seconds=report.step_seconds_median if report else None,
        loss=report.loss if report else None,
        learning_rate=report.learning_rate if report else None,
        gradient_norm=report.gradient_norm if report else None,
        mfu_ratio=report.mfu_ratio if report and island.state is IslandState.TRAINING else None,
        last_merge_at=island.last_merge_at,
        restarts=island.restarts,
        flag=island.health_note,
        quarantines=island.quarantines,
        standby=island.id in state.standbys,
        overdue_s=island.current.overdue_s,
    )


def recovered_commands(past: Recovered) -> dict[str, CommandStatus]:
    """Return the commands that reached the tape, by id."""
    by_id: dict[str, CommandStatus] = {}
    for name, (event, answer) in past.pending.commands.items():
        if isinstance(event, FaultInjected):
            command = pending_command(event.kind, event.island, event.caller, event.at)
        else:
            command = pending_command(kind_of(event.request), island_of(event.request), event.caller, event.at)
        if answer is not None:
            command = command.resolved(answer.accepted, answer.detail)
        elif isinstance(event, FaultInjected):
            command = command.resolved(accepted=True, detail="")
        by_id[name] = command
    return by_id


def pending_command(kind: str, island: str | None, caller: str, at: Instant) -> CommandStatus:
    """Return a command that has no answer yet."""
    return CommandStatus(kind=kind, island=island, caller=caller, at=at, accepted=None, detail="")


class CommandTable:
    """The commands that this job was given, each with its outcome once there is one, as ``status`` shows them.

    An outcome is shown once its record is durable: ``count`` is that of the last record, ``durable_count`` that of the last
    durable one.
    """

    def __init__(
        self,
        state: StateView,
        statuses: dict[str, CommandStatus],
        count: Callable[[], int],
        durable_count: Callable[[], int],
    ) -> None:
        self._state, self._statuses = state, statuses
        self._count, self._durable_count = count, durable_count
        self._unsafe: dict[str, tuple[int, CommandStatus]] = {}
        """Commands as they were before the record with this number gave them an outcome."""

    def add(self, command: str, status: CommandStatus) -> bool:
        """Note the command. Returns whether it is new."""
        with self._state.unchanged():
            return self._statuses.setdefault(command, status) is status

    def resolve(self, effect: ResolveCommand) -> None:
        """Note the outcome of a command."""
        with self._state.unchanged():
            if (status := self._statuses.get(effect.command)) is not None:
                self._unsafe[effect.command] = (self._count(), status)
                self._statuses[effect.command] = status.resolved(effect.accepted, effect.detail)

    def statuses(self) -> dict[str, CommandStatus]:
        """Return a copy of all of them, by their ids."""
        with self._state.unchanged():
            durable = self._durable_count()
            self._unsafe = {name: unsafe for name, unsafe in self._unsafe.items() if unsafe[0] > durable}
            return {**self._statuses, **{name: before for name, (_, before) in self._unsafe.items()}}
