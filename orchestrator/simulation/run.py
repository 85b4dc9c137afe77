"""Runs what a specification asks for: every system under the same failures, at one level or at both.

    result = simulate(spec, on_progress);  result.rows, result.plain()

All systems at fleet level advance together, one batch of virtual time after the other, so that an interruption (Ctrl-C)
finds them at the same instant; what they came to until then is the result, marked as partial. The protocol level follows,
on the capacities that the fleet level found for ``decoupled``. Refuses to know: files, terminals, and what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from orchestrator.simulation import bandwidth, notes, run_protocol
from orchestrator.simulation.fleet import Cause, FleetOutcome, FleetPlan, System
from orchestrator.simulation.fleet_tape import FleetTape, fleet_header
from orchestrator.simulation.fleet_world import FleetWorld
from orchestrator.simulation.fleet_world import simulate as simulate_fleet
from orchestrator.simulation.result import OpenTape, Progress, Simulated
from orchestrator.simulation.spec import SimulationSpec

FLEET_PART = 0.25
"""Of the progress bar, when the protocol level comes after."""
PROTOCOL_TAPE = "decoupled-protocol"


def tape_names(spec: SimulationSpec) -> tuple[str, ...]:
    """The runs of which tapes are written: every system's fleet, or, where the protocol runs, the protocol's alone."""
    if spec.world is not None:
        return ("world",)
    return spec.systems if spec.level == "fleet" else (PROTOCOL_TAPE,)


def simulate(
    spec: SimulationSpec, on_progress: Progress = lambda _ratio, _what: None, open_tape: OpenTape | None = None
) -> Simulated:
    """Everything the specification asks for, or what of it was done when Ctrl-C came."""
    if spec.world is not None:
        from orchestrator.simulation.run_world import simulate_world

        return simulate_world(spec, on_progress, open_tape)
    with_protocol = spec.level != "fleet"
    share = FLEET_PART if with_protocol else 1.0
    systems: tuple[str, ...] = spec.systems if spec.level != "protocol" else ("decoupled",)
    worlds = {
        system: _fleet_world(spec, System(system), open_tape if spec.level == "fleet" else None) for system in systems
    }
    finished = _advance(worlds, lambda ratio, what: on_progress(share * ratio, what))
    outcomes = {system: world.outcome() for system, world in worlds.items()}
    rows = [
        _fleet_row(spec, worlds[system].plan, outcome) for system, outcome in outcomes.items() if outcome.duration > 0.0
    ]
    simulated_s = min((outcome.duration for outcome in outcomes.values()), default=0.0)
    if not (with_protocol and finished):
        return Simulated(spec, tuple(rows), simulated_s, not finished, _notes(spec, systems) if finished else ())
    fleet = outcomes["decoupled"]

    def show(ratio: float) -> None:
        on_progress(share + (1.0 - share) * ratio, "protocol")

    outcome, tape = run_protocol.run(spec, worlds["decoupled"].plan, fleet, show)
    if open_tape is not None:
        sink = open_tape(PROTOCOL_TAPE, tape.header)
        for record in tape.records:
            sink.append(record)
    if outcome.until > 0.0:
        row = run_protocol.row_of(fleet, outcome)
        rows = [*rows, row] if spec.level == "both" else [row]
    return Simulated(spec, tuple(rows), outcome.until, outcome.until < spec.duration, _notes(spec, systems))


def _notes(spec: SimulationSpec, systems: Iterable[str]) -> tuple[str, ...]:
    """What the rows assume; for decoupled in gangs it is simulated once more."""
    plans = [fleet_plan(spec, System(system)) for system in systems]
    decoupled = next((plan for plan in plans if plan.system is System.DECOUPLED), None)
    gangs = notes.as_gangs(decoupled) if decoupled is not None else None
    outcome = simulate_fleet(gangs, spec.seed) if gangs is not None else None
    sentences = [*notes.of_fleet(plans, outcome)]
    if decoupled is not None:
        sentences.append(notes.of_lines(traffic(spec), spec.links.bandwidth, simulated=spec.level != "fleet"))
        sentences += (
            notes.of_bits(spec.wire_bits, spec.codec_bits) if "wire" in spec.synchroniser.model_fields_set else ()
        )
    return tuple(sentences)


def fleet_plan(spec: SimulationSpec, system: System) -> FleetPlan:
    """The specification as the fleet level's plan of one system."""
    assert spec.fleet is not None
    section = spec.fleet
    plan = FleetPlan(
        chips=section.chips,
        duration=spec.duration,
        system=system,
        learners=section.learners,
        chips_per_slice=section.chips_per_slice,
        mtbi_chip=section.mtbi_chip,
        return_time=section.return_time,
        stall_down=section.stall_down,
        stall_up=section.stall_up,
        restart=section.restart,
        step_s=spec.step_s,
        fragments=spec.synchroniser.fragments,
        interval_steps=spec.synchroniser.interval_steps,
        overlap_steps=spec.synchroniser.overlap_steps,
        scavenged=section.visits(),
    )
    return replace(plan, step_factors=spec.speed_factors()) if plan.learner_count > 1 else plan


