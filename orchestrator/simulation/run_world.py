"""Runs a fitted world (``worldfile``): the job of a tape again, as `atoll simulate world.yaml`.

One row, of decoupled, by the folds that live jobs are accounted by: goodput is productive island time over all island time.
Refuses to know: how the world was fitted, and files.
"""

from __future__ import annotations

from typing import Any

from orchestrator.simulation import worldfile
from orchestrator.simulation.result import OpenTape, Progress, Simulated
from orchestrator.simulation.spec import SimulationSpec
from orchestrator.simulation.world import World
from orchestrator.tape.schema import Header


def simulate_world(spec: SimulationSpec, on_progress: Progress, open_tape: OpenTape | None) -> Simulated:
    """The job to its end, or for the specification's duration, or up to Ctrl-C."""
    fitted = worldfile.parse(spec.world or {})
    until = min(spec.duration, fitted.until)
    world = World(fitted.policy, fitted.plan, spec.seed, checked=False)
    partial = False
    try:
        for now in world.passing(until):
            ended = world.core.state.tokens_trained / fitted.policy.token_budget
            on_progress(min(1.0, max(ended, now / until)), fitted.job)
    except KeyboardInterrupt:
        partial = True
    if open_tape is not None:
        sink = open_tape("world", Header(f"simulated-{fitted.job}-{spec.seed}", fitted.policy))
        for record in world.sink.records:
            sink.append(record)
    reached = world.now if partial or world.finished is not None else until
    return Simulated(spec, (_row(world, reached),), reached, partial, fitted.notes)


def _row(world: World, at: float) -> dict[str, Any]:
    worth, statistics = world.goodput.summary(at), world.statistics.summary(at)
    total = worth["island_seconds"]["total"] or 1.0
    badput = {cause: seconds / total for cause, seconds in worth["badput_seconds"].items()}
    if in_flight := worth["island_seconds"]["in_flight"] / total:
        badput["in flight"] = in_flight
    carried = (
        world.plan.payload_bytes * statistics["contributors_mean"] * statistics["merges"] / len(world.policy.islands)
    )
    return {
        "system": "decoupled",
        "level": "protocol",
        "learners": len(world.policy.islands),
        "chips": sum(island.accelerator_count for island in world.policy.islands),
        "goodput": worth["goodput_ratio"],
        "stderr": None,
        "uptime": worth["uptime_ratio"],
        "badput": badput,
        "merges": statistics["merges"],
        "contributors_mean": statistics["contributors_mean"],
        "bandwidth_gbps": 8e-9 * carried / at if carried and at else None,
    }
