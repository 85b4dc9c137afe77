"""Runs a simulation's specification: every system under the same failures, at one level or at both.

    result = simulate(spec, on_progress);  result.rows, result.plain()

    fleet level       all systems advance together, one batch of virtual time after the other, so that Ctrl-C finds them at
                      the same instant. The results until then are returned, marked as partial
    protocol level    follows with ``decoupled``, on the capacities that the fleet level found for it
    a fitted world    a specification with ``world`` repeats the job of a tape instead (``worldfile``). Its one row comes
                      from the folds that account live jobs: goodput is productive island time over all island time
    notes             sentences about the assumptions behind the figures, each with the cost of the assumption

Files, terminals and charts are up to the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol

from orchestrator.core.vocabulary import Duration, Instant, JobPolicy
from orchestrator.simulation import bandwidth, protocol, worldfile
from orchestrator.simulation.bandwidth import GIGA, Traffic, exchange_of, needed
from orchestrator.simulation.fleet import Cause, FleetOutcome, FleetPlan, System
from orchestrator.simulation.fleet_world import FleetTape, FleetWorld, fleet_header
from orchestrator.simulation.fleet_world import simulate as simulate_fleet
from orchestrator.simulation.plan import WorldPlan
from orchestrator.simulation.spec import SimulationSpec
from orchestrator.simulation.world import World
from orchestrator.system.plain import finite
from orchestrator.tape.schema import FleetHeader, Header, Record, Tape

FLEET_PART = 0.25
"""The part of the progress bar for the fleet level if the protocol level follows."""
PROTOCOL_TAPE = "decoupled-protocol"
SAMPLES = 997
"""The number of step times drawn in advance from a distribution: enough to hide the repetition."""


Progress = Callable[[float, str], None]
"""Called with the part that is done and the name of what is being simulated."""


class TapeSink(Protocol):
    """A tape that is being written (``tape.storage.TapeWriter``)."""

    def append(self, record: Record) -> None: ...

    def append_lines(self, lines: bytes, count: int) -> None: ...


OpenTape = Callable[[str, Header | FleetHeader], TapeSink]
"""Called once for each of ``tape_names``, with its header."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """The result. ``rows`` are plain data, one for each system and level, in the order of the specification."""

    spec: SimulationSpec
    rows: tuple[Mapping[str, Any], ...]
    simulated_s: Duration
    partial: bool = False
    notes: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        about = {"name": self.spec.name, "seed": self.spec.seed, "duration_s": self.spec.duration}
        document: dict[str, Any] = finite(
            {
                **about,
                "simulated_s": self.simulated_s,
                "partial": self.partial,
                "systems": self.rows,
                "notes": self.notes,
            }
        )
        return document


def tape_names(spec: SimulationSpec) -> tuple[str, ...]:
    """Return the names of the tapes to write: one per system at fleet level, else only the protocol level's."""
    if spec.world is not None:
        return ("world",)
    return spec.systems if spec.level == "fleet" else (PROTOCOL_TAPE,)


def simulate(
    spec: SimulationSpec, on_progress: Progress = lambda _ratio, _what: None, open_tape: OpenTape | None = None
) -> Simulated:
    """Run everything that the specification asks for. After Ctrl-C, return what is done until then."""
    if spec.world is not None:
        return _simulate_world(spec, on_progress, open_tape)
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

    outcome, tape = run_protocol(spec, worlds["decoupled"].plan, fleet, show)
    if open_tape is not None:
        sink = open_tape(PROTOCOL_TAPE, tape.header)
        for record in tape.records:
            sink.append(record)
    if outcome.until > 0.0:
        row = row_of(fleet, outcome)
        row |= cost_of(spec, fleet, outcome.goodput, row["badput"])
        rows = [*rows, row] if spec.level == "both" else [row]
    return Simulated(spec, tuple(rows), outcome.until, outcome.until < spec.duration, _notes(spec, systems))


# ── fleet level ───────────────────────────────────────────────────────────────────────────────────────────────────────


def fleet_plan(spec: SimulationSpec, system: System) -> FleetPlan:
    """Return the plan of one system at fleet level."""
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


def _fleet_world(spec: SimulationSpec, system: System, open_tape: OpenTape | None) -> FleetWorld:
    plan = fleet_plan(spec, system)
    tape = FleetTape(plan, open_tape(str(system), fleet_header(plan, spec.seed))) if open_tape else None
    keeps = spec.level != "fleet" and system is System.DECOUPLED
    return FleetWorld(plan, spec.seed, tape=tape, keep_capacity=keeps)


def _advance(worlds: Mapping[str, FleetWorld], on_progress: Progress) -> bool:
    """Advance all worlds to their end, together. Return False if they were interrupted."""
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
        **cost_of(spec, outcome, outcome.goodput, badput),
    }


