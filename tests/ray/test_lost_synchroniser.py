"""The synchroniser's node dies and its disk is erased: the job goes on from what its islands hold, on another node.

python -m tests.ray.test_lost_synchroniser [TIMES]                so often, one after another, and how long each time took
python -m tests.ray.test_lost_synchroniser --machines [TIMES]     the same with machines that share no disk, as root
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from orchestrator.accounting.goodput import Goodput
from orchestrator.actors import ActorHandle
from orchestrator.core import commands, events
from orchestrator.core.messages import Progress
from orchestrator.core.saving import FragmentRestored, JobResumed, JobSalvaged, ShardMoved
from orchestrator.errors import DataError
from orchestrator.runtime import cluster, embedded, processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.control_port import RayControlPort, connect
from orchestrator.runtime.groups import NodeGroup
from orchestrator.runtime.settings import synchroniser_name
from orchestrator.system.run_folder import TAPE
from orchestrator.tape.replay import replay
from orchestrator.tape.schema import Record, Tape
from orchestrator.tape.storage import read_tape
from tests.ray.conftest import starting
from tests.ray.jobs import BRIEF_S, ENDLESS, Job, assert_sound, of_kind, synthetic
from tests.waiting import PATIENCE_S, wait_until
from tests.wan.regions import Regions
from tests.wan.test_guide import Machine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
KEEPERS, ISLANDS = "keepers", ("us-east", "europe", "asia")
FLEET = (
    NodeGroup(name=KEEPERS, region="us-central", nodes=2, cpus=1),
    *(NodeGroup(name=name, region=name, cpus=2) for name in ISLANDS),
)
DOCUMENT = synthetic(ENDLESS, ISLANDS, synchroniser={"node_groups": [KEEPERS], "interval_steps": 8, "overlap_steps": 4})
NEWS = 8
SHARE_MIN = 0.97
NOTICED = "the node of the synchroniser is down"
SPECIFICATION = f"""
name: first
trainer: learners.synthetic:create
synthetic: {{parameters: 100000, step_s: 0.1}}
synchroniser: {{node_groups: [{KEEPERS}], fragments: 4, interval_steps: 16, overlap_steps: 8, grace_cap_steps: 6}}
checkpoints: {{every_merges: 8, keep: 2}}
islands:
  - {{name: one, node_group: spot}}
  - {{name: two, node_group: spot}}
  - {{name: three, node_group: spot}}
