"""Streams of tests on six workers under ``make test`` (``pytest --numprocesses 6``), else one after another.

- bench: the benches at their smallest, before any test has a cluster in its process
- first cluster, second cluster: live jobs, one after another, each stream on a Ray cluster of its own
- network: regions, then pages; one after another, for a browser drops what it loads when network namespaces come and go
- attack, service: services, which mostly wait; file by file
- chaos: plans of chaos, Prometheus; file by file
- installation: what has a cluster of its own in processes of its own, as users run it whole; file by file, the longest
  first, and after chaos: a worker that leaves the folder of its live jobs ends their cluster, which no idle core pays for
- arithmetic: everything else, file by file, at the lowest priority: one worker begins with it and takes what the five
  streams that mostly wait leave; in the end it has all there is

Each stream of live jobs has one worker from its beginning to its end, so these streams bound the whole run from below.
They go before attacks and services, which several workers share file by file.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import settings

from tests.soak import skip_unless_soaking

settings.register_profile("shared", deadline=None)  # no bound on wall time: a busy machine must not fail a test
settings.load_profile("shared")

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
"""Programs of tests run a few times each, so optimising them costs more than it saves. JAX reads this at its first use."""

ARITHMETIC = "arithmetic"
STREAMS = {
    "ray/test_whole_loss.py": "installation",
    "ray/test_tutorial.py": "installation",
    "ray/test_service.py": "installation",
    "ray/test_full_disk.py": "installation",
    "ray/test_demo.py": "installation",
    "ray/test_chaos_plans.py": "chaos",
    "ray/shared_job": "first cluster",
    "ray/test_catch_up.py": "first cluster",
    "ray/test_checkpoints.py": "first cluster",
    "ray/test_departures.py": "first cluster",
    "ray/test_evaluation.py": "first cluster",
    "ray/test_pauses.py": "first cluster",
    "ray/test_standby.py": "first cluster",
    "ray/test_streamed_text.py": "first cluster",
    "ray/test_transport.py": "first cluster",
    "ray": "second cluster",
    "wan": "network",
    "web": "network",
    "bench": "bench",
    "api": "service",
    "channel": "service",
    "attack": "attack",
    "chaos": "chaos",
    "metrics": "chaos",
}
"""By file, else by folder, else by the folder above, else arithmetic. Files are begun in this order within their stream."""
ORDER = (
    "bench",
    "first cluster",
    "second cluster",
    "network",
    "attack",
    "service",
    "chaos",
    "installation",
    ARITHMETIC,
)
BY_FILE = ("attack", "service", "chaos", "installation", ARITHMETIC)
"""Streams whose files any worker may take that has ended its own."""
FILES = tuple(STREAMS)
LAST = ("ray/test_hosts.py", "ray/test_simulated_agrees.py")
"""Of their stream. The one leaves dead nodes, which Ray takes for live ones for ten minutes. The other's premise are steps
of fixed time: it runs when there is least beside it."""
NICENESS = {"attack": 10, "service": 10, ARITHMETIC: 19}
"""By stream; 0 for others."""
FILLER = "gw5"
"""The worker that begins with arithmetic."""
LIVE = frozenset(["first cluster", "second cluster", "network"])
SERVICES = frozenset(["attack", "service"])
"""Workers that have had a cluster in their process leave these to those that have not, as long as there is other work."""


def path_of(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


def stream_of(nodeid: str) -> str:
    path = path_of(nodeid)
    places = (path, path.rpartition("/")[0], path.partition("/")[0])
    return next((STREAMS[place] for place in places if place in STREAMS), ARITHMETIC)


def fits(unit: str, worker: str, begun: set[str]) -> bool:
    """Whether a worker that has begun these units should take this one before others."""
    stream = stream_of(unit) if unit.endswith(".py") else unit
    if worker == FILLER:
        return stream == ARITHMETIC
    return begun.isdisjoint(LIVE) or stream not in SERVICES


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A stream is a unit of work, which one worker does in order; of those in ``BY_FILE`` each file is one."""
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

    class Streams(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            stream = stream_of(nodeid)
            return path_of(nodeid) if stream in BY_FILE else stream

        def _assign_work_unit(self, node: WorkerController) -> None:
            begun = set(self.assigned_work[node])
            fitting = (unit for unit in self.workqueue if fits(unit, node.gateway.id, begun))
            if (unit := next(fitting, None)) is not None:
                self.workqueue.move_to_end(unit, last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False
    return Streams(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What modules and tests consist of stays until the end. Looking through it for garbage would cost half of this."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Streams are begun in the order of ``ORDER``, and files of their own in that of ``STREAMS``."""
    skip_unless_soaking(items)
    items.sort(key=lambda item: _rank(path_of(item.nodeid)))


def _rank(path: str) -> tuple[int, int, int]:
    last = LAST.index(path) if path in LAST else -1
    return ORDER.index(stream_of(path)), FILES.index(path) if path in FILES else len(FILES), last


def pytest_collection_finish() -> None:
    """Ray reads its environment when it is imported, which must be after a test's cluster has set it."""
    assert "ray" not in sys.modules, "a test module imports ray, or what imports it, before any test runs"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test may log text that is not Unicode. Its process could not send that to the one that collects reports."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    with suppress(PermissionError):  # only root may raise it again
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS.get(stream_of(item.nodeid), 0))
