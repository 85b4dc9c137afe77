"""The core's vocabulary: identities, units, states, reasons and policies that every other module uses.

Nothing here decides anything. Names are the glossary of docs/concepts.md; when a word is missing, add it there first.
``replace`` is here because every module of the core replaces records. Every ``Instant`` is in seconds since the job was
created, every ``Duration`` in seconds, every count of tokens or steps an integer: conservation can be checked exactly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache, lru_cache
from math import ceil, lcm
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NewType

IslandId = NewType("IslandId", str)
"""An island, the paper's learner: one model replica with its own data shard and inner optimizer. Unique within a job."""
Incarnation = NewType("Incarnation", int)
"""Which life of an island: 1 for the first process, one more each time it is placed again."""
NO_INCARNATION = Incarnation(0)
"""The incarnation of an island that was never placed, and of a fact that is no island's."""
Life = tuple[IslandId, Incarnation]
FragmentId = NewType("FragmentId", int)
"""One of the P disjoint parts of the parameters, 0 to P - 1."""
Version = NewType("Version", int)
"""How many outer steps a fragment has taken; 0 is the initial value."""
Epoch = NewType("Epoch", int)
"""Which life of the synchroniser: raised at each recovery."""
FIRST_EPOCH = Epoch(1)
PayloadId = NewType("PayloadId", str)
"""Names the bytes of one contribution; the bytes themselves never enter the core."""
CommandId = NewType("CommandId", str)
"""Names one operator command; repeating a command under its id changes nothing."""
NodeGroupId = NewType("NodeGroupId", str)
"""A set of nodes of one kind in one region."""

Instant = float
Duration = float

if TYPE_CHECKING:
    from dataclasses import replace as replace
else:

    def replace(record, /, **changes):
        """Return ``dataclasses.replace(record, **changes)`` for a record whose fields are all arguments of its class.

        Takes a third of the time, which is most of the core's work, because the fields of a class are looked up once.
        """
        values_of, place_of = _layout(record.__class__)
        *values, record_class = values_of(record)
        for name, value in changes.items():
            values[place_of[name]] = value
        return record_class(*values)


@cache
def _layout(record_class: type[Any]) -> tuple[attrgetter[tuple[Any, ...]], dict[str, int]]:
    """Return how to read all fields of such a record and its class at once, and the place of each field in that."""
    names = [each.name for each in fields(record_class)]
    return attrgetter(*names, "__class__"), {name: place for place, name in enumerate(names)}


UNWRITTEN_DEFAULT = MappingProxyType({"unwritten_default": True})
"""Metadata of a field that a tape leaves out where it has its default, so that the field changes no tape of other jobs."""


class IslandState(StrEnum):
    """The state of an island. docs/architecture.md draws the arrows."""

    PLACING = "placing"
    WAITING = "waiting"
    STARTING = "starting"
    CATCHING_UP = "catching_up"
    TRAINING = "training"
    SUSPECT = "suspect"
    STANDBY = "standby"
    DRAINING = "draining"
    DRAINED = "drained"
    CORDONED = "cordoned"
    LOST = "lost"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def words(self) -> str:
        """The state in a sentence: "the island is …"."""
        return "waiting for a node" if self is IslandState.WAITING else self.value


class JobPhase(StrEnum):
    RUNNING = "running"
    FINISHING = "finishing"
    FINISHED = "finished"


class JobOutcome(StrEnum):
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class FailureExtent(StrEnum):
    """The extent of an island's own failure: what ends with it.

    incarnation   this process; the next one may do better
    island        the island, which would fail again wherever it is placed; and the job, if nothing was trained before
    job           the job, as its specification says
    """

    INCARNATION = "incarnation"
    ISLAND = "island"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class SourceLoss:
    """The held-out loss on one source of the data: nats per token, and bits per byte of its text, if that is known."""

    source: str
    loss: float
    bits_per_byte: float | None


@dataclass(frozen=True, slots=True)
class Preference:
    """Held-out pairs of answers prefer the chosen one in this share of cases, by this mean margin in nats."""

    accuracy: float
    margin: float


@dataclass(frozen=True, slots=True)
class SourceFlaws:
    """The records and pieces of files of one source that could not be read. ``not_utf8_records`` are some of these."""

    source: str
    unreadable_records: int
    not_utf8_records: int


