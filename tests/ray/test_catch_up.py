"""A state that several hand over, a fragment each: when one of them dies, what it gave is not asked for again."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest

from orchestrator.core import commands, effects
from orchestrator.core.messages import CaughtUp
from tests.ray.jobs import ENDLESS, Job, assert_nobody_gave_before_it_had_a_state, synthetic

pytestmark = pytest.mark.ray
GROUPS = ("us-east", "asia", "europe")


def pieces(job: Job, island: str, incarnation: int) -> dict[int, str]:
    """Who gave each fragment, by the log of who took them; no fragment was given twice."""
    log = job.run_dir / "logs" / "islands" / f"{island}-{incarnation}.log"
    told = re.findall(r"fragment (\d+) from (\S+), of its step", log.read_text() if log.exists() else "")
    assert len({fragment for fragment, _ in told}) == len(told), told
    return {int(fragment): donor for fragment, donor in told}


def test_of_several_donors_one_dies_and_what_it_gave_is_not_asked_for_again(start: Callable[..., Job]) -> None:
    job = start(
        synthetic(steps=ENDLESS, groups=GROUPS, recovery={"donors_max": 2}),
        trainer="tests.ray.trainers:create_slow_donor",
    )
    for group in GROUPS:
        job.wait_for_merge(group, 1)
    job.command(commands.Kill("asia"))

    def asked() -> list[effects.BeginCatchUp]:
        decided = [x for record in job.records() for x in record.effects if isinstance(x, effects.BeginCatchUp)]
        return [x for x in decided if (x.island, x.incarnation) == ("asia", 2)]

    first = job.wait_until(asked, "a catch-up")[0]
    assert first.donor is not None
    assert {donor for donor, _ in (first.donor, *first.helpers)} == {"us-east", "europe"}
    job.wait_until(lambda: "europe" in pieces(job, "asia", 2).values(), "a piece of europe's")
    os.kill(job.island("europe")["pid"], signal.SIGKILL)
    job.wait_for_merge("asia", 2)
    caught_up = next(e for e in job.events(CaughtUp, "asia") if e.incarnation == 2)
    assert caught_up.donor is not None
    assert set(caught_up.sources) == {"us-east", "europe"}
    assert tuple(donor for _, donor in sorted(pieces(job, "asia", 2).items())) == caught_up.sources
    assert_nobody_gave_before_it_had_a_state(job)
