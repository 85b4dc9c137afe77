"""The reports that an island makes to the synchroniser, as data.

The synchroniser commands an island by calls (``learners.island``). The island answers by *reports*: it appends them to an
outbox in the order things happened, and the synchroniser's link to that island reads them in that order by long polling. A
report holds no arrays. Bytes travel apart, pulled by the synchroniser's side under the name of an offer.

``events.IslandReported`` carries a report to the core. Three kinds become another event, because other parts of the system
can say the same (``events.event_of``): two about an evaluation, and the loss of a process. An offer is no event by itself:
it becomes a contribution once the synchroniser's side holds its bytes (``contribution_of``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.core.commands import UNCHANGED, ChangedSettings
from orchestrator.core.vocabulary import (
    NO_ANCHOR,
    NO_FLAWS,
    UNWRITTEN_DEFAULT,
    Contribution,
    DataFlaws,
    Duration,
    FailureExtent,
    FragmentId,
    Incarnation,
    IslandId,
    Life,
    Preference,
    ScheduleAnchor,
    SourceLoss,
    Version,
    payload_id,
)


@dataclass(frozen=True, slots=True)
class MixtureFigures:
    """Figures of an island that trains a mixture of experts.

    Those of the last step are the extremes over layers. ``share_max`` is the largest part of a layer's choices that one
    expert got: 1/E of E experts if they share evenly. ``entropy_ratio`` is the least entropy of a layer's choices, as a part
    of ln E: 1 if they share evenly, 0 if one expert gets every token.

    ``adoptions`` counts the boundaries since the report before at which published versions were adopted, once the step
    after it is done. ``loss_before`` is the training loss of the latest steps before the boundary, a mean over up to
    ``replica.work.LOSSES_BEFORE`` of them, and ``loss_after`` that of the first step after it; both are means over these
    boundaries, None without any. Both are of batches that were trained on, and different ones: one pair is mostly noise, and
    only a mean over many says what adopting costs. With several fragments the steps before follow other adoptions.
    """

    share_max: float
    entropy_ratio: float
    adoptions: int = 0
    loss_before: float | None = None
    loss_after: float | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """The island trained. Totals are of this incarnation, so a repeated report changes nothing.

    ``stepping_seconds`` is the time spent inside inner steps, ``gap_max_seconds`` the longest time between the ends of
    two neighbouring steps since the previous report, ``loss`` the training loss of the last step in nats per token.
    ``flaws`` counts the text that could not be read as it is in its files. ``learning_rate`` and ``gradient_norm``, before
    clipping, are the last step's, and ``mfu_ratio`` is the part of the devices' peak that the model's operations reached at
    the median step. They are None if the trainer does not know them, and ``mixture`` is for a model without experts.
    """

    step: int
    steps_total: int
    tokens_total: int
    stepping_seconds: Duration
    step_seconds_median: Duration
    gap_max_seconds: Duration
    loss: float
    flaws: DataFlaws = field(default=NO_FLAWS, metadata=UNWRITTEN_DEFAULT)
    learning_rate: float | None = field(default=None, metadata=UNWRITTEN_DEFAULT)
    gradient_norm: float | None = field(default=None, metadata=UNWRITTEN_DEFAULT)
    mfu_ratio: float | None = field(default=None, metadata=UNWRITTEN_DEFAULT)
    mixture: MixtureFigures | None = field(default=None, metadata=UNWRITTEN_DEFAULT)


@dataclass(frozen=True, slots=True)
class Offer:
    """A snapshot of fragment ``fragment`` waits under ``offer``. Fields as in ``vocabulary.Contribution``."""

    fragment: FragmentId
    offer: int
    step: int
    base_version: Version
    step_count: int
    token_count: int
    tokens_total: int


@dataclass(frozen=True, slots=True)
class Adopted:
    """The island took a published version at a step boundary.

    ``kept_tokens`` are those trained on this fragment that survive the adoption (0 when the published value replaces
    the island's own); the rest of its tokens since the last adoption that are not in a contribution are overwritten.
    ``fix`` is the latest schedule anchor that it knows; older tapes lack it.
    """

    fragment: FragmentId
    version: Version
    step: int
    tokens_total: int
    kept_tokens: int
    fix: ScheduleAnchor = NO_ANCHOR


@dataclass(frozen=True, slots=True)
class LeftState:
    """A state that ``incarnation`` left in a file of its machine when its node ended.

    Fragment p of it is based on ``versions[p]``, with ``kept_tokens[p]`` of own work that is in no version it knew of.
    Totals are of that incarnation.
    """

    incarnation: Incarnation
    versions: tuple[Version, ...]
    step: int
    steps_total: int
    tokens_total: int
    stepping_seconds: Duration
    kept_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The island holds a state: parameters, inner optimizer, and the version vector it belongs to.

    ``donor`` is the peer it came from, ``None`` for the synchroniser. ``versions[p]`` is the version of fragment p. Where it
    came in chunks, ``sources[p]`` gave fragment p, and ``donor`` is the one whose clock was furthest. ``left`` is the state
    that an earlier incarnation left, if the island continues from that; its ``kept_tokens`` are those of work that it keeps.
    """

    donor: IslandId | None
    versions: tuple[Version, ...]
    step: int
    transfer_seconds: Duration
    sources: tuple[IslandId, ...] = ()
    left: LeftState | None = field(default=None, metadata=UNWRITTEN_DEFAULT)


@dataclass(frozen=True, slots=True)
class CatchUpFailure:
    """The island got no state from ``donor``; ``None`` is the synchroniser."""

    donor: IslandId | None
    reason: str


@dataclass(frozen=True, slots=True)
class Ready:
    """The island has built and compiled its model. ``left`` is a state that an earlier incarnation left on its machine."""

    device_count: int
    start_seconds: Duration
    left: LeftState | None = field(default=None, metadata=UNWRITTEN_DEFAULT)


@dataclass(frozen=True, slots=True)
class Flushed:
    """The island was asked to stop, and has offered everything it had. No step will follow."""


@dataclass(frozen=True, slots=True)
class Drained:
    """The island was asked to drain, and has adopted versions that all its work went into. No step will follow."""


@dataclass(frozen=True, slots=True)
class Saved:
    """This island's part of a checkpoint is on disk; ``digest`` names it.

    ``tokens_total`` is of its cut and incarnation. ``held_seconds`` is how long its loop took over the cut: what the
    checkpoint cost in steps.
    """

    checkpoint: int
    digest: str
    tokens_total: int
    held_seconds: Duration


@dataclass(frozen=True, slots=True)
class NotSaved:
    """The island could not save its part of a checkpoint."""

    checkpoint: int
    reason: str


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The island measured Θ. Fields as in ``events.EvaluationCompleted``."""

    global_version: int
    loss: float
    sequence_count: int
    seconds: Duration
    bits_per_byte: float | None = None
    sources: tuple[SourceLoss, ...] = ()
    preference: Preference | None = field(default=None, metadata=UNWRITTEN_DEFAULT)


@dataclass(frozen=True, slots=True)
class NotEvaluated:
    """The island could not measure Θ."""

    global_version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Overdue:
    """The island's present step has taken ``seconds`` so far, far more than the ``usual_seconds`` of its median step.

    Another thread of its process reports this, and counts only the time in which it ran itself. Without a median (0), it is
    one of the first steps of the process, an evaluation, or a boundary. The report is repeated as the time doubles, and at
    the limit (``StepLimits``).
    """

    seconds: Duration
    usual_seconds: Duration


@dataclass(frozen=True, slots=True)
class Broken:
    """The island's own code failed; its process is about to end. ``detail`` is the last line of the traceback."""

    detail: str
    extent: FailureExtent = FailureExtent.INCARNATION


CarriedReport = Progress | Adopted | Overdue | Saved | NotSaved | Ready | CaughtUp | CatchUpFailure | Flushed | Drained
"""Reports that ``events.IslandReported`` carries to the core."""
EventReport = CarriedReport | Evaluated | NotEvaluated | Broken
"""Reports that are events by themselves: all but offers."""
IslandReport = EventReport | Offer


def contribution_of(offer: Offer, island: IslandId, incarnation: Incarnation) -> Contribution:
    """Return the contribution that the offer is, once its bytes are held."""
    return Contribution(
        payload=payload_id(island, incarnation, offer.fragment, offer.offer),
        island=island,
        incarnation=incarnation,
        fragment=offer.fragment,
        offer=offer.offer,
        step=offer.step,
        base_version=offer.base_version,
        step_count=offer.step_count,
        token_count=offer.token_count,
        tokens_total=offer.tokens_total,
    )


# ── what an island holds, for a synchroniser whose predecessor's disk is lost ─────────────────────────────────────


@dataclass(frozen=True, slots=True)
class MergedWork:
    """The latest offer of an incarnation that a version contains (``vocabulary.offer_number``)."""

    island: IslandId
    incarnation: Incarnation
    merged_offer: int


@dataclass(frozen=True, slots=True)
class Announcement:
    """The synchroniser's facts about a version, told to each island that it sends the version to.

    ``step`` is the logical step of its merge. ``merged`` are the offers in it of every island that ever gave work.
    """

    fragment: FragmentId
    version: Version
    digest: str
    step: int
    merged: tuple[MergedWork, ...]


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """The version of a fragment of Θ that an island holds. ``digest`` is that of its bytes.

    ``announced`` is None if the version came to the island otherwise, in a state from a peer or from a checkpoint.
    """

    fragment: FragmentId
    version: Version
    digest: str
    announced: Announcement | None


@dataclass(frozen=True, slots=True)
class IslandHoldings:
    """The answer of an island that trained: what it holds of Θ, and the state of its own work at one boundary.

    ``versions[p]`` is the version that fragment p of its parameters is based on, and ``kept_tokens[p]`` its work since that
    is in no version it knows of. ``expected`` are announcements of versions whose bytes had not arrived.
    ``job_tokens`` is how many tokens the job had trained, as far as the island heard. An island that has drained, or has
    given its last work, no longer ``trains``. ``changed`` are the settings that it was given last.
    """

    island: IslandId
    incarnation: Incarnation
    held: tuple[HeldVersion, ...]
    versions: tuple[Version, ...]
    step: int
    steps_total: int
    tokens_total: int
    stepping_seconds: float
    kept_tokens: tuple[int, ...]
    job_tokens: int = 0
    expected: tuple[Announcement, ...] = ()
    trains: bool = True
    changed: ChangedSettings = UNCHANGED

    @property
    def life(self) -> Life:
        return (self.island, self.incarnation)
