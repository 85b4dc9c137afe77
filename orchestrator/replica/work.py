"""An island's own work on one fragment, in totals, and the rules by which a published version is loaded over it.

With Θ the published fragment and θ this island's own, a version is loaded by one of three rules:

    replace   θ ← Θ                       Decoupled DiLoCo, arXiv:2604.21428; own work since the last offer is overwritten
    mix       θ ← α·θ + (1 − α)·Θ         Streaming DiLoCo, arXiv:2501.18512
    rebase    θ ← Θ + (θ − θ_merged)      ours: keeps all work that is in no version yet. θ_merged is the snapshot whose
                                         work is in Θ, or what was last adopted when no offer since is in Θ

An island that misses a round by a hair would, by ``replace``, lose a whole interval's work on that fragment, and go on
missing rounds by the same hair. By ``rebase`` it loses nothing: it offers the work again, early for the next round.

Where an offer's codec loses something, θ_merged is the snapshot *as the synchroniser decoded it*: so what was lost, the
residue e = θ_offered − θ_merged, stays in θ, and the next offer has it. By the two other rules it is added to Θ.

Work is not counted step by step: it is what the island has trained in all, less what it had trained when this work began.
The module knows nothing of arrays; snapshots are named by the numbers of their offers.

The odometer of an island: how fast it trains, counted step by step and reported as ``Progress`` now and then.

Responsible for the longest gap between two steps being reported once, with the report that follows it. Refuses to know when
to report, and what the steps were for. It has no clock: durations come from the caller that took the step, in seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from orchestrator.core.messages import MixtureFigures, Progress
from orchestrator.core.vocabulary import NO_FLAWS, AllOffers, DataFlaws, Duration, MergedOffer, Version

STEP_TIMES_KEPT = 64
LOSSES_BEFORE = 8
"""Steps over which the training loss before an adoption is a mean: that of one batch varies more than an adoption costs."""


class ExpertLoad(NamedTuple):
    """The load of experts in a step; see ``messages.MixtureFigures``."""

    share_max: float
    entropy_ratio: float


class StepFigures(Protocol):
    """A step's result as an odometer keeps it (``learners.contract.StepResult``)."""

    @property
    def loss(self) -> float: ...
    @property
    def flaws(self) -> DataFlaws: ...
    @property
    def learning_rate(self) -> float | None: ...
    @property
    def gradient_norm(self) -> float | None: ...
    @property
    def ideal_seconds(self) -> float | None: ...
    @property
    def expert_load(self) -> ExpertLoad | None: ...


class Odometer:
    """``window`` is over how many of the latest steps the median step time is taken; ``loss`` and ``latest`` are
    the latest step's.
    """

    def __init__(self, window: int = STEP_TIMES_KEPT) -> None:
        self._stepping_seconds: Duration = 0.0
        self._gap_max_seconds: Duration = 0.0
        self._step_seconds: deque[Duration] = deque(maxlen=window)
        self.loss = float("nan")
        self.latest: StepFigures | None = None
        self._reported_steps = 0
        self._losses: deque[float] = deque(maxlen=LOSSES_BEFORE)
        self._adopted = False
        self._around_adoptions: list[tuple[float, float]] = []

    def count(self, step_seconds: Duration, gap_seconds: Duration, result: StepFigures | None = None) -> None:
        """A step was taken. ``gap_seconds`` lie between its end and that of the step before; 0 for the first."""
        self._stepping_seconds += step_seconds
        self._step_seconds.append(step_seconds)
        self._gap_max_seconds = max(self._gap_max_seconds, gap_seconds)
        if result is not None:
            self._observe(result)

    def adopted(self) -> None:
        """A published version was adopted at the boundary before the next step."""
        self._adopted = True

    def _observe(self, result: StepFigures) -> None:
        self.latest = result
        if result.expert_load is None:
            return
        if self._adopted and self._losses:
            around = (math.fsum(self._losses) / len(self._losses), result.loss)
            if all(map(math.isfinite, around)):
                self._around_adoptions.append(around)
        self._adopted = False
        self._losses.append(result.loss)

    @property
    def stepping_seconds(self) -> Duration:
        """The time spent in steps so far."""
        return self._stepping_seconds

    def is_news(self, steps_total: int) -> bool:
        """Return whether a step was taken since the last report."""
        return steps_total != self._reported_steps

    def report(self, step: int, steps_total: int, tokens_total: int) -> Progress:
        """The progress so far, at the logical step ``step``."""
        latest, median = self.latest, _median(self._step_seconds)
        ideal = None if latest is None else latest.ideal_seconds
        progress = Progress(
            step=step,
            steps_total=steps_total,
            tokens_total=tokens_total,
            stepping_seconds=self._stepping_seconds,
            step_seconds_median=median,
            gap_max_seconds=self._gap_max_seconds,
            loss=self.loss if latest is None else latest.loss,
            flaws=NO_FLAWS if latest is None else latest.flaws,
            learning_rate=None if latest is None else _brief(latest.learning_rate),
            gradient_norm=None if latest is None else _brief(latest.gradient_norm),
            mfu_ratio=_brief(ideal / median) if ideal is not None and median else None,
            mixture=None if latest is None or latest.expert_load is None else self._mixture(latest.expert_load),
        )
        self._reported_steps, self._gap_max_seconds = steps_total, 0.0
        self._around_adoptions = []
        return progress

    def _mixture(self, load: ExpertLoad) -> MixtureFigures:
        count = len(self._around_adoptions)
        share_max, entropy_ratio = (float(f"{value:.7g}") for value in load)
        if not count:
            return MixtureFigures(share_max, entropy_ratio)
        before, after = (_brief(math.fsum(losses) / count) for losses in zip(*self._around_adoptions, strict=True))
        return MixtureFigures(share_max, entropy_ratio, count, before, after)


