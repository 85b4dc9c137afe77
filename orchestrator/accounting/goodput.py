"""Goodput as docs/concepts.md states it: every island-second in one class, every token in one place, both adding up.

    productive   inner steps whose tokens reached a merge
    discarded    inner steps whose tokens never will
    stalled      alive, not stepping
    recovering   placing, starting, compiling, catching up after a failure       starting   the same, first time
    down         wanted by the job, not there
    in_flight    inner steps of which it is still open; zero once the job has ended

An island's stepping time is split in the proportion of its tokens (means over fragments). Responsible for nothing but
arithmetic over (event, effects): live, simulated and replayed jobs use this fold, so the numbers mean the same.

Standbys have an account of their own, because their seconds fit no class. They are not productive: a standby trains nothing.
As badput they would make a job look worse the better it is prepared, and change what the ratio means. Nor may they be
hidden, because an accelerator that waits costs as much as one that trains.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from math import fsum
from typing import Any

from orchestrator.accounting.island_time import ACTIVE, GONE, Change, IslandTime, Lifecycle
from orchestrator.accounting.ledger import QUARANTINED, Ledger
from orchestrator.accounting.series import policy_after
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Adopted, CarriedReport, CaughtUp, Progress
from orchestrator.core.saving import BeginCheckpoint, DropCheckpoint, FragmentRestored, JobResumed, JobSalvaged
from orchestrator.core.vocabulary import Duration, Incarnation, Instant, IslandId, IslandState, JobPolicy
from orchestrator.errors import InternalError

_READY = IslandState.STANDBY.value
CLASSES = ("productive", "discarded", "stalled", "recovering", "starting", "down", "in_flight")
_TRAINING = IslandState.TRAINING.value
_OF_CHECKPOINTS = (BeginCheckpoint, DropCheckpoint)
_LEDGER_EFFECTS = (
    *(f.AdmitContribution, f.RefuseContribution, f.ReleasePayload, f.MergeFragment, f.FinishJob),
    *_OF_CHECKPOINTS,
)


class Goodput:
    """The fold. ``apply`` every step, then ask for a ``summary``."""

    policy: JobPolicy
    ledger: Ledger
    times: dict[IslandId, IslandTime]
    started_at: Instant
    at: Instant
    _accelerators: dict[IslandId, int]
    _lifecycle: Lifecycle
    _uptime: _Uptime
    _standbys: Standbys

    def __init__(self, policy: JobPolicy) -> None:
        islands = tuple(plan.island for plan in policy.islands)
        self.policy = policy
        self.ledger = Ledger(islands, policy.fragment_count)
        self.times = {island: IslandTime() for island in islands}
        self.started_at = self.at = 0.0
        self._accelerators = {plan.island: plan.accelerator_count for plan in policy.islands}
        self._lifecycle = Lifecycle(islands)
        self._uptime = _Uptime(policy.quorum)
        self._standbys = Standbys(policy)

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

    def _tokens(self, island: IslandId) -> dict[str, float]:
        accounts = self.ledger.accounts[island]
        return {
            "trained": self.ledger.trained[island] + sum(account.carried for account in accounts) / len(accounts),
            "merged": sum(account.merged for account in accounts) / len(accounts),
            "discarded": sum(account.discarded for account in accounts) / len(accounts),
            "in_flight": sum(account.in_flight for account in accounts) / len(accounts),
        }

    def _discards(self, island: IslandId) -> dict[str, float]:
        accounts = self.ledger.accounts[island]
        return _scaled(_added(account.discards for account in accounts), 1 / len(accounts))


class Standbys:
    """The fold. ``apply`` every step, then ask for a ``summary``."""

    _lifecycle: Lifecycle
    _seconds: dict[str, Duration]
    _promotions: int

    def __init__(self, policy: JobPolicy) -> None:
        self._lifecycle = Lifecycle(tuple(plan.island for plan in policy.standbys))
        self._seconds = {}
        self._promotions = 0

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        lives = self._lifecycle.lives
        if not lives or self._lifecycle.finished_at is not None:
            return
        since = {standby: life.since for standby, life in lives.items()}
        for change in self._lifecycle.apply(event, effects):
            self._add(change.before, change.at - since[change.island])
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

    def _add(self, state: str, seconds: Duration) -> None:
        if state in ACTIVE:
            self._seconds[state] = self._seconds.get(state, 0.0) + seconds


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
