"""States handed from process to process: a donor that goes away is replaced, and nobody gives work before it has a state."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest

from orchestrator.core import commands, effects, events
from orchestrator.tape.storage import read_tape
from tests.ray.jobs import GAP_MAX_S, Job, synthetic

pytestmark = pytest.mark.ray
GROUPS = ("us-east", "asia", "europe")
ENDLESS = 100_000


def donor_of(job: Job, island: str, incarnation: int) -> str:
    """Whom the island takes a state from at present."""
    told = str(job.wait_for_state(island, "catching_up", incarnation=incarnation)["reason"])
    assert told.startswith("taking a state from "), told
    return told.split()[4]


def pieces(job: Job, island: str, incarnation: int) -> dict[int, str]:
    """Who gave each fragment, by the log of who took them; no fragment was given twice."""
    log = job.run_dir / "logs" / "islands" / f"{island}-{incarnation}.log"
    told = re.findall(r"fragment (\d+) from (\S+), of its step", log.read_text() if log.exists() else "")
    assert len({fragment for fragment, _ in told}) == len(told), told
    return {int(fragment): donor for fragment, donor in told}


def assert_nobody_gave_before_it_had_a_state(job: Job) -> None:
    holding: set[tuple[str, int]] = set()
    for record in read_tape(job.run_dir / "tape.jsonl").records:
        if isinstance(record.event, events.IslandCaughtUp):
            holding.add((record.event.island, record.event.incarnation))
        for effect in record.effects:
            if isinstance(effect, effects.AdmitContribution):
                assert (effect.contribution.island, effect.contribution.incarnation) in holding, record


def test_a_donor_that_dies_or_stands_still_in_the_act_is_replaced_by_another(start: Callable[..., Job]) -> None:
    job = start(synthetic(steps=ENDLESS, groups=GROUPS), trainer="tests.ray.slow_donor:create")
    for group in GROUPS:
        job.wait_for_merge(group, 1)

    job.command(commands.Kill("asia"))
    dead = donor_of(job, "asia", 2)
    os.kill(job.island(dead)["pid"], signal.SIGKILL)
    assert job.wait_for_merge("asia", 2)["incarnation"] == 2
    (other,) = set(GROUPS) - {"asia", dead}
    assert job.events(events.IslandCaughtUp, "asia")[-1].donor == other
    job.wait_for_merge(dead, 2)

    job.command(commands.Kill("asia"))
    still = donor_of(job, "asia", 3)
    pid = job.island(still)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        stopped_at = job.status()["at"]
        job.wait_for_merge("asia", 3)
    finally:
        os.kill(pid, signal.SIGCONT)
    caught_up = job.events(events.IslandCaughtUp, "asia")[-1]
    assert caught_up.donor not in (still, None)
    failed = [event for event in job.events(events.CatchUpFailed, "asia") if event.incarnation == 3]
    assert failed == [], "it is asked to go on with another donor before its call to this one times out"

    assert job.gap_max_s(caught_up.donor, stopped_at) <= GAP_MAX_S  # handing over costs it nothing
    assert_nobody_gave_before_it_had_a_state(job)


def test_of_several_donors_one_dies_and_what_it_gave_is_not_asked_for_again(start: Callable[..., Job]) -> None:
    job = start(
        synthetic(steps=ENDLESS, groups=GROUPS, recovery={"donors_max": 2}), trainer="tests.ray.slow_donor:create"
    )
    for group in GROUPS:
        job.wait_for_merge(group, 1)
    job.command(commands.Kill("asia"))
    told = str(job.wait_for_state("asia", "catching_up", incarnation=2)["reason"])
    assert "us-east (step " in told
    assert " and " in told
    assert "europe (step " in told

    job.wait_until(lambda: "europe" in pieces(job, "asia", 2).values(), "a piece of europe's")
    os.kill(job.island("europe")["pid"], signal.SIGKILL)
    job.wait_for_merge("asia", 2)
    caught_up = next(e for e in job.events(events.IslandCaughtUp, "asia") if e.incarnation == 2)
    assert caught_up.donor is not None
    assert set(caught_up.sources) == {"us-east", "europe"}
    assert tuple(donor for _, donor in sorted(pieces(job, "asia", 2).items())) == caught_up.sources
    assert_nobody_gave_before_it_had_a_state(job)


def test_when_all_islands_die_at_once_the_new_ones_go_on_from_what_was_merged(start: Callable[..., Job]) -> None:
    """Fresh processes that agree among themselves must not win over state: in other systems they wiped whole runs."""
    job = start(synthetic(steps=ENDLESS, groups=("us-east", "asia")))
    for group in ("us-east", "asia"):
        job.wait_for_merge(group, 1)
    job.wait_until(lambda: min(f["version"] for f in job.status()["view"]["fragments"]) >= 3, "some merges")
    before = [fragment["version"] for fragment in job.status()["view"]["fragments"]]
    for group in ("us-east", "asia"):
        os.kill(job.island(group)["pid"], signal.SIGKILL)
    for group in ("us-east", "asia"):
        job.wait_for_merge(group, 2)
    first = min((job.events(events.IslandCaughtUp, group)[-1] for group in ("us-east", "asia")), key=lambda e: e.at)
    assert first.donor is None
    assert all(now >= then for now, then in zip(first.versions, before, strict=True))
    told = [record.event for record in read_tape(job.run_dir / "tape.jsonl").records]
    for fragment in range(len(before)):
        merged = [e.version for e in told if isinstance(e, events.MergeCompleted) and e.fragment == fragment]
        assert merged == list(range(1, len(merged) + 1))
    assert_nobody_gave_before_it_had_a_state(job)