def _brief(value: float | None) -> float | None:
    """Round to the digits that a float32 has, so that a line of the tape is no longer than that."""
    return None if value is None else float(f"{value:.7g}")


def _median(values: deque[Duration]) -> Duration:
    """The middle value, or the mean of the middle two; 0 of none."""
    if not values:
        return 0.0
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


AdoptionRule = Literal["replace", "mix", "rebase"]

SNAPSHOTS_MAX: Mapping[AdoptionRule, int] = {"replace": 1, "mix": 1, "rebase": 4}
"""Offers whose snapshots are kept until the next adoption: the latest, and of those before it the ones that were fetched,
for no other can be merged. An island that is cut off goes on offering, and keeps one that nobody fetched. Should one of the
dropped be the merged one, the published value replaces the island's own."""


DUE_POINTS_BETWEEN_OFFERS_MAX = 4
"""An island that adopts nothing offers less and less often, down to this. Either its offers are refused, because newer
versions have not reached it, or a round holds its offer and waits for others. To offer all the same work again, and a little
more, at every due point would add load just where there is too much."""


class Trained(NamedTuple):
    """Inner steps and tokens."""

    steps: int
    tokens: int


NOTHING = Trained(0, 0)


@dataclass(frozen=True, slots=True)
class Replace:
    """θ ← Θ + e. ``residue`` says whose e: an offer's number; 0: that of the last adoption once more; None: none."""

    residue: int | None = None


@dataclass(frozen=True, slots=True)
class Mix:
    """θ ← α·θ + (1 − α)·(Θ + e), with ``residue`` as in ``Replace``."""

    residue: int | None = None


@dataclass(frozen=True, slots=True)
class Rebase:
    """θ ← Θ + (θ − θ_since). ``since`` is the offer whose snapshot θ_since is; None: the value that was last adopted."""

    since: int | None


LoadMode = Replace | Mix | Rebase


@dataclass(slots=True)
class FragmentWork:
    """Work since ``version`` was adopted, and what of it was kept then.

    ``origin`` is what the island had trained when this work began: less than at the adoption if own work was kept, and
    negative if a checkpoint brought work along. ``offers`` holds the latest offers since the adoption, each with what the
    island had trained by then; ``latest_offer`` is the number of the fragment's latest offer, ``offers_before`` that of the
    island's latest one before the adoption. ``fetched`` are those whose bytes the synchroniser asked for. ``due_points``
    counts those since the adoption.
    """

    version: Version = Version(0)
    origin: Trained = NOTHING
    offers: dict[int, Trained] = field(default_factory=dict)
    latest_offer: int = 0
    offers_before: int = 0
    fetched: set[int] = field(default_factory=set)
    due_points: int = 0

    def due_again(self) -> bool:
        """Count one more due point since ``version`` was adopted. Return whether the fragment is offered at this one.

        The first due points after an adoption are: 1, 2, 4, and every fourth then.
        """
        self.due_points += 1
        return self.due_points in (1, 2) or self.due_points % DUE_POINTS_BETWEEN_OFFERS_MAX == 0

    def since_origin(self, trained: Trained) -> Trained:
        """The paper's c_steps and c_tokens of an island that has trained so much in all."""
        return Trained(trained.steps - self.origin.steps, trained.tokens - self.origin.tokens)

    def unoffered_tokens(self, trained: Trained) -> int:
        covered = next(reversed(self.offers.values())) if self.offers else self.origin
        return trained.tokens - covered.tokens

    def offered(self, number: int, trained: Trained, snapshots_max: int | None) -> None:
        """Offer ``number`` covers all work up to now. Of the older ones only the latest that were fetched are listed."""
        self.latest_offer = number
        if snapshots_max is not None:
            mergeable = [older for older in self.offers if older in self.fetched]
            latest = mergeable[max(0, len(mergeable) - snapshots_max + 1) :]
            self.offers = {older: self.offers[older] for older in latest}
        self.offers[number] = trained

    def load_mode(self, merged_offer: MergedOffer, rule: AdoptionRule) -> LoadMode:
        """Return how to load a version that has the island's offers up to ``merged_offer``."""
        if isinstance(merged_offer, AllOffers):
            return Replace()
        if rule != "rebase":
            residue = merged_offer if merged_offer in self.offers else 0
            return Mix(residue) if rule == "mix" and self.offers else Replace(residue)
        if merged_offer in self.offers:
            return Rebase(merged_offer)
        return Replace() if merged_offer > self.offers_before else Rebase(None)

    def remaining(self, mode: LoadMode, trained: Trained) -> Trained:
        """The own work that remains when a version is loaded by this mode."""
        match mode:
            case Replace(_):
                return NOTHING
            case Mix(_):
                covered = next(reversed(self.offers.values()))
            case Rebase(since):
                covered = self.origin if since is None else self.offers[since]
        return Trained(trained.steps - covered.steps, trained.tokens - covered.tokens)

    def adopt(self, version: Version, own_work: Trained, trained: Trained, offers_before: int) -> None:
        """The fragment stands on ``version``, with so much own work on it."""
        self.version = version
        self.origin = Trained(trained.steps - own_work.steps, trained.tokens - own_work.tokens)
        self.offers, self.fetched, self.due_points = {}, set(), 0
        self.offers_before = offers_before
