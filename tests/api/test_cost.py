"""What jobs cost: the price file, `atoll cost`, REST and metrics. The guide's page is followed word for word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from api.schemas import JobState
from orchestrator.errors import ConfigurationError
from orchestrator.runtime.groups import read_prices, unknown_prices
from tests.api.installation import CONTROL, ROOT, Installation
from tests.documents import DOCS, blocks
from tests.waiting import wait_until

PRICES = ROOT / "deploy" / "configs" / "prices.yaml"


def test_the_page_on_cost_does_what_it_says(cold: Installation, tmp_path: Path) -> None:
    page = blocks((DOCS / "guide" / "cost.md").read_text())
    file = tmp_path / "prices.yaml"
    file.write_text(next(block.text for block in page if block.kind == "yaml"))
    assert read_prices(file) == read_prices(PRICES)
    cold.up("--prices", str(file))
    with cold.client() as client:
        job = client.submit(cold.spec(steps=60))
        ended = client.wait(job)
        spec = client.specification(job.job).specification
    assert ended.state is JobState.COMPLETED
    assert [entry["price"]["kind"] for entry in spec["islands"]] == ["spot", "on_demand", "on_demand", "reserved"]
    cost = json.loads(cold.atoll("cost", "latest", "--json"))
    table = {line.split("`")[1] for block in page for line in block.text.splitlines() if line.startswith("| `")}
    assert table <= cost.keys()
    seconds = {island: sum(own["seconds"].values()) for island, own in ended.goodput["islands"].items()}
    hourly = {"us-east": 2.1, "us-west": 3.9, "europe": 3.9, "asia": 1.5}
    assert cost["so_far"] <= sum(hourly[island] * spent for island, spent in seconds.items()) / 3600
    assert sum(cost["node_groups"].values()) == pytest.approx(cost["so_far"])
    assert 0 < sum(cost["badput"].values()) < cost["so_far"]
    assert cost["per_merged_million_tokens"] == pytest.approx(cost["so_far"] / ended.goodput["tokens"]["merged"] * 1e6)
    said = cold.atoll("cost", "latest")
    assert "per merged million tokens" in said
    assert "group     asia:" in said
    assert "cost      " in cold.atoll("report", "latest")
    limited = cold.spec(steps=2_000_000) | {"budget": {"steps": 2_000_000, "cost": 0.002}}
    with cold.client() as client:
        ended = client.wait(client.submit(limited))
        assert [command.caller for command in client.commands(ended.job)] == ["budget.cost"]
    assert (ended.state, ended.reason.startswith("finished early by budget.cost")) == (JobState.COMPLETED, True)
    with cold.http() as http:
        metrics = http.get("/metrics").text
    assert f'atoll_cost{{atoll_job="{job.job}",currency="USD"}}' in metrics


def test_a_job_pauses_at_its_limit_and_continues_once_the_limit_is_raised(cold: Installation) -> None:
    cold.up("--prices", str(PRICES))
    spec = cold.spec(steps=2_000_000) | {"budget": {"steps": 2_000_000, "cost": 0.002, "at_cost": "pause"}}
    with cold.client() as client:
        job = client.submit(spec).job
        wait_until(lambda: client.job(job).paused and not client.job(job).islands_training)
        paused = client.job(job)
        assert paused.state is JobState.RUNNING
        assert "it has cost its limit of 0.002 USD; raise it with `atoll set" in (paused.pause_reason or "")
        spent = paused.goodput["cost"]["so_far"]
        assert spent >= 0.002
        assert "paused" in cold.atoll("status", job)
        cold.atoll("set", job, f"cost={spent * 1.5}")
        wait_until(lambda: not client.job(job).paused and client.job(job).islands_training)
        tokens = client.job(job).tokens_trained
        wait_until(lambda: client.job(job).paused and not client.job(job).islands_training)
        again = client.job(job)
        assert again.tokens_trained > tokens
        assert again.goodput["cost"]["so_far"] >= spent * 1.5
        assert again.settings is not None
        assert again.settings.cost == spent * 1.5
        kinds = [command.kind for command in client.commands(job) if command.caller == "budget.cost"]
        assert sorted(kinds) == ["continue", "pause", "pause"]
        assert "atoll_job_paused" in cold.http().get("/metrics").text
        said = cold.atoll("set", job, "cost=-1", code=1)
        assert "cost is -1, but must be above 0" in said
        cold.atoll("finish", job)
        assert client.wait(client.job(job)).state is JobState.COMPLETED


def test_a_price_of_a_node_group_that_is_not_there_stops_the_start(cold: Installation, tmp_path: Path) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text("node_groups: {us-eats: {chip_hour: 2}}\n")
    options = ("--runs", str(cold.runs), "--control", CONTROL, "--prices", str(file))
    said = cold.atoll("up", *options, code=2)
    assert "node_groups.us-eats is no node group of the cluster. Remove it, or write 'us-east'." in said


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("node_groups: {a: {chip_hour: -1}}", "node_groups.a.chip_hour: is -1, but must be at least 0"),
        ("node_groups: {a: {chip_hour: 1, node_hour: 2}}", "node_groups.a: needs exactly one of"),
        ("node_groups: {a: {kind: spot}}", "node_groups.a: needs exactly one of chip_hour and node_hour"),
        ("node_groups: {a: {chip_hour: 1, kind: cheap}}", "must be one of on_demand, spot, reserved"),
        ("node_groups: {a: {chip_hour: .inf}}", ".inf is not accepted"),
        ("node_groups: {a: {chip_hour: 1}}\ncurrency: usd", "currency: is 'usd', but must be three letters"),
        ("node_groups: {}", "node_groups"),
        ("prices: {}", "prices"),
    ],
)
def test_a_price_file_is_refused_with_field_value_and_remedy(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as refusal:
        read_prices(file)
    assert problem in str(refusal.value)
    assert str(file) in str(refusal.value)


def test_every_unknown_group_is_counted_and_a_cluster_without_groups_is_no_mistake_of_spelling() -> None:
    prices = read_prices(PRICES)
    assert unknown_prices(PRICES, prices, prices.keys()) == ""
    assert "(and 3 more)" in unknown_prices(PRICES, prices, [])
    assert unknown_prices(PRICES, prices, []).endswith("or join its machines.")
