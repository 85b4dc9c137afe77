"""A region is cut off for real: packets vanish, nobody is told. Its island trains on, and comes back, or is fenced.

What the island did is read from its own diary, what was made of it from the tape. ``ATOLL_CUT_S`` makes the first cut longer
(``make soak``: ten minutes).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from orchestrator.core.messages import Adopted, Progress
from tests.ray.jobs import STEP_S, STEPS_ON, assert_sound, gone
from tests.wan.archipelago import Archipelago, WideJob
from tests.wan.conftest import ASIA, EAST

CUT_S = float(os.environ.get("ATOLL_CUT_S", "10"))
pytestmark = [pytest.mark.ray, pytest.mark.timeout(round(CUT_S) + 900)]
Submit = Callable[..., WideJob]
STEPS_OF_CUT = CUT_S / STEP_S / 2
"""Half of what an undisturbed island takes during the cut: it lasts until they are taken. Whoever waited would take none."""
UNTOLD_STEPS_MAX = 2.0 / STEP_S
"""Taken since an island's last report."""


@pytest.mark.soak(
    "by packets, what shared_job/test_chaos.py has by the command for a cut; the next test cuts for real, too"
)
def test_a_region_that_is_cut_off_trains_on_and_contributes_again_with_the_right_counters(
    archipelago: Archipelago, submit: Submit
) -> None:
    job = submit()
    job.wait_for_merge(EAST, 1)
    pid = job.wait_for_merge(ASIA, 1)["pid"]
    region = archipelago.region_of(pid)

    archipelago.regions.cut(region)
    cut_at = time.monotonic()
    job.wait_until(lambda: job.island(ASIA)["state"] == "suspect", "suspicion")  # for its silence, or for its node's
    job.wait_until(lambda: "cannot be reached" in job.island(ASIA)["reason"], "the reason that an operator needs")
    time.sleep(max(0.0, cut_at + CUT_S - time.monotonic()))
    job.wait_until(lambda: job.diary(pid).count(cut_at) >= STEPS_OF_CUT, "steps of an island that nobody hears")
    at = job.status()["at"]
    archipelago.regions.heal(region)
    healed_at = time.monotonic()
    job.wait_until(lambda: ASIA in job.contributors_since(at), "a contribution of asia")
    job.wait_until(lambda: job.island(ASIA)["last_merge_at"] > at, "a merge with asia")
    print(f"contributed {time.monotonic() - healed_at:.1f} s after a cut of {healed_at - cut_at:.0f} s")

    assert (job.island(ASIA)["incarnation"], job.island(ASIA)["pid"]) == (1, pid)
    steps_by_now = len(job.diary(pid).ends)
    job.wait_until(lambda: job.events(Progress, ASIA)[-1].steps_total >= steps_by_now, "a report of them")
    job.cancel()
    job.wait_for_end()
    assert_sound(job)
    assert steps_by_now <= job.events(Progress, ASIA)[-1].steps_total <= len(job.diary(pid).ends)
    assert job.last["goodput"]["islands"][ASIA]["tokens"]["trained"] == tokens_told(job, 1)


def test_an_island_replaced_behind_a_cut_is_fenced_when_it_is_back_and_all_it_trained_is_counted(
    archipelago: Archipelago, submit: Submit
) -> None:
    job = submit(recovery={"cut_off_timeout_s": 2.0})
    job.wait_for_merge(EAST, 1)
    old = job.wait_for_merge(ASIA, 1)["pid"]
    region = archipelago.region_of(old)

    archipelago.regions.cut(region)
    cut_at = time.monotonic()
    new = job.wait_for_merge(ASIA, 2)["pid"]
    assert archipelago.region_of(new) == ({"asia-0", "asia-1"} - {region}).pop()
    assert not gone(old)
    job.wait_until(lambda: job.diary(old).count(cut_at) >= STEPS_ON, "steps of an island that was replaced")
    at = job.status()["at"]
    archipelago.regions.heal(region)
    healed_at = time.monotonic()
    job.wait_until(lambda: gone(old), "the end of the one that was replaced")
    diary = job.diary(old)
    assert job.island(ASIA)["pid"] == new
    print(f"fenced {diary.ends[-1] - healed_at:.1f} s after healing")

    job.cancel()
    job.wait_for_end()
    assert_sound(job)
    reports = job.events(Progress, ASIA)
    last_words = [e for e in reports if e.incarnation == 1 and e.at > at][-1]
    assert diary.count(0.0, healed_at) - UNTOLD_STEPS_MAX <= last_words.steps_total <= len(diary.ends)
    unmerged = last_words.tokens_total - [e for e in reports if e.incarnation == 1 and e.at < at][-1].tokens_total
    goodput = job.last["goodput"]
    assert goodput["islands"][ASIA]["tokens"]["trained"] == tokens_told(job, 1) + tokens_told(job, 2)
    assert goodput["discarded_tokens"]["lost with the island"] >= unmerged > 0
    assert {c.incarnation for c in job.contributions_since(at) if c.island == ASIA} == {2}


def tokens_told(job: WideJob, incarnation: int) -> int:
    """The most that this incarnation of asia said it had trained: an adoption may say it after the last progress."""
    told = job.events(Progress, ASIA) + job.events(Adopted, ASIA)
    return max(each.tokens_total for each in told if each.incarnation == incarnation)
