"""Twenty simulated jobs, each a whole run from settings and a seed: of specifications, of worlds with faults, of fleets.

``JOBS`` holds them by name; calling one runs it and returns the digest of its decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from orchestrator.core.vocabulary import IslandId
from orchestrator.simulation import spec
from orchestrator.simulation.plan import Capacity, Fault, FaultKind, WorldPlan, sample_policy
from orchestrator.simulation.run import simulate
from orchestrator.simulation.world import World
from tests.golden.decisions import Decisions, watched
from tests.simulation.random_faults import random_faults

FAULTS, FAULTS_UNTIL_S = 6, 12.0
ENDS_BEFORE_S = 3600.0
FLEET = {"chips": 200_000, "learners": 4, "mtbi_chip": "90d", "return_time": {"uniform": [60, 600]}}
LONG_STALLS = {**FLEET, "stall_down": 60, "stall_up": {"exponential": 40}}
STEPS = {"step_time": "2s", "tokens_per_step": 4096}
BY_CHANCE = {"step_time": {"uniform": [1.5, 2.5]}, "tokens_per_step": 4096}
UNEVEN = {**STEPS, "speed_classes": [{"learners": 2, "factor": 1.0}, {"learners": 2, "factor": 1.7}]}
SYNCHRONISER = {"fragments": 8, "interval_steps": 24, "overlap_steps": 2, "grace_cap_steps": 1.0}
SLOW_LINKS = {"bandwidth": "800Mbps", "latency": 0.2, "parameters": 2_000_000_000}
US_EAST, US_WEST, EUROPE, ASIA = map(IslandId, ("us-east", "us-west", "europe", "asia"))
OPERATORS = (
    Fault(2.0, FaultKind.DRAIN, ASIA),
    Fault(4.0, FaultKind.READD, ASIA),
    Fault(5.0, FaultKind.CORDON, EUROPE),
    Fault(5.5, FaultKind.KILL, EUROPE),
    Fault(8.0, FaultKind.UNCORDON, EUROPE),
    Fault(18.0, FaultKind.CANCEL, US_EAST),
)
SICK = (
    Fault(3.0, FaultKind.DIVERGE, ASIA),
    Fault(5.0, FaultKind.EXPLODE, EUROPE),
    Fault(7.0, FaultKind.CRASH, US_EAST),
)
LINKS = (
    Fault(2.0, FaultKind.SLOW, ASIA, 5.0, bytes_per_second=2e4),
    Fault(3.0, FaultKind.CORRUPT, EUROPE, count=3),
    Fault(4.0, FaultKind.DROP, US_WEST, count=2),
    Fault(5.0, FaultKind.DELAY, US_EAST, 1.0, count=3),
    Fault(8.0, FaultKind.CUT, ASIA, 8.0),
    Fault(9.0, FaultKind.FREEZE, EUROPE, 2.0),
)


def _specified(seed: int, **sections: Mapping[str, Any]) -> str:
    """A small relative of ``deploy/configs/simulate.yaml``, at protocol level."""
    usual = {"fleet": FLEET, "steps": STEPS, "synchroniser": SYNCHRONISER}
    about = {"name": "golden", "seed": seed, "duration": "20min", "level": "protocol", "systems": ["decoupled"]}
    with watched() as decisions:
        simulate(spec.parse({**about, **usual, **sections}))
    return decisions.digest


def _fleet(seed: int, system: str) -> str:
    """At fleet level it is not a job's core that decides, but a fleet's, through no ``Driver``."""
    decisions = Decisions()
    document = {"name": "golden", "seed": seed, "duration": "6h", "systems": [system], "fleet": FLEET, "steps": STEPS}
    simulate(spec.parse(document), open_tape=lambda _name, _header: decisions)
    return decisions.digest


def _world(
    seed: int,
    islands: int = 4,
    faults: tuple[Fault, ...] | None = None,
    policy: Mapping[str, Any] | None = None,
    **plan: Any,
) -> str:
    """A world as the simulator's own tests have them; its faults are random ones, if none are given."""
    sampled = sample_policy(islands, **{"steps": 300, **(policy or {})})
    if faults is None:
        faults = random_faults(seed, sampled, FAULTS_UNTIL_S, FAULTS)
    speeds = tuple(0.05 + 0.01 * n for n in range(islands))
    with watched() as decisions:
        World(sampled, WorldPlan(speeds, faults=faults, **plan), seed).run(until=ENDS_BEFORE_S)
    return decisions.digest


CARELESS = {"corrupt": 0.02, "duplicate": 0.1, "reorder": 0.1, "publication_loss": 0.05, "merge_failure": 0.02}
STARTS = {"catch_up_failure": 0.3, "placement_failure": 0.3}
HALF = (Capacity(3.0, ASIA, 0.5), Capacity(6.0, EUROPE, 0.0), Capacity(9.0, EUROPE, 1.0))
JOBS: Mapping[str, Callable[[], str]] = {
    "specified": partial(_specified, 101),
    "specified-quorum": partial(_specified, 102, synchroniser={**SYNCHRONISER, "quorum": 3}),
    "specified-stalls": partial(_specified, 103, fleet=LONG_STALLS),
    "specified-by-chance": partial(_specified, 104, steps=BY_CHANCE),
    "specified-uneven": partial(_specified, 105, steps=UNEVEN),
    "specified-stale": partial(
        _specified, 106, steps=UNEVEN, synchroniser={**SYNCHRONISER, "staleness_max": 2, "adoption": "replace"}
    ),
    "specified-slow-links": partial(_specified, 107, links=SLOW_LINKS),
    "specified-eight": partial(_specified, 108, fleet={**FLEET, "learners": 8}),
    "world": partial(_world, 201),
    "world-calm": partial(_world, 202, faults=()),
    "world-rebase": partial(_world, 203, adoption="rebase"),
    "world-quorum-of-all": partial(_world, 204, 3, policy={"quorum": 3}),
    "world-careless": partial(_world, 205, **CARELESS),
    "world-hard-starts": partial(_world, 206, **STARTS),
    "world-operators": partial(_world, 207, faults=OPERATORS, policy={"steps": 2000}, adoption="rebase"),
    "world-sick": partial(_world, 208, faults=SICK),
    "world-links": partial(_world, 209, faults=LINKS, payload_bytes=4096, bandwidth_bytes_per_s=(1e6,) * 4),
    "world-capacity": partial(_world, 210, 5, capacity=HALF, policy={"staleness_max": 3, "restarts_max": 1}),
    "fleet-elastic": partial(_fleet, 301, "elastic-data-parallel"),
    "fleet-decoupled": partial(_fleet, 302, "decoupled"),
}
