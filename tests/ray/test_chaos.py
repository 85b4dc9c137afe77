"""Chaos on a real cluster: processes stopped, links cut, slowed or spoilt, and all of it ends by itself or when told to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from orchestrator.core import commands, events
from orchestrator.core.vocabulary import RefusalReason
from orchestrator.errors import AtollError
from orchestrator.tape.storage import read_tape
from tests.ray.jobs import GAP_MAX_S, Job, gone, synthetic

pytestmark = pytest.mark.ray
Start = Callable[[dict[str, Any]], Job]
PAYLOAD_BYTES = 100_000
"""Of a synthetic job's fragment: 100,000 parameters in four."""


def test_a_stopped_island_goes_on_by_itself_or_when_told_to_and_the_tape_says_who_did_it(start: Start) -> None:
    job = start(synthetic(steps=200_000, groups=("us-east", "asia")))
    job.wait_for_state("us-east", "training")
    before = job.wait_for_merge("asia", 1)
    at = job.status()["at"]

    strike(job, "stop", "first", duration=4.0)
    job.wait_for_state("asia", "suspect")
    assert job.wait_for_state("asia", "training")["pid"] == before["pid"]

    strike(job, "stop", "second", duration=100.0)
    job.wait_for_state("asia", "suspect")
    strike(job, "continue", "third")
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


def test_an_island_that_is_cut_off_trains_on_unheard_and_gives_its_work_when_it_is_heard_again(start: Start) -> None:
    job = start(synthetic(steps=200_000, groups=("us-east", "asia")))
    job.wait_for_state("us-east", "training")
    before = job.wait_for_merge("asia", 1)

    strike(job, "cut", "short", duration=5.0)
    job.wait_for_state("asia", "suspect")
    back = job.wait_for_state("asia", "training")
    assert (back["pid"], back["incarnation"]) == (before["pid"], 1)
    (cut,) = job.events(events.FaultInjected, "asia")
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
    assert job.gap_max_s("asia", cut.at) <= GAP_MAX_S

    strike(job, "cut", "long", duration=100.0)
    job.wait_for_state("asia", "suspect")
    strike(job, "continue", "over")
    job.wait_for_state("asia", "training")


def test_payloads_that_are_spoilt_are_refused_and_lost_ones_missed_while_nobody_waits(start: Start) -> None:
    job = start(synthetic(steps=200_000, groups=("us-east", "asia")))
    job.wait_for_state("us-east", "training")
    job.wait_for_merge("asia", 1)

    strike(job, "corrupt", "flipped", payloads=2)
    unusable = job.wait_until(lambda: len(found := refusals(job)) >= 2 and found, "two payloads refused")
    assert [one.reason for one in unusable] == [RefusalReason.CORRUPT] * 2
    assert "checksum" in unusable[0].detail
    assert job.status()["statistics"]["refusals"]["corrupt"] == 2

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
    assert job.gap_max_s("asia", slow_at) <= GAP_MAX_S
    assert job.gap_max_s("us-east", slow_at) <= GAP_MAX_S
    assert job.island("asia")["incarnation"] == 1


def test_the_synchroniser_is_killed_once_the_tape_says_so_and_comes_back(start: Start) -> None:
    job = start(synthetic(steps=200_000, groups=("us-east",)))
    job.wait_for_merge("us-east", 1)
    pid = job.pid_of_synchroniser()
    with suppress(AtollError):  # its answer may not get out in time; the tape says what it did
        job.port.submit(job.id, "last", "tester", commands.Inject("kill_synchroniser", None))
    job.wait_until(lambda: gone(pid), "the synchroniser's end")
    told = [r.event for r in read_tape(job.run_dir / "tape.jsonl").records if isinstance(r.event, events.FaultInjected)]
    assert [(one.kind, one.island, one.caller) for one in told] == [("kill_synchroniser", "", "tester")]
    job.wait_until(job.restarts, "the next synchroniser")
    job.wait_until(job.answers, "its answer")
    assert job.status()["commands"]["last"]["accepted"], "remembered, and not done again"
    job.wait_until(lambda: job.island("us-east")["last_merge_at"] > job.restarts()[0].at, "a merge after that")
    assert len(job.restarts()) == 1


def test_an_island_without_a_process_cannot_be_struck(start: Start) -> None:
    job = start(synthetic(steps=200_000, groups=("us-east", "asia")))
    stays = job.wait_for_merge("asia", 1)
    job.command(commands.Kill("asia", restart=False))
    job.wait_for_state("asia", "stopped")
    for kind, dose in (
        ("cut", {"duration": 5.0}),
        ("corrupt", {"payloads": 1}),
        ("stop", {"duration": 5.0}),
        ("kill_node", {}),
    ):
        strike(job, kind, kind, **dose)
        noted = job.status()["commands"][kind]
        assert (noted["accepted"], noted["detail"][:8]) == (False, "asia has"), noted
    assert job.events(events.FaultInjected, "asia") == []
    assert gone(stays["pid"])


# ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def strike(job: Job, kind: str, name: str, **dose: Any) -> None:
    job.port.submit(job.id, name, "tester", commands.Inject(kind, "asia", **dose))


def struck_at(job: Job, kind: str, **dose: Any) -> float:
    """Strike, and when that was, by the tape."""
    strike(job, kind, kind, **dose)
    return job.wait_until(lambda: [f.at for f in job.events(events.FaultInjected, "asia") if f.kind == kind], kind)[0]


def contributions(job: Job) -> list[events.ContributionArrived]:
    """Asia's, in the order they came."""
    records = read_tape(job.run_dir / "tape.jsonl").records
    found = [r.event for r in records if isinstance(r.event, events.ContributionArrived)]
    return [event for event in found if event.contribution.island == "asia"]


def refusals(job: Job) -> list[events.ContributionUnusable]:
    records = read_tape(job.run_dir / "tape.jsonl").records
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
