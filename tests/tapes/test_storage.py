"""Tapes on disk: what was written comes back; a torn end is told from a damaged middle."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.core.events import JobStarted, TimerFired
from orchestrator.core.vocabulary import GraceTimer
from orchestrator.errors import DataError, InfrastructureError
from orchestrator.simulation.plan import WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.tape.driver import Driver
from orchestrator.tape.schema import Header, Record, with_checksum, without_checksum
from orchestrator.tape.storage import TapeWriter, read_tape

HEADER = Header("a job", sample_policy(2), 1.7e9)
RECORDS = tuple(Record(n, JobStarted(0.0) if n == 1 else TimerFired(n / 3, GraceTimer(0), n), ()) for n in range(1, 6))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "tape.jsonl"


def _write(path, close=True):
    writer = TapeWriter(path, HEADER)
    for record in RECORDS:
        writer.append(record)
    if close:
        writer.close()
    return writer


def test_a_sealed_tape_comes_back_whole(path):
    _write(path)
    tape = read_tape(path)
    assert (tape.header, tape.records, tape.torn) == (HEADER, RECORDS, None)
    assert tape.footer.end == len(RECORDS)


def test_a_tape_can_be_read_while_it_is_written(path):
    writer = _write(path, close=False)
    tape = read_tape(path)
    assert (tape.records, tape.footer, tape.torn) == (RECORDS, None, None)
    writer.close()


def test_a_packed_tape_is_read_like_any_and_half_of_one_is_an_error(path):
    _write(path)
    packed = path.with_name("tape.jsonl.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_tape(packed) == read_tape(path)
    packed.write_bytes(packed.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"cannot be unpacked: .* Check that it was copied"):
        read_tape(packed)


def test_a_line_that_breaks_off_is_left_out_and_reported(path):
    _write(path, close=False).close()
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:4]) + whole[4][:20])
    tape = read_tape(path)
    assert tape.records == RECORDS[:3]
    assert "breaks off after 20" in tape.torn


def test_a_last_line_of_rubbish_is_left_out_and_reported(path):
    _write(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-2], "\x00\x00\x00"]) + "\n")
    tape = read_tape(path)
    assert tape.records == RECORDS[:-1]
    assert "is damaged" in tape.torn


def test_damage_in_the_middle_is_an_error_that_names_the_line(path):
    _write(path)
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:-9]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"line 3 .* is damaged"):
        read_tape(path)


def test_a_lost_line_is_noticed(path):
    _write(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:2] + lines[3:]) + "\n")
    with pytest.raises(DataError, match="is step 3, not 2"):
        read_tape(path)


def test_a_changed_record_breaks_the_seal(path):
    _write(path)
    path.write_text(_changed(path.read_text(), '"serial":3', '"serial":4'))
    with pytest.raises(DataError, match="changed after it was sealed"):
        read_tape(path)


def _changed(tape, old, new):
    """By somebody who knows of checksums."""
    header, *lines, footer = tape.splitlines()
    lines = [with_checksum(without_checksum(line).replace(old, new)) for line in lines]
    return "\n".join([header, *lines, footer]) + "\n"


def test_a_flipped_bit_anywhere_in_a_record_is_noticed(path):
    """Also where what it says can still be read."""
    _write(path)
    whole = path.read_bytes()
    begin = whole.index(b'{"n":3')
    for where in range(begin, whole.index(b"\n", begin)):
        path.write_bytes(whole[:where] + bytes([whole[where] ^ 1]) + whole[where + 1 :])
        with pytest.raises(DataError, match=r"line 4 of .* is damaged"):
            read_tape(path)


def test_a_tape_without_checksums_is_read_as_ever(path):
    _write(path)
    tape = read_tape(path)
    path.write_text("".join(without_checksum(line) + "\n" for line in path.read_text().splitlines()))
    assert read_tape(path) == tape


def test_two_writers_of_one_file_are_noticed(path):
    _write(path)
    path.write_text(path.read_text() + path.read_text().splitlines()[1] + "\n")
    with pytest.raises(DataError, match="continues after its footer"):
        read_tape(path)


def test_a_tape_is_never_overwritten(path):
    _write(path)
    with pytest.raises(FileExistsError):
        TapeWriter(path, HEADER)


def test_other_files_are_no_tapes(tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"schema": "something/1"}\n')
    with pytest.raises(DataError, match="not a tape of schema"):
        read_tape(other)
    with pytest.raises(DataError, match="cannot be read"):
        read_tape(tmp_path / "missing")


def test_the_driver_writes_before_anybody_can_act(path):
    """What ``step`` returned is in the file by then, also if the process dies while acting on it."""
    policy = sample_policy(2)
    world = World(policy, WorldPlan(step_s=(0.05, 0.05)), seed=1)
    writer = TapeWriter(path, Header("a job", policy))
    driver = Driver(world.core, (), writer)
    effects = driver.step(JobStarted(0.0))
    assert read_tape(path).records == (Record(1, JobStarted(0.0), effects),)
    writer.close()


# ── going on where a writer died ──────────────────────────────────────────────────────────────────────────────────


def _die(path, upto, torn=b""):
    """A writer that wrote ``upto`` records, and a part of the next, and died."""
    writer = TapeWriter(path, HEADER)
    for record in RECORDS[:upto]:
        writer.append(record)
    writer.let_go()
    with path.open("ab") as file:
        file.write(torn)


@pytest.mark.parametrize("torn", [b"", b'{"n":4,"eve', b"\x00\x00\xff\n", '{"n":4,"event":{"é'.encode()[:-1]])
def test_a_tape_that_another_writer_finishes_is_the_same_as_one_written_at_once(path, torn):
    _die(path, 3, torn)
    writer, tape = TapeWriter.reopen(path)
    assert (tape.records, tape.footer) == (RECORDS[:3], None)
    for record in RECORDS[3:]:
        writer.append(record)
    writer.sync()
    writer.close()
    at_once = path.with_name("other.jsonl")
    _write(at_once)
    assert path.read_bytes() == at_once.read_bytes()
    assert read_tape(path).records == RECORDS


def test_two_writers_at_once_are_refused(path):
    writer = _write(path, close=False)
    with pytest.raises(InfrastructureError, match="another process"):
        TapeWriter.reopen(path)
    writer.let_go()
    TapeWriter.reopen(path)[0].close()
    assert read_tape(path).footer.end == len(RECORDS)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from orchestrator.tape.storage import TapeWriter
from tests.tapes.test_storage import HEADER, RECORDS
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = TapeWriter(Path(sys.argv[1]), HEADER)
writer.append(RECORDS[0])
room = Path(sys.argv[1]).stat().st_size + 20
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
for _ in range(2):
    try:
        writer.append(RECORDS[1])
    except OSError:
        print("full")
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
for record in RECORDS[1:]:
    writer.append(record)
writer.close()
"""


def test_a_full_disk_leaves_half_a_record_to_nobody(path):
    """A real limit of the system's, in a process of its own; once there is room the record is written, once."""
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-c", FULL_DISK, str(path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["full", "full"]
    assert read_tape(path).records == RECORDS
