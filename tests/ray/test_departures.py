"""Machines that are there for a time: they join, hear that they must go, and go with nothing lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread

import psutil
import pytest

from api.jobs.cordons import BAD_NODE_RULE, ROUND_EVERY_S
from api.schemas import NodeCordon
from orchestrator.accounting.failures import INCIDENT_S, NODE_FAILURES_MIN
from orchestrator.core import commands, events
from orchestrator.core.effects import PlaceIsland
from orchestrator.core.messages import Drained, Progress
from orchestrator.errors import AtollError
from orchestrator.kubernetes.manifests import Shipped, rendered
from orchestrator.kubernetes.values import Values
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.runtime.settings import TOKEN_VARIABLE
from orchestrator.status import NodeGroupRecord
from tests.metadata import MachineMetadata, serving
from tests.ray.jobs import ENDLESS, Job, assert_sound, synthetic
from tests.ray.reign import reigning
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.ray

NOTICE_S = 30.0
NAMED = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')
GROUP = "spot"


class Machine:
    """One that joined, and all of its processes."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log = process, log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_until_it_joined(self) -> None:
        wait_until(lambda: "is a node of" in self.log or self._process.poll() is not None, f"its joining: {self.log}")
        assert self._process.poll() is None, self.log

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def strike(self, *numbers: signal.Signals) -> None:
        """Send these to every process at once, as a queue, a service manager or a closing terminal does."""
        for number in numbers:
            for process in psutil.Process(self._process.pid).children(recursive=True):
                process.send_signal(number)
            self._process.send_signal(number)

    def exit_code(self) -> int:
        return self._process.wait(PATIENCE_S)

    def runs(self, pid: int) -> bool:
        return pid in {child.pid for child in psutil.Process(self._process.pid).children(recursive=True)}

    def is_off_after(self, seconds: float) -> None:
        """As a cloud does it: whatever is left of it then has no power."""
        until = time.monotonic() + seconds
        wait_until(lambda: time.monotonic() > until or self._process.poll() is not None, "the end of its notice")
        self.switch_off()

    def switch_off(self) -> None:
        if self._process.poll() is None:
            for each in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
                each.kill()
        self._process.wait()


@pytest.fixture
def join(home: Path, port: RayControlPort, tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """``atoll join`` to the cluster of these tests, with options and a metadata server, if any.

    With ``host``, which takes root, the machine has this name, so that tapes can tell it from the others.
    At the end the cluster is as before: machines that still run lose their power, and the head forgets them.
    """
    cluster = ClusterFile.find(home)
    assert cluster is not None
    machines: list[Machine] = []

    def join_one(*options: str, metadata: MachineMetadata | None = None, host: str | None = None) -> Machine:
        said = {"ATOLL_NOTICES": "auto", "ATOLL_METADATA_URL": metadata.url} if metadata else {"ATOLL_NOTICES": "off"}
        environment = {**os.environ, **said, TOKEN_VARIABLE: cluster.environment[TOKEN_VARIABLE]}
        command = ["join", cluster.address, "--group", GROUP, "--region", "us-east1", "--cpus", "4", *options]
        log = tmp_path / f"machine-{len(machines)}.log"
        with log.open("wb") as file:
            program = [sys.executable, "-m", "api.cli", *command, "--own-address", "127.0.0.1"]
            program = [*NAMED, host, *program] if host else program
            machines.append(Machine(subprocess.Popen(program, env=environment, stdout=file, stderr=file), log))
        machines[-1].wait_until_it_joined()
        return machines[-1]

    yield join_one
    for machine in machines:
        machine.switch_off()
    wait_until(lambda: not groups_called(GROUP, port), "the head to forget the machines")


@contextmanager
def training_on(start: Callable[..., Job], **sections) -> Iterator[Job]:
    """A job with an island on the machine that joined, and two elsewhere."""
    job = start(synthetic(ENDLESS, (GROUP, "us-east", "europe"), **sections))
    job.wait_for_merge(GROUP, 1)
    job.wait_for_state("us-east", "training")
    job.wait_for_state("europe", "training")
    yield job
    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)


def lost_tokens(job: Job) -> int:
    """Of the island on machines that go, until now."""
    return job.status()["goodput"]["islands"][GROUP]["tokens"]["discarded"]


