"""One fragment's merge round: collect contributions, wait out the grace window, merge.

                 quorum reached           everyone in, or window over
    COLLECTING ─────────────────▶ GRACE ─────────────────────────────▶ MERGING
        ▲                                                                 │
        └───────────────────── outer step applied ────────────────────────┘

A round is due when its fragment is: at the first due point after the step of the last merge. An earlier contribution is held
and counts towards the quorum, but the round closes only once a contribution is *on time*. Otherwise an island that missed
the last round, kept its work and offers it again would merge alone, a step after all others, and every outer step would be
taken twice. Early contributions are ours. The paper has none, because there an island that missed a round has lost its work.

**Leaving.** When every island that could contribute is leaving, no contribution on time can come any more, and perhaps no
quorum. The round then closes once all that leave are in, on what it holds: early contributions too, and fewer than the
quorum unless an island that may still be training is only silent. An island may have no work in the fragment, so the wait
for it ends after two of its steps and a transfer. The paper has no such case; a job's last rounds close in the same way.

A round never reads a clock and never sees a tensor. The ``now`` of each event gives it the time, and payload ids stand for
parameters. A contribution that arrives while MERGING is late, because the outer step in flight has already fixed its inputs.

**Admission.** ``refusal_of`` applies these rules, in this order:

    fenced            another incarnation of the island has taken its place
    job_over          the job takes no more work
    not_caught_up     the island has no state yet; a fresh process never wins over state
    duplicate         this offer, or a newer one of the same fragment, was seen before
    empty             it contains no work
    unknown_version   its base is newer than the fragment: we lost state, or the island is wrong
    already_merged    its base is older than the version with the island's previous work, which would count twice
    late              its round is merging or has merged
    stale_base        its base is more than ``staleness_max`` versions behind
    exploding         its update norm is far above the running median of its fragment

A version behind is `late` when one more round would have caught it, and `stale_base` when not. Both are accepted if the
policy's ``staleness_max`` allows it. The default allows neither: an accepted late contribution would wait for the next
round, where the island's own next offer replaces it.

**Health.** The measure of an outlier is the update norm ‖Θ_p − θ‖, divided by the number of the fragment's periods (H) in it
if that is more than one: an island that missed rounds brings more work, and may be further away. Fewer steps count as a
period, because a state taken from a peer holds up to an interval of that peer's work. The running median is over the latest
norms that were admitted to the fragment. It is not used before the fragment has taken ``VERSIONS_BEFORE_JUDGING`` outer
steps: the first offers hold a few steps at a learning rate that still rises. NaN and Inf never get here
(``parameters.validation``).

**Weights.** A contribution counts by the quantity of its tokens times their quality:

    w_m = c_tokens · (c_tokens / c_steps)        normalised so that the weights of one merge sum to one

**Outer learning rate.** A warm-up, then a line down, as a ratio of the specification's rate:

    ratio = min(1, version / W) · (1 − (1 − f) · min(1, T / budget))

W is in merges of one fragment, and T is what all islands have trained. The ratio is decided where the merge is ordered, and
carried in the order and in the journal, so that a repeated merge steps at the same rate. It goes by tokens and not by a
clock, so that a job whose islands were away, or that was rolled back, is where its budget is. Sums and quotients alone give
every machine the same bits.

Source: Decoupled DiLoCo, arXiv:2604.21428 (minimum quorum, grace window, token weighting). Admission and health are ours,
where the paper is silent; clipping against a running median is a habit of robust statistics.

The grace window: how long a round may wait after quorum, within the slack that the overlap leaves.

    slack = τ·ξ_step − (ξ_quorum + ξ_sync)        grace = clip(γ·slack, floor·ξ_step, cap·ξ_step)

The ξ are exponential moving averages of what was seen: an inner step, the time from a round's first contribution to its
quorum, and the time from a round's closing to its result's first adoption. Before the first inner step is known the slack
is unknown, and the window is zero.

Without a floor, an overload feeds itself. Synchronising takes longer, so no slack is left, merges wait for nobody, and the
islands that come later offer their work again, which is more load. K as a part of the training islands, and a floor of the
window, keep merges whole, and therefore rarer, until the load is over.

Source: Decoupled DiLoCo, arXiv:2604.21428 (adaptive grace window). The cap in steps is ours; the paper's is about one. The
floor is ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from math import fsum

from orchestrator.core.island_record import Island
from orchestrator.core.vocabulary import (
    CloseReason,
    Contribution,
    Duration,
    FragmentId,
    Instant,
    IslandId,
    IslandState,
    JobPhase,
    JobPolicy,
    OuterRatePolicy,
    RefusalReason,
    RoundPhase,
    Version,
    WeightedPayload,
    replace,
)


@dataclass(frozen=True, slots=True)
class Pace:
    """The three moving averages, in seconds; ``None`` until first seen."""

    step: Duration | None = None
    quorum: Duration | None = None
    sync: Duration | None = None

    def with_step(self, seconds: Duration, decay: float) -> Pace:
        return Pace(_average(self.step, seconds, decay), self.quorum, self.sync)

    def with_quorum(self, seconds: Duration, decay: float) -> Pace:
        return Pace(self.step, _average(self.quorum, seconds, decay), self.sync)

    def with_sync(self, seconds: Duration, decay: float) -> Pace:
        return Pace(self.step, self.quorum, _average(self.sync, seconds, decay))

    def steps_since(self, since: Instant | None, now: Instant) -> int:
        """Return how many inner steps passed since then, rounded; 0 before the first step is reported."""
        return 0 if since is None or not self.step else round((now - since) / self.step)


def grace_window(pace: Pace, policy: JobPolicy) -> Duration | None:
    """Return the seconds to wait after quorum; ``None`` means until everyone is in (synchronous baselines)."""
    if policy.grace_cap_steps is None:
        return None
    if pace.step is None:
        return 0.0
    slack = policy.overlap_steps * pace.step - ((pace.quorum or 0.0) + (pace.sync or 0.0))
    window = max(policy.grace_margin * slack, policy.grace_floor_steps * pace.step)
    return min(window, policy.grace_cap_steps * pace.step)


def _average(before: Duration | None, value: Duration, decay: float) -> Duration:
    return value if before is None else decay * before + (1.0 - decay) * value


LATEST_KEPT = 31
"""Enough for several rounds of a few islands; with many islands it is the last round alone, which is as good."""
VERSIONS_BEFORE_JUDGING = 4
Refusal = tuple[RefusalReason, str]


@dataclass(frozen=True, slots=True)
class FragmentRound:
    """Fragment ``fragment`` stands at ``version``, made at ``step``; the open round, if it closes, makes ``version + 1``.

    ``restoring``: that version comes from a checkpoint, not from contributions.

    ``reached_at`` is when an island first reported to be at ``step``, ``merge_step_at`` the same of ``merge_step``.
    """

    fragment: FragmentId
    version: Version = Version(0)
    step: int = 0
    reached_at: Instant | None = None
    phase: RoundPhase = RoundPhase.COLLECTING
    offered: dict[IslandId, Contribution] = field(default_factory=dict)
    opened_at: Instant = 0.0
    merge_step_at: Instant | None = None
    quorum_at: Instant = 0.0
    closed_at: Instant | None = None
    timer_serial: int = 0
    restoring: bool = False

    @property
    def merge_step(self) -> int:
        """The logical step of a merge of what is offered: the highest among the contributions."""
        return max([self.step, *(c.step for c in self.offered.values())])


@dataclass(frozen=True, slots=True)
class Wait:
    """Quorum is reached: keep the round open until ``due_at``, or until everyone is in when it is ``None``."""

    due_at: Instant | None


@dataclass(frozen=True, slots=True)
class Close:
    """Stop waiting and merge what is there."""

    reason: CloseReason
    detail: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """Every island that could contribute is leaving: those of ``giving`` may still offer work.

    ``quorum`` is the least number of contributions to merge, and ``window`` the longest wait for the islands in seconds.
    """

    giving: Set[IslandId]
    quorum: int
    window: Duration


@dataclass(frozen=True, slots=True)
class UpdateNorms:
    """The latest update norms per interval that were admitted to one fragment, oldest first."""

    latest: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        """The upper one of two, 0 of none."""
        return sorted(self.latest)[len(self.latest) // 2] if self.latest else 0.0


def admit(before: FragmentRound, contribution: Contribution, due_step: int, now: Instant) -> FragmentRound:
    """Take the contribution in; an earlier one of the same island is replaced. Opened by the first on time."""
    offered = {**before.offered, contribution.island: contribution}
    opening = not on_time(before, due_step)
    furthest = contribution.step > before.merge_step
    return replace(
        before,
        offered=offered,
        opened_at=now if opening else before.opened_at,
        merge_step_at=now if furthest else before.merge_step_at,
    )


def withdraw(before: FragmentRound, island: IslandId) -> FragmentRound:
    """Give up what is held of this island, which will offer the work again. A wait that has begun goes on."""
    return replace(before, offered={name: c for name, c in before.offered.items() if name != island})


def on_time(current: FragmentRound, due_step: int) -> Set[IslandId]:
    """The islands whose contribution was made at or after the due point."""
    return {island for island, c in current.offered.items() if c.step >= due_step}


def decide(
    current: FragmentRound, due_step: int, quorum: int, live: Set[IslandId], window: Duration | None, now: Instant
) -> Wait | Close | None:
    """The decision on the round, with its reason; ``None`` to stay as it is. Safe to call at any time.

    Islands with only an early contribution are waited for like those with none: they may have a better one soon.
    """
    present = on_time(current, due_step)
    if current.phase is RoundPhase.MERGING or len(current.offered) < quorum or not present:
        return None
    if live <= present:
        return Close(CloseReason.EVERYONE_IN, f"all {len(live)} training islands are in")
    if current.phase is RoundPhase.GRACE:
        return None
    if window is None:
        return Wait(None)
    if window <= 0.0:
        return Close(CloseReason.NO_GRACE_LEFT, f"quorum of {quorum} reached and no slack to wait in")
    return Wait(now + window)


def decide_leaving(current: FragmentRound, leaving: Leaving, now: Instant) -> Wait | Close | None:
    """The decision on the round when every island that could contribute is leaving, as ``decide`` returns it."""
    if current.phase is RoundPhase.MERGING or len(current.offered) < leaving.quorum:
        return None
    if leaving.giving <= current.offered.keys():
        return Close(CloseReason.LEAVING, f"no island trains, and all {len(leaving.giving)} that leave are in")
    return None if current.phase is RoundPhase.GRACE else Wait(now + leaving.window)


def begin_grace(before: FragmentRound, now: Instant, timer_serial: int) -> FragmentRound:
    return replace(before, phase=RoundPhase.GRACE, quorum_at=now, timer_serial=timer_serial)


def reopen(before: FragmentRound) -> FragmentRound:
    """Collect again: an island came before the wait for those that leave was over."""
    return replace(before, phase=RoundPhase.COLLECTING)


def begin_merge(before: FragmentRound, now: Instant) -> FragmentRound:
    """Fix the inputs. ``step`` stays with the version it belongs to, which may be published again meanwhile."""
    quorum_at = before.quorum_at if before.phase is RoundPhase.GRACE else now
    return replace(before, phase=RoundPhase.MERGING, quorum_at=quorum_at, closed_at=now)


def begin_restoring(before: FragmentRound) -> FragmentRound:
    """The next version will not be a merge: what was collected goes, and what comes now is late."""
    return replace(abandon(before), phase=RoundPhase.MERGING, restoring=True)


def finish_merge(before: FragmentRound) -> FragmentRound:
    """The outer step is applied: open the next round, empty."""
    return FragmentRound(
        fragment=before.fragment,
        version=Version(before.version + 1),
        step=before.merge_step,
        reached_at=before.merge_step_at,
        closed_at=before.closed_at,
    )


def abandon(before: FragmentRound) -> FragmentRound:
    """Discard the contributions: open the same round again, empty."""
    return FragmentRound(before.fragment, before.version, before.step, before.reached_at)


def refusal_of(
    contribution: Contribution,
    island: Island | None,
    current: FragmentRound,
    phase: JobPhase,
    policy: JobPolicy,
    update_norm: float | None,
    latest_norms: UpdateNorms,
) -> Refusal | None:
    """The first rule the contribution breaks, or ``None`` when it may enter."""
    c = contribution
    if island is None or c.incarnation != island.incarnation:
        now = "unknown" if island is None else f"incarnation {island.incarnation}"
        return RefusalReason.FENCED, f"sent by incarnation {c.incarnation}; the island is {now}"
    if phase is JobPhase.FINISHED:
        return RefusalReason.JOB_OVER, "the job has ended, or waits for its last evaluation only"
    if island.state not in (IslandState.TRAINING, IslandState.SUSPECT, IslandState.DRAINING):
        return RefusalReason.NOT_CAUGHT_UP, f"the island is {island.state}"
    if c.offer <= island.current.last_offer.get(c.fragment, 0):
        return (
            RefusalReason.DUPLICATE,
            f"offer {island.current.last_offer[c.fragment]} of this fragment was seen before",
        )
    if c.step_count <= 0 or c.token_count <= 0:
        return RefusalReason.EMPTY, f"{c.step_count} steps and {c.token_count} tokens"
    if c.base_version > current.version:
        return RefusalReason.UNKNOWN_VERSION, f"base {c.base_version}, but the fragment stands at {current.version}"
    if c.base_version < island.current.merged_into.get(c.fragment, 0):
        version = island.current.merged_into[c.fragment]
        return RefusalReason.ALREADY_MERGED, f"version {version} has its work, or took its place in a rollback"
    if current.phase is RoundPhase.MERGING:
        return RefusalReason.LATE, f"version {current.version + 1} is being merged without it"
    behind = current.version - c.base_version
    if behind > policy.staleness_max:
        reason = RefusalReason.LATE if behind == 1 else RefusalReason.STALE_BASE
        return reason, f"base {c.base_version} is {behind} behind; at most {policy.staleness_max} is allowed"
    if detail := outlier(c, update_norm, latest_norms, current.version, policy):
        return RefusalReason.EXPLODING, detail
    return None


def outlier(
    c: Contribution, update_norm: float | None, norms: UpdateNorms, version: Version, policy: JobPolicy
) -> str | None:
    """The detail of the refusal if the contribution is too far from Θ. A fragment that never moved has no median yet."""
    ratio_max, median = policy.health.displacement_ratio_max, norms.median
    if update_norm is None or ratio_max is None or version < VERSIONS_BEFORE_JUDGING or median == 0.0:
        return None
    norm = _per_interval(c, update_norm, policy)
    if norm <= ratio_max * median:
        return None
    return (
        f"it is {norm:.3g} from the fragment where {median:.3g} is usual, {norm / median:.3g} times as far; "
        f"at most {ratio_max:g} times is allowed"
    )


def admitted(before: UpdateNorms, c: Contribution, update_norm: float | None, policy: JobPolicy) -> UpdateNorms:
    """The norms with one more; a contribution whose norm was not measured adds none."""
    if update_norm is None:
        return before
    return UpdateNorms((*before.latest, _per_interval(c, update_norm, policy))[-LATEST_KEPT:])


def weigh(contributions: Iterable[Contribution]) -> tuple[WeightedPayload, ...]:
    """Give each contribution its share, in the order of island names, so that arrival order never changes a merge."""
    ordered = sorted(contributions, key=lambda c: c.island)
    raw = [c.token_count * (c.token_count / c.step_count) for c in ordered]
    total = fsum(raw)
    return tuple(WeightedPayload(c.payload, c.island, w / total) for c, w in zip(ordered, raw, strict=True))


def outer_lr_ratio(policy: OuterRatePolicy, version: Version, tokens_trained: int, token_budget: int) -> float:
    """Return the outer learning rate of the merge that makes ``version``, as a ratio in [0, 1] of the specification's.

    ``tokens_trained`` of the budget were trained when the merge was decided.
    """
    warm = min(1.0, version / policy.warmup_merges) if policy.warmup_merges else 1.0
    if policy.final_ratio == 1.0:
        return warm
    return warm * (1 - (1 - policy.final_ratio) * min(1.0, tokens_trained / token_budget))


def _per_interval(c: Contribution, update_norm: float, policy: JobPolicy) -> float:
    return update_norm / max(1.0, c.step_count / policy.schedule.period(c.fragment))
