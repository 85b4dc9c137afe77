"""The protocol level: the real core and the real folds over islands with given speeds and capacities.

    outcome = run(world, start, stop, full_tokens)       goodput, contributors and traffic over a window of virtual time

*Goodput* here is merged tokens over the tokens that the same islands would train in that time at full speed, without
failures and without waiting. It is measured between two instants of a job that runs before and after them, so that the work
in flight at one end makes up for the work in flight at the other. A job cut off at both ends would lose the last H/2 steps.

``LockStepWorld`` adds what the islands of this project never do: wait. An island of a synchronous baseline does not begin a
step while a fragment that it offered τ steps ago has not returned (arXiv:2311.08105: τ = 0, arXiv:2501.18512: τ ≥ 1).

The goodput of the fleet level is the time integral of capacity. The same capacities give the same goodput here, except for
two small errors. A step that a stall interrupts continues afterwards, so no work is lost, but the capacity at its end counts
for the whole step: an error of either sign, of one step per change. And merged tokens lag by half an interval, which the
window removes only on average. Neither is corrected; ``tests/simulation/test_protocol.py`` bounds both by 1 pp. In most
settings the protocol level is lower by 0.1 to 0.4 pp: an island that stalls in mid-interval holds its work that much longer,
so more is in flight once stalls have begun than when the window opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import fsum, sqrt
from typing import Any

from orchestrator.core import effects as f
from orchestrator.core.vocabulary import (
    Duration,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    IslandPlan,
    JobPolicy,
    NodeGroupId,
    Version,
)
from orchestrator.simulation.island import Host
from orchestrator.simulation.plan import ENDLESS_TOKENS, RESTARTS_MAX, Capacity, WorldPlan, sample_policy
from orchestrator.simulation.world import World

STANDING_STILL, AWAY, UNMERGED = "standing still", "slice away", "trained, not merged"
BATCHES_MAX, BATCH_INTERVALS = 20, 2.0
"""The window is divided into at most ``BATCHES_MAX`` parts, whose goodputs give the standard error. Each has at least
``BATCH_INTERVALS`` intervals H."""
QUICK = (0.0005, 0.0005)
"""A latency that is negligible beside a step of a second."""


@dataclass(frozen=True, slots=True)
class ProtocolOutcome:
    """The measurements. ``trained_ratio`` counts all trained tokens, merged or not, relative to full speed.

    ``traffic_bytes_per_s`` is the mean per island, each way, and 0 if the plan has no payload size. ``until`` is the instant
    that the simulation reached: before the end of the window if it was interrupted.
    """

    goodput: float
    stderr: float
    trained_ratio: float
    uptime: float
    merges: int
    contributors_mean: float
    traffic_bytes_per_s: float
    badput: Mapping[str, float]
    until: Instant


def policy(
    islands: int,
    *,
    quorum: int = 1,
    quorum_ratio: float = 0.0,
    fragments: int = 24,
    interval_steps: int = 24,
    overlap_steps: int = 2,
    grace_cap_steps: float | None = 1.0,
    grace_margin: float = 0.8,
    grace_floor_steps: float = 0.0,
) -> JobPolicy:
    """Return the policy of a job that never ends and never gives up an island. The defaults are the paper's main setting."""
    names = [f"learner-{n}" for n in range(islands)]
    return replace(
        sample_policy(),
        islands=tuple(IslandPlan(IslandId(name), NodeGroupId(name), name, 1) for name in names),
        fragment_count=fragments,
        sync_interval_steps=interval_steps,
        overlap_steps=overlap_steps,
        quorum=quorum,
        quorum_ratio=quorum_ratio,
        grace_margin=grace_margin,
        grace_cap_steps=grace_cap_steps,
        grace_floor_steps=grace_floor_steps,
        token_budget=ENDLESS_TOKENS,
        evaluation_every_merges=0,
        suspect_timeout_s=600.0,
        backoff_max_s=60.0,
        restarts_max=RESTARTS_MAX,
        flush_timeout_s=30.0,
    )


def plan(step_s: Sequence[Duration], **changes: object) -> WorldPlan:
    """Return a plan with these step times, negligible latencies, and ``rebase``, so that no work is lost."""
    quiet = WorldPlan(
        step_s=tuple(step_s),
        step_jitter_ratio=0.0,
        tokens_per_step=1024,
        adoption="rebase",
        place_s=QUICK,
        start_s=QUICK,
        transfer_s=QUICK,
        letter_s=QUICK,
        pull_s=QUICK,
        delivery_s=QUICK,
        merge_s=QUICK,
        detect_s=QUICK,
        seed_s=QUICK[0],
        report_every_s=60.0 * max(step_s),
    )
    return replace(quiet, **changes)  # type: ignore[arg-type]


def capacities(policy: JobPolicy, changes: Sequence[Sequence[tuple[Instant, float]]]) -> tuple[Capacity, ...]:
    """Convert the capacities of a fleet outcome to those of a plan."""
    named = zip(policy.islands, changes, strict=True)
    capacities = [Capacity(at, island.island, ratio) for island, ups in named for at, ratio in ups]
    return tuple(sorted(capacities, key=lambda change: (change.at, change.island)))


_Process = tuple[IslandId, Incarnation]