# ── fleet level ───────────────────────────────────────────────────────────────────────────────────────────────────


def _fleet_world(spec: SimulationSpec, system: System, open_tape: OpenTape | None) -> FleetWorld:
    plan = fleet_plan(spec, system)
    tape = FleetTape(plan, open_tape(str(system), fleet_header(plan, spec.seed))) if open_tape else None
    keeps = spec.level != "fleet" and system is System.DECOUPLED
    return FleetWorld(plan, spec.seed, tape=tape, keep_capacity=keeps)


def _advance(worlds: Mapping[str, FleetWorld], on_progress: Progress) -> bool:
    """All of them to their end, together. Whether they got there."""
    runs: dict[str, Iterator[float]] = {system: world.batches() for system, world in worlds.items()}
    ended = object()
    try:
        while runs:
            for system, run in list(runs.items()):
                done = next(run, ended)
                if done is ended:
                    del runs[system]
                elif isinstance(done, float):
                    on_progress(done, system)
    except KeyboardInterrupt:
        return False
    return True


def _fleet_row(spec: SimulationSpec, plan: FleetPlan, outcome: FleetOutcome) -> dict[str, Any]:
    badput = {str(spent.cause): spent.ratio for spent in outcome.badput if spent.ratio > 0.0}
    stepping = 1.0 - math.fsum(ratio for cause, ratio in badput.items() if cause not in (Cause.AWAY, Cause.UNUSED))
    merges, contributors = _rounds(plan, outcome, stepping)
    return {
        "system": str(outcome.system),
        "level": "fleet",
        "learners": outcome.learners,
        "chips": outcome.chips,
        "goodput": outcome.goodput,
        "stderr": outcome.stderr,
        "uptime": outcome.uptime,
        "badput": badput,
        "merges": merges,
        "contributors_mean": contributors,
        "bandwidth_gbps": bandwidth.mean_gbps(str(outcome.system), traffic(spec)) * stepping,
    }


def _rounds(plan: FleetPlan, outcome: FleetOutcome, stepping: float) -> tuple[int | None, float | None]:
    """Merges of systems in lock-step, from how far they got. How decoupled merges is the protocol level's to say."""
    if plan.system not in (System.DILOCO, System.STREAMING_DILOCO):
        return None, None
    slowest = plan.step_s * max(plan.step_factors, default=1.0)
    fragments = plan.fragments if plan.system is System.STREAMING_DILOCO else 1
    return int(stepping * outcome.duration / (slowest * plan.interval_steps)) * fragments, float(outcome.learners)


def traffic(spec: SimulationSpec) -> bandwidth.Traffic:
    """What the links have to carry; one job of all learners spans as many places as there are learners."""
    links, sync = spec.links, spec.synchroniser
    return bandwidth.Traffic(
        parameters=links.parameters,
        step_s=spec.step_s,
        learners=max(2, spec.fleet.learners if spec.fleet else 2),
        fragments=sync.fragments,
        interval_steps=sync.interval_steps,
        overlap_steps=sync.overlap_steps,
        gradient_bits=max(16.0, spec.wire_bits),
        wire_bits=spec.wire_bits,
        round_trip_s=2.0 * links.latency,
    )
