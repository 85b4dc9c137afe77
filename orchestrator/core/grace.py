"""The grace window: how long a round may wait after quorum, within the slack that the overlap leaves.

    slack = τ·ξ_step − (ξ_quorum + ξ_sync)        grace = clip(γ·slack, 0, cap·ξ_step)

The ξ are exponential moving averages of what was seen: an inner step, the time from a round's first contribution to its
quorum, and the time from a round's closing to its result's first adoption. Before the first inner step is known the slack
is unknown, and the window is zero.

Source: Decoupled DiLoCo, arXiv:2604.21428 (adaptive grace window). The cap in steps is ours; the paper's is about one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.core.vocabulary import Duration, Instant, JobPolicy


@dataclass(frozen=True, slots=True)
class Pace:
    """The three moving averages, in seconds; ``None`` until first seen."""

    step: Duration | None = None
    quorum: Duration | None = None
    sync: Duration | None = None

    def with_step(self, seconds: Duration, decay: float) -> Pace:
        return replace(self, step=_average(self.step, seconds, decay))

    def with_quorum(self, seconds: Duration, decay: float) -> Pace:
        return replace(self, quorum=_average(self.quorum, seconds, decay))

    def with_sync(self, seconds: Duration, decay: float) -> Pace:
        return replace(self, sync=_average(self.sync, seconds, decay))

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
    return min(max(policy.grace_margin * slack, 0.0), policy.grace_cap_steps * pace.step)


def _average(before: Duration | None, value: Duration, decay: float) -> Duration:
    return value if before is None else decay * before + (1.0 - decay) * value
