"""Islands of several hosts, live: gangs of processes on several nodes, which live, save and die as one."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from orchestrator.core import commands, events
from orchestrator.core.messages import CatchUpFailure, CaughtUp
from orchestrator.core.saving import CheckpointTaken
from orchestrator.runtime import processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.groups import NodeGroup
from orchestrator.runtime.ray_start import Place, RayProgram, pass_on, start_node
from orchestrator.tape.storage import read_tape
from tests.harness.reports import of_kind
from tests.ray.jobs import ENDLESS, Job, assert_sound, gone, stop, synthetic
from tests.soak import SOAKING
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.ray
soak = pytest.mark.soak("half a minute")
HELD_S = 600.0
"""A cut lasts until it is ended."""

DEVICES = {"pair": 2, "slice": 1, "wide": 4}
"""Of each host, in the eyes of JAX."""
GROUPS = (
    NodeGroup(name="pair", region="us-east1", nodes=4 if SOAKING else 3),
    NodeGroup(name="slice", region="europe-west4", nodes=2, accelerators=2, accelerator="tpu", slice_hosts=2),
    NodeGroup(name="wide", region="us-east1"),
)


def names_of(groups: Sequence[NodeGroup]) -> list[str]:
    return [f"{group.name}-{number}" for group in groups for number in range(group.nodes)]


@pytest.fixture(scope="module")
def nodes(home: Path) -> Iterator[None]:
    """Nodes beside the others of the cluster, while these tests run."""
    found = ClusterFile.find(home)
    assert found is not None
    pass_on(found, ["XLA_FLAGS"])
    for group in GROUPS if SOAKING else GROUPS[:-1]:
        with pytest.MonkeyPatch.context() as patch, RayProgram(found, dashboard=False) as program:
            patch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count={DEVICES[group.name]}")
            named = enumerate(names_of([group]))
            starts = [start_node(program, name, group, number, Place()) for number, name in named]
            assert [start.wait(PATIENCE_S) for start in starts] == [0] * len(starts)
    yield
    for name in names_of(GROUPS):
        processes.kill_all(found.id, name)


@pytest.fixture
def started(nodes: None, start: Callable[..., Job]) -> Callable[..., Job]:
    return start


def document(steps: int = ENDLESS, **sections) -> dict:
    made = synthetic(steps, ("pair", "slice"), **sections)
    made["islands"][0] |= {"hosts": 2}
    made["islands"][1] |= {"hosts": 2, "accelerator": "tpu", "accelerators": 2}
    return made


def pids_of(job: Job, island: str, incarnation: int) -> list[int]:
    """Of its processes, by rank, as their logbooks say."""
    folder = job.run_dir / "logs" / "islands"
    books = [folder / f"{island}-{incarnation}.log", folder / f"{island}-host1-{incarnation}.log"]
    job.wait_until(lambda: all(book.exists() and "is process" in book.read_text() for book in books), "its logbooks")
    return [int(re.findall(r"is process (\d+)", book.read_text())[-1]) for book in books]


def test_a_gang_lives_and_dies_as_one(started: Callable[..., Job]) -> None:
    job = started(document())
    job.wait_for_merge("slice", 1)
    job.wait_for_merge("pair", 1)
    began, stopped = job.status()["view"]["islands"], []
    refused = job.command(commands.Inject("kill_host", "pair", host=2))
    for incarnation in (1, 2):
        pids = pids_of(job, "pair", incarnation)
        if incarnation == 1:
            os.kill(pids[1], signal.SIGKILL)
        else:
            job.command(commands.Inject("kill_host", "pair", host=0))
        stopped.append(job.island("slice")["incarnation"])
        wait_until(lambda pids=pids: all(map(gone, pids)), "the end of its other process")
        job.wait_for_merge("pair", incarnation + 1)
    caught_up = [event.donor for event in job.events(CaughtUp, "pair")]
    assert caught_up[1:] == ["slice", "slice"]  # whose state every process of the new one got
    assert stopped == [1, 1]
    assert len(began) == 2
    assert {
        plan.island: plan.accelerator_count for plan in read_tape(job.run_dir / "tape.jsonl").header.policy.islands
    } == {
        "pair": 2,
        "slice": 4,
    }
    outcome = job.answer(refused)
    assert (outcome["accepted"], "the hosts 0 to 1, and host is 2" in outcome["detail"]) == (False, True)
    (struck,) = job.wait_until(lambda: job.events(events.FaultInjected, "pair"), "the record of the fault")
    assert (struck.kind, struck.host) == ("kill_host", 0)
    pids = pids_of(job, "slice", 1)
    stop(pids[1])  # one that can say nothing of the other's death is ended, too
    os.kill(pids[0], signal.SIGKILL)
    wait_until(lambda: all(map(gone, pids)), "the end of the one that stood still")
    job.wait_for_merge("slice", 2)
    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)


@soak
def test_a_gang_is_cut_off_and_drained_and_saved_and_resumed_on_one_host(started: Callable[..., Job]) -> None:
    job = started(document(checkpoints={"keep": 1}, recovery={"suspect_timeout_s": 5.0}))
    job.wait_for_merge("pair", 1)
    job.wait_for_merge("slice", 1)
    job.command(commands.Inject("cut", "pair", duration=HELD_S))
    job.wait_for_state("pair", "suspect")
    version = job.status()["view"]["global_version"]
    job.wait_until(lambda: job.status()["view"]["global_version"] > version + 8, "merges of the other one")
    healed_at = job.last["at"]
    job.command(commands.Inject("continue", "pair"))
    job.wait_until(lambda: job.island("pair")["last_merge_at"] > healed_at, "a merge with it after its cut")
    assert [job.island(name)["incarnation"] for name in ("pair", "slice")] == [1, 1]
    job.command(commands.Checkpoint())
    taken = job.wait_until(
        lambda: [r.event for r in job.records() if isinstance(r.event, CheckpointTaken)], "a checkpoint"
    )
    job.command(commands.Drain("pair"))
    job.wait_for_state("pair", "drained")
    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)
    again = synthetic(ENDLESS, ("us-east", "europe"), resume={"checkpoint": str(job.run_dir / "checkpoints")})
    for section, name in zip(again["islands"], ("pair", "slice"), strict=True):
        section["name"] = name
    resumed = started(again)
    resumed.wait_for_merge("pair", 1)
    resumed.command(commands.Cancel())
    resumed.wait_for_end()
    assert taken
    assert all(event.donor == "pair" for event in resumed.events(CaughtUp, "pair")[:1])


@soak
def test_a_standby_of_two_hosts_takes_the_place_of_a_killed_gang(started: Callable[..., Job]) -> None:
    made = document()
    made["islands"][0]["standby"] = 1
    job = started(made)
    job.wait_for_merge("pair", 1)
    job.wait_for_merge("slice", 1)
    standby = job.wait_for_state("pair-standby", "standby")["pid"]
    os.kill(pids_of(job, "pair", 1)[1], signal.SIGKILL)
    assert job.wait_for_merge("pair", 2)["pid"] == standby
    job.command(commands.Inject("kill_host", "pair", host=1))
    wait_until(lambda: gone(standby), "the end of the other process of what was the standby")
    job.wait_for_merge("pair", 3)
    assert job.island("slice")["incarnation"] == 1
    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)


@soak
def test_the_processes_of_one_host_are_on_one_node_and_die_as_one(started: Callable[..., Job]) -> None:
    made = synthetic(ENDLESS, ("pair", "europe"))
    made["islands"][0] |= {"processes_per_host": 2}
    job = started(made)
    for incarnation in (1, 2):
        job.wait_for_merge("pair", incarnation)
        pids = pids_of(job, "pair", incarnation)
        assert len({psutil.Process(pid).ppid() for pid in pids}) == 1  # the raylet of the node
        os.kill(pids[2 - incarnation], signal.SIGKILL)
        wait_until(lambda pids=pids: all(map(gone, pids)), "the end of its other process")
    job.wait_for_merge("pair", 3)
    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)


def trained(steps: int, islands: list[dict], tmp_path: Path, **sections) -> dict:
    """A job of real training, so small that it is mostly messages."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number * number}.\n" for number in range(3000)))
    return {
        "name": "tiny",
        "islands": islands,
        "budget": {"steps": steps},
        "model": {"factory": "tests.own_models:tiny"},
        "data": {"source": "files", "files": [str(text)], "sequence_length": 16},
        "training": {"batch_size": 8, "inner_optimizer": {"warmup_steps": 2}},
        "evaluation": {"sequences": 8},
        "synchroniser": {"fragments": 3, "interval_steps": 12, "overlap_steps": 8, "grace_cap_steps": 8.0},
        **sections,
    }


