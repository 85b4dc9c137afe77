"""An island's speed, read from its reports: recorded paces, stops, capacities, and a mean for when nothing is recorded.

    reports    |--|---|--|-------------|--|---|--|        at, steps, stepping seconds
    stops                 ^^^^^^^^^^^^                    a gap between two steps that no step can be
    paces      |—————————|             |—————————|        means over at least WINDOW_S and STEPS_MIN steps

A pace is a mean over several steps because what is drawn from it is looked up by time: single steps would favour the long
ones, during which more time passes. Refuses to know: what happened to the island; ``fit`` says when it was unreachable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import fsum, sqrt

from orchestrator.accounting.island_time import FREEZE_MIN_S, FREEZE_RATIO
from orchestrator.core.messages import Progress
from orchestrator.core.vocabulary import Duration, Instant
from orchestrator.simulation.plan import Pace

WINDOW_S: Duration = 2.0
STEPS_MIN = 4
PACES_MAX = 1000
"""Of one island: windows grow with the tape, so that a month's world is as small as an hour's."""
BURST_S: Duration = 1.0
"""For so long after a silence, what was said meanwhile is still coming in."""
CAPACITY_CHANGE = 0.005
DIGITS = 6
"""Microseconds: finer than anything that is measured, and shorter to write."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The island stood still; how exactly it is known depends on how often it reports."""

    since: Instant
    until: Instant


@dataclass(slots=True)
class Speeds:
    """Of one island. ``spread`` are relative deviations of steps from their pace, scaled to those of a single step."""

    paces: list[Pace] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    tokens: list[tuple[Instant, float]] = field(default_factory=list)
    """From when on each step has how many tokens."""
    steps: int = 0
    stepping: Duration = 0.0
    pausing: Duration = 0.0
    owed: Duration = 0.0
    spread: list[float] = field(default_factory=list)

    @property
    def step_s(self) -> Duration | None:
        return self.stepping / self.steps if self.steps else None

    @property
    def pause_s(self) -> Duration:
        return self.pausing / self.steps if self.steps else 0.0


@dataclass(frozen=True, slots=True)
class _Segment:
    """Between two reports."""

    since: Instant
    until: Instant
    steps: int
    stepping: Duration


def of(lives: Iterable[Sequence[tuple[Instant, Progress]]], unreachable: Sequence[tuple[Instant, Instant]]) -> Speeds:
    """Return what the reports of all incarnations of one island, each with its instant, say of the island's speed."""
    speeds = Speeds()
    reports = [list(life) for life in lives if life]
    length = max((life[-1][0] for life in reports), default=0.0) - min((life[0][0] for life in reports), default=0.0)
    window = max(WINDOW_S, length / PACES_MAX)
    for life in reports:
        at, first = life[0]
        if first.steps_total:
            _note_tokens(speeds, at, first.tokens_total / first.steps_total)
        pending: list[_Segment] = []
        for (since, before), (until, after) in pairwise(life):
            steps = after.steps_total - before.steps_total
            stepping = after.stepping_seconds - before.stepping_seconds
            _note_tokens(speeds, since, (after.tokens_total - before.tokens_total) / steps)
            stop = _stop(since, until, after, steps, stepping)
            if stop is None:
                pending.append(_Segment(since, until, steps, stepping))
            else:
                speeds.stops.append(stop)
                excess = max(0.0, stepping - steps * after.step_seconds_median)
                stepping -= min(stop.until - stop.since, excess)
                stood = stop.until - stop.since
                pending.append(_Segment(since, until - stood, steps, stepping))
            if _wide(pending, window) and not _within(until, unreachable):
                _close(speeds, pending)
                pending = []
        _close(speeds, pending)
        speeds.owed = 0.0
    return speeds


def jitter(all_spreads: Iterable[Speeds]) -> float:
    """The half-width, as a ratio, of an even distribution that spreads as the steps did; below 1, as steps take time."""
    squares = [x * x for speeds in all_spreads for x in speeds.spread]
    return min(0.95, sqrt(3.0 * fsum(squares) / len(squares))) if squares else 0.0


def _stop(since: Instant, until: Instant, after: Progress, steps: int, stepping: Duration) -> Stop | None:
    """As in ``accounting.island_time``: a gap many steps long was no step. It ended with a step, just before the report.

    Where several steps were reported at once, it may be any of them; the last is as good a guess as another.
    """
    usual = after.step_seconds_median
    gap = after.gap_max_seconds
    if gap <= max(FREEZE_MIN_S, FREEZE_RATIO * usual):
        return None
    later = max(0.0, (stepping - min(stepping, gap)) / 2.0) if steps > 1 else 0.0
    ended = until - min(later, max(0.0, until - since - gap))
    return Stop(ended - gap + usual / 2.0, ended - usual / 2.0)


def _wide(pending: list[_Segment], window: Duration) -> bool:
    wide = fsum(segment.until - segment.since for segment in pending) >= window
    return wide and sum(segment.steps for segment in pending) >= STEPS_MIN


def _within(at: Instant, spans: Sequence[tuple[Instant, Instant]]) -> bool:
    return any(since <= at <= until + BURST_S for since, until in spans)


def _close(speeds: Speeds, segments: list[_Segment]) -> None:
    steps = sum(segment.steps for segment in segments)
    if not steps:
        return
    stepping = fsum(segment.stepping for segment in segments)
    # a report that was long under way makes its window too wide and the next too narrow: what is missing is owed
    left = fsum(segment.until - segment.since for segment in segments) - stepping - speeds.owed
    pausing, speeds.owed = max(0.0, left), max(0.0, -left)
    step_s = stepping / steps
    span = (round(segments[0].since, DIGITS), round(segments[-1].until, DIGITS))
    speeds.paces.append(Pace(*span, round(step_s, DIGITS), round(pausing / steps, DIGITS)))
    speeds.steps += steps
    speeds.stepping += stepping
    speeds.pausing += pausing
    if len(segments) > 1 and step_s > 0.0:
        speeds.spread += [(s.stepping / s.steps / step_s - 1.0) * sqrt(s.steps) for s in segments]


def _note_tokens(speeds: Speeds, at: Instant, tokens: float) -> None:
    if not speeds.tokens or abs(tokens - speeds.tokens[-1][1]) > CAPACITY_CHANGE * max(tokens, speeds.tokens[-1][1]):
        speeds.tokens.append((at, tokens))
