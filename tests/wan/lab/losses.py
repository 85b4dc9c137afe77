"""Real training over real lines: held-out loss against time. The model is nano, its loss in nats per byte.

All methods see the same shards in the same order, from the same initial parameters, with the same schedule. The service's
job runs on the narrow line from beginning to end. All-reduces would take an hour there, and every exchange of theirs is
like the one before: they do some steps on the narrow line, which say what a step takes, and the others on the wide one,
which say what it learns; their times are steps times that. Their losses are measured afterwards, on copies; the service's
are measured beside the islands, on the same cores, and count when they are known, which is in disfavour of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.core import events
from orchestrator.core.messages import Progress
from orchestrator.specification.config import parse_job
from orchestrator.tape.storage import read_tape
from tests.harness.reports import of_kind
from tests.wan.archipelago import Archipelago
from tests.wan.lab.collective import METHODS
from tests.wan.lab.fleets import SEED, collective_fleet, lines_of, service_fleet
from tests.wan.lab.plan import Plan

OUTER_SYNCHRONOUS = {"outer_lr": 0.7, "outer_momentum": 0.9}
OUTER_DECOUPLED = {"kind": "nesterov", "lr": 0.5, "momentum": 0.3}
"""The service's at nano's size: docs/decisions/0084-tuning-the-outer-optimizer.md. Streaming DiLoCo does best by its own."""
NARROW_STEPS_MIN = 2


@dataclass(frozen=True, slots=True)
class Curve:
    """``points``: seconds since the first step, and held-out loss; ``step_s`` is a mean on the narrow line."""

    method: str
    megabits: float
    steps: int
    step_s: float
    points: tuple[tuple[float, float], ...]


def time_to(curve: Curve, loss: float) -> float | None:
    """Seconds until the curve first reached ``loss``, between two measurements by a straight line."""
    before: tuple[float, float] | None = None
    for at, value in curve.points:
        if value <= loss:
            if before is None or before[1] == value:
                return at
            share = (before[1] - loss) / (before[1] - value)
            return before[0] + share * (at - before[0])
        before = at, value
    return None


def document(plan: Plan, codec: str) -> dict[str, Any]:
    """The job of the service, and what the others take their islands from."""
    every_merges = max(1, plan.loss_steps * plan.loss_fragments // plan.loss_interval_steps // plan.loss_points)
    return {
        "name": f"lab-loss-{codec}",
        "seed": SEED,
        "model": {"preset": "nano", "compute_dtype": "float32"},
        "islands": [{"node_group": name} for name in plan.names],
        "budget": {"steps": plan.loss_steps},
        "training": {"batch_size": plan.batch_size},
        "data": {"sequence_length": plan.sequence_length},
        "evaluation": {"every_merges": every_merges, "sequences": 64},
        "synchroniser": {
            "fragments": plan.loss_fragments,
            "interval_steps": plan.loss_interval_steps,
            "overlap_steps": plan.overlap_steps,
            "outer_optimizer": OUTER_DECOUPLED,
            "wire": codec,
        },
    }


def of_collectives(plan: Plan, methods: list[str]) -> Iterator[Curve]:
    spec = parse_job(document(plan, "float32")).model_dump(mode="json")
    sized = replace(plan, interval_steps=plan.loss_interval_steps, fragments=plan.loss_fragments)
    wide = lines_of(plan, max(plan.megabits), plan.round_trip_s)
    for method in methods:
        more = {
            "spec": spec,
            "steps": plan.loss_steps,
            "evaluate_every_steps": max(1, plan.loss_steps // plan.loss_points),
        }
        with collective_fleet(method, sized, wide, **more, **OUTER_SYNCHRONOUS) as fleet:
            for name, line in lines_of(plan, plan.loss_megabits, plan.round_trip_s).items():
                fleet.regions.set_line(name, line)
            began = fleet.boundary(1 if method != METHODS[2] else plan.overlap_steps + 1)
            ended = fleet.boundary(1)
            while fleet.step_count(began, ended) < NARROW_STEPS_MIN:
                ended = fleet.boundary(1)
            step_s = (ended - began) / fleet.step_count(began, ended)
            for name, line in wide.items():
                fleet.regions.set_line(name, line)
            fleet.wait()
            points = tuple((number * step_s, loss) for number, _, loss in fleet.losses)
            yield Curve(method, plan.loss_megabits, plan.loss_steps, step_s, points)


def of_service(plan: Plan, codec: str, archipelago: Archipelago) -> Curve:
    """To the end of its budget, on the narrow line."""
    lines = lines_of(plan, plan.loss_megabits, plan.round_trip_s)
    for name, line in lines.items():
        archipelago.regions.set_line(name, line)
    with service_fleet(codec, plan, archipelago, lines, document) as fleet:
        job = fleet.job
        assert job is not None
        job.wait_for_end()
        records = [record.event for record in read_tape(job.run_dir / "tape.jsonl").records]
    steps = [report for report in of_kind(records, Progress) if report.steps_total > 0]
    first = min(event.at for event in steps)
    measured = [event for event in records if isinstance(event, events.EvaluationCompleted) and event.at > first]
    step_s = (max(event.at for event in steps) - first) / plan.loss_steps
    points = tuple((event.at - first, event.loss) for event in measured)
    return Curve(fleet.method, plan.loss_megabits, plan.loss_steps, step_s, points)
