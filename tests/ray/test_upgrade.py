"""Backup, restore and upgrade as their pages say, and an installation of an earlier release that this one takes over."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sysconfig
import tarfile
import venv
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.client import Client
from api.schemas import Job as ServedJob
from orchestrator.core.messages import Progress
from orchestrator.errors import AtollError
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.system import release
from orchestrator.tape.replay import replay
from orchestrator.tape.storage import read_tape
from tests.documents import ROOT, blocks
from tests.newcomer import Newcomer
from tests.ray.jobs import ENDLESS, Job, synthetic
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]
soak = pytest.mark.soak("clusters that end and start again")
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


def _merges_past(person: Newcomer, version: int, epoch: int) -> ServedJob:
    """Return the job once a synchroniser of this epoch has merged past this version. It may not answer meanwhile."""
    jobs: list[ServedJob] = []

    def merges() -> bool:
        with suppress(AtollError), Client.at(person.home.path) as client:
            jobs.append(client.job("latest"))
        return bool(jobs) and jobs[-1].epoch == epoch and jobs[-1].global_version > version

    wait_until(merges)
    assert jobs[-1].state == "running"
    return jobs[-1]


def _typed(person: Newcomer, page: str, heading: str) -> None:
    section = (GUIDE / page).read_text().split(f"\n## {heading}\n")[1].split("\n##")[0]
    commands = [command for block in blocks(section) for command in block.commands]
    assert commands
    for command in commands:
        person.type(UP if command.strip() == "atoll up" else command)


@soak
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


@soak
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


# ── `atoll upgrade`, with a release that is made here ─────────────────────────────────────────────────────────────────

NEXT = "0.2.0"
UPGRADING = """
import json, sys
from pathlib import Path
from orchestrator.errors import AtollError
from orchestrator.runtime.control_port import connect
from orchestrator.specification.config import parse_job

home, job, run_dir, document, name = sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4]), sys.argv[5]
port = connect(Path(home))
try:
    command = port.upgrade_of(job, parse_job(document), run_dir)
    port.submit(job, name, "me", command)
    print(json.dumps({"build": command.build}))
except AtollError as error:
    print(json.dumps({"refused": str(error)}))
finally:
    port.close()
