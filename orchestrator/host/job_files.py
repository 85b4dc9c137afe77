"""A job's tape and journal while its synchroniser lives: created, or recovered where the last one died.

    RUN_DIR/tape.jsonl     every event and what was decided on it, with older segments in RUN_DIR/tape.sealed/
    RUN_DIR/snapshot       core and folds at one step of it
    RUN_DIR/journal/       Θ and momentum of every fragment, by version
    RUN_DIR/boot           which start of the machine the job began in, for durability async
    RUN_DIR/handover.json  which release is to go on, while one synchroniser replaces another
    RUN_DIR/clock.json     when the job was created, on the clock that began with the machine's start, and which start

Responsible for what is true before the job continues: the core decides as it did, Θ is what the tape says it is, and what
only the journal knows comes next on the tape, followed by the new epoch (``first_events``). Acts on nothing.

The job's clock counts the seconds since the job was created, as on its tape. It never runs back, and nobody can set it.
While a synchroniser lives its time is the monotonic clock's. The next one continues from ``clock.json``, so that a time of
day that was set by hours meanwhile adds no hours to the tape. After a start of the machine, or on another machine, only the
time of day is known: then the time since the job was created, but no less than the tape's end.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from orchestrator.core import events
from orchestrator.core.saving import FragmentRestored, FromJournal, RestoredFrom
from orchestrator.core.state import JobState
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import FIRST_EPOCH, Epoch, FragmentId, JobPhase, JobPolicy, Version
from orchestrator.errors import ConfigurationError, DataError, InfrastructureError
from orchestrator.host.job_context import Undated
from orchestrator.parameters.journal import (
    SUFFIX,
    Facts,
    Journal,
    is_set_back,
    lost_merges,
    undecided_merges,
    unrecorded_merges,
)
from orchestrator.parameters.journaled_store import MergeLog, append_set_back, recovered
from orchestrator.parameters.outer_state import OuterState, OuterStep
from orchestrator.specification.config import JobSpec
from orchestrator.system.disk import Disk, LocalDisk
from orchestrator.system.mirror import MirroredDisk, mirrored
from orchestrator.system.object_store import ObjectStore
from orchestrator.system.run_folder import (
    BOOT,
    CHECKPOINTS,
    CLOCK,
    HANDOVER,
    JOURNAL,
    PARAMETERS,
    REPORT,
    SALVAGING,
    SEALED,
    SNAPSHOT,
    STATUS,
    TAPE,
    copies_in,
    set_aside,
)
from orchestrator.system.store_log import has_log
from orchestrator.tape.driver import Fold, Pending
from orchestrator.tape.replay import Recovered, recover
from orchestrator.tape.schema import Header, decode_header
from orchestrator.tape.snapshot import Snapshot
from orchestrator.tape.storage import TapeWriter, beginning, read_snapshot, read_tape

log = logging.getLogger(__name__)
AGE_MAX_S = 1e9
"""Thirty years: a file that says more is damaged."""
LEFT_AT_THE_END = (STATUS, REPORT, PARAMETERS)


class ShardJournals(MergeLog, Protocol):
    """The journals of several shards in other processes, as they are reconciled with the tape. They act like one."""

    damage: list[str]
    foreign: list[str]

    @property
    def fragments(self) -> tuple[FragmentId, ...]: ...

    def newest(self, fragment: FragmentId) -> Version | None: ...

    def facts(self, fragment: FragmentId, version: Version) -> Facts: ...

    def settle(self) -> None: ...

    def clear(self) -> None: ...

    def drop_newest(self, fragment: FragmentId) -> str: ...

    def set_back(self, fragment: FragmentId, epoch: Epoch) -> None:
        """Do what ``append_set_back`` does. Raises OSError."""
        ...


MergeJournal = Journal | ShardJournals
"""The journal of a job."""


@dataclass(frozen=True, slots=True)
class JobFiles:
    """``past`` is ``None`` for a job that begins; ``outer`` while Θ was never made, or is not needed any more, or if several
    shards have it. ``merges`` are the last of each fragment.

    ``folds`` and ``pending`` cover all that is on the tape, and go on with what comes. ``damage`` is what was cut off,
    and ``foreign`` names files of the journal's folder that no journal wrote, which are neither read nor removed.
    """

    tape: TapeWriter
    journal: MergeJournal
    header: Header
    core: Synchroniser
    folds: tuple[Fold, ...]
    pending: Pending
    past: Recovered | None = None
    damage: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    outer: OuterState | None = None
    merges: tuple[Facts, ...] = ()
    first_events: tuple[Undated, ...] = ()

    @property
    def started(self) -> bool:
        """Return whether the job has begun before."""
        return self.past is not None and self.past.started

    @property
    def epoch(self) -> Epoch:
        """The epoch of the synchroniser that holds these files."""
        return self.core.state.epoch if self.past is None else self.past.next_epoch


def mirror(
    run_dir: Path,
    store: ObjectStore,
    below: Disk,
    requests: Executor | None = None,
    background: Callable[[Callable[[], None]], object] | None = None,
    *,
    has_begun: bool = False,
) -> MirroredDisk:
    """Take over the job's log in the store, give ``run_dir`` its files, and return the disk that goes on with it.

    What the folder has beyond that was never announced, and is removed. ``has_begun`` says that the job has run before,
    whatever the folder shows. Raises OSError if the store refuses, DataError if it has lost the log, InfrastructureError
    while another process of this machine writes the files.
    """
    below.files(run_dir)  # makes the folder
    try:
        held = below.hold(run_dir / TAPE, new=False)
    except FileNotFoundError:
        held = None
    except BlockingIOError as error:
        detail = f"the tape {run_dir / TAPE} is being written by another process."
        raise InfrastructureError(detail=detail, remedy="Wait until it ends, or end it.") from error
    try:
        if (held is not None or has_begun) and not has_log(store):
            evidence = f"{run_dir} has a tape" if held is not None else "it has run before"
            raise DataError(
                detail=f"The store {store.url} has nothing of this job, but {evidence}: the store was emptied or exchanged. "
                "Put the store's content back, or start the service with the store that the job began with."
            )
        disk = mirrored(store, below, run_dir, requests, background)
        for folder, is_ours in (
            (run_dir, lambda name: name in (TAPE, SNAPSHOT, BOOT)),
            (run_dir / JOURNAL, lambda name: name.endswith(SUFFIX)),
            (run_dir / SEALED, lambda name: True),
        ):
            for name in below.files(folder):
                if is_ours(name) and not disk.mirrors(folder / name):
                    below.remove(folder / name)
    finally:
        if held is not None:
            held.close()
    return disk


def open_files(
    run_dir: Path,
    job: str,
    spec: JobSpec,
    policy: JobPolicy,
    started_at: float,
    folds: Sequence[Fold] = (),
    disk: Disk | None = None,
    journal_of_shards: ShardJournals | None = None,
    epoch: Epoch = FIRST_EPOCH,
    build: str = "",
) -> JobFiles:
    """Create the job's files, which begin in ``epoch``, or recover from them. A usable snapshot's folds replace ``folds``.

    ``journal_of_shards`` takes the place of the run folder's own journal. ``build`` is the release of this process.

    Raises ConfigurationError when the folder holds another job, DataError when its files are damaged or do not fit each
    other, InfrastructureError while another process writes them. After an OSError it may be called again.
    """
    path, snapshot_path, disk = run_dir / TAPE, run_dir / SNAPSHOT, disk or LocalDisk()
    if not _has_begun(path, disk):
        _refuse_a_past(run_dir, disk, journal_of_shards)
        disk.remove(path)
        disk.remove(snapshot_path)
        _note_boot(run_dir, disk)
        fresh = Header(job, policy, started_at, epoch)
        tape = TapeWriter(path, fresh, disk)
        try:
            tape.sync()  # before the job is announced: a header that is damaged later is no torn one
            journal = journal_of_shards or _journal(run_dir, spec, policy, tape, disk)
            journal.clear()
        except Exception:
            tape.let_go()
            raise
        return JobFiles(tape, journal, fresh, Synchroniser(policy, epoch), tuple(folds), Pending())
    on_disk = _snapshot(snapshot_path, disk)
    snapshot = on_disk if on_disk is not None and _fits(on_disk, policy, folds) else None
    tape, written = TapeWriter.reopen(path, disk, snapshot.mark if snapshot else None)
    header = written.header
    if not isinstance(header, Header) or header.job != job or header.policy != policy:
        tape.let_go()
        raise ConfigurationError(
            detail=f"{run_dir} holds the tape of another job ({header.job}), or of this one with another specification. "
            "Use an empty folder."
        )
    try:
        _require_same_boot(run_dir, spec, disk)
        past = recover(written, folds, snapshot)
        log.info("remembered %d steps, %d of them from a snapshot", past.count, past.before)
        if written.footer is not None and past.core.state.phase is not JobPhase.FINISHED:
            detail = f"The job in {run_dir} was ended by a failure (see crash.txt there); it cannot continue."
            raise ConfigurationError(detail=f"{detail} Submit it anew.")
        journal = journal_of_shards or _journal(run_dir, spec, policy, tape, disk)
        damage = [*journal.damage]
        if written.torn is not None:
            undecided = undecided_merges(past.core.state.rounds, journal.newest) if past.core.state.seeded else ()
            damage = [f"tape: {written.torn}", *damage, *(journal.drop_newest(fragment) for fragment in undecided)]
        if not past.core.state.seeded:
            _refuse_a_cut(path, journal, on_disk)
        files = JobFiles(
            tape, journal, header, past.core, past.folds, past.pending, past, tuple(damage), tuple(journal.foreign)
        )
        return _with_theta(files, spec, build, run_dir)
    except Exception:
        tape.let_go()
        raise


def rehearse(run_dir: Path, job: str, policy: JobPolicy) -> None:
    """Read and replay the job's tape as ``open_files`` would, while another process writes it. Nothing is changed.

    Raises DataError or ConfigurationError if this build cannot continue the job.
    """
    written = read_tape(run_dir / TAPE)
    if not isinstance(written.header, Header) or written.header.job != job or written.header.policy != policy:
        raise ConfigurationError(detail=f"this build understands the specification of {job} otherwise than its tape.")
    recover(written, ())


def lacks_a_past(run_dir: Path, disk: Disk | None = None) -> bool:
    """Return whether the folder has nothing that a job could continue from: it is new, lost, has only copies of another
    machine's files, or a salvage did not end.

    Raises DataError if files of an earlier run exist without a tape.
    """
    disk = disk or LocalDisk()
    if (run_dir / SALVAGING).exists() or copies_in(run_dir) is not None:
        return True
    if _has_begun(run_dir / TAPE, disk):
        return False
    _refuse_a_past(run_dir, disk, None)
    return True


def begin_salvage(run_dir: Path, disk: Disk | None = None) -> None:
    """Mark the folder durably, then set aside what is in it: copies, files of an earlier history, or what an earlier salvage
    left, which islands never heard of.
    """
    disk = disk or LocalDisk()
    run_dir.mkdir(parents=True, exist_ok=True)
    disk.replace(run_dir / SALVAGING, b"")
    set_aside(run_dir)


def end_salvage(run_dir: Path, disk: Disk | None = None) -> None:
    """Remove the mark: tape and journal have Θ by now."""
    (disk or LocalDisk()).remove(run_dir / SALVAGING)


@dataclass(frozen=True, slots=True)
class HandOverNote:
    """A hand-over under way, from the build ``before`` to ``build``. ``failure`` says why that one did not start."""

    before: str
    build: str
    failure: str = ""

    def outcome(self, own: str) -> str:
        """Return what came of it, given the build ``own`` that goes on."""
        if own == self.build:
            return f"the job was upgraded from {self.before}"
        why = self.failure or "its synchroniser did not start"
        return f"the upgrade to {self.build} failed, and {own} goes on: {why}"


def note_hand_over(run_dir: Path, note: HandOverNote) -> None:
    """Have the next synchroniser know that it replaces one of another release. Raises OSError."""
    LocalDisk().replace(run_dir / HANDOVER, json.dumps(asdict(note)).encode())


def hand_over_noted(run_dir: Path) -> HandOverNote | None:
    """Return the hand-over under way, or None, also for a damaged note: nothing but an explanation is lost."""
    try:
        return HandOverNote(
            **{name: str(value) for name, value in json.loads((run_dir / HANDOVER).read_bytes()).items()}
        )
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def end_hand_over(run_dir: Path) -> None:
    """Remove the note: one of the two releases goes on, and its tape says which."""
    LocalDisk().remove(run_dir / HANDOVER)


def uptime() -> float:
    """Seconds since the machine was started, those in which it slept included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def elapsed(
    run_dir: Path,
    started_at: float,
    tape_end: float | None,
    *,
    boot: str | None = None,
    uptime: Callable[[], float] = uptime,
    wall: Callable[[], float] = time.time,
) -> float:
    """Seconds since the job was created, stored for the next synchroniser. ``tape_end`` is the tape's end, if any."""
    boot, up = boot or LocalDisk().boot(), uptime()
    path = run_dir / CLOCK
    if tape_end is None:
        passed = 0.0
    elif (created := _created(path, boot, up)) is not None:
        passed = max(tape_end, up - created)
    else:
        passed = max(tape_end, wall() - started_at)
    try:
        LocalDisk().replace(path, json.dumps({"boot": boot, "created_uptime_s": up - passed}).encode())
    except OSError as error:
        log.warning("%s cannot be written, so the next synchroniser will use the time of day: %s", path, error)
    return passed


