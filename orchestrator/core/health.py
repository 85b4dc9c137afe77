"""The health of contributions: one whose update norm is far above its fragment's running median is an outlier.

The measure is the update norm ‖Θ_p − θ‖, divided by how many intervals of H steps are in it where there is more than one:
an island that missed rounds brings more work, and may be as much further away. Fewer steps than H count as H, because a
state that was taken from a peer holds up to an interval of that peer's work besides.

The running median of a fragment is over the latest norms admitted. It is not used before the fragment has taken
``VERSIONS_BEFORE_JUDGING`` outer steps: the first offers hold a few steps at a learning rate that is still rising.

Refuses to know arrays; NaN and Inf never get here (``parameters.validation``).
Source: ours. Decoupled DiLoCo, arXiv:2604.21428, is silent; clipping against a running median is a robust-statistics habit.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.vocabulary import Contribution, JobPolicy, Version

LATEST_KEPT = 31
"""Enough for several rounds of a few islands; with many islands it is the last round alone, which is as good."""
VERSIONS_BEFORE_JUDGING = 4


@dataclass(frozen=True, slots=True)
class UpdateNorms:
    """The latest update norms per interval that were admitted to one fragment, oldest first."""

    latest: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        """The upper one of two, 0 of none."""
        return sorted(self.latest)[len(self.latest) // 2] if self.latest else 0.0


def admitted(before: UpdateNorms, c: Contribution, update_norm: float | None, policy: JobPolicy) -> UpdateNorms:
    """The norms with one more; a contribution whose norm was not measured adds none."""
    if update_norm is None:
        return before
    return UpdateNorms((*before.latest, _per_interval(c, update_norm, policy))[-LATEST_KEPT:])


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


def _per_interval(c: Contribution, update_norm: float, policy: JobPolicy) -> float:
    return update_norm / max(1.0, c.step_count / policy.sync_interval_steps)
