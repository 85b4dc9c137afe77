"""The handlers of events in an island's life: it is placed, catches up, trains, becomes suspect, is lost.

Handlers take the job's state and an event or report, change the state, and return effects. The transitions themselves, for
one island, are in ``island_record``.

**Notices.** A cloud, a cluster's queue or an operator announces that an island's node is about to go.

    TRAINING ──notice──▶ DRAINING ──all its work is merged, or its node is about to go──▶ LOST ──▶ PLACING, elsewhere
    placing, starting, catching up, standing by ──notice──▶ LOST ──▶ PLACING, elsewhere        (it has no work to give)

As in a drain, the island ends its step, offers its work, and ends when versions hold that work. Unlike in a drain it stays
wanted, so its next incarnation is placed as soon as the drain is over, in the process of a standby if there is one. No
failure is counted and no back-off waited for, because the node goes and nothing is wrong with the island. The quorum is not
considered, because the node goes in any case. If the notice is shorter than a round, the incarnation ends before a version
holds its work; the synchroniser has the offers by then and merges them when their rounds close. Which nodes there are is
not known here: the controller keeps the next incarnation off nodes that are about to go.

**Standbys** are processes that wait to take a lost island's place, so that it trains again within seconds.

    PLACING ──▶ STARTING ──▶ CATCHING_UP ──▶ STANDBY ──an island of its kind is lost──▶ its process is the island's
       ▲                                        │                                       next incarnation
       └──────placed again, as its own next incarnation

A standby is placed, started, suspected and placed again as an island is. It has no data, trains nothing, counts towards no
quorum and gives no state to others. It takes a state as any island does, and gets every publication. A promoted standby
continues from the state that it holds, under the island's name, shard and cursor.

An island does not wait for a back-off if a standby of its kind (node group and accelerators) stands by. Promotion honours
cordons, as every placement does. Incarnations in a row that end without a contribution are counted all the same, so an
island that kills every process is given up in the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.core import fragment_round, island_record, salvage
from orchestrator.core.effects import (
    AdjustIsland,
    DrainIsland,
    Effect,
    FlushIsland,
    FromCheckpoint,
    FromLeft,
    FromPeers,
    FromStandby,
    FromSynchroniser,
    HoldIsland,
    KillIsland,
    ReleasePayload,
    SetTimer,
    StandBy,
    StartTraining,
    StopIsland,
    state_from,
)
from orchestrator.core.events import (
    ConnectionLost,
    ConnectionRestored,
    IslandEvent,
    IslandPlaced,
    IslandReported,
    NoticeReceived,
    OuterStateSeeded,
    PlacementDelayed,
    PlacementFailed,
)
from orchestrator.core.fragment_life import advance_all, publish_newer
from orchestrator.core.island_record import WITH_PROCESS, Island
from orchestrator.core.messages import CatchUpFailure, CaughtUp, Overdue, Progress, Ready
from orchestrator.core.state import JobState
from orchestrator.core.vocabulary import (
    FailureExtent,
    Instant,
    IslandId,
    IslandState,
    IslandTimer,
    IslandTimerKind,
    JobPhase,
    JobTimer,
    ReleaseReason,
    RoundPhase,
    Version,
    replace,
)

MARGIN_S = 2.0
"""End the process this long before its node goes, so that its next incarnation need not wait for a loss."""
SHARE_MAX = 0.5
"""The largest share of a notice that the margin may take: a notice of one second leaves half of it to give the work."""


def current_island(state: JobState, event: IslandEvent) -> Island | None:
    """Return the event's island, or None if the event is from an incarnation that is over."""
    island = state.islands.get(event.island)
    if island is None or island.incarnation != event.incarnation or island.state not in WITH_PROCESS:
        return None
    return island


def fence(state: JobState, event: IslandEvent) -> list[Effect]:
    """End a process that was replaced and shows up."""
    lives = isinstance(event, IslandReported) and isinstance(event.report, (Ready, CaughtUp, Progress))
    if lives or isinstance(event, (IslandPlaced, ConnectionRestored)):
        return [StopIsland(event.island, event.incarnation, "this incarnation is over")]
    return []


def place(state: JobState, island: Island, reason: str) -> list[Effect]:
    """Begin the island's next incarnation, or hold it until its node group takes islands again."""
    if island.plan.node_group in state.cordoned:
        cordon_reason = f"node group {island.plan.node_group} is cordoned"
        state.islands[island.id] = island_record.cordoned(island, cordon_reason)
        return [HoldIsland(island.id, island.plan.node_group, cordon_reason)]
    after, effects = island_record.place(island, state.reports.pop(island.id, None), reason)
    state.islands[island.id] = after
    return list(effects)