def _has_begun(path: Path, disk: Disk) -> bool:
    """Return whether the job has run before. Without a whole first line of the tape there is nothing to recover."""
    try:
        first, end, rest = beginning(path, disk).partition(b"\n")
    except FileNotFoundError:
        return False
    try:
        decode_header(first.decode(errors="replace"))
    except DataError:
        return bool(rest)
    return bool(end)


def _refuse_a_past(run_dir: Path, disk: Disk, of_shards: ShardJournals | None) -> None:
    """Raise DataError if files of an earlier run exist without a tape.

    Each of these files is written only once the tape's first line is durable. Starting over would silently discard what the
    job had merged.
    """
    files = disk.files(run_dir)
    traces = [name for name in (SNAPSHOT, *LEFT_AT_THE_END) if name in files]
    if segments := [name for name in disk.files(run_dir / JOURNAL) if name.endswith(SUFFIX)]:
        traces.append(f"{JOURNAL} with {len(segments)} files")
    if of_shards is not None and of_shards.fragments:
        traces.append(f"journals of shards with {len(of_shards.fragments)} fragments")
    folders = (SEALED,) if (run_dir / SALVAGING).exists() else (SEALED, CHECKPOINTS)
    traces += [name for name in folders if (run_dir / name).is_dir() and any((run_dir / name).iterdir())]
    if traces:
        lacks = "has no complete first line" if files.get(TAPE) else "is empty" if TAPE in files else "is missing"
        raise DataError(
            detail=f"The tape {run_dir / TAPE} {lacks}, but the job has run before: its folder has {', '.join(traces)}. "
            "Atoll does not start it over, because its merges would be lost. Restore the tape from a backup."
        )


