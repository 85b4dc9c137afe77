"""Chaos on a real cluster: processes stopped, links cut, slowed or spoilt, and all of it ends by itself or when told to."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orchestrator.accounting.causes import Cause
from orchestrator.core import commands, events
from orchestrator.core.messages import Adopted, Progress
from orchestrator.core.vocabulary import RefusalReason
from orchestrator.errors import AtollError
from tests.harness.reports import of_kind
from tests.ray.jobs import STEPS_ON, Job, diagnosis_of, gone, pids_of, stop

pytestmark = pytest.mark.ray
PAYLOAD_BYTES = 12_900
"""Of a synthetic job's fragment, 100,000 parameters in four, in four bits a value."""
STOPPED_S = 4.0
HELD_S = 500.0
"""Longer than a test needs: it is ended by ``continue``."""


def test_a_stopped_island_goes_on_by_itself_or_when_told_to_and_the_tape_says_who_did_it(
    job: Job, train_on: Callable[..., None]
) -> None:
    before, bystanders = job.island("asia"), [job.island(group)["pid"] for group in ("us-east", "europe")]
    at = job.last["at"]

    first = inject(job, "stop", duration=STOPPED_S)
    job.wait_until(lambda: standstill(job, at), "a report of how long it stood still")
    assert job.wait_for_state("asia", "training")["pid"] == before["pid"]

    second = inject(job, "stop", duration=HELD_S)
    job.wait_for_state("asia", "suspect")
    train_on(*bystanders)
    assert job.island("asia")["state"] == "suspect"
    third = inject(job, "continue")
    assert job.wait_for_state("asia", "training")["pid"] == before["pid"]

    faults = [(fault.command, fault.kind, fault.caller, fault.duration) for fault in faults_since(job, at)]
    assert faults == [
        (first, "stop", "test", STOPPED_S),
        (second, "stop", "test", HELD_S),
        (third, "continue", "test", 0.0),
    ]
    assert [job.status()["commands"][name]["accepted"] for name in (first, second, third)] == [True] * 3
    stops = [fault.at for fault in faults_since(job, at) if fault.kind == "stop"]
    job.wait_until(lambda: all(standstill(job, one) for one in stops), "a report of each")
    blamed = job.status()["statistics"]["bystander_gap"]
    assert (blamed["island"], blamed["at"]) not in [("asia", standstill(job, one)) for one in stops]

    diagnosis = diagnosis_of(job)
    every = [diagnosis.cause, *diagnosis.others]
    hung = next(one for one in every if one and (one.cause, one.subject) == (Cause.HUNG_STEP, "asia"))
    shown = {record.n: record.event for record in job.records() if record.n in hung.records}
    reports = [event.at for event in of_kind(shown.values(), Progress)]
    assert standstill(job, stops[-1]) in reports, "the report that shows it is among its records"


def test_an_island_that_is_cut_off_trains_on_unheard_and_gives_its_work_when_it_is_heard_again(
    job: Job, train_on: Callable[..., None]
) -> None:
    """The cut lasts until the island has trained, by its own count: by the tape alone nobody could tell what was trained
    when, for the first answer behind a cut may be an old one."""
    before = job.island("asia")

    inject(job, "cut", duration=HELD_S)
    job.wait_for_state("asia", "suspect")
    train_on(before["pid"])
    heard = heard_of(job)
    train_on(before["pid"])
    assert heard_of(job) == heard, "reports passed the cut"
    assert job.island("asia")["state"] == "suspect"
    healed_at = job.last["at"]
    inject(job, "continue")
    job.wait_until(lambda: job.island("asia")["last_merge_at"] > healed_at, "a merge with asia after its cut")
    job.wait_until(lambda: max(adoptions(job)) > healed_at, "an adoption by asia after its cut")
    at_cut, last = heard[0][-1], job.events(Progress, "asia")[-1]
    assert last.steps_total - at_cut.steps_total >= 2 * STEPS_ON

    struck = injected_at(job, "cut", duration=5.0)
    job.wait_until(lambda: since(job, struck + 5.0), "work of asia after a cut that ends by itself")
    back = job.wait_for_state("asia", "training")
    assert (back["pid"], back["incarnation"]) == (before["pid"], before["incarnation"])


