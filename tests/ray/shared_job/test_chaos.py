"""Chaos on a real cluster: processes stopped, links cut, slowed or spoilt, and all of it ends by itself or when told to."""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import Any

import pytest

from orchestrator.core import commands, events
from orchestrator.core.vocabulary import RefusalReason
from orchestrator.errors import AtollError
from tests.ray.jobs import Job, gap_limit_s, gone

pytestmark = pytest.mark.ray
PAYLOAD_BYTES = 12_900
"""In four bits a value."""
"""Of a synthetic job's fragment: 100,000 parameters in four."""


def test_a_stopped_island_goes_on_by_itself_or_when_told_to_and_the_tape_says_who_did_it(job: Job) -> None:
    before = job.island("asia")
    at, blamed_before = job.last["at"], job.last["statistics"]["bystander_gap_max_s"] or 0.0

    first = strike(job, "stop", duration=4.0)
    job.wait_for_state("asia", "suspect")
    assert job.wait_for_state("asia", "training")["pid"] == before["pid"]

    second = strike(job, "stop", duration=100.0)
    job.wait_for_state("asia", "suspect")
    third = strike(job, "continue")
    assert job.wait_for_state("asia", "training")["pid"] == before["pid"]

    faults = [(fault.command, fault.kind, fault.caller, fault.duration) for fault in faults_since(job, at)]
    assert faults == [
        (first, "stop", "test", 4.0),
        (second, "stop", "test", 100.0),
        (third, "continue", "test", 0.0),
    ]
    assert [job.status()["commands"][name]["accepted"] for name in (first, second, third)] == [True] * 3
    assert job.gap_max_s("asia", at) >= 3.5  # it really stood still
    assert job.gap_max_s("us-east", at) <= gap_limit_s(4.0)
    blamed = job.status()["statistics"]["bystander_gap_max_s"]
    assert blamed < 3.5 or blamed == blamed_before  # and nobody is blamed for it


def test_an_island_that_is_cut_off_trains_on_unheard_and_gives_its_work_when_it_is_heard_again(job: Job) -> None:
    before = job.island("asia")
    at = job.last["at"]

    strike(job, "cut", duration=5.0)
    job.wait_for_state("asia", "suspect")
    back = job.wait_for_state("asia", "training")
    assert (back["pid"], back["incarnation"]) == (before["pid"], before["incarnation"])
    (cut,) = faults_since(job, at)
    healed_at = cut.at + 5.0
    job.wait_until(lambda: job.island("asia")["last_merge_at"] > healed_at, "a merge with asia after its cut")
    reports = job.events(events.ProgressReported, "asia")
    assert [one for one in reports if cut.at + 0.1 < one.at < healed_at] == [], "letters passed the cut"
    at_cut = [one for one in reports if one.at <= cut.at + 0.1][-1]
    soon_after = [one for one in reports if one.at < healed_at + 1.0][-1]
    assert soon_after.steps_total - at_cut.steps_total > 50, "it did not train on"
    assert [e for e in contributions(job) if cut.at + 0.1 < e.at < healed_at] == []
    adopted = [event.at for event in job.events(events.FragmentAdopted, "asia")]
    assert max(adopted) > healed_at
    assert job.gap_max_s("asia", cut.at) <= gap_limit_s(5.0)

    strike(job, "cut", duration=100.0)
    job.wait_for_state("asia", "suspect")
    strike(job, "continue")
    job.wait_for_state("asia", "training")


