"""What lies in a home and in runs is its owner's alone, whatever the umask it was started with (finding 19).

Of a job on Ray, whose islands and synchroniser write it: ``tests/ray/test_service.py``.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.installation import CONTROL, ROOT, Installation
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    made = Installation(tmp_path)
    yield made
    made.atoll("down")


@pytest.mark.parametrize("umask", [0o000, pytest.param(0o022, marks=pytest.mark.soak("a milder umask"))])
def test_home_and_runs_are_nobody_elses_to_read(installation: Installation, umask: int) -> None:
    installation.home.path.mkdir(mode=0o777, parents=True)
    installation.home.path.chmod(0o755)  # as an earlier build left it
    options = ["--runs", str(installation.runs), "--control", CONTROL]
    subprocess.run(installation.command("up", *options), cwd=ROOT, umask=umask, check=True, timeout=PATIENCE_S)
    with installation.client() as client:
        job = client.submit(installation.spec(steps=4)).job
        wait_until(lambda: client.job(job).state.final)
        client.report(job)
    assert (installation.runs / job / "tape.jsonl").exists()
    assert open_to_others(installation.home.path) == []
    assert open_to_others(installation.runs) == []


def open_to_others(folder: Path) -> list[str]:
    """Whatever in the folder, itself included, a group or others may read or write, with its mode."""
    found = []
    for path in [folder, *folder.rglob("*")]:
        mode = os.lstat(path).st_mode
        if not stat.S_ISLNK(mode) and mode & 0o077:
            found.append(f"{path} {stat.filemode(mode)}")
    return found