def step_tokens(job: Job) -> float:
    return max(e.tokens_total / e.steps_total for e in job.events(Progress, GROUP) if e.steps_total)


@pytest.mark.soak("three machines, and more than a minute for what one machine and tests/test_notices.py have")
def test_islands_leave_machines_that_are_to_go_and_lose_no_more_than_a_step(
    join: Callable[..., Machine], start: Callable[..., Job]
) -> None:
    with ExitStack() as stack:
        google = stack.enter_context(serving(MachineMetadata("gce")))
        first = join("--name", "first", metadata=google)
        job = stack.enter_context(training_on(start))
        second = join("--name", "second")

        # the cloud gives notice
        wait_until(lambda: len(google.asked) > 2, "somebody asking for notices")
        before, noticed_at = lost_tokens(job), time.monotonic()
        google.preempt(NOTICE_S)
        job.wait_until(lambda: job.island(GROUP)["incarnation"] == 2, "its next incarnation")
        first.is_off_after(NOTICE_S - (time.monotonic() - noticed_at))
        assert first.exit_code() == 0, first.log
        assert second.runs(job.wait_for_merge(GROUP, 2)["pid"])
        (notice,) = job.events(events.NoticeReceived, GROUP)
        assert (notice.cause, notice.incarnation) == ("Google reclaims the spot machine", 1)
        assert 0.0 < notice.seconds <= NOTICE_S
        assert lost_tokens(job) - before <= step_tokens(job)
        assert not job.events(events.ConnectionLost, GROUP)

        # a queue ends the second, by SIGTERM to all of its processes, twice; a third one, which has an hour and may use
        # most of a minute, is there by then
        third = join("--name", "third", "--until", f"{time.time() + 3600:.0f}", "--lead", "3555")
        second.strike(signal.SIGTERM, signal.SIGTERM)
        assert second.exit_code() == 0, second.log
        assert third.exit_code() == 0, third.log
        assert "No process of a job runs here any more" in third.log
        job.wait_until(lambda: job.island(GROUP)["incarnation"] > 3, "its next incarnation, which has no place yet")
        causes = [notice.cause for notice in job.events(events.NoticeReceived, GROUP)]
        assert causes[1:] == ["SIGTERM was sent to its machine", "its time on this machine is nearly up"]
        assert lost_tokens(job) - before <= 3 * step_tokens(job)
        assert not job.events(events.ConnectionLost, GROUP)
        placed = [
            f for record in job.records() for f in record.effects if isinstance(f, PlaceIsland) and f.island == GROUP
        ]
        assert [place.incarnation for place in placed[:4]] == [1, 2, 3, 4]  # none was placed on a node that was to go


def groups_called(name: str, port: RayControlPort) -> list[NodeGroupRecord]:
    return [group for group in port.node_groups() if group["name"] == name]


def test_islands_that_leave_together_lose_nothing_and_wait_for_the_next_node(
    join: Callable[..., Machine], start: Callable[..., Job], port: RayControlPort
) -> None:
    machine = join("--name", "only")
    document = synthetic(ENDLESS, recovery={"restarts_max": 0})
    job = start(document | {"islands": [{"node_group": GROUP, "count": 2}]})
    both = [island["island"] for island in job.status()["view"]["islands"]]
    for island in both:
        job.wait_for_merge(island, 1)

    machine.strike(signal.SIGTERM, signal.SIGHUP)
    assert machine.exit_code() == 0, machine.log
    assert "No process of a job runs here any more" in machine.log
    assert not groups_called(GROUP, port), "a node that leaves is gone at once"
    for island in both:
        job.wait_for_state(island, "waiting")
        assert job.events(Drained, island)
        assert job.events(events.ConnectionLost, island) == job.events(events.PlacementFailed, island) == []
        assert f"no node belongs to the node group '{GROUP}'" in job.island(island)["reason"]
    tokens = job.status()["goodput"]["islands"]
    assert all(tokens[island]["tokens"]["discarded"] == tokens[island]["tokens"]["in_flight"] == 0 for island in both)

    after = join("--name", "next")
    for island in both:
        job.wait_for_merge(island, 2)
    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)

    # a machine without power says nothing to the head, which would believe in its node for eleven minutes
    (present,) = groups_called(GROUP, port)
    assert (present["nodes"], present["nodes_down"], present["cpus"]) == (1, 0, 4.0)
    after.switch_off()
    (dead,) = groups_called(GROUP, port)
    assert (dead["nodes"], dead["nodes_down"], dead["cpus"], dead["cpus_free"]) == (0, 1, 0.0, 0.0)
    wait_until(lambda: not groups_called(GROUP, port), "the head to forget the dead node")


