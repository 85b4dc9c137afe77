"""The autopilot acts on a job on Ray, whose islands die often: its advice becomes commands on the tape, each of them once.

The service is killed while it looks at the tape, and again as soon as it has stored a change. The job goes on, and ends
whole.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

import psutil
import pytest

from api.client import Client
from api.jobs.autopilot import NICE
from api.schemas import Advice, Look
from orchestrator.core import commands, events
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.simulation.autopilot import AUTOPILOT
from tests.ray.jobs import ENDLESS, Job, assert_sound, gone, synthetic
from tests.ray.reign import Reign
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.soak("some minutes: an autopilot looks at a job several times"),
    pytest.mark.timeout(3600),
]
GROUPS = ("us-east", "europe")
INTERVAL, LEAST = 64, 24
"""An island trains 64 steps, which are 3.2 s, between two merges of a fragment, and may not merge more often than in 24."""
DIES_EVERY_S = 7.0


@contextmanager
def dying(reign: Reign, job: str) -> Iterator[None]:
    """Meanwhile one island's process after the other is killed, each as soon as the one before trains again."""
    enough = Event()

    def go_on() -> None:
        turn = 0
        while not enough.wait(DIES_EVERY_S):
            with suppress(Exception):  # the service may be away, or the process may have ended
                islands = reign.client().islands(job)
                if all(island.state == "training" for island in islands):
                    os.kill(islands[turn % len(islands)].pid or 0, signal.SIGKILL)
                    turn += 1

    thread = Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def changes(job: Job) -> list[tuple[str, commands.Set]]:
    """The autopilot's commands on the tape, with their ids."""
    requested = [record.event for record in job.records() if isinstance(record.event, events.CommandRequested)]
    return [(one.command, one.request) for one in requested if one.caller == AUTOPILOT]  # type: ignore[misc]


def test_an_autopilot_that_may_act_changes_a_job_within_its_bounds_and_nothing_twice(
    reign: Reign, port: RayControlPort
) -> None:
    autopilot = {"kind": "act", "bounds": {"interval_steps": [LEAST, INTERVAL]}, "every_s": 10.0}
    recovery = {"restarts_max": 1000, "backoff_max_s": 0.5}
    steps = {"interval_steps": INTERVAL, "overlap_steps": 4}
    document = synthetic(ENDLESS, GROUPS, recovery=recovery, synchroniser=steps) | {"autopilot": autopilot}
    with reign.client() as client:
        name = client.submit(document).job
    job = Job(port, name, reign.runs / name)
    job.wait_until(lambda: all(one["state"] == "training" for one in job.status()["view"]["islands"]), "they train")

    with dying(reign, name):
        # the service dies while it looks: the process that simulates goes with it
        looking = wait_until(lambda: pid_of_look(reign.serving), "a look at the tape")
        os.kill(looking, signal.SIGSTOP)  # it cannot end by itself
        reign.kill()
        wait_until(lambda: gone(looking), "the end of a look whose service was killed")
        reign.succeed()

        # it dies as soon as it has stored a change
        wait_until_seen(reign, name, lambda advice: stored(reign), "a change")
        reign.kill()
        reign.succeed()
        job.wait_until(lambda: changes(job), "the change on the tape")

        # it goes on from the changed setting, as far as it may and no further
        wait_until_seen(
            reign,
            name,
            lambda advice: job.status()["view"]["settings"]["interval"] == LEAST,
            f"H = {LEAST}: {changes(job)}",
        )
        count = len(changes(job))
        advice = wait_until_seen(
            reign,
            name,
            lambda advice: sum(look.settings["interval_steps"] == LEAST for look in advice.looks) >= 2,
            "looks",
        )
    assert len(changes(job)) == count
    assert_each_was_made_once(job, client_commands(reign, name))
    assert_it_says_why(reign, name, advice)

    before = job.status()["view"]["global_version"]
    job.wait_until(lambda: job.status()["view"]["global_version"] > before + 8, "merges after that")
    reign.atoll("finish", name)
    job.wait_for_end()
    assert job.last["view"]["outcome"] == "completed", job.story()
    assert_sound(job)


def assert_each_was_made_once(job: Job, known: list[Any]) -> None:
    made = changes(job)
    names = [name for name, _ in made]
    assert len(set(names)) == len(names), "a command is twice on the tape"
    assert sorted(names) == sorted(one.command for one in known if one.caller == AUTOPILOT), "stored, and not done"
    values = [request.sync_interval_steps or 0 for _, request in made]
    for value, (_, request) in zip(values, made, strict=True):
        assert request == commands.Set(sync_interval_steps=value, reason=request.reason), "and it changes nothing else"
    assert values == sorted(set(values), reverse=True), "the same change twice"
    assert all(LEAST <= value < INTERVAL for value in values), values
    assert all(f"to {value}:" in request.reason for value, (_, request) in zip(values, made, strict=True))


def assert_it_says_why(reign: Reign, name: str, advice: Advice) -> None:
    """With the reason and the simulated effect, in the answer of the service and in what a person reads."""
    assert (advice.kind, advice.job) == ("act", name)
    made = [look for look in advice.looks if look.command is not None]
    assert made, [look.outcome for look in advice.looks]
    for look in made:
        one = look.advice
        assert one is not None
        assert (one.setting, one.held_by, one.reason) == ("interval_steps", "", look.outcome)
        assert one.after < (one.before or 0.0)
        assert one.then.tokens_per_second > one.now.tokens_per_second
        assert one.gain_ratio > 2.0 * one.error_ratio
    printed = json.loads(reign.atoll("advise", name, "--json"))
    assert [look["outcome"] for look in printed["looks"]][-len(advice.looks) :] == [
        look.outcome for look in advice.looks
    ]
    text = " ".join(reign.atoll("advise", name).split())
    assert "autopilot act" in text
    assert "interval_steps" in text


def pid_of_look(service: int) -> int | None:
    """The process that looks at a tape for this service, once it has made itself ready to."""
    with suppress(psutil.Error):
        for child in psutil.Process(service).children():
            if "api.jobs.autopilot" in child.cmdline() and child.nice() == NICE:
                return child.pid
    return None


def stored(reign: Reign) -> bool:
    """Whether the service has stored a change. Read beside it, because it is killed before it could answer."""
    return any(caller == AUTOPILOT for caller in reign.callers())


def client_commands(reign: Reign, name: str) -> list[Any]:
    with reign.client() as client:
        return client.commands(name)


def wait_until_seen(reign: Reign, name: str, seen: Callable[[Advice], Any], what: str) -> Advice:
    """Return the advice of which this is true. However long a look takes, every new look begins the patience anew."""
    client: Client = reign.client()
    newest: list[Look] = []
    while True:
        advice = client.advice(name)
        if seen(advice):
            return advice
        newest = advice.looks[:1]

        def news(newest: list[Look] = newest) -> bool:
            now = client.advice(name)
            return now.looks[:1] != newest or bool(seen(now))

        wait_until(news, f"{what}, after {[look.outcome for look in advice.looks]}", pause_s=0.02)