def _note_boot(run_dir: Path, disk: Disk) -> None:
    path = run_dir / BOOT
    disk.files(run_dir)  # makes the folder
    disk.remove(path)
    disk.append(path, [disk.boot().encode()])
    disk.sync(path)


def _snapshot(path: Path, disk: Disk) -> Snapshot | None:
    """The tape has all that a snapshot has, so one that cannot be read only costs time."""
    try:
        return read_snapshot(path, disk)
    except DataError as error:
        log.warning("the whole tape is replayed: %s", error)
        return None


def _fits(snapshot: Snapshot, policy: JobPolicy, folds: Sequence[Fold]) -> bool:
    """Return whether the job may continue from this snapshot. One that does not fit still shows that the job has run."""
    if [type(fold) for fold in snapshot.folds] != [Pending, *map(type, folds)]:
        log.warning("the whole tape is replayed: the snapshot's folds are not those of this job.")
        return False
    if snapshot.core.state.policy_begun != policy:
        log.warning("the whole tape is replayed: the snapshot belongs to another job or specification.")
        return False
    return True


def _require_same_boot(run_dir: Path, spec: JobSpec, disk: Disk) -> None:
    """Async, tape and journal may have lost the same merges with the power: nothing in them would show it."""
    if spec.synchroniser.durability.kind != "async":
        return
    try:
        same = disk.read(run_dir / BOOT).decode() == disk.boot()
    except FileNotFoundError:
        same = False
    if not same:
        raise DataError(
            detail="The machine was restarted since this job wrote its files. With durability async, merges that islands "
            "already hold may be lost without a trace; sync prevents this. Submit the job again."
        )


