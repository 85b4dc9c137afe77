"""Checkpoints and rollbacks: when a checkpoint is taken, which islands are in it, and how a job returns to one.

    due, or requested ──▶ OPEN ──all islands answered, are gone, or time is over──▶ SEALING ──▶ taken
                            └───────────────── Θ could not be saved, the job ends, we died ──▶ dropped

An island that dies, stops answering for good or cannot write is left out. A checkpoint with fewer inner optimizer states is
useful; one with half a state is not. Files and arrays are not known here.

After ``FAILURES_AT_ONCE`` failures in a row the cause will hardly pass by itself, so the schedule is suspended for
``BACK_OFF_S``, and for twice as long after each further failure. An operator's request is always tried.

**Rollback** returns to an earlier checkpoint while the job runs. Versions go on rising, with the checkpoint's parameters.

    requested ──▶ no round closes ──▶ merges under way end ──▶ every fragment is restored ──▶ rounds continue
                                                             └─ it cannot be read ──▶ rounds continue as they were

A restored fragment is the next version, with the parameters and momentum of the checkpoint. When islands adopt it,
everything that they trained since their last adoption is overwritten, whatever the job's rule of adoption, because it was
built on what is undone. Islands keep their inner optimizer state and their place in the data. A fragment whose newest
version the journal has lost is set back by one version in the same way, without a request.

**Upgrade** ends this synchroniser's process once a checkpoint is whole, so that a process of another release goes on.

    requested ──▶ a checkpoint is taken ──▶ HandOver ──▶ (next epoch, of the other release)
                                 └─ it fails ──▶ refused

Source: Chandy and Lamport, ACM TOCS 3 (1985); ``saving`` describes the cut.
"""

from __future__ import annotations

from orchestrator.core import commands, fragment_round, island_record
from orchestrator.core.effects import Effect, ReleasePayload, ResolveCommand, SetTimer
from orchestrator.core.events import CommandRequested
from orchestrator.core.fragment_life import advance_all, publish
from orchestrator.core.fragment_round import FragmentRound, UpdateNorms
from orchestrator.core.island_record import Island
from orchestrator.core.messages import NotSaved, Saved
from orchestrator.core.saving import (
    BeginCheckpoint,
    CheckpointFailed,
    CheckpointTaken,
    DropCheckpoint,
    FragmentRestored,
    FromJournal,
    HandOver,
    JobResumed,
    RestoreFragments,
    RollbackFailed,
    SavedPart,
    SealCheckpoint,
)
from orchestrator.core.state import JobState, OpenCheckpoint, OpenUpgrade, RetainedCheckpoint, Rollback
from orchestrator.core.vocabulary import (
    Duration,
    FragmentId,
    Instant,
    IslandState,
    JobPhase,
    JobTimer,
    Life,
    ReleaseReason,
    RoundPhase,
    Version,
    replace,
)

TIMEOUT_BASE_S = 60.0
STATE_BYTES_PER_PARAMETER = 12
"""A parameter and Adam's two moments, in float32: what most states have. An estimate is enough here."""
SLOWEST_BYTES_PER_S = 5_000_000
"""Of all that is saved together. An island that hangs is noticed by its silence, and not waited for as long."""
FAILURES_AT_ONCE = 3
BACK_OFF_S, BACK_OFF_MAX_S = 60.0, 3600.0
SAVES = (IslandState.TRAINING, IslandState.DRAINING)
"""Who has a state, and a loop that reaches a boundary."""
MAY_ANSWER = (*SAVES, IslandState.SUSPECT)


def requested(state: JobState, event: CommandRequested) -> list[Effect]:
    reason = _cannot(state)
    if reason:
        return [ResolveCommand(event.command, False, f"no checkpoint is taken: {reason}")]
    begun = begin(state, event.at)
    return [ResolveCommand(event.command, True, f"checkpoint {state.checkpoints.count} is being taken"), *begun]


def begin(state: JobState, now: Instant) -> list[Effect]:
    """Cut here: what is merging belongs to Θ, what is only offered to its island."""
    before = state.checkpoints
    versions = tuple(Version(r.version + (r.phase is RoundPhase.MERGING)) for r in state.rounds)
    islands = tuple((i.id, i.incarnation) for i in state.islands.values() if i.state in SAVES and not i.current.flushed)
    opened = OpenCheckpoint(before.count + 1, versions, frozenset(islands), state.next_serial())
    state.checkpoints = replace(before, count=opened.number, begun_at=state.global_version, open=opened)
    deadline = SetTimer(JobTimer.CHECKPOINT_DEADLINE, opened.serial, now + _timeout_s(state))
    return [BeginCheckpoint(opened.number, versions, islands), deadline, *_seal_if_complete(state, now)]


