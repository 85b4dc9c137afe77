"""A snapshot and the tape's records after it equal the whole tape. A snapshot that cannot be trusted is not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.errors import DataError
from orchestrator.host.retry import SnapshotWriter
from orchestrator.host.state_view import core_status
from orchestrator.simulation.plan import WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.system.disk import LocalDisk
from orchestrator.tape import storage
from orchestrator.tape.driver import Driver, Pending
from orchestrator.tape.replay import Recovered, fresh_core, recover
from orchestrator.tape.schema import Header, Mark, Record
from orchestrator.tape.snapshot import Snapshot, decode, encode
from orchestrator.tape.storage import TapeWriter, build, read_snapshot, read_tape, write_snapshot
from tests.simulation.random_faults import random_faults
from tests.waiting import wait_until

HEADER = Header("a job", sample_policy(4, quorum=2, steps=150))
POINTS = 8


@pytest.fixture(scope="module")
def records() -> tuple[Record, ...]:
    plan = WorldPlan((0.05, 0.05, 0.07, 0.1), faults=random_faults(3, HEADER.policy, 6.0, 8))
    return World(HEADER.policy, plan, seed=3).run().tape.records


def fresh_folds() -> tuple[Goodput, Statistics]:
    return Goodput(HEADER.policy), Statistics(HEADER.policy)


def known(past: Recovered) -> Any:
    """All that anybody asks a synchroniser that came back."""
    told = [fold.summary() for fold in past.folds]  # type: ignore[attr-defined]
    pending = past.pending.timers, past.pending.commands, past.started
    return core_status(past.core.state, past.at), told, pending, past.count, past.at


def write(folder: Path, records: tuple[Record, ...], at: int) -> Path:
    """A tape of these records by a synchroniser that took a snapshot behind the one numbered ``at``, and died."""
    path = folder / "tape.jsonl"
    tape = TapeWriter(path, HEADER)
    driver = Driver(fresh_core(HEADER), (Pending(), *fresh_folds()), tape)
    for record in records:
        driver.step(record.event)
        if record.n == at:
            taken = Snapshot(tape.mark, record.event.at, driver.core, driver.folds)  # type: ignore[arg-type]
            write_snapshot(folder / "snapshot", encode(taken, build()))
    tape.let_go()
    return path


def test_a_snapshot_and_the_rest_of_the_tape_are_worth_the_whole_tape(
    tmp_path: Path, records: tuple[Record, ...]
) -> None:
    for number in range(POINTS + 1):
        at = max(1, len(records) * number // POINTS)
        path = write(tmp_path / str(at), records, at)
        whole = recover(read_tape(path), fresh_folds())
        snapshot = read_snapshot(path.parent / "snapshot")
        assert snapshot is not None
        writer, tape = TapeWriter.reopen(path, mark=snapshot.mark)
        assert (tape.before, tape.count) == (at, len(records))
        past = recover(tape, fresh_folds(), snapshot)
        assert known(past) == known(whole)
        assert writer.mark.count == len(records)
        writer.close()
        assert read_tape(path).footer is not None  # its digest is that of all lines


def test_a_snapshot_of_another_tape_or_of_more_than_is_left_of_it_is_passed_over(
    tmp_path: Path, records: tuple[Record, ...]
) -> None:
    path = write(tmp_path, records, len(records) // 2)
    snapshot = read_snapshot(tmp_path / "snapshot")
    assert snapshot is not None
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(records) // 3]))  # a loss of power took the rest
    writer, tape = TapeWriter.reopen(path, mark=snapshot.mark)
    writer.let_go()
    assert tape.before == 0
    assert known(recover(tape, fresh_folds(), snapshot)) == known(recover(read_tape(path), fresh_folds()))
    other = Mark(snapshot.mark.count, snapshot.mark.size, "0" * 32)
    path.write_bytes(b"".join(lines))
    writer, tape = TapeWriter.reopen(path, mark=other)
    writer.let_go()
    assert tape.before == 0


def test_what_a_snapshot_stands_for_is_gone_through_in_small_chunks(
    tmp_path: Path, records: tuple[Record, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reading(LocalDisk):
        def read(self, path: Path, start: int = 0, count: int = -1) -> bytes:
            reads.append(raw := super().read(path, start, count))
            return raw

    reads: list[bytes] = []
    monkeypatch.setattr(storage, "CHUNK_BYTES", 997)
    path = write(tmp_path, records, len(records) - 2)
    snapshot = read_snapshot(tmp_path / "snapshot")
    assert snapshot is not None
    writer, tape = TapeWriter.reopen(path, Reading(), snapshot.mark)
    assert tape.before == len(records) - 2
    _, *before, behind = reads  # the first is the header's
    assert (len(before), sum(map(len, before))) == (
        -(-snapshot.mark.size // 997),
        snapshot.mark.size,
    )
    assert behind == path.read_bytes()[snapshot.mark.size :]
    assert writer.mark.size == path.stat().st_size
    writer.close()
    assert read_tape(path).footer is not None


def test_damage_anywhere_and_another_build_are_refused_with_the_reason(
    tmp_path: Path, records: tuple[Record, ...]
) -> None:
    write(tmp_path, records[:200], 100)
    path = tmp_path / "snapshot"
    raw = path.read_bytes()
    decode(raw, build())
    with pytest.raises(DataError, match="another build"):
        decode(raw, "another")
    for place in range(0, len(raw), max(1, len(raw) // 200)):
        with pytest.raises(DataError):
            decode(raw[:place] + bytes([raw[place] ^ 0x10]) + raw[place + 1 :], build())
        with pytest.raises(DataError):
            decode(raw[:place], build())


def test_one_is_due_by_what_would_be_remembered_however_short_each_life_is(
    tmp_path: Path, records: tuple[Record, ...]
) -> None:
    path = write(tmp_path, records[:8], at=0)
    tape, written = TapeWriter.reopen(path)
    past = recover(written, fresh_folds())
    driver = Driver(past.core, (past.pending, *past.folds), tape, past.count)
    snapshots = SnapshotWriter(tmp_path / "snapshot", tape, past.before, every=5)
    driver.step(records[8].event)
    snapshots.consider(driver, records[8].event.at)
    taken = wait_until(lambda: read_snapshot(tmp_path / "snapshot"), "a snapshot", pause_s=0.01)
    assert taken.mark.count == 9
    tape.let_go()


def test_where_there_is_none_there_is_none(tmp_path: Path) -> None:
    assert read_snapshot(tmp_path / "snapshot") is None
