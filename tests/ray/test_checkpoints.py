"""Checkpoints of running jobs with real processes: taken under load, whole or not there, and gone on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.accounting.goodput import Goodput
from orchestrator.actors.island import IslandInterface
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import Manifest
from orchestrator.checkpoints.reading import listed, verified
from orchestrator.config import parse_job
from orchestrator.core import commands, saving
from orchestrator.core.events import FragmentAdopted, IslandCaughtUp, MergeCompleted
from orchestrator.core.vocabulary import Epoch, Incarnation, IslandId
from orchestrator.errors import InfrastructureError, NotFound
from orchestrator.roots import AllowedRoots
from orchestrator.runtime.names import island_name
from orchestrator.tape.replay import replay
from orchestrator.tape.storage import read_tape
from tests.ray.jobs import GROUPS, Job, synthetic
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.ray
Start = Callable[..., Job]


def recorded(job: Job, kind: type) -> list[Any]:
    return [record.event for record in read_tape(job.run_dir / "tape.jsonl").records if isinstance(record.event, kind)]


def taken(job: Job, count: int) -> list[Any]:
    job.wait_until(lambda: len(recorded(job, saving.CheckpointTaken)) >= count, f"{count} checkpoints")
    return recorded(job, saving.CheckpointTaken)


def checkpoints_of(job: Job) -> list[Manifest]:
    return listed(Folder.own(job.run_dir / "checkpoints"))


def test_a_job_that_trains_is_saved_every_few_merges_and_keeps_the_latest(start: Start) -> None:
    job = start(synthetic(steps=150, checkpoints={"every_merges": 6, "keep": 2}))
    taken(job, 4)
    job.command(commands.Checkpoint())
    job.wait_for_end()
    kept = checkpoints_of(job)
    assert [manifest.number for manifest in kept] == [
        event.checkpoint for event in recorded(job, saving.CheckpointTaken)
    ][-2:]
    saved = recorded(job, saving.IslandSaved)
    for manifest in kept:
        assert verified(Folder.own(job.run_dir / "checkpoints" / f"{manifest.number:06d}")) == manifest
        of_this = {event.island: event.tokens_total for event in saved if event.checkpoint == manifest.number}
        assert manifest.tokens_trained == sum(of_this.values())  # each island once, at its own cut, nobody died
        assert {part.island: part.tokens_total for part in manifest.parts} == of_this
        for part in manifest.parts:
            ahead = [held > f.version for held, f in zip(part.versions, manifest.fragments, strict=True)]
            assert not any(ahead), "an island holds what Θ of the checkpoint does not"
        for p, merged in enumerate(manifest.merged_tokens):
            open_work = sum(part.token_counts[p] for part in manifest.parts)
            assert 0 < merged <= manifest.tokens_trained
            assert merged + open_work >= manifest.tokens_trained - 4 * 1024 * 32
    assert replay(read_tape(job.run_dir / "tape.jsonl")).divergence is None


def resumed(job: Job, islands: list[dict[str, Any]], steps: int, **more: Any) -> dict[str, Any]:
    """A job of these islands that goes on from the newest checkpoint of ``job``."""
    url = str(job.run_dir / "checkpoints")
    return {**synthetic(steps, resume={"checkpoint": url}, **more), "islands": islands, "budget": {"tokens": steps}}


def carried_on(before: Job, after: Job) -> saving.JobResumed:
    """How the second job began, which must be where the first one's newest checkpoint ends."""
    (event,) = recorded(after, saving.JobResumed)
    newest = checkpoints_of(before)[-1]
    assert event.tokens_trained == newest.tokens_trained
    assert event.merged_tokens == newest.merged_tokens
    assert event.versions == tuple(fragment.version for fragment in newest.fragments)
    merged = [
        record for record in read_tape(after.run_dir / "tape.jsonl").records if isinstance(record.event, MergeCompleted)
    ]
    for p, version in enumerate(event.versions):
        made = [record.event.version for record in merged if record.event.fragment == p]
        assert made == list(range(version + 1, version + 1 + len(made))), "merges go on where they were"
    return event


