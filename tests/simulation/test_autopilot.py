"""Advice on the settings of a running job, by a simulation of its tape."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.core import events as e
from orchestrator.core.commands import Set
from orchestrator.core.vocabulary import CommandId
from orchestrator.simulation import autopilot
from orchestrator.simulation.autopilot import AUTOPILOT, Limits, Pilot, command_for
from orchestrator.simulation.distributions import Empirical
from orchestrator.simulation.fit import fit
from orchestrator.simulation.world import World
from orchestrator.tape.codec import decode_command, encode_command
from orchestrator.tape.schema import Record, decode_line, encode_record
from tests.bench.autopilot import Hidden

PREEMPTED = Hidden(2, 40.0, {})
UNTIL = 170.0
EVERYTHING = Limits({"interval_steps": (4.0, 48.0), "quorum": (1.0, 2.0), "grace": (1.0, 6.0)})


@pytest.fixture(autouse=True)
def few_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autopilot, "SEEDS_TO_CHOOSE", 2)
    monkeypatch.setattr(autopilot, "SEEDS_TO_MEASURE", 3)


def preempted() -> World:
    return PREEMPTED.world(PREEMPTED.policy(), 7001, UNTIL).run(UNTIL)


@pytest.fixture(scope="module")
def world() -> World:
    return preempted()


def test_islands_that_die_often_are_advised_to_merge_more_often(world: World) -> None:
    report = Pilot(world.tape, EVERYTHING).look()
    advice = report.advice
    assert advice is not None
    assert (advice.setting, advice.before, advice.held_by) == ("interval_steps", 24.0, "")
    assert 12.0 <= advice.after < 24.0
    assert advice.gain_ratio > 2.0 * advice.error_ratio
    assert advice.then.tokens_per_second > advice.now.tokens_per_second
    assert advice.then.drift_steps < advice.now.drift_steps
    assert "because time lost with the island falls from" in advice.reason
    assert report.record == world.tape.records[-1].n


def test_nothing_outside_the_bounds_is_advised_to_be_made(world: World) -> None:
    report = Pilot(world.tape, Limits({"interval_steps": (20.0, 24.0)})).look()
    assert report.advice is None or report.advice.setting != "interval_steps" or report.advice.after >= 20.0
    unnamed = Pilot(world.tape, Limits()).look().advice
    assert unnamed is not None
    assert unnamed.held_by == "autopilot.bounds has no range for interval_steps"


def test_a_change_is_a_command_with_its_reason_that_a_tape_keeps() -> None:
    world = preempted()
    request = command_for("interval_steps", 12.0, "islands die often")
    assert request is not None
    world.tell(e.CommandRequested(world.now, CommandId("c1"), AUTOPILOT, request))
    assert world.core.state.policy.sync_interval_steps == 12
    record = world.tape.records[-1]
    assert "because islands die often" in str(record.effects[0])
    assert decode_line(encode_record(record)) == record
    assert decode_command(encode_command(request)) == request
    assert "reason" not in encode_command(Set(quorum=1))
    assert "reason" not in encode_record(Record(1, e.CommandRequested(0.0, CommandId("c"), "ada", Set(quorum=1)), ()))


def test_a_setting_that_an_operator_has_changed_is_left_alone() -> None:
    world = PREEMPTED.world(PREEMPTED.policy(), 7001, UNTIL).run(5.0)
    world.tell(e.CommandRequested(world.now, CommandId("c1"), "ada", Set(sync_interval_steps=26)))
    world.resume(159.0)
    report = Pilot(world.tape, EVERYTHING).look()
    assert report.advice is None
    assert "since a setting was changed; more of it is needed" in report.outcome
    advice = Pilot(world.resume(UNTIL).tape, EVERYTHING).look().advice
    assert advice is not None
    assert (advice.setting, advice.before) == ("interval_steps", 26.0)
    assert advice.held_by == "ada has set interval_steps, and the autopilot leaves that alone"


def test_its_own_change_is_undone_if_the_job_merges_less_with_it_and_is_not_made_again() -> None:
    until = 170.0 + 16 * 24.0 + 10.0
    world = PREEMPTED.world(PREEMPTED.policy(), 7001, 2.0 * until).run(170.0)

    def change(interval: float) -> None:
        request = command_for("interval_steps", interval, "it seemed better")
        assert request is not None
        world.tell(e.CommandRequested(world.now, CommandId(f"c{interval:g}"), AUTOPILOT, request))

    change(48.0)
    report = Pilot(world.resume(until).tape, EVERYTHING).look()
    advice = report.advice
    assert advice is not None
    assert (advice.setting, advice.before, advice.after, advice.held_by) == ("interval_steps", 48.0, 24.0, "")
    assert advice.then.tokens_per_second > 1.01 * advice.now.tokens_per_second
    assert "interval_steps 48 back to 24: the job merged" in report.outcome
    held = Pilot(world.tape, Limits({"grace": (1.0, 6.0)})).look().advice
    assert held is not None
    assert held.held_by == "autopilot.bounds has no range for interval_steps"
    assert not Pilot(world.tape, EVERYTHING)._is_undone("interval_steps", 48.0)

    change(24.0)
    own = Pilot(world.resume(until + 170.0).tape, EVERYTHING)
    assert [value for value in (12.0, 36.0, 47.0, 48.0, 96.0) if own._is_undone("interval_steps", value)] == [
        48.0,
        96.0,
    ]
    assert not own._is_undone("quorum", 48.0)
    assert own.look().advice is None or own.look().outcome.startswith("interval_steps 24 to 12")


def test_the_line_of_the_slowest_of_ten_islands_must_keep_up() -> None:
    slowest = Empirical((0.05,) * 8 + (0.9,) * 2)
    assert autopilot._slow(slowest) == 0.9
    assert autopilot._slow((0.1, 0.3)) == 0.3
    assert autopilot._slow(Empirical((0.05,) * 100 + (0.9,))) == 0.05


def test_a_young_job_and_a_world_that_does_not_give_back_its_tape_get_no_advice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    young = PREEMPTED.world(PREEMPTED.policy(), 7001, 60.0).run(60.0)
    report = Pilot(young.tape, EVERYTHING).look()
    assert report.advice is None
    assert "more of it is needed" in report.outcome

    def twice_as_fast(tape: object) -> object:
        fitted = fit(tape)  # type: ignore[arg-type]
        paces = tuple(tuple(replace(one, step_s=one.step_s / 2.0) for one in paces) for paces in fitted.plan.paces)
        return replace(fitted, plan=replace(fitted.plan, paces=paces))

    monkeypatch.setattr(autopilot, "fit", twice_as_fast)
    report = Pilot(world.tape, EVERYTHING).look()
    assert report.advice is None
    assert "nothing that it shows can be relied on" in report.outcome


def test_rarer_merges_must_gain_more_than_drift_costs() -> None:
    calm = Hidden(2, 1e9, {})
    report = Pilot(calm.world(calm.policy(), 7002, UNTIL).run(UNTIL).tape, EVERYTHING).look()
    assert report.advice is None
    assert report.outcome.startswith("the settings are kept")
