"""Machines without a common disk: checkpoints are taken and resumed, logs are read, and a deleted job leaves no file."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.reading import listed, verified
from orchestrator.core import saving
from orchestrator.core.messages import CatchUpFailure, CaughtUp
from orchestrator.errors import InvalidJobSpec
from orchestrator.tape.storage import read_tape
from tests.harness.reports import of_kind
from tests.wan.archipelago import Archipelago, WideJob
from tests.wan.conftest import ASIA, EAST

pytestmark = pytest.mark.ray
soak = pytest.mark.soak("a quarter of a minute")
Submit = Callable[..., WideJob]
STEPS = 200


def recorded(job: WideJob, kind: type) -> list[Any]:
    return of_kind((record.event for record in read_tape(job.run_dir / "tape.jsonl").records), kind)


def runs_seen_by(job: WideJob, island: str) -> Path:
    """The folder of runs as the machine of this island sees it, for as long as its node is up."""
    raylet = psutil.Process(job.island(island)["pid"]).ppid()
    return Path(f"/proc/{raylet}/root", *job.run_dir.parent.parts[1:])


def test_checkpoints_are_taken_and_resumed_where_no_machine_sees_the_folder_of_another(submit: Submit) -> None:
    job = submit(checkpoints={"every_merges": 8, "keep": 2})
    job.wait_until(lambda: len(recorded(job, saving.CheckpointTaken)) >= 3, "three checkpoints")
    assert not recorded(job, saving.CheckpointFailed)
    for island in (EAST, ASIA):
        there = runs_seen_by(job, island) / job.id
        assert there.is_dir(), "the island logs into a folder of its own"
        assert not (there / "tape.jsonl").exists(), "which is not the head's"
        assert not (there / "checkpoints").exists()
    job.cancel()
    job.wait_for_end()
    root = Folder.own(job.run_dir / "checkpoints")
    kept = listed(root)
    for manifest in kept:
        folder = root.sub(f"{manifest.number:06d}")
        assert verified(folder) == manifest
        assert {part.island for part in manifest.parts} == {EAST, ASIA}
        assert set(folder.names()) == {"manifest.json", *(file.name for file in manifest.files)}, (
            "nothing else is there"
        )

    resume = {"checkpoint": str(job.run_dir / "checkpoints")}
    after = submit(STEPS, resume=resume, seed=job.seed, trainer="tests.wan.diary:create")
    after.wait_for_end()
    (resumed,) = recorded(after, saving.JobResumed)
    assert resumed.checkpoint == root.sub(f"{kept[-1].number:06d}").url
    assert not recorded(after, CatchUpFailure)
    steps = {part.island: part.step for part in kept[-1].parts}
    first = {report.island: report.step for report in reversed(recorded(after, CaughtUp))}
    assert first == steps, "each goes on with its own state, which its machine did not have"


@soak
def test_logs_of_another_machine_are_read_at_the_head_and_outlive_the_machine(
    archipelago: Archipelago, submit: Submit
) -> None:
    job = submit()
    job.wait_for_merge(EAST, 1)
    pid = job.island(EAST)["pid"]
    there = runs_seen_by(job, EAST) / job.id / "logs" / "islands" / f"{EAST}-1.log"
    own = job.run_dir / "logs" / "islands" / f"{EAST}-1.log"
    job.wait_until(lambda: own.exists() and there.read_text().splitlines()[-1] in own.read_text(), "a copy of the log")
    heading, _, copied = own.read_text().partition("\n")
    assert heading == f"[copy of {own} on {job.island(EAST)['node']} from byte 0]"
    assert there.read_text().startswith(copied)
    with archipelago.client() as client:
        assert {log.source for log in client.logs(job.id)} >= {EAST, ASIA, "synchroniser"}
        assert f"east, incarnation 1, is process {pid}" in "".join(client.log(job.id, EAST, follow=False))
    os.kill(pid, signal.SIGKILL)
    job.wait_until(lambda: job.island(EAST)["incarnation"] == 2 and job.island(EAST)["state"] == "training", "the next")
    assert f"east, incarnation 1, is process {pid}" in own.read_text()


@soak
def test_a_deleted_job_leaves_no_file_on_any_machine(archipelago: Archipelago, submit: Submit) -> None:
    job = submit(STEPS, checkpoints={"every_merges": 8})
    job.wait_for_merge(EAST, 1)
    seen = {island: runs_seen_by(job, island) for island in (EAST, ASIA)}
    job.wait_for_end()
    job.wait_until(lambda: all((runs / job.id / ".fleet").exists() for runs in seen.values()), "claims")
    with archipelago.client() as client:
        client.delete(job.id)
    assert not job.run_dir.exists()
    job.wait_until(lambda: not any((runs / job.id).exists() for runs in seen.values()), "the sweep")


@soak
def test_a_job_that_is_deleted_while_a_machine_is_away_leaves_no_file_there_once_it_is_back(
    archipelago: Archipelago, submit: Submit
) -> None:
    job = submit(STEPS)
    job.wait_for_merge(EAST, 1)
    seen = {island: runs_seen_by(job, island) for island in (EAST, ASIA)}
    job.wait_for_end()
    job.wait_until(lambda: all((runs / job.id / ".fleet").exists() for runs in seen.values()), "claims")
    archipelago.regions.cut(EAST)
    with archipelago.client() as client:
        client.delete(job.id)
        job.wait_until(lambda: not (seen[ASIA] / job.id).exists(), "the sweep of the other machine")
        assert (seen[EAST] / job.id).exists(), "it cannot be reached"
        groups = {group.name: group for group in client.node_groups()}
        assert (groups[EAST].nodes, groups[EAST].nodes_down, groups[EAST].cpus) == (0, 1, 0.0)
        archipelago.regions.heal(EAST)
        job.wait_until(lambda: not (seen[EAST] / job.id).exists(), "the sweep of the machine that is back")
        groups = {group.name: group for group in client.node_groups()}
        assert (groups[EAST].nodes, groups[EAST].nodes_down) == (1, 0)


@soak
def test_an_island_that_dies_while_it_sends_its_part_of_a_checkpoint_leaves_nothing_of_it(
    archipelago: Archipelago, submit: Submit
) -> None:
    job = submit(checkpoints={"every_merges": 1_000_000, "keep": 5}, synthetic={"parameters": 10_000_000})
    for island in (EAST, ASIA):
        job.wait_for_merge(island, 1)
    root = job.run_dir / "checkpoints"
    with archipelago.client() as client:
        client.inject(job.id, "slow", EAST, 120.0, bytes_per_second=4e6)
        client.take_checkpoint(job.id)
        job.wait_until(lambda: list(root.glob(f"000001/{EAST}/*.draft")), "a window of several")
        os.kill(job.island(EAST)["pid"], signal.SIGKILL)
        outcomes = (saving.CheckpointTaken, saving.CheckpointFailed)
        job.wait_until(lambda: any(recorded(job, kind) for kind in outcomes), "what becomes of the checkpoint")
        job.wait_until(lambda: not list(root.glob(f"000001/{EAST}/*")), "the removal of what had arrived")
        job.wait_for_merge(EAST, 2)
        client.take_checkpoint(job.id)
    job.wait_until(
        lambda: any(event.checkpoint == 2 for event in recorded(job, saving.CheckpointTaken)), "the next one"
    )
    folder = Folder.own(root).sub("000002")
    manifest = verified(folder)
    assert {part.island for part in manifest.parts} == {EAST, ASIA}
    assert set(folder.names()) == {"manifest.json", *(file.name for file in manifest.files)}


def test_a_job_whose_text_the_islands_machines_do_not_see_is_refused_with_their_names(archipelago: Archipelago) -> None:
    text = archipelago.data / "text.jsonl"
    text.write_text('{"text": "a few words"}\n' * 1000)
    document = {
        "islands": [{"node_group": EAST}],
        "budget": {"steps": 10},
        "data": {"source": "files", "files": [str(text)]},
    }
    with archipelago.client() as client, pytest.raises(InvalidJobSpec) as refusal:
        client.submit(document)
    (problem,) = refusal.value.problems
    assert problem.path == "data.files.0"
    assert re.fullmatch(rf"{text} is not seen by \S+ of {EAST} \(No such file or directory\)\.", problem.message)
