"""A service with a job that is under way, and a Prometheus that scrapes it with the deployed configuration."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from orchestrator.system.ports import free_port
from tests.api.installation import ROOT, Installation
from tests.programs import required
from tests.waiting import wait_until

DEPLOYED = ROOT / "deploy" / "prometheus"
SCRAPES_MIN = 6
SCRAPE_EVERY = "1s"
SCRAPE_JOB = "monitoring/atoll-service"
"""As the Prometheus operator names what a PodMonitor scrapes: no query and no alert may rest on our own name."""


@dataclass(frozen=True, slots=True)
class Voyaging:
    """The service, its job, and the file with the token that may read its metrics."""

    installation: Installation
    url: str
    job: str
    credentials: Path

    def metrics(self) -> str:
        token = self.credentials.read_text().strip()
        answer = httpx.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {token}"})
        answer.raise_for_status()
        return answer.text


@pytest.fixture(scope="session")
def voyaging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Voyaging]:
    """Nobody may end it. One island was killed by a command, and one request named a job that is not there."""
    installation = Installation(tmp_path_factory.mktemp("voyage"))
    installation.atoll("up", "--runs", str(installation.runs), "--control", "tests.metrics.voyage:connect")
    try:
        address = installation.home.address()
        assert address is not None
        knobs = {"fragments": 4, "interval_steps": 12, "quorum": 2, "wire": {"up": "bfloat16", "down": "float32"}}
        with installation.client() as client:
            job = client.submit(installation.spec(steps=10_000_000, synchroniser=knobs)).job
            client.kill(job, "asia")
        credentials = installation.home.path / "token"
        token = credentials.read_text().strip()
        httpx.get(f"{address.url}/v1/jobs/none", headers={"Authorization": f"Bearer {token}"})
        yield Voyaging(installation, address.url, job, credentials)
    finally:
        installation.atoll("down")


@dataclass(slots=True)
class Prometheus:
    """``at`` is when queries are asked for: once it has scraped enough, nothing that comes later changes an answer."""

    url: str
    at: float | None = None

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that the expression gives. Fails with Prometheus's own words if it is wrong."""
        asked = {"query": expression} | ({} if self.at is None else {"time": self.at})
        answer = httpx.get(f"{self.url}/api/v1/query", params=asked).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def has_scraped(self) -> bool:
        """Often enough, and its latest scrape was answered; from then on that is the present."""
        found = self.query(f"sum_over_time(up[1h]) >= {SCRAPES_MIN} and up == 1")
        self.at = float(found[0]["value"][0]) if found else None
        return bool(found)


@pytest.fixture(scope="session")
def prometheus(voyaging: Voyaging, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has scraped a few times. Its own port, its own storage; ended by its process."""
    program, folder = required("prometheus"), tmp_path_factory.mktemp("prometheus")
    document = yaml.safe_load((DEPLOYED / "prometheus.yml").read_text())
    document["global"] |= {"scrape_interval": SCRAPE_EVERY, "scrape_timeout": SCRAPE_EVERY, "evaluation_interval": "1s"}
    document["rule_files"] = [str(DEPLOYED / "alerts.yml")]
    (scraped,) = document["scrape_configs"]
    assert "honor_labels" not in scraped
    scraped["job_name"] = SCRAPE_JOB
    scraped["static_configs"] = [{"targets": [voyaging.url.removeprefix("http://")]}]
    scraped["authorization"]["credentials_file"] = str(voyaging.credentials)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(document))
    port = free_port()
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            started = Prometheus(f"http://127.0.0.1:{port}")
            wait_until(started.ready)
            wait_until(started.has_scraped)
            yield started
        finally:
            process.terminate()
