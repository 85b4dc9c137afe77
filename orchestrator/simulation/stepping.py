"""The inner steps of simulated islands: how long each takes, on how many tokens, and which islands stand still.

Responsible for what the plan says of speed: step times (recorded, sampled, or a mean with jitter), pauses between steps,
and capacities that change over time. Refuses to know what a step does; ``world`` asks, and schedules.
"""

from __future__ import annotations

from bisect import bisect_right
from random import Random
from typing import TypeVar

from orchestrator.core.vocabulary import Duration, Instant, IslandId, JobPolicy
from orchestrator.errors import InternalError
from orchestrator.simulation.host import Host
from orchestrator.simulation.plan import Pace, WorldPlan

Value = TypeVar("Value")


class Stepping:
    """Speeds and capacities of all islands of one world."""

    def __init__(self, policy: JobPolicy, plan: WorldPlan, random: Random) -> None:
        islands = [island.island for island in policy.islands]
        self._plan, self._random = plan, random
        self._step_s = dict(zip(islands, plan.step_s, strict=True))
        self._samples = _of_each(islands, plan.step_samples, ())
        self._paces: dict[IslandId, tuple[Pace, ...]] = _of_each(islands, plan.paces, ())
        self._since = {island: [pace.since for pace in paces] for island, paces in self._paces.items()}
        self._pause_s = _of_each(islands, plan.pause_s, 0.0)
        bandwidth = _of_each(islands, plan.bandwidth_bytes_per_s, float("inf"))
        self._carriage_s = {island: plan.payload_bytes / bandwidth[island] for island in islands}
        self._still_since: dict[IslandId, Instant] = {}

    def draw(self, island: IslandId, now: Instant) -> Duration:
        """How long the step that begins now takes."""
        samples = self._samples[island]
        if (pace := self._pace(island, now)) is not None:
            usual = pace.step_s
        elif samples:
            return self._random.choice(samples)
        else:
            usual = self._step_s[island]
        return usual * (1.0 + self._plan.step_jitter_ratio * self._random.uniform(-1.0, 1.0))

    def pause(self, island: IslandId, now: Instant) -> Duration:
        """How long the island stops between two steps."""
        pace = self._pace(island, now)
        return self._pause_s[island] if pace is None else pace.pause_s

    def carriage(self, island: IslandId) -> Duration:
        """What the bytes of one fragment add to a pull from the island or a delivery to it; nothing for a standby."""
        return self._carriage_s.get(island, 0.0)

    # ── capacity ──────────────────────────────────────────────────────────────────────────────────────────────────

    def still(self, island: IslandId) -> bool:
        return island in self._still_since

    def change(self, host: Host | None, island: IslandId, ratio: float, now: Instant) -> Duration | None:
        """The island's capacity is ``ratio`` from now on.

        Returns what is left of the step that waited for it (``Host.held_at``), to be waited for now.
        """
        if ratio == 0.0:
            self._still_since.setdefault(island, now)
            return None
        since = self._still_since.pop(island, None)
        if since is None or host is None:
            return None
        host.owed += max(0.0, now - max(since, host.began_at))  # a step may begin only after a pause
        if host.held_at is None:
            return None
        left, host.held_at = min(host.owed - (now - host.held_at), host.step_s), None  # frozen, too: owed once
        host.owed = 0.0
        return left

    def held(self, host: Host, now: Instant) -> Duration | None:
        """How much longer the step lasts that would end now: 0 if it ends, ``None`` if only ``change`` can tell."""
        if self.still(host.process.island):
            host.held_at = now
            return None
        owed, host.owed = min(host.owed, host.step_s), 0.0
        return owed

    def _pace(self, island: IslandId, now: Instant) -> Pace | None:
        n = bisect_right(self._since[island], now)
        pace = self._paces[island][n - 1] if n else None
        return pace if pace is not None and now < pace.until else None


def _of_each(islands: list[IslandId], values: tuple[Value, ...], default: Value) -> dict[IslandId, Value]:
    """The values by island; ``default`` for all where the plan says nothing."""
    if not values:
        return dict.fromkeys(islands, default)
    if len(values) != len(islands):
        raise InternalError(detail=f"A plan gives {len(values)} values for {len(islands)} islands.")
    return dict(zip(islands, values, strict=True))
