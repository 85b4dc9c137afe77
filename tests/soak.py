"""Tests that cost too much for every run: marked ``soak``, they skip themselves unless ``ATOLL_SOAK`` is set, as ``make
soak`` sets it.

@pytest.mark.soak("half a minute")
pytest.param(…, marks=pytest.mark.soak("another of its kind"))
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

SOAKING = "ATOLL_SOAK" in os.environ


def examples(count: int) -> int:
    """How many examples of a property, or damages of a file, are tried: these many in ``make soak``, a third else."""
    return count if SOAKING else max(1, count // 3)


def skip_unless_soaking(items: Iterable[pytest.Item]) -> None:
    """Those marked are skipped with the reason that their mark gives."""
    if SOAKING:
        return
    for item in items:
        if (mark := item.get_closest_marker("soak")) is not None:
            (reason,) = mark.args
            item.add_marker(pytest.mark.skip(reason=f"{reason}: make soak runs it"))