@dataclass(frozen=True, slots=True)
class DataFlaws:
    """The text that one incarnation could not read as it is in its files. All counts are zero where it read everything.

    unreadable_records   records, and pieces of files, that were passed over
    repeated_sequences   sequences that were drawn a second time in an epoch: a part of the text had fewer than was expected
    omitted_sequences    sequences that were passed over where others were drawn: a part of the text had more
    cut_pieces           pieces of files with so much text that the rest of it was left out
    sources              the unreadable records by source, of those that have some
    """

    unreadable_records: int = 0
    repeated_sequences: int = 0
    omitted_sequences: int = 0
    cut_pieces: int = 0
    sources: tuple[SourceFlaws, ...] = ()


NO_FLAWS = DataFlaws()


class RoundPhase(StrEnum):
    COLLECTING = "collecting"
    GRACE = "grace"
    MERGING = "merging"


class CloseReason(StrEnum):
    """Why a round stopped waiting for more contributions. ``words`` completes the sentence "it closed because"."""

    words: str

    EVERYONE_IN = "everyone_in", "everyone was in"
    GRACE_OVER = "grace_over", "the grace window was over"
    NO_GRACE_LEFT = "no_grace_left", "quorum was reached and no slack was left to wait in"
    LEAVING = "leaving", "every island that could contribute was leaving"
    FINAL_FLUSH = "final_flush", "the job was ending"

    def __new__(cls, value: str, words: str) -> CloseReason:
        member = str.__new__(cls, value)
        member._value_, member.words = value, words
        return member


class RefusalReason(StrEnum):
    """Why a contribution may not enter a round. A refusal is a decision, not an error."""

    FENCED = "fenced"
    NOT_CAUGHT_UP = "not_caught_up"
    DUPLICATE = "duplicate"
    EMPTY = "empty"
    UNKNOWN_VERSION = "unknown_version"
    ALREADY_MERGED = "already_merged"
    LATE = "late"
    STALE_BASE = "stale_base"
    JOB_OVER = "job_over"
    CORRUPT = "corrupt"
    WRONG_SHAPE = "wrong_shape"
    NON_FINITE = "non_finite"
    EXPLODING = "exploding"


class ReleaseReason(StrEnum):
    """Why a payload's bytes are no longer needed."""

    MERGED = "merged"
    REFUSED = "refused"
    SUPERSEDED = "superseded"
    ABANDONED = "abandoned"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Contribution:
    """An island's contribution to one round: its fragment's parameters (by payload id) and the work in them.

    ``step_count`` and ``token_count`` are the paper's c_steps and c_tokens: since the island last adopted this
    fragment. ``step`` is the island's logical step when the snapshot was taken, ``base_version`` the version it had
    adopted. ``tokens_total`` is everything this incarnation had trained by then.
    """

    payload: PayloadId
    island: IslandId
    incarnation: Incarnation
    fragment: FragmentId
    offer: int
    step: int
    base_version: Version
    step_count: int
    token_count: int
    tokens_total: int


@dataclass(frozen=True, slots=True, order=True)
class ScheduleAnchor:
    """An anchor of the learning-rate schedule: islands had trained ``tokens``, lost work too, when one reached ``step``."""

    tokens: int = 0
    step: int = 0


NO_ANCHOR = ScheduleAnchor()
"""No anchor is known, as on older tapes: the learning-rate schedule goes by the logical clock."""