budget: {{steps: 1000000}}
"""

FRAGMENTS = frozenset(range(4))


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
    job.command(commands.Set(None, 2, 6.0, 10))  # no lr: the synthetic trainer has its own
    job.wait_until(lambda: job.status()["view"]["settings"]["changed"], "other settings")
    job.wait_until(partial(merges, job, 2 * NEWS), "merges with them")
    pid = job.pid_of_synchroniser()
    erased = job.run_dir.rename(job.run_dir.with_name("erased"))
    os.kill(pid, signal.SIGKILL)
    before = tuple(Job(port, job.id, erased).records())
    shutil.rmtree(erased)
    job.forget_tape()
    salvaged = job.wait_until(partial(first, job, JobSalvaged), "the salvage of the job", BRIEF_S)
    job.wait_until(partial(merges, job, sum(salvaged.versions) + NEWS), "merges of the new epoch")
    assert_continued(job, Loss(before, salvaged, 0.0, 0.0))
    now = job.status()["view"]["settings"]
    assert (now["quorum"], now["grace"], now["interval"]) == (2, 6.0, 10), "what the islands were given"


@pytest.mark.soak("a cluster of its own, of which a node dies")
def test_a_job_goes_on_after_the_machine_of_its_synchroniser_is_lost_with_its_disk() -> None:
    """In a process of its own, because this one belongs to another cluster."""
    command = [sys.executable, "-m", "tests.ray.test_lost_synchroniser", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "1: decided after" in done.stdout


@pytest.mark.soak("minutes")
def test_the_head_has_the_run_of_a_synchroniser_whose_machine_shares_no_disk_and_is_lost() -> None:
    with Machines() as machines:
        machines.submit()
        machines.lose()
        machines.lose_processes()
        machines.end()


class Machines:
    """A head with the service, two machines for the synchroniser and two for islands, which share nothing but a network."""

    NAMES = ("head", "keeper-1", "keeper-2", "east", "west")

    def __init__(self) -> None:
        self.regions = Regions(self.NAMES)
        self.address = self.regions.address
        self.made: dict[str, Machine] = {}
        self.job = ""

    def __enter__(self) -> Machines:
        try:
            self.head = self._boot("head")
            self.head.type("atoll certificates authority fleet")
            self._certify("head", "/etc/atoll/certificates")
            address = self.address("head")
            self.head.stay(f"atoll head --address {address} --certificates /etc/atoll/certificates")
            self.head.stay(f"atoll serve --certificates /etc/atoll/certificates --host {address}")
            for name in self.NAMES[1:]:
                self.join(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.made.values():
            machine.switch_off()
        self.regions.close()

    def _boot(self, name: str) -> Machine:
        self.made[name] = Machine(self.regions, name)
        return self.made[name]

    def _certify(self, name: str, folder: str) -> None:
        self.head.type(f"atoll certificates issue fleet {folder} --name {self.address(name)}")

    def join(self, name: str) -> None:
        """Boot the machine, with an empty disk, and have it join."""
        machine = self._boot(name)
        folder = self.head.path(name)
        if not folder.exists():
            self._certify(name, name)
        shutil.copytree(folder, machine.path("/etc/atoll/certificates"), dirs_exist_ok=True)
        shutil.copy2(self.head.path(".atoll/cluster/token"), machine.path("/etc/atoll/token"))
        machine.type("export RAY_AUTH_TOKEN_PATH=/etc/atoll/token ATOLL_CERTIFICATES=/etc/atoll/certificates")
        group = KEEPERS if name.startswith("keeper") else "spot"
        machine.stay(f"atoll join {self.address('head')}:6379 --group {group} --region {name} --cpus 2")

    def submit(self, *options: str) -> None:
        self.head.path("job.yaml").write_text(SPECIFICATION)
        self.job = json.loads(self.head.type(f"atoll submit job.yaml --json {' '.join(options)}"))["job"]
        wait_until(self.trains, "all islands train", 0.5)
        self.wait_for_merges()
        wait_until(lambda: len(self.checkpoints()) > 0, "a checkpoint on the head", 0.5)

    def status(self) -> dict[str, Any]:
        code, said = self.head.attempt(f"atoll status {self.job} --json")
        return json.loads(said) if code == 0 else {}

    def islands(self) -> dict[str, Any]:
        return {one["island"]: one for one in json.loads(self.head.type(f"atoll islands {self.job} --json"))}

    def trains(self) -> bool:
        code, said = self.head.attempt(f"atoll islands {self.job}")
        return code == 0 and len(re.findall(r"^\S+ +\S+ +training", said, re.MULTILINE)) == 3

    def checkpoints(self) -> list[Any]:
        return list(json.loads(self.head.type(f"atoll checkpoints {self.job} --json")))

    def wait_for_merges(self) -> None:
        before = sum_of_versions(self.tape())
        wait_until(lambda: sum_of_versions(self.tape()) >= before + NEWS, "merges on the head's tape", 0.5)

    def tape(self, name: str = TAPE) -> Tape:
        """The head's copy, which is read between two of its changes."""
        path = self.head.path(f"runs/{self.job}/{name}")
        return wait_until(lambda: _whole(path), f"a tape at {path}", 0.2)

    def keeper(self) -> str:
        """The machine on which the synchroniser writes."""
        having = [name for name in ("keeper-1", "keeper-2") if self.made[name].path(f"runs/{self.job}/{TAPE}").exists()]
        return max(having, key=lambda name: self.made[name].path(f"runs/{self.job}/{TAPE}").stat().st_mtime)

    def lose(self) -> str:
        """Lose the synchroniser's machine with its disk. Return how long everything took, once all that must hold does."""
        lost, before = self.keeper(), self.islands()
        other = next(name for name in ("keeper-1", "keeper-2") if name != lost)
        path = self.made[other].path(f"runs/{self.job}/{TAPE}")
        noticed = self.head.path(f"runs/{self.job}/logs/controller-1.log")
        count = noticed.read_text().count(NOTICED)
        killed_s = time.monotonic()
        self.made[lost].switch_off()
        del self.made[lost]
        wait_until(lambda: noticed.read_text().count(NOTICED) > count, NOTICED, 0.02)
        detected_s = time.monotonic()
        wait_until(lambda: (tape := _whole(path)) and _decided(tape), "decisions on another machine", 0.02)
        decided_s = time.monotonic()
        wait_until(self.trains, "all islands train", 0.5)
        self.wait_for_merges()
        now = self.islands()

        salvaged = next(r.event for r in self.tape().records if isinstance(r.event, JobSalvaged))
        tapes = sorted(self.head.path(f"runs/{self.job}/earlier").iterdir(), key=lambda folder: int(folder.name))
        former = read_tape(tapes[-1] / TAPE)
        merged = {
            (r.event.fragment, r.event.version): r.event.digest
            for r in former.records
            if isinstance(r.event, events.MergeCompleted)
        }
        for p, key in enumerate(zip(salvaged.versions, salvaged.digests, strict=True)):
            newest = max((version for q, version in merged if q == p), default=0)
            assert key[0] >= newest - 1, (p, key, newest)
            assert merged.get((p, key[0]), key[1]) == key[1], "the bits are those that were merged"
        assert not salvaged.doubted
        lives = {name: one["incarnation"] for name, one in before.items()}
        assert {name: one["incarnation"] for name, one in now.items()} == lives
        goodput = Goodput(self.tape().header.policy)
        assert replay(self.tape(), (goodput,)).exact
        goodput.check()
        discarded = {
            name: max(account.discarded for account in goodput.ledger.accounts[name][: len(FRAGMENTS)])
            for name in lives
        }
        assert not any(discarded.values()), discarded
        shares = {name: share_of_time(former, self.tape(), name) for name in sorted(lives)}
        assert min(shares.values()) >= SHARE_MIN, shares
        self.join(lost)
        wait_until(lambda: f"{KEEPERS} " in self.head.type("atoll node-groups"), "the machine is back", 0.5)
        return (
            f"noticed after {detected_s - killed_s:.2f} s, decided {decided_s - detected_s:.2f} s later; "
            f"time in steps: {', '.join(f'{share:.1%}' for share in shares.values())} of what it was; "
            f"versions {list(salvaged.versions)} with their bits, {len(salvaged.lost)} lost"
        )

    def lose_processes(self) -> None:
        """Kill every process of all machines, whose disks stay. The job continues on the machine that has its files."""
        keeper, epoch = self.keeper(), self.status()["epoch"]
        for machine in self.made.values():
            machine.type("kill -KILL -1")  # all but the shell, which is the machine's first process
        for kind in ("head", "serve"):
            self.head.again(kind)
        for name in self.NAMES[1:]:
            self.made[name].again("join")
        wait_until(lambda: self.status().get("epoch", 0) > epoch and self.trains(), "the job goes on", 1.0)
        self.wait_for_merges()
        restarts = [r for r in self.tape().records if isinstance(r.event, events.SynchroniserRestarted)]
        assert restarts, "it continues from its files"
        assert self.keeper() == keeper

    def end(self) -> None:
        """Cancel the job. The head has all of it, and it can be resumed there."""
        keeper, job = self.keeper(), self.job
        self.head.type(f"atoll cancel {job}")
        assert "cancelled" in self.head.attempt(f"atoll watch {job}")[1]
        assert json.loads(self.head.type(f"atoll report {job} --json"))["outcome"] == "cancelled"
        self.head.type(f"atoll replay runs/{job}/{TAPE}")
        assert f"the synchroniser of {job} begins" in self.head.type(f"atoll logs {job} synchroniser")
        for name in ("tape.jsonl", "status.json", "report.html", "merged.safetensors"):
            assert self.head.path(f"runs/{job}/{name}").stat().st_size, name
        wait_until(lambda: not self.made[keeper].path(f"runs/{job}").exists(), "nothing is left elsewhere", 0.5)
        self.submit("--resume", job)
        assert next(r.event for r in self.tape().records if isinstance(r.event, JobResumed)).job == job
        self.head.type(f"atoll cancel {self.job}")
        assert "cancelled" in self.head.attempt(f"atoll watch {self.job}")[1]


