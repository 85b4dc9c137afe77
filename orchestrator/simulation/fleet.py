"""The fleet level's plan and outcome: what hardware there is, which system trains on it, and what came of it.

Responsible for: the words of the fleet level, and for turning a plan into the policy that the job's rules go by
(``orchestrator/elastic``). Refuses to know: steps, offers and merges (the protocol level, ``world``), and whose learner a
given outage hits. ``fleet_world`` runs a plan.

    no elasticity   data-parallel          one learner of all chips; any failure stalls it (``restart``)
    elastic         elastic-data-parallel  one learner; failures shrink it (``stall_down``), returns grow it (``stall_up``)
    lock-step       diloco                 M elastic learners; at each outer step everybody waits for the last one
                    streaming-diloco       the same for each fragment, with ``overlap_steps`` of patience
    decoupled       decoupled              M elastic learners that never wait

Source: Decoupled DiLoCo, arXiv:2604.21428 (the systems and the failure model in words); parameters: ``calibration``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from orchestrator.core.vocabulary import Duration, Instant
from orchestrator.elastic.jobs import Block, DuringStall, ElasticPolicy
from orchestrator.errors import ConfigurationError
from orchestrator.simulation.distributions import UNITS, Constant, Distribution, Exponential

RESTART_S = 78.2
"""R: from an interruption to a job on all slices again, without elasticity. Fitted (``calibration``)."""
STALL_S = 13.1
"""D = U: how long an elastic job stands still to shrink or to grow. Fitted (``calibration``)."""
RETURN_S = 1800.0
CHIPS_PER_SLICE = 256
"""Assumed, not fitted: half an hour until a slice is back, and slices of 256 chips. Only their product acts on goodput."""


class System(StrEnum):
    DATA_PARALLEL = "data-parallel"
    ELASTIC_DATA_PARALLEL = "elastic-data-parallel"
    DILOCO = "diloco"
    STREAMING_DILOCO = "streaming-diloco"
    DECOUPLED = "decoupled"


ONE_LEARNER = frozenset({System.DATA_PARALLEL, System.ELASTIC_DATA_PARALLEL})
LOCK_STEP = frozenset({System.DILOCO, System.STREAMING_DILOCO})
DISTRIBUTIONS = ("return_time", "stall_down", "stall_up", "restart")
"""Fields of a plan that are distributions."""

_RETURN, _STALL, _RESTART = Exponential(RETURN_S), Constant(STALL_S), Constant(RESTART_S)


class Cause(StrEnum):
    """Where a chip's time goes when it is not productive. Values are for people."""

    SHRINKING = "stalled: shrinking"
    GROWING = "stalled: growing"
    RESTARTING = "stalled: restarting"
    AWAY = "slice away"
    WAITING = "waiting for the slowest learner"
    UNUSED = "there, but of no use to this system"