@pytest.mark.soak("two machines and a job of their own")
def test_an_island_that_dies_on_a_cordoned_node_comes_back_on_another_one_of_its_group(
    join: Callable[..., Machine], start: Callable[..., Job], port: RayControlPort
) -> None:
    machines = {name: join("--name", name) for name in ("left", "right")}

    def place_of(pid: int) -> str:
        return next(name for name, machine in machines.items() if machine.runs(pid))

    job = start(synthetic(ENDLESS, (GROUP,)))
    try:
        first = place_of(job.wait_for_merge(GROUP, 1)["pid"])
        (other,) = machines.keys() - {first}
        port.cordon_nodes([first])
        before = job.status()["view"]["global_version"]
        job.wait_until(lambda: job.status()["view"]["global_version"] > before + 8, "merges on the cordoned node")
        assert job.island(GROUP)["incarnation"] == 1, "who trains there stays"
        for incarnation in (2, 3):
            job.command(commands.Kill(GROUP))
            assert place_of(job.wait_for_merge(GROUP, incarnation)["pid"]) == other
        port.cordon_nodes([other])
        job.command(commands.Kill(GROUP))
        assert place_of(job.wait_for_merge(GROUP, 4)["pid"]) == first
    finally:
        port.cordon_nodes([])
    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)


@contextmanager
def failing(job: Job, machine: Machine) -> Iterator[list[str]]:
    """Meanwhile this machine kills every island of the job that has begun to train on it. Yields the islands, by kill."""
    enough, killed = Event(), list[str]()
    pids: set[int] = set()

    def go_on() -> None:
        while not enough.wait(INCIDENT_S + 1.0):  # as separate incidents
            with suppress(AtollError, psutil.Error):
                islands = job.seen()["view"]["islands"]
                ill = [one for one in islands if one["state"] == "training" and one["pid"] not in pids]
                for one in ill:
                    if machine.runs(one["pid"]):
                        pids.add(one["pid"])
                        psutil.Process(one["pid"]).kill()
                        killed.append(one["island"])
                        break

    thread = Thread(target=go_on)
    thread.start()
    try:
        yield killed
    finally:
        enough.set()
        thread.join()


