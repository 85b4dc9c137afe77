"""Training by a tape on which a standby took an island's place: refused, with the reason."""

from __future__ import annotations

from dataclasses import replace

import yaml

from orchestrator.core.vocabulary import IslandId
from orchestrator.laboratory import trace_reader
from orchestrator.simulation import worldfile
from orchestrator.simulation.fit import fit
from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.tape.schema import Tape

ISLAND = IslandId("us-east")


def tape(*faults: Fault) -> Tape:
    policy = sample_policy(2, steps=200)
    standby = replace(policy.islands[0], island=IslandId("us-east-standby"))
    plan = WorldPlan(step_s=(0.1, 0.1), faults=faults)
    return World(replace(policy, standbys=(standby,)), plan, seed=1).run().tape


def test_only_a_tape_on_which_a_standby_took_a_place_is_refused() -> None:
    assert trace_reader.read(tape(), "replace").problems == ()
    (problem,) = trace_reader.read(tape(Fault(8.0, FaultKind.CRASH, ISLAND)), "replace").problems
    assert "us-east.2" in problem.message
    assert "without standbys" in problem.remedy


def test_a_world_fitted_to_such_a_tape_has_its_standbys_too() -> None:
    recorded = tape(Fault(8.0, FaultKind.CRASH, ISLAND))
    fitted = worldfile.parse(yaml.safe_load(worldfile.dump(fit(recorded)))["world"])
    assert fitted.policy.standbys == recorded.header.policy.standbys
    again = World(fitted.policy, fitted.plan, seed=2).run()
    assert again.goodput.summary()["standbys"]["takeovers"] == 1
