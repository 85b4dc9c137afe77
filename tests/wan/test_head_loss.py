"""The head's machine dies, with everything on it: islands train on, and the job goes on once there is a head again.

If its disk is gone as well, another machine becomes the head from the store, and machines that joined find it there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.core.events import report_of
from orchestrator.core.messages import CaughtUp
from orchestrator.runtime import processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.settings import CONTROL_GROUP
from orchestrator.tape.storage import read_tape
from tests.programs import required
from tests.ray.jobs import STEPS_ON, Job, assert_sound
from tests.waiting import wait_until
from tests.wan.archipelago import Archipelago, WideJob
from tests.wan.conftest import ASIA, EAST
from tests.wan.regions import Regions
from tests.wan.test_guide import TRAIN, Machine, merges, wait_for_merges

pytestmark = pytest.mark.ray
Submit = Callable[..., WideJob]
STEPS = 1000
"""Far more than it takes until everyone is heard again, so that the job does not end by what was trained unheard."""


def test_islands_train_on_without_a_head_and_the_job_completes_once_it_is_back(
    archipelago: Archipelago, submit: Submit
) -> None:
    job = submit(STEPS)
    for island in (EAST, ASIA):
        job.wait_for_merge(island, 1)
    pids = {island: job.island(island)["pid"] for island in (EAST, ASIA)}
    cluster = ClusterFile.find(archipelago.home.path)
    assert cluster is not None

    killed_at = time.monotonic()
    assert len(processes.kill_all(cluster.id, CONTROL_GROUP)) > 2
    for pid in pids.values():
        job.wait_until(lambda pid=pid: job.diary(pid).count(killed_at) >= STEPS_ON, "steps without a head")
    assert not cluster.answers()
    archipelago.up()
    job.wait_until(job.restarts, "the next synchroniser")
    job.wait_until(lambda: job.contributors_since(job.restarts()[0].at) == {EAST, ASIA}, "everyone again")
    print(f"everyone again {time.monotonic() - killed_at:.1f} s after the head's death")
    status = job.wait_for_end()
    assert status["view"]["outcome"] == "completed"
    assert [island["incarnation"] for island in status["view"]["islands"]] == [1, 1]
    assert_sound(job)


DOCUMENT = """
name: moved
trainer: learners.synthetic:create
synthetic: {parameters: 100000, step_s: 0.05}
synchroniser: {fragments: 4, interval_steps: 16, overlap_steps: 8, grace_cap_steps: 6, durability: {kind: mirrored}}
islands:
  - {name: one, node_group: east}
  - {name: two, node_group: west}
budget: {steps: 3000}
"""
LOSSES = int(os.environ.get("ATOLL_LOSSES", "5"))


class Fleet:
    """Two machines that join, and one at a time that is head and service; the store is a folder that all of them see."""

    NAMES = ("one", "other", "east", "west")

    def __init__(self, folder: Path) -> None:
        self.store, self._kept = folder / "store", folder
        self.store.mkdir()
        self.regions = Regions(self.NAMES)
        self.machines: dict[str, Machine] = {}
        self.head: Machine

    def switch_on(self, name: str, *secrets: str) -> Machine:
        """A machine with an empty disk, but for the secrets that were put on it by hand."""
        machine = self.machines[name] = Machine(self.regions, name, self.store)
        for secret in secrets:
            place = machine.path(f"/etc/atoll/{secret}")
            if (self._kept / secret).is_dir():
                shutil.copytree(self._kept / secret, place)
            else:
                shutil.copy2(self._kept / secret, place)
        return machine

    def begin(self) -> None:
        head = self.switch_on("one")
        listed = " ".join(f"--name {self.regions.address(name)}" for name in self.NAMES)
        head.type(
            f"atoll certificates authority fleet; atoll certificates issue fleet /etc/atoll/certificates {listed}"
        )
        self.lead(head, "one", "--store /mnt", "/etc/atoll/certificates")
        shutil.copytree(head.path("/etc/atoll/certificates"), self._kept / "certificates")
        shutil.copy2(head.path(".atoll/cluster/token"), self._kept / "token")
        shutil.copy2(head.path(".atoll/store.key"), self._kept / "store.key")
        for name in ("east", "west"):
            node = self.switch_on(name, "certificates", "token")
            node.type("export RAY_AUTH_TOKEN_PATH=/etc/atoll/token ATOLL_CERTIFICATES=/etc/atoll/certificates")
            node.stay(f"atoll join --store /mnt --group {name} --region {name} --cpus 2")

    def lead(self, head: Machine, name: str, options: str, certificates: str = "") -> None:
        """Its certificates are given, or those from the store."""
        own = f"--certificates {certificates}" if certificates else ""
        head.stay(f"atoll head --address {self.regions.address(name)} {options} {own}")
        head.stay(f"atoll serve --host {self.regions.address(name)} {options} {own}")
        self.head = head

    def lose_head(self, name: str, successor: str) -> None:
        """SIGKILL everything on its machine; its disk is gone with it."""
        self.machines.pop(name).switch_off()
        self.lead(self.switch_on(successor, "store.key"), successor, "--store /mnt --store-key /etc/atoll/store.key")

    def close(self) -> None:
        for machine in self.machines.values():
            machine.switch_off()
        self.regions.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    required("unshare")
    made = Fleet(tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.soak("minutes: the head's machine is killed and its disk erased, five times")
@pytest.mark.timeout(3600)
def test_a_job_runs_to_its_end_although_machine_and_disk_of_each_of_its_heads_are_lost(fleet: Fleet) -> None:
    fleet.begin()
    fleet.head.path("job.yaml").write_text(DOCUMENT)
    job = json.loads(fleet.head.type("atoll submit job.yaml --json"))["job"]
    names = ["one", "other"]
    for loss in range(LOSSES):
        wait_until(lambda: re.search(TRAIN, fleet.head.attempt("atoll islands latest")[1]), "both train", 1.0)
        wait_for_merges(fleet.head)
        told = merges(fleet.head)
        fleet.lose_head(*names)
        names.reverse()
        wait_until(lambda: fleet.head.attempt("atoll status latest")[0] == 0, "the job", 1.0)
        assert merges(fleet.head) >= told, "what was shown is not lost"
        assert [seen["job"] for seen in json.loads(fleet.head.type("atoll jobs --json"))["jobs"]] == [job]
        print(f"loss {loss + 1}: version {told} was shown, and {merges(fleet.head)} is")
    assert "completed" in fleet.head.attempt("atoll watch latest")[1]
    run = Path(fleet.head.path(f"runs/{job}"))
    seen = Job(None, job, run)  # type: ignore[arg-type]
    seen.last = json.loads((run / "status.json").read_text())
    assert len(seen.restarts()) == LOSSES
    assert_sound(seen)
    tokens = seen.last["goodput"]["tokens"]
    assert tokens["trained"] == tokens["merged"] + tokens["discarded"]
    began = [r.event for r in read_tape(run / "tape.jsonl").records if isinstance(report_of(r.event), CaughtUp)]
    continued = [(event.island, event.report.left.incarnation) for event in began if event.report.left is not None]
    assert set(continued) <= {(name, loss + 1) for name in ("one", "two") for loss in range(LOSSES)}
    assert len(continued) >= LOSSES, "a state is refused only where a merge under way has some of its work"
    assert all(any(event.report.left.kept_tokens) for event in began if event.report.left is not None)