def placed(state: JobState, island: Island, event: IslandPlaced) -> list[Effect]:
    if _is_or_was(island, IslandState.PLACING) or island.state is IslandState.WAITING:
        state.islands[island.id] = island_record.placed(island, event)
    if island.current.kill_reason:  # killed before there was a process
        return [KillIsland(island.id, island.incarnation, island.current.kill_reason)]
    if _survived(state.islands[island.id]):
        state.islands[island.id] = island_record.ready(state.islands[island.id])
        return _found(state, state.islands[island.id], event.at) if state.seeded else []
    return []


def _found(state: JobState, island: Island, now: Instant) -> list[Effect]:
    """Let an island that survived train on, with the settings of the job."""
    return [*adjustment(state, island), *salvage.found(state, island, now)]


def _survived(island: Island) -> bool:
    """Return whether the process that was placed trained on while the synchroniser was lost."""
    return (
        island.state is IslandState.STARTING
        and island.survivor is not None
        and island.survivor.incarnation == island.incarnation
    )


def placement_delayed(state: JobState, island: Island, event: PlacementDelayed) -> list[Effect]:
    """Note that the island waits for a node. Nothing is to be done: its process starts once there is one."""
    if island.state in (IslandState.PLACING, IslandState.WAITING) and not island.current.kill_reason:
        state.islands[island.id] = island_record.waiting(island, event.reason)
    return []


def placement_failed(state: JobState, island: Island, event: PlacementFailed) -> list[Effect]:
    """Lose the island, and stop its process in case one exists after all."""
    return _lose(state, island, event.reason, event.at, dead=False)


def ready(state: JobState, island: Island, report: Ready) -> list[Effect]:
    if not _is_or_was(island, IslandState.STARTING):
        return []  # said twice: it has a state by now, or is being given one
    state.islands[island.id] = island_record.ready(island, report)
    return catch_up(state, island.id) if state.seeded else []


def seeded(state: JobState, event: OuterStateSeeded) -> list[Effect]:
    """Let islands that were ready before Θ existed take their state, and those that survived go on with theirs."""
    state.seeded, state.parameter_count = True, event.parameter_count
    waiting = [i for i in state.islands.values() if i.current.ready and i.state is IslandState.STARTING]
    effects: list[Effect] = []
    for island in sorted(waiting, key=lambda island: not _survived(island)):  # these can give a state to the others
        effects += _found(state, island, event.at) if _survived(island) else catch_up(state, island.id)
    return effects


def catch_up(state: JobState, island_id: IslandId) -> list[Effect]:
    """Give the island a state: what its standby's process holds, its own from the checkpoint, the one that its earlier
    incarnation left on its machine, or a healthy peer's.

    If there is none of these, the island gets the synchroniser's parameters.
    """
    island = state.islands[island_id]
    if island.current.process is not None:
        reason = f"going on from what the standby {island.current.process[0]} holds"
        state.islands[island_id] = island_record.catching_up(island, (), reason)
        return [state_from(FromStandby(), island.id, island.incarnation, island.steps_before, reason)]
    if island.saved and island.id not in island.current.failed_donors:
        reason = "taking its state from the checkpoint"
        state.islands[island_id] = island_record.catching_up(island, (island.id,), reason)
        return [state_from(FromCheckpoint(), island.id, island.incarnation, island.steps_before, reason)]
    if (from_left := _continue_from_left(state, island)) is not None:
        return from_left
    steps = {other: state.step_of(other) for other in state.islands.values()}
    donors = island_record.choose_donors(steps, island, state.policy.donors_max) if state.global_version else []
    donor_names = " and ".join(f"{donor.id} (step {steps[donor]})" for donor in donors) or "the synchroniser"
    reason = f"taking a state from {donor_names}"
    state.islands[island_id] = island_record.catching_up(island, tuple(donor.id for donor in donors), reason)
    lives = tuple((donor.id, donor.incarnation) for donor in donors)
    source = FromPeers(lives[0], lives[1:]) if lives else FromSynchroniser()
    return [state_from(source, island.id, island.incarnation, island.steps_before, reason)]


