"""Another job beside one that trains: neither disturbs the other, but that both want the same room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from orchestrator.core import commands, events
from tests.ray.jobs import ENDLESS, GROUPS, Job, synthetic

pytestmark = pytest.mark.ray
Start = Callable[[dict[str, Any]], Job]


@pytest.mark.soak("a job more; test_whole_loss.py has two beside each other")
def test_two_jobs_at_once_do_not_disturb_each_other(job: Job, start: Start) -> None:
    before = {group: job.island(group) for group in GROUPS}
    stormy = start(synthetic(steps=ENDLESS, groups=("us-east", "asia")))
    stormy.wait_for_state("asia", "training")
    stormy.command(commands.Kill("asia"))
    stormy.wait_for_merge("asia", 2)
    stormy.command(commands.Cancel())
    assert stormy.wait_for_end()["view"]["outcome"] == "cancelled"
    at = job.status()["at"]
    job.wait_until(lambda: all(job.island(group)["last_merge_at"] > at for group in GROUPS), "merges with everyone")
    for group in GROUPS:
        now = job.island(group)
        assert (now["pid"], now["restarts"]) == (before[group]["pid"], before[group]["restarts"])


def test_an_island_without_room_waits_with_a_reason_and_comes_when_there_is_room(job: Job, start: Start) -> None:
    holder = job.island("asia")
    second = start(synthetic(steps=ENDLESS) | {"islands": [{"node_group": "asia", "cpus": 4}]})
    delay = second.wait_until(lambda: second.events(events.PlacementDelayed, "asia"), "a refusal")[0]
    assert "asked for 4 CPU" in delay.reason
    assert "3 of 4 CPU free" in delay.reason
    assert second.island("asia")["state"] == "waiting"
    job.command(commands.Kill("asia", restart=False))
    second.wait_for_merge("asia", 1)
    told = second.command(commands.Set(sync_interval_steps=32))
    assert second.answer(told)["accepted"] is True
    second.wait_until(lambda: _offers_every_32_steps(second), "offers every 32 steps instead of 16")
    second.command(commands.Finish())
    ended = second.wait_for_end()["view"]
    assert (ended["outcome"], ended["reason"].split(",")[0]) == ("completed", "finished early by test")
    assert second.events(events.PlacementFailed, "asia") == []
    job.command(commands.Readd("asia"))
    job.wait_for_merge("asia", holder["incarnation"] + 1)


def _offers_every_32_steps(job: Job) -> bool:
    """Whether the latest offers of the four fragments were made where they are due by the new interval."""
    arrived = [r.event for r in job.records() if isinstance(r.event, events.ContributionArrived)]
    latest = {event.contribution.fragment: event.contribution.step for event in arrived}
    return len(latest) == 4 and all((step - 8 * fragment) % 32 == 0 for fragment, step in latest.items())