def cost_of(
    spec: SimulationSpec, fleet: FleetOutcome, goodput: float, badput: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """Return ``cost``, with the names of a job's, if the fleet has a price.

    Chips that are away are free unless they are reserved. Merged are the tokens of productive chips: all learners at full
    speed, by the goodput.
    """
    assert spec.fleet is not None
    section = spec.fleet.price
    if section is None:
        return {}
    price = section.of_island(1, 1)
    whole = price.per_hour * fleet.chips * fleet.duration / 3600.0
    free = () if price.is_paid_while_away else (Cause.AWAY, Cause.UNUSED)
    lost = {cause: whole * ratio for cause, ratio in badput.items() if cause not in free}
    so_far = whole * (1.0 - math.fsum(ratio for cause, ratio in badput.items() if cause in free))
    speed = math.fsum(1.0 / (factor * spec.step_s) for factor in spec.speed_factors())
    merged = goodput * fleet.duration * spec.steps.tokens_per_step * speed
    per_million = so_far / merged * 1e6 if merged else None
    return {
        "cost": {
            "currency": price.currency,
            "so_far": so_far,
            "per_merged_million_tokens": per_million,
            "badput": lost,
        }
    }


def _rounds(plan: FleetPlan, outcome: FleetOutcome, stepping: float) -> tuple[int | None, float | None]:
    """Return merges and contributors of systems in lock-step. For decoupled only the protocol level knows them."""
    if plan.system not in (System.DILOCO, System.STREAMING_DILOCO):
        return None, None
    slowest = plan.step_s * max(plan.step_factors, default=1.0)
    fragments = plan.fragments if plan.system is System.STREAMING_DILOCO else 1
    return int(stepping * outcome.duration / (slowest * plan.interval_steps)) * fragments, float(outcome.learners)


# ── protocol level ────────────────────────────────────────────────────────────────────────────────────────────────────


def run_protocol(
    spec: SimulationSpec, plan: FleetPlan, fleet: FleetOutcome, on_progress: Callable[[float], None]
) -> tuple[protocol.ProtocolOutcome, Tape]:
    """Run decoupled at protocol level. Return the measurements and the tape. ``on_progress`` may raise KeyboardInterrupt."""
    policy = job_policy(spec, len(fleet.capacity))
    simulated_plan = world_plan(spec, policy, fleet)
    world = World(policy, simulated_plan, spec.seed, checked=False)
    warm_up = min(2.0 * policy.sync_interval_steps * spec.step_s, 0.2 * spec.duration)
    outcome = protocol.run(world, warm_up, spec.duration, _full_tokens(plan, simulated_plan), on_progress)
    return outcome, world.sink.tape(Header(f"simulated-{spec.name}-{spec.seed}", policy))


def row_of(fleet: FleetOutcome, outcome: protocol.ProtocolOutcome) -> dict[str, Any]:
    """Return the row of the protocol level, with the fields of the fleet level's rows."""
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
    """Return the core's policy for the synchroniser section."""
    sync = spec.synchroniser
    policy = protocol.policy(
        islands,
        quorum=sync.quorum,
        quorum_ratio=sync.quorum_ratio_of(islands),
        fragments=sync.fragments,
        interval_steps=sync.interval_steps,
        overlap_steps=sync.overlap_steps,
        grace_cap_steps=sync.grace_cap_steps,
        grace_margin=sync.grace_margin,
        grace_floor_steps=sync.grace_floor_steps_of(islands),
    )
    return replace(policy, staleness_max=sync.staleness_max)


def world_plan(spec: SimulationSpec, policy: JobPolicy, fleet: FleetOutcome) -> WorldPlan:
    """Return the plan: steps and links as specified, and the capacities that the fleet level found."""
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
    """Return the tokens between two instants at full speed. Scavenged learners count only while their chips are there."""
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


# ── a fitted world ────────────────────────────────────────────────────────────────────────────────────────────────────


def _simulate_world(spec: SimulationSpec, on_progress: Progress, open_tape: OpenTape | None) -> Simulated:
    """Run the job of a fitted world to its end, for the specification's duration, or up to Ctrl-C."""
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
    time, statistics = world.goodput.summary(at), world.statistics.summary(at)
    total = time["island_seconds"]["total"] or 1.0
    badput = {cause: seconds / total for cause, seconds in time["badput_seconds"].items()}
    if in_flight := time["island_seconds"]["in_flight"] / total:
        badput["in flight"] = in_flight
    carried = (
        world.plan.payload_bytes * statistics["contributors_mean"] * statistics["merges"] / len(world.policy.islands)
    )
    return {
        "system": "decoupled",
        "level": "protocol",
        "learners": len(world.policy.islands),
        "chips": sum(island.accelerator_count for island in world.policy.islands),
        "goodput": time["goodput_ratio"],
        "stderr": None,
        "uptime": time["uptime_ratio"],
        "badput": badput,
        "merges": statistics["merges"],
        "contributors_mean": statistics["contributors_mean"],
        "bandwidth_gbps": 8e-9 * carried / at if carried and at else None,
        **({"cost": time["cost"]} if "cost" in time else {}),
    }


# ── notes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _notes(spec: SimulationSpec, systems: Iterable[str]) -> tuple[str, ...]:
    """Return the assumptions behind the rows. Decoupled is simulated once more for the figure of islands as gangs."""
    plans = [fleet_plan(spec, System(system)) for system in systems]
    decoupled = next((plan for plan in plans if plan.system is System.DECOUPLED), None)
    gangs = as_gangs(decoupled) if decoupled is not None else None
    outcome = simulate_fleet(gangs, spec.seed) if gangs is not None else None
    sentences = [*of_fleet(plans, outcome)]
    if decoupled is not None:
        sentences.append(of_lines(traffic(spec), spec.links.bandwidth, simulated=spec.level != "fleet"))
        sentences += of_bits(spec.wire_bits, spec.codec_bits) if "wire" in spec.synchroniser.model_fields_set else ()
    return tuple(sentences)


def traffic(spec: SimulationSpec) -> bandwidth.Traffic:
    """Return the traffic of the job, in which every learner is a datacentre of its own."""
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


def as_gangs(plan: FleetPlan) -> FleetPlan | None:
    """Return the plan with one slice per learner, like the islands of this build, or None if it has that already."""
    return None if _slices_of_a_learner(plan) <= 1 else replace(plan, chips_per_slice=plan.chips // plan.learners)


def of_fleet(plans: Sequence[FleetPlan], gangs: FleetOutcome | None) -> Iterator[str]:
    """Yield the assumptions of the fleet level. ``gangs`` is the outcome of ``as_gangs`` of the decoupled plan, if any."""
    by_system = {plan.system: plan for plan in plans}
    if (plan := by_system.get(System.DECOUPLED)) is not None and gangs is not None:
        yield (
            f"decoupled: its learners of {_slices_of_a_learner(plan)} slices shrink by a slice and keep training. An island "
            "of this build cannot: it is one gang, and stops until all its slices are back. With gangs, goodput would be "
            f"{100 * gangs.goodput:.1f} %."
        )
    if (plan := by_system.get(System.DATA_PARALLEL)) is not None:
        yield (
            "data-parallel: it restarts on a spare slice after every failure, and spares never run out. Without spares it "
            f"would train only while all {plan.slice_count:,} slices work: {100 * _all_there(plan):.1f} % of the time."
        )


def of_lines(traffic: Traffic, bits_per_second: float, *, simulated: bool) -> str:
    """Return whether a learner's line carries the traffic of decoupled, by the closed forms. Bits per second each way."""
    exchange = exchange_of("decoupled", traffic)
    room = min(exchange.slack, exchange.gap)
    line = (
        f"lines: each way, {exchange.bits / GIGA:.3g} Gbit are due every {exchange.gap:.3g} s ({traffic.wire_bits:.3g} bits "
        f"per parameter) and must arrive within {max(0.0, room):.3g} s; at {bits_per_second / GIGA:g} Gbps they take "
        f"{exchange.bits / bits_per_second:.3g} s."
    )
    ratio = needed(exchange, 1.0) / bits_per_second
    if room <= 0.0:
        line += " The round trip alone takes longer than overlap_steps allows, so fragments arrive late. Raise it."
    elif ratio > 1.0:
        line += (
            f" The line would have to be {ratio:.2g} times as fast: islands miss merges and train on old parameters. Use a "
            "codec with fewer bits (synchroniser.wire), a longer interval_steps, or more overlap_steps."
        )
    return line if simulated else f"{line} The fleet level does not simulate lines; level: protocol does."


def of_bits(traffic_bits: float, codec_bits: float) -> Iterator[str]:
    """Yield a note if ``links.bits`` and the codec of ``synchroniser.wire`` differ."""
    if abs(traffic_bits - codec_bits) > 0.5:
        yield (
            f"lines: links.bits is {traffic_bits:g}, but the codec of synchroniser.wire has {codec_bits:.3g} bits per "
            "parameter. The simulation uses links.bits. Leave it out to use the codec's."
        )


def _slices_of_a_learner(plan: FleetPlan) -> int:
    return plan.slice_count // plan.learners


def _all_there(plan: FleetPlan) -> float:
    """Return the part of the time in which no slice is away, if each fails and returns independently."""
    lasts_s = plan.mtbi_chip / plan.chips_per_slice
    return float((lasts_s / (lasts_s + plan.return_time.mean)) ** plan.slice_count)