class LockStepWorld(World):
    """A world whose islands wait for each other: the timing of a synchronous baseline. Adoption is the plan's.

    ``_seen`` is the last offer of each fragment that was looked at, and ``_away`` the offers whose results have not
    returned, with the step and version at which they were made.
    """

    def __init__(self, policy: JobPolicy, plan: WorldPlan, seed: int, *, checked: bool = True) -> None:
        super().__init__(policy, plan, seed, checked=checked)
        self._seen: dict[_Process, dict[FragmentId, int]] = {}
        self._away: dict[_Process, dict[FragmentId, tuple[int, Version]]] = {}
        self._waiting: dict[_Process, Host] = {}

    def _begin_step(self, host: Host) -> None:
        key = (host.process.island, host.process.incarnation)
        away, seen = self._away.setdefault(key, {}), self._seen.setdefault(key, {})
        replica = host.process.replica
        for n, work in enumerate(replica.fragments):
            fragment = FragmentId(n)
            if work.latest_offer > seen.get(fragment, 0):
                seen[fragment], away[fragment] = work.latest_offer, (replica.step, work.version)
        if any(replica.step >= step + self.policy.overlap_steps for step, _ in away.values()):
            self._waiting[key] = host
        else:
            super()._begin_step(host)

    def delivered(self, host: Host, effect: f.PublishFragment) -> None:
        super().delivered(host, effect)
        self._back(host, effect.fragment, effect.version)

    def _back(self, host: Host, fragment: FragmentId, version: Version) -> None:
        key = (host.process.island, host.process.incarnation)
        away = self._away.get(key, {})
        if fragment in away and version > away[fragment][1]:
            del away[fragment]
        if self._waiting.pop(key, None) is not None and host.alive and host.process.stepping:
            self._begin_step(host)


def run(
    world: World,
    start: Instant,
    stop: Instant,
    full_tokens: Callable[[Instant, Instant], float],
    on_progress: Callable[[float], None] | None = None,
) -> ProtocolOutcome:
    """Run the world and measure it from ``start`` to ``stop``.

    ``full_tokens`` returns the tokens at full speed between two instants, and ``on_progress`` receives the part that is
    done. On KeyboardInterrupt the outcome covers the time until then, and its ``until`` says how far that is.
    """
    marks: list[_Mark] = []
    shortest = BATCH_INTERVALS * world.policy.sync_interval_steps * max(world.plan.step_s)
    batches = max(2, min(BATCHES_MAX, int((stop - start) / shortest)))
    try:
        for n in range(batches + 1):
            at = start + (stop - start) * n / batches
            world = world.run(at) if n == 0 else world.resume(at)
            goodput = world.goodput.summary(at)
            tokens = goodput["tokens"]
            marks.append(_Mark(at, tokens["merged"], tokens["trained"], goodput, world.statistics.summary(at)))
            if on_progress is not None:
                on_progress(at / stop)
    except KeyboardInterrupt:
        pass
    return _measured(world, marks, full_tokens)


@dataclass(frozen=True, slots=True)
class _Mark:
    """The summaries of the folds at one instant."""

    at: Instant
    merged: float
    trained: float
    goodput: Mapping[str, Any]
    statistics: Mapping[str, Any]


def _measured(
    world: World, marks: Sequence[_Mark], full_tokens: Callable[[Instant, Instant], float]
) -> ProtocolOutcome:
    if len(marks) < 2:
        return ProtocolOutcome(0.0, 0.0, 0.0, 0.0, 0, 0.0, 0.0, {}, 0.0)
    first, last = marks[0], marks[-1]
    whole = full_tokens(first.at, last.at) or 1.0
    parts = [(b.merged - a.merged) / (full_tokens(a.at, b.at) or 1.0) for a, b in pairwise(marks)]
    mean = fsum(parts) / len(parts)
    spread = fsum((part - mean) ** 2 for part in parts) / (len(parts) - 1) if len(parts) > 1 else 0.0
    goodput, trained = (last.merged - first.merged) / whole, (last.trained - first.trained) / whole
    before, after = first.goodput["island_seconds"], last.goodput["island_seconds"]
    still = (after["stalled"] - before["stalled"]) / (after["total"] - before["total"])
    contributions = last.statistics["contributors_mean"] * last.statistics["merges"]
    return ProtocolOutcome(
        goodput=goodput,
        stderr=sqrt(spread / len(parts)),
        trained_ratio=trained,
        uptime=last.goodput["uptime_ratio"],
        merges=last.statistics["merges"],
        contributors_mean=last.statistics["contributors_mean"],
        traffic_bytes_per_s=world.plan.payload_bytes * contributions / len(world.policy.islands) / last.at,
        badput={
            STANDING_STILL: min(still, max(0.0, 1.0 - trained)),
            AWAY: max(0.0, 1.0 - trained - still),
            UNMERGED: max(0.0, trained - goodput),
        },
        until=last.at,
    )


def at_full_speed(plan: WorldPlan) -> Callable[[Instant, Instant], float]:
    """Return a function of two instants: the tokens that all islands train between them without failures or waiting."""
    samples = dict(enumerate(plan.step_samples))
    means = [fsum(s) / len(s) if (s := samples.get(n)) else usual for n, usual in enumerate(plan.step_s)]
    rate = fsum(plan.tokens_per_step / mean for mean in means)
    return lambda since, until: rate * (until - since)
