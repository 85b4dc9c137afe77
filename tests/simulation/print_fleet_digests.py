"""Run by test_fleet_tape in fresh processes: the tape digest of every system, on one line each."""

from __future__ import annotations

from orchestrator.simulation.distributions import Exponential, LogNormal, Uniform
from orchestrator.simulation.fleet import FleetPlan, Scavenged, System
from orchestrator.simulation.fleet_world import FleetTape, FleetWorld, fleet_header
from tests.simulation.fleet_tapes import DigestSink


def plan(system: System) -> FleetPlan:
    """A plan with everything in it that draws."""
    return FleetPlan(
        600_000,
        40_000.0,
        system,
        learners=4,
        return_time=LogNormal(900.0, 0.7),
        stall_down=Uniform(8.0, 20.0),
        stall_up=Exponential(6.0),
        scavenged=(Scavenged(100_000, 9_000.0, 30_000.0),),
    )


if __name__ == "__main__":
    for system in System:
        sink = DigestSink(fleet_header(plan(system), 11))
        world = FleetWorld(plan(system), 11, tape=FleetTape(plan(system), sink))
        for _ in world.batches():
            pass
        print(system, sink.digest.hex(), world.events, repr(world.outcome().goodput))
