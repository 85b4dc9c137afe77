"""The core's entry point: events in, effects out.

    effects = core.handle(event)

Whoever drives it (live, simulated, replayed, recovered) carries the effects out in order and hands what comes of them back
as events. The same events in the same order always give the same effects: there is no clock, no chance and no I/O here.

    job_life        start, end, operators          island_life     be placed, catch up, be suspect, be lost
    scaling         more islands, or fewer           recovery       go on after the synchroniser's own death
    fragment_life   contribute, merge, adopt       checkpoints     take one, keep the latest
    rollback        back to an earlier one         evaluation      measure Θ on the held-out split
    departure       an island's node is about to go  salvage        go on from what islands hold
    state           what is remembered
"""

from __future__ import annotations

from typing import assert_never

from orchestrator.core import (
    checkpoints,
    commands,
    evaluation,
    events,
    fragment_life,
    island_life,
    job_life,
    messages,
    salvage,
    saving,
)
from orchestrator.core.effects import Effect
from orchestrator.core.state import JobState
from orchestrator.core.vocabulary import (
    FIRST_EPOCH,
    Epoch,
    GraceTimer,
    Instant,
    IslandTimer,
    JobPhase,
    JobPolicy,
    JobTimer,
)
from orchestrator.errors import InternalError

SETTLING_PASSES_MAX = 8
"""How many passes of ``job_life.settle`` in a row may decide something after one event.

Each pass moves the job's end one step forward, and no step repeats: begin to end, discard the rounds below the quorum, begin
the last evaluation, finish. In a running job one pass promotes every standby that can be promoted. So four passes are the
most that a correct core needs; twice that leaves room for a new step. A core that needs more is in an endless loop.
"""


