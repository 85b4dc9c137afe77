"""One job that the tests of this folder share: each finds it whole, strikes it, and leaves it
so that it becomes whole again.

Whole: every island of ``GROUPS`` trains, and its work reaches merges. A test that fails takes the job with it, and the next
one finds another. Its tape is checked when it ends. The island of ``WEST``, whose node group is cordoned from the beginning,
is no part of that.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core import commands, events
from orchestrator.runtime import cluster
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.system.roots import AllowedRoots
from tests.ray.conftest import start_in, starting, wait_until_free
from tests.ray.jobs import ENDLESS, GROUPS, PLUGGED, Job, assert_sound, synthetic

WEST = "us-west"
FAILED = pytest.StashKey[bool]()


class SharedJob:
    """A job that is started when there is need of it."""

    def __init__(self, port: RayControlPort, root: Path) -> None:
        self._port, self._root = port, root
        self._job: Job | None = None

    def whole(self) -> Job:
        """Once it is so."""
        job = self._job = self._job or self._start()
        job.wait_until(lambda: job.answers() and _is_whole(job), "all islands training and contributing")
        return job

    def end(self) -> None:
        """Its tape is sound."""
        job, self._job = self._job, None
        if job is not None:
            job.command(commands.Cancel())
            job.wait_for_end()
            assert_sound(job)

    def end_by_force(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            cluster.end_actors_of(job.id)
            wait_until_free(self._port)

    def _start(self) -> Job:
        from tests.ray import plugged  # here, because it imports Ray

        document = synthetic(
            ENDLESS,
            (*GROUPS, WEST),
            seed=secrets.randbelow(1 << 30),
            # a test holds an island silent for as long as it needs: nobody gives it up meanwhile
            recovery={"restarts_max": 100, "backoff_max_s": 1.0, "suspect_timeout_s": 600.0},
            transport={"inline_bytes_max": 0, "shared_memory": False, "tls": "always"},
            synchroniser={"durability": {"snapshot_every_records": 100}, "wire": "int4"},
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("orchestrator.runtime.synchroniser_actor.SynchroniserActor", plugged.SynchroniserActor)
            return start_in(self._root, self._port, document, PLUGGED, {WEST: "nobody may come yet"})


def _is_whole(job: Job) -> bool:
    islands = {island["island"]: island for island in job.last["view"]["islands"]}
    return all(_contributes(job, islands[group]) for group in GROUPS)


def _contributes(job: Job, island: dict[str, Any]) -> bool:
    since = job.at_of(events.IslandPlaced, island["island"], island["incarnation"])
    merged_at = island["last_merge_at"]
    return island["state"] == "training" and None not in (since, merged_at) and merged_at > since


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(scope="package")
def shared_job(port: RayControlPort, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedJob]:
    shared = SharedJob(port, tmp_path_factory.mktemp("shared"))
    yield shared
    shared.end()
    wait_until_free(port)


@pytest.fixture
def job(shared_job: SharedJob, request: pytest.FixtureRequest) -> Iterator[Job]:
    """Whole. Whoever asks for it leaves it such that it becomes whole again."""
    try:
        yield shared_job.whole()
    finally:
        if request.node.stash.get(FAILED, True):
            shared_job.end_by_force()


@pytest.fixture
def last_job(shared_job: SharedJob) -> Iterator[Job]:
    """Whole, and this test ends it."""
    try:
        job = shared_job.whole()
        assert_sound(job)
        yield job
    finally:
        shared_job.end_by_force()


@pytest.fixture
def start(job: Job, port: RayControlPort, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs beside the one that is shared, which may go on from its checkpoints."""
    with starting(port, tmp_path, AllowedRoots.only(job.run_dir)) as start_one:
        yield start_one
