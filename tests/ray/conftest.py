"""One embedded Ray cluster for all tests of this folder."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core import commands
from orchestrator.runtime import cluster, embedded
from orchestrator.runtime.control_port import RayControlPort, connect
from orchestrator.runtime.groups import DEFAULT_GROUPS
from orchestrator.specification.config import parse_job
from orchestrator.specification.training_sections import TrainerSection
from orchestrator.system.roots import AllowedRoots
from tests.ray.jobs import STEPS_ON, Job
from tests.ray.reign import Reign, reigning
from tests.waiting import wait_until


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("home")
    embedded.up(folder, DEFAULT_GROUPS)
    yield folder
    embedded.down(folder)


@pytest.fixture(scope="package")
def port(home: Path) -> Iterator[RayControlPort]:
    connected = connect(home)
    yield connected
    connected.close()


def start_in(
    folder: Path,
    port: RayControlPort,
    document: dict[str, Any],
    trainer: str | None,
    cordoned: dict[str, str],
    roots: AllowedRoots | None = None,
) -> Job:
    """A job that may touch nothing but these roots, else nothing but this folder."""
    job_id = f"job-{uuid.uuid4().hex[:8]}"
    spec = parse_job(document)
    spec = spec.model_copy(update={"trainer": TrainerSection(factory=trainer)}) if trainer else spec
    port.start_job(job_id, spec, folder / job_id, cordoned, roots or AllowedRoots.only(folder))
    return Job(port, job_id, folder / job_id, spec.seed)


def wait_until_free(port: RayControlPort) -> None:
    """Nothing of any job is left."""
    wait_until(
        lambda: all(group["cpus_free"] == group["cpus"] for group in port.node_groups()), "the end of all islands"
    )


@pytest.fixture
def reign(home: Path, tmp_path: Path) -> Iterator[Reign]:
    """A service that may be killed, and the ones after it."""
    with reigning(home, tmp_path) as reign:
        yield reign


@contextmanager
def starting(port: RayControlPort, folder: Path, roots: AllowedRoots | None = None) -> Iterator[Callable[..., Job]]:
    """Starts jobs in this folder; those still running at the end are cancelled.

    One that does not end even so fails its own test only: its actors are ended by force.
    """
    started: list[Job] = []

    def start_one(document: dict[str, Any], trainer: str | None = None, **cordoned: str) -> Job:
        started.append(start_in(folder, port, document, trainer, cordoned, roots))
        return started[-1]

    try:
        yield start_one
        for job in started:
            if not (job.run_dir / "status.json").exists():
                job.command(commands.Cancel())
            job.wait_until((job.run_dir / "status.json").exists, "the end")
    finally:
        for job in started:
            cluster.end_actors_of(job.id)


@pytest.fixture
def start(port: RayControlPort, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts jobs that end with the test, so that the next one finds the fleet free."""
    try:
        with starting(port, tmp_path) as start_one:
            yield start_one
    finally:
        wait_until_free(port)


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Path]]:
    """Who is to write this file of a checkpoint, or is about to do this act, waits while there is the file that is returned:
    until the test's end, or until the test removes it. For jobs with the trainer ``PLUGGED``.
    """
    from tests.ray import plugged  # here, because it imports Ray

    monkeypatch.setattr("orchestrator.runtime.synchroniser_actor.SynchroniserActor", plugged.SynchroniserActor)
    plugs: list[Path] = []

    def plug_one(path: Path) -> Path:
        plugged.PLUGS.mkdir(exist_ok=True)
        plugs.append(plugged.plug_of(path))
        plugs[-1].touch()
        return plugs[-1]

    yield plug_one
    for path in plugs:
        path.unlink(missing_ok=True)


@pytest.fixture
def train_on(plug: Callable[[Path], Path]) -> Callable[..., None]:
    """Returns once the islands of these processes have taken ``STEPS_ON`` steps each, by their own count.

    Whoever holds up something meanwhile has shown that they do not wait for it, however often the machine stands still:
    of an island that waits, this returns never. For jobs with the trainer ``PLUGGED``.
    """
    from tests.ray import plugged  # here, because it imports Ray

    def wait_for_steps(*pids: int) -> None:
        counters = [plug(plugged.steps_of(pid)) for pid in pids]
        wanted = [counter.stat().st_size + STEPS_ON for counter in counters]

        def taken() -> bool:
            return all(counter.stat().st_size >= size for counter, size in zip(counters, wanted, strict=True))

        wait_until(taken, f"{STEPS_ON} steps of each of {pids}")

    return wait_for_steps
