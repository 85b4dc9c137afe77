"""Three streams of tests: side by side under ``make test`` (``pytest --numprocesses 3``), else one after another.

- cluster: live Ray clusters, one job after another; pages too, for a browser drops what it loads when network namespaces
  come and go
- service: services and Prometheus, which mostly wait
- arithmetic: everything else, at the lowest priority: it takes what the other two leave
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

STREAMS = {
    "ray": "cluster",
    "wan": "cluster",
    "api": "service",
    "chaos": "service",
    "metrics": "service",
    "web": "cluster",
    "bench": "cluster",
}
"""By folder."""
ARITHMETIC = "arithmetic"
LOWEST = 19


def stream_of(nodeid: str) -> str:
    return STREAMS.get(nodeid.split("/")[1], ARITHMETIC)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A stream is a unit of work: one worker does all of it, in order."""
    from xdist.scheduler import LoadScopeScheduling

    class Streams(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return stream_of(nodeid)

    return Streams(config, log)


def pytest_collection_finish() -> None:
    """Ray reads its environment when it is imported, which must be after a test's cluster has set it."""
    assert "ray" not in sys.modules, "a test module imports ray, or what imports it, before any test runs"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and stream_of(item.nodeid) == ARITHMETIC:
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
