"""Whoever may write into a folder in which somebody runs ``atoll`` runs no code as them.

The working folder, PYTHONPATH, and the user's site-packages all have a module for every name that any of our programs
imports. Every command and every process that it starts takes nothing from there.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import typer.main

from api.cli import app
from api.installation.home import Home
from orchestrator.system import python_process
from tests.api.installation import CONTROL, ROOT, Installation
from tests.hostile_folder import ATOLL, HostileFolder


@pytest.fixture
def hostile(tmp_path: Path) -> HostileFolder:
    return HostileFolder(tmp_path)


def commands(group: object, *words: str) -> Iterator[tuple[str, ...]]:
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, *words, name)
    if words:
        yield words


EVERY = sorted(commands(typer.main.get_command(app)))


def test_the_folder_is_hostile(hostile: HostileFolder) -> None:
    subprocess.run(
        [sys.executable, "-c", "import queue"], cwd=hostile.path, capture_output=True, stdin=subprocess.DEVNULL
    )
    assert "queue.py" in hostile.executed()


def test_commands_that_start_processes_run_nothing_of_it(hostile: HostileFolder, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog.\n" * 50)
    hostile.atoll("data", "index", str(text), "--output", str(tmp_path / "index"), "--processes", "2")
    hostile.atoll(
        "tokenizer", "train", str(text), "--output", str(tmp_path / "tokenizer.json"), "--vocabulary-size", "300"
    )
    hostile.atoll("compare", str(tmp_path / "missing.yaml"), code=2)
    hostile.atoll("leave", code=None)


def test_a_service_that_is_started_there_runs_nothing_of_it_nor_does_its_next_life(
    hostile: HostileFolder, tmp_path: Path
) -> None:
    installation = Installation(tmp_path)
    home = ("--home", str(installation.home.path))
    packages = tmp_path / "packages"
    packages.mkdir()
    options = ("--runs", str(installation.runs), "--control", CONTROL, "--allow", "mymodels", *installation.roots)
    (hostile.path / "mymodels").mkdir()
    said = hostile.atoll("up", *home, *options, "--packages", str(packages))
    assert "--allow mymodels: package not found" in said
    assert "The working folder contains mymodels. To use that, add --packages ." in said
    try:
        address = installation.home.address()
        assert address is not None
        service = psutil.Process(address.pid)
        command, environment = service.cmdline(), service.environ()
        assert command[1:4] == ["-P", "-s", "-m"]
        assert command[command.index("--packages") + 1] == str(packages.resolve())
        assert environment["PYTHONSAFEPATH"] == environment["PYTHONNOUSERSITE"] == "1"
        assert not {name for name in environment if not python_process.is_harmless(name)} - set(
            python_process.VARIABLES
        )
        hostile.atoll("submit", installation.spec_file(steps=20), *home)
        subprocess.run(
            python_process.module("api.installation.service_restart", str(installation.home.path)),
            cwd=hostile.path,
            env=python_process.cleaned(hostile.environment),
            check=True,
        )
        assert installation.home.running()
    finally:
        hostile.atoll("down", *home)
    assert hostile.executed() == ""


def test_a_clash_of_packages_is_refused_before_anything_starts(hostile: HostileFolder, tmp_path: Path) -> None:
    for command in (("up", "--home", str(tmp_path / "home")), ("join", "head:6379", "--group", "a", "--region", "b")):
        said = hostile.atoll(*command, "--packages", str(hostile.path), code=2)
        assert "modules of these names exist already" in said or "secret is missing" in said
    assert not Home(tmp_path / "home").running()


def test_the_program_finds_its_python_through_links_and_in_paths_with_spaces(
    hostile: HostileFolder, tmp_path: Path
) -> None:
    """As ``pip install`` puts it into an environment, and pipx links to it."""
    place = tmp_path / "an environment"
    venv.create(place, symlinks=True)
    site_packages = next(place.glob("lib/python*/site-packages"))
    (site_packages / "ours.pth").write_text(
        "\n".join([str(ROOT), *(p for p in sys.path if p.endswith("site-packages"))])
    )
    program = place / "bin" / "atoll"
    program.write_text((ROOT / "deploy" / "atoll").read_text())
    program.chmod(0o755)
    (tmp_path / "bin dir").mkdir()
    (tmp_path / "first").symlink_to(place / "bin")
    (tmp_path / "second").symlink_to("first/atoll")
    linked = tmp_path / "bin dir" / "atoll"
    linked.symlink_to("../second")
    for each in (program, linked):
        assert "Usage: atoll [OPTIONS]" in hostile.atoll("--help", program=each)
    alone = tmp_path / "alone"
    alone.write_text(program.read_text())
    alone.chmod(0o755)
    assert "no python3 that you may run beside" in hostile.atoll("--help", program=alone, code=1)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8:replace", "no-such-encoding"])
def test_an_isolated_program_writes_in_the_encoding_that_is_asked_for(encoding: str, hostile: HostileFolder) -> None:
    hostile.environment["PYTHONIOENCODING"] = encoding
    command = [ATOLL, "tape", "--help"]
    done = subprocess.run(
        command, cwd=hostile.path, env=hostile.environment, capture_output=True, stdin=subprocess.DEVNULL
    )
    assert "Usage: atoll tape" in done.stdout.decode("utf-16" if encoding == "utf-16" else "utf-8"), done.stderr


def test_the_installed_program_is_this_one() -> None:
    assert ATOLL.read_text() == (ROOT / "deploy" / "atoll").read_text(), "run `make install`"


@pytest.mark.soak("a start of the command line for every command")
def test_every_command_runs_nothing_of_it(hostile: HostileFolder) -> None:
    for words in EVERY:
        hostile.atoll(*words, "--help")
        if words[0] not in ("up", "demo"):
            hostile.atoll(*words, code=None)
