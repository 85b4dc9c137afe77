"""Whether a contribution is as far from Θ as contributions to its fragment usually are, or has exploded.

The measure is the displacement ‖Θ_p − θ‖, divided by how many intervals of H steps are in it where there is more than one:
an island that missed rounds brings more work, and may be as much further away. Fewer steps than H count as H, because a
state that was taken from a peer holds up to an interval of that peer's work besides.

The usual displacement of a fragment is the median over the latest ones admitted. It is not asked before the fragment has
taken ``VERSIONS_BEFORE_JUDGING`` outer steps: the first offers hold a few steps at a learning rate that is still rising.

Refuses to know arrays; what is not a number never gets here (``merge.examination``).
Source: ours. Decoupled DiLoCo, arXiv:2604.21428, is silent; clipping against a running median is a robust-statistics habit.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.core.vocabulary import Contribution, JobPolicy, Version

LATEST_KEPT = 31
"""Enough for several rounds of a few islands; with many islands it is the last round alone, which is as good."""
VERSIONS_BEFORE_JUDGING = 4


@dataclass(frozen=True, slots=True)
class Usual:
    """The latest displacements per interval that were admitted to one fragment, oldest first."""

    latest: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        """The upper one of two, 0 of none."""
        return sorted(self.latest)[len(self.latest) // 2] if self.latest else 0.0


def admitted(before: Usual, c: Contribution, displacement: float | None, policy: JobPolicy) -> Usual:
    """With one more; what nobody measured teaches nothing."""
    if displacement is None:
        return before
    return Usual((*before.latest, _per_interval(c, displacement, policy))[-LATEST_KEPT:])


def explosion(
    c: Contribution, displacement: float | None, usual: Usual, version: Version, policy: JobPolicy
) -> str | None:
    """What is wrong, if the contribution is too far from Θ. A fragment that never moved has no usual displacement."""
    ratio_max, median = policy.health.displacement_ratio_max, usual.median
    if displacement is None or ratio_max is None or version < VERSIONS_BEFORE_JUDGING or median == 0.0:
        return None
    here = _per_interval(c, displacement, policy)
    if here <= ratio_max * median:
        return None
    return (
        f"it is {here:.3g} from the fragment where {median:.3g} is usual, {here / median:.3g} times as far; "
        f"at most {ratio_max:g} times is allowed"
    )


def _per_interval(c: Contribution, displacement: float, policy: JobPolicy) -> float:
    return displacement / max(1.0, c.step_count / policy.sync_interval_steps)