@dataclass(frozen=True, slots=True)
class BatchRamp:
    """The growth of every island's batch: from one of ``parts`` equal parts to all, over so many schedule steps.

    Each part comes after as many tokens as the one before it. A schedule step is an inner step of every island with its
    whole batch, so the tokens that all islands have trained decide, and islands differ by what they know of that.
    """

    parts: int = 1
    steps: int = 1

    def part(self, schedule_step: int) -> int:
        """Return the number of parts that a batch has at this step of the schedule."""
        return min(self.parts, 1 + (self.parts - 1) * schedule_step // self.steps)

    def after(self, position: int, step_count: int) -> int:
        """Return the position after so many inner steps of every island. Positions are in parts of a schedule step."""
        while step_count > 0:
            part = self.part(position // self.parts)
            if part == self.parts:
                return position + step_count * part
            grows_at = -(-part * self.steps // (self.parts - 1)) * self.parts
            taken = min(step_count, -(-(grows_at - position) // part))
            position, step_count = position + taken * part, step_count - taken
        return position


NO_RAMP = BatchRamp()


def payload_id(island: IslandId, incarnation: Incarnation, fragment: FragmentId, offer: int) -> PayloadId:
    """The idempotent name of a contribution: the same offer sent twice has the same name."""
    return PayloadId(f"{island}.{incarnation}.{fragment}.{offer}")


@dataclass(frozen=True, slots=True)
class AllOffers:
    """Every offer of an island to a fragment, later ones too: a rollback undid the work, so the island keeps none of it."""


MergedOffer = int | AllOffers
"""The island's latest offer of a fragment that no longer is its own work. 0: none."""
_ALL_OFFERS_NUMBER = 1 << 62


def includes(merged: MergedOffer, offer: int) -> bool:
    """Return whether this offer is no longer the island's own work."""
    return isinstance(merged, AllOffers) or offer <= merged


def offer_number(merged: MergedOffer) -> int:
    """Return the number that a tape and the call to an island have for ``merged``."""
    return _ALL_OFFERS_NUMBER if isinstance(merged, AllOffers) else merged


def offer_of_number(number: int) -> MergedOffer:
    """Return what ``offer_number`` wrote as this number."""
    return AllOffers() if number == _ALL_OFFERS_NUMBER else number


@dataclass(frozen=True, slots=True)
class GraceTimer:
    """The end of the grace window in which a fragment's round waits for more contributions. On a tape: ``grace:0``."""

    fragment: FragmentId

    def __str__(self) -> str:
        return f"grace:{self.fragment}"


class IslandTimerKind(StrEnum):
    """The wait that an island's timer ends.

    backoff     the wait before a lost island is placed again
    suspect     the wait for an island that does not answer
    departure   the time that an island has to give its work before its node goes
    """

    BACKOFF = "backoff"
    SUSPECT = "suspect"
    DEPARTURE = "departure"


@dataclass(frozen=True, slots=True)
class IslandTimer:
    """A deadline in the life of one island. A new one of the same kind replaces it. On a tape: ``backoff:asia``."""

    kind: IslandTimerKind
    island: IslandId

    def __str__(self) -> str:
        return f"{self.kind}:{self.island}"


class JobTimer(StrEnum):
    """A deadline of the job: for its islands' last work, for the next checkpoint, and for the islands' parts of one."""

    FLUSH = "flush:job"
    CHECKPOINT_DUE = "checkpoint:due"
    CHECKPOINT_DEADLINE = "checkpoint:deadline"


Timer = GraceTimer | IslandTimer | JobTimer
"""A deadline that the core set. Its text, ``str(timer)``, is what a tape calls it."""


@dataclass(frozen=True, slots=True)
class WeightedPayload:
    """One input of a merge. ``weight`` is positive; the weights of one merge sum to one."""

    payload: PayloadId
    island: IslandId
    weight: float


@dataclass(frozen=True, slots=True)
class Price:
    """The price of the machines of one island.

    per_hour  of all its hosts together
    kind      on_demand and spot: paid while the island has a process; reserved: paid all the time
    """

    per_hour: float
    currency: str = "USD"
    kind: str = "on_demand"

    @property
    def is_paid_while_away(self) -> bool:
        return self.kind == "reserved"


@dataclass(frozen=True, slots=True)
class IslandPlan:
    """The job specification's plan of one island. No decision depends on ``price``; None: it is not known."""

    island: IslandId
    node_group: NodeGroupId
    region: str
    accelerator_count: int
    price: Price | None = field(default=None, metadata=UNWRITTEN_DEFAULT)


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """The limits of healthy contributions, and of an island that exceeds them.

    displacement_ratio_max  how many times the fragment's median update norm a contribution may be from Θ; ``None``: any
    strikes_max             unusable or exploding contributions to one fragment in a row until the island is quarantined
    quarantines_max         an island quarantined more often than that is given up, until an operator re-adds it
    """

    displacement_ratio_max: float | None = 100.0
    strikes_max: int = 3
    quarantines_max: int = 3


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """The schedule of automatic checkpoints: none, by default. An operator's command takes one in any case.

    every_merges, every_s   each time this many fragments have merged, or so many seconds have passed; 0: not by that
    keep                    so many whole checkpoints are kept; older ones are removed
    timeout_s               an island that has not saved its state by then is left out; ``None``: by the size of the model
    """

    every_merges: int = 0
    every_s: Duration = 0.0
    keep: int = 2
    timeout_s: Duration | None = None


@dataclass(frozen=True, slots=True)
class EvaluationPolicy:
    """The rules of measuring Θ (``core.evaluation``).

    sequences       so many held-out sequences are a whole evaluation
    time_ratio_max  one takes at most so much of the time of the merges between two of them; ``None``: as long as it takes
    on_islands      an island measures it at a boundary between two steps, as long as there is one
    at_start        Θ is measured before its first merge too; it was not on older tapes
    """

    sequences: int = 0
    time_ratio_max: float | None = None
    on_islands: bool = False
    at_start: bool = False


@dataclass(frozen=True, slots=True)
class OuterRatePolicy:
    """Over how many merges of a fragment the outer learning rate rises, and what is left of it at the budget's end."""

    warmup_merges: int = 0
    final_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The time that an inner step may take. Beyond it the island counts as hung: it is ended, and placed again.

    limit_s   no step is ended before this; ``None``: none is ended
    ratio     nor before so many times the island's own median step
    first_s   the limit of what has no median: the first steps of a process, which compile, evaluations, and boundaries

    Seconds are those in which the process was awake, so that a machine that sleeps, or stands still, ends nobody.
    """

    limit_s: Duration | None = 120.0
    ratio: float = 50.0
    first_s: Duration = 1800.0

    def limit(self, usual_seconds: Duration) -> Duration | None:
        """Return the limit of a step whose median is ``usual_seconds``; 0: the process has no median yet."""
        own = self.ratio * usual_seconds if usual_seconds > 0 else self.first_s
        return None if self.limit_s is None else max(self.limit_s, own)


def quorum_of(quorum: int, ratio: float, training_count: int) -> int:
    """Return K while so many islands train: the fixed number, or this part of them, rounded up, if that is more."""
    return max(quorum, ceil(round(ratio * training_count, 6)))


def is_router(tensor: str) -> bool:
    """Return whether a tensor is of a mixture's routers, by a part of its name. Another ``gate`` may be a hidden layer's."""
    return re.search(r"(^|[/.])(router|block_sparse_moe[/.]gate)([/.]|$)", tensor) is not None


class Schedule(NamedTuple):
    """The staggered schedule of fragments. Source: Streaming DiLoCo, arXiv:2501.18512; Decoupled DiLoCo, arXiv:2604.21428.

    Fragment p is due at every logical step t ≥ 1 with t ≡ offset_p (mod H), offset_p = ⌊p·H / P⌋. With P = H one fragment is
    due at every step; with P = 1 the whole model every H steps. A mixture's routers may have a shorter period N: they are
    the last fragment then, due at t ≡ 1 (mod N), and the others share H as if there were only P - 1 (0263).
    """

    fragment_count: int
    interval_steps: int
    router_interval_steps: int | None = None

    @property
    def shared_count(self) -> int:
        """Return the number of fragments that share H."""
        return self.fragment_count - (self.router_interval_steps is not None)

    def period(self, fragment: FragmentId) -> int:
        """Return the steps between two due points of the fragment."""
        return _places(self)[fragment][0]

    def next_due(self, fragment: FragmentId, after: int) -> int:
        """Return the fragment's first due point later than logical step ``after``."""
        period, offset = _places(self)[fragment]
        return after + 1 + (offset - after - 1) % period

    def due(self, previous_step: int, step: int) -> tuple[FragmentId, ...]:
        """Return the fragments with a due point in (previous_step, step], each once, by their first due point there.

        The logical clock may jump when a newer version is adopted, so there may be more than one step between the two.
        """
        if step - previous_step < _steps_to_any(self, previous_step % lcm(self[1], self[2] or 1)):
            return ()
        fragments = map(FragmentId, range(self.fragment_count))
        points = sorted((self.next_due(fragment, previous_step), fragment) for fragment in fragments)
        return tuple(fragment for point, fragment in points if point <= step)


@lru_cache(maxsize=64)
def _places(schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """Return each fragment's period, and its place in it, in steps."""
    interval, of_routers, count = schedule.interval_steps, schedule.router_interval_steps, schedule.shared_count
    shared = tuple((interval, p * interval // count) for p in range(count))
    return shared if of_routers is None else (*shared, (of_routers, 1 % of_routers))


@lru_cache(maxsize=4096)
def _steps_to_any(schedule: Schedule, place: int) -> int:
    """Return the steps from this place in the schedule to the next due point of any fragment. Most steps need only this."""
    return min(schedule.next_due(FragmentId(p), place) for p in range(schedule.fragment_count)) - place


@dataclass(frozen=True, slots=True)
class JobPolicy:
    """Everything the core may know of the job: frozen, stored in the tape's header. K and γ are those of arXiv:2604.21428.

    islands                 those that the specification names, scale-up slots included
    quorum                  K: a round may close once this many islands have contributed, and not before
    quorum_ratio            K is also at least this part of the training islands, rounded up
    fragment_count          P
    sync_interval_steps     H: inner steps between two synchronisations of one fragment
    overlap_steps           τ: inner steps by which communication overlaps compute
    grace_margin            γ in [0, 1): the part of the slack that may be spent waiting
    grace_cap_steps         longest grace window, in inner steps; ``None`` waits for everyone (synchronous baselines)
    grace_floor_steps       shortest grace window, in inner steps, even where there is no slack; at most the longest
    staleness_max           how many versions behind the current one a contribution's base may be
    token_budget            the job ends when its islands have trained this many tokens together
    evaluation_every_merges  ask for an evaluation each time this many fragments have merged; 0 for the ends only
    suspect_timeout_s       an island without connection is suspect at once, and lost after this long
    cut_off_timeout_s       likewise for one whose whole node cannot be reached: it may well train on
    backoff_first_s         wait before placing a lost island again, doubled at each failure in a row
    backoff_max_s           the longest such wait
    restarts_max            an island that fails this often in a row without contributing is given up
    flush_timeout_s         longest wait for the islands' last contributions when the job ends
    moving_average_decay    weight of the past in ξ_step, ξ_quorum and ξ_sync
    health                  what contributions must be like; absent from tapes written before there was one
    standbys                processes that wait to take the place of a lost island; none on older tapes
    checkpoints             when they are taken; absent from tapes written before there were any
    donors_max              from so many peers at once an island takes a state; one on older tapes
    evaluation              how Θ is measured; without a limit, beside the islands, and not at first on older tapes
    outer_rate              how the outer learning rate rises and falls; not at all on older tapes
    step_limits             when an island counts as hung; a tape has them where they are not the default
    leaving_closes          a round closes on what it holds once all islands that could contribute leave; not on older tapes
    router_interval_steps   N: the last fragment has a mixture's routers alone, and this period; None: none has
    standby_wait_s          how long after a standby took an island's place the next is made; at once on older tapes
    """

    islands: tuple[IslandPlan, ...]
    fragment_count: int
    sync_interval_steps: int
    overlap_steps: int
    quorum: int
    grace_margin: float
    grace_cap_steps: float | None
    staleness_max: int
    token_budget: int
    evaluation_every_merges: int
    suspect_timeout_s: Duration
    backoff_first_s: Duration
    backoff_max_s: Duration
    restarts_max: int
    flush_timeout_s: Duration
    moving_average_decay: float
    health: HealthPolicy = HealthPolicy()
    cut_off_timeout_s: Duration = 900.0
    standbys: tuple[IslandPlan, ...] = ()
    checkpoints: CheckpointPolicy = CheckpointPolicy()
    donors_max: int = 1
    evaluation: EvaluationPolicy = EvaluationPolicy()
    outer_rate: OuterRatePolicy = OuterRatePolicy()
    step_limits: StepLimits = field(default=StepLimits(), metadata=UNWRITTEN_DEFAULT)
    quorum_ratio: float = field(default=0.0, metadata=UNWRITTEN_DEFAULT)
    grace_floor_steps: float = field(default=0.0, metadata=UNWRITTEN_DEFAULT)
    leaving_closes: bool = field(default=False, metadata=UNWRITTEN_DEFAULT)
    router_interval_steps: int | None = field(default=None, metadata=UNWRITTEN_DEFAULT)
    standby_wait_s: Duration = field(default=0.0, metadata=UNWRITTEN_DEFAULT)

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.fragment_count, self.sync_interval_steps, self.router_interval_steps)

    def quorum_of(self, training_count: int) -> int:
        """Return K while so many islands train."""
        return quorum_of(self.quorum, self.quorum_ratio, training_count)
