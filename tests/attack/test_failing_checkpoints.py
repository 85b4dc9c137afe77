"""A checkpoint that cannot be written fails alone: whatever goes wrong with it, the job trains on, and says why.

The real core, tape, journal and checkpoints, with real islands' loops, in one process.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import MANIFEST
from orchestrator.checkpoints.reading import verified
from orchestrator.checkpoints.writing import is_place
from orchestrator.core import commands
from orchestrator.core.saving import BeginCheckpoint, CheckpointFailed, CheckpointTaken
from orchestrator.core.vocabulary import IslandId, JobOutcome, JobPhase
from orchestrator.errors import InfrastructureError
from orchestrator.host import retry
from orchestrator.host.checkpoint_writer import CheckpointWriter
from orchestrator.host.records import ended_as, write_report, write_status
from orchestrator.host.retry import Retrier, only_full
from orchestrator.status import JobStatus
from orchestrator.system.roots import Allowed
from orchestrator.tape.storage import read_tape
from tests.harness.lives import Lives
from tests.harness.shell import Fate
from tests.journal.test_crash_points import assert_sound

RECORDED_STATUS = Path(__file__).parent.parent / "golden" / "status.json"
ERRORS = (
    ValueError("Out of range float values are not JSON compliant"),
    TypeError("not serialisable"),
    KeyError("island"),
    OSError(errno.ENOSPC, "No space left on device"),
    PermissionError(errno.EACCES, "Permission denied"),
    RuntimeError("the upload was refused"),
    RecursionError("too deep"),
    MemoryError(),
    OverflowError("inf"),
    AssertionError(),
)


class Failing(Folder):
    """A folder of checkpoints that fails in one place, for a while."""

    def __init__(self, allowed: Allowed, error: BaseException, at: str, broken: list[bool]) -> None:
        super().__init__(allowed)
        self._error, self._at, self._broken = error, at, broken

    def sub(self, name: str) -> Folder:
        self._fail("sub")
        return Failing(self._allowed.sub((name,)), self._error, self._at, self._broken)

    def write(self, name: str, content: bytes) -> None:
        self._fail("manifest" if name == "manifest.json" else "write")
        super().write(name, content)

    def read(self, name: str, bytes_max: int) -> bytes:
        self._fail("read")
        return super().read(name, bytes_max)

    def remove(self, name: str) -> None:
        self._fail("remove")
        super().remove(name)

    def folders(self) -> list[str]:
        self._fail("folders")
        return super().folders()

    def _fail(self, place: str) -> None:
        if place == self._at and self._broken[0]:
            raise self._error


def asked(lives: Lives, name: str) -> list[Any]:
    """What became of one checkpoint more."""
    lives.insist(lambda shell: shell.command(name, commands.Checkpoint()))
    lives.adopt()
    tape = read_tape(lives.shell.files.tape.path, lives.shell.disk)
    return [r.event for r in tape.records if isinstance(r.event, (CheckpointFailed, CheckpointTaken))]


@pytest.mark.parametrize("at", ["sub", "write", "manifest", "read"])
def test_whatever_a_checkpoint_fails_of_the_job_trains_on_and_says_why(tmp_path: Path, at: str) -> None:
    lives = Lives(tmp_path, Fate())
    lives.step(8)
    real: CheckpointWriter = lives.shell.saver._real
    sound, broken = real.root, [True]
    for count, error in enumerate(ERRORS, start=1):
        real.root = Failing(sound._allowed, error, at, broken)
        outcomes = asked(lives, f"c-{count}")
        assert [type(outcome) for outcome in outcomes] == [CheckpointFailed] * count
        assert outcomes[-1].reason.startswith(type(error).__name__)
    before = lives.shell.core.state.global_version
    real.root = sound
    lives.step(8)
    lives.adopt()
    assert lives.shell.core.state.global_version > before
    assert isinstance(asked(lives, "last")[-1], CheckpointTaken)
    assert_sound(lives, tmp_path)


@pytest.mark.parametrize("at", ["remove", "folders"])
def test_what_cannot_be_removed_takes_room_and_no_more(tmp_path: Path, at: str) -> None:
    lives = Lives(tmp_path, Fate())
    lives.step(8)
    asked(lives, "first")
    real: CheckpointWriter = lives.shell.saver._real
    real.root = Failing(real.root._allowed, ValueError("odd"), at, [True])
    lives.step(3)
    lives.adopt()
    assert [type(outcome) for outcome in asked(lives, "second")] == [CheckpointTaken] * 2
    assert_sound(lives, tmp_path)


def test_a_folder_that_vanished_costs_the_checkpoint_that_was_being_taken(tmp_path: Path) -> None:
    lives = Lives(tmp_path, Fate())
    lives.step(8)
    asked(lives, "first")
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("somebody's")
    assert isinstance(asked(lives, "second")[-1], CheckpointFailed)
    (tmp_path / "checkpoints").unlink()
    assert isinstance(asked(lives, "third")[-1], CheckpointTaken)


def test_a_folder_that_can_never_be_used_is_no_reason_not_to_come_back(tmp_path: Path) -> None:
    """A job that began where a protocol was to be had, and is started again where it is not."""
    lives = Lives(tmp_path, Fate())
    real: CheckpointWriter = lives.shell.saver._real
    real._root, real._url = None, "nosuchprotocol://nowhere/x"
    assert isinstance(asked(lives, "c")[-1], CheckpointFailed)


@pytest.mark.parametrize("error", [TypeError("x"), ValueError("NaN"), RecursionError(), MemoryError()])
def test_a_snapshot_that_cannot_be_made_is_only_a_pity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> bytes:
        raise error

    monkeypatch.setattr(retry, "encode", fail)
    lives = Lives(tmp_path, Fate(), durability={"snapshot_every_records": 5})
    lives.step(6)
    assert not (tmp_path / "snapshot").exists()
    assert_sound(lives, tmp_path)


def test_a_full_disk_is_waited_for_and_others_are_told() -> None:
    tries: list[int] = []

    def full() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    retrier = Retrier(retry_s=0.0)
    retrier.until_done("it", lambda: only_full(full))
    assert len(tries) == 3

    def refused() -> None:
        raise IsADirectoryError(errno.EISDIR, "Is a directory")

    with pytest.raises(InfrastructureError, match="Is a directory"):
        retrier.until_done("it", lambda: only_full(refused))


def test_the_end_is_written_over_whatever_lies_in_the_way(tmp_path: Path) -> None:
    run_dir = tmp_path / "job"
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (run_dir / "status.json").mkdir(parents=True)
    (run_dir / "status.json" / "x").touch()
    (run_dir / "status.json.draft").symlink_to(secret)
    (run_dir / "report.json").symlink_to(secret)
    (run_dir / "report.html.draft").mkdir()
    recorded = JobStatus.model_validate_json(RECORDED_STATUS.read_bytes(), strict=True)
    ended = recorded.view.model_copy(update={"phase": JobPhase.FINISHED, "outcome": JobOutcome.COMPLETED})
    status = recorded.model_copy(update={"job_id": "job", "view": ended})
    assert not ended_as(run_dir, "job")
    write_report(run_dir, {"job_id": "job"})
    write_status(run_dir, status)
    assert ended_as(run_dir, "job")
    assert not ended_as(run_dir, "another")
    assert secret.read_text() == "secret"
    for raw in (b"", b"{}", b"[]", b"\xff", b"[" * 100_000, b'{"job_id": "job", "view": 5}'):
        (run_dir / "status.json").write_bytes(raw)
        assert not ended_as(run_dir, "job")


def test_files_of_an_island_that_died_while_it_sent_them_are_not_in_the_sealed_checkpoint(tmp_path: Path) -> None:
    lives = Lives(tmp_path, Fate())
    lives.step(8)
    real: CheckpointWriter = lives.shell.saver._real
    begin = lives.shell.saver.act

    def act(effect: Any) -> None:
        begin(effect)
        if isinstance(effect, BeginCheckpoint):
            number = effect.checkpoint
            place = real.place(number)
            assert real.place(number) == place, "every island gets the same text"
            assert is_place(real.folder(number), place)
            real.receive(number, IslandId("dead"), "arrays.safetensors", [memoryview(b"some")])
            assert real.folder(number).has("dead/arrays.safetensors")

    lives.shell.saver.act = act
    (taken,) = asked(lives, "one")
    assert isinstance(taken, CheckpointTaken)
    folder = real.folder(taken.checkpoint)
    assert set(folder.names()) == {MANIFEST, *(file.name for file in verified(folder).files)}
    with pytest.raises(OSError, match="is not being taken"):
        real.receive(taken.checkpoint, IslandId("late"), "arrays.safetensors", [memoryview(b"some")])
    assert "late" not in folder.folders()
