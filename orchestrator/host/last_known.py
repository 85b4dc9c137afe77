"""The last known progress of a job whose files are damaged: what can still be read of them, and no more.

Responsible for an answer whatever is damaged: a line of the tape that cannot be read is passed over, a file that cannot is
left out, and of the versions, epochs and tokens in tape, snapshot and journal the highest count. Nobody resumes a job
from this: it is shown to people, of a job that failed. Nothing is changed on the disk.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core.events import IslandReported, MergeCompleted, SynchroniserRestarted
from orchestrator.core.messages import Progress
from orchestrator.core.saving import FragmentRestored, JobResumed, JobSalvaged
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import JobPolicy
from orchestrator.errors import DataError
from orchestrator.host.state_view import core_status
from orchestrator.parameters.journal import PREFIX_BYTES, facts_of, parse_segment_name, sizes_of
from orchestrator.status import JobStatus
from orchestrator.system.disk import Disk, LocalDisk
from orchestrator.system.run_folder import JOURNAL, SNAPSHOT, TAPE
from orchestrator.tape.schema import Header, Record, continuation_at, decode_header, decode_line
from orchestrator.tape.sealing import begin_of
from orchestrator.tape.storage import beginning, read_snapshot, sealed_lines

log = logging.getLogger(__name__)

LINE_BYTES_MAX = 16 << 20
CHUNK_BYTES = 1 << 22


@dataclass(slots=True)
class LastKnown:
    """``at`` is the instant of the last event that was read; ``folds`` know what came before the first damage."""

    policy: JobPolicy
    started_at: float = 0.0
    at: float = 0.0
    epoch: int = 1
    versions: dict[int, int] = field(default_factory=dict)
    tokens_before: int = 0
    tokens: dict[tuple[str, int], int] = field(default_factory=dict)
    tokens_least: int = 0
    whole: bool = True
    goodput: Goodput = field(init=False)
    statistics: Statistics = field(init=False)

    def __post_init__(self) -> None:
        self.goodput, self.statistics = Goodput(self.policy), Statistics(self.policy)

    @property
    def tokens_trained(self) -> int:
        return max(self.tokens_least, self.tokens_before + sum(self.tokens.values()))

    def apply(self, record: Record) -> None:
        event = record.event
        self.at = max(self.at, event.at)
        match event:
            case SynchroniserRestarted():
                self.epoch = max(self.epoch, event.epoch)
            case MergeCompleted() | FragmentRestored():
                self.reached(event.fragment, event.version)
            case JobSalvaged():
                self.epoch = max(self.epoch, event.epoch)
                totals = {(str(one.island), int(one.incarnation)): one.tokens_total for one in event.islands}
                self.tokens |= totals
                self.tokens_before = max(self.tokens_before, event.tokens_trained - sum(totals.values()))
                for fragment, version in enumerate(event.versions):
                    self.reached(fragment, version)
            case JobResumed():
                self.tokens_before = max(self.tokens_before, event.tokens_trained)
                for fragment, version in enumerate(event.versions):
                    self.reached(fragment, version)
            case IslandReported(report=Progress() as report):
                life = (str(event.island), int(event.incarnation))
                self.tokens[life] = max(self.tokens.get(life, 0), report.tokens_total)
        if self.whole:
            self.goodput.apply(event, record.effects)  # type: ignore[arg-type]  # its header says: a job's tape
            self.statistics.apply(event, record.effects)  # type: ignore[arg-type]

    def reached(self, fragment: int, version: int) -> None:
        self.versions[fragment] = max(self.versions.get(fragment, 0), version)

    def status(self, job: str, name: str) -> JobStatus:
        """Return the status of a job that has just begun, with the progress that is known."""
        view = core_status(Synchroniser(self.policy).state, self.at)
        return JobStatus.model_construct(
            job_id=job,
            name=name,
            started_at=self.started_at,
            at=self.at,
            view=view,
            goodput=self.goodput.summary(),
            statistics=self.statistics.summary(),
            loss_curve=self.statistics.evaluations.curve.all(),
            commands={},
            unigram_loss=None,
            fragment_parameters=[],
            last_known=True,
        ).with_view(
            epoch=self.epoch,
            tokens_trained=self.tokens_trained,
            global_version=sum(self.versions.values()),
            fragments=[
                one.model_copy(update={"version": self.versions.get(one.fragment, 0)}) for one in view.fragments
            ],
        )


def last_known(run_dir: Path, policy: JobPolicy, started_at: float, disk: Disk | None = None) -> LastKnown:
    """Return the progress that the job's files still show. Never raises for their contents."""
    disk = disk or LocalDisk()
    last = LastKnown(policy, started_at)
    for read in (_read_tape, _read_snapshot, _read_journal):
        try:
            read(run_dir, disk, last)
        except Exception as error:
            log.warning("some files of the job cannot be read: %s: %s", type(error).__name__, error)
    return last


def _read_tape(run_dir: Path, disk: Disk, last: LastKnown) -> None:
    for number, line in enumerate(chain(_sealed_lines(run_dir / TAPE, disk, last), _lines(run_dir / TAPE, disk))):
        try:
            text = line.decode()
            if (number == 0 or continuation_at(line)) and isinstance(header := decode_header(text), Header):
                last.started_at = header.started_at or last.started_at
                last.epoch = max(last.epoch, header.epoch)
            elif number and isinstance(record := decode_line(text), Record):
                last.apply(record)
        except Exception:
            last.whole = False  # what is summed over every event is summed up to here only


def _sealed_lines(path: Path, disk: Disk, last: LastKnown) -> Iterator[bytes]:
    """Yield the lines of the sealed segments before the first that cannot be read."""
    try:
        newest = begin_of(str(path), beginning(path, disk))
        for _, lines in sealed_lines(path, newest, disk) if newest is not None else ():
            yield from lines.splitlines()
    except (DataError, OSError) as error:
        last.whole = False
        log.warning("sealed segments of the tape are not read: %s", error)


def _read_snapshot(run_dir: Path, disk: Disk, last: LastKnown) -> None:
    with suppress(DataError):
        if (snapshot := read_snapshot(run_dir / SNAPSHOT, disk)) is not None:
            state = snapshot.core.state
            last.epoch, last.at = max(last.epoch, state.epoch), max(last.at, snapshot.at)
            last.tokens_least = max(last.tokens_least, state.tokens_trained)
            for current in state.rounds:
                last.reached(current.fragment, current.version)


def _read_journal(run_dir: Path, disk: Disk, last: LastKnown) -> None:
    folder = run_dir / JOURNAL
    for name, size in sorted(disk.files(folder).items()):
        place = 0
        while parse_segment_name(name) is not None and place < size:
            try:
                sizes = sizes_of(disk.read(folder / name, place, PREFIX_BYTES))
                facts = facts_of(disk.read(folder / name, place, PREFIX_BYTES + sizes.header))
            except DataError:
                break
            last.reached(facts.fragment, facts.version)
            last.epoch = max(last.epoch, facts.epoch)
            place += sizes.total


def _lines(path: Path, disk: Disk) -> Iterator[bytes]:
    """Yield the whole lines of a file, without those that are too long for a record."""
    place, rest = 0, b""
    while chunk := disk.read(path, place, CHUNK_BYTES):
        place += len(chunk)
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
        if len(rest) > LINE_BYTES_MAX:
            rest = b""
