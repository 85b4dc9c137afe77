"""Every process of a cluster is gone at once, as after a loss of power: its jobs go on in the next one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from api.client import Client
from api.installation.home import Home
from orchestrator.core import events as e
from orchestrator.errors import InfrastructureError
from orchestrator.runtime import embedded, processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.groups import NodeGroup
from orchestrator.tape.storage import read_tape
from tests.api.installation import ROOT
from tests.ray.jobs import Job, assert_sound, synthetic
from tests.waiting import wait_until

pytestmark = pytest.mark.ray
GROUP = "us-east"
ISLANDS = ("one", "two")
STEPS = 400
FRAGMENTS = 4
CONTROL = "orchestrator.runtime.control_port:connect"


class Machine:
    """A cluster of one node group, and the service before it, until the power goes."""

    def __init__(self, folder: Path) -> None:
        self.home, self.runs = Home(folder / "home"), folder / "runs"
        self.log = folder / "service.log"
        self.service: subprocess.Popen[bytes] | None = None
        self.clusters: list[ClusterFile] = []

    def up(self) -> None:
        """Cluster and service answer, as after `atoll up`."""
        self.end_service()
        self.clusters.append(self._cluster())
        command = [sys.executable, "-m", "api.serve", "--home", str(self.home.path), "--runs", str(self.runs)]
        with self.log.open("ab") as log:
            self.service = subprocess.Popen([*command, "--control", CONTROL], cwd=ROOT, stdout=log, stderr=log)
        wait_until(lambda: self.service.poll() is not None or self.answers())
        assert self.service.poll() is None, self.log.read_text()

    def _cluster(self) -> ClusterFile:
        """Each is in another region: those of a job that goes on are what its tape says."""
        group = NodeGroup(name=GROUP, region=f"region-{len(self.clusters) + 1}", cpus=4)
        return embedded.up(self.home.path, (group,))

    def answers(self) -> bool:
        if self.home.address() is None:
            return False
        with self.client() as client:
            try:
                return bool(client.node_groups())
            except InfrastructureError:
                return False

    def client(self) -> Client:
        return Client.at(self.home.path)

    def lose_cluster(self) -> None:
        assert len(processes.kill_all(self.clusters[-1].id, timeout_s=60.0)) > 5
        assert not self.clusters[-1].answers()

    def end_service(self) -> None:
        """By SIGKILL: whatever it does at its end, a loss of power does not wait for it."""
        if self.service is not None:
            self.service.kill()
            self.service.wait()
            self.home.forget_address()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.end_service()
    embedded.down(machine.home.path)
    assert [processes.marked(cluster.id) for cluster in machine.clusters] == [[]] * len(machine.clusters)


class Recorded(Job):
    """A job by what it leaves in its run folder, which at times is all that there is of it."""

    def __init__(self, machine: Machine, job: str) -> None:
        super().__init__(None, job, machine.runs / job)  # type: ignore[arg-type]

    def records(self) -> list[Any]:
        path = self.run_dir / "tape.jsonl"
        return list(read_tape(path).records) if path.exists() else []

    def merges(self) -> list[e.MergeCompleted]:
        return [r.event for r in self.records() if isinstance(r.event, e.MergeCompleted) and r.effects]

    def versions(self) -> list[int]:
        """Of each fragment, by the tape."""
        made = self.merges()
        return [max((merge.version for merge in made if merge.fragment == n), default=0) for n in range(FRAGMENTS)]


def test_a_job_goes_on_in_the_next_cluster_when_every_process_of_its_own_was_killed(machine: Machine) -> None:
    """Twice: service and all, as when the machine loses its power; and without the service, which then is no help.

    A job beside it, with durability async, has lost what it could not know: it ends with that reason.
    """
    machine.up()
    islands = [{"node_group": GROUP, "name": name, "cpus": 1} for name in ISLANDS]
    with machine.client() as client:
        job = Recorded(machine, client.submit(synthetic(STEPS, islands=islands)).job)
        knobs = {"durability": {"kind": "async"}}
        document = synthetic(100_000, islands=islands[:1], name="careless", synchroniser=knobs)
        careless = Recorded(machine, client.submit(document).job)
    stood: list[list[int]] = []
    for epoch in (2, 3):
        count = len(job.merges())
        job.wait_until(lambda: len(job.merges()) >= count + 6, "merges")  # noqa: B023
        with machine.client() as client:
            asked = client.kill(job.id, "two") if epoch == 3 else None
        if epoch == 2:
            careless.wait_until(lambda: max(careless.versions()) > 0, "a merge of the other job")
            machine.end_service()
        machine.lose_cluster()
        (careless.run_dir / "boot").write_text("another start of the machine")
        stood.append(job.versions())
        if epoch == 3:
            assert_nobody_calls_it_over(machine, job)
        machine.up()
        job.wait_until(lambda: len(job.restarts()) == epoch - 1, f"epoch {epoch}")  # noqa: B023
        with machine.client() as client:
            told = wait_until(lambda: (seen := client.job(job.id)).after_s is not None and seen)
            assert (told.state, told.epoch) == ("running", epoch)
            assert {found.job for found in client.jobs()} == {job.id, careless.id}
            ended = wait_until(lambda: (seen := client.job(careless.id)).state.final and seen)
            assert ended.state == "failed"
            assert "DataError: The machine was started anew" in ended.reason
            if asked is not None:
                wait_until(lambda: client.command(job.id, asked.command).state == "accepted")  # noqa: B023
    with machine.client() as client:
        wait_until(lambda: client.job(job.id).state.final)
        assert client.job(job.id).state == "completed"

    status = job.wait_for_end()
    assert status["view"]["outcome"] == "completed"
    assert status["view"]["epoch"] == 3
    assert all(island["incarnation"] >= 3 for island in status["view"]["islands"])
    assert [event.epoch for event in job.restarts()] == [2, 3]
    records = job.records()
    assert all(before.event.at <= after.event.at for before, after in pairwise(records))
    for versions, restart in zip(stood, job.restarts(), strict=True):
        after = [merge for merge in job.merges() if merge.at > restart.at]
        for fragment, version in enumerate(versions):
            first = min(merge.version for merge in after if merge.fragment == fragment)
            # one that only the journal knew of is told before the restart
            assert first in (version + 1, version + 2), f"fragment {fragment} stood at {version}, went on at {first}"
    assert_sound(job)
    tokens = status["goodput"]["tokens"]
    assert tokens["trained"] == tokens["merged"] + tokens["discarded"]
    assert tokens["merged"] > 0.5 * status["view"]["token_budget"]
    assert len({cluster.id for cluster in machine.clusters}) == 3, "each time another cluster"


def assert_nobody_calls_it_over(machine: Machine, job: Recorded) -> None:
    """A service that is left without a cluster does not take its silence for the job's end, nor starts it nowhere."""
    for _ in range(4):
        with machine.client() as client:
            try:
                state = client.job(job.id).state
            except InfrastructureError:
                continue
            assert not state.final, client.job(job.id)
