"""The whole service on Ray, by hand: command line, REST, a SIGKILL of the service, of an island, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as parse

from api.metrics.catalogue import FAMILIES
from orchestrator.core.messages import Progress
from orchestrator.runtime import processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.tape.storage import read_tape
from tests import forked
from tests.api.installation import Installation
from tests.attack.test_permissions import open_to_others
from tests.harness.reports import of_kind
from tests.ray.jobs import ENDLESS, GROUPS, PAUSE_S, STEP_S, STEPS_ON, gone, synthetic
from tests.ray.test_embedded import beyond_loopback
from tests.waiting import PATIENCE_S, wait_until

STEPS = round(4 / STEP_S)
"""Of the job that ends by itself; the others train until they are cancelled, however slow the machine is."""
OF_A_RECOVERY = {"atoll_recovery_seconds", "atoll_recovery_part_seconds", "atoll_catch_ups"}
NOT_OF_THIS_JOB = {  # nobody waits, nothing is struck or goes wrong, and no text has bytes or sources
    "atoll_held_out_bits_per_byte",
    "atoll_held_out_preference_accuracy_ratio",
    "atoll_held_out_preference_margin_nats",
    "atoll_held_out_source_loss_nats",
    "atoll_standby_seconds",
    "atoll_chaos_faults",
    "atoll_refusals",
    "atoll_job_failed_timestamp_seconds",
    "atoll_checkpoint_interval_seconds",
}
OF_EVERY_JOB = (
    {name for name, family in FAMILIES.items() if "atoll_job" in family.labels} - OF_A_RECOVERY - NOT_OF_THIS_JOB
)


class Hands(Installation):
    """A user of one installation on Ray, at the command line."""

    def json(self, *arguments: str) -> Any:
        return json.loads(self.atoll(*arguments, "--json"))

    def up(self) -> str:
        groups = self.file("groups", {"node_groups": [{"name": name, "region": name, "cpus": 4} for name in GROUPS]})
        return self.atoll("up", "--runs", str(self.runs), "--groups", groups)

    def file(self, name: str, document: dict[str, Any]) -> str:
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document))
        return str(path)

    def island(self, job: str, name: str) -> dict[str, Any]:
        return next(island for island in self.json("islands", job) if island["island"] == name)


@pytest.fixture
def hands(tmp_path: Path) -> Iterator[Hands]:
    installation = Hands(tmp_path)
    yield installation
    installation.atoll("down")


@pytest.mark.soak("what the tutorial does by hand, and test_service_killed.py to a service")
def test_jobs_outlive_the_service_and_obey_the_next_one(hands: Hands) -> None:
    hands.up()
    cluster = ClusterFile.find(hands.home.path)
    assert cluster is not None

    wrong = hands.file("wrong", synthetic(0, groups=("us-east", "moon"), name="not a name"))
    said = hands.atoll("submit", wrong, code=2)
    assert all(path in said for path in ("name:", "budget.steps:", "islands.1.node_group:")), said
    assert hands.json("jobs") == []
    assert not hands.runs.exists() or not list(hands.runs.iterdir())

    job = hands.json("submit", hands.file("job", synthetic(ENDLESS)))["job"]
    other = hands.json("submit", hands.file("other", synthetic(ENDLESS, groups=("us-east",), name="other")))["job"]
    wait_until(lambda: hands.island(job, "asia")["state"] == "training", "asia trains", PAUSE_S)

    address = hands.home.address()
    assert address is not None
    everybody = [*processes.marked(cluster.id), psutil.Process(address.pid)]
    assert beyond_loopback(everybody) == [], "islands and the service's driver included"
    assert open_to_others(hands.home.path) == open_to_others(hands.runs) == []

    os.kill(address.pid, signal.SIGKILL)
    wait_until(lambda: not hands.home.running(), "the service is gone")
    hands.atoll("status", job, code=3)
    tape = hands.runs / job / "tape.jsonl"
    alone_from = read_tape(tape).count
    wait_until(
        lambda: min(steps_since(tape, alone_from).values()) >= STEPS_ON, "all train on while no service is up", PAUSE_S
    )

    assert "starting the service" in hands.up()
    kept = ClusterFile.find(hands.home.path)
    assert kept is not None
    assert kept.id == cluster.id, "the cluster is the one that was up"
    assert {found["job"]: found["state"] for found in hands.json("jobs")} == {job: "running", other: "running"}

    before = hands.island(job, "asia")
    killed = hands.json("kill", job, "asia", "--stay-down")
    assert killed["state"] == "accepted"
    wait_until(lambda: gone(before["pid"]), "asia's process is gone")
    wait_until(lambda: hands.island(job, "asia")["state"] == "stopped", "asia stays down", PAUSE_S)
    readded = hands.json("readd", job, "asia")
    assert (readded["state"], readded["island"]) == ("accepted", "asia")
    assert hands.json("cancel", other)["state"] == "accepted"

    wait_until(lambda: job_series(hands, job) >= OF_EVERY_JOB | OF_A_RECOVERY, "what a live job exposes", PAUSE_S)
    brief = hands.json("submit", hands.file("brief", synthetic(STEPS, groups=("us-east",), name="brief")))["job"]
    assert "completed" in hands.atoll("watch", brief)
    report = hands.json("report", brief)
    assert report["outcome"] == "completed"
    assert report["tokens_trained"] >= hands.json("status", brief)["token_budget"]

    assert hands.island(job, "asia")["incarnation"] == before["incarnation"] + 1
    assert hands.json("cancel", job)["state"] == "accepted"
    assert "cancelled" in hands.atoll("watch", job, code=1)
    assert hands.json("status", other)["state"] == hands.json("status", job)["state"] == "cancelled"
    for ended in (job, brief):
        assert "identical" in forked.atoll("replay", str(hands.runs / ended)).stdout

    hands.atoll("down")
    assert processes.marked(cluster.id) == []
    assert not Path(cluster.temp_dir).exists()
    assert processes_naming(hands.folder) == []


def steps_since(tape: Path, record: int) -> dict[str, int]:
    """Steps of each island by its reports behind the record of this number."""
    steps = dict.fromkeys(GROUPS, 0)
    for group in GROUPS:
        reports = [
            report.steps_total
            for report in of_kind((one.event for one in read_tape(tape).records[record:]), Progress)
            if report.island == group
        ]
        steps[group] = reports[-1] - reports[0] if reports else 0
    return steps


def job_series(hands: Hands, job: str) -> set[str]:
    """Families of ``/metrics`` that tell something of this job."""
    address, token = hands.home.address(), (hands.home.path / "token").read_text().strip()
    assert address is not None
    told = httpx.get(f"{address.url}/metrics", headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE_S).text
    return {family.name for family in parse(told) if any(s.labels.get("atoll_job") == job for s in family.samples)}


def processes_naming(folder: Path) -> list[str]:
    """Command lines of live processes that work in this folder."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(folder) in line]
