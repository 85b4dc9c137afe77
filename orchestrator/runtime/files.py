"""A job's tape and journal while its synchroniser lives: begun, or taken up where the last one died.

    RUN_DIR/tape.jsonl     every event and what was decided on it
    RUN_DIR/journal/       Θ and momentum of every fragment, by version

Responsible for what is true before anything goes on: the core decides as it did, Θ is what the tape says it is, and what
only the journal knows, and that an epoch begins, come next on the tape (``first_events``). Refuses to act on anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config import JobSpec
from orchestrator.core import events
from orchestrator.core.saving import FragmentRestored
from orchestrator.core.state import JobState
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import Epoch, FragmentId, Instant, JobPhase, JobPolicy
from orchestrator.errors import ConfigurationError, DataError
from orchestrator.journal.disk import Disk
from orchestrator.journal.entry import Facts
from orchestrator.journal.keeper import remembered
from orchestrator.journal.reconciliation import unheard_merges
from orchestrator.journal.storage import Journal
from orchestrator.merge import outer_optimizer
from orchestrator.merge.outer_state import OuterState
from orchestrator.tape.driver import Fold
from orchestrator.tape.recovery import Remembered, remember
from orchestrator.tape.schema import Header
from orchestrator.tape.storage import TapeWriter

Make = Callable[[Instant], events.Event]


@dataclass(frozen=True, slots=True)
class JobFiles:
    """``past`` is ``None`` for a job that begins; ``outer`` while Θ was never made, or is not needed any more."""

    tape: TapeWriter
    journal: Journal
    header: Header
    core: Synchroniser
    past: Remembered | None = None
    outer: OuterState | None = None
    merges: tuple[Facts, ...] = ()
    first_events: tuple[Make, ...] = ()

    @property
    def started(self) -> bool:
        """Whether the job has begun before."""
        return self.past is not None and self.past.started

    @property
    def epoch(self) -> Epoch:
        """Of whoever holds these files."""
        return self.core.state.epoch if self.past is None else self.past.next_epoch


def open_files(
    run_dir: Path,
    job: str,
    spec: JobSpec,
    policy: JobPolicy,
    started_at: float,
    folds: Sequence[Fold] = (),
    disk: Disk | None = None,
) -> JobFiles:
    """Begin the job's files, or remember; ``folds`` have seen what is on the tape when this returns.

    Raises ConfigurationError when the folder holds another job, DataError when its files are damaged or do not fit each
    other, InfrastructureError while another process writes them.
    """
    path = run_dir / "tape.jsonl"
    if not _has_header(path):
        path.unlink(missing_ok=True)  # died before its first line was whole
        tape = TapeWriter(path, Header(job, policy, started_at))
        journal = _journal(run_dir, spec, policy, tape, disk)
        journal.clear()
        return JobFiles(tape, journal, Header(job, policy, started_at), Synchroniser(policy))
    tape, written = TapeWriter.reopen(path)
    header = written.header
    if not isinstance(header, Header) or header.job != job or header.policy != policy:
        tape.let_go()
        raise ConfigurationError(
            detail=f"{run_dir} holds the tape of another job ({header.job}), or of this one with another specification. "
            "Use an empty folder."
        )
    try:
        past = remember(written, folds)
        if written.footer is not None and past.core.state.phase is not JobPhase.FINISHED:
            detail = f"The job in {run_dir} was ended by a failure (see crash.txt there); it does not go on from that."
            raise ConfigurationError(detail=f"{detail} Submit it anew.")
        journal = _journal(run_dir, spec, policy, tape, disk)
        return _taken_up(JobFiles(tape, journal, header, past.core, past), spec)
    except Exception:
        tape.let_go()
        raise


def _has_header(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        return file.readline().endswith(b"\n")


def _taken_up(files: JobFiles, spec: JobSpec) -> JobFiles:
    """With Θ, and what the tape has to be told first."""
    past, state = files.past, files.core.state
    assert past is not None
    over = state.phase is JobPhase.FINISHED
    first: list[Make] = [] if over else [lambda at: events.SynchroniserRestarted(at, past.next_epoch)]
    if not state.seeded:
        files.journal.clear()  # Θ that nobody heard of is made again
        return JobFiles(files.tape, files.journal, files.header, past.core, past, first_events=tuple(first))
    if over and files.journal.newest(FragmentId(0)) is None:
        return files  # all that the job leaves is written, and its journal gone
    unheard = unheard_merges(state.rounds, files.journal.newest, over=over)
    knobs = spec.synchroniser
    optimizer = outer_optimizer.create(
        knobs.outer_optimizer.kind, knobs.outer_optimizer.lr, knobs.outer_optimizer.momentum
    )
    outer, merges = remembered(files.journal, len(state.rounds), knobs.averaging, optimizer)
    completed = [_completed(merges[fragment], state) for fragment in unheard]
    return JobFiles(files.tape, files.journal, files.header, past.core, past, outer, merges, (*completed, *first))


def _completed(facts: Facts, state: JobState) -> Make:
    """A merge, or what a rollback put in its place."""
    if state.rollback is not None and state.rounds[facts.fragment].restoring:
        checkpoint = state.rollback.checkpoint
        named = (FragmentId(facts.fragment), facts.version, checkpoint, facts.digest, facts.base_digest)
        return lambda at: FragmentRestored(at, *named)
    return lambda at: events.MergeCompleted(
        at, FragmentId(facts.fragment), facts.version, facts.digest, facts.merge_seconds, facts.base_digest
    )


def _journal(run_dir: Path, spec: JobSpec, policy: JobPolicy, tape: TapeWriter, disk: Disk | None) -> Journal:
    durability = spec.synchroniser.durability
    try:
        return Journal(
            run_dir / "journal",
            versions_kept=policy.staleness_max + 1,
            merges_max=durability.merges_max if durability.kind == "async" else 0,
            disk=disk,
            before_sync=tape.sync,
        )
    except OSError as error:
        raise DataError(detail=f"The journal in {run_dir} cannot be read: {error}.") from error
