"""The plan of a simulated world: speeds, latencies, and faults, each with its island and its instant.

Everything is data and seeds, so that a failure is reproduced by its plan and nothing else. After ``calm_at`` no random
fault happens any more: what must happen in the end can be asked of every plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.core.vocabulary import (
    Duration,
    Incarnation,
    Instant,
    IslandId,
    IslandPlan,
    JobPolicy,
    NodeGroupId,
)
from orchestrator.replica.work import AdoptionRule
from orchestrator.simulation.distributions import Distribution

Range = tuple[Duration, Duration]
"""A latency is drawn evenly between the two."""
Latency = Range | Distribution
ENDLESS_TOKENS = 2**62
"""The token budget of a simulated job that ends with the simulation's time."""
RESTARTS_MAX = 1_000_000
"""The ``restarts_max`` of a simulated job that never gives up an island."""


class FaultKind(StrEnum):
    CRASH = "crash"
    """The process dies by itself."""
    KILL = "kill"
    """An operator kills it; it is placed again."""
    KILL_AND_KEEP_AWAY = "kill_and_keep_away"
    READD = "readd"
    FREEZE = "freeze"
    """Stopped for ``duration``, then continued: it neither steps nor answers."""
    CUT = "cut"
    """Unreachable for ``duration``; it goes on training."""
    SLOW = "slow"
    """Payloads from and to it pass at ``bytes_per_second`` for ``duration``."""
    CORRUPT = "corrupt"
    """Its next ``count`` payloads arrive with flipped bits."""
    DELAY = "delay"
    """Its next ``count`` payloads arrive ``duration`` late."""
    DROP = "drop"
    """Its next ``count`` payloads do not arrive."""
    CANCEL = "cancel"
    FINISH = "finish"
    """An operator ends the job early, and its islands give their last work."""
    PAUSE = "pause"
    """The service sends all islands away once their work is merged, as at a limit of cost."""
    CONTINUE = "continue"
    DRAIN = "drain"
    """An operator has it give all its work and end; it is placed again when it is re-added."""
    NOTICE = "notice"
    """Its node goes in ``duration``, which it is told; there is always another node."""
    CORDON = "cordon"
    """Nothing new is placed on its node group."""
    UNCORDON = "uncordon"
    SCALE = "scale"
    """Its node group shall have ``count`` islands of the job."""
    DIVERGE = "diverge"
    """What its present process computes is no numbers from now on."""
    EXPLODE = "explode"
    """The same, but numbers, far from everybody else's."""
    HANG = "hang"
    """The step that its process is in does not end for ``duration``; it answers, and says so."""


@dataclass(frozen=True, slots=True)
class Fault:
    at: Instant
    kind: FaultKind
    island: IslandId
    duration: Duration = 0.0
    count: int = 0
    bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Capacity:
    """The island trains ``ratio`` of its tokens a step from ``at`` on. With 0 it stands still, and answers.

    The step time stays. A step that standing still interrupts goes on where it was.
    """

    at: Instant
    island: IslandId
    ratio: float


@dataclass(frozen=True, slots=True)
class Pace:
    """A recorded speed of an island: steps begun between ``since`` and ``until`` took ``step_s`` each.

    ``pause_s`` is the time from the end of one step to the beginning of the next.
    """

    since: Instant
    until: Instant
    step_s: Duration
    pause_s: Duration = 0.0


@dataclass(frozen=True, slots=True)
class IncarnationStart:
    """The recorded start of one incarnation. ``None`` is drawn as for every other.

    ``begin_s`` is from being told to train to the beginning of the first step.
    """

    island: IslandId
    incarnation: Incarnation
    place_s: Duration | None = None
    placement_fails: bool = False
    start_s: Duration | None = None
    transfer_s: Duration | None = None
    begin_s: Duration | None = None


