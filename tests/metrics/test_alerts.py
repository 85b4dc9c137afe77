"""Alerts: valid, each fires and clears, each has its page in the runbook, and none asks for a metric that nobody exports."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from api.metrics.catalogue import FAMILIES
from tests.documents import ROOT, RUNBOOK
from tests.programs import required
from tests.waiting import PATIENCE_S

RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"
CASES = ROOT / "tests" / "metrics" / "alerts_test.yml"
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
AWAITED = {
    "atoll_islands_waiting",
}
"""Metrics that are not exported yet."""
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
def test_an_alert_asks_only_for_metrics_that_exist(rule: dict) -> None:
    exported = frozenset().union(*(family.series for family in FAMILIES.values()))
    assert set(re.findall(r"\batoll_\w+", rule["expr"])) - {"atoll_job"} - AWAITED <= exported
