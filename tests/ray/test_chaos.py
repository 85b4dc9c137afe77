"""Chaos' own signals on a real cluster: an island is stopped by its node's warden and goes on, by itself or when told to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.core import events
from tests.ray.jobs import GAP_MAX_S, Job, synthetic

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


def test_a_stopped_island_goes_on_by_itself_or_when_told_to_and_the_tape_says_who_did_it(
    start: Callable[[dict[str, Any]], Job],
) -> None:
    job = start(synthetic(steps=200_000, groups=("us-east", "asia")))
    job.wait_for_state("us-east", "training")
    before = job.wait_for_merge("asia", 1)
    at = job.status()["at"]

    job.port.inject_fault(job.id, "stop", "first", "tester", "asia", 4.0)
    job.wait_for_state("asia", "suspect")
    assert job.wait_for_state("asia", "training")["pid"] == before["pid"]

    job.port.inject_fault(job.id, "stop", "second", "tester", "asia", 100.0)
    job.wait_for_state("asia", "suspect")
    job.port.inject_fault(job.id, "continue", "third", "tester", "asia", 0.0)
    assert job.wait_for_state("asia", "training")["pid"] == before["pid"]

    told = [
        (fault.command, fault.kind, fault.caller, fault.duration) for fault in job.events(events.FaultInjected, "asia")
    ]
    assert told == [
        ("first", "stop", "tester", 4.0),
        ("second", "stop", "tester", 100.0),
        ("third", "continue", "tester", 0.0),
    ]
    assert [job.status()["commands"][name]["accepted"] for name in ("first", "second", "third")] == [True] * 3
    assert job.gap_max_s("us-east", at) <= GAP_MAX_S
    assert job.gap_max_s("asia", at) >= 3.5  # it really stood still
    assert job.status()["statistics"]["bystander_gap_max_s"] < 3.5  # and nobody is blamed for it
