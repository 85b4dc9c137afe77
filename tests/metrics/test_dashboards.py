"""Dashboards: what is committed is what the source makes, every panel is explained, and every query returns data."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from api.metrics.catalogue import FAMILIES
from dashboards import islands
from dashboards.build import rendered
from dashboards.panels import WIDTH
from orchestrator.core.vocabulary import IslandState
from tests.metrics.conftest import Prometheus
from tests.waiting import wait_until

FILES = dict(rendered())
BOARDS = {path.stem: json.loads(text) for path, text in FILES.items()}
OURS = re.compile(r"\batoll_\w+")


def panels(name: str) -> Iterator[dict[str, Any]]:
    yield from (panel for panel in BOARDS[name]["panels"] if panel["type"] != "row")


QUERIES = [
    pytest.param(target["expr"], id=f"{name}: {panel['title']} {target['refId']}")
    for name in BOARDS
    for panel in panels(name)
    for target in panel["targets"]
]
QUERIES += [
    pytest.param(mark["expr"], id=f"{name}: mark {mark['name']}")
    for name, board in BOARDS.items()
    for mark in board["annotations"]["list"]
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_committed_file_is_what_the_source_makes(path: Any) -> None:
    assert path.read_text() == FILES[path], "run `make dashboards`"


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_says_what_it_shows_and_in_which_unit(name: str) -> None:
    for panel in panels(name):
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]
        assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("name", BOARDS)
def test_panels_lie_side_by_side_and_fill_their_lines(name: str) -> None:
    taken: dict[tuple[int, int], str] = {}
    lines: dict[int, int] = {}
    for panel in BOARDS[name]["panels"]:
        at = panel["gridPos"]
        lines[at["y"]] = lines.get(at["y"], 0) + at["w"]
        for cell in [(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]:
            assert cell not in taken, f"{panel['title']} lies over {taken[cell]}"
            taken[cell] = panel["title"]
    assert set(lines.values()) == {WIDTH}
    numbers = [panel["id"] for panel in BOARDS[name]["panels"]]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("name", BOARDS)
def test_a_panel_without_data_says_so_and_one_with_lines_of_islands_is_bounded(name: str) -> None:
    for panel in panels(name):
        assert panel["fieldConfig"]["defaults"]["noValue"]
        if panel["type"] == "timeseries":
            for target in panel["targets"]:
                by_island = "{{island}}" in target["legendFormat"]
                assert not by_island or target["expr"].startswith(("topk(", "bottomk(")), target["expr"]


def tables() -> Iterator[Any]:
    for name in BOARDS:
        for panel in panels(name):
            if panel["type"] == "table":
                yield pytest.param(panel, id=f"{name}: {panel['title']}")


@pytest.mark.parametrize("panel", list(tables()))
def test_a_table_shows_fields_that_its_queries_give(panel: dict[str, Any], prometheus: Prometheus) -> None:
    queries = {target["refId"]: target["expr"] for target in panel["targets"]}
    assert all(target["instant"] and target["format"] == "table" for target in panel["targets"])
    values = {f"Value #{ref}" for ref in queries} if len(queries) > 1 else {"Value"}
    steps = {step["id"]: step["options"] for step in panel["transformations"]}
    fields = steps["filterFieldsByName"]["include"]["names"]
    assert set(steps["organize"]["renameByName"]) == set(fields)
    assert {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]} == set(
        steps["organize"]["renameByName"].values()
    )
    labels = set()
    for expression in queries.values():
        for series in prometheus.query(expression.replace("$job", ".*")):
            labels |= series["metric"].keys()
            assert len(queries) == 1 or steps["joinByField"]["byField"] in series["metric"]
    of_alerts = {"alertname", "severity", "atoll_job", "island", "place", "group", "path"}
    assert set(fields) - values <= labels | of_alerts
    assert values & set(fields)


def test_the_timeline_has_a_colour_for_every_state() -> None:
    assert {name for name, _ in islands.STATES} == {state.value for state in IslandState}


OF_ALERTS = ["atoll_job_age_seconds", "atoll_job_paused_at_limit", "atoll_checkpoint_interval_seconds"]


def test_every_metric_of_a_job_is_on_some_dashboard() -> None:
    shown = {name for query in QUERIES for name in OURS.findall(str(query.values[0]))}
    unseen = [family.name for family in FAMILIES.values() if not family.series & shown]
    assert unseen == OF_ALERTS


OF_TEXT = (
    "atoll_held_out_bits_per_byte",
    "atoll_held_out_preference_accuracy_ratio",
    "atoll_held_out_preference_margin_nats",
    "atoll_held_out_source_loss_nats",
)
"""A simulated job has no text."""
OF_MIXTURES = (
    "topk(10, atoll_island_expert_share_max_ratio",
    "bottomk(10, atoll_island_expert_entropy_ratio",
    "topk(10, atoll_island_loss_after_adoption_nats",
    "atoll_fragment_router_distance",
    "atoll_fragment_router_travel",
)
"""A simulated job has no experts."""
OF_ADVICE = ("max by (atoll_job) (atoll_autopilot_", "max by (atoll_job) (time() - atoll_autopilot_")
"""It has no autopilot."""
OF_TROUBLE = (
    "1 - atoll_helper_up",
    "1 - atoll_shard_up",
    "increase(atoll_helper_restarts_total",
    "topk(10, atoll_island_overdue_seconds",
    "ALERTS{",
    "min by (path) ((atoll_disk_free_bytes /",
    "increase(atoll_checkpoint_failures",
    "atoll_checkpoint_",
    "max by (atoll_job) (atoll_checkpoint_age",
)
"""A simulated job has no helpers and takes no checkpoints, no island of it hangs, no alert fires, and its disk does not fill
up; these show what is above zero alone."""


@pytest.mark.parametrize(
    "expression",
    [query for query in QUERIES if not str(query.values[0]).startswith(OF_TEXT + OF_MIXTURES + OF_ADVICE + OF_TROUBLE)],
)
def test_a_query_returns_data_from_a_real_scrape(expression: str, prometheus: Prometheus) -> None:
    asked = expression.replace("$__rate_interval", "1m").replace("$job", ".*")
    assert "$" not in asked
    values = [float(series["value"][1]) for series in prometheus.query(asked)]
    assert any(math.isfinite(value) for value in values), f"{asked} returned {values}"


def test_an_operators_scrape_has_no_series_twice_and_every_rule_can_be_evaluated(prometheus: Prometheus) -> None:
    (target,) = prometheus.query("up")
    names = {"job": "atoll/atoll-service", "namespace": "atoll", "container": "service", "endpoint": "http"}
    assert names.items() <= target["metric"].items()
    assert prometheus.query('{__name__=~"atoll_.+", exported_job!=""}') == []
    assert prometheus.query('count by (__name__, job) ({__name__=~"atoll_.+", job!="atoll/atoll-service"})') == []
    (dropped,) = prometheus.query("scrape_samples_scraped - scrape_samples_post_metric_relabeling")
    assert float(dropped["value"][1]) == 0
    wait_until(lambda: all(rule["health"] != "unknown" for rule in prometheus.rules()))
    assert {rule["name"]: rule.get("lastError") for rule in prometheus.rules() if rule["health"] != "ok"} == {}
