"""Formats numbers for people: counts, durations, percentages and losses. A missing value is an en dash."""

from __future__ import annotations


def count(value: float | None) -> str:
    """Return a count with a unit prefix: 1234567 → 1.23 M."""
    if value is None:
        return "–"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f}"


def seconds(value: float | None) -> str:
    """Return a duration in ms or s up to two minutes, then in minutes, then in hours."""
    if value is None:
        return "–"
    if abs(value) < 0.0995:
        return f"{value * 1e3:.0f} ms"
    if abs(value) < 10:
        return f"{value:.2f} s"
    if abs(value) < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if abs(value) < 7200 else f"{value / 3600:.1f} h"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def plural(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def plain(value: float) -> str:
    """Return the value of a tick without trailing zeros."""
    return f"{value:.6g}"
