"""A world written is the world read; what is wrong with a file is told all at once, with remedies."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass, replace

import pytest
import yaml

from orchestrator.core.vocabulary import (
    CheckpointPolicy,
    EvaluationPolicy,
    HealthPolicy,
    IslandId,
    IslandPlan,
    JobPolicy,
    NodeGroupId,
    OuterRatePolicy,
    StepLimits,
)
from orchestrator.errors import InvalidJobSpec
from orchestrator.simulation import spec, worldfile
from orchestrator.simulation.distributions import Empirical, Uniform
from orchestrator.simulation.fit import FittedWorld, fit
from orchestrator.simulation.plan import Capacity, Fault, FaultKind, IncarnationStart, WorldPlan, sample_policy
from orchestrator.simulation.run import simulate
from orchestrator.simulation.world import World
from orchestrator.simulation.worldfile import (
    ChancesPart,
    FaultPart,
    LatenciesPart,
    LifePart,
    PlacePart,
    PolicyPart,
    WorldPart,
)
from orchestrator.tape.schema import Header, Record, Tape

ASIA = IslandId("asia")


def read_back(text: str) -> FittedWorld:
    return worldfile.parse(yaml.safe_load(text)["world"])


@pytest.fixture(scope="module")
def fitted():
    faults = (Fault(3.0, FaultKind.KILL, ASIA), Fault(6.0, FaultKind.FREEZE, IslandId("europe"), 2.0))
    plan = WorldPlan((0.05, 0.06, 0.07, 0.08), adoption="rebase", faults=faults, capacity=(Capacity(2.0, ASIA, 0.5),))
    return fit(World(sample_policy(4, steps=150), plan, seed=2).run().tape)


def test_a_world_comes_back_equal(fitted):
    assert read_back(worldfile.dump(fitted)) == fitted


def test_a_world_with_everything_comes_back_equal(fitted):
    plan = replace(
        fitted.plan,
        calm_at=7.5,
        step_samples=((0.05,), (0.06, 0.07), (), (0.08,)),
        bandwidth_bytes_per_s=(1e6, float("inf"), 1e7, 1e8),
        payload_bytes=4096,
        parameter_count=4_000_000_000,
        router_parameter_count=40,
        evaluate_alone_s=Empirical((1.0, 2.0)),
        begin_s=Uniform(0.1, 0.2),
        publication_loss=0.25,
        merge_failure=0.125,
    )
    policy = replace(fitted.policy, health=HealthPolicy(None, 5, 0))
    world = replace(fitted, policy=policy, plan=plan, until=12.5, notes=("one", "two: é"))
    assert read_back(worldfile.dump(world)) == world


def test_every_field_of_a_policy_comes_back(fitted):
    """Each one with a value that is not its default: a field that the file lacks would come back as the default."""
    policy = JobPolicy(
        islands=fitted.policy.islands,
        fragment_count=5,
        sync_interval_steps=7,
        overlap_steps=3,
        quorum=2,
        grace_margin=0.25,
        grace_cap_steps=2.5,
        staleness_max=0,
        token_budget=12345,
        evaluation_every_merges=11,
        suspect_timeout_s=1.5,
        backoff_first_s=0.75,
        backoff_max_s=9.0,
        restarts_max=4,
        flush_timeout_s=2.25,
        moving_average_decay=0.5,
        health=HealthPolicy(7.0, 5, 0),
        cut_off_timeout_s=33.0,
        standbys=(IslandPlan(IslandId("spare"), NodeGroupId("spares"), "asia", 3),),
        checkpoints=CheckpointPolicy(6, 60.0, 4, 12.0),
        donors_max=3,
        evaluation=EvaluationPolicy(64, 0.125, True, True),
        outer_rate=OuterRatePolicy(9, 0.125),
        step_limits=StepLimits(7.0, 5.0, 60.0),
        quorum_ratio=0.75,
        grace_floor_steps=0.25,
        leaving_closes=True,
        router_interval_steps=4,
        standby_wait_s=2.5,
    )
    for part in (policy, *(value for value in vars_of(policy).values() if is_dataclass(value))):
        same = [f.name for f in fields(part) if f.default is not MISSING and getattr(part, f.name) == f.default]
        assert not same, f"the test leaves {same} of {type(part).__name__} at their defaults"
    assert read_back(worldfile.dump(replace(fitted, policy=policy))).policy == policy


def vars_of(policy):
    return {field.name: getattr(policy, field.name) for field in fields(policy)}


@pytest.mark.parametrize(
    ("plan", "part", "elsewhere"),
    [
        (JobPolicy, PolicyPart, {"islands", "standbys"}),
        (IslandPlan, PlacePart, set()),
        (Fault, FaultPart, set()),
        (IncarnationStart, LifePart, {"island"}),
        (
            WorldPlan,
            (WorldPart, LatenciesPart, ChancesPart),
            {"step_s", "pause_s", "bandwidth_bytes_per_s", "lives", "capacity", "step_samples", "paces"},
        ),
    ],
)
def test_a_file_has_every_field_of_what_it_describes(plan, part, elsewhere):
    parts = part if isinstance(part, tuple) else (part,)
    written = set().union(*(one.model_fields for one in parts))
    assert {field.name for field in fields(plan)} - elsewhere <= written
    assert elsewhere <= {field.name for field in fields(plan)}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"synchroniser": {"fragments": 3, "interval_steps": 30, "overlap_steps": 1, "quorum": 4, "grace_margin": 0}},
        {"steps": {"step_time": {"uniform": [0.5, 1.5]}, "tokens_per_step": 10**15}},
        {"fleet": {"chips": 8, "chips_per_slice": 2, "learners": 4, "mtbi_chip": "300s"}},
    ],
    ids=["as it is", "another policy", "many tokens", "often away"],
)
def test_a_simulation_of_a_simulated_tape_accepts_the_world_fitted_to_it(sections):
    """A simulated job has no end of its own: its policy has a budget and restarts that no job may have."""
    fleet = {"chips": 8, "chips_per_slice": 2, "learners": 4}
    document = {"duration": "120s", "systems": ["decoupled"], "level": "protocol", "fleet": fleet, **sections}
    headers: list[Header] = []
    records: list[Record] = []

    def open_tape(name, header):
        headers.append(header)
        return records

    simulate(spec.parse(document), open_tape=open_tape)
    world = fit(Tape(headers[0], tuple(records)))
    text = worldfile.dump(world)
    assert read_back(text).policy == world.policy
    assert simulate(spec.parse(yaml.safe_load(text))).rows


def test_a_world_from_a_file_does_exactly_the_same(fitted):
    read = read_back(worldfile.dump(fitted))
    one, other = (World(world.policy, world.plan, seed=4).run() for world in (fitted, read))
    assert one.tape == other.tape


def test_a_plan_as_people_write_it_draws_the_same_as_its_file():
    """Ranges become uniform distributions, which draw the very same numbers."""
    policy, plan = sample_policy(2, steps=60), WorldPlan((0.05, 0.06))
    read = read_back(worldfile.dump(FittedWorld("mine", policy, plan)))
    one, other = World(policy, plan, seed=4).run(), World(read.policy, read.plan, seed=4).run()
    assert one.tape == other.tape


def _broken(fitted, change):
    document = yaml.safe_load(worldfile.dump(fitted))
    change(document["world"])
    with pytest.raises(InvalidJobSpec) as caught:
        read_back(yaml.safe_dump(document))
    return {problem.path: problem for problem in caught.value.problems}


def test_every_problem_is_told_at_once_with_a_remedy(fitted):
    def change(world):
        del world["tokens_per_step"]
        world["speling"] = 1
        world["latencies"]["pull_s"] = "3 parsecs"
        world["chances"]["corrupt"] = 2
        world["islands"][1]["step_s"] = -1
        world["islands"][2]["paces"] = [[1.0, 2.0]]
        world["faults"][0]["kind"] = "meteorite"
        world["adoption"] = "mix"

    problems = _broken(fitted, change)
    expected = [
        "world.tokens_per_step",
        "world.speling",
        "world.latencies.pull_s",
        "world.chances.corrupt",
        "world.islands.1.step_s",
        "world.faults.0.kind",
        "world.adoption",
    ]
    assert set(expected) < set(problems)
    assert any(path.startswith("world.islands.2.paces.0") for path in problems)
    assert "parsecs" in str(problems["world.latencies.pull_s"])
    assert all(problem.remedy or "Write" in problem.message for problem in problems.values())


def test_rules_between_fields_are_told_at_once(fitted):
    def change(world):
        world["policy"]["quorum"] = 9
        world["policy"]["overlap_steps"] = 12
        world["policy"]["staleness_max"] = 1
        world["faults"][0]["island"] = "atlantis"
        world["islands"][1]["island"] = "asia"
        world["islands"][0]["paces"] = [[5.0, 6.0, 0.1, 0.0], [1.0, 2.0, 0.1, 0.0]]

    problems = _broken(fitted, change)
    assert set(problems) == {
        "world.policy.quorum",
        "world.policy.overlap_steps",
        "world.policy.staleness_max",
        "world.faults.0.island",
        "world.islands",
        "world.islands.0.paces.1",
    }
    assert all(problem.remedy for problem in problems.values())


def test_what_was_assumed_stands_at_the_head(fitted):
    text = worldfile.dump(replace(fitted, notes=("merging was never observed",)))
    assert "# Assumed: merging was never observed." in text.splitlines()[:3]
