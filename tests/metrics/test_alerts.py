"""Alerts: valid, each fires and clears, each has its page in the runbook, and none asks for a metric that nobody exports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.client import Client
from api.metrics.catalogue import FAMILIES
from orchestrator.errors import AtollError
from orchestrator.system.ports import free_port
from tests.api.installation import Installation
from tests.attack.test_full_disk import small_disk
from tests.documents import ROOT, RUNBOOK, headings, parse, quoted
from tests.metrics.conftest import Prometheus, scrape_of, scraping
from tests.programs import required
from tests.waiting import PATIENCE_S, wait_until

RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
CASES = ROOT / "tests" / "metrics" / "alerts_test.yml"
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
NAMES = [rule["alert"] for rule in ALERTS]


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        [required("promtool"), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_and_configuration_are_valid(tmp_path: Path) -> None:
    promtool("check", "rules", str(RULES))
    for name in ("prometheus.yml", "alerts.yml"):
        (tmp_path / name).write_text((RULES.parent / name).read_text())
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / "token").write_text("a viewer's")
    promtool("check", "config", str(tmp_path / "prometheus.yml"))


def test_every_alert_fires_and_clears() -> None:
    promtool("test", "rules", str(CASES))
    told = CASES.read_text()
    assert {name for name in NAMES if f'alertname="{name}"' in told} == set(NAMES)


def test_the_runbook_has_a_section_for_every_alert_and_for_no_other() -> None:
    assert re.findall(r"^## (Atoll.+)$", RUNBOOK.read_text(), re.MULTILINE) == NAMES


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_an_alert_tells_whom_to_wake_and_where_to_read(rule: dict) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]
    assert rule["annotations"]["runbook_url"] == f"deploy/RUNBOOK.md#{rule['alert'].lower()}"


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_an_alert_leads_to_a_heading_that_there_is_and_names_commands_that_there_are(rule: dict) -> None:
    path, _, heading = rule["annotations"]["runbook_url"].partition("#")
    assert heading in headings((ROOT / path).read_text())
    told = re.sub(r"{{.*?}}", "demo-1", "\n".join(rule["annotations"].values()))
    for words in quoted(told):
        parse(words)


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_the_runbook_says_of_an_alert_what_it_means_what_to_look_at_and_what_to_do(rule: dict) -> None:
    section = RUNBOOK.read_text().partition(f"## {rule['alert']}\n")[2].partition("\n## ")[0]
    for part in ("**Means**", "**Look**", "**Do**"):
        assert part in section


@pytest.mark.parametrize("rule", ALERTS, ids=NAMES)
def test_an_alert_asks_only_for_metrics_that_exist(rule: dict) -> None:
    exported = frozenset().union(*(family.series for family in FAMILIES.values()))
    assert set(re.findall(r"\batoll_\w+", rule["expr"])) - {"atoll_job"} <= exported


# ── provoked, on a real Prometheus ────────────────────────────────────────────────────────────────────────────────────


def hastened(rules: dict[str, Any]) -> dict[str, Any]:
    """The rules with every time so short that a test can wait for it. What has been a target is remembered as long."""

    def shorter(expression: str) -> str:
        expression = re.sub(r"(?<!atoll_build_info)\[\d+[smhd]\]", "[12s]", expression)
        expression = re.sub(r">= 3600", ">= 1", expression)
        return re.sub(r"(atoll_job_age_seconds|atoll_checkpoint_age_seconds) > \d+", r"\1 > 0", expression)

    groups = [
        {**group, "rules": [{**rule, "expr": shorter(rule["expr"]), "for": "1s"} for rule in group["rules"]]}
        for group in rules["groups"]
    ]
    return {"groups": groups}


OF_WEARY = {
    *("AtollSynchroniserCrashLoop", "AtollIslandHangs", "AtollHelperAway", "AtollIslandQuarantined", "AtollMergesFail"),
    *("AtollFilesDamaged", "AtollJournalSlow", "AtollMergesThin", "AtollGoodputLow", "AtollIslandFlapping"),
    *("AtollIslandFailed", "AtollRefusalsRising", "AtollPayloadsCorrupt", "AtollLineHindered"),
    *("AtollCheckpointFailing", "AtollCheckpointStale", "AtollIslandsWaiting"),
}
OF_JOBS = {
    *OF_WEARY,
    *("AtollQuorumUnreachable", "AtollJournalFailing", "AtollMergesStalled", "AtollJobSilent", "AtollJobFailed"),
    "AtollJobPausedAtLimit",
    *("AtollJobFailureOpen", "AtollStoreFailing", "AtollStoreSlow", "AtollSynchroniserFenced"),
    *("AtollQueueStuck", "AtollCertificateExpiring", "AtollCertificateExpired", "AtollDiskLow", "AtollDiskFull"),
}
OF_CLUSTER = {"AtollHeadDown", "AtollApiErrors"}
OF_SERVICE = {"AtollTargetMissing", "AtollServiceDown"}


def test_every_alert_is_provoked() -> None:
    assert set(NAMES) == OF_JOBS | OF_CLUSTER | OF_SERVICE


@pytest.mark.soak("a minute of scrapes, for what promtool has of each rule")
def test_every_trouble_rings_on_a_real_prometheus(tmp_path: Path) -> None:
    """Jobs, head, certificates and disk of a service are in trouble at once, then its head is gone, then the service.

    Before the service is there, nothing is scraped; that rings, too. The statuses of jobs are those of simulated ones, in
    which the trouble is said as a real job says it. The disk is a real one, which fills.
    """
    installation = Installation(tmp_path / "installation")
    port, switches = free_port(), installation.home.path
    (deployed,) = yaml.safe_load((RULES.parent / "prometheus.yml").read_text())["scrape_configs"]
    scrape = scrape_of(f"http://127.0.0.1:{port}", switches / "token", deployed)
    (tmp_path / "prometheus").mkdir()
    with (
        small_disk(installation.runs, megabytes=64),
        scraping(tmp_path / "prometheus", scrape, hastened(yaml.safe_load(RULES.read_text()))) as prometheus,
    ):
        wait_until(lambda: prometheus.firing() == {"AtollTargetMissing"})
        control = ("--control", "tests.metrics.voyage:troubled", "--port", str(port))
        installation.atoll("up", "--runs", str(installation.runs), *control)
        try:
            with installation.client() as client:
                for name in ("weary", "quorum", "limit", "disk", "store", "fenced", "stalled", "silent", "lost"):
                    client.submit(installation.spec(steps=10**7, name=name, checkpoints={"every_s": 0.1}))
                client.submit(installation.spec(name="large", islands=[{"node_group": "asia", "cpus": 4}]))
                (switches / "asia-is-gone").touch()
                expect(prometheus, OF_JOBS, lambda: fill(installation.runs / "ballast", 1 << 17))
                (switches / "head-is-gone").touch()
                expect(prometheus, OF_CLUSTER, lambda: refused(client))
            address = installation.home.address()
            assert address is not None
            os.kill(address.pid, signal.SIGKILL)
            expect(prometheus, {"AtollServiceDown"}, lambda: None)
        finally:
            (switches / "head-is-gone").unlink(missing_ok=True)
            installation.atoll("down")


def expect(prometheus: Prometheus, names: set[str], meanwhile: Callable[[], object]) -> None:
    """Wait until each of these alerts has fired, and do something at every look."""
    fired: set[str] = set()

    def all_fired() -> bool:
        meanwhile()
        fired.update(prometheus.firing())
        return names <= fired

    try:
        wait_until(all_fired, pause_s=0.3)
    except AssertionError as error:
        raise AssertionError(f"these did not fire: {sorted(names - fired)}") from error


def refused(client: Client) -> None:
    with pytest.raises(AtollError):
        client.node_groups()


def fill(ballast: Path, size: int) -> None:
    with ballast.open("ab") as file, suppress(OSError):
        file.write(b"\0" * size)
