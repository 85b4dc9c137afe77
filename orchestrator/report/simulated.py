"""The charts that ``atoll simulate --plot`` writes: plain data in, one stand-alone SVG file out.

    systems_chart      goodput by system, with badput by cause stacked behind it
    changes_chart      bars to the right and left of zero, with published figures as marks: more or less loss
    lines_chart        curves, with published points as marks: goodput against chips, utilisation against bandwidth

Nothing is computed here: a chart shows the figures of the printed table. Unlike the charts of a report, which take the
colours of their page, these files are opened by any SVG viewer, so title, legend and colours are all inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from orchestrator.report.page import LogScale, Scale, element
from orchestrator.system.plain import percent

WIDTH = 760.0
INK, SOFT, RULE, FAINT, PAPER = "#14242b", "#566a73", "#c3ced3", "#e6ecee", "#ffffff"
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif"
LETTER_WIDTH = 0.56
"""The estimated mean width of a character, as a part of the font size. Nothing here can measure text."""

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
"""Colours of ``decoupled`` by number of learners, for charts that show several."""
GOODPUT_SHADES = (SYSTEMS["data-parallel"], SYSTEMS["elastic-data-parallel"], *SHADES.values())
"""Colours of the rows of the published goodput table, in its order."""
LEFT, RIGHT = 64.0, WIDTH - 150.0


@dataclass(frozen=True, slots=True)
class Line:
    """One curve. ``published`` are points of the paper, drawn as marks in the curve's colour.

    The name is drawn at the right end of the curve, or to the right of ``name_at`` where several curves end together.
    """

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    published: Sequence[tuple[float, float]] = ()
    dashes: str = ""
    name_at: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: what it measures, how ``say`` formats a value, and its range."""

    name: str
    say: Callable[[float], str]
    low: float
    high: float
    logarithmic: bool = False
    ticks: Sequence[float] = ()

    def scale(self, start: float, stop: float) -> Scale:
        return (LogScale if self.logarithmic else Scale)(self.low, self.high, start, stop)


def systems_chart(rows: Sequence[Mapping[str, Any]], title: str, subtitle: Sequence[str] = ()) -> str:
    """Draw a bar for each row, named by ``label`` or system: its goodput, and the lost time by cause."""
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
    return svg_file(bottom + 34, title, subtitle, *parts)


def changes_chart(changes: Sequence[tuple[str, float, float | None]], title: str, subtitle: Sequence[str] = ()) -> str:
    """Draw a bar for each name and ratio of change. The third is the published one: a mark, or beyond all bars a figure."""
    top, row_height = top_of(subtitle) + 30, 24.0
    bottom = top + 8 + row_height * len(changes)
    low, high = min((ours for _, ours, _ in changes), default=0.0), max((ours for _, ours, _ in changes), default=0.0)
    x = Scale(min(-0.01, low), max(0.01, high), 380.0, WIDTH - 120)
    parts = [stroke(x(0.0), top, x(0.0), bottom, RULE)]
    key, _ = legend(24, top - 10, [(GOOD, "ours"), (SOFT, "published")], diamonds=1)
    for n, (name, ours, theirs) in enumerate(changes):
        y = top + 8 + row_height * n
        parts.append(words(368, y + 13, name, anchor="end", size=12, colour=INK))
        tooltip = f"{name}: {100 * ours:+.2f} %"
        parts.append(block(min(x(0.0), x(ours)), y, abs(x(ours) - x(0.0)), 16, GOOD, tooltip))
        figure = f"{round(100 * ours, 1) + 0.0:+.1f} %"  # and not −0.0
        if theirs is not None and x.start <= x(theirs) <= x.stop:
            parts.append(mark(x(theirs), y + 8, SOFT, f"{name}, published: {100 * theirs:+.2f} %", size=5.0))
        elif theirs is not None:
            figure += f" (◇ {100 * theirs:+.0f} %)"
        parts.append(words(WIDTH - 110, y + 13, figure, size=12))
    return svg_file(bottom + 24, title, subtitle, key, *parts)


def lines_chart(lines: Sequence[Line], across: Axis, up: Axis, title: str, subtitle: Sequence[str] = ()) -> str:
    """Draw curves with their names at their right ends, moved apart where they would overlap."""
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
        key, _ = legend(LEFT, bottom + 42, [(SOFT, "published")], diamonds=1)
        parts.append(key)
    return svg_file(bottom + 60, title, subtitle, *parts)


