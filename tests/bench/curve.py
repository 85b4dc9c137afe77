"""Draws the curves of a figure, by the charts of ``atoll simulate --plot``.

``--pictures FOLDER`` of ``python -m tests.bench`` says where they go.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.report.simulated import SYSTEMS, Axis, Line, lines_chart

Points = Sequence[tuple[float, float]]
COLOURS = tuple(SYSTEMS.values())


def write(
    path: Path,
    title: str,
    subtitle: str,
    across: str,
    series: Mapping[str, Points],
    bounds: tuple[float, float] | None = None,
) -> None:
    """Write the picture. ``across`` names the flat axis, ``title`` the upright one, which is linear between ``bounds``."""
    xs = sorted({x for points in series.values() for x, _ in points})
    ys = [y for points in series.values() for _, y in points]
    low, high = bounds or (10.0 ** math.floor(math.log10(min(ys))), 10.0 ** math.ceil(math.log10(max(ys))))
    lines = [Line(name, COLOURS[n % len(COLOURS)], points) for n, (name, points) in enumerate(series.items()) if points]
    flat = Axis(across, "{:g}".format, xs[0] / 1.15, xs[-1] * 1.15, logarithmic=True, ticks=xs)
    upright = Axis("", "{:,g}".format, low, high, logarithmic=bounds is None)
    path.write_text(lines_chart(lines, flat, upright, title, [subtitle]) + "\n")
