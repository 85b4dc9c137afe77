"""What the benches of a whole service share: a service, waiting for a situation, and steps by a job's own tape."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from api.client import Client
from api.installation.home import CONFIGS, Home
from api.installation.up import Installation, down, up
from orchestrator.core.messages import Progress
from orchestrator.tape.storage import read_tape
from tests.harness.reports import of_kind

SITUATION_TIMEOUT_S = 120.0
TURNS = (False, True, True, False) * 2
"""Whether something is done in a stretch. The order lets a machine that slows down or warms up affect both."""


@contextmanager
def service(
    groups: Path = CONFIGS / "groups.yaml", jobs_max: int | None = None
) -> Iterator[tuple[Client, Installation]]:
    """Run a service with a cluster of its own and these node groups, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        installation = Installation(Home(Path(folder) / "home"), Path(folder) / "runs", groups, jobs_max=jobs_max)
        try:
            up(installation, lambda _: None)
            with Client.at(installation.home.path) as client:
                yield client, installation
        finally:
            down(installation.home, lambda _: None)


def wait(situation: Callable[[], Any], what: str, timeout_s: float = SITUATION_TIMEOUT_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (seen := situation()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.1)
    return seen


def end(client: Client, job: str, timeout_s: float = SITUATION_TIMEOUT_S) -> None:
    client.cancel(job)
    wait(lambda: client.job(job).state.final, "the end", timeout_s)


def stretches(client: Client, job: str, seconds: float, act: Callable[[], object]) -> list[float]:
    """Let the job train through a stretch for each of ``TURNS``, with ``act`` or without. Return the bounds, in job time."""
    began_at = client.job(job).started_at
    assert began_at is not None
    bounds = [time.time() - began_at]
    for acting in TURNS:
        ends_at = time.monotonic() + seconds
        if acting:
            act()
        time.sleep(max(0.0, ends_at - time.monotonic()))
        bounds.append(time.time() - began_at)
    return bounds


def with_and_without(means: list[float]) -> tuple[float, float]:
    """Return the median of the stretches in which something was done, and of the others."""
    by_turn = list(zip(TURNS, means, strict=True))
    return median(mean for acted, mean in by_turn if acted), median(mean for acted, mean in by_turn if not acted)


def step_seconds(run_dir: Path, bounds: list[float], islands: Collection[str]) -> list[float]:
    """Return the mean time from step to step of these islands, in each stretch between two bounds, in job time."""
    reports = of_kind((record.event for record in read_tape(run_dir / "tape.jsonl").records), Progress)
    means = []
    for begin, end in pairwise(bounds):
        took, made = 0.0, 0
        for island in islands:
            mine = [report for report in reports if report.island == island and begin <= report.at < end]
            took, made = took + mine[-1].at - mine[0].at, made + mine[-1].steps_total - mine[0].steps_total
        means.append(round(took / made, 5))
    return means
