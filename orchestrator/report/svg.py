"""A minimal SVG vocabulary: scales, ticks, axes and marks. Coordinates in, elements as strings out.

Colours are CSS variables of the page (``page``), so one drawing serves the light and the dark theme. There is no plotting
library behind it, because the synchroniser writes reports and should not have to load one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH = 520.0
"""The width of all charts, in units. They scale with the page, and text is large enough to be readable on a phone."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from [low, high] to [start, stop] of the drawing."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Return about ``count`` round values inside the range."""
        span = self.high - self.low
        if span <= 0.0:
            return [self.low]
        raw = span / count
        power = 10.0 ** floor(log10(raw))
        step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
        first = ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, floor(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class LogScale(Scale):
    """A logarithmic map: equal ratios get equal lengths. ``low`` and ``high`` are above zero."""

    def __call__(self, value: float) -> float:
        share = log10(value / self.low) / (log10(self.high / self.low) or 1.0)
        return self.start + share * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Return the powers of ten inside the range. ``count`` is ignored."""
        first, last = ceil(log10(self.low) - 1e-9), floor(log10(self.high) + 1e-9)
        return [10.0**power for power in range(first, last + 1)]


def element(name: str, *children: str, **attributes: object) -> str:
    """Return one element. ``_`` in attribute names becomes ``-``, and ``class_`` becomes ``class``."""
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{named}>{''.join(children)}</{name}>"


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "label") -> str:
    return element("text", escape(words), x=x, y=y, text_anchor=anchor, class_=kind)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def box(x: float, y: float, width: float, height: float, colour: str, title: str = "", radius: float = 1.5) -> str:
    """Return a filled rectangle with ``title`` as its tooltip."""
    tooltip = element("title", escape(title)) if title else ""
    return element(
        "rect", tooltip, x=x, y=y, width=max(0.0, width), height=height, rx=radius, style=f"fill:var(--{colour})"
    )


def dot(x: float, y: float, radius: float, colour: str, title: str = "") -> str:
    tooltip = element("title", escape(title)) if title else ""
    return element("circle", tooltip, cx=x, cy=y, r=radius, style=f"fill:var(--{colour})")


def path(points: Iterable[tuple[float, float]], colour: str, *, width: float = 2.0, opacity: float = 1.0) -> str:
    drawn = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    style = f"stroke:var(--{colour});stroke-width:{width};opacity:{opacity}"
    return element("path", d=drawn, class_="curve", style=style)


def x_axis(scale: Scale, y: float, say: Callable[[float], str], name: str) -> str:
    """Return a horizontal axis at ``y``: ticks below it, and ``name`` at its right end."""
    marks = [text(scale(tick), y + 17, say(tick), anchor="middle", kind="tick") for tick in scale.ticks()]
    named = text(scale.stop, y + 34, name, anchor="end", kind="tick")
    return line(scale.start, y, scale.stop, y, "axis") + "".join(marks) + named


def y_axis(scale: Scale, x: float, until: float, say: Callable[[float], str], count: int = 4) -> str:
    """Return grid lines from ``x`` to ``until`` with their values on the left."""
    marks = []
    for tick in scale.ticks(count):
        marks.append(line(x, scale(tick), until, scale(tick), "grid"))
        marks.append(text(x - 7, scale(tick) + 4, say(tick), anchor="end", kind="tick"))
    return "".join(marks)


def drawing(height: float, label: str, *parts: str) -> str:
    """Return a whole chart. ``label`` is its description for screen readers."""
    return element(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_label=label,
        xmlns="http://www.w3.org/2000/svg",
    )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return colour keys as HTML, so that they wrap like text."""
    keys = (f'<span class="key"><i style="background:var(--{c})"></i>{escape(name)}</span>' for c, name in entries)
    return f'<p class="legend">{"".join(keys)}</p>'


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