def _causes_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return all causes of the rows, the most expensive first."""
    totals: dict[str, float] = {}
    for row in rows:
        for cause, ratio in row["badput"].items():
            totals[cause] = totals.get(cause, 0.0) + ratio
    return sorted((c for c in totals if totals[c] > 0.0005), key=lambda cause: (-totals[cause], cause))


def _apart(wanted: Mapping[int, float], gap: float) -> dict[int, float]:
    """Return positions at least ``gap`` apart, in the same order, each as close to the wanted one as possible."""
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


def _whole_percent(value: float) -> str:
    return f"{100 * value:.0f} %"


RATIO = Axis("goodput", _whole_percent, 0.0, 1.0, ticks=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0))


# ── drawing ───────────────────────────────────────────────────────────────────────────────────────────────────────


def words(
    x: float, y: float, text: str, *, size: float = 12.5, colour: str = SOFT, anchor: str = "start", weight: int = 400
) -> str:
    return element(
        "text",
        escape(text),
        x=x,
        y=y,
        font_size=size,
        fill=colour,
        text_anchor=anchor,
        font_weight=weight if weight != 400 else None,
    )


def stroke(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1.0, dashes: str = "") -> str:
    drawn = {"stroke": colour, "stroke_width": width, "stroke_dasharray": dashes or None}
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **drawn)


def block(x: float, y: float, width: float, height: float, colour: str, title: str = "", radius: float = 2.0) -> str:
    """Return a filled rectangle with ``title`` as its tooltip."""
    tooltip = element("title", escape(title)) if title else ""
    return element("rect", tooltip, x=x, y=y, width=max(0.0, width), height=height, rx=radius, fill=colour)


def curve(points: Sequence[tuple[float, float]], colour: str, width: float = 2.4, dashes: str = "") -> str:
    drawn = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    style = {"stroke": colour, "stroke_width": width, "stroke_dasharray": dashes or None}
    return element("path", d=drawn, fill="none", stroke_linejoin="round", stroke_linecap="round", **style)


def point(x: float, y: float, colour: str, title: str = "", radius: float = 3.4) -> str:
    tooltip = element("title", escape(title)) if title else ""
    return element("circle", tooltip, cx=x, cy=y, r=radius, fill=colour)


def mark(x: float, y: float, colour: str, title: str = "", size: float = 6.0) -> str:
    """Return a hollow diamond, which marks a published figure."""
    tooltip = element("title", escape(title)) if title else ""
    drawn = f"M{x:.1f} {y - size:.1f}l{size} {size}l{-size} {size}l{-size} {-size}z"
    return element("path", tooltip, d=drawn, fill=PAPER, stroke=colour, stroke_width=2.0)


def legend(x: float, y: float, entries: Sequence[tuple[str, str]], *, diamonds: int = 0) -> tuple[str, float]:
    """Return colour keys, wrapped into rows, and the y below them. The last ``diamonds`` keys are hollow diamonds."""
    parts, at, size = [], x, 12.5
    for n, (colour, name) in enumerate(entries):
        needed = 18 + LETTER_WIDTH * size * len(name) + 16
        if at + needed > WIDTH - 16 and at > x:
            at, y = x, y + 20
        is_mark = n >= len(entries) - diamonds
        parts.append(mark(at + 6, y - 5, colour, size=5.0) if is_mark else block(at, y - 11, 12, 12, colour, radius=3))
        parts.append(words(at + 18, y, name, size=size))
        at += needed
    return "".join(parts), y + 14


def svg_file(height: float, title: str, subtitle: Sequence[str], *parts: str) -> str:
    """Return the whole file: title and subtitle, and below them ``parts``, which start at ``top_of(subtitle)``."""
    head = [words(24, 36, title, size=19, colour=INK, weight=650)]
    head += [words(24, 57 + 18 * n, line, size=13) for n, line in enumerate(subtitle)]
    return element(
        "svg",
        element("rect", x=0, y=0, width=WIDTH, height=height, fill=PAPER),
        *head,
        *parts,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        width=f"{WIDTH:g}",
        height=f"{height:g}",
        font_family=FONT,
        role="img",
        aria_label=title,
        xmlns="http://www.w3.org/2000/svg",
    )


def top_of(subtitle: Sequence[str]) -> float:
    """Return the y at which the drawing can start, below title and subtitle."""
    return 64.0 + 18.0 * len(subtitle)
