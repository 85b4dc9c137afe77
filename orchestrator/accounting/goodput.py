"""Goodput as docs/concepts.md states it: every island-second in one class, every token in one place, both adding up.

    productive   inner steps whose tokens reached a merge
    discarded    inner steps whose tokens never will
    stalled      alive, not stepping
    recovering   placing, starting, compiling, catching up after a failure       starting   the same, first time
    down         wanted by the job, not there
    in_flight    inner steps of which it is still open; zero once the job has ended

An island's stepping time is split in the proportion of its tokens, which are means over fragments. Fragments are of about
the same size, so each counts alike. Only a mixture's routers that are merged more often are a fragment of another size: they
count by their part of the parameters, and the others share the rest (0263). Responsible for nothing but arithmetic over
(event, effects): live, simulated and replayed jobs use this fold, so the numbers mean the same.

Standbys have an account of their own, because their seconds fit no class. They are not productive: a standby trains nothing.
As badput they would make a job look worse the better it is prepared, and change what the ratio means. Nor may they be
hidden, because an accelerator that waits costs as much as one that trains.

The cost is the same seconds in money, where the policy has prices: an island's seconds times the price of its machines. An
island without a process, because it waits to be placed or its node group has no room, costs only if they are reserved.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import pairwise
from math import fsum, sqrt
from typing import Any

from orchestrator.accounting.island_time import ACTIVE, AWAY, GONE, HELD, NO_NODE, Change, IslandTime, Lifecycle
from orchestrator.accounting.ledger import QUARANTINED, Account, Ledger
from orchestrator.accounting.series import Series, policy_after
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Adopted, CarriedReport, CaughtUp, Progress
from orchestrator.core.saving import BeginCheckpoint, DropCheckpoint, FragmentRestored, JobResumed, JobSalvaged
from orchestrator.core.vocabulary import Duration, Incarnation, Instant, IslandId, IslandState, JobPolicy, Price
from orchestrator.errors import InternalError

_READY = IslandState.STANDBY.value
CLASSES = ("productive", "discarded", "stalled", "recovering", "starting", "down", "in_flight")
_TRAINING = IslandState.TRAINING.value
_OF_CHECKPOINTS = (BeginCheckpoint, DropCheckpoint)
_LEDGER_EFFECTS = (
    *(f.AdmitContribution, f.RefuseContribution, f.ReleasePayload, f.MergeFragment, f.FinishJob),
    *_OF_CHECKPOINTS,
)
_WITHOUT_PROCESS = (AWAY, HELD, NO_NODE)
"""Causes of badput in which an island has no process."""
STANDBY_COST = "standing by"
PACE_LENGTH, STRETCHES_MIN = 64, 4
"""The points of the pace that are kept, and the stretches between them from which a forecast has a spread."""


class Goodput:
    """The fold. ``apply`` every step, then ask for a ``summary``."""

    policy: JobPolicy
    ledger: Ledger
    times: dict[IslandId, IslandTime]
    started_at: Instant
    at: Instant
    router_part: float
    """The part of the parameters that is in routers with a fragment of their own; 0 if there is none, or it is not known."""
    _accelerators: dict[IslandId, int]
    _lifecycle: Lifecycle
    _uptime: _Uptime
    _standbys: Standbys
    _pace: Series[tuple[int, Instant]]
    """(tokens trained, instant) at merges, if the policy has prices."""

    def __init__(self, policy: JobPolicy) -> None:
        islands = tuple(plan.island for plan in policy.islands)
        self.policy = policy
        self.ledger = Ledger(islands, policy.fragment_count)
        self.times = {island: IslandTime() for island in islands}
        self.started_at = self.at = self.router_part = 0.0
        self._accelerators = {plan.island: plan.accelerator_count for plan in policy.islands}
        self._lifecycle = Lifecycle(islands)
        self._uptime = _Uptime(policy.quorum)
        self._standbys = Standbys(policy)
        self._pace = Series(PACE_LENGTH)

    @property
    def finished_at(self) -> Instant | None:
        return self._lifecycle.finished_at

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        if self.finished_at is not None:
            return
        self.at = event.at
        if isinstance(event, e.JobStarted):
            self.started_at = event.at
            self._uptime.start(event.at)
        if (policy := policy_after(self.policy, event, effects)) is not self.policy:
            self.policy = policy
            self._uptime.require(event.at, policy.quorum)
        self._hear(event, effects)
        for effect in effects:
            if isinstance(effect, f.QuarantineIsland):
                self.ledger.lost(effect.island, QUARANTINED)
        for change in self._lifecycle.apply(event, effects):
            self._changed(change)
        self._standbys.apply(event, effects)
        for effect in effects:
            if isinstance(effect, _LEDGER_EFFECTS):
                self.ledger.apply(effect)
            elif isinstance(effect, f.FlushIsland):
                self._uptime.stop(event.at)
        if self.finished_at is not None:
            self._uptime.stop(event.at)

    def check(self) -> None:
        """Raise InternalError when tokens or seconds do not add up. It looks at every island."""
        if problems := list(self.ledger.problems()):
            raise InternalError(detail="Tokens are not conserved: " + "; ".join(problems) + ".")

    def summary(self, at: Instant | None = None) -> dict[str, Any]:
        """Everything as plain data, at ``at`` (by default the last event, and never after the job's end)."""
        at = self._until(at)
        islands = {island: self._island_summary(island, at) for island in self.times}
        seconds = _added(item["seconds"] for item in islands.values())
        weighted = _added(_scaled(item["seconds"], self._accelerators[i]) for i, item in islands.items())
        tokens = _added(item["tokens"] for item in islands.values())
        total = fsum(weighted.values())
        return {
            "at": at,
            "goodput_ratio": weighted["productive"] / total if total else 0.0,
            "uptime_ratio": self._uptime.ratio(at),
            "island_seconds": {**seconds, "total": fsum(seconds.values())},
            "badput_seconds": _ranked(_added(item["badput_seconds"] for item in islands.values())),
            "tokens": tokens,
            "discarded_tokens": _ranked(_added(self._discards(island) for island in self.times)),
            "tokens_merged_per_second": tokens["merged"] / (at - self.started_at) if at > self.started_at else 0.0,
            "islands": islands,
            "standbys": self._standbys.summary(at),
            **self._cost(islands, at),
            **({"carried": asdict(self.ledger.carried)} if self.ledger.carried is not None else {}),
        }

    # ── events ────────────────────────────────────────────────────────────────────────────────────────────────

    def _hear(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        if isinstance(event, e.IslandReported):
            self._reported(event, event.report)
        elif isinstance(event, (e.ContributionArrived, e.ContributionUnusable)):
            c = event.contribution
            self._trained(c.island, c.incarnation, c.tokens_total)
        elif isinstance(event, e.EvaluationCompleted):
            if event.island in self.times:
                self.times[event.island].measured(event)
        elif isinstance(event, e.MergeCompleted):
            self.ledger.merge_completed(event)
            if any(plan.price for plan in self.policy.islands):
                self._pace.add((sum(self.ledger.trained.values()), event.at))
        elif isinstance(event, e.OuterStateSeeded) and self.policy.router_interval_steps is not None:
            self.router_part = event.router_parameter_count / max(1, event.parameter_count)
        elif isinstance(event, JobResumed):
            self.ledger.resumed(event)
        elif isinstance(event, JobSalvaged):
            self.ledger.salvaged(event)
            for one in event.islands:
                self.times[one.island].go_on(one)
        elif isinstance(event, FragmentRestored) and effects:  # repeated, it has none
            self.ledger.restored(event)

    def _reported(self, event: e.IslandReported, report: CarriedReport) -> None:
        if isinstance(report, Progress):
            self._trained(event.island, event.incarnation, report.tokens_total)
            if event.island in self.times:
                self.times[event.island].report(event.at, event.incarnation, report)
        elif isinstance(report, Adopted):
            self._trained(event.island, event.incarnation, report.tokens_total)
            if self._speaks(event.island, event.incarnation):
                self.ledger.adopted(event.island, event.incarnation, report)
        elif isinstance(report, CaughtUp) and self._speaks(event.island, event.incarnation):
            self.ledger.caught_up(event.island, report)
            if report.left is not None:
                self.times[event.island].continued(report.left)

    def _trained(self, island: IslandId, incarnation: Incarnation, tokens_total: int) -> None:
        counts = self._speaks(island, incarnation)
        self.ledger.trained_up_to(island, incarnation, tokens_total, counts)

    def _speaks(self, island: IslandId, incarnation: Incarnation) -> bool:
        """Return whether this is the island's present incarnation and has not ended."""
        life = self._lifecycle.lives.get(island)
        return life is not None and life.incarnation == incarnation and life.state not in GONE

    def _changed(self, change: Change) -> None:
        if change.after in GONE and self.finished_at is None:
            self.ledger.lost(change.island)
        self._uptime.add(change.at, (change.after == _TRAINING) - (change.before == _TRAINING))
        self.times[change.island].change(change.at, change.after, change.incarnation)

    # ── summaries ─────────────────────────────────────────────────────────────────────────────────────────────

    def _until(self, at: Instant | None) -> Instant:
        latest = self.at if at is None else max(at, self.at)
        return latest if self.finished_at is None else self.finished_at

    def _island_summary(self, island: IslandId, at: Instant) -> dict[str, Any]:
        closed = self.times[island].closed(at)
        tokens = self._tokens(island)
        shares = _split(closed.stepping, tokens)
        seconds = {name: shares.get(name, 0.0) for name in CLASSES}
        badput: dict[str, Duration] = {}
        for (kind, cause), spent in closed.waits.items():
            seconds[kind] += spent
            label = cause if kind not in ("starting", "recovering") else f"{kind}: {cause}"
            badput[label] = badput.get(label, 0.0) + spent
        discards = self._discards(island)
        for cause, amount in discards.items():
            part = shares["discarded"] * amount / tokens["discarded"] if tokens["discarded"] else 0.0
            badput[cause] = badput.get(cause, 0.0) + part
        return {"seconds": seconds, "tokens": tokens, "badput_seconds": badput}

    def _cost(self, islands: dict[IslandId, dict[str, Any]], at: Instant) -> dict[str, Any]:
        """Return ``cost`` if a price is known: so far, by node group and by cause of badput, and a forecast."""
        plans = (*self.policy.islands, *self.policy.standbys)
        priced = [plan for plan in plans if plan.price is not None]
        if not priced:
            return {}
        groups: dict[str, list[float]] = {plan.node_group: [] for plan in priced}
        badput: list[dict[str, float]] = []
        waited = self._standbys.by_name(at)
        for plan in priced:
            assert plan.price is not None
            if plan.island in islands:
                whole, parts = cost_of(plan.price, islands[plan.island])
            else:
                whole = plan.price.per_hour * waited.get(plan.island, 0.0) / 3600.0
                parts = {STANDBY_COST: whole}
            groups[plan.node_group].append(whole)
            badput.append(parts)
        so_far = fsum(fsum(costs) for costs in groups.values())
        merged = fsum(own["tokens"]["merged"] for own in islands.values())
        before = self.ledger.carried.trained if self.ledger.carried is not None else 0
        left = self.policy.token_budget - sum(self.ledger.trained.values()) - before
        has_future = self.finished_at is None and left > 0 and at > self.started_at
        per_second = so_far / (at - self.started_at) if has_future else 0.0
        assert priced[0].price is not None
        cost = {
            "currency": priced[0].price.currency,
            "so_far": so_far,
            "per_merged_million_tokens": so_far / merged * 1e6 if merged else None,
            "badput": _ranked(_added(badput)),
            "node_groups": {group: fsum(costs) for group, costs in sorted(groups.items())},
            "unpriced": sorted({plan.node_group for plan in plans if plan.price is None}),
            "forecast": forecast(so_far, per_second, left, self._pace.all()) if has_future else None,
        }
        return {"cost": cost}

    def _tokens(self, island: IslandId) -> dict[str, float]:
        shared, own = self._accounts(island)
        return {
            "trained": self.ledger.trained[island] + self._mean([a.carried for a in shared], [a.carried for a in own]),
            "merged": self._mean([a.merged for a in shared], [a.merged for a in own]),
            "discarded": self._mean([a.discarded for a in shared], [a.discarded for a in own]),
            "in_flight": self._mean([a.in_flight for a in shared], [a.in_flight for a in own]),
        }

    def _discards(self, island: IslandId) -> dict[str, float]:
        shared, own = self._accounts(island)
        of_shared = _scaled(_added(account.discards for account in shared), (1.0 - self.router_part) / len(shared))
        return _added([of_shared, *(_scaled(account.discards, self.router_part) for account in own)])

    def _accounts(self, island: IslandId) -> tuple[list[Account], list[Account]]:
        """Return the accounts of the fragments that share H, and of routers that have a fragment of their own."""
        accounts, count = self.ledger.accounts[island], self.policy.schedule.shared_count
        return accounts[:count], accounts[count:]

    def _mean(self, of_shared: list[int], of_routers: list[int]) -> float:
        """Return a mean over fragments, in which the routers' counts by its part of the parameters."""
        mean = sum(of_shared) / len(of_shared)
        return mean * (1.0 - self.router_part) + sum(of_routers) * self.router_part


class Standbys:
    """The fold. ``apply`` every step, then ask for a ``summary``."""

    _lifecycle: Lifecycle
    _seconds: dict[str, Duration]
    _waited: dict[IslandId, Duration]
    """The seconds of each standby, over all states with a process."""
    _promotions: int

    def __init__(self, policy: JobPolicy) -> None:
        self._lifecycle = Lifecycle(tuple(plan.island for plan in policy.standbys))
        self._seconds = {}
        self._waited = {}
        self._promotions = 0

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        lives = self._lifecycle.lives
        if not lives or self._lifecycle.finished_at is not None:
            return
        since = {standby: life.since for standby, life in lives.items()}
        for change in self._lifecycle.apply(event, effects):
            self._add(change.island, change.before, change.at - since[change.island])
            since[change.island] = change.at
        for effect in effects:
            if isinstance(effect, f.PlaceIsland) and effect.standby is not None:
                self._promotions += not isinstance(event, e.SynchroniserRestarted)

    def summary(self, at: Instant) -> dict[str, Any]:
        """Seconds over all standbys until ``at``: standing by, and coming to it."""
        seconds = dict(self._seconds)
        until = at if self._lifecycle.finished_at is None else self._lifecycle.finished_at
        for life in self._lifecycle.lives.values():
            if life.state in ACTIVE:
                seconds[life.state] = seconds.get(life.state, 0.0) + until - life.since
        ready = seconds.get(_READY, 0.0)
        rest = sum(spent for state, spent in sorted(seconds.items()) if state != _READY)
        return {"ready_seconds": ready, "preparing_seconds": rest, "takeovers": self._promotions}

    def by_name(self, at: Instant) -> dict[IslandId, Duration]:
        """Return how long each standby has had a process, until ``at``."""
        until = at if self._lifecycle.finished_at is None else self._lifecycle.finished_at
        open_since = {name: life.since for name, life in self._lifecycle.lives.items() if life.state in ACTIVE}
        names = self._lifecycle.lives
        return {
            name: self._waited.get(name, 0.0) + (until - open_since[name] if name in open_since else 0.0)
            for name in names
        }

    def _add(self, standby: IslandId, state: str, seconds: Duration) -> None:
        if state in ACTIVE:
            self._seconds[state] = self._seconds.get(state, 0.0) + seconds
            self._waited[standby] = self._waited.get(standby, 0.0) + seconds


class _Uptime:
    """Time with at least the quorum of islands training, from the job's start until it begins to end."""

    _quorum: int
    _training: int
    _up: Duration
    _since: Instant
    _start: Instant
    _stopped: Instant | None

    def __init__(self, quorum: int) -> None:
        self._quorum = quorum
        self._training = 0
        self._up = self._since = self._start = 0.0
        self._stopped = None

    def start(self, at: Instant) -> None:
        self._start = self._since = at

    def add(self, at: Instant, change: int) -> None:
        if change and self._stopped is None:
            self._advance(at)
            self._training += change

    def require(self, at: Instant, quorum: int) -> None:
        """Count by this quorum from now on."""
        if self._stopped is None:
            self._advance(at)
        self._quorum = quorum

    def stop(self, at: Instant) -> None:
        if self._stopped is None:
            self._advance(at)
            self._stopped = at

    def ratio(self, at: Instant) -> float:
        until = at if self._stopped is None else self._stopped
        up = self._up + (until - self._since if self._training >= self._quorum else 0.0)
        return up / (until - self._start) if until > self._start else 0.0

    def _advance(self, at: Instant) -> None:
        if self._training >= self._quorum:
            self._up += at - self._since
        self._since = at


def cost_of(price: Price, figures: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Return what an island's time costs, and the part of that by cause of badput. ``figures`` has its seconds."""
    free = () if price.is_paid_while_away else _WITHOUT_PROCESS
    parts = {cause: spent for cause, spent in figures["badput_seconds"].items() if cause not in free}
    unpaid = fsum(figures["badput_seconds"].get(cause, 0.0) for cause in free)
    paid = max(0.0, fsum(figures["seconds"].values()) - unpaid)
    return price.per_hour * paid / 3600.0, _scaled(parts, price.per_hour / 3600.0)


def forecast(
    so_far: float, per_second: float, tokens_left: float, pace: list[tuple[int, Instant]]
) -> dict[str, float | None] | None:
    """Return the cost at the end of the budget: expected, and within two standard errors; None before there is a pace.

    Seconds per token are the mean over the pace, and their standard error comes from its stretches, each weighted by its
    tokens. Money per second stays what it was.
    """
    stretches = [
        (after - before, until - since) for (before, since), (after, until) in pairwise(pace) if after > before
    ]
    tokens = fsum(part for part, _ in stretches)
    if not stretches or tokens <= 0.0:
        return None
    mean = fsum(spent for _, spent in stretches) / tokens
    expected = so_far + tokens_left * mean * per_second
    if len(stretches) < STRETCHES_MIN:
        return {"expected": expected, "low": None, "high": None}
    squares = fsum((spent - mean * part) ** 2 for part, spent in stretches) / (len(stretches) - 1) * len(stretches)
    margin = 2.0 * sqrt(squares) / tokens * tokens_left * per_second
    return {"expected": expected, "low": max(so_far, expected - margin), "high": expected + margin}


def _split(stepping: Duration, tokens: dict[str, float]) -> dict[str, Duration]:
    """Stepping time by what became of its tokens; in flight while nothing is known of any."""
    trained = tokens["trained"]
    productive = stepping * tokens["merged"] / trained if trained else 0.0
    discarded = stepping * tokens["discarded"] / trained if trained else 0.0
    in_flight = stepping - productive - discarded if not trained or tokens["in_flight"] else 0.0
    return {"productive": productive, "discarded": discarded, "in_flight": max(0.0, in_flight)}


def _added(many: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Sums by key; exact in the order of the keys' first appearance."""
    columns: dict[str, list[float]] = {}
    for one in many:
        for key, value in one.items():
            columns.setdefault(key, []).append(value)
    return {key: fsum(values) for key, values in columns.items()}


def _scaled(values: dict[str, Any], factor: float) -> dict[str, float]:
    return {key: value * factor for key, value in values.items()}


def _ranked(values: dict[str, float]) -> dict[str, float]:
    """Sort the values, largest first and ties by name, and leave out zeros."""
    return {key: value for key, value in sorted(values.items(), key=lambda kv: (-kv[1], kv[0])) if value > 0.0}
