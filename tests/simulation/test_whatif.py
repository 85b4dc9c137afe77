"""The same faults and speeds under another policy, beside what happened."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from api.simulation import figure
from orchestrator.core.vocabulary import IslandId, Price
from orchestrator.errors import DataError, InvalidJobSpec
from orchestrator.simulation.fit import fit
from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan, sample_policy
from orchestrator.simulation.whatif import CHANGED, HAPPENED, UNCHANGED, Settings, WhatIf, apply
from orchestrator.simulation.world import World
from orchestrator.tape.schema import FleetHeader, Tape
from tests.simulation.questions import what_if

POLICY = replace(sample_policy(4, steps=300, fragment_count=8, interval=24, grace_cap_steps=3.0), overlap_steps=6)
BEFORE = Settings(POLICY, "rebase")


@pytest.fixture(scope="module")
def tape():
    """Asia is away for five of about fifteen seconds."""
    asia = IslandId("asia")
    faults = (Fault(4.0, FaultKind.KILL_AND_KEEP_AWAY, asia), Fault(9.0, FaultKind.READD, asia))
    return World(POLICY, WorldPlan((0.05,) * 4, adoption="rebase", faults=faults), seed=7, checked=False).run().tape


@pytest.fixture(scope="module")
def everyone(tape):
    return what_if(tape, {"K": "4"})


def test_an_unchanged_policy_gives_what_happened(everyone):
    columns = everyone.summary()["columns"]
    assert columns[UNCHANGED]["goodput_ratio"] == pytest.approx(columns[HAPPENED]["goodput_ratio"], abs=0.02)
    assert columns[UNCHANGED]["merges_per_fragment"] == pytest.approx(columns[HAPPENED]["merges_per_fragment"], abs=1)


def test_needing_everyone_merges_nothing_while_one_is_away(everyone):
    columns = everyone.summary()["columns"]
    assert columns[CHANGED]["merges"] < 0.85 * columns[UNCHANGED]["merges"]
    assert columns[CHANGED]["uptime_ratio"] < columns[UNCHANGED]["uptime_ratio"] - 0.1
    assert columns[CHANGED]["contributors_mean"] == 4.0


def test_merging_half_as_often_halves_the_merges(tape):
    columns = what_if(tape, {"H": "48"}).summary()["columns"]
    assert columns[CHANGED]["merges"] == pytest.approx(columns[UNCHANGED]["merges"] / 2, rel=0.15)


def test_work_that_is_overwritten_costs_goodput(tape):
    columns = what_if(tape, {"adoption": "replace", "tau": "1", "grace_cap_steps": "0"}).summary()["columns"]
    assert columns[CHANGED]["goodput_ratio"] < columns[UNCHANGED]["goodput_ratio"] - 0.1


def test_the_same_seed_gives_the_same_answer(tape):
    again = [what_if(tape, {}, seed=seed).summary() for seed in (3, 3, 4)]
    assert list(again[0]["columns"]) == [HAPPENED, UNCHANGED]
    assert again[0] == again[1]
    assert again[0]["columns"][UNCHANGED] != again[2]["columns"][UNCHANGED]


def test_an_answer_is_plain_data_and_a_table(everyone):
    question = everyone
    assert json.loads(json.dumps(question.summary())) == question.summary()
    assert question.summary()["complete"]
    rows = {row.name: row for row in question.rows()}
    assert set(rows["goodput"].values) == {HAPPENED, UNCHANGED, CHANGED}
    assert 0.0 < rows["goodput"].values[CHANGED] <= 1.0
    causes = [row for name, row in rows.items() if name.startswith("lost to ")]
    worst = [max(value or 0.0 for value in row.values.values()) for row in causes]
    assert worst == sorted(worst, reverse=True)
    assert worst[0] > 0.0


def test_a_tape_with_prices_has_rows_of_money_and_one_without_has_none(everyone):
    assert not [row for row in everyone.rows() if "cost" in row.name]
    priced = replace(POLICY, islands=tuple(replace(plan, price=Price(36.0, "EUR")) for plan in POLICY.islands))
    asia = IslandId("asia")
    plan = WorldPlan((0.05,) * 4, adoption="rebase", faults=(Fault(4.0, FaultKind.KILL_AND_KEEP_AWAY, asia),))
    tape = World(priced, plan, seed=7, checked=False).run().tape
    question = what_if(tape, {"quorum": "3", "H": "48"})
    rows = {row.name: row for row in question.rows() if "cost" in row.name}
    assert {row.unit for row in rows.values()} == {"EUR"}
    for name in (HAPPENED, UNCHANGED, CHANGED):
        figures = question.summary()["columns"][name]
        assert rows["cost"].values[name] == pytest.approx(figures["cost"]["so_far"])
        per_million = rows["cost per merged million tokens"].values[name]
        assert per_million == pytest.approx(figures["cost"]["so_far"] / figures["tokens_merged"] * 1e6)
    assert len(rows) > 2
    assert figure(rows["cost"].values[HAPPENED], "EUR").endswith(" EUR")


def test_a_question_that_is_interrupted_keeps_what_there_is(tape):
    question = WhatIf(tape, {"K": "2"})
    progress = question.run()
    seen = [next(progress) for _ in range(3)]
    progress.close()
    assert [step.column for step in seen] == [HAPPENED, UNCHANGED, UNCHANGED]
    assert 0.0 < seen[1].ratio <= seen[2].ratio < 1.0
    summary = question.summary()
    assert not summary["complete"]
    assert list(summary["columns"]) == [HAPPENED, UNCHANGED]
    assert summary["columns"][HAPPENED]["complete"]
    assert not summary["columns"][UNCHANGED]["complete"]
    assert 0 < summary["columns"][UNCHANGED]["merges"] < summary["columns"][HAPPENED]["merges"]
    assert question.rows()[0].values[UNCHANGED] is not None


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("K", "2", "quorum", 2),
        ("quorum", "2", "quorum", 2),
        ("H", "48", "sync_interval_steps", 48),
        ("P", "4", "fragment_count", 4),
        ("tau", "0", "overlap_steps", 0),
        ("τ", "3", "overlap_steps", 3),
        ("gamma", "0.5", "grace_margin", 0.5),
        ("grace_cap_steps", "none", "grace_cap_steps", None),
        ("suspect_timeout_s", "9.5", "suspect_timeout_s", 9.5),
        ("restarts_max", "0", "restarts_max", 0),
    ],
)
def test_settings_are_known_by_name_and_by_symbol(name, text, field, value):
    after = apply(BEFORE, {name: text})
    assert getattr(after.policy, field) == value
    assert replace(after.policy, **{field: getattr(POLICY, field)}) == POLICY


def test_adoption_is_a_setting_of_the_islands():
    assert apply(BEFORE, {"adoption": "replace"}) == Settings(POLICY, "replace")


def test_every_problem_is_told_at_once_with_a_remedy():
    changes = {
        "K": "9",
        "quorum": "3",
        "H": "many",
        "tau": "24",
        "staleness_max": "2",
        "grace_margin": "1.5",
        "adoption": "mix",
        "wire": "bfloat16",
        "outer_optimizer.lr": "1",
        "M": "8",
        "colour": "blue",
    }
    with pytest.raises(InvalidJobSpec) as caught:
        apply(BEFORE, changes)
    problems = {problem.path: problem for problem in caught.value.problems}
    assert set(problems) == set(changes)
    assert all(problem.remedy for problem in problems.values())
    assert "train-tape" in problems["wire"].remedy
    assert "K" in str(problems["quorum"])
    assert "interval_steps" in problems["colour"].remedy


def test_settings_of_the_schedule_that_do_not_go_together_are_refused():
    with pytest.raises(InvalidJobSpec) as caught:
        apply(BEFORE, {"H": "6"})
    (problem,) = caught.value.problems
    assert problem.path == "H"
    assert "overlap_steps, which is 6" in str(problem)
    with pytest.raises(InvalidJobSpec) as caught:
        apply(BEFORE, {"router_interval_steps": "24"})
    (problem,) = caught.value.problems
    assert problem.path == "router_interval_steps"
    assert "above overlap_steps (6) and below interval_steps (24)" in str(problem)
    assert apply(BEFORE, {"router_interval_steps": "8"}).policy.schedule == (8, 24, 8)


def test_routers_with_a_period_of_their_own_merge_as_much_more_often(tape):
    summary = what_if(tape, {"router_interval_steps": "8"}).summary()
    merges = summary["columns"]["changed"]["merges_per_fragment"]
    assert merges[-1] == pytest.approx(3 * sum(merges[:-1]) / len(merges[:-1]), rel=0.1)


def test_goodput_of_a_simulated_job_counts_routers_by_the_size_that_the_tape_says():
    plan = WorldPlan((0.05,) * 4, adoption="rebase", parameter_count=1000, router_parameter_count=500)
    recorded = World(replace(POLICY, router_interval_steps=8), plan, seed=3, checked=False).run()
    assert recorded.goodput.router_part == 0.5
    again = fit(recorded.tape).plan
    assert (again.parameter_count, again.router_parameter_count) == (1000, 500)


def test_a_fleets_tape_is_refused_by_name(tape):
    fleet = Tape(FleetHeader("million-chips", POLICY, {}, 0), ())
    with pytest.raises(DataError, match=r"million-chips.*slices of chips"):
        what_if(fleet, {})
