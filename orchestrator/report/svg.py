"""A few words of SVG: scales, ticks, axes, marks. Coordinates in, elements as strings out.

Colours are CSS variables of the page (``style``), so that one drawing serves light and dark. Drawn here and not by a
plotting library, because a synchroniser should not have to load one to say how a job went.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH = 520.0
"""All charts are this many units wide and scale with the page; text is sized to stay readable on a phone."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] onto [start, stop] of the drawing."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values inside the range, about ``count`` of them."""
        span = self.high - self.low
        if span <= 0.0:
            return [self.low]
        raw = span / count
        power = 10.0 ** floor(log10(raw))
        step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
        first = ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, floor(self.high / step + 1e-9) + 1)]


def element(name: str, *children: str, **attributes: object) -> str:
    """One element; ``_`` in attribute names stands for ``-``, ``class_`` for ``class``."""
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
    """A filled rectangle that says what it is when pointed at."""
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
    """Ticks below ``y``, and what they measure at the right end."""
    marks = [text(scale(tick), y + 17, say(tick), anchor="middle", kind="tick") for tick in scale.ticks()]
    named = text(scale.stop, y + 34, name, anchor="end", kind="tick")
    return line(scale.start, y, scale.stop, y, "axis") + "".join(marks) + named


def y_axis(scale: Scale, x: float, until: float, say: Callable[[float], str], count: int = 4) -> str:
    """Grid lines from ``x`` to ``until`` with their values on the left."""
    marks = []
    for tick in scale.ticks(count):
        marks.append(line(x, scale(tick), until, scale(tick), "grid"))
        marks.append(text(x - 7, scale(tick) + 4, say(tick), anchor="end", kind="tick"))
    return "".join(marks)


def drawing(height: float, label: str, *parts: str) -> str:
    """A whole picture. ``label`` is what a screen reader says of it."""
    return element(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH:g} {height:g}",
        role="img",
        aria_label=label,
        xmlns="http://www.w3.org/2000/svg",
    )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Colour keys as HTML, so that they wrap as text does."""
    keys = (f'<span class="key"><i style="background:var(--{c})"></i>{escape(name)}</span>' for c, name in entries)
    return f'<p class="legend">{"".join(keys)}</p>'


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
