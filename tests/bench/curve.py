"""Draws the curves of a figure as an SVG: both axes logarithmic, or the upright one linear between two bounds.

Colours are readable on light and dark pages. ``--pictures FOLDER`` of ``python -m tests.bench`` says where they go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 70, 190, 40, 50
COLOURS = ("#4878cf", "#d65f5f", "#6acc65", "#b47cc7", "#c4ad66", "#77bedb")
INK = "#808080"


def write(
    path: Path, title: str, across: str, series: Mapping[str, Points], bounds: tuple[float, float] | None = None
) -> None:
    """Write the picture. ``across`` names the flat axis, ``title`` the upright one, which is linear between ``bounds``."""
    xs = sorted({x for points in series.values() for x, _ in points})
    ys = [y for points in series.values() for _, y in points]
    low, high = bounds or (10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys))))

    def place(x: float, y: float) -> tuple[float, float]:
        part = math.log(x / xs[0]) / math.log(xs[-1] / xs[0])
        up = (y - low) / (high - low) if bounds else math.log(y / low) / math.log(high / low)
        return LEFT + part * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def text(x: float, y: float, content: str, colour: str = INK, anchor: str = "middle") -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" text-anchor="{anchor}">{escape(content)}</text>'

    ticks = [low + (high - low) * n / 5 for n in range(6)] if bounds else _powers(low, high)
    lines = [text(LEFT, 20, title, anchor="start"), text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, across)]
    for y in ticks:
        _, at = place(xs[0], y)
        lines.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="{INK}" stroke-opacity="0.3"/>')
        lines.append(text(LEFT - 8, at + 4, f"{y:,.4g}", anchor="end"))
    lines += [text(place(x, low)[0], HEIGHT - BOTTOM + 18, f"{x:g}") for x in xs]
    for number, (name, points) in enumerate(series.items()):
        colour, placed = COLOURS[number % len(COLOURS)], [place(x, y) for x, y in points]
        way = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        lines.append(f'<path d="M{way}" stroke="{colour}" stroke-width="2" fill="none"/>')
        lines += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        lines.append(text(WIDTH - RIGHT + 12, TOP + 18 * number, name, colour, "start"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
    path.write_text("\n".join([head, *lines, "</svg>", ""]))


def _powers(low: float, high: float) -> list[float]:
    return [10.0**n for n in range(round(math.log10(low)), round(math.log10(high)) + 1)]
