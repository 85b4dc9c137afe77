"""Where Θ is measured: on an island, on a node group, or on the head for want of one; and what its death changes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.core import commands, events
from orchestrator.core.effects import Evaluate
from orchestrator.core.messages import Ready
from orchestrator.runtime.settings import NODE_MARKER
from tests.ray.jobs import BRIEF_S, ENDLESS, GROUPS, PLUGGED, Job, assert_sound, pids_of, synthetic

pytestmark = pytest.mark.ray
Start = Callable[..., Job]
SEED = 20_261
ATTEMPTS = 5


@pytest.fixture
def unmeasured(plug: Callable[[Path], Path]) -> Path:
    """While it is there, the process that is to measure waits."""
    from tests.ray import plugged  # here, because it imports Ray

    return plug(plugged.act(SEED, plugged.MEASURE))


def document(steps: int = ENDLESS, **evaluation: Any) -> dict[str, Any]:
    return synthetic(steps=steps, evaluation={"every_merges": 4, **evaluation}) | {"seed": SEED}


def orders(job: Job) -> list[Evaluate]:
    return [effect for record in job.records() for effect in record.effects if isinstance(effect, Evaluate)]


def results(job: Job) -> list[events.EvaluationCompleted | events.EvaluationFailed]:
    kinds = (events.EvaluationCompleted, events.EvaluationFailed)
    return [record.event for record in job.records() if isinstance(record.event, kinds)]


def test_an_island_measures_between_two_steps_and_another_does_when_it_dies(start: Start, unmeasured: Path) -> None:
    for _ in range(ATTEMPTS):
        job = start(document(steps=400, on="islands", time_ratio_max=1.0), trainer=PLUGGED)
        first = second = job.wait_until(lambda: orders(job), "an order")[0]  # noqa: B023
        if first.island is not None:
            os.kill(job.island(first.island)["pid"], signal.SIGKILL)
            second = job.wait_until(lambda: orders(job)[1:], "another order", BRIEF_S)[0]  # noqa: B023
        if second.island is not None:
            break
        unmeasured.unlink()  # a machine that stood still made all islands silent, and the head is asked then
        job.command(commands.Cancel())
        job.wait_for_end()
        unmeasured.touch()
    assert second.island is not None
    assert (second.island, second.incarnation) != (first.island, first.incarnation)
    unmeasured.unlink()
    status = job.wait_for_end()
    assert_sound(job)
    measured = results(job)
    assert all(isinstance(event, events.EvaluationCompleted) for event in measured), measured
    assert all(event.place == (event.island or "the head") for event in measured)
    assert measured[0].island == second.island
    assert status["goodput"]["badput_seconds"]["evaluating"] > 0.0
    assert status["statistics"]["evaluations"]["count"] == len(status["loss_curve"]) == len(measured)
    assert measured[-1].sequence_count == 128  # the last word is about all of them
    assert status["statistics"]["loss_final"] < measured[0].loss


@pytest.mark.soak("a job of its own for an evaluator's death")
def test_an_evaluator_on_a_node_group_that_is_killed_is_made_again_and_nothing_is_missed(
    start: Start, home: Path, unmeasured: Path
) -> None:
    there = pids_of("Evaluator", home)
    job = start(document(on="node_group", node_group="asia"), trainer=PLUGGED)

    def on_asia() -> list[int]:
        new = pids_of("Evaluator", home) - there
        return [pid for pid in new if "asia" in psutil.Process(pid).environ()[NODE_MARKER]]

    (pid,) = job.wait_until(lambda: orders(job) and on_asia(), "an evaluator on asia")
    os.kill(pid, signal.SIGKILL)
    job.wait_until(lambda: [other for other in on_asia() if other != pid], "another evaluator on asia")
    unmeasured.unlink()
    first = job.wait_until(lambda: results(job), "a loss")[0]
    assert (first.global_version, first.place, first.remark) == (orders(job)[0].global_version, "node group asia", "")


@pytest.mark.soak("a job of its own for a priority")
def test_an_evaluator_on_the_head_gives_way_to_others_once_the_job_has_begun_and_not_before(
    start: Start, home: Path, unmeasured: Path, plug: Callable[[Path], Path]
) -> None:
    from tests.ray import plugged  # here, because it imports Ray

    there, beginning = pids_of("Evaluator", home), plug(plugged.act(SEED, plugged.BEGIN))
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    job = start(document(), trainer=PLUGGED)
    pid = job.wait_until(lambda: min(pids_of("Evaluator", home) - there, default=None), "an evaluator")
    job.wait_until(lambda: all(job.events(Ready, group) for group in GROUPS), "islands without a state")
    assert nicenesses(pid) == {usual}
    beginning.unlink()
    job.wait_until(lambda: orders(job), "an order")
    job.wait_until(lambda: max(nicenesses(pid)) > usual, "an evaluator that gives way")


def nicenesses(pid: int) -> set[int]:
    """Of the process' threads."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            found.add(os.getpriority(os.PRIO_PROCESS, int(task.name)))
    return found


def test_an_evaluator_stays_for_four_times_its_start() -> None:
    from orchestrator.runtime.evaluation import IDLE_MIN_S, IdleLimit  # here, because it imports Ray

    limit = IdleLimit()
    assert not limit.is_over(1_000.0)
    limit.started(1_000.0)
    assert not limit.is_over(2_000.0), "it has not answered yet"
    assert limit.used(1_020.0) == 80.0
    assert limit.used(1_050.0) == 80.0, "later answers cost no start"
    assert not limit.is_over(1_129.0)
    assert limit.is_over(1_130.0)
    limit.started(1_200.0)
    assert limit.used(1_200.5) == IDLE_MIN_S


@pytest.mark.soak("a job that waits until its evaluator is idle")
def test_an_evaluator_that_measures_nothing_ends_and_the_last_loss_is_measured_by_another(
    start: Start, home: Path
) -> None:
    there = pids_of("Evaluator", home)
    job = start(synthetic(steps=2000, groups=("asia",), evaluation={"every_merges": 0}))
    job.wait_until(lambda: pids_of("Evaluator", home) - there, "an evaluator")
    job.wait_until(lambda: not pids_of("Evaluator", home) - there, "the end of an idle evaluator")
    assert job.status()["view"]["phase"] == "running"
    assert len(results(job)) == 1, "the beginning was measured, and now only the end is"
    job.wait_for_end()
    _, last = results(job)
    assert isinstance(last, events.EvaluationCompleted), last
    assert (last.place, last.sequence_count) == ("the head", 128)
    assert [path.name for path in (job.run_dir / "logs").glob("evaluator*")] == ["evaluator-1.log"]


@pytest.mark.soak("a job of its own for an evaluation elsewhere")
def test_a_node_group_without_nodes_is_made_up_for_by_the_head_and_each_loss_says_why(start: Start) -> None:
    job = start(document(on="node_group", node_group="mars"))
    first = job.wait_until(lambda: results(job), "a loss")[0]
    assert first.place == "the head"
    assert "no node belongs to the node group 'mars'" in first.remark
    assert "change evaluation.node_group" in first.remark
    job.wait_until(
        lambda: job.status()["statistics"]["evaluations"]["remark"] == first.remark, "the remark in the status"
    )
