"""A service with a job that is under way, and a Prometheus that scrapes it as prometheus-operator has it scraped.

The scrape has the deployed authorization, and the relabelling that the operator makes of our PodMonitor; the rules are those
of our PrometheusRule. So queries and alerts rest on no name that only a configuration of ours would give.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from api.commands.nodes import shipped_files
from orchestrator.kubernetes.manifests import rendered
from orchestrator.kubernetes.values import Values
from orchestrator.system.ports import free_port
from tests.api.installation import ROOT, Installation
from tests.programs import required
from tests.waiting import wait_until

DEPLOYED = ROOT / "deploy" / "prometheus"
SCRAPES_MIN = 6
SCRAPE_EVERY = "1s"
VALUES = {
    "image": "atoll:1",
    "insecure": True,
    "clusters": [{"name": "home", "region": "local", "head": {}}],
    "groups": [{"name": "one", "cpus": 1, "memory_gib": 1.0}],
    "monitoring": {"namespace": "monitoring"},
}


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


@pytest.fixture(scope="package")
def voyaging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Voyaging]:
    """Nobody may end it. One island was killed by a command, and one request named a job that is not there."""
    installation = Installation(tmp_path_factory.mktemp("voyage"))
    installation.atoll("up", "--runs", str(installation.runs), "--control", "tests.metrics.voyage:connect")
    try:
        address = installation.home.address()
        assert address is not None
        knobs = {"fragments": 4, "interval_steps": 12, "quorum": 2, "wire": {"up": "bfloat16", "down": "float32"}}
        with installation.client() as client:
            spec = installation.spec(steps=10_000_000, synchroniser=knobs)
            spec["islands"] = [{**island, "price": {"chip_hour": 2.0}} for island in spec["islands"]]
            job = client.submit(spec).job
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

    def rules(self) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.url}/api/v1/rules").json()
        return [rule for group in answer["data"]["groups"] for rule in group["rules"]]

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        return {rule["name"] for rule in self.rules() if rule.get("state") == "firing"}

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def has_scraped(self) -> bool:
        """Often enough, and its latest scrape has the job, which a busy service leaves out; that is the present now."""
        found = self.query(
            f"sum_over_time(up[1h]) >= {SCRAPES_MIN} and up == 1 and on (instance) atoll_job_answers == 1"
        )
        self.at = float(found[0]["value"][0]) if found else None
        return bool(found)


def discovered_labels(labels: dict[str, str]) -> dict[str, str]:
    return {f"__meta_kubernetes_pod_label_{re.sub('[^A-Za-z0-9_]', '_', key)}": value for key, value in labels.items()}


def operated() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the operator makes of a rendered PodMonitor, for a target of ours, and the rendered rules.

    The names are those of its generator (pkg/prometheus/promcfg.go). The labels that discovery would give the target are
    those of the rendered pod.
    """
    values = Values.model_validate(VALUES)
    manifests = {each["kind"]: each for each in rendered(values, values.home, shipped_files())}
    monitor, pod = manifests["PodMonitor"], manifests["Deployment"]["spec"]["template"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    (container,) = pod["spec"]["containers"]
    name = f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}"
    discovered = {
        **discovered_labels(pod["metadata"]["labels"]),
        "__meta_kubernetes_namespace": values.namespace,
        "__meta_kubernetes_pod_name": "atoll-service-5c8f-x2x",
        "__meta_kubernetes_pod_container_name": container["name"],
        "__meta_kubernetes_pod_container_port_name": container["ports"][0]["name"],
    }
    chosen = discovered_labels(monitor["spec"]["selector"]["matchLabels"]).items()
    keeping = [{"action": "keep", "source_labels": [key], "regex": value} for key, value in chosen]
    copied = {"namespace": "namespace", "container": "pod_container_name", "pod": "pod_name"}
    scrape = {
        "job_name": f"podMonitor/{name}/0",
        "honor_labels": False,
        "metrics_path": endpoint["path"],
        "static_configs": [{"labels": discovered}],
        "relabel_configs": [
            {"source_labels": ["job"], "target_label": "__tmp_prometheus_job_name"},
            *keeping,
            {
                **{"action": "keep", "source_labels": ["__meta_kubernetes_pod_container_port_name"]},
                "regex": endpoint["port"],
            },
            *(
                {"source_labels": [f"__meta_kubernetes_{source}"], "target_label": target}
                for target, source in copied.items()
            ),
            {"target_label": "job", "replacement": name},
            {"target_label": "endpoint", "replacement": endpoint["port"]},
        ],
    }
    return scrape, manifests["PrometheusRule"]["spec"]


@contextmanager
def scraping(folder: Path, scrape: dict[str, Any], rules: dict[str, Any]) -> Iterator[Prometheus]:
    """A Prometheus with its own port and storage, ended by its process."""
    document = yaml.safe_load((DEPLOYED / "prometheus.yml").read_text())
    document["global"] |= {"scrape_interval": SCRAPE_EVERY, "scrape_timeout": SCRAPE_EVERY, "evaluation_interval": "1s"}
    document["rule_files"] = [str(folder / "rules.yml")]
    document["scrape_configs"] = [scrape]
    (folder / "rules.yml").write_text(yaml.safe_dump(rules))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(document))
    port = free_port()
    command = [required("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            started = Prometheus(f"http://127.0.0.1:{port}")
            wait_until(started.ready)
            yield started
        finally:
            process.terminate()


def scrape_of(url: str, credentials: Path, scrape: dict[str, Any]) -> dict[str, Any]:
    """Return the scrape configuration for this target, with the token in this file."""
    (deployed,) = yaml.safe_load((DEPLOYED / "prometheus.yml").read_text())["scrape_configs"]
    (target,) = scrape["static_configs"]
    configs = [target | {"targets": [url.removeprefix("http://")]}]
    authorization = deployed["authorization"] | {"credentials_file": str(credentials)}
    return scrape | {"static_configs": configs, "authorization": authorization}


@pytest.fixture(scope="package")
def prometheus(voyaging: Voyaging, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has scraped a few times, as the operator configures it."""
    scrape, rules = operated()
    scrape, folder = scrape_of(voyaging.url, voyaging.credentials, scrape), tmp_path_factory.mktemp("prometheus")
    with scraping(folder, scrape, rules) as started:
        subprocess.run([required("promtool"), "check", "config", folder / "prometheus.yml"], check=True)
        wait_until(started.has_scraped)
        yield started