def share_of_time(former: Tape, tape: Tape, island: str) -> float:
    """Return the share of its time that the island spent in steps, from the last report before the loss to the last one now,
    relative to the same share before the loss. Steps that a busy machine makes longer change neither. A tape that a salvage
    began has late reports of what was trained before it at its beginning, so only its latter half counts.
    """
    before, after = (
        [e for e in of_kind((r.event for r in one.records), Progress) if e.island == island] for one in (former, tape)
    )
    middle = before[len(before) // 2]
    usual = (before[-1].stepping_seconds - middle.stepping_seconds) / (before[-1].at - middle.at)
    passed = tape.header.started_at + after[-1].at - former.header.started_at - before[-1].at
    return float((after[-1].stepping_seconds - before[-1].stepping_seconds) / (passed * usual))


def _whole(path: Path) -> Tape | None:
    with suppress(OSError, DataError):
        return read_tape(path)
    return None


def _decided(tape: Tape) -> bool:
    return any(isinstance(record.event, JobSalvaged) for record in tape.records)


def sum_of_versions(tape: Tape) -> int:
    count = 0
    for record in tape.records:
        if isinstance(record.event, JobSalvaged | JobResumed):
            count = sum(record.event.versions)
        count += isinstance(record.event, events.MergeCompleted)
    return count


def on_machines(times: int) -> None:
    """Lose the synchroniser's machine so often, print what each time took, and end the job."""
    with Machines() as machines:
        machines.submit()
        for number in range(1, times + 1):
            print(f"{number}: {machines.lose()}", flush=True)
        machines.lose_processes()
        print("after the loss of all processes it went on where its files are", flush=True)
        machines.end()
        print("the head has all of it, and it was resumed there", flush=True)


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


@pytest.mark.soak("a cluster of its own, of which a node dies")
def test_a_shard_is_placed_again_after_its_disk_is_lost_and_moves_away_from_a_node_that_is_drained() -> None:
    """In a process of its own, because this one belongs to another cluster."""
    command = [sys.executable, "-m", "tests.ray.test_lost_synchroniser", "shard"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "moved" in done.stdout


@contextmanager
def fleet_and_jobs() -> Iterator[tuple[Fleet, Callable[..., Job]]]:
    with (
        tempfile.TemporaryDirectory(prefix="atoll-lost-") as folder,
        fleet_in(Path(folder) / "home") as fleet,
        starting(fleet.port, Path(folder)) as start,
    ):
        yield fleet, start


def main_of_shards() -> None:
    """Lose a shard's node with its disk, then drain the node on which it is."""
    with fleet_and_jobs() as (fleet, start):
        shards = {"shards": 2, "fragments": len(FRAGMENTS), "shard_groups": [KEEPERS], "wire": "int8"}
        job = start(synthetic(ENDLESS, ISLANDS, synchroniser=shards))
        wait_for_merges(job, FRAGMENTS)
        owned = {int(path.name[9:13]) for path in (job.run_dir / "shards/1/journal").iterdir()}
        node, other = ((job.run_dir / f"shards/{number}.node").read_text() for number in (1, 0))
        assert node != other
        about = ClusterFile.find(fleet.home)
        assert about is not None
        assert processes.kill_all(about.id, node, timeout_s=60.0)
        shutil.rmtree(job.run_dir / "shards/1")
        wait_for_merges(job, FRAGMENTS - owned)
        (lost,) = job.wait_until(lambda: moves(job), "the move of the shard")
        assert (lost.shard, lost.node, lost.source) == (1, other, "what islands hold")
        assert set(lost.fragments) == owned
        restored = [r.event.fragment for r in job.records() if isinstance(r.event, FragmentRestored)]
        assert restored == [one.fragment for one in lost.lost]
        wait_for_merges(job, FRAGMENTS)
        print(f"placed again on {other}: {lost}", flush=True)

        fleet.up()
        wait_until(lambda: sum(one.group == KEEPERS for one in cluster.nodes()) == 2)
        merged = newest_versions(job)
        leaving = next(one.id for one in cluster.nodes() if one.name == other)
        cluster.drain(cluster.client_of(about.address), leaving, "a test", None)
        job.wait_until(lambda: len(moves(job)) == 3, "the moves of both shards")
        assert {(one.shard, one.node, one.reason) for one in moves(job)[1:]} == {(n, node, "a test") for n in (0, 1)}
        assert not any(one.lost for one in moves(job)[1:])
        wait_for_merges(job, FRAGMENTS)
        assert all(version > merged[p] for p, version in newest_versions(job).items())
        assert len([r for r in job.records() if isinstance(r.event, FragmentRestored)]) == len(restored)
        assert_sound(job)
        print(f"moved to {node}: {moves(job)[1:]}", flush=True)


def moves(job: Job) -> list[ShardMoved]:
    return [r.event for r in job.records() if isinstance(r.event, ShardMoved)]


def newest_versions(job: Job) -> dict[int, int]:
    return {one["fragment"]: one["version"] for one in job.status()["view"]["fragments"]}


def wait_for_merges(job: Job, fragments: Set[int]) -> None:
    """Return once each of these fragments has been merged after now."""
    before = newest_versions(job)

    def merged() -> bool:
        return all(newest_versions(job)[p] > before[p] for p in fragments)

    job.wait_until(merged, f"merges of the fragments {sorted(fragments)}")


if __name__ == "__main__" and sys.argv[1:] == ["shard"]:
    main_of_shards()
elif __name__ == "__main__":
    run = on_machines if "--machines" in sys.argv else main
    run(next((int(word) for word in sys.argv[1:] if word.isdecimal()), 20))
