"""Checkpoints of running jobs with real processes: taken under load, whole or not there, and gone on from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.accounting.goodput import Goodput
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import Manifest
from orchestrator.checkpoints.reading import listed, verified
from orchestrator.core import commands, saving
from orchestrator.core.events import MergeCompleted
from orchestrator.core.messages import CaughtUp, Saved
from orchestrator.tape.replay import replay
from orchestrator.tape.storage import read_tape
from tests.harness.reports import of_kind
from tests.ray.jobs import ENDLESS, GROUPS, Job, synthetic

pytestmark = pytest.mark.ray
Start = Callable[..., Job]


def recorded(job: Job, kind: type) -> list[Any]:
    return of_kind((record.event for record in job.records()), kind)


def taken(job: Job, count: int) -> list[Any]:
    job.wait_until(lambda: len(recorded(job, saving.CheckpointTaken)) >= count, f"{count} checkpoints")
    return recorded(job, saving.CheckpointTaken)


def checkpoints_of(job: Job) -> list[Manifest]:
    return listed(Folder.own(job.run_dir / "checkpoints"))


def test_a_job_that_trains_is_saved_every_few_merges_and_keeps_the_latest(start: Start) -> None:
    job = start(synthetic(steps=ENDLESS, groups=GROUPS[:2], checkpoints={"every_merges": 6, "keep": 2}))
    taken(job, 4)
    job.command(commands.Checkpoint())
    taken(job, 5)
    job.command(commands.Cancel())
    job.wait_for_end()
    kept = checkpoints_of(job)
    assert [manifest.number for manifest in kept] == [
        event.checkpoint for event in recorded(job, saving.CheckpointTaken)
    ][-2:]
    saved = recorded(job, Saved)
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


def test_two_islands_become_three_and_two_again_and_every_token_is_counted_once(start: Start) -> None:
    two = [{"node_group": group, "name": group} for group in GROUPS[:2]]
    three = [*two, {"node_group": GROUPS[0], "name": f"{GROUPS[0]}-too"}]
    first = start({**synthetic(ENDLESS, checkpoints={"every_merges": 8}), "islands": two})
    first.command(commands.Set(quorum=2, grace_cap_steps=6.0))  # no lr: the synthetic trainer has its own
    first.wait_until(lambda: first.status()["view"]["settings"]["changed"], "other settings")
    taken(first, len(recorded(first, saving.CheckpointTaken)) + 2)  # one may have been begun before
    first.command(commands.Cancel())
    first.wait_for_end()

    second = start(resumed(first, three, ENDLESS))
    for island in three:
        second.wait_for_merge(island["name"], 1)
    kept = second.status()["view"]["settings"]
    assert (kept["quorum"], kept["grace"]) == (2, 6.0)
    second.command(commands.Checkpoint())
    taken(second, 1)
    second.command(commands.Cancel())
    second.wait_for_end()
    begun = carried_on(first, second)
    assert {island.island for island in begun.islands} == set(GROUPS[:2])
    sources = {e.island: e.donor for group in three for e in second.events(CaughtUp, group["name"])}
    assert {name: donor for name, donor in sources.items() if name in GROUPS} == {group: group for group in GROUPS[:2]}

    budget = checkpoints_of(second)[-1].tokens_trained + 60_000
    third = start(resumed(second, two, budget))
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
