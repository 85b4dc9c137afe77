"""Charts of what ``atoll simulate`` found: plain data in, one SVG out.

    systems_chart      goodput by system, badput by cause stacked behind it
    goodput_curves     goodput against chips, one curve a system, the paper's points as marks
    lines_chart        anything else that is curves: bandwidth against utilisation, wall-clock against extra compute

Refuses to compute: what is drawn is what is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.report.picture import (
    FAINT,
    INK,
    PAPER,
    RULE,
    SOFT,
    WIDTH,
    LogScale,
    block,
    curve,
    legend,
    mark,
    picture,
    point,
    stroke,
    top_of,
    words,
)
from orchestrator.report.svg import Scale
from orchestrator.report.words import count, percent

GOOD = "#0f8b7f"
CAUSES = ("#d9764a", "#e3bd5a", "#7388c9", "#b5483f", "#b3bfe2", "#9aa7ad", "#c98fb0")
SYSTEMS = {
    "data-parallel": "#b5483f",
    "elastic-data-parallel": "#d9904a",
    "diloco": "#7a5fa8",
    "streaming-diloco": "#5b74c4",
    "decoupled": GOOD,
}
SHADES = {2: "#74c4ba", 4: "#3fa498", 8: "#0f8b7f", 16: "#0a4f49"}
"""Of ``decoupled``, by its number of learners where several stand in one picture."""
SPARE = "#566a73"
LEFT, RIGHT = 64.0, WIDTH - 150.0


@dataclass(frozen=True, slots=True)
class Line:
    """One curve. ``published`` are points of the paper, drawn as marks in the curve's colour.

    The name stands at the right end, or right of ``name_at``, where curves end in one place.
    """

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    published: Sequence[tuple[float, float]] = ()
    dashes: str = ""
    name_at: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Axis:
    """What is measured, how its values are said, and between which two it runs."""

    name: str
    say: Callable[[float], str]
    low: float
    high: float
    logarithmic: bool = False
    ticks: Sequence[float] = ()

    def scale(self, start: float, stop: float) -> Scale:
        return (LogScale if self.logarithmic else Scale)(self.low, self.high, start, stop)


def systems_chart(rows: Sequence[Mapping[str, Any]], title: str, subtitle: Sequence[str] = ()) -> str:
    """A bar for each row's ``label`` (or system): its goodput, and what kept the rest, by cause."""
    causes = _causes_of(rows)
    colours = {cause: CAUSES[n % len(CAUSES)] for n, cause in enumerate(causes)}
    cause_names = {cause: cause.replace("_", " ") for cause in causes}
    keys, top = legend(24, top_of(subtitle) + 12, [(GOOD, "goodput"), *((colours[c], cause_names[c]) for c in causes)])
    labels = [str(row.get("label") or row["system"]) for row in rows]
    x = Scale(0.0, 1.0, 40.0 + 7.4 * max((len(label) for label in labels), default=8), WIDTH - 32)
    row_height, bottom = 46.0, top + 8 + 46.0 * len(rows)
    parts = [keys]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(stroke(x(tick), top, x(tick), bottom, FAINT if tick else RULE))
        parts.append(words(x(tick), bottom + 18, f"{100 * tick:.0f} %", anchor="middle", size=12))
    for n, row in enumerate(rows):
        y = top + 10 + row_height * n
        parts.append(words(x.start - 12, y + 19, labels[n], anchor="end", size=13.5, colour=INK))
        at, goodput = x(row["goodput"]), row["goodput"]
        parts.append(block(x.start, y, at - x.start, 28, GOOD, f"{labels[n]}: goodput {percent(goodput)}"))
        for cause in causes:
            width = x(row["badput"].get(cause, 0.0)) - x.start
            if width > 0.05:
                tooltip = f"{labels[n]}: {cause_names[cause]} {percent(row['badput'][cause])}"
                parts.append(block(at, y, max(0.4, width - 0.8), 28, colours[cause], tooltip, radius=1.0))
            at += width
        figure = _with_error(goodput, row.get("stderr"))
        if x(goodput) - x.start > 120:
            parts.append(words(x(goodput) - 10, y + 19, figure, anchor="end", size=14, colour=PAPER, weight=650))
        else:
            colour = PAPER if at > x(goodput) + 120 else INK
            parts.append(words(x(goodput) + 10, y + 19, figure, size=14, colour=colour, weight=650))
    return picture(bottom + 34, title, subtitle, *parts)