@dataclass(frozen=True, slots=True)
class WorldPlan:
    """``step_s`` is each island's time per inner step, in the order of the policy; probabilities are per occasion.

    step_samples            of each island: its steps' times are drawn from these instead
    paces                   of each island, in time order: while one lasts, ``step_s`` (with its jitter) and ``pause_s``
                            are the pace's
    pause_s                 of each island: time between two steps, in which it does not step
    median_over             an island reports the median of so many of its latest step times
    capacity                in time order
    payload_bytes           of one fragment; a pull or delivery takes payload_bytes / bandwidth longer
    bandwidth_bytes_per_s   of each island's link
    lives                   recorded starts, used by the incarnations they name
    evaluate_alone_s        what an evaluation takes once no island steps; as ever, if ``None``
    kill_s                  from asking for a kill until the process is dead, ``detect_s`` from then until that is heard
    seed_s                  from the job's start to Θ existing
    parameter_count         of Θ, of which ``router_parameter_count`` are in routers with a fragment of their own

    The defaults of the fields from ``capacity`` on add nothing: they draw no chance and take no time.
    """

    step_s: tuple[Duration, ...]
    step_jitter_ratio: float = 0.05
    tokens_per_step: int = 512
    adoption: AdoptionRule = "replace"
    faults: tuple[Fault, ...] = ()
    calm_at: Instant = float("inf")
    place_s: Latency = (0.05, 0.4)
    start_s: Latency = (0.2, 1.0)
    transfer_s: Latency = (0.05, 0.3)
    letter_s: Latency = (0.0005, 0.003)
    pull_s: Latency = (0.002, 0.02)
    delivery_s: Latency = (0.002, 0.02)
    merge_s: Latency = (0.002, 0.02)
    evaluate_s: Latency = (0.05, 0.1)
    detect_s: Latency = (0.005, 0.02)
    silence_s: Duration = 1.0
    report_every_s: Duration = 0.5
    corrupt: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    catch_up_failure: float = 0.0
    states_left: float = 0.0
    placement_failure: float = 0.0
    publication_loss: float = 0.0
    merge_failure: float = 0.0
    capacity: tuple[Capacity, ...] = ()
    step_samples: tuple[tuple[Duration, ...], ...] = ()
    paces: tuple[tuple[Pace, ...], ...] = ()
    pause_s: tuple[Duration, ...] = ()
    payload_bytes: int = 0
    bandwidth_bytes_per_s: tuple[float, ...] = ()
    lives: tuple[IncarnationStart, ...] = ()
    median_over: int = 1
    evaluate_alone_s: Latency | None = None
    absent: float = 0.0
    absence_s: Latency | None = None
    begin_s: Latency = (0.0, 0.0)
    kill_s: Latency = (0.0, 0.0)
    seed_s: Duration = 0.1
    parameter_count: int = 1000
    router_parameter_count: int = 0


def sample_policy(
    islands: int = 4,
    *,
    quorum: int = 1,
    fragment_count: int = 4,
    interval: int = 12,
    steps: int = 200,
    tokens_per_step: int = 512,
    staleness_max: int = 0,
    grace_cap_steps: float | None = 1.0,
    restarts_max: int = 10,
) -> JobPolicy:
    """A policy for simulated jobs, with four well-known regions to begin with."""
    regions = ["us-east", "us-west", "europe", "asia", *(f"region-{n}" for n in range(4, islands))]
    return JobPolicy(
        islands=tuple(IslandPlan(IslandId(r), NodeGroupId(r), r, 1) for r in regions[:islands]),
        fragment_count=fragment_count,
        sync_interval_steps=interval,
        overlap_steps=min(2, interval - 1),
        quorum=quorum,
        grace_margin=0.8,
        grace_cap_steps=grace_cap_steps,
        staleness_max=staleness_max,
        token_budget=steps * islands * tokens_per_step,
        evaluation_every_merges=32,
        suspect_timeout_s=5.0,
        backoff_first_s=0.2,
        backoff_max_s=4.0,
        restarts_max=restarts_max,
        flush_timeout_s=5.0,
        moving_average_decay=0.9,
    )
