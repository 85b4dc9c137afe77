"""Commands where the working folder was removed, on terminals that are not UTF-8, and into outputs that take nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.system import printable
from tests.api.installation import CONTROL, Installation, environment
from tests.waiting import PATIENCE_S

ATOLL = Path(sys.executable).parent / "atoll"
REMOVED = 'cd "$1" && rmdir "$1" && shift && exec "$@"'


def in_removed_folder(tmp_path: Path, *arguments: str) -> tuple[int, str]:
    folder = tmp_path / "removed"
    folder.mkdir()
    command = ["/bin/sh", "-c", REMOVED, "sh", str(folder), sys.executable, "-m", "api.cli", *arguments]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran.returncode, ran.stdout + ran.stderr


def test_help_and_a_home_by_its_absolute_path_work_in_a_removed_folder(tmp_path: Path) -> None:
    code, said = in_removed_folder(tmp_path, "jobs", "--help")
    assert (code, "--home" in said) == (0, True)
    assert in_removed_folder(tmp_path, "down", "--home", str(tmp_path / "home"))[0] == 0


def test_a_service_can_be_started_from_a_removed_folder(cold: Installation, tmp_path: Path) -> None:
    code, said = in_removed_folder(
        tmp_path,
        *("up", "--home", str(cold.home.path), "--runs", str(cold.runs), "--control", CONTROL),
    )
    assert code == 0, said
    cold.atoll("jobs")


def test_a_job_is_checked_without_a_service_in_a_removed_folder(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("islands: [{node_group: a}]\nbudget: {steps: 100}\n")
    code, said = in_removed_folder(tmp_path, "check", str(tmp_path / "job.yaml"))
    assert code == 0, said
    assert "no service answers" in said


def test_commands_that_need_no_service_work_in_a_removed_folder(tmp_path: Path) -> None:
    text, index, tokenizer = (str(tmp_path / name) for name in ("a.txt", "a.index", "t.json"))
    Path(text).write_text("a line of words\n" * 1_000)
    for command in (
        ("data", "index", text, "--output", index),
        ("tokenizer", "train", text, "--vocabulary-size", "300", "--output", tokenizer),
        ("doctor", "--home", str(tmp_path / "home")),
    ):
        code, said = in_removed_folder(tmp_path, *command)
        assert "working folder was removed" not in said
        assert code == 0 or command[0] == "doctor", said
    assert Path(index).exists()
    assert Path(tokenizer).exists()


def test_a_home_by_a_relative_path_in_a_removed_folder_is_said_to_lead_nowhere(tmp_path: Path) -> None:
    for command in ("jobs", "down"):
        code, said = in_removed_folder(tmp_path, command)
        assert code == 2
        assert "the working folder was removed" in said
        assert "--home" in said


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1"])
def test_tables_and_a_watch_reach_a_terminal_that_is_not_utf_8(service: Installation, encoding: str) -> None:
    # the installed program, whose Python has rules of its own for this locale
    there = environment() | {"PYTHONIOENCODING": encoding, "LC_ALL": "C.UTF-8"}
    home = ("--home", str(service.home.path))
    command = [str(ATOLL), "submit", service.spec_file(steps=20), "--watch", *home]
    watched = subprocess.run(command, env=there, capture_output=True, timeout=PATIENCE_S)
    assert watched.returncode == 0, watched.stderr
    assert b" completed" in watched.stdout
    listed = subprocess.run([ATOLL, "islands", "latest", *home], env=there, capture_output=True, timeout=PATIENCE_S)
    assert listed.returncode == 0, listed.stderr
    assert "–" in service.atoll("islands", "latest"), "the step rate of an island that is over"
    assert " - " in listed.stdout.decode(encoding)


def test_a_character_is_replaced_by_one_of_its_width() -> None:
    text = "a – b … c → d × 3 ≤ 4 “q” ─│┌ ▇ текст"
    assert text.encode("ascii", errors=printable.ENCODING_ERRORS) == b'a - b . c > d x 3 < 4 "q" -|+ # ?????'
    assert text.encode("iso-8859-5", errors=printable.ENCODING_ERRORS).decode("iso-8859-5").endswith("текст")


@pytest.mark.parametrize("options", [("--help",), ("chaos", "list"), ("jobs", "--json")])
def test_an_output_that_takes_nothing_is_named_as_the_output(service: Installation, options: tuple[str, ...]) -> None:
    command = service.command(*options) if options != ("--help",) and options[0] != "chaos" else [str(ATOLL), *options]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            command, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S
        )
    assert ran.returncode == 1
    assert ran.stderr == (
        "atoll: cannot write to standard output: No space left on device. Check where it is redirected to.\n"
    )


def test_progress_that_nobody_can_read_stops_nothing(cold: Installation) -> None:
    with open("/dev/full", "w") as full:
        command = cold.command("up", "--runs", str(cold.runs), "--control", CONTROL)
        up = subprocess.run(command, env=environment(), stderr=full, timeout=PATIENCE_S)
        assert up.returncode == 0
        assert cold.home.running()
        down = subprocess.run(cold.command("down"), env=environment(), stderr=full, timeout=PATIENCE_S)
    assert down.returncode == 0
    assert not cold.home.running()