def test_payloads_that_are_spoilt_are_refused_and_lost_ones_missed_while_nobody_waits(job: Job) -> None:
    before = job.island("asia")
    known, counted = len(refusals(job)), job.last["statistics"]["refusals"].get("corrupt", 0)

    strike(job, "corrupt", payloads=2)
    unusable = job.wait_until(
        lambda: len(every := refusals(job)) >= known + 2 and every[known:], "two payloads refused"
    )
    assert [one.reason for one in unusable] == [RefusalReason.CORRUPT] * 2
    assert "checksum" in unusable[0].detail
    assert job.status()["statistics"]["refusals"]["corrupt"] == counted + 2

    dropped_at = struck_at(job, "drop", payloads=3)
    job.wait_until(lambda: len(since(job, dropped_at)) >= 6, "payloads after those that were lost")
    assert missing_offers(job, dropped_at) == 3

    delayed_at = struck_at(job, "delay", payloads=1, duration=2.0)
    job.wait_until(lambda: len(since(job, delayed_at + 2.0)) >= 2, "payloads after the late one")
    assert longest_silence(job, delayed_at) >= 1.9

    slow_at = struck_at(job, "slow", duration=6.0, bytes_per_second=PAYLOAD_BYTES / 2)
    job.wait_until(lambda: since(job, slow_at + 6.5), "payloads when it is not slow any more")
    slowly = [one for one in since(job, slow_at + 0.5) if one.at < slow_at + 6.0]
    assert 1 <= len(slowly) <= 3, "each takes two seconds"
    for island in ("asia", "us-east"):
        assert job.gap_max_s(island, slow_at) <= gap_limit_s(2.0), "it waited for one of the slow payloads"
    assert job.island("asia")["incarnation"] == before["incarnation"]


def test_the_synchroniser_is_killed_once_the_tape_says_so_and_comes_back(job: Job) -> None:
    pid = job.pid_of_synchroniser()
    at, died_before = job.status()["at"], len(job.restarts())
    command = uuid.uuid4().hex
    with suppress(AtollError):  # its answer may not get out in time; the tape says what it did
        job.port.submit(job.id, command, "test", commands.Inject("kill_synchroniser", None))
    job.wait_until(lambda: gone(pid), "the synchroniser's end")
    assert [(one.kind, one.caller) for one in faults_since(job, at, island="")] == [("kill_synchroniser", "test")]
    job.wait_until(lambda: len(job.restarts()) > died_before, "the next synchroniser")
    job.wait_until(job.answers, "its answer")
    assert job.status()["commands"][command]["accepted"], "remembered, and not done again"
    back = job.restarts()[-1]
    job.wait_until(lambda: (job.island("us-east")["last_merge_at"] or 0.0) > back.at, "a merge after that")
    assert len(job.restarts()) == died_before + 1


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def strike(job: Job, kind: str, **dose: Any) -> str:
    return job.command(commands.Inject(kind, "asia", **dose))


def faults_since(job: Job, at: float, island: str = "asia") -> list[events.FaultInjected]:
    return [fault for fault in job.events(events.FaultInjected, island) if fault.at > at]


def struck_at(job: Job, kind: str, **dose: Any) -> float:
    """Strike, and when that was, by the tape."""
    name = strike(job, kind, **dose)
    return job.wait_until(
        lambda: [fault.at for fault in job.events(events.FaultInjected, "asia") if fault.command == name], kind
    )[0]


def contributions(job: Job) -> list[events.ContributionArrived]:
    """Asia's, in the order they came."""
    records = job.records()
    found = [r.event for r in records if isinstance(r.event, events.ContributionArrived)]
    return [event for event in found if event.contribution.island == "asia"]


def refusals(job: Job) -> list[events.ContributionUnusable]:
    records = job.records()
    return [r.event for r in records if isinstance(r.event, events.ContributionUnusable)]


def since(job: Job, at: float) -> list[events.ContributionArrived]:
    return [event for event in contributions(job) if event.at > at]


def missing_offers(job: Job, at: float) -> int:
    """Of asia's offers around ``at``, how many never came, good or bad. It numbers all it makes."""
    came = sorted(e.contribution.offer for e in [*contributions(job), *refusals(job)] if e.at > at - 2.0)
    return came[-1] - came[0] + 1 - len(came)


def longest_silence(job: Job, at: float) -> float:
    """Between two contributions of asia, from the one before ``at`` on."""
    came = [event.at for event in contributions(job)]
    first = max(index for index, one in enumerate(came) if one <= at)
    return max(after - before for before, after in zip(came[first:], came[first + 1 :], strict=False))
