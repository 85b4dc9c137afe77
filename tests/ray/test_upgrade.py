"""Backup, restore and upgrade as their pages say, and an installation of an earlier release that this one takes over."""

from __future__ import annotations

import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from api.client import Client
from api.schemas import Job
from orchestrator.errors import AtollError
from tests.documents import ROOT, blocks
from tests.newcomer import Newcomer
from tests.waiting import wait_until

pytestmark = pytest.mark.soak("clusters that end and start again")
GUIDE = ROOT / "docs" / "guide"
FROZEN = ROOT / "tests" / "golden" / "frozen-home.tar.xz"
"""Home and run folder of a job of two islands, copied while it trained. Made by 0.1.0 before there were sealed tapes."""
GROUPS = {"node_groups": [{"name": "here", "region": "here", "nodes": 1, "cpus": 2}]}
JOB = {
    "name": "kept",
    "trainer": "learners.synthetic:create",
    "synthetic": {"parameters": 256, "step_s": 0.05},
    "synchroniser": {"fragments": 2, "interval_steps": 8},
    "islands": [{"name": name, "node_group": "here", "cpus": 0.5} for name in ("one", "two")],
    "budget": {"steps": 100_000},
}
UP = "atoll up --groups groups.yaml"


@pytest.fixture
def person(tmp_path: Path) -> Iterator[Newcomer]:
    someone = Newcomer(tmp_path)
    (tmp_path / "groups.yaml").write_text(yaml.safe_dump(GROUPS))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    someone.fork_commands()
    yield someone
    someone.leave()


def _merges_past(person: Newcomer, version: int, epoch: int) -> Job:
    """Return the job once a synchroniser of this epoch has merged past this version. It may not answer meanwhile."""
    jobs: list[Job] = []

    def merges() -> bool:
        with suppress(AtollError), Client.at(person.home.path) as client:
            jobs.append(client.job("latest"))
        return bool(jobs) and jobs[-1].epoch == epoch and jobs[-1].global_version > version

    wait_until(merges)
    assert jobs[-1].state == "running"
    return jobs[-1]


def _typed(person: Newcomer, page: str, heading: str) -> None:
    section = (GUIDE / page).read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    commands = [command for block in blocks(section) for command in block.commands]
    assert commands
    for command in commands:
        person.type(UP if command.strip() == "atoll up" else command)


def test_a_job_goes_on_from_a_backup_and_through_an_upgrade(person: Newcomer) -> None:
    person.type(UP)
    person.type("atoll submit job.yaml")
    kept = _merges_past(person, 20, epoch=1).global_version
    _typed(person, "backup.md", "Back up")
    _merges_past(person, kept + 10, epoch=1)
    _typed(person, "backup.md", "Restore")
    restored = _merges_past(person, kept, epoch=2).global_version
    assert "atoll 0." in person.type("atoll --version")
    _typed(person, "upgrade.md", "One machine")
    _merges_past(person, restored, epoch=3)


def test_an_installation_of_an_earlier_release_goes_on(person: Newcomer) -> None:
    with tarfile.open(FROZEN) as archive:
        archive.extractall(person.folder, filter="data")
    (person.folder / "home").rename(person.home.path)
    person.home.path.chmod(0o700)
    (run,) = (person.folder / "runs").iterdir()
    with sqlite3.connect(person.home.path / "service.sqlite") as store:
        store.execute("update jobs set run_dir = ?", (str(run),))
    store.close()
    person.type(UP)
    assert _merges_past(person, 0, epoch=2).job == run.name
    assert "identical" in person.type(f"atoll replay runs/{run.name}")
