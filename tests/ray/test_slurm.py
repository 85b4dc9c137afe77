"""A real Slurm: its controller, a node, and what a queue does to an array of ``deploy/slurm/join.sbatch``.

Slurm's daemons are in namespaces of their own for processes, mounts and the host name, which is ``localhost`` there, so that
they bind to loopback alone. All of them end with the first process of the namespace.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.core import commands, events
from orchestrator.core.messages import Drained
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.settings import TOKEN_VARIABLE
from orchestrator.system.ports import free_port
from tests.documents import ROOT
from tests.programs import required
from tests.ray.jobs import ENDLESS, Job, assert_sound, synthetic
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.soak(
        "packages of its own, and a minute; test_departures.py signals all processes of a machine as Slurm does"
    ),
]

GROUP = "slurm"
CGROUPS = Path("/sys/fs/cgroup")
SCRIPT = ROOT / "deploy" / "slurm" / "join.sbatch"
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName=localhost NodeAddr=127.0.0.1 CPUs=4
PartitionName=main Nodes=localhost PriorityTier=1 Default=YES
PartitionName=urgent Nodes=localhost PriorityTier=10 PreemptMode=OFF
"""
DAEMONS = """
hostname localhost
mount --make-rprivate /
mount -t proc proc /proc
munged --force --socket={folder}/munge --key-file={folder}/key --pid-file={folder}/munged.pid \
    --seed-file={folder}/seed --log-file={folder}/munged.log
slurmctld
slurmd
echo up
read -r _
"""