def _refuse_a_cut(path: Path, journal: MergeJournal, snapshot: Snapshot | None) -> None:
    """A tape without Θ has no merges. Raises DataError where another file has one.

    A merge is kept only when the tape is durable up to its decision, which lies behind Θ: no loss of power does this.
    """
    merged = [fragment for fragment in journal.fragments if _was_merged(journal, fragment)]
    state = snapshot.core.state if snapshot else None
    in_snapshot = state is not None and state.tokens_before is None and state.global_version > 0
    if merged or in_snapshot:
        evidence = f"the journal has merges of the fragments {merged}" if merged else "the snapshot has merges"
        raise DataError(
            detail=f"The tape {path} ends before the job had parameters, but {evidence}: it was truncated, or belongs to "
            "another run. Atoll does not start the job over, because its merges would be lost. Restore the tape from a "
            "backup."
        )


def _was_merged(journal: MergeJournal, fragment: FragmentId) -> bool:
    """Return whether the fragment's newest entry has a base, as every entry has but the first of a job."""
    newest = journal.newest(fragment)
    if newest is None:
        return False
    facts = journal.facts(fragment, newest)
    return bool(facts.base_digest or facts.contributors)


def _with_theta(files: JobFiles, spec: JobSpec, build: str, run_dir: Path) -> JobFiles:
    """The files with Θ, and with the events that come first on the tape."""
    past, state = files.past, files.core.state
    assert past is not None
    over = state.phase is JobPhase.FINISHED
    notes = [f"{JOURNAL}/{name} is not a file of this job's journal, and is ignored" for name in files.foreign]
    damage = "; ".join((*files.damage, *notes))
    for detail in files.damage:
        log.warning("cut off as damaged; continuing without it: %s", detail)
    for note in notes:
        log.warning("%s. Move it out of the run folder.", note)
    handed_over = hand_over_noted(run_dir)
    facts = (past.next_epoch, damage, build, handed_over.outcome(build) if handed_over is not None else "")
    first: list[Undated] = [] if over else [lambda at: events.SynchroniserRestarted(at, *facts)]
    if not state.seeded:
        files.journal.clear()  # Θ that was never announced is made again
        return replace(files, first_events=tuple(first))
    if over and files.journal.newest(FragmentId(0)) is None:
        return files  # all that the job leaves is written, and its journal gone
    set_back = (
        {} if over or state.rollback is not None else _set_back(files, past.next_epoch, OuterStep.of(spec.synchroniser))
    )
    others = [current for current in state.rounds if current.fragment not in set_back]
    unrecorded = unrecorded_merges(others, files.journal.newest, over=over)
    fragments = [current.fragment for current in state.rounds]
    outer: OuterState | None = None
    if isinstance(files.journal, Journal):
        outer, merges = recovered(files.journal, fragments, OuterStep.of(spec.synchroniser))
    else:
        merges = tuple(_newest_facts(files.journal, fragment) for fragment in fragments)
    completed = [_completed(merges[fragment], state) for fragment in unrecorded]
    return replace(files, outer=outer, merges=merges, first_events=(*completed, *first, *set_back.values()))