def test_three_islands_become_five_and_three_again_and_every_token_is_counted_once(start: Start) -> None:
    three = [{"node_group": group, "name": group} for group in GROUPS]
    five = [*three, *({"node_group": group, "name": f"{group}-too"} for group in GROUPS[:2])]
    endless = 10**12
    first = start({**synthetic(endless, checkpoints={"every_merges": 8}), "islands": three})
    taken(first, 1)
    first.command(commands.Cancel())
    first.wait_for_end()

    second = start(resumed(first, five, endless))
    for island in five:
        second.wait_for_merge(island["name"], 1)
    second.command(commands.Checkpoint())
    taken(second, 1)
    second.command(commands.Cancel())
    second.wait_for_end()
    begun = carried_on(first, second)
    assert {island.island for island in begun.islands} == set(GROUPS)
    sources = {e.island: e.donor for group in five for e in second.events(IslandCaughtUp, group["name"])}
    assert {name: donor for name, donor in sources.items() if name in GROUPS} == {group: group for group in GROUPS}

    budget = checkpoints_of(second)[-1].tokens_trained + 60_000
    third = start(resumed(second, three, budget))
    status = third.wait_for_end()
    carried_on(second, third)
    assert status["view"]["outcome"] == "completed"
    assert status["view"]["tokens_trained"] >= budget
    assert status["goodput"]["carried"]["trained"] == checkpoints_of(second)[-1].tokens_trained
    for job in (second, third):
        tape = read_tape(job.run_dir / "tape.jsonl")
        goodput = Goodput(tape.header.policy)
        assert replay(tape, (goodput,)).divergence is None
        goodput.check()
        before, accounts = goodput.ledger.carried, goodput.ledger.accounts
        everything = before.trained + sum(goodput.ledger.trained.values())
        for p in range(4):
            mine = [of_island[p] for of_island in accounts.values()]
            known = before.merged[p] + before.discarded[p] + sum(a.merged + a.discarded + a.in_flight for a in mine)
            assert known == everything
            assert (
                job is second or sum(a.merged for a in mine) > 0
            )  # the second ends before every fragment had its turn
            assert 0 <= sum(a.carried for a in mine) == before.kept[p]


def test_a_job_that_would_go_on_from_outside_its_roots_is_not_started_and_leaves_nothing(
    start: Start, port: Any, tmp_path: Path
) -> None:
    """Whoever asked the control port: the synchroniser looks itself. An island refuses another folder that it is told."""
    import ray  # not before the tests begin

    from orchestrator.runtime import cluster

    job = start(synthetic(10**6))
    for group in GROUPS:
        job.wait_for_merge(group, 1)
    outside, roots = tmp_path.parent / f"{tmp_path.name}-outside", AllowedRoots.only(tmp_path)
    for section in ({"resume": {"checkpoint": str(outside)}}, {"checkpoints": {"folder": str(outside)}}):
        spec = parse_job(synthetic(100, **section))
        with pytest.raises(InfrastructureError, match="is no place for checkpoints of jobs here"):
            port.start_job("outside", spec, tmp_path / "outside", {}, roots)
        with pytest.raises(NotFound):
            port.status("outside")
    island = cluster.actor_named(island_name(job.id, IslandId(GROUPS[0]), Incarnation(1)))
    assert island is not None
    ray.get(island.call(IslandInterface.save, Epoch(1), 77, str(outside)), timeout=PATIENCE_S)
    log = job.run_dir / "logs"
    job.wait_until(
        lambda: "is no place for checkpoints" in "".join(p.read_text() for p in log.rglob("*.log")), "a refusal"
    )
    assert not outside.exists()


def test_a_running_job_goes_back_to_a_checkpoint_and_trains_on_from_there(start: Start) -> None:
    job = start(synthetic(steps=10**6))
    for group in GROUPS:
        job.wait_for_merge(group, 1)
    job.command(commands.Checkpoint())
    taken(job, 1)
    saved = checkpoints_of(job)[-1]
    passed = sum(fragment.version for fragment in saved.fragments) + 12
    job.wait_until(lambda: job.status()["view"]["global_version"] >= passed, "merges behind the checkpoint")
    job.port.submit(job.id, "back", "test", commands.Rollback(0))
    job.wait_until(lambda: len(recorded(job, saving.FragmentRestored)) == 4, "every fragment")
    restored = recorded(job, saving.FragmentRestored)

    def merged_again() -> bool:
        fragments = job.status()["view"]["fragments"]
        return all(fragments[event.fragment]["version"] > event.version for event in restored)

    job.wait_until(merged_again, "a merge of every fragment")
    job.command(commands.Cancel())
    status = job.wait_for_end()
    assert [event.digest for event in restored] == [fragment.digest for fragment in saved.fragments]
    tape = read_tape(job.run_dir / "tape.jsonl")
    goodput = Goodput(tape.header.policy)
    assert replay(tape, (goodput,)).divergence is None
    goodput.check()
    for event in restored:
        later = [
            r.event for r in tape.records if isinstance(r.event, MergeCompleted) and r.event.fragment == event.fragment
        ]
        first = next(merge for merge in later if merge.version == event.version + 1)
        assert first.base_digest == event.digest, "the next merge builds on what the checkpoint has"
        adopted = [e for group in GROUPS for e in job.events(FragmentAdopted, group) if e.version == event.version]
        assert all(e.kept_tokens == 0 for e in adopted if e.fragment == event.fragment)
    assert status["goodput"]["discarded_tokens"]["rolled back"] > 0