def _continue_from_left(state: JobState, island: Island) -> list[Effect] | None:
    """Give the island the state that an earlier incarnation left, or return None if it is no use.

    What rounds still hold of that incarnation is withdrawn first, because the island will offer this work itself. If a merge
    under way has some of it, the state is not used: part of its work would be merged twice.
    """
    left = island_record.usable_left(island, [current.version for current in state.rounds])
    if left is None or island.id in island.current.failed_donors or island.id in state.standbys:
        return None
    holding = [current for current in state.rounds if island.id in current.offered]
    if any(current.phase is RoundPhase.MERGING for current in holding):
        return None
    effects: list[Effect] = []
    for current in holding:
        effects.append(ReleasePayload(current.offered[island.id].payload, ReleaseReason.SUPERSEDED))
        state.rounds[current.fragment] = fragment_round.withdraw(current, island.id)
    reason = f"continuing from the state that incarnation {left.incarnation} left on {island.current.node}"
    state.islands[island.id] = island_record.catching_up(island, (island.id,), reason)
    cursor = island_record.cursor_after(island, left)
    return [*effects, state_from(FromLeft(left.incarnation), island.id, island.incarnation, cursor, reason)]


def caught_up(state: JobState, island: Island, report: CaughtUp, now: Instant) -> list[Effect]:
    if not _is_or_was(island, IslandState.CATCHING_UP):
        return []
    if report.left is not None:
        island = state.islands[island.id] = island_record.continued(island, report.left)
    if state.phase is not JobPhase.RUNNING:
        state.islands[island.id] = replace(island, reason="the job is ending")
        return []
    newer = publish_newer(state, island, report.versions, now)
    if island.id in state.standbys:
        state.islands[island.id] = island_record.standing_by(island, report)
        return [StandBy(island.id, island.incarnation), *newer]
    state.islands[island.id] = island_record.caught_up(island, report)
    # alone, it need not wait for islands that leave: what it gave in its former process may be all there is to merge
    closes = advance_all(state, now) if state.live == {island.id} else []
    return [*adjustment(state, island), StartTraining(island.id, island.incarnation, state.anchor), *newer, *closes]


def adjustment(state: JobState, island: Island) -> list[Effect]:
    """Give the island the settings of the job, if an operator has ever changed one."""
    if not state.changed.count:
        return []
    settings = (state.lr_ratio, state.policy.sync_interval_steps, state.changed)
    return [AdjustIsland(island.id, island.incarnation, *settings)]


def catch_up_failed(state: JobState, island: Island, report: CatchUpFailure, now: Instant) -> list[Effect]:
    if not _is_or_was(island, IslandState.CATCHING_UP):
        return []
    if report.donor is None and not island.current.donors:
        return _lose(state, island, f"no state from the synchroniser: {report.reason}", now, dead=False)
    if report.donor is None or report.donor not in island.current.donors:
        return []  # it is taking one from others by now
    state.islands[island.id] = island_record.failed_by(island, report.donor)
    return catch_up(state, island.id)


def progressed(state: JobState, island: Island, report: Progress) -> list[Effect]:
    """Keep the island's latest report. Totals only grow, so a repeated or reordered report changes nothing."""
    latest = state.totals_of(island)
    if latest is not None and report.tokens_total < latest.tokens_total:
        return []
    state.reports[island.id] = report
    if island.current.overdue_s:
        state.islands[island.id] = island_record.steps_again(island)
    if report.step_seconds_median > 0:
        state.pace = state.pace.with_step(report.step_seconds_median, state.policy.moving_average_decay)
    return []


def step_overdue(state: JobState, island: Island, report: Overdue, now: Instant) -> list[Effect]:
    """Note a step that takes far longer than usual. Beyond the limit, lose the island and stop its process.

    Islands that take a state from it get another donor: they would wait for a boundary that never comes.
    """
    limit_s = state.policy.step_limits.limit(report.usual_seconds)
    steps = _is_or_was(island, IslandState.TRAINING) or _is_or_was(island, IslandState.DRAINING)
    if limit_s is None or not steps:
        return []
    after = island_record.overdue(island, report, limit_s)
    state.islands[island.id] = after
    if report.seconds < limit_s:
        return []
    return [*_lose(state, after, after.reason, now, dead=False), *_leave_donor(state, island.id)]


def flushed(state: JobState, island: Island, now: Instant) -> list[Effect]:
    """Note that the island gave its last work. While the job runs, replace its process, which steps no more.

    In a running job the order to end was one of a synchroniser whose latest records are lost, the order among them.
    """
    if state.phase is JobPhase.RUNNING:
        return depart(state, island, "it had ended for an order that was lost with a synchroniser", now)
    state.islands[island.id] = island_record.flushed(island, "gave all its work")
    return advance_all(state, now)


