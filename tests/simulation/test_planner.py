"""Plans: the closed forms agree with the simulated protocol, more never hurts, and mistakes have their remedy."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from orchestrator.core.vocabulary import Incarnation
from orchestrator.errors import ConfigurationError, InvalidJobSpec
from orchestrator.simulation import protocol
from orchestrator.simulation.line_advice import Demand, Line, SyncSettings, bits_of, meeting
from orchestrator.simulation.plan import Fault, FaultKind, IncarnationStart
from orchestrator.simulation.planner import STATE_BYTES, Fleet, fleet_of, goodput_of, of_job, plain, planned
from orchestrator.simulation.world import World
from orchestrator.specification.config import parse_job
from orchestrator.specification.documents import read_document

FIGURES = {
    "parameters": "8e9",
    "islands": 8,
    "hosts": 32,
    "mtbf_host": "3d",
    "line": "5Gbps",
    "step_s": 0.5,
    "price": "2.10",
}
DEATHS = 300


def test_routers_apart_send_their_bits_more_often_and_lose_fewer_steps() -> None:
    """A tenth of the parameters every 6 steps, the rest every 24: (0.9/24 + 0.1/6)·n parameters a step."""
    fleet = Fleet(parameters=1e8, islands=4, mtbf_host=3600.0, line=1e10, step_s=2.0)
    plain = SyncSettings(24, 4, 8, "float32")
    apart = replace(plain, fragments=9, router_interval_steps=6, router_parameters=1e7)
    before, after = (planned(fleet, settings).best for settings in (plain, apart))
    assert before.settings == plain
    assert after.settings == apart
    assert before.line_use * 1e10 == pytest.approx(32 * 1e8 / 24 / 2.0)
    assert after.line_use * 1e10 == pytest.approx(32 * 1e8 * (0.9 / 24 + 0.1 / 6) / 2.0)
    travels = [(0.03 + 32 * size / 1e10) / 2.0 for size in (1e8 / 8, 0.9e8 / 8)]
    lost = [steps * 2.0 / 3600.0 for steps in (12.0 + travels[0], (0.9 * 24 + 0.1 * 6) / 2 + travels[1])]
    goodputs = [goodput_of(fleet, settings)[0] for settings in (plain, apart)]
    assert goodputs[1] / goodputs[0] == pytest.approx((1 - lost[1]) / (1 - lost[0]))
    few = replace(apart, router_parameters=2e9)  # of a job whose parameters an option replaced
    assert planned(fleet, few).best.line_use * 1e10 == pytest.approx(32 * 1e8 / 6 / 2.0)


def _drawn(seed: int) -> Fleet:
    """Draw a fleet whose islands die every 100 to 400 steps, and are away for 5 to 50 % of the time in between."""
    random = Random(seed)
    step_s, hosts = random.uniform(0.5, 8.0), random.randint(1, 64)
    alive_s = step_s * random.uniform(100.0, 400.0)
    parameters, line = int(10 ** random.uniform(8.0, 10.0)), 10 ** random.uniform(9.0, 11.0)
    outage_s = alive_s * random.uniform(0.05, 0.5)
    transfer_s = 8.0 * STATE_BYTES * parameters / line
    if transfer_s > outage_s:
        line *= transfer_s / outage_s * 2.0
        transfer_s = outage_s / 2.0
    return Fleet(
        parameters=parameters,
        islands=random.randint(2, 6),
        hosts=hosts,
        mtbf_host=alive_s * hosts,
        line=line,
        step_s=step_s,
        host_return=(outage_s - transfer_s) * 0.7,
        start=(outage_s - transfer_s) * 0.3,
    )


def _times_to_death(fleet: Fleet, span_s: float, random: Random) -> Iterator[float]:
    """Yield exponential times in random order, one from each quantile of as many as are expected in the span.

    Independent ones would have another mean with each seed: of 75 deaths of an island, 11 % more or less are usual, which
    moves the goodput by more than the formulas may be off.
    """
    count = max(1, round(span_s * fleet.death_rate))
    while True:
        times = [-math.log((n + random.random()) / count) / fleet.death_rate for n in range(count)]
        random.shuffle(times)
        yield from times


def _simulated(fleet: Fleet, seed: int) -> tuple[float, float]:
    """Return the goodput of the core's own decisions over islands that die as the fleet's do, and ours."""
    settings = planned(fleet).best.settings
    meet = meeting(Line("line", fleet.round_trip, fleet.line), Demand(fleet.parameters, fleet.step_s, {}), settings)
    policy = protocol.policy(
        fleet.islands,
        fragments=settings.fragments,
        interval_steps=settings.interval_steps,
        overlap_steps=max(settings.overlap_steps, meet.overlap_steps if meet else 0),
        grace_cap_steps=meet.grace_cap_steps if meet else 3.0,
    )
    start = 4 * settings.interval_steps * fleet.step_s
    stop = start + DEATHS / (fleet.islands * fleet.death_rate)
    transfer_s = 8.0 * STATE_BYTES * fleet.parameters / fleet.line
    random, faults, lives = Random(seed), [], []
    for island in policy.islands:
        alive_s = _times_to_death(fleet, stop, random)
        at, incarnation = next(alive_s), 1
        while at < stop:
            faults.append(Fault(at, FaultKind.CRASH, island.island))
            back = at + fleet.outage_s
            while (again := at + next(alive_s)) < back:
                at, back = again, again + fleet.outage_s
            incarnation += 1
            place_s = back - faults[-1].at - fleet.start - transfer_s
            lives.append(IncarnationStart(island.island, Incarnation(incarnation), place_s))
            at = again
    plan = protocol.plan(
        (fleet.step_s,) * fleet.islands,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        lives=tuple(lives),
        start_s=(fleet.start,) * 2,
        transfer_s=(transfer_s,) * 2,
        letter_s=(fleet.round_trip / 2,) * 2,
        payload_bytes=int(fleet.parameters / settings.fragments * bits_of(settings.codec) / 8),
        bandwidth_bytes_per_s=(fleet.line / 8,) * fleet.islands,
    )
    world = World(policy, plan, seed, checked=False)
    outcome = protocol.run(world, start, stop, protocol.at_full_speed(plan))
    return outcome.goodput, goodput_of(fleet, settings)[0]


@pytest.mark.parametrize("seed", range(20 if os.environ.get("ATOLL_SOAK") else 1))
def test_a_plan_agrees_with_the_simulated_protocol(seed):
    simulated, formula = _simulated(_drawn(seed), seed)
    assert formula == pytest.approx(simulated, rel=0.05)


def test_an_island_of_hosts_dies_whole():
    gangs, single = (goodput_of(fleet_of({**FIGURES, "hosts": n}), _settings())[0] for n in (32, 1))
    assert gangs < 0.9 < single


def _settings():
    return planned(fleet_of(FIGURES)).best.settings


def test_standbys_cost_money_and_bring_goodput():
    plans = {plan.standbys: plan for plan in (planned(fleet_of(FIGURES)).best, *planned(fleet_of(FIGURES)).others)}
    goodputs = [plans[n].goodput for n in sorted(plans)]
    assert goodputs == sorted(goodputs)
    assert goodputs[-1] > 0.99
    for n, plan in plans.items():
        gpu_hours = (8 + n) * 32 * 8 * plan.seconds / 3600
        assert plan.money == pytest.approx(2.10 * gpu_hours)
    found = planned(fleet_of(FIGURES))
    assert found.best.money == min(plan.money for plan in plans.values())
    free = planned(fleet_of({name: value for name, value in FIGURES.items() if name != "price"}))
    assert free.best.goodput == max(goodputs), "without a price, time decides"


def test_data_parallel_waits_for_replacements():
    """256 hosts of 3 days each: one dies every 1,012 s, and all must be there for 990 s before training goes on."""
    fleet = fleet_of({**FIGURES, "islands": 1, "hosts": 256})
    row = planned(fleet).data_parallel
    assert row is not None
    assert row.goodput < math.exp(-990.0 / 1012.5)


def test_a_longer_job_is_known_better():
    fleet = fleet_of(FIGURES)
    _, spread = goodput_of(fleet, _settings())
    assert spread(1e6) == pytest.approx(spread(1e4) / 10)
    assert spread(1.0) <= 0.5


def test_the_settings_are_those_of_the_advice_on_lines():
    thick = planned(fleet_of(FIGURES))
    assert thick.advice.changes(thick.current) == {}
    thin = planned(fleet_of({**FIGURES, "line": "500Mbps"}))
    assert thin.best.settings.interval_steps > thick.best.settings.interval_steps
    assert thin.best.line_use <= 1.0


@pytest.mark.parametrize("step_s", [0.5, 0.01])
def test_a_line_that_is_too_thin_is_refused_with_how_much_would_suffice(step_s):
    figures = {**FIGURES, "step_s": step_s}
    with pytest.raises(ConfigurationError, match="too thin by ") as refused:
        planned(fleet_of({**figures, "line": "100kbps"}))
    times, needed, prefix = re.search(
        r"by ([0-9.,]+) times: at least ([0-9.]+) ([kMG])bps", str(refused.value)
    ).groups()
    bits = float(needed) * {"k": 1e3, "M": 1e6, "G": 1e9}[prefix]
    assert float(times.replace(",", "")) == pytest.approx(bits / 1e5, rel=0.01)
    assert planned(fleet_of({**figures, "line": bits * 1.01})).best.goodput > 0.0
    with pytest.raises(ConfigurationError, match=r"too thin by 1\.0"):
        planned(fleet_of({**figures, "line": bits * 0.98}))


def test_a_round_trip_that_no_line_makes_up_for_is_refused_as_such():
    with pytest.raises(ConfigurationError, match=r"round trip of 0\.06 s is too long for steps of 1e-09 s"):
        planned(fleet_of({**FIGURES, "step_s": 1e-9}))


@pytest.mark.parametrize(("option", "most"), [("islands", 4096), ("hosts", 65_536)])
def test_a_fleet_beyond_every_fleet_is_refused_at_once(option, most):
    fleet_of({**FIGURES, option: most})
    with pytest.raises(InvalidJobSpec, match=f"--{option}"):
        fleet_of({**FIGURES, option: most + 1})


def test_bytes_per_second_are_not_taken_for_bits():
    with pytest.raises(InvalidJobSpec, match="'5GBps' are bytes per second"):
        fleet_of({**FIGURES, "line": "5GBps"})


def test_many_islands_vary_less_than_a_few_also_in_a_short_job():
    """Far shorter than an absence, a job sees each island there or not: the spread is that of a mean over islands."""
    fleet = fleet_of({**FIGURES, "islands": 1000})
    goodput, spread = goodput_of(fleet, SyncSettings(24, 4, 8, "int4"))
    assert spread(1.0) < 1.5 * (goodput * (1.0 - goodput) / 1000) ** 0.5


def test_all_mistakes_are_named_as_options():
    with pytest.raises(InvalidJobSpec) as caught:
        fleet_of({"parameters": "many", "islands": 0, "mtbf_host": "soon", "line": "5", "step_s": "-1s", "price": "-2"})
    paths = {problem.path for problem in caught.value.problems}
    assert {"--parameters", "--islands", "--mtbf-host", "--step-s", "--price"} <= paths


@pytest.mark.parametrize("figures", [{"islands": 4096}, {"host_return": 0}, {"islands": 1, "hosts": 1}])
def test_extreme_fleets_have_figures(figures):
    found = planned(fleet_of({**FIGURES, **figures}))
    for row in plain(found):
        assert 0.0 <= row["goodput"] <= 1.0
        assert row["seconds"] > 0.0


def test_a_job_gives_what_it_has():
    figures, settings = of_job(parse_job(read_document(Path(__file__).parents[2] / "deploy/configs/demo.yaml")))
    assert figures["islands"] == 4
    assert figures["parameters"] > 100_000
    assert settings.interval_steps == 24
    assert (
        planned(fleet_of({**figures, "mtbf_host": "3d", "line": "5Gbps", "step_s": 0.1}), settings).best.goodput > 0.9
    )


@pytest.mark.parametrize("figures", [{"mtbf_host": "1s"}, {"hosts": 65_536}])
def test_a_fleet_that_dies_faster_than_it_starts_is_refused(figures):
    with pytest.raises(ConfigurationError, match="An island of this fleet dies every "):
        planned(fleet_of({**FIGURES, **figures}))
