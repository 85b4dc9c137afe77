"""The watch over an island's loop: it reports a step that does not end, and takes no sleeping machine for one.

An island that nobody listens to ends itself in time, and not while somebody does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

from learners.contract import StepResult
from learners.loop import IslandLoop, LoopPlan
from learners.outbox import Outbox
from learners.step_watch import STEPS_BEFORE_USUAL, StepWatch, Watchdog
from learners.synthetic import SyntheticTrainer
from orchestrator.core.messages import Overdue
from orchestrator.core.vocabulary import StepLimits, Version
from orchestrator.specification.config import parse_job
from tests.waiting import PATIENCE_S, wait_until

LIMITS = StepLimits(limit_s=120.0, ratio=50.0, first_s=1800.0)


def watching(steps: int = STEPS_BEFORE_USUAL) -> StepWatch:
    """One that has seen so many steps, of next to no time."""
    watch = StepWatch(LIMITS, lambda _: None)
    for _ in range(steps):
        with watch.step():
            pass
    return watch


def reports(watch: StepWatch, ticks: int, tick_s: float = 1.0) -> Iterator[Overdue]:
    for number in range(1, ticks + 1):
        if (overdue := watch.tick(number * tick_s)) is not None:
            yield overdue


def test_a_step_is_reported_at_a_quarter_a_half_and_all_of_its_limit_and_again() -> None:
    watch = watching()
    with watch.step():
        said = list(reports(watch, 400))
    assert [round(one.seconds) for one in said] == [30, 60, 120, 240, 360]
    assert all(0.0 < one.usual_seconds < 1.0 for one in said)


def test_first_steps_and_boundaries_have_the_limit_of_what_compiles() -> None:
    fresh = watching(STEPS_BEFORE_USUAL - 1)
    with fresh.step():
        assert [one.usual_seconds for one in reports(fresh, 460)] == [0.0]
    known = watching()
    with known.other_work():
        assert list(reports(known, 440)) == []


def test_steps_that_end_are_never_reported_however_many() -> None:
    watch = watching()
    for second in range(1, 500):
        with watch.step():
            assert watch.tick(float(second)) is None


def test_a_machine_that_sleeps_or_stands_still_hangs_nobody() -> None:
    """150 s pass between two ticks, ten times: each counts as two seconds."""
    watch = watching()
    with watch.step():
        assert list(reports(watch, 10, tick_s=150.0)) == []


def test_a_loop_whose_trainer_never_returns_says_so_itself() -> None:
    spec = parse_job({"islands": [{"node_group": "here"}], "budget": {"steps": 10}})
    released = threading.Event()

    class Deadlocked(SyntheticTrainer):
        def step(self, schedule_step: int) -> StepResult:
            released.wait()
            return super().step(schedule_step)

    trainer = Deadlocked(spec.model_dump(mode="json"), 0)
    outbox, names = Outbox(), tuple(trainer.tensor_shapes())
    plan = LoopPlan((names,), 4, tokens_per_schedule_step=1)
    loop = IslandLoop(trainer, replace(plan, step_limits=StepLimits(0.5, 2.0, 0.5)), outbox)
    loop.load(trainer.initial_parameters(names), [Version(0)], 0, 0)
    loop.start()
    try:
        wait_until(lambda: any(isinstance(report, Overdue) for report in outbox.take(0.1)), "the report")
    finally:
        released.set()
        loop.stop()


PROGRAM = """
import os, sys
from learners.step_watch import Watchdog
Watchdog(1.5, lambda: os._exit(7), tick_s=0.05)
print("on watch", flush=True)
sys.stdin.read()
"""


def test_a_watchdog_that_is_reset_again_and_again_does_not_expire_and_one_that_is_not_does() -> None:
    expired = threading.Event()
    watchdog = Watchdog(1.5, expired.set, tick_s=0.02)
    for _ in range(40):
        assert not expired.wait(0.05)
        watchdog.reset()
    assert expired.wait(PATIENCE_S)


def test_a_process_that_was_stopped_for_long_does_not_take_that_for_silence() -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(process.pid, signal.SIGCONT)
        continued_at = time.monotonic()
        assert process.wait(PATIENCE_S) == 7
        assert time.monotonic() - continued_at >= 0.2
    finally:
        process.kill()
        process.communicate()