def first_due(state: JobState, now: Instant) -> list[Effect]:
    """When the job starts, and after each: set the clock by which checkpoints are due, if there is one."""
    every = state.policy.checkpoints.every_s
    if not every:
        return []
    state.checkpoints = replace(state.checkpoints, due_serial=state.next_serial())
    return [SetTimer(JobTimer.CHECKPOINT_DUE, state.checkpoints.due_serial, now + every)]


def due(state: JobState, serial: int, now: Instant) -> list[Effect]:
    """Begin the checkpoint that is due, and set the timer of the next one. An older timer is ignored."""
    if serial != state.checkpoints.due_serial or state.phase is not JobPhase.RUNNING:
        return []
    begun = [] if _cannot(state) or now < state.checkpoints.retry_at else begin(state, now)
    return [*begun, *first_due(state, now)]


def deadline_over(state: JobState, serial: int, now: Instant) -> list[Effect]:
    """Wait no longer for the islands that have not answered. An older timer is ignored."""
    opened = state.checkpoints.open
    if opened is not None and opened.serial == serial and not opened.sealing:
        state.checkpoints = replace(state.checkpoints, open=replace(opened, awaited=frozenset()))
        return _seal_if_complete(state, now)
    return []


def resumed(state: JobState, event: JobResumed) -> list[Effect]:
    """The job begins where the checkpoint ends. Repeated, by a synchroniser that died at once, it changes nothing."""
    if state.tokens_before is not None:
        return []
    state.tokens_before = event.tokens_trained
    for p, (version, step) in enumerate(zip(event.versions, event.steps, strict=True)):
        state.rounds[p] = FragmentRound(FragmentId(p), version, step)
    for saved in event.islands:
        island = state.islands[saved.island]
        state.islands[saved.island] = replace(island, saved=True, step=saved.step)
    state.checkpoints = replace(state.checkpoints, begun_at=state.global_version)
    return []


def island_answered(state: JobState, island: Island, report: Saved | NotSaved, now: Instant) -> list[Effect]:
    opened, life = state.checkpoints.open, (island.id, island.incarnation)
    if opened is None or opened.number != report.checkpoint or life not in opened.awaited:
        return []  # it is sealed without it, or gone
    saved, unsaved = opened.saved, opened.unsaved
    if isinstance(report, Saved):
        saved = tuple(sorted((*saved, SavedPart(*life, report.digest)), key=lambda part: part.island))
    else:
        unsaved = f"{island.id}: {report.reason}"
    answered = replace(opened, awaited=opened.awaited - {life}, saved=saved, unsaved=unsaved)
    state.checkpoints = replace(state.checkpoints, open=answered)
    return _seal_if_complete(state, now)


def taken(state: JobState, event: CheckpointTaken) -> list[Effect]:
    """It counts from here on, and the oldest beyond those to be kept do not."""
    before = state.checkpoints
    if any(checkpoint.number == event.checkpoint for checkpoint in before.retained):
        return []  # a repeated event
    if before.open is None or before.open.number != event.checkpoint:
        return [DropCheckpoint(event.checkpoint, "it was given up before it was whole")]
    every = (*before.retained, RetainedCheckpoint(event.checkpoint, before.open.versions))
    retained = every[-state.policy.checkpoints.keep :]
    state.checkpoints = replace(
        before,
        open=None,
        retained=retained,
        failures_in_a_row=0,
        failure="",
        retry_at=0.0,
        taken_at=event.at - event.seconds,
        byte_count=event.byte_count,
    )
    dropped = [DropCheckpoint(old.number, "newer ones are kept") for old in every[: len(every) - len(retained)]]
    return [*dropped, *_hand_over(state, event.checkpoint)]


def failed(state: JobState, event: CheckpointFailed) -> list[Effect]:
    before = state.checkpoints
    if any(checkpoint.number == event.checkpoint for checkpoint in before.retained):
        return []  # a repeated event
    if before.open is None or before.open.number != event.checkpoint:
        return []
    return _fail(state, event.reason, event.at)