def drained(state: JobState, island: Island, now: Instant) -> list[Effect]:
    """End a drain. If the drain was cancelled after the island had ended, place the island again without a failure."""
    if state.phase is not JobPhase.RUNNING:
        return flushed(state, island, now)
    if island.wanted and _is_or_was(island, IslandState.DRAINING):
        return depart(state, island, "all its work is merged", now)
    after = island_record.drained(island)
    state.islands[island.id] = after
    stop = StopIsland(island.id, island.incarnation, after.reason)
    again = place(state, after, "re-added while it drained") if island.wanted else []
    return [stop, *again, *advance_all(state, now)]


def connection_lost(state: JobState, island: Island, event: ConnectionLost) -> list[Effect]:
    if event.dead:
        final = event.extent is not FailureExtent.INCARNATION
        return [*_lose(state, island, event.reason, event.at, dead=True, final=final), *_leave_donor(state, island.id)]
    if island.state is IslandState.SUSPECT:
        return []
    serial = state.next_serial()
    state.islands[island.id] = island_record.suspected(island, event.reason, serial, event.at)
    timeout_s = state.policy.cut_off_timeout_s if event.cut_off else state.policy.suspect_timeout_s
    timer = SetTimer(IslandTimer(IslandTimerKind.SUSPECT, island.id), serial, event.at + timeout_s)
    return [timer, *advance_all(state, event.at), *_leave_donor(state, island.id)]


def connection_restored(state: JobState, island: Island, event: ConnectionRestored) -> list[Effect]:
    if island.state is not IslandState.SUSPECT:
        return []
    after = island_record.restored(island)
    state.islands[island.id] = after
    waits_for_state = after.state is IslandState.STARTING and after.current.ready
    if (waits_for_state and state.seeded) or after.state is IslandState.CATCHING_UP:
        return catch_up(state, island.id)
    if after.state not in (IslandState.TRAINING, IslandState.STANDBY, IslandState.DRAINING):
        return []
    missed = publish_newer(state, island, tuple(Version(0) for _ in state.rounds), event.at)
    if after.state is IslandState.STANDBY:
        return [*missed]
    order = StartTraining if after.state is IslandState.TRAINING else DrainIsland
    command = FlushIsland if state.phase is JobPhase.FINISHING else order
    orders = [*adjustment(state, island), command(island.id, island.incarnation)]
    # Once a leaving island answers, rounds that waited for nobody while it was silent may close on its work.
    return [*missed, *orders, *advance_all(state, event.at), *flush_deadline(state, event.at)]


def flush_deadline(state: JobState, now: Instant) -> list[Effect]:
    """Set how long to wait, from now, for last work while the job ends."""
    if state.phase is not JobPhase.FINISHING:
        return []
    state.flush_serial = state.next_serial()
    return [SetTimer(JobTimer.FLUSH, state.flush_serial, now + state.policy.flush_timeout_s)]


def timer_fired(state: JobState, timer: IslandTimer, serial: int, now: Instant) -> list[Effect]:
    """End a back-off, a suspicion or a departure. A timer whose serial is not the island's latest is ignored."""
    island = state.islands.get(timer.island)
    if island is None or island.current.timer_serial != serial or state.phase is not JobPhase.RUNNING:
        return []
    if timer.kind is IslandTimerKind.BACKOFF and island.state is IslandState.LOST:
        return place(state, island, island.reason)
    if timer.kind is IslandTimerKind.DEPARTURE:
        return time_is_up(state, island, now)
    if timer.kind is IslandTimerKind.SUSPECT and island.state is IslandState.SUSPECT:
        reason = f"no answer for {now - island.current.suspect_since:.0f} s ({island.reason})"
        return _lose(state, island, reason, now, dead=False)
    return []