@soak
def test_two_islands_of_two_hosts_and_four_devices_train_a_sharded_model(
    started: Callable[..., Job], tmp_path: Path
) -> None:
    """Killed, saved, and resumed as one host of four devices, which are saved and resumed as two hosts again."""
    meshes = {"left": {"fsdp": 4}, "right": {"fsdp": 2, "tensor": 2}}
    islands = [{"node_group": "pair", "name": name, "hosts": 2, "mesh": mesh} for name, mesh in meshes.items()]
    job = started(trained(ENDLESS, islands, tmp_path))
    job.wait_for_merge("left", 1)
    job.wait_for_merge("right", 1)
    pids = pids_of(job, "left", 1)
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: all(map(gone, pids)), "the end of rank 0")
    job.wait_for_merge("left", 2)
    assert job.island("right")["incarnation"] == 1
    save_and_end(job)
    again = [{"node_group": "wide", "name": name, "mesh": {"fsdp": 2, "tensor": 2}} for name in meshes]
    resumed = started(trained(ENDLESS, again, tmp_path, resume={"checkpoint": str(job.run_dir / "checkpoints")}))
    require_own_states(resumed, meshes)
    save_and_end(resumed)
    third = started(trained(ENDLESS, islands, tmp_path, resume={"checkpoint": str(resumed.run_dir / "checkpoints")}))
    require_own_states(third, meshes)
    third.command(commands.Cancel())
    third.wait_for_end()
    assert_sound(third)