def _fail(state: JobState, reason: str, now: Instant) -> list[Effect]:
    """Give up the open checkpoint, and count it: after several in a row none begins by itself for some time."""
    before = state.checkpoints
    in_a_row = before.failures_in_a_row + 1
    back_off_s = min(BACK_OFF_MAX_S, BACK_OFF_S * 2.0 ** min(60, in_a_row - FAILURES_AT_ONCE))
    state.checkpoints = replace(
        before,
        failures=before.failures + 1,
        failures_in_a_row=in_a_row,
        failure=reason,
        retry_at=now + back_off_s if in_a_row >= FAILURES_AT_ONCE else 0.0,
    )
    return give_up(state, reason)


def give_up(state: JobState, reason: str) -> list[Effect]:
    """Nothing of the open checkpoint counts."""
    opened = state.checkpoints.open
    if opened is None:
        return []
    state.checkpoints = replace(state.checkpoints, open=None)
    return [DropCheckpoint(opened.number, reason), *_refuse_upgrade(state, opened.number, reason)]


def settle(state: JobState, now: Instant) -> list[Effect]:
    """After every event: leave out who is gone, begin what is due, give up what the job's end has overtaken."""
    checkpoints, opened = state.checkpoints, state.checkpoints.open
    if opened is None:
        every = state.policy.checkpoints.every_merges
        due = every and state.global_version - checkpoints.begun_at >= every
        return begin(state, now) if due and now >= checkpoints.retry_at and not _cannot(state) else []
    if state.phase is not JobPhase.RUNNING:
        return give_up(state, "the job is ending")
    gone = frozenset(life for life in opened.awaited if not _may_answer(state, life))
    if not gone:
        return []
    state.checkpoints = replace(checkpoints, open=replace(opened, awaited=opened.awaited - gone))
    return _seal_if_complete(state, now)


def request_upgrade(state: JobState, event: CommandRequested, request: commands.Upgrade) -> list[Effect]:
    """Begin a checkpoint, or wait for the one being taken. The command is answered once that is whole, or has failed."""
    opened = state.checkpoints.open
    reason = "it is being upgraded already" if state.upgrade is not None else _cannot(state) if opened is None else ""
    if reason:
        return [ResolveCommand(event.command, False, f"the job is not upgraded: {reason}")]
    number = opened.number if opened is not None else state.checkpoints.count + 1
    state.upgrade = OpenUpgrade(event.command, number, request.build, request.python)
    return begin(state, event.at) if opened is None else []


def _hand_over(state: JobState, checkpoint: int) -> list[Effect]:
    """End this synchroniser if an upgrade waited for this checkpoint, which is whole."""
    upgrade = state.upgrade
    if upgrade is None or upgrade.checkpoint != checkpoint:
        return []
    state.upgrade = None
    detail = f"checkpoint {checkpoint} is complete, and the synchroniser restarts as {upgrade.build}"
    return [
        ResolveCommand(upgrade.command, True, detail),
        HandOver(upgrade.command, upgrade.build, upgrade.python),
    ]


def _refuse_upgrade(state: JobState, checkpoint: int, reason: str) -> list[Effect]:
    upgrade = state.upgrade
    if upgrade is None or upgrade.checkpoint != checkpoint:
        return []
    state.upgrade = None
    return [
        ResolveCommand(upgrade.command, False, f"the job is not upgraded: checkpoint {checkpoint} failed: {reason}")
    ]


def request_rollback(state: JobState, event: CommandRequested, request: commands.Rollback) -> list[Effect]:
    retained = [checkpoint.number for checkpoint in state.checkpoints.retained]
    number = request.checkpoint or max(retained, default=0)
    refusal = ""
    if state.phase is not JobPhase.RUNNING:
        refusal = f"the job is {state.phase}"
    elif state.rollback is not None:
        refusal = f"it goes back to checkpoint {state.rollback.checkpoint} already"
    elif number not in retained:
        refusal = f"of this job there are the checkpoints {', '.join(map(str, retained)) or '(none)'}"
    if refusal:
        return [ResolveCommand(event.command, False, f"the job does not go back: {refusal}")]
    state.rollback = Rollback(number, frozenset(FragmentId(p) for p in range(len(state.rounds))))
    resolved = ResolveCommand(event.command, True, f"the job goes back to checkpoint {number}")
    return [resolved, *give_up(state, f"the job goes back to checkpoint {number}")]


