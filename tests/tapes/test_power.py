"""Tapes after a loss of power: what was never synced is cut off, what was is missed loudly, a failed sync is made good."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random
from typing import Any

import pytest

from orchestrator.core.effects import MergeFragment
from orchestrator.core.events import Event, JobStarted, MergeCompleted, SynchroniserRestarted, TimerFired
from orchestrator.core.vocabulary import CloseReason, FragmentId, GraceTimer
from orchestrator.errors import DataError
from orchestrator.simulation.plan import sample_policy
from orchestrator.system.disk import HeldFile, LocalDisk
from orchestrator.tape.schema import Header, Record
from orchestrator.tape.storage import TapeWriter, read_tape
from tests.swarm.disk import DiskFault, Operation, SimulatedDisk

HEADER = Header("a job", sample_policy(2), 1.7e9)
PATH = Path("/job/tape.jsonl")
DECIDED = MergeFragment(1, FragmentId(0), 1, 4, (), CloseReason.EVERYONE_IN, "all two are in")
MADE = MergeCompleted(6.0, FragmentId(0), 1, "made", 0.1, "before")


def written(disk: SimulatedDisk, *events: Event, decided_at: int = 0, synced_at: int = 0) -> TapeWriter:
    """A tape of these events; ``DECIDED`` is what follows from the one, and the tape is synced behind the other."""
    writer = TapeWriter(PATH, HEADER, disk)
    writer.sync()
    for n, event in enumerate(events, start=1):
        writer.append(Record(n, event, (DECIDED,) if n == decided_at else ()))
        if n == synced_at:
            writer.sync()
    return writer


def spoil(disk: SimulatedDisk, n: int) -> None:
    """The record is zeros."""
    data = disk.read(PATH)
    begin = data.index(b'{"n":%d,' % n)
    end = data.index(b"\n", begin)
    disk.remove(PATH)
    disk.append(PATH, [data[:begin] + bytes(end - begin) + data[end:]])


TICKS = tuple(TimerFired(float(n), GraceTimer(0), n) for n in range(1, 6))


def test_a_damaged_record_before_good_ones_is_cut_off_with_them_when_none_was_synced() -> None:
    disk = SimulatedDisk()
    written(disk, JobStarted(0.0), *TICKS).let_go()
    spoil(disk, 3)
    writer, tape = TapeWriter.reopen(PATH, disk)
    assert [record.n for record in tape.records] == [1, 2]
    assert tape.torn is not None
    assert "line 4 and what follows were never synced" in tape.torn
    writer.append(Record(3, TICKS[0], ()))
    assert [record.n for record in read_tape(PATH, disk).records] == [1, 2, 3]


@pytest.mark.parametrize(
    ("events", "decided_at"),
    [
        ((JobStarted(0.0), *TICKS[:2], TICKS[2], MADE), 4),  # the decision is behind the damage
        ((JobStarted(0.0), TICKS[0], TICKS[1], MADE), 3),  # the decision is what is damaged
        ((JobStarted(0.0), *TICKS[:2], SynchroniserRestarted(3.5, 2), TICKS[4]), 0),
    ],
)
def test_a_damaged_record_that_was_synced_ends_the_recovery(events: tuple[Event, ...], decided_at: int) -> None:
    disk = SimulatedDisk()
    written(disk, *events, decided_at=decided_at).let_go()
    spoil(disk, 3)
    with pytest.raises(DataError, match=r"line 4 of .* is damaged"):
        TapeWriter.reopen(PATH, disk)


def test_a_merge_decided_before_the_damage_proves_nothing() -> None:
    disk = SimulatedDisk()
    written(disk, JobStarted(0.0), TICKS[0], TICKS[1], MADE, decided_at=2).let_go()
    spoil(disk, 3)
    assert [record.n for record in TapeWriter.reopen(PATH, disk)[1].records] == [1, 2]


@pytest.mark.parametrize("seed", range(40))
def test_what_was_synced_is_there_and_what_is_read_was_written(seed: int) -> None:
    disk, events = SimulatedDisk(), (JobStarted(0.0), *TICKS)
    written(disk, *events, synced_at=3)
    disk.lose_power(Random(seed))
    _, tape = TapeWriter.reopen(PATH, disk)
    assert 3 <= len(tape.records) <= len(events)
    assert [record.event for record in tape.records] == list(events[: len(tape.records)])


def test_what_a_sync_could_not_write_is_written_by_the_next() -> None:
    failing = iter([None, DiskFault.ERROR])

    def fate(operation: Operation, _: Path) -> DiskFault | None:
        return next(failing, None) if operation is Operation.SYNC else None

    disk = SimulatedDisk(fate)
    writer = written(disk, JobStarted(0.0), *TICKS)
    with pytest.raises(OSError, match="output error"):
        writer.sync()
    assert writer.synced_count == 0
    writer.sync()
    assert writer.synced_count == 6
    disk.lose_power()
    assert len(TapeWriter.reopen(PATH, disk)[1].records) == 6


def test_a_sealed_tape_is_durable() -> None:
    disk = SimulatedDisk()
    written(disk, JobStarted(0.0)).close()
    disk.lose_power()
    tape = read_tape(PATH, disk)
    assert tape.footer is not None
    assert tape.footer.end == 1


def test_a_seal_that_is_refused_is_asked_for_again() -> None:
    faults = iter([DiskFault.FULL, None, DiskFault.ERROR, DiskFault.ERROR])
    armed = False
    disk = SimulatedDisk(lambda *_: next(faults, None) if armed else None)
    writer = written(disk, JobStarted(0.0))
    armed = True
    for _ in range(3):
        with pytest.raises(OSError, match=r"No space|output error"):
            writer.close()
    writer.close()
    disk.lose_power()
    assert read_tape(PATH, disk).footer is not None


class FailsOnce(LocalDisk):
    """A real disk whose second sync of a held file fails."""

    def hold(self, path: Path, *, new: bool) -> HeldFile:
        file: Any = super().hold(path, new=new)
        sync, outcomes = file.sync, iter([None, OSError(errno.EIO, "Input/output error")])

        def failing() -> None:
            if (error := next(outcomes, None)) is not None:
                raise error
            sync()

        file.sync = failing
        return file


def test_on_a_real_disk_writing_anew_changes_no_byte(tmp_path: Path) -> None:
    path = tmp_path / "tape.jsonl"
    writer = TapeWriter(path, HEADER, FailsOnce())
    writer.sync()
    writer.append(Record(1, JobStarted(0.0), ()))
    before = path.read_bytes()
    with pytest.raises(OSError, match="output error"):
        writer.sync()
    writer.append(Record(2, TICKS[0], ()))
    writer.sync()
    assert path.read_bytes().startswith(before)
    writer.close()
    assert [record.n for record in read_tape(path).records] == [1, 2]