def noticed(state: JobState, island: Island, event: NoticeReceived) -> list[Effect]:
    """Drain the island, or end it at once if it has no work to give. A repeated notice changes nothing."""
    if state.phase is not JobPhase.RUNNING:
        return []  # it gives what it has in any case, and is not placed again
    suspect = island.state is IslandState.SUSPECT
    answering = island.current.state_before_suspect if suspect else island.state
    reason = event.cause if event.seconds is None else f"{event.cause}: its node goes in {event.seconds:.0f} s"
    if answering is IslandState.DRAINING:
        return []
    if answering is not IslandState.TRAINING or island.current.flushed:
        return depart(state, island, reason, event.at)
    if suspect:  # it drains as soon as it answers
        state.islands[island.id] = island_record.to_drain(island)
        return advance_all(state, event.at)
    serial = state.next_serial()
    state.islands[island.id] = island_record.handing_over(island, f"{reason}; its work is to be merged", serial)
    effects: list[Effect] = [DrainIsland(island.id, island.incarnation)]
    if event.seconds is not None:
        effects.append(SetTimer(IslandTimer(IslandTimerKind.DEPARTURE, island.id), serial, _ends_at(event)))
    return [*effects, *advance_all(state, event.at)]


def time_is_up(state: JobState, island: Island, now: Instant) -> list[Effect]:
    """End the incarnation before its node goes, although versions do not hold all its work yet."""
    if island.state is not IslandState.DRAINING or not island.wanted:
        return []
    return depart(state, island, "its node goes before all its work is merged", now)


def depart(state: JobState, island: Island, reason: str, now: Instant) -> list[Effect]:
    """End the incarnation. A timer that is due at once places the next one, or a standby takes over."""
    after, effects = island_record.depart(island, reason, now, state.next_serial())
    state.islands[island.id] = after
    return [*effects, *advance_all(state, now)]


def promote(state: JobState) -> list[Effect]:
    """Continue each lost island in the process of a standby of its kind, and place that standby again.

    A process that starts takes processor time. So the standby's waits until the island has made its first steps.
    """
    effects: list[Effect] = []
    for island, standby in list(_matches(state)):
        if island.state is IslandState.WAITING:
            effects.append(StopIsland(island.id, island.incarnation, f"the standby {standby.id} takes its place"))
        process = (standby.id, standby.incarnation)
        reason = f"goes on as the standby {standby.id}"
        after, taking = island_record.place(island, state.reports.pop(island.id, None), reason, process)
        state.islands[island.id] = after
        wait_s = state.policy.standby_wait_s
        why = f"its process is {island.id} now" + (f"; placing again in {wait_s:g} s" if wait_s else "")
        next_standby, placing = island_record.place(standby, None, why, wait_s=wait_s)
        state.islands[standby.id] = next_standby
        effects += [*taking, *placing]
    return effects


def _matches(state: JobState) -> Iterator[tuple[Island, Island]]:
    idle = [i for i in map(state.islands.__getitem__, sorted(state.standbys)) if _stands_by(i)]
    for plan in state.policy.islands:
        island = state.islands[plan.island]
        away = island.state in (IslandState.LOST, IslandState.WAITING)
        waits = away and island.wanted and island.incarnation > 0
        if not waits or plan.node_group in state.cordoned:
            continue
        standby = next((other for other in idle if _kind(other) == _kind(island)), None)
        if standby is not None:
            idle.remove(standby)
            yield island, standby


def _stands_by(standby: Island) -> bool:
    return standby.state is IslandState.STANDBY and not standby.current.kill_reason


def _kind(island: Island) -> tuple[str, int]:
    return island.plan.node_group, island.plan.accelerator_count


def _ends_at(event: NoticeReceived) -> Instant:
    seconds = max(0.0, event.seconds or 0.0)
    return event.at + seconds - min(MARGIN_S, SHARE_MAX * seconds)


def _is_or_was(island: Island, expected: IslandState) -> bool:
    """Return whether the island is in this state, or was before it became suspect. Its own report outweighs a suspicion."""
    return island.state is expected or (
        island.state is IslandState.SUSPECT and island.current.state_before_suspect is expected
    )


def _lose(
    state: JobState, island: Island, reason: str, now: Instant, *, dead: bool, final: bool = False
) -> list[Effect]:
    serial = state.next_serial()
    after, effects = island_record.lose(island, state.policy, reason, now, serial, dead=dead, final=final)
    state.islands[island.id] = after
    return [*effects, *advance_all(state, now)]


def _leave_donor(state: JobState, donor: IslandId) -> list[Effect]:
    """Give another donor to islands that take a state from this one, which may be stopped for long."""
    if state.phase is not JobPhase.RUNNING:
        return []
    effects: list[Effect] = []
    for island in list(state.islands.values()):
        if island.state is IslandState.CATCHING_UP and donor in island.current.donors:
            state.islands[island.id] = island_record.failed_by(island, donor)
            effects += catch_up(state, island.id)
    return effects