class Synchroniser:
    """All decisions about one job. Not thread-safe: one driver loop owns it."""

    state: JobState

    def __init__(self, policy: JobPolicy, epoch: Epoch = FIRST_EPOCH) -> None:
        self.state = JobState(policy, epoch)

    def handle(self, event: events.Event) -> tuple[Effect, ...]:
        """Decide what follows from ``event``. Safe with late and repeated events.

        Raises InternalError if the state does not settle within ``SETTLING_PASSES_MAX`` passes.
        """
        effects = self._dispatch(event)
        effects += self._settled(event.at)
        for _ in range(SETTLING_PASSES_MAX):
            more = job_life.settle(self.state, event)
            if not more:
                return tuple(effects)
            effects += [*more, *self._settled(event.at)]
        raise InternalError(
            detail=f"The job does not settle: {SETTLING_PASSES_MAX} passes after one event each decided something more, "
            f"the last one {', '.join(type(effect).__name__ for effect in more)}."
        )

    def _settled(self, now: Instant) -> list[Effect]:
        state = self.state
        return [*checkpoints.settle_rollback(state, now), *checkpoints.settle(state, now), *evaluation.settle(state)]

    def _dispatch(self, event: events.Event) -> list[Effect]:
        state = self.state
        if isinstance(event, events.CommandRequested):
            if event.command in state.commands:
                return []  # repeated under its own id
            state.commands.add(event.command)
            return self._requested(event)
        if isinstance(event, events.ContributionArrived):
            return fragment_life.contribution_arrived(state, event)
        if state.phase is JobPhase.FINISHED:
            return []
        match event:
            case events.IslandReported():
                return self._reported(event)
            case events.MergeCompleted():
                return fragment_life.merge_completed(state, event)
            case events.MergeFailed():
                return fragment_life.merge_failed(state, event)
            case events.ContributionUnusable():
                return fragment_life.contribution_unusable(state, event)
            case events.TimerFired():
                return self._timer_fired(event)
            case events.EvaluationCompleted() | events.EvaluationFailed():
                return evaluation.answered(state, event)
            case events.OuterStateSeeded():
                return [*evaluation.seeded(state, event), *island_life.seeded(state, event)]
            case events.JobStarted():
                return job_life.started(state, event)
            case events.SynchroniserRestarted():
                return job_life.restarted(state, event)
            case saving.CheckpointTaken():
                return checkpoints.taken(state, event)
            case saving.JobResumed():
                return checkpoints.resumed(state, event)
            case saving.JobSalvaged():
                return salvage.salvaged(state, event)
            case saving.FragmentRestored():
                return checkpoints.fragment_restored(state, event)
            case saving.RollbackFailed():
                return checkpoints.rollback_failed(state, event)
            case saving.CheckpointFailed():
                return checkpoints.failed(state, event)
            case events.FaultInjected() | saving.ShardMoved():
                return []
            case _:
                return self._observed(event)

    def _observed(self, event: events.ObservedEvent) -> list[Effect]:
        """Decide on what the job's side saw of an island."""
        state = self.state
        island = island_life.current_island(state, event)
        if island is None:
            return island_life.fence(state, event)
        match event:
            case events.IslandPlaced():
                return island_life.placed(state, island, event)
            case events.PlacementFailed():
                return island_life.placement_failed(state, island, event)
            case events.PlacementDelayed():
                return island_life.placement_delayed(state, island, event)
            case events.ConnectionLost():
                return island_life.connection_lost(state, island, event)
            case events.ConnectionRestored():
                return island_life.connection_restored(state, island, event)
            case events.NoticeReceived():
                return island_life.noticed(state, island, event)
            case unknown:
                assert_never(unknown)

    def _reported(self, event: events.IslandReported) -> list[Effect]:
        """Decide on what an island reported of itself."""
        state, report, now = self.state, event.report, event.at
        if isinstance(report, messages.Adopted):  # of any incarnation: it tells how long synchronising takes
            return fragment_life.fragment_adopted(state, report, now)
        island = island_life.current_island(state, event)
        if island is None:
            return island_life.fence(state, event)
        match report:
            case messages.Progress():
                return island_life.progressed(state, island, report)
            case messages.Overdue():
                return island_life.step_overdue(state, island, report, now)
            case messages.Saved() | messages.NotSaved():
                return checkpoints.island_answered(state, island, report, now)
            case messages.Ready():
                return island_life.ready(state, island, report)
            case messages.CaughtUp():
                return island_life.caught_up(state, island, report, now)
            case messages.CatchUpFailure():
                return island_life.catch_up_failed(state, island, report, now)
            case messages.Flushed():
                return island_life.flushed(state, island, now)
            case messages.Drained():
                return island_life.drained(state, island, now)
            case unknown:
                assert_never(unknown)

    def _requested(self, event: events.CommandRequested) -> list[Effect]:
        state = self.state
        match event.request:
            case commands.Kill() as kill:
                return job_life.kill(state, event, kill)
            case commands.Drain() as drain:
                return job_life.drain(state, event, drain)
            case commands.Readd() as readd:
                return job_life.readd(state, event, readd)
            case commands.Scale() as scale:
                return job_life.scale(state, event, scale)
            case commands.Cordon() as cordon:
                return job_life.cordon(state, event, cordon)
            case commands.Uncordon() as uncordon:
                return job_life.uncordon(state, event, uncordon)
            case commands.Checkpoint():
                return checkpoints.requested(state, event)
            case commands.Rollback() as back:
                return checkpoints.request_rollback(state, event, back)
            case commands.Upgrade() as upgrade:
                return checkpoints.request_upgrade(state, event, upgrade)
            case commands.Cancel():
                return job_life.cancel(state, event)
            case commands.Finish():
                return job_life.finish_early(state, event)
            case commands.Set() as wanted:
                return job_life.change_settings(state, event, wanted)
            case commands.Pause() as pause:
                return job_life.pause(state, event, pause)
            case commands.Continue() as going_on:
                return job_life.go_on(state, event, going_on)
            case unknown:
                assert_never(unknown)

    def _timer_fired(self, event: events.TimerFired) -> list[Effect]:
        state, serial = self.state, event.serial
        match event.timer:
            case GraceTimer(fragment):
                return fragment_life.grace_over(state, fragment, serial, event.at)
            case IslandTimer() as timer:
                return island_life.timer_fired(state, timer, serial, event.at)
            case JobTimer.FLUSH:
                return job_life.flush_timed_out(state, serial, event.at)
            case JobTimer.CHECKPOINT_DUE:
                return checkpoints.due(state, serial, event.at)
            case JobTimer.CHECKPOINT_DEADLINE:
                return checkpoints.deadline_over(state, serial, event.at)
            case unknown:
                assert_never(unknown)
