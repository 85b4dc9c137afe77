"""Three streams of tests: side by side under ``make test`` (``pytest -n 3 --dist loadgroup``), else one after another.

cluster      live Ray clusters: what is measured there is measured undisturbed, one job after another
service      services, browsers and Prometheus, which mostly wait
arithmetic   everything else: it takes what the other two leave (the lowest priority)
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

STREAMS = {
    "ray": "cluster",
    "wan": "cluster",
    "api": "service",
    "chaos": "service",
    "metrics": "service",
    "web": "service",
}
"""By folder."""
ARITHMETIC = "arithmetic"
LOWEST = 19


def stream_of(item: pytest.Item) -> str:
    return STREAMS.get(item.path.relative_to(Path(__file__).parent).parts[0], ARITHMETIC)


@pytest.hookimpl(tryfirst=True)  # before the plugin that reads the mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.xdist_group(stream_of(item)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and stream_of(item) == ARITHMETIC:
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