@dataclass(frozen=True, slots=True)
class Scavenged:
    """Chips that are there only from ``since`` to ``until``."""

    chips: int
    since: Instant
    until: Instant


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Durations in seconds; ``mtbi_chip`` is the mean of an exponential time. The seed is not part of the plan.

    ``step_factors``: each learner's step time relative to ``step_s``, all 1 when empty. Only systems in lock-step mind.
    """

    chips: int
    duration: Duration
    system: System = System.DECOUPLED
    learners: int = 8
    chips_per_slice: int = CHIPS_PER_SLICE
    mtbi_chip: Duration = UNITS["y"]
    return_time: Distribution = _RETURN
    stall_down: Distribution = _STALL
    stall_up: Distribution = _STALL
    restart: Distribution = _RESTART
    step_s: Duration = 1.0
    step_factors: tuple[float, ...] = ()
    fragments: int = 24
    interval_steps: int = 24
    overlap_steps: int = 2
    scavenged: tuple[Scavenged, ...] = ()
    during_stall: DuringStall = DuringStall.ABSORBED
    returns_join: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigurationError for a fleet that cannot be."""
        if self.chips < 1 or self.chips_per_slice < 1 or self.learners < 1:
            raise ConfigurationError(detail="chips, chips_per_slice and learners must be at least 1.")
        if self.slice_count < self.learner_count:
            raise ConfigurationError(
                detail=f"{self.chips} chips are {self.slice_count} slices of {self.chips_per_slice}, too few for "
                f"{self.learner_count} learners. Lower learners or chips_per_slice, or add chips."
            )
        if not (self.duration > 0.0 and self.mtbi_chip > 0.0 and self.step_s > 0.0):
            raise ConfigurationError(detail="duration, mtbi_chip and step_s must be more than 0.")
        if self.step_factors and len(self.step_factors) != self.learner_count:
            raise ConfigurationError(
                detail=f"step_factors names {len(self.step_factors)} learners, but there are {self.learner_count}. "
                "Name each, or none."
            )
        if any(extra.chips < 1 or not 0.0 <= extra.since < extra.until for extra in self.scavenged):
            raise ConfigurationError(
                detail="scavenged capacity needs at least 1 chip, and to leave after it came, at 0 or later."
            )
        if self.fragments < 1 or self.interval_steps < 1 or self.overlap_steps < 0:
            raise ConfigurationError(
                detail="fragments and interval_steps must be at least 1, overlap_steps at least 0."
            )

    @property
    def learner_count(self) -> int:
        """Resident learners, as far as this system has any choice."""
        return 1 if self.system in ONE_LEARNER else self.learners

    @property
    def slice_count(self) -> int:
        """Resident slices; the nearest whole number."""
        return max(1, round(self.chips / self.chips_per_slice))

    @property
    def chips_seen(self) -> int:
        """All chips that the failure trace is drawn for, scavenged ones included."""
        return self.chips + sum(extra.chips for extra in self.scavenged)

    def scavenged_slices(self, extra: Scavenged) -> int:
        return max(1, round(extra.chips / self.chips_per_slice))

    @property
    def trace_slices(self) -> int:
        return self.slice_count + sum(self.scavenged_slices(extra) for extra in self.scavenged)

    def blocks(self) -> tuple[tuple[Block, Scavenged | None], ...]:
        """Slices of each learner, and of which scavenged capacity a block is. Slice numbers do not depend on the system.

        Where learners are many, scavenged chips become learners of their own of about the residents' size, so that nobody
        reconfigures for them; where there is one, they join it; without elasticity they cannot be used, and are never
        ``resident`` nor arrive.
        """
        blocks: list[tuple[Block, Scavenged | None]] = [
            (Block(learner, count), None) for learner, count in enumerate(_shares(self.slice_count, self.learner_count))
        ]
        following = self.learner_count
        for extra in self.scavenged:
            slices = self.scavenged_slices(extra)
            if self.system in ONE_LEARNER:
                blocks.append((Block(0, slices, resident=False), extra))
                continue
            parts = min(slices, max(1, round(slices * self.learner_count / self.slice_count)))
            for count in _shares(slices, parts):
                blocks.append((Block(following, count, resident=False), extra))
                following += 1
        return tuple(blocks)

    def policy(self) -> ElasticPolicy:
        return ElasticPolicy(
            blocks=tuple(block for block, _ in self.blocks()),
            elastic=self.system is not System.DATA_PARALLEL,
            during_stall=self.during_stall,
            returns_join=self.returns_join,
        )

    def plain(self) -> dict[str, Any]:
        """The plan as JSON can hold it, for a tape's header."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields |= {name: fields[name].plain() for name in DISTRIBUTIONS}
        fields |= {"system": str(self.system), "during_stall": str(self.during_stall)}
        return {
            **fields,
            "step_factors": list(self.step_factors),
            "scavenged": [asdict(extra) for extra in self.scavenged],
        }


@dataclass(frozen=True, slots=True)
class Badput:
    cause: Cause
    chip_seconds: float
    ratio: float


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """What a run came to. Goodput is productive chip-seconds over all chip-seconds; with badput's ratios it adds up to 1.

    ``stderr`` is the standard error of goodput from the means of equal batches of time; NaN with fewer than two.
    ``uptime`` is the part of time in which at least one learner trained. ``capacity``, when asked for: for each learner
    [(at, ratio), …], from ``at`` on it has ``ratio`` of its nominal slices, 0 during a stall; the first entry is at 0.
    ``duration`` is what was simulated: less than planned after an interruption.
    """

    system: System
    learners: int
    chips: int
    duration: Duration
    goodput: float
    stderr: float
    uptime: float
    badput: tuple[Badput, ...]
    outages: int
    stalls: int
    events: int
    capacity: tuple[tuple[tuple[Instant, float], ...], ...] = ()
    batches: tuple[float, ...] = field(default=(), repr=False)

    def plain(self) -> dict[str, Any]:
        """For ``--json``; without capacity and batches."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name not in ("capacity", "batches")}
        badput = [{"cause": str(b.cause), "chip_seconds": b.chip_seconds, "ratio": b.ratio} for b in self.badput]
        return {**fields, "system": str(self.system), "badput": badput}


def _shares(slices: int, learners: int) -> list[int]:
    """As even as whole slices allow, larger shares first."""
    each, over = divmod(slices, learners)
    return [each + (number < over) for number in range(learners)]