def _set_back(files: JobFiles, epoch: Epoch, outer_step: OuterStep) -> dict[FragmentId, Undated]:
    """Set fragments whose last version the journal has lost back to the one before, as their next version.

    It is journalled first, then on the tape. The event is repeated should this process die in between. Such an entry has no
    base and no contributors.
    """
    rounds, journal = files.core.state.rounds, files.journal
    for fragment in lost_merges(rounds, journal.newest) if files.damage else ():
        version = rounds[fragment].version
        try:
            if isinstance(journal, Journal):
                append_set_back(journal, fragment, epoch, outer_step)
            else:
                journal.set_back(fragment, epoch)
        except OSError as error:
            raise DataError(detail=f"The journal lost version {version} of fragment {fragment}: {error}.") from error
    restored: dict[FragmentId, Undated] = {}
    for current in rounds:
        if journal.newest(current.fragment) != current.version + 1:
            continue
        facts = journal.facts(current.fragment, Version(current.version + 1))
        if is_set_back(facts):
            restored[current.fragment] = _restoring(facts, FromJournal())
    return restored


def _newest_facts(journal: MergeJournal, fragment: FragmentId) -> Facts:
    newest = journal.newest(fragment)
    assert newest is not None  # ``unrecorded_merges`` has looked
    return journal.facts(fragment, newest)


