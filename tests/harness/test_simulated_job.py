"""The simulated job holds what control ports build on: looked at often or once, it is the same job."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.commands import Command, Inject, Kill
from orchestrator.core.vocabulary import CommandId, IslandId
from orchestrator.host.state_view import core_status
from orchestrator.specification.config import parse_job
from orchestrator.tape.schema import Record
from tests.harness.simulated_job import STEP_S, SimulatedJob, Taken

ASIA = IslandId("asia")


def job(until: float, *commands: tuple[float, Command]) -> SimulatedJob:
    document: dict[str, Any] = {
        "trainer": "learners.synthetic:create",
        "islands": [{"node_group": name} for name in ("us-east", "us-west", "europe", "asia")],
        "synchroniser": {"fragments": 4, "interval_steps": 8},
        "budget": {"steps": 20_000},
    }
    taken = [Taken(at, CommandId(f"c{at}"), "tester", request) for at, request in commands]
    return SimulatedJob(parse_job(document), taken, until)


def steps(job: SimulatedJob, island: str) -> int:
    return next(view.steps_total for view in core_status(job.core.state, job.now).islands if view.island == island)


def before(records: list[Record], at: float) -> list[Record]:
    return [record for record in records if record.event.at < at]


def test_a_job_that_was_looked_at_on_the_way_is_the_one_that_is_worked_out_at_once() -> None:
    looked_at = job(1.0)
    for until in (1.7, 3.0):
        looked_at.resume(until)
    assert looked_at.sink.records == job(3.0).sink.records


def test_a_command_changes_nothing_that_was_before_it() -> None:
    undisturbed, disturbed = job(3.0).sink.records, job(3.0, (2.0, Kill(ASIA))).sink.records
    assert before(undisturbed, 2.0) == before(disturbed, 2.0)
    assert undisturbed != disturbed


@pytest.mark.parametrize("ended_by", [(), ((3.0, Inject("continue", ASIA)),)], ids=["its time", "a command"])
def test_a_stopped_island_steps_on_when_its_time_is_over_or_it_is_told_to(ended_by: Any) -> None:
    """It answers meanwhile, so nobody misses it; the others train."""
    stopped = job(4.0, (2.0, Inject("stop", ASIA, duration=100.0 if ended_by else 1.0)), *ended_by)
    assert steps(stopped, "europe") - steps(stopped, ASIA) == pytest.approx(1.0 / STEP_S, abs=2)
    assert all(view.incarnation == 1 for view in core_status(stopped.core.state, 4.0).islands)


def test_the_next_process_of_an_island_that_was_stopped_steps() -> None:
    killed = job(4.0, (2.0, Inject("stop", ASIA, duration=100.0)), (2.5, Kill(ASIA)))
    (asia,) = (view for view in core_status(killed.core.state, 4.0).islands if view.island == ASIA)
    assert asia.incarnation == 2
    assert steps(killed, ASIA) > steps(job(2.5), ASIA)