@pytest.mark.soak("a service, two machines and a job of their own, which fails for a minute")
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.geteuid() != 0, reason="gives machines names of their own, which needs root")
def test_the_rule_cordons_a_node_that_kills_its_islands_and_they_go_to_the_other_one(
    join: Callable[..., Machine], home: Path, port: RayControlPort, tmp_path: Path
) -> None:
    machines = {name: join(host=name) for name in ("left", "right")}

    def places(job: Job) -> dict[str, str]:
        """The machine of each island of the group that trains."""
        trains = [one for one in job.status()["view"]["islands"] if one["state"] == "training"]
        own = [one for one in trains if one["island"].startswith(GROUP)]
        pairs = [(one["island"], name) for one in own for name, machine in machines.items() if machine.runs(one["pid"])]
        return dict(pairs)

    with reigning(home, tmp_path, "--cordon-bad-nodes") as reign, reign.client() as client:
        recovery = {"restarts_max": 1000, "backoff_max_s": 0.5}
        document = synthetic(ENDLESS, recovery=recovery)
        document["islands"] = [{"node_group": GROUP, "count": 2}, {"node_group": "us-east"}]
        name = client.submit(document).job
        job = Job(port, name, reign.runs / name)
        bad = next(iter(job.wait_until(lambda: len(places(job)) == 2 and places(job), "both train").values()))
        (good,) = machines.keys() - {bad}

        def cordons() -> list[NodeCordon]:
            return [one for group in client.node_groups() for one in group.cordoned_nodes]

        with failing(job, machines[bad]) as killed:
            job.wait_until(cordons, "a cordon by the rule")
            (cordon,) = cordons()
            assert (cordon.node, cordon.node_group, cordon.cordoned_by) == (bad, GROUP, BAD_NODE_RULE)
            assert cordon.in_force
            assert len(killed) >= NODE_FAILURES_MIN
            assert any(island in cordon.reason for island in killed), cordon.reason
            trail = [one for one in client.audit().entries if one.path.endswith(f"/nodes/{bad}/cordon")]
            assert [(one.caller, one.method) for one in trail] == [(BAD_NODE_RULE, "POST")]
            assert re.search(rf'^atoll_nodes_cordoned{{group="{GROUP}",.*}} 1\.0$', reign.metrics(), re.MULTILINE)
            # it kills once more what trains there, which then goes to the other one for good
            job.wait_until(lambda: list(places(job).values()) == [good, good], "both on the other machine")
        diagnosis = client.diagnosis(name)
        found = [one for one in (diagnosis.cause, *diagnosis.others) if one and one.cause == "a bad node"]
        assert [one.subject for one in found] == [bad], diagnosis
        lines = {record.n: record.event for record in job.records()}
        assert found[0].records
        assert all(isinstance(lines[n], events.ConnectionLost) for n in found[0].records), found
        assert bad in reign.atoll("diagnose", name)
        assert bad in reign.atoll("node-groups")

        # it outlives the service, and an operator ends it, which resets the count: the old failures count no more
        reign.kill()
        reign.succeed()
        with reign.client() as client:
            assert [one.node for one in cordons()] == [bad]
            reign.atoll("uncordon", GROUP, "--node", bad)
            assert cordons() == []
            rounds_later = time.monotonic() + 2.5 * ROUND_EVERY_S
            job.wait_until(lambda: time.monotonic() > rounds_later, "two rounds of the rule")
            assert cordons() == []
            client.cancel(name)
        job.wait_for_end()
        assert_sound(job)


@pytest.mark.soak("a machine and a job of its own")
def test_a_second_ctrl_c_ends_at_once_a_node_that_an_island_does_not_leave(
    join: Callable[..., Machine], start: Callable[..., Job]
) -> None:
    machine = join("--name", "stuck", "--grace", "3000")
    with training_on(start) as job:
        pid = job.island(GROUP)["pid"]
        os.kill(pid, signal.SIGSTOP)
        for count, number in enumerate((signal.SIGINT, signal.SIGTERM), start=1):
            machine.send(number)
            wait_until(lambda count=count: machine.log.count("This node is leaving") == count, machine.log)
            assert machine.runs(pid), "a queue repeats its SIGTERM"
        machine.send(signal.SIGINT)
        assert machine.exit_code() == 0, machine.log
        assert "The time is up, and a process of a job still runs here." in machine.log
        assert not psutil.pid_exists(pid)


FAR_SLICE = {
    "image": "atoll:1",
    "clusters": [
        {"name": "home", "region": "us-east1", "head": {}},
        {"name": "far", "region": "us-east1", "head_address": "head.example:6379"},
    ],
    "groups": [
        {
            **{"name": GROUP, "cluster": "far", "nodes": 2, "cpus": 4, "memory_gib": 1.0, "accelerators": 2},
            "tpu": {"accelerator": "tpu-v6e-slice", "topology": "2x2", "hosts": 2},
        }
    ],
}


@pytest.mark.soak("two machines and a job of its own")
def test_pods_of_a_slice_in_another_kubernetes_cluster_are_one_island(
    join: Callable[..., Machine], start: Callable[..., Job]
) -> None:
    """The pods' own options, with the variables that LeaderWorkerSet sets in a pod."""
    values = Values.model_validate(FAR_SLICE)
    manifests = {each["kind"]: each for each in rendered(values, values.clusters[1], Shipped())}
    template = manifests["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    words = template["spec"]["containers"][0]["command"]
    options = [word for pair in pairwise(words) if pair[0] in ("--labels", "--resources") for word in pair]
    for worker in ("0", "1"):
        join(*(word.replace("$(TPU_NAME)", "spot-0").replace("$(TPU_WORKER_ID)", worker) for word in options))
    document = synthetic(ENDLESS, (GROUP, "us-east"))
    document["islands"][0] |= {"hosts": 2, "accelerator": "tpu", "accelerators": 2}
    job = start(document)
    job.wait_for_merge(GROUP, 1)
    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)
