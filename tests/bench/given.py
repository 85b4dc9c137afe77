"""States given in jobs whose islands are killed: the donors' time from step to step meanwhile against before, over the
same of the other survivors.

This is shown but not judged: the donor is the island that is furthest ahead, which affects the figure more than giving
does (``donors`` judges). It does show the longest step of either.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from api.client import Client
from api.installation.up import Installation
from orchestrator.core import effects, events
from orchestrator.core.messages import CaughtUp, Progress
from orchestrator.tape.storage import read_tape
from tests.bench.service import end, wait
from tests.harness.reports import flat
from tests.ray.jobs import EVERY_GROUP, synthetic

KILLS, PARAMETERS, STEP_S, BEFORE_S, SETTLE_S = 12, 10_000_000, 0.06, 5.0, 2.0
Reports = dict[str, list[Any]]
"""Of each island, as ``tests.harness.reports.flat`` makes them."""


class Window(NamedTuple):
    """The progress of some islands between two of their reports: time, steps, and the longest time between two of these."""

    seconds: float
    steps: int
    gap: float


class Told(NamedTuple):
    """One given state: its donors and the other survivors, before it was given and meanwhile."""

    donors_before: Window
    donors: Window
    others_before: Window
    others: Window


def measure(client: Client, installation: Installation, donors: int) -> list[Told]:
    section = {"step_s": STEP_S, "parameters": PARAMETERS}
    document = synthetic(10_000_000, EVERY_GROUP, synthetic=section, recovery={"donors_max": donors})
    job = client.submit(document).job
    tape = installation.runs / job / "tape.jsonl"
    for kill in range(KILLS):
        wait(lambda: client.job(job).islands_training == len(EVERY_GROUP), "all train")
        time.sleep(BEFORE_S + SETTLE_S)
        client.kill(job, EVERY_GROUP[kill % len(EVERY_GROUP)])
        wait(lambda: client.job(job).islands_training < len(EVERY_GROUP), "the kill")
    wait(lambda: client.job(job).islands_training == len(EVERY_GROUP), "the last one is back")
    time.sleep(SETTLE_S)
    end(client, job)
    return states_given(tape)


def show(name: str, states: list[Told]) -> None:
    if not states:
        print(f"given      {name}: no state was given between two steps of a survivor, so nothing was measured")
        return
    before, given, others_before, others = zip(*states, strict=True)
    ratio = pace(given) / pace(before) / (pace(others) / pace(others_before))
    gaps = [f"{1e3 * median(window.gap for window in windows):.0f} ms" for windows in (given, others)]
    told = "a step takes so much of what it took before, by the same of other survivors"
    print(
        f"given      {name}: {told}: {ratio:.3f}; longest {gaps[0]} against {gaps[1]} ({len(states)} states; no goal)"
    )


def pace(windows: Iterable[Window]) -> float:
    """Return the seconds per step over all windows together."""
    seconds, steps, _ = (sum(column) for column in zip(*windows, strict=True))
    return seconds / steps


def states_given(tape: Path) -> list[Told]:
    """Return one entry for each state that peers gave, if the islands reported enough of the time before and after."""
    asked: dict[str, tuple[float, set[str]]] = {}
    given: list[tuple[float, float, set[str]]] = []
    reports: Reports = defaultdict(list)
    for record in read_tape(tape).records:
        match record.event:
            case events.IslandReported(report=CaughtUp(donor=str())) as event if event.island in asked:
                since, donors = asked.pop(event.island)
                given.append((since, event.at, donors))
            case events.IslandReported(report=Progress()) as event:
                reports[event.island].append(flat(event))
        for effect in record.effects:
            if isinstance(effect, effects.BeginCatchUp) and effect.donor is not None:
                asked[effect.island] = (record.event.at, {name for name, _ in (effect.donor, *effect.helpers)})
    return [told for window in given if (told := _told(reports, *window)) is not None]


def _told(reports: Reports, since: float, until: float, donors: set[str]) -> Told | None:
    found = []
    for gave in (True, False):
        for window in ((since - BEFORE_S, since), (since, until)):
            seen = [_window(told, *window) for island, told in reports.items() if (island in donors) is gave]
            windows = [window for window in seen if window is not None]
            if not windows:
                return None
            seconds, steps, gaps = zip(*windows, strict=True)
            found.append(Window(sum(seconds), sum(steps), max(gaps)))
    return Told(*found)


def _window(reports: list[Any], since: float, until: float) -> Window | None:
    """Return the window from the last report before to the first one after, of one process."""
    before = [report for report in reports if report.at <= since]
    after = [report for report in reports if report.at >= until]
    if not before or not after or before[-1].incarnation != after[0].incarnation:
        return None
    first, last = before[-1], after[0]
    gap = max(report.gap_max_seconds for report in reports if first.at < report.at <= last.at)
    return Window(last.at - first.at, last.steps_total - first.steps_total, gap)
