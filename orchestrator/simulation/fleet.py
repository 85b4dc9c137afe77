"""The plan and the outcome of a simulation at fleet level: the hardware, the system that trains on it, and the result.

    no elasticity   data-parallel          one learner of all chips; any failure stalls it (``restart``)
    elastic         elastic-data-parallel  one learner; failures shrink it (``stall_down``), returns grow it (``stall_up``)
    lock-step       diloco                 M elastic learners; at each outer step all wait for the last one
                    streaming-diloco       the same for each fragment, with a tolerance of ``overlap_steps``
    decoupled       decoupled              M elastic learners that never wait

A plan also gives the policy for the job rules of ``orchestrator.elastic``. ``fleet_world`` runs a plan. Steps, offers and
merges exist only at protocol level (``world``).

Source: Decoupled DiLoCo, arXiv:2604.21428 (the systems and the failure model in words). Parameters: ``calibration``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from orchestrator.core.vocabulary import Duration, Instant
from orchestrator.elastic import Block, DuringStall, ElasticPolicy
from orchestrator.errors import ConfigurationError
from orchestrator.simulation.distributions import UNITS, Constant, Distribution, Exponential

RESTART_S = 78.2
"""R: the time from an interruption until the job runs on all slices again, without elasticity. Fitted (``calibration``)."""
STALL_S = 13.1
"""D = U: how long an elastic job stalls to shrink or to grow. Fitted (``calibration``)."""
RETURN_S = 1800.0
CHIPS_PER_SLICE = 256
"""Assumed, not fitted: a slice returns after half an hour and has 256 chips. Only their product affects goodput."""


class System(StrEnum):
    DATA_PARALLEL = "data-parallel"
    ELASTIC_DATA_PARALLEL = "elastic-data-parallel"
    DILOCO = "diloco"
    STREAMING_DILOCO = "streaming-diloco"
    DECOUPLED = "decoupled"


ONE_LEARNER = frozenset({System.DATA_PARALLEL, System.ELASTIC_DATA_PARALLEL})
LOCK_STEP = frozenset({System.DILOCO, System.STREAMING_DILOCO})
DISTRIBUTIONS = ("return_time", "stall_down", "stall_up", "restart")
"""The fields of a plan that are distributions."""

_RETURN, _STALL, _RESTART = Exponential(RETURN_S), Constant(STALL_S), Constant(RESTART_S)


class Cause(StrEnum):
    """A cause of lost chip time. The values are printed."""

    SHRINKING = "stalled: shrinking"
    GROWING = "stalled: growing"
    RESTARTING = "stalled: restarting"
    AWAY = "slice away"
    WAITING = "waiting for the slowest learner"
    UNUSED = "there, but of no use to this system"


@dataclass(frozen=True, slots=True)
class Scavenged:
    """Chips that are available only from ``since`` to ``until``."""

    chips: int
    since: Instant
    until: Instant


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet and the system on it. Durations are in seconds; the time between interruptions is exponential.

    ``step_factors`` are the learners' step times relative to ``step_s``, all 1 if empty. They matter only in lock-step. The
    seed is not part of the plan.
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
        """Raises ConfigurationError if the fleet is impossible."""
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
                "Give one for each learner, or none."
            )
        if any(extra.chips < 1 or not 0.0 <= extra.since < extra.until for extra in self.scavenged):
            raise ConfigurationError(detail="scavenged capacity needs at least 1 chip, and 0 ≤ since < until.")
        if self.fragments < 1 or self.interval_steps < 1 or self.overlap_steps < 0:
            raise ConfigurationError(
                detail="fragments and interval_steps must be at least 1, overlap_steps at least 0."
            )

    @property
    def learner_count(self) -> int:
        """Resident learners. Systems of one learner ignore ``learners``."""
        return 1 if self.system in ONE_LEARNER else self.learners

    @property
    def slice_count(self) -> int:
        """Resident slices, rounded to a whole number."""
        return max(1, round(self.chips / self.chips_per_slice))

    @property
    def chips_seen(self) -> int:
        """All chips for which failures are drawn, scavenged ones included."""
        return self.chips + sum(extra.chips for extra in self.scavenged)

    def scavenged_slices(self, extra: Scavenged) -> int:
        return max(1, round(extra.chips / self.chips_per_slice))

    @property
    def trace_slices(self) -> int:
        return self.slice_count + sum(self.scavenged_slices(extra) for extra in self.scavenged)

    def blocks(self) -> tuple[tuple[Block, Scavenged | None], ...]:
        """Return the blocks of slices by learner, each with its scavenged capacity if it has one.

        With many learners, scavenged chips become learners of their own, of about the residents' size, so that no other
        learner reconfigures. A single elastic learner takes them in. Without elasticity they are unusable and never arrive.
        Slice numbers do not depend on the system.
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
        """Return the plan as JSON data, for the header of a tape."""
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
    """The result of a run. Goodput is productive chip-seconds over all chip-seconds. All ratios together are 1.

    ``stderr`` is the standard error of goodput, from batches of equal length; NaN with fewer than two. ``uptime`` is the
    part of the time in which at least one learner trained. ``capacity``, if requested, is [(at, ratio), …] per learner: from
    ``at`` on it has ``ratio`` of its nominal slices, 0 during a stall. The first entry is at 0. ``duration`` is the time
    that was simulated, which is less than planned after an interruption.
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


def _shares(slices: int, learners: int) -> list[int]:
    """Divide the slices as evenly as possible, larger shares first."""
    each, over = divmod(slices, learners)
    return [each + (number < over) for number in range(learners)]
