"""What a synchroniser finds in a run folder that somebody damaged: never a beginning beside a past, and never a wait."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import AtollError, ConfigurationError, DataError
from orchestrator.host.job_files import open_files
from orchestrator.host.last_known import last_known
from orchestrator.tape.schema import Header
from orchestrator.tape.storage import TapeWriter, read_tape
from tests.harness.shell import Fate, spec
from tests.journal.test_crash_points import run

SNAPSHOTS = {"durability": {"snapshot_every_records": 40}}


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that merged each of its fragments twice, and whose synchroniser was killed."""
    folder = tmp_path_factory.mktemp("past") / "job"
    run(folder, Fate(), **SNAPSHOTS).shell.die()
    assert (folder / "snapshot").exists()
    return folder


@pytest.fixture
def folder(past: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(past, tmp_path / "job"))


def opened(folder: Path) -> Any:
    job = spec(**SNAPSHOTS)
    return open_files(folder, "job", job, job.policy(), 0.0)


def header_only(tape: Path) -> None:
    tape.write_bytes(tape.read_bytes().partition(b"\n")[0] + b"\n")


def half_a_header(tape: Path) -> None:
    tape.write_bytes(tape.read_bytes()[:40])


def flip_in_header(tape: Path) -> None:
    raw = bytearray(tape.read_bytes())
    raw[60] ^= 0x80
    tape.write_bytes(raw)


def nonsense_header(tape: Path) -> None:
    rest = tape.read_bytes().partition(b"\n")[2]
    tape.write_bytes(b'{"schema":"atoll-tape/1","job":5,"epoch":[],"started_at":{},"policy":7}\n' + rest)


def fifo(tape: Path) -> None:
    tape.unlink()
    os.mkfifo(tape)


def a_folder(tape: Path) -> None:
    tape.unlink()
    tape.mkdir()


def no_utf8(tape: Path) -> None:
    tape.write_bytes(b"\xff" * 5000)


TAPES: dict[str, Callable[[Path], None]] = {
    "emptied": lambda tape: tape.write_bytes(b""),
    "removed": Path.unlink,
    "a newline": lambda tape: tape.write_bytes(b"\n"),
    "zeros": lambda tape: tape.write_bytes(bytes(tape.stat().st_size)),
    "header only": header_only,
    "half a header": half_a_header,
    "a bit of the header": flip_in_header,
    "a header of nonsense": nonsense_header,
    "nesting": lambda tape: tape.write_bytes(b"[" * 200_000 + b"\n" + b"[" * 200_000 + b"\n"),
    "no UTF-8": no_utf8,
    "a FIFO": fifo,
    "a folder": a_folder,
}
BESIDE = {
    "all of it": (),
    "without snapshot": ("snapshot",),
    "without journal": ("journal",),
    "with an emptied journal": (),
}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("damage", TAPES)
def test_a_damaged_tape_beside_a_past_is_damage_and_no_beginning(folder: Path, damage: str, beside: str) -> None:
    for name in BESIDE[beside]:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    if "emptied" in beside:
        for segment in (folder / "journal").iterdir():
            segment.write_bytes(b"")
    TAPES[damage](folder / "tape.jsonl")
    journal = {path.name: path.read_bytes() for path in (folder / "journal").glob("*")}
    with pytest.raises((DataError, OSError)) as refused:
        opened(folder)
    if damage in ("emptied", "removed", "half a header"):
        assert "the job has run before" in str(refused.value)
        assert "Restore the tape" in str(refused.value)
    after = {path.name: path.read_bytes() for path in (folder / "journal").glob("*")}
    assert after == journal, "what was merged is there once the tape is put back"