def save_and_end(job: Job) -> None:
    job.command(commands.Checkpoint())
    job.wait_until(lambda: [r.event for r in job.records() if isinstance(r.event, CheckpointTaken)], "a checkpoint")
    job.command(commands.Cancel())
    job.wait_for_end()
    assert_sound(job)


def require_own_states(job: Job, islands: Iterable[str]) -> None:
    for name in islands:
        job.wait_for_merge(name, 1)
    states = [event for name in islands for event in job.events(CaughtUp, name)]
    assert any(event.donor == event.island for event in states), states  # the second may have asked the first
    assert not of_kind((r.event for r in job.records()), CatchUpFailure)


@soak
def test_hosts_with_fewer_devices_than_promised_end_the_job_before_it_begins(
    started: Callable[..., Job], tmp_path: Path
) -> None:
    """Ray has two TPUs of each; JAX finds one device."""
    island = {"node_group": "slice", "hosts": 2, "accelerator": "tpu", "accelerators": 2}
    job = started(trained(ENDLESS, [island], tmp_path))
    job.wait_for_end()
    view = job.status()["view"]
    assert view["outcome"] == "failed"
    assert "islands.0.accelerators: promises 2 devices per host, but host 0 has 1, host 1 has 1" in view["reason"]
    assert [event.incarnation for event in job.events(events.IslandPlaced, "slice")] == [1]


@pytest.mark.soak("nodes of its own, and a job on what is left")
def test_jobs_begin_at_once_after_most_nodes_died(home: Path, started: Callable[..., Job]) -> None:
    """Of which Ray believes for minutes that they live."""
    found, left = ClusterFile.find(home), f"pair-{GROUPS[0].nodes - 1}"
    assert found is not None
    for name in names_of(GROUPS):
        if name != left:
            processes.kill_all(found.id, name)
    jobs = [started(synthetic(ENDLESS, (group, "pair"))) for group in ("us-east", "europe")]
    for job in jobs:
        job.wait_for_merge("pair", 1)
        assert job.events(events.PlacementFailed, "pair") == []
