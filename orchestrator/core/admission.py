"""Admission of a contribution to the open round of its fragment, or the reason why it is refused.

The rules, in the order in which they are applied:

    fenced            another incarnation of the island has taken its place
    job_over          the job takes no more work
    not_caught_up     the island holds no state yet; a fresh process never wins over state
    duplicate         this offer, or a newer one of the same fragment, was seen before
    empty             no work is in it
    unknown_version   its base is newer than the fragment: we lost state, or the island invents
    already_merged    its base is older than the version that its island's previous work went into: counted once, not twice
    late              its round is merging or has merged
    stale_base        its base is more than ``staleness_max`` versions behind
    exploding         its update norm is far above the running median of its fragment (``health``)

A version behind is `late` when one more round would have caught it, `stale_base` when not; both are accepted when the
policy's ``staleness_max`` allows it. Source: ours, where arXiv:2604.21428 is silent.
"""

from __future__ import annotations

from orchestrator.core.fragment_round import FragmentRound
from orchestrator.core.health import UpdateNorms, outlier
from orchestrator.core.island_record import Island
from orchestrator.core.vocabulary import Contribution, IslandState, JobPhase, JobPolicy, RefusalReason, RoundPhase

Refusal = tuple[RefusalReason, str]


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
    if c.offer <= island.last_offer.get(c.fragment, 0):
        return RefusalReason.DUPLICATE, f"offer {island.last_offer[c.fragment]} of this fragment was seen before"
    if c.step_count <= 0 or c.token_count <= 0:
        return RefusalReason.EMPTY, f"{c.step_count} steps and {c.token_count} tokens"
    if c.base_version > current.version:
        return RefusalReason.UNKNOWN_VERSION, f"base {c.base_version}, but the fragment stands at {current.version}"
    if c.base_version < island.merged_into.get(c.fragment, 0):
        version = island.merged_into[c.fragment]
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
