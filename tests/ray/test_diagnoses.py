"""Faults inflicted on a real job, one each: its diagnosis names the fault, and records that show it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from orchestrator.accounting.causes import Cause, Finding
from orchestrator.core import commands
from orchestrator.core.events import ConnectionLost, ContributionArrived, ContributionUnusable, IslandReported
from orchestrator.tape.schema import Record
from tests.ray.jobs import ENDLESS, Job, diagnosis_of, synthetic

pytestmark = [pytest.mark.ray, pytest.mark.soak("half a minute each")]
GROUPS = ("us-east", "asia", "europe")
KILLS, STOPPED_S, SLOW_BYTES_PER_S = 3, 12.0, 4000.0


def kill_again_and_again(job: Job) -> None:
    for number in range(KILLS):
        job.wait_for_merge("asia", number + 1)
        os.kill(job.island("asia")["pid"], signal.SIGKILL)
        job.wait_for_state("asia", "training", incarnation=number + 2)


def stop_for_long(job: Job) -> None:
    pid = job.wait_for_merge("asia", 1)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(STOPPED_S)
    finally:
        os.kill(pid, signal.SIGCONT)


def thin_its_line(job: Job) -> None:
    job.wait_for_merge("asia", 1)
    job.command(commands.Inject("slow", "asia", duration=600.0, bytes_per_second=SLOW_BYTES_PER_S))


def wait(job: Job) -> None:
    """Its trainer does the rest."""
    job.wait_for_merge("us-east", 1)


@pytest.mark.parametrize(
    ("trainer", "strike", "causes"),
    [
        (None, kill_again_and_again, {Cause.FAILURES}),
        (None, stop_for_long, {Cause.HUNG_STEP}),
        (None, thin_its_line, {Cause.THIN_LINE, Cause.NOT_ARRIVING}),
        ("tests.ray.broken:fails_alone", wait, {Cause.CODE}),
        ("tests.ray.sick:create", wait, {Cause.UNUSABLE_WORK}),
    ],
    ids=["killed", "stopped", "thin line", "own code", "sick"],
)
def test_a_fault_on_a_real_job_is_named_with_records_that_show_it(
    start: Callable[..., Job], trainer: str | None, strike: Callable[[Job], None], causes: set[Cause]
) -> None:
    job = start(synthetic(ENDLESS, GROUPS, recovery={"restarts_max": 100, "backoff_max_s": 1.0}), trainer=trainer)
    strike(job)

    def named() -> Finding | None:
        cause = diagnosis_of(job).cause
        return cause if cause is not None and cause.cause in causes else None

    cause: Finding = job.wait_until(named, f"a diagnosis of {causes}", pause_s=1.0)
    assert cause.subject == "asia", cause
    records = {record.n: record for record in job.records()}
    assert cause.records
    assert all(_is_of_asia(records[number]) for number in cause.records), [records[n] for n in cause.records]


def _is_of_asia(record: Record) -> bool:
    match record.event:
        case ConnectionLost(island=island) | IslandReported(island=island):
            return bool(island == "asia")
        case ContributionArrived(contribution=contribution) | ContributionUnusable(contribution=contribution):
            return bool(contribution.island == "asia")
        case _:
            return False
