"""Runs decoupled at protocol level, on the capacities that the fleet level found: the specification as a ``World``.

Responsible for: turning synchroniser, steps and links into policy and plan, and what full speed is when capacity comes and
goes. Refuses to know: how goodput is measured (``protocol``), and the other systems (``run``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from orchestrator.core.vocabulary import Instant, JobPolicy
from orchestrator.simulation import bandwidth, protocol
from orchestrator.simulation.fleet import FleetOutcome, FleetPlan
from orchestrator.simulation.plan import WorldPlan
from orchestrator.simulation.spec import SimulationSpec
from orchestrator.simulation.world import World
from orchestrator.tape.schema import Header, Tape

SAMPLES = 997
"""Step times drawn beforehand when they are a distribution: enough that nobody sees the repetition."""


def run(
    spec: SimulationSpec, plan: FleetPlan, fleet: FleetOutcome, on_progress: Callable[[float], None]
) -> tuple[protocol.ProtocolOutcome, Tape]:
    """What was measured, and the tape of it. ``on_progress`` may stop it with KeyboardInterrupt."""
    policy = job_policy(spec, len(fleet.capacity))
    simulated_plan = world_plan(spec, policy, fleet)
    world = World(policy, simulated_plan, spec.seed, checked=False)
    warm_up = min(2.0 * policy.sync_interval_steps * spec.step_s, 0.2 * spec.duration)
    outcome = protocol.run(world, warm_up, spec.duration, _full_tokens(plan, simulated_plan), on_progress)
    return outcome, world.sink.tape(Header(f"simulated-{spec.name}-{spec.seed}", policy))


def row_of(fleet: FleetOutcome, outcome: protocol.ProtocolOutcome) -> dict[str, Any]:
    """As plain data, like the fleet level's rows."""
    return {
        "system": "decoupled",
        "level": "protocol",
        "learners": fleet.learners,
        "chips": fleet.chips,
        "goodput": outcome.goodput,
        "stderr": outcome.stderr,
        "uptime": outcome.uptime,
        "badput": {cause: ratio for cause, ratio in outcome.badput.items() if ratio > 0.0},
        "merges": outcome.merges,
        "contributors_mean": outcome.contributors_mean,
        "bandwidth_gbps": outcome.traffic_bytes_per_s * 8 / bandwidth.GIGA,
    }


def job_policy(spec: SimulationSpec, islands: int) -> JobPolicy:
    """The synchroniser's section, as the core takes it."""
    sync = spec.synchroniser
    policy = protocol.policy(
        islands,
        quorum=sync.quorum,
        fragments=sync.fragments,
        interval_steps=sync.interval_steps,
        overlap_steps=sync.overlap_steps,
        grace_cap_steps=sync.grace_cap_steps,
        grace_margin=sync.grace_margin,
    )
    return replace(policy, staleness_max=sync.staleness_max)


def world_plan(spec: SimulationSpec, policy: JobPolicy, fleet: FleetOutcome) -> WorldPlan:
    """Steps and links as specified, and the capacities that the fleet level found."""
    islands, links, latency = len(policy.islands), spec.links, spec.links.latency
    factors = (*spec.speed_factors(), *(1.0,) * islands)[:islands]
    random = Random(f"{spec.seed}/steps")
    step_time = spec.steps.step_time
    drawn = [step_time.draw(random) for _ in range(SAMPLES)]
    varies = len(set(drawn)) > 1
    plan = protocol.plan(
        [factor * step_time.mean for factor in factors],
        step_samples=tuple(tuple(factor * one for one in drawn) for factor in factors) if varies else (),
        step_jitter_ratio=spec.steps.jitter_ratio,
        tokens_per_step=spec.steps.tokens_per_step,
        adoption=spec.synchroniser.adoption,
        payload_bytes=round(links.parameters * spec.wire_bits / 8 / policy.fragment_count),
        bandwidth_bytes_per_s=(links.bandwidth / 8,) * islands,
    )
    between = (latency, latency) if latency else protocol.QUICK
    return replace(
        plan,
        letter_s=between,
        pull_s=(2 * between[0], 2 * between[1]),
        delivery_s=between,
        capacity=protocol.capacities(policy, fleet.capacity),
    )


def _full_tokens(plan: FleetPlan, world: WorldPlan) -> Callable[[Instant, Instant], float]:
    """At full speed, of whoever is there: scavenged learners only while their chips are."""
    visits: dict[int, list[tuple[Instant, Instant]]] = {}
    for block, extra in plan.blocks():
        lasts = (0.0, math.inf) if extra is None else (extra.since, extra.until)
        visits.setdefault(block.learner, []).append(lasts)
    rates = [world.tokens_per_step / step_s for step_s in world.step_s]

    def between(since: Instant, until: Instant) -> float:
        return math.fsum(
            rates[learner] * max(0.0, min(until, last) - max(since, first))
            for learner, spans in visits.items()
            for first, last in spans
        )

    return between