def test_payloads_that_are_spoilt_are_refused_and_lost_ones_missed_while_nobody_waits(
    job: Job, train_on: Callable[..., None]
) -> None:
    before = job.island("asia")
    known, counted = len(refusals(job)), job.last["statistics"]["refusals"].get("corrupt", 0)

    inject(job, "corrupt", payloads=2)
    unusable = job.wait_until(
        lambda: len(every := refusals(job)) >= known + 2 and every[known:], "two payloads refused"
    )
    assert [one.reason for one in unusable] == [RefusalReason.CORRUPT] * 2
    assert "checksum" in unusable[0].detail
    assert job.status()["statistics"]["refusals"]["corrupt"] == counted + 2

    dropped_at = injected_at(job, "drop", payloads=3)
    job.wait_until(lambda: len(since(job, dropped_at)) >= 6, "payloads after those that were lost")
    assert missing_offers(job, dropped_at) >= 3  # a busy island replaces offers before anybody asks for them

    delayed_at = injected_at(job, "delay", payloads=1, duration=2.0)
    job.wait_until(lambda: len(since(job, delayed_at + 2.0)) >= 2, "payloads after the late one")
    assert longest_silence(job, delayed_at) >= 1.9

    slow_at = injected_at(job, "slow", duration=HELD_S, bytes_per_second=PAYLOAD_BYTES / 2)
    slowly = job.wait_until(
        lambda: len(came := [at for at in adoptions(job) if at > slow_at]) >= 8 and came, "slow publications"
    )
    assert slowly[-1] - slow_at >= 1.9 * (len(slowly) - 4), "each takes two seconds, but for those that were under way"

    inject(job, "slow", duration=HELD_S, bytes_per_second=PAYLOAD_BYTES / HELD_S)
    both = [job.island(group)["pid"] for group in ("asia", "us-east")]
    train_on(*both)
    came = contributions(job), adoptions(job)
    train_on(*both)
    assert (contributions(job), adoptions(job)) == came, "a payload that takes minutes was there in seconds"
    inject(job, "slow", duration=1.0, bytes_per_second=PAYLOAD_BYTES / HELD_S)
    job.wait_until(lambda: len(contributions(job)) > len(came[0]) + 2, "payloads when it is not slow any more")
    assert job.island("asia")["incarnation"] == before["incarnation"]


def test_a_fault_that_is_answered_late_is_recorded_all_the_same(job: Job, home: Path) -> None:
    agents, at = pids_of("NodeAgent", home), job.status()["at"]
    assert agents
    try:
        for pid in agents:
            stop(pid)
        command = job.command(commands.Inject("stop", "asia", duration=0.1))
        assert job.status()["commands"][command]["accepted"] is None, "nobody can know yet"
        assert faults_since(job, at) == []
    finally:
        for pid in agents:
            os.kill(pid, signal.SIGCONT)
    assert job.answer(command)["accepted"]
    assert [(fault.command, fault.kind) for fault in job.wait_until(lambda: faults_since(job, at), "the record")] == [
        (command, "stop")
    ]


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


def inject(job: Job, kind: str, **numbers: Any) -> str:
    """Strike asia, and wait until that is done, or refused."""
    command = job.command(commands.Inject(kind, "asia", **numbers))
    job.answer(command)
    return command


def faults_since(job: Job, at: float, island: str = "asia") -> list[events.FaultInjected]:
    return [fault for fault in job.events(events.FaultInjected, island) if fault.at > at]


def injected_at(job: Job, kind: str, **numbers: Any) -> float:
    """Strike, and when that was, by the tape."""
    name = inject(job, kind, **numbers)
    return job.wait_until(
        lambda: [fault.at for fault in job.events(events.FaultInjected, "asia") if fault.command == name], kind
    )[0]


def standstill(job: Job, since: float) -> float | None:
    """When asia reported the stop that began at ``since``; None while it has not."""
    reports = job.events(Progress, "asia")
    return next((one.at for one in reports if one.at > since and one.gap_max_seconds >= STOPPED_S * 0.9), None)


def heard_of(job: Job) -> tuple[list[Any], list[events.ContributionArrived], list[float]]:
    """All that the tape has of asia's reports."""
    return job.events(Progress, "asia"), contributions(job), adoptions(job)


def adoptions(job: Job) -> list[float]:
    return [event.at for event in job.events(Adopted, "asia")]


def contributions(job: Job) -> list[events.ContributionArrived]:
    """Asia's whose bytes came, in their order. Those of offers that would be refused are not pulled."""
    records = job.records()
    found = [r.event for r in records if isinstance(r.event, events.ContributionArrived)]
    return [event for event in found if event.contribution.island == "asia" and event.displacement is not None]


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
