"""The synchroniser's node dies and its disk is erased: the job goes on from what its islands hold, on another node.

python -m tests.ray.test_lost_synchroniser [TIMES]     so often, one after another, and how long each time took
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from orchestrator.actors import ActorHandle
from orchestrator.core import events
from orchestrator.core.messages import Progress
from orchestrator.core.saving import JobSalvaged
from orchestrator.errors import DataError
from orchestrator.runtime import cluster, embedded, processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.control_port import RayControlPort, connect
from orchestrator.runtime.groups import NodeGroup
from orchestrator.runtime.settings import synchroniser_name
from orchestrator.tape.schema import Record
from tests.ray.conftest import starting
from tests.ray.jobs import BRIEF_S, ENDLESS, Job, assert_sound, synthetic
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
KEEPERS, ISLANDS = "keepers", ("us-east", "europe", "asia")
FLEET = (
    NodeGroup(name=KEEPERS, region="us-central", nodes=2, cpus=1),
    *(NodeGroup(name=name, region=name, cpus=2) for name in ISLANDS),
)
DOCUMENT = synthetic(ENDLESS, ISLANDS, synchroniser={"node_groups": [KEEPERS], "interval_steps": 8, "overlap_steps": 4})
NEWS = 8


@dataclass(frozen=True)
class Loss:
    """What was on the tape that is lost, and how long each part of the way back took."""

    before: tuple[Record, ...]
    salvaged: JobSalvaged
    decided_s: float
    merged_s: float


class Fleet:
    """A cluster in which one node after another loses the synchroniser, and is started again by ``up``."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.up()
        self.port = connect(home)

    def up(self) -> None:
        embedded.up(self.home, FLEET)

    def node_of(self, job: Job) -> str:
        actor: ActorHandle[object] | None = cluster.actor_named(synchroniser_name(job.id))
        process = cluster.process_of(actor) if actor is not None else None
        assert process is not None
        return next(node.name for node in cluster.nodes() if node.id == process.node_id)

    def lose(self, job: Job) -> Loss:
        """SIGKILL everything on the synchroniser's node, erase its run folder, and wait until the job merges again."""
        about = ClusterFile.find(self.home)
        assert about is not None
        node = self.node_of(job)
        assert processes.kill_all(about.id, node, timeout_s=60.0)
        began = time.monotonic()
        before = tuple(Job(self.port, job.id, job.run_dir).records())
        shutil.rmtree(job.run_dir)
        job.forget_tape()

        salvaged = job.wait_until(partial(first, job, JobSalvaged), "the salvage of the job", BRIEF_S)
        decided_s = time.monotonic() - began
        job.wait_until(partial(first, job, events.MergeCompleted), "a merge of the new epoch", BRIEF_S)
        assert isinstance(salvaged, JobSalvaged)
        return Loss(before, salvaged, decided_s, time.monotonic() - began)


@contextmanager
def fleet_in(home: Path) -> Iterator[Fleet]:
    try:
        fleet = Fleet(home)
        yield fleet
        fleet.port.close()
    finally:
        embedded.down(home)


def first(job: Job, kind: type) -> events.Event | None:
    """Return the first event of this kind on the job's tape, which may not be there yet."""
    with suppress(OSError, DataError):
        return next((r.event for r in job.records() if isinstance(r.event, kind)), None)
    return None


def merges(job: Job, version: int) -> bool:
    """Return whether the job has reached this global version, and all of its islands train."""
    view = job.status()["view"]
    return view["global_version"] >= version and all(one["state"] == "training" for one in view["islands"])


def assert_continued(job: Job, loss: Loss) -> None:
    """Bits are those that were merged, at most one version of a fragment is lost, and the islands trained on."""
    event = loss.salvaged
    merged = {
        (r.event.fragment, r.event.version): r.event.digest
        for r in loss.before
        if isinstance(r.event, events.MergeCompleted) and r.effects
    }
    newest = {p: max((v for q, v in merged if q == p), default=0) for p in range(len(event.versions))}
    for p, (version, digest) in enumerate(zip(event.versions, event.digests, strict=True)):
        assert version >= newest[p] - 1, (p, version, newest[p])
        assert merged.get((p, version), digest) == digest
    lives = {(one.island, one.incarnation) for one in event.islands}
    assert {island for island, _ in lives} == set(ISLANDS)
    assert not event.doubted
    view = job.status()["view"]
    assert view["epoch"] == event.epoch
    assert {(one["island"], one["incarnation"]) for one in view["islands"]} == lives
    for one in event.islands:
        reports = [x.steps_total for x in job.events(Progress, one.island)]
        assert reports, one
        assert max(reports) >= one.steps_total
    assert_sound(job)


def test_a_job_whose_process_and_files_are_gone_goes_on_from_what_its_islands_hold(
    start: Callable[..., Job], port: RayControlPort
) -> None:
    """The same without the loss of a node: Ray makes the synchroniser again, and it finds no run folder."""
    job = start(synthetic(ENDLESS, ISLANDS, synchroniser={"interval_steps": 8, "overlap_steps": 4}))
    job.wait_until(partial(merges, job, NEWS), "merges")
    pid = job.pid_of_synchroniser()
    erased = job.run_dir.rename(job.run_dir.with_name("erased"))
    os.kill(pid, signal.SIGKILL)
    before = tuple(Job(port, job.id, erased).records())
    shutil.rmtree(erased)
    job.forget_tape()
    salvaged = job.wait_until(partial(first, job, JobSalvaged), "the salvage of the job", BRIEF_S)
    job.wait_until(partial(merges, job, sum(salvaged.versions) + NEWS), "merges of the new epoch")
    assert_continued(job, Loss(before, salvaged, 0.0, 0.0))


@pytest.mark.soak("a cluster of its own, of which a node dies")
def test_a_job_goes_on_after_the_machine_of_its_synchroniser_is_lost_with_its_disk() -> None:
    """In a process of its own, because this one belongs to another cluster."""
    command = [sys.executable, "-m", "tests.ray.test_lost_synchroniser", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "1: decided after" in done.stdout


def main(times: int) -> None:
    """Lose the synchroniser's node so often, and print what each time took."""
    with (
        tempfile.TemporaryDirectory(prefix="atoll-lost-") as folder,
        fleet_in(Path(folder) / "home") as fleet,
        starting(fleet.port, Path(folder)) as start,
    ):
        job = start(DOCUMENT)
        for number in range(1, times + 1):
            job.wait_until(partial(merges, job, job.status()["view"]["global_version"] + NEWS), "merges")
            loss = fleet.lose(job)
            job.wait_until(partial(merges, job, sum(loss.salvaged.versions) + NEWS), "merges of the new epoch")
            assert_continued(job, loss)
            print(f"{number}: decided after {loss.decided_s:.2f} s, merged after {loss.merged_s:.2f} s", flush=True)
            fleet.up()
            wait_until(lambda: sum(node.group == KEEPERS for node in cluster.nodes()) == 2)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
