"""A world written is the world read; what is wrong with a file is told all at once, with remedies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from orchestrator.core.vocabulary import HealthPolicy, IslandId
from orchestrator.errors import InvalidJobSpec
from orchestrator.simulation import worldfile
from orchestrator.simulation.distributions import Empirical, Uniform
from orchestrator.simulation.fit import FittedWorld, fit
from orchestrator.simulation.plan import Capacity, Fault, FaultKind, WorldPlan, sample_policy
from orchestrator.simulation.world import World

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
        evaluate_alone_s=Empirical((1.0, 2.0)),
        begin_s=Uniform(0.1, 0.2),
        publication_loss=0.25,
        merge_failure=0.125,
    )
    policy = replace(fitted.policy, health=HealthPolicy(None, 5, 0))
    world = replace(fitted, policy=policy, plan=plan, until=12.5, notes=("one", "two: é"))
    assert read_back(worldfile.dump(world)) == world


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
    text = worldfile.dump(replace(fitted, notes=("merging was never seen",)))
    assert "# Assumed: merging was never seen." in text.splitlines()[:3]
