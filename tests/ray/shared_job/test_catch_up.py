"""States handed from process to process: a donor that goes away is replaced, and nobody gives work before it has a state."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.core import commands, events
from orchestrator.core.messages import CatchUpFailure, CaughtUp
from tests.ray.jobs import GROUPS, Job, assert_nobody_gave_before_it_had_a_state

pytestmark = pytest.mark.ray


def donor_of(job: Job, island: str, incarnation: int) -> str:
    """Whom the island takes a state from at present."""
    told = str(job.wait_for_state(island, "catching_up", incarnation=incarnation)["reason"])
    assert told.startswith("taking a state from "), told
    return told.split()[4]


@pytest.mark.soak("for one donor what tests/ray/test_catch_up.py has for several")
def test_a_donor_that_dies_or_stands_still_in_the_act_is_replaced_by_another(
    job: Job, plug: Callable[[Path], Path], train_on: Callable[..., None]
) -> None:
    from tests.ray import plugged  # here, because it imports Ray

    number = job.island("asia")["incarnation"] + 1
    handing_over = plug(plugged.act(job.seed, plugged.HAND_OVER))
    job.command(commands.Kill("asia"))
    dead = job.island(donor_of(job, "asia", number))
    train_on(dead["pid"])  # handing over costs it nothing
    os.kill(dead["pid"], signal.SIGKILL)
    handing_over.unlink()
    assert job.wait_for_merge("asia", number)["incarnation"] == number
    (other,) = set(GROUPS) - {"asia", dead["island"]}
    assert job.events(CaughtUp, "asia")[-1].donor == other
    job.wait_for_merge(dead["island"], dead["incarnation"] + 1)

    number += 1
    handing_over = plug(plugged.act(job.seed, plugged.HAND_OVER))
    job.command(commands.Kill("asia"))
    still = job.island(donor_of(job, "asia", number))
    os.kill(still["pid"], signal.SIGSTOP)
    handing_over.unlink()
    try:
        job.wait_for_merge("asia", number)
    finally:
        os.kill(still["pid"], signal.SIGCONT)
    caught_up = job.events(CaughtUp, "asia")[-1]
    assert caught_up.donor not in (still["island"], None)
    failed = [event for event in job.events(CatchUpFailure, "asia") if event.incarnation == number]
    assert failed == [], "it is asked to go on with another donor before its call to this one times out"

    assert_nobody_gave_before_it_had_a_state(job)


def test_when_all_islands_die_at_once_the_new_ones_go_on_from_what_was_merged(job: Job) -> None:
    """Fresh processes that agree among themselves must not win over state: in other systems they wiped whole runs."""
    job.wait_until(lambda: min(f["version"] for f in job.status()["view"]["fragments"]) >= 3, "some merges")
    before = [fragment["version"] for fragment in job.last["view"]["fragments"]]
    islands = [job.island(group) for group in GROUPS]
    for island in islands:
        os.kill(island["pid"], signal.SIGKILL)
    for island in islands:
        job.wait_for_merge(island["island"], island["incarnation"] + 1)
    first = min((job.events(CaughtUp, group)[-1] for group in GROUPS), key=lambda e: e.at)
    assert first.donor is None
    assert all(now >= then for now, then in zip(first.versions, before, strict=True))
    merges = [record.event for record in job.records() if isinstance(record.event, events.MergeCompleted)]
    for fragment, version in enumerate(before):
        merged = [e.version for e in merges if e.fragment == fragment and e.version > version]
        assert merged == list(range(version + 1, version + 1 + len(merged)))
    assert_nobody_gave_before_it_had_a_state(job)
