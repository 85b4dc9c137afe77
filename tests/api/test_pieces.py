"""The pure pieces: fleet checks, summaries, pictures; and the store on its own."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from api.control import NodeGroupRecord
from api.fleet import fleet_problems, sections_of
from api.store import AlreadyKnown, CommandRow, JobRow, Store
from api.summary import lines_that_matter
from api.translate import job_of
from api.watch import line, render
from orchestrator.config import parse_job
from orchestrator.plain import finite
from orchestrator.sections import IslandsSection
from tests.api.clockwork import GROUPS, World
from tests.api.installation import Installation


def test_a_fleet_check_names_what_no_group_can_ever_give() -> None:
    sections = [
        IslandsSection(node_group="us-east", count=3, name="first"),
        IslandsSection(node_group="us-east", cpus=1.5, name="second"),
        IslandsSection(node_group="asia", accelerator="gpu", accelerators=1),
        IslandsSection(node_group="europe", cpus=4),
        IslandsSection(node_group="moon"),
    ]
    told = {problem.path: problem for problem in fleet_problems(sections, GROUPS)}
    assert told.keys() == {"islands.cpus", "islands.2.accelerators", "islands.4.node_group"}
    assert "4.5 cpus" in told["islands.cpus"].message
    assert "has 4 in total" in told["islands.cpus"].message
    assert "asia, europe, us-east, us-west" in told["islands.4.node_group"].message
    assert sections_of({"islands": "many"}) == ()


def test_an_island_must_fit_on_one_node_of_its_group() -> None:
    group = NodeGroupRecord(name="pair", region="here", nodes=2, cpus=8.0, cpus_free=8.0, accelerators=2)
    whole = IslandsSection(node_group="pair", count=2, cpus=4, accelerator="gpu", accelerators=1)
    assert fleet_problems([whole], [group]) == ()
    large = IslandsSection(node_group="pair", cpus=5, accelerator="gpu", accelerators=2)
    told = {problem.path: problem.message for problem in fleet_problems([large], [group])}
    assert told.keys() == {"islands.0.cpus", "islands.0.accelerators"}
    assert told["islands.0.cpus"] == "asks for 5 cpus on one node of 'pair', whose nodes have 4 each."


def store_at(tmp_path: Path) -> Store:
    return Store(f"sqlite:///{tmp_path / 'store.sqlite'}")


def job_row(job: str, key: str | None = None) -> JobRow:
    return JobRow(
        job=job, name="n", spec={}, run_dir="/r", caller="c", submitted_at=1.0, state="running", idempotency_key=key
    )


def test_a_store_opened_again_holds_what_was_written(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.add_job(job_row("a-1"))
    store.add_job(job_row("b-2"))
    store.add_command(
        CommandRow(command="k", job="a-1", kind="kill", island="i", restart=True, caller="c", requested_at=2.0)
    )
    store.update_job("a-1", state="completed", summary={"loss": 1.5})
    store.update_command("k", delivered=True, accepted=False, detail="no")
    store.close()

    again = store_at(tmp_path)
    assert [row.job for row in again.jobs()] == ["b-2", "a-1"]
    assert again.job("latest").job == "b-2"
    assert again.job("a-1").summary == {"loss": 1.5}
    assert again.job("c-3") is None
    assert [(row.command, row.accepted, row.detail) for row in again.commands("a-1")] == [("k", False, "no")]
    again.close()


def test_of_many_at_once_with_one_key_exactly_one_is_stored(tmp_path: Path) -> None:
    store = store_at(tmp_path)

    def add(number: int) -> str:
        try:
            return store.add_job(job_row(f"job-{number}", key="same")).job
        except AlreadyKnown as known:
            return f"known {known.row.job}"

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(add, range(24)))
    winners = [answer for answer in answers if not answer.startswith("known")]
    assert len(winners) == 1
    assert set(answers) == {winners[0], f"known {winners[0]}"}
    assert len(store.jobs()) == 1
    store.close()


def picture(tmp_path: Path, until: float, commands: tuple[dict, ...] = ()):
    """A job of the clockwork world as the API would answer it."""
    document = Installation(tmp_path).spec(steps=100)
    spec = parse_job(document)
    record = World(spec, list(commands), until).status("trial-x", 1000.0, until)
    row = job_row("trial-x")
    row.spec = document
    return job_of(row, record, [], spec.token_budget, report=False)


def test_the_live_picture_shows_every_island_and_the_job(tmp_path: Path) -> None:
    kill = {"at": 1.0, "kind": "kill", "id": "k", "caller": "me", "island": "asia", "restart": False}
    job = picture(tmp_path, 2.0, (kill,))
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    console.print(render(job, note="a remark"))
    text = console.export_text()
    for word in (
        "trial-x",
        "us-east",
        "us-west",
        "europe",
        "asia",
        "training",
        "stopped",
        "20.0",
        "goodput",
        "a remark",
    ):
        assert word in text
    assert f"{job.tokens_trained:,} of {job.token_budget:,} tokens" in text
    assert f"version {job.global_version}" in line(job)
    assert "asia stopped" in line(job)
    assert "us-east training 20.0/s" in line(job)


def test_a_job_before_its_first_event_and_without_losses_can_be_drawn(tmp_path: Path) -> None:
    job = picture(tmp_path, -1.0)
    console = Console(width=80, record=True, file=(tmp_path / "out").open("w"))
    console.print(render(job))
    assert job.loss is None
    assert "loss –" in line(job)


def test_what_json_cannot_say_becomes_null() -> None:
    told = finite({"a": math.nan, 1: [math.inf, 2.5], "b": ("x", None, 3)})
    assert told == {"a": None, "1": [None, 2.5], "b": ["x", None, 3]}


@pytest.mark.parametrize("recoveries", [[], [{"island": "asia"}]])
def test_three_lines_also_for_a_job_without_recovery(recoveries: list) -> None:
    report = {
        "loss_final": 1.75, "loss_unigram": 3.1, "tokens_trained": 1000, "tokens_merged": 900, "goodput_ratio": 0.9,
        "island_seconds": {"total": 100.0}, "badput_seconds": {"late": 6.0, "lost_with_the_island": 4.0},
        "recovery_s": None, "recoveries": recoveries,
    }  # fmt: skip
    loss, goodput, recovery = lines_that_matter(report)
    assert "1.750" in loss
    assert "3.100" in loss
    assert "90.0 %" in goodput
    assert "late 6.0 %" in goodput
    assert ("asia was lost" if recoveries else "no island was lost") in recovery
    assert len(lines_that_matter({})) == 3