@pytest.mark.parametrize("name", ["status.json", "report.json", "merged.safetensors", "snapshot"])
def test_each_single_witness_of_a_past_is_enough(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    (tmp_path / "tape.jsonl").touch()
    with pytest.raises(DataError, match="is empty, but the job has run before"):
        opened(tmp_path)
    shutil.rmtree(tmp_path)
    (tmp_path / "checkpoints" / "000001").mkdir(parents=True)
    with pytest.raises(DataError, match="is missing, but the job has run before"):
        opened(tmp_path)


def test_who_died_before_the_first_line_was_whole_begins(tmp_path: Path) -> None:
    """Nothing of a past is there: only what a synchroniser writes before its tape."""
    (tmp_path / "boot").write_text("x")
    (tmp_path / "resumed.json").write_text("{}")
    (tmp_path / "logs").mkdir()
    (tmp_path / "tape.jsonl").write_text('{"schema": "atoll-ta')
    assert opened(tmp_path).past is None


def test_the_tape_of_another_job_is_refused_and_left_alone(folder: Path, tmp_path: Path) -> None:
    job = spec(**SNAPSHOTS)
    open_files(tmp_path / "other", "other", job, job.policy(), 0.0).tape.let_go()
    shutil.copy(tmp_path / "other" / "tape.jsonl", folder / "tape.jsonl")
    with pytest.raises(ConfigurationError, match="another job"):
        opened(folder)


@pytest.mark.parametrize("damage", TAPES)
def test_how_far_the_job_was_is_told_as_far_as_anything_still_says_it(folder: Path, damage: str) -> None:
    job = spec(**SNAPSHOTS)
    TAPES[damage](folder / "tape.jsonl")
    before = sorted(path.name for path in folder.rglob("*"))
    status = last_known(folder, job.policy(), 7.0).status("job", "trial").model_dump(mode="json")
    json.dumps(status)
    assert sorted(path.name for path in folder.rglob("*")) == before
    assert status["last_known"] is True
    assert status["view"]["global_version"] == 6, "the journal says so, and the snapshot nearly"
    assert status["view"]["tokens_trained"] > 0, "the snapshot, or the tape behind its header"


def test_a_damaged_line_in_the_middle_costs_its_own_record_only(folder: Path) -> None:
    tape = folder / "tape.jsonl"
    lines = tape.read_bytes().split(b"\n")
    lines[len(lines) // 2] = b"\xfe" + lines[len(lines) // 2]
    tape.write_bytes(b"\n".join(lines))
    shutil.rmtree(folder / "journal")
    (folder / "snapshot").unlink()
    with pytest.raises(DataError):
        opened(folder)
    known = last_known(folder, spec(**SNAPSHOTS).policy(), 7.0)
    assert sum(known.versions.values()) == 6
    assert known.tokens_trained > 0


@pytest.mark.parametrize("damaged", [None, 1, 2])
def test_sealed_segments_tell_what_was_last_known_up_to_the_first_that_is_damaged(
    folder: Path, damaged: int | None
) -> None:
    path = folder / "tape.jsonl"
    tape = read_tape(path)
    path.unlink()
    assert isinstance(tape.header, Header)
    writer = TapeWriter(path, tape.header)
    for record in tape.records:
        writer.append(record)
        if record.n in (tape.count // 3, tape.count // 2):
            mark = writer.mark
            writer.seal(mark)
            writer.cut(mark)
    writer.let_go()
    shutil.rmtree(folder / "journal")
    (folder / "snapshot").unlink()
    if damaged is not None:
        segment = folder / "tape.sealed" / f"{damaged:08d}.zst"
        segment.write_bytes(segment.read_bytes()[:-7])
        with pytest.raises(DataError, match=segment.name):
            opened(folder)
    known = last_known(folder, spec(**SNAPSHOTS).policy(), 7.0)
    assert sum(known.versions.values()) == 6
    assert known.tokens_trained > 0
    assert known.whole == (damaged is None)
    assert known.started_at == (tape.header.started_at or 7.0)


@pytest.mark.parametrize("raw", [b"", b"x", b"\x00" * 100, b"{}\n" + b"x" * 100])
def test_a_damaged_snapshot_costs_nothing(folder: Path, raw: bytes) -> None:
    (folder / "snapshot").write_bytes(raw)
    assert opened(folder).outer.versions == (2, 2, 2)


def test_an_emptied_journal_beside_its_tape_is_told(folder: Path) -> None:
    for segment in (folder / "journal").iterdir():
        segment.write_bytes(b"")
    with pytest.raises(AtollError, match="fragment 0 at version 2, but the journal has nothing of it"):
        opened(folder)