class Slurm:
    """A queue with one node. ``environment`` is the submitter's."""

    def __init__(self, folder: Path, environment: dict[str, str], tracking: str) -> None:
        self.folder, self._tracking = folder, tracking
        for name in ("state", "spool", "home"):
            (folder / name).mkdir(parents=True)
        key = folder / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        controller, node = free_port(), free_port()
        text = CONFIGURATION.format(folder=folder, controller=controller, node=node, tracking=tracking)
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={CGROUPS}\n")
        self._environment = {**os.environ, **environment, "SLURM_CONF": str(folder / "slurm.conf")}
        namespaces = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "bash", "-ec"]
        self._first = subprocess.Popen(
            [*namespaces, DAEMONS.format(folder=folder)],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._first.stdout is not None
        assert self._first.stdout.readline() == "up\n", self.logs()
        wait_until(lambda: "idle" in self.said("sinfo", "--noheader", "--format", "%T"), "an idle node")

    def said(self, *command: str, folder: Path = ROOT) -> str:
        """Return what a command of Slurm's prints, entered in this folder."""
        done = subprocess.run(command, env=self._environment, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout

    def submits(self, *options: str, folder: Path = ROOT) -> str:
        """Submit the array, and return its number."""
        return self.said("sbatch", "--parsable", "--export=ALL", *options, folder=folder).strip()

    def state(self, job: str) -> str:
        return self.said("squeue", "--noheader", "--array", "--job", job, "--format", "%T").strip()

    def logs(self) -> str:
        return "".join(f"\n{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        self._first.kill()  # and with it every process of its namespace
        self._first.wait()
        own = CGROUPS / "freezer" / "slurm_localhost"
        if self._tracking == "cgroup" and own.is_dir():
            wait_until(lambda: not any(path.read_text() for path in own.rglob("cgroup.procs")), "the end of all jobs")
            for folder, _, _ in os.walk(own, topdown=False):
                os.rmdir(folder)


@pytest.fixture
def slurm(home: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """A queue that finds a job's processes by their parents, or as its parameter says."""
    for program in ("slurmctld", "slurmd", "munged", "unshare"):
        required(program)
    if os.geteuid() != 0:
        pytest.skip("namespaces and munged need root")
    cluster = ClusterFile.find(home)
    assert cluster is not None
    program = tmp_path / "atoll"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m api.cli "$@"\n')
    program.chmod(0o755)
    settings = {
        "ATOLL_HEAD": cluster.address,
        "ATOLL_REGION": "us-east1",
        "ATOLL_INSECURE": "1",
        "ATOLL_PROGRAM": str(program),
        "ATOLL_TOKEN_FILE": cluster.environment[TOKEN_VARIABLE],
        "PYTHONPATH": str(ROOT),
    }
    queue = Slurm(tmp_path / "slurm", settings, getattr(request, "param", "linuxproc"))
    yield queue
    queue.close()


def job_of_the_queue(start: Callable[..., Job]) -> Job:
    """A job with two islands, both on machines of the queue."""
    document = synthetic(ENDLESS, recovery={"restarts_max": 0})
    return start(document | {"islands": [{"node_group": GROUP, "count": 2}]})


def assert_all_left(job: Job, incarnation: int, cause: str) -> None:
    """Both islands had handed all their work over before the machine ended."""
    for island in (f"{GROUP}-0", f"{GROUP}-1"):
        job.wait_until(lambda island=island: job.island(island)["incarnation"] > incarnation, "its next incarnation")
        notice = job.events(events.NoticeReceived, island)[-1]
        assert (notice.incarnation, notice.cause) == (incarnation, cause)
        assert len(job.events(Drained, island)) == incarnation
        assert job.events(events.ConnectionLost, island) == job.events(events.PlacementFailed, island) == []


def merges_on(job: Job, incarnation: int) -> None:
    for island in (f"{GROUP}-0", f"{GROUP}-1"):
        job.wait_for_merge(island, incarnation)


SIGTERM = "SIGTERM was sent to its machine"


def test_an_array_of_a_queue_is_cancelled_preempted_and_out_of_time_and_loses_nothing(
    slurm: Slurm, start: Callable[..., Job], tmp_path: Path
) -> None:
    job = job_of_the_queue(start)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    # submitted from any folder, two elements one after the other
    array = slurm.submits("--array=0-1%1", str(SCRIPT), folder=elsewhere)
    merges_on(job, 1)
    slurm.said("scancel", f"{array}_0")
    assert_all_left(job, 1, SIGTERM)

    # the next element is there for those that wait; a job with a higher priority takes its machine
    merges_on(job, 2)
    urgent = slurm.said(
        "sbatch", "--parsable", "--partition=urgent", "--exclusive", "--wrap", "sleep 1", folder=elsewhere
    ).strip()
    assert_all_left(job, 2, SIGTERM)
    wait_until(lambda: slurm.state(f"{array}_1") == "PENDING", "its return to the queue")
    assert re.search(r"Restarts=1\b", slurm.said("scontrol", "show", "job", f"{array}_1"))
    wait_until(lambda: urgent not in slurm.said("squeue", "--noheader", "--format", "%A"), "the urgent job's end")
    slurm.said("scancel", array)

    # one with a time limit leaves before it, by itself
    limited = slurm.submits("--array=0", "--time=2", str(SCRIPT), "--lead", "80", folder=elsewhere)
    merges_on(job, 3)
    assert_all_left(job, 3, "its time on this machine is nearly up")
    wait_until(lambda: limited not in slurm.said("squeue", "--noheader", "--format", "%A"), "its end")
    told = (elsewhere / f"slurm-{limited}_0.out").read_text()
    assert "No process of a job runs here any more" in told

    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)


@pytest.mark.skipif(
    not (CGROUPS / "freezer").is_dir(), reason="this Slurm needs cgroups of version 1 to track processes"
)
@pytest.mark.parametrize("slurm", ["cgroup"], indirect=True)
def test_an_element_whose_processes_a_cgroup_holds_is_cancelled_and_loses_nothing(
    slurm: Slurm, start: Callable[..., Job], tmp_path: Path
) -> None:
    job = job_of_the_queue(start)
    array = slurm.submits("--array=0-1%1", str(SCRIPT), folder=tmp_path)
    merges_on(job, 1)
    held = [
        psutil.Process(int(pid))
        for path in CGROUPS.glob("freezer/slurm_localhost/uid_0/job_*/**/cgroup.procs")
        for pid in path.read_text().split()
    ]
    (raylet,) = (process for process in held if process.name() == "raylet")
    slurm.said("scancel", f"{array}_0")
    assert_all_left(job, 1, SIGTERM)
    wait_until(lambda: not raylet.is_running(), "the end of its node")
    merges_on(job, 2)
    slurm.said("scancel", array)
    assert_all_left(job, 2, SIGTERM)
    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)


def test_an_array_with_a_mistake_in_its_settings_ends_as_a_whole(slurm: Slurm, tmp_path: Path) -> None:
    array = slurm.submits("--array=0-99%1", str(SCRIPT), "--until", "yesterday", folder=tmp_path)
    wait_until(lambda: slurm.said("squeue", "--noheader").strip() == "", "an empty queue")
    told = (tmp_path / f"slurm-{array}_0.out").read_text()
    assert "--until 'yesterday' is not a time" in told
    assert not (tmp_path / f"slurm-{array}_1.out").exists()