def settle_rollback(state: JobState, now: Instant) -> list[Effect]:
    """After every event: once nothing merges any more, restore what is left.

    A job that ends does not set out; where it has, it goes the rest of the way, for half of it is no state of any job's.
    """
    rollback = state.rollback
    if rollback is None:
        return []
    set_out = len(rollback.left) < len(state.rounds) or any(r.restoring for r in state.rounds)
    if state.phase is JobPhase.FINISHED or (state.phase is JobPhase.FINISHING and not set_out):
        state.rollback = None
        return advance_all(state, now)
    if any(r.phase is RoundPhase.MERGING for r in state.rounds):
        return []
    effects: list[Effect] = []
    versions = []
    for fragment in sorted(rollback.left):
        current = state.rounds[fragment]
        effects += [ReleasePayload(c.payload, ReleaseReason.ABANDONED) for c in current.offered.values()]
        state.rounds[fragment] = fragment_round.begin_restoring(current)
        versions.append((fragment, Version(current.version + 1), current.step))
    return [*effects, RestoreFragments(state.epoch, rollback.checkpoint, tuple(versions))]


def fragment_restored(state: JobState, event: FragmentRestored) -> list[Effect]:
    """The fragment is what it was: everybody adopts that, and nothing that was built on another version is taken."""
    before, rollback = state.rounds[event.fragment], state.rollback
    offered, is_asked_for = sorted(before.offered.items()), not isinstance(event.checkpoint, FromJournal)
    if is_asked_for is (rollback is None):
        return []  # a repeated event, or a fragment that the rollback is to restore in any case
    if not is_asked_for:
        before = fragment_round.begin_restoring(before)
    if not before.restoring or event.version != before.version + 1:
        return []
    after = state.rounds[event.fragment] = fragment_round.finish_merge(before)
    state.update_norms[event.fragment] = UpdateNorms()
    for island in list(state.islands.values()):
        state.islands[island.id] = island_record.rolled_back(island, event.fragment, after.version)
    left = rollback.left - {event.fragment} if rollback is not None else frozenset()
    state.rollback = replace(rollback, left=left) if rollback is not None and left else None
    released = [ReleasePayload(c.payload, ReleaseReason.ABANDONED) for _, c in offered]
    published = publish(state, event.fragment, event.at)
    return [*released, published, *(advance_all(state, event.at) if not left else [])]


def rollback_failed(state: JobState, event: RollbackFailed) -> list[Effect]:
    """Fragments that were not restored stand where they stood."""
    if state.rollback is None or state.rollback.checkpoint != event.checkpoint:
        return []
    state.rollback = None
    for current in state.rounds:
        if current.restoring:
            state.rounds[current.fragment] = fragment_round.abandon(current)
    return advance_all(state, event.at)


def _timeout_s(state: JobState) -> Duration:
    """Return the timeout of the policy, or one for the bytes of all islands' states, which may all go to one disk."""
    if (timeout_s := state.policy.checkpoints.timeout_s) is not None:
        return timeout_s
    state_bytes = STATE_BYTES_PER_PARAMETER * state.parameter_count
    return TIMEOUT_BASE_S + state_bytes * max(1, len(state.live)) / SLOWEST_BYTES_PER_S


def _cannot(state: JobState) -> str:
    """Why no checkpoint can begin now; empty if one can."""
    if state.phase is not JobPhase.RUNNING:
        return f"the job is {state.phase}"
    if state.checkpoints.open is not None:
        return f"checkpoint {state.checkpoints.open.number} is being taken"
    if state.rollback is not None:
        return f"the job goes back to checkpoint {state.rollback.checkpoint}"
    if not state.live:
        return "no island trains"
    return ""


def begin_if_possible(state: JobState, now: Instant) -> list[Effect]:
    """Begin a checkpoint unless one is being taken or none can be."""
    return [] if _cannot(state) else begin(state, now)


def _may_answer(state: JobState, life: Life) -> bool:
    island = state.islands[life[0]]
    return island.incarnation == life[1] and island.state in MAY_ANSWER


def _seal_if_complete(state: JobState, now: Instant) -> list[Effect]:
    opened = state.checkpoints.open
    if opened is None or opened.sealing or opened.awaited:
        return []
    if not opened.saved:
        why = f" ({opened.unsaved})" if opened.unsaved else ""
        return _fail(state, f"no island saved its state{why}", now)
    state.checkpoints = replace(state.checkpoints, open=replace(opened, sealing=True))
    return [SealCheckpoint(opened.number, opened.saved)]