"""
"""What a service of another release does for `atoll upgrade`."""


def made_release(folder: Path, version: str = NEXT, changes: Mapping[str, tuple[str, str]] | None = None) -> Path:
    """Make another release of this tree, and return its interpreter. ``changes`` replace a text in a file by another."""
    code, environment = folder / "code", folder / "environment"
    for package in ("api", "deploy", "learners", "orchestrator"):
        shutil.copytree(ROOT / package, code / package)
    for name, (before, after) in (changes or {}).items():
        text = (code / name).read_text()
        assert before in text
        (code / name).write_text(text.replace(before, after))
    facts = code / f"atoll-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: atoll\nVersion: {version}\n")
    venv.create(environment, symlinks=True)
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "atoll.pth").write_text(f"{code}\n{sysconfig.get_path('purelib')}\n")
    return environment / "bin" / "python"


def _upgraded(python: Path, home: Path, job: Job, document: dict[str, Any]) -> dict[str, Any]:
    """Return what a service of the other release says to the upgrade of the job."""
    about = (str(home), job.id, str(job.run_dir), json.dumps(document), f"upgrade-{python.parents[2].name}")
    done = subprocess.run(
        [str(python), "-P", "-s", "-c", UPGRADING, *about], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def _steps(job: Job, island: str) -> int:
    return max((event.report.steps_total for event in job.events(Progress, island)), default=0)


@pytest.fixture
def document() -> dict[str, Any]:
    return synthetic(steps=ENDLESS, groups=("us-east", "asia"))


@soak
def test_a_job_goes_on_in_the_next_release_while_its_islands_train(
    start: Callable[..., Job], port: RayControlPort, home: Path, tmp_path: Path, document: dict[str, Any]
) -> None:
    job = start(document)
    job.wait_for_merge("asia", 1)
    before = job.status()["view"]
    pids = {island["island"]: island["pid"] for island in before["islands"]}
    python = made_release(tmp_path / "next")
    assert _upgraded(python, home, job, document) == {"build": f"{NEXT}_w{release.WIRE}"}

    def goes_on() -> bool:
        view = job.seen()["view"] if job.answers() else {}
        return view.get("build") == f"{NEXT}_w{release.WIRE}" and view["global_version"] > before["global_version"] + 4

    job.wait_until(goes_on, "merges in the next release")
    after = job.status()
    assert after["view"]["epoch"] == 2
    assert {island["island"]: island["pid"] for island in after["view"]["islands"]} == pids
    assert after["commands"]["upgrade-next"]["accepted"] is True
    (restarted,) = job.restarts()
    assert restarted.build == f"{NEXT}_w{release.WIRE}"
    assert restarted.upgrade == f"the job was upgraded from {release.own()}"
    assert replay(read_tape(job.run_dir / "tape.jsonl")).exact


@soak
@pytest.mark.parametrize("breaks", ["as it starts", "before its first record"])
def test_a_release_that_cannot_start_leaves_the_job_to_the_old_one(
    start: Callable[..., Job], home: Path, tmp_path: Path, document: dict[str, Any], breaks: str
) -> None:
    """The rehearsal succeeds, because only the synchroniser itself is broken."""
    job = start(document)
    job.wait_for_merge("asia", 1)
    pids = {island["island"]: island["pid"] for island in job.status()["view"]["islands"]}
    line = {"as it starts": "    queue = EventQueue(", "before its first record": "        decided = [effect for"}[
        breaks
    ]
    indent = line[: len(line) - len(line.lstrip())]
    planted = (line, f'{indent}raise OSError("planted")\n{line}')
    broken = {"orchestrator/runtime/synchroniser_actor.py": planted}
    assert "build" in _upgraded(made_release(tmp_path / "next", changes=broken), home, job, document)

    job.wait_until(lambda: job.answers() and job.last["view"]["epoch"] == 2, "the old release")
    (restarted,) = job.restarts()
    assert restarted.build == str(release.own())
    assert f"the upgrade to {NEXT}_w{release.WIRE} failed, and {release.own()} goes on: " in restarted.upgrade
    assert "planted" in restarted.upgrade
    version = job.last["view"]["global_version"]
    job.wait_until(lambda: job.status()["view"]["global_version"] > version + 8, "merges after that")
    assert {island["island"]: island["pid"] for island in job.status()["view"]["islands"]} == pids
    assert replay(read_tape(job.run_dir / "tape.jsonl")).exact
    again = _upgraded(made_release(tmp_path / "mended"), home, job, document)
    assert "build" in again
    job.wait_until(lambda: job.answers() and job.last["view"]["epoch"] == 3, "the mended release")
    assert job.last["view"]["build"] == f"{NEXT}_w{release.WIRE}"


@soak
def test_a_release_that_cannot_continue_the_job_is_refused_and_the_job_notices_nothing(
    start: Callable[..., Job], home: Path, tmp_path: Path, document: dict[str, Any]
) -> None:
    job = start(document)
    job.wait_for_merge("asia", 1)
    wire = {"orchestrator/system/release.py": (f"WIRE = {release.WIRE}", f"WIRE = {release.WIRE + 1}")}
    schema = {"orchestrator/tape/schema.py": ('SCHEMA = "atoll-tape/1"', 'SCHEMA = "atoll-tape/9"')}
    for name, version, changes, words in (
        ("wire", NEXT, wire, "their wire numbers differ"),
        ("tape", NEXT, schema, "this is not a tape of schema 'atoll-tape/9'"),
        ("far", "0.9.0", {}, "more than one minor release"),
        ("same", "0.1.0", {}, "already"),
    ):
        refused = _upgraded(made_release(tmp_path / name, version, changes), home, job, document)["refused"]
        assert words in refused
    assert job.status()["view"]["epoch"] == 1
    assert not job.restarts()
