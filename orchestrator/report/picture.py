"""A drawing that stands alone: one SVG file with its title, its legend and its colours in it.

The pictures of a report live in a page and take its colours; these are written by ``atoll simulate --plot`` and opened by
whatever shows an SVG, so every colour is spelled out and nothing depends on a style sheet. Refuses to know what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from orchestrator.report.svg import Scale, element

WIDTH = 760.0
INK, SOFT, RULE, FAINT, PAPER = "#14242b", "#566a73", "#c3ced3", "#e6ecee", "#ffffff"
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif"
LETTER_WIDTH = 0.56
"""Of a letter's size: what a line of text needs, guessed, since nothing here can measure it."""


@dataclass(frozen=True, slots=True)
class LogScale(Scale):
    """Equal ratios are equal lengths; ``low`` and ``high`` are above zero."""

    def __call__(self, value: float) -> float:
        share = log10(value / self.low) / (log10(self.high / self.low) or 1.0)
        return self.start + share * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """The powers of ten inside the range, whatever ``count`` is."""
        first, last = ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9)
        return [10.0**power for power in range(first, last + 1)]


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
    """A filled rectangle that says what it is when pointed at."""
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
    """A hollow diamond: somebody else's figure, not ours."""
    tooltip = element("title", escape(title)) if title else ""
    drawn = f"M{x:.1f} {y - size:.1f}l{size} {size}l{-size} {size}l{-size} {-size}z"
    return element("path", tooltip, d=drawn, fill=PAPER, stroke=colour, stroke_width=2.0)


def legend(x: float, y: float, entries: Sequence[tuple[str, str]], *, diamonds: int = 0) -> tuple[str, float]:
    """Colour keys in as many rows as they need, and the y below them. The last ``diamonds`` keys are marks."""
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


def picture(height: float, title: str, subtitle: Sequence[str], *parts: str) -> str:
    """The whole file: ``title`` and the lines of ``subtitle`` above what ``parts`` drew from ``top_of(subtitle)`` on."""
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
    """Where there is room below the head."""
    return 64.0 + 18.0 * len(subtitle)