def _completed(facts: Facts, state: JobState) -> Undated:
    """A merge, or what a rollback put in its place."""
    if state.rollback is not None and state.rounds[facts.fragment].restoring:
        return _restoring(facts, state.rollback.checkpoint)
    return lambda at: events.MergeCompleted(
        at,
        FragmentId(facts.fragment),
        facts.version,
        facts.digest,
        facts.merge_seconds,
        facts.base_digest,
        gradient_norm=facts.gradient_norm,
        router_distance=facts.router_distance,
        router_travel=facts.router_travel,
    )


def _restoring(facts: Facts, checkpoint: RestoredFrom) -> Undated:
    named = (FragmentId(facts.fragment), facts.version, checkpoint, facts.digest, facts.base_digest)
    return lambda at: FragmentRestored(at, *named)


def versions_kept(staleness_max: int) -> int:
    """Return how many versions of a fragment its journal keeps. The newest may lose its decision with the tape's end."""
    return staleness_max + 2


def _journal(run_dir: Path, spec: JobSpec, policy: JobPolicy, tape: TapeWriter, disk: Disk) -> Journal:
    durability = spec.synchroniser.durability
    try:
        return Journal(
            run_dir / JOURNAL,
            versions_kept=versions_kept(policy.staleness_max),
            merges_max=durability.merges_max if durability.kind == "async" else 0,
            disk=disk,
            before_sync=tape.sync,
        )
    except OSError as error:
        raise DataError(detail=f"The journal in {run_dir} cannot be read: {error}.") from error


def _created(path: Path, boot: str, up: float) -> float | None:
    """When the job was created, by the clock of this start of the machine; None where that is not known.

    It may be negative: a job can be older than the machine's last start. What no job can be counts as unknown.
    """
    try:
        written = json.loads(path.read_bytes())
        created = float(written["created_uptime_s"])
        is_possible = written["boot"] == boot and up - AGE_MAX_S <= created <= up
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return created if is_possible else None
