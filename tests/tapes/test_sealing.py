"""A tape of sealed segments is one tape: it loses nothing, whenever process or power go, and refuses what is not its own."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import zstandard

from api.run.records import TapeReader
from orchestrator.core.events import Event, JobStarted, TimerFired
from orchestrator.core.vocabulary import GraceTimer
from orchestrator.errors import DataError
from orchestrator.simulation.plan import sample_policy
from orchestrator.tape.replay import replay
from orchestrator.tape.schema import SEGMENT_BYTES_MAX, Header, Mark, Record, decode_line
from orchestrator.tape.sealing import seal, unseal
from orchestrator.tape.storage import TapeWriter, read_tape, sealed_path
from tests.golden import record as golden
from tests.swarm.disk import Died, DiskFault, Operation, SimulatedDisk, no_faults

HEADER = Header("a job", sample_policy(2), 1.7e9)
PATH = Path("/job/tape.jsonl")
SEGMENTS, EACH = 4, 5


def event(n: int) -> Event:
    return JobStarted(0.0) if n == 1 else TimerFired(float(n), GraceTimer(n % 3), n)


def append(writer: TapeWriter, count: int) -> None:
    for n in range(writer.count + 1, writer.count + count + 1):
        writer.append(Record(n, event(n), ()))


def write(path: Path) -> TapeWriter:
    """A tape of SEGMENTS segments, the newest one plain; behind each mark lie two records when the tape is cut there."""
    writer = TapeWriter(path, HEADER)
    for _ in range(SEGMENTS - 1):
        append(writer, EACH)
        mark = writer.mark
        writer.seal(mark)
        append(writer, 2)
        writer.cut(mark)
    append(writer, EACH)
    return writer


def whole(path: Path, count: int) -> TapeWriter:
    """The same tape in one file."""
    writer = TapeWriter(path, HEADER)
    append(writer, count)
    return writer


def test_segments_are_read_as_one_tape_whose_footer_is_that_of_one_file(tmp_path: Path) -> None:
    with write(tmp_path / "tape.jsonl") as writer:
        count = writer.count
        during = read_tape(writer.path)
    with whole(tmp_path / "one.jsonl", count):
        pass
    assert len(list((tmp_path / "tape.sealed").iterdir())) == SEGMENTS - 1
    assert read_tape(tmp_path / "tape.jsonl") == read_tape(tmp_path / "one.jsonl")
    assert (during.records, during.footer) == (read_tape(tmp_path / "one.jsonl").records, None)


def test_a_tape_of_many_records_is_sealed_in_a_seventh_of_its_size(tmp_path: Path) -> None:
    writer = whole(tmp_path / "tape.jsonl", 5000)
    writer.seal(writer.mark)
    assert sealed_path(writer.path, 1).stat().st_size < writer.path.stat().st_size / 7


@pytest.mark.parametrize("after", [0, 1, 4, 5, 6, 7, 12, 21, 22, 26, 99])
def test_a_reader_finds_every_record_once_from_anywhere(tmp_path: Path, after: int) -> None:
    writer = write(tmp_path / "tape.jsonl")
    assert numbers(TapeReader(writer.path, after)) == list(range(after + 1, writer.count + 1))


def test_a_reader_that_follows_loses_nothing_when_the_tape_is_cut_before_behind_or_where_it_stands(
    tmp_path: Path,
) -> None:
    writer = TapeWriter(tmp_path / "tape.jsonl", HEADER)
    readers = [TapeReader(writer.path) for _ in range(3)]
    seen: list[list[int]] = [[], [], []]
    for _ in range(4):
        append(writer, EACH)
        seen[0] += numbers(readers[0])
        mark = writer.mark
        writer.seal(mark)
        seen[1] += numbers(readers[1])
        append(writer, 3)
        seen[2] += numbers(readers[2])
        writer.cut(mark)
    append(writer, 1)
    for reader, numbers_seen in zip(readers, seen, strict=True):
        numbers_seen += numbers(reader)
        assert numbers_seen == list(range(1, writer.count + 1))
    writer.close()
    assert not numbers(readers[0])
    assert readers[0].sealed


def numbers(reader: TapeReader) -> list[int]:
    return [decoded.n for line in lines(reader) if isinstance(decoded := decode_line(line.decode()), Record)]


def lines(reader: TapeReader) -> Iterator[bytes]:
    while read := reader.read():
        yield from (line for line in read if not line.startswith(b'{"schema"'))


def story(fault: Callable[[Operation, Path], DiskFault | None], seed: int, lives: int) -> tuple[int, int]:
    """One writer after another appends, syncs and seals until it dies. Return how many records were synced, and are there.

    Every other one goes on from the last mark, whether it was sealed, cut, or lost.
    """
    chance, disk, synced = Random(seed), SimulatedDisk(), 0
    TapeWriter(PATH, HEADER, disk).sync()  # a job is announced only then
    disk.lose_process()
    mark: Mark | None = None
    for life in range(lives):
        disk.fault_source = fault if life + 1 < lives else no_faults
        try:
            writer, tape = TapeWriter.reopen(PATH, disk, mark if life % 2 else None)
            assert tape.count >= synced
            assert [r.event for r in tape.records] == [event(n) for n in range(tape.before + 1, tape.count + 1)]
            for _ in range(4):
                append(writer, chance.randint(1, 6))
                if chance.random() < 0.5:
                    writer.sync()
                    synced = writer.synced_count
                mark = writer.mark
                writer.seal(mark)
                append(writer, chance.randint(0, 3))
                writer.cut(mark)
                append(writer, chance.randint(0, 3))
        except Died:
            pass
        disk.lose_process()
        if chance.random() < 0.5:
            disk.lose_power(chance)
    disk.fault_source = no_faults
    return synced, TapeWriter.reopen(PATH, disk)[1].count


@pytest.mark.parametrize("number", range(1, 13))
@pytest.mark.parametrize("kind", [DiskFault.BEFORE, DiskFault.AFTER])
def test_a_death_between_any_two_operations_of_sealing_loses_nothing(number: int, kind: DiskFault) -> None:
    for seed in range(8):
        left = iter(range(number, -1, -1))

        def fault(operation: Operation, _: Path, left: Iterator[int] = left) -> DiskFault | None:
            return kind if operation is not Operation.APPEND and next(left, -1) == 1 else None

        synced, found = story(fault, seed, 3)
        assert found >= synced > 0


@pytest.mark.parametrize("seed", range(40))
def test_many_deaths_torn_writes_and_losses_of_power_lose_nothing_that_was_synced(seed: int) -> None:
    faults = Random(seed)

    def fault(operation: Operation, _: Path) -> DiskFault | None:
        kinds = [DiskFault.BEFORE, DiskFault.AFTER, *([DiskFault.TORN] if operation is Operation.APPEND else [])]
        return faults.choice(kinds) if faults.random() < 0.03 else None

    synced, found = story(fault, seed, 12)
    assert found >= synced > 0


def test_a_full_disk_leaves_the_tape_as_it_was_and_it_is_sealed_later() -> None:
    full = iter([DiskFault.FULL, None, DiskFault.FULL, None, None])
    disk = SimulatedDisk(lambda operation, _: next(full, None) if operation is Operation.REPLACE else None)
    writer = TapeWriter(PATH, HEADER, disk)
    append(writer, EACH)
    mark = writer.mark
    with pytest.raises(OSError, match="No space left"):
        writer.seal(mark)
    writer.seal(mark)
    append(writer, 2)
    with pytest.raises(OSError, match="No space left"):
        writer.cut(mark)
    append(writer, 2)
    writer.cut(mark)
    append(writer, 2)
    writer.sync()
    assert writer.synced_count == read_tape(PATH, disk).count == EACH + 6


def test_a_segment_that_was_sealed_and_not_cut_is_sealed_anew(tmp_path: Path) -> None:
    writer = whole(tmp_path / "tape.jsonl", EACH)
    writer.seal(writer.mark)
    writer.let_go()
    writer, _ = TapeWriter.reopen(writer.path)
    append(writer, EACH)
    mark = writer.mark
    writer.seal(mark)
    writer.cut(mark)
    assert read_tape(writer.path).count == 2 * EACH


def test_with_the_snapshot_at_the_last_cut_no_sealed_segment_is_read(tmp_path: Path) -> None:
    writer = whole(tmp_path / "tape.jsonl", EACH)
    mark = writer.mark
    writer.seal(mark)
    append(writer, 2)
    writer.cut(mark)
    writer.let_go()
    shutil.rmtree(tmp_path / "tape.sealed")
    writer, tape = TapeWriter.reopen(writer.path, mark=mark)
    assert (tape.before, [record.n for record in tape.records]) == (EACH, [EACH + 1, EACH + 2])
    later = writer.mark
    writer.let_go()
    assert TapeWriter.reopen(writer.path, mark=later)[1].before == EACH + 2


@pytest.mark.parametrize("path", golden.tapes(), ids=lambda path: path.name.split(".")[0])
def test_a_tape_of_an_earlier_release_goes_on_and_is_sealed_from_there(tmp_path: Path, path: Path) -> None:
    *lines, _ = gzip.decompress(path.read_bytes()).splitlines(keepends=True)  # without its footer
    half, tape = len(lines) // 2, tmp_path / "tape.jsonl"
    tape.write_bytes(b"".join(lines[:half]))
    writer, before = TapeWriter.reopen(tape)
    records = read_tape(path).records
    assert before.count == half - 1
    for record in records[before.count :]:
        writer.append(record)
        if record.n in (half + 10, half + 100):
            mark = writer.mark
            writer.seal(mark)
            writer.cut(mark)
    writer.close()
    again = read_tape(tape)
    assert again.records == records
    assert replay(again).exact
    assert len(list((tmp_path / "tape.sealed").iterdir())) == 2
    assert numbers(TapeReader(tape)) == list(range(1, len(records) + 1))


def test_a_sealed_tape_without_checksums_of_its_lines_is_what_it_was() -> None:
    for lines in (b'{"n":1}\n{"n":2}\n', b'{"schema":"x","crc":"00000000"}\n', b"no JSON\n"):
        assert unseal("a segment", seal(lines)) == lines


def truncated(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path, _: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def longer(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def huge(path: Path, _: Path) -> None:
    """Unpacks to more memory than is given to it."""
    compressor = zstandard.ZstdCompressor(level=1).compressobj(size=SEGMENT_BYTES_MAX + (1 << 20))
    chunks = [compressor.compress(bytes(1 << 20)) for _ in range((SEGMENT_BYTES_MAX >> 20) + 1)]
    path.write_bytes(b"".join([*chunks, compressor.flush()]))


def of_unknown_size(path: Path, _: Path) -> None:
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    path.write_bytes(compressor.compress(bytes(1 << 20)) + compressor.flush())


def forged(path: Path, _: Path) -> None:
    lines = unseal("it", path.read_bytes()).replace(b'"at":9.0', b'"at":8.5')
    path.write_bytes(seal(b"".join(line.partition(b',"crc"')[0] + b"}\n" for line in lines.splitlines())))


def of_another_tape(path: Path, other: Path) -> None:
    shutil.copy(sealed_path(other, 2), path)


def swapped(path: Path, _: Path) -> None:
    shutil.copy(path.with_name("00000001.zst"), path)


def removed(path: Path, _: Path) -> None:
    path.unlink()


def a_folder(path: Path, _: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [truncated, flipped, longer, huge, of_unknown_size, forged, of_another_tape, swapped, removed, a_folder]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_segment_is_refused_by_its_name(tmp_path: Path, damage: Callable[[Path, Path], None]) -> None:
    other = TapeWriter(tmp_path / "other" / "tape.jsonl", Header("another", sample_policy(3)))
    for _ in range(2):
        append(other, EACH)
        mark = other.mark
        other.seal(mark)
        other.cut(mark)
    writer = write(tmp_path / "tape.jsonl")
    writer.let_go()
    damage(sealed_path(writer.path, 2), other.path)
    with pytest.raises(DataError, match=r"tape\.sealed/00000002\.zst"):
        read_tape(writer.path)
    with pytest.raises(DataError, match=r"tape\.sealed/00000002\.zst"):
        TapeWriter.reopen(writer.path)
    with pytest.raises(DataError, match=r"tape\.sealed/00000002\.zst"):
        numbers(TapeReader(writer.path))


def test_a_link_in_place_of_a_segment_leads_the_service_nowhere(tmp_path: Path) -> None:
    writer = write(tmp_path / "tape.jsonl")
    path = sealed_path(writer.path, 1)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"00000001\.zst"):
        TapeReader(writer.path).read()
