"""A service of a newer build than the synchronisers that go on: what they do not know they refuse, and they train on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api.jobs.service import Service
from api.schemas import JobState
from api.storage.store import JobRow, Store
from orchestrator.core.commands import Inject
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.tape import codec
from orchestrator.tape.replay import replay
from orchestrator.tape.storage import read_tape
from tests.ray.jobs import Job, synthetic

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


@dataclasses.dataclass(frozen=True, slots=True)
class Banish:
    """A command of a build to come."""

    island: str


def test_a_synchroniser_refuses_a_command_of_a_newer_service_with_the_reason_and_its_job_trains_on(
    start: Callable[..., Job], port: RayControlPort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(codec.KINDS, "banish", Banish)  # here, and not in the synchroniser's process
    document = synthetic(steps=100_000, groups=("us-east", "asia"))
    job = start(document)
    job.wait_for_merge("asia", 1)
    store = Store(f"sqlite:///{tmp_path / 'store.sqlite'}")
    store.add_job(row_of(job, document))
    service: Any = Service(port, store, tmp_path)  # type: ignore[arg-type]

    refused = service.submit_command(job.id, Banish("asia"), "me")
    assert (refused.kind, refused.state) == ("banish", "refused")
    assert f"The synchroniser of job {job.id} cannot carry it out: no command of the kind 'banish'" in refused.detail
    struck = service.submit_command(job.id, Inject("flood", "asia"), "me")  # type: ignore[arg-type]
    assert (struck.kind, struck.state) == ("flood", "refused")
    assert "does not know the fault 'flood'" in struck.detail
    assert [row.accepted for row in store.commands(job.id)] == [False, False], "nothing is tried again"
    store.close()

    before = job.status()["view"]["global_version"]
    job.wait_until(lambda: job.status()["view"]["global_version"] > before + 8, "merges after that")
    status = job.status()
    assert status["view"]["phase"] == "running"
    assert not {refused.command, struck.command} & status["commands"].keys()
    tape = read_tape(job.run_dir / "tape.jsonl")
    assert replay(tape).exact
    assert not [r for r in tape.records if getattr(r.event, "caller", "") == "me"], "neither was ever asked of the core"


def row_of(job: Job, document: dict[str, Any]) -> JobRow:
    return JobRow(
        job=job.id,
        name="job",
        spec=document,
        run_dir=str(job.run_dir),
        caller="me",
        submitted_at=1.0,
        state=JobState.RUNNING.value,
    )