def goodput_curves(
    rows: Sequence[Mapping[str, Any]], published: Sequence[Mapping[str, Any]], subtitle: Sequence[str] = ()
) -> str:
    """``rows`` as goodput-table gives them; ``published`` has system, learners, chips and goodput."""
    lines = []
    for system, learners in dict.fromkeys((row["system"], row["learners"]) for row in rows):
        mine = [r for r in rows if (r["system"], r["learners"]) == (system, learners)]
        theirs = [p for p in published if (p["system"], p["learners"]) == (system, learners)]
        name = {"data-parallel": "no elasticity", "elastic-data-parallel": "elastic"}.get(system, f"M = {learners}")
        colour = SHADES.get(learners, GOOD) if system == "decoupled" else SYSTEMS.get(system, SPARE)
        points = [(r["chips"], r["goodput"]) for r in mine]
        lines.append(Line(name, colour, points, [(p["chips"], p["goodput"]) for p in theirs]))
    chips = sorted({float(row["chips"]) for row in rows}) or [1.0, 2.0]
    across = Axis("chips, all learners together", _chips, chips[0] / 1.15, chips[-1] * 1.15, True, chips)
    return lines_chart(lines, across, _RATIO, "Goodput against fleet size", subtitle)


def lines_chart(lines: Sequence[Line], across: Axis, up: Axis, title: str, subtitle: Sequence[str] = ()) -> str:
    """Curves with their names at their right ends, pushed apart where they would lie on each other."""
    top = top_of(subtitle) + 14
    bottom = top + 330
    x, y = across.scale(LEFT, RIGHT), up.scale(bottom, top)
    parts = []
    for tick in up.ticks or y.ticks(5):
        parts.append(stroke(LEFT, y(tick), RIGHT, y(tick), FAINT))
        parts.append(words(LEFT - 9, y(tick) + 4, up.say(tick), anchor="end", size=12))
    for tick in across.ticks or x.ticks(6):
        parts.append(stroke(x(tick), bottom, x(tick), bottom + 5, RULE))
        parts.append(words(x(tick), bottom + 20, across.say(tick), anchor="middle", size=12))
    parts.append(stroke(LEFT, bottom, RIGHT, bottom, RULE))
    parts.append(words(RIGHT, bottom + 42, across.name, anchor="end"))
    parts.append(words(LEFT - 40, top - 12, up.name))
    for line in lines:
        parts.append(curve([(x(a), y(b)) for a, b in line.points], line.colour, dashes=line.dashes))
    for line in lines:
        tooltips = [f"{line.name}: {up.say(b)} at {across.say(a)}" for a, b in line.points]
        if len(line.points) <= 12:
            parts += [point(x(a), y(b), line.colour, t) for (a, b), t in zip(line.points, tooltips, strict=True)]
        for a, b in line.published:
            parts.append(mark(x(a), y(b), line.colour, f"{line.name}, published: {up.say(b)} at {across.say(a)}"))
    parts += [
        words(x(line.name_at[0]) + 10, y(line.name_at[1]) + 4, line.name, size=13, colour=line.colour, weight=600)
        for line in lines
        if line.name_at
    ]
    ends = {n: y(line.points[-1][1]) for n, line in enumerate(lines) if line.points and not line.name_at}
    for n, at in _apart(ends, 17.0).items():
        end = x(lines[n].points[-1][0])
        if abs(at - ends[n]) > 3:
            parts.append(stroke(end + 5, ends[n], RIGHT + 14, at, lines[n].colour, 0.8))
        parts.append(words(RIGHT + 18, at + 4, lines[n].name, size=13, colour=lines[n].colour, weight=600))
    if any(line.published for line in lines):
        key, _ = legend(LEFT, bottom + 42, [(SOFT, "published, arXiv:2604.21428")], diamonds=1)
        parts.append(key)
    return picture(bottom + 60, title, subtitle, *parts)


def _causes_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every cause of any row, the one that cost most first."""
    totals: dict[str, float] = {}
    for row in rows:
        for cause, ratio in row["badput"].items():
            totals[cause] = totals.get(cause, 0.0) + ratio
    return sorted((c for c in totals if totals[c] > 0.0005), key=lambda cause: (-totals[cause], cause))


def _apart(wanted: Mapping[int, float], gap: float) -> dict[int, float]:
    """Places at least ``gap`` apart, in the same order, each as near as that allows to where it wants to be."""
    placed: dict[int, float] = {}
    groups: list[list[int]] = []
    for n in sorted(wanted, key=lambda n: (wanted[n], n)):
        groups.append([n])
        while True:
            for group in groups[-2:]:
                middle = sum(wanted[m] for m in group) / len(group)
                for k, m in enumerate(group):
                    placed[m] = middle + gap * (k - (len(group) - 1) / 2)
            if len(groups) < 2 or placed[groups[-1][0]] - placed[groups[-2][-1]] >= gap - 1e-9:
                break
            groups[-2:] = [groups[-2] + groups[-1]]
    return placed


def _with_error(goodput: float, stderr: float | None) -> str:
    return percent(goodput) if not stderr else f"{100 * goodput:.1f} ± {196 * stderr:.1f} %"


def _chips(value: float) -> str:
    return count(value).replace(" ", "")


def _whole_percent(value: float) -> str:
    return f"{100 * value:.0f} %"


_RATIO = Axis("goodput", _whole_percent, 0.0, 1.0, ticks=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
