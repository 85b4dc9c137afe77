"""What trackers are sent of a job, derived from its tape; and what a tracker is.

A *row* has the values of some series at one instant, such as losses and speeds. A *span* is a part of the way of a
contribution, from the offer to the adoption of its merge. A *notice* is something that people want to be told.

``Story`` is the fold of the tape's records: what it returns for a record depends on the records before it only. So rows,
spans and notices that are sent again have the same numbers, ids and times, by which a ``Sink`` recognises them. The story
is also the cursor that ``api.tracker_feed`` stores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import BaseModel

from api.run.tables import settings_of
from orchestrator.errors import InfrastructureError

STEPS_KEPT = 64
"""The newest steps of an island whose times are kept, to say when it made an offer."""
VERSIONS_KEPT = 8
"""The newest versions of a fragment whose publication is kept, to say how long their adoption took."""
NoticeKind = Literal[
    "job_started",
    "job_ended",
    "island_lost",
    "island_returned",
    "island_quarantined",
    "checkpoint_failed",
    "synchroniser_restarted",
    "job_salvaged",
]
Facts = dict[str, str | int | float]


# ── what is sent ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Row:
    """Values by series. ``number`` counts a job's rows from 1, ``tokens`` is what all islands had trained by then."""

    number: int
    tokens: int
    at: float
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a trace. ``trace`` and ``name`` (with ``of``, the island) identify it; ``parent`` is a name in the trace.

    Instants are in seconds since the job was created.
    """

    trace: str
    name: str
    of: str
    parent: str
    start: float
    end: float
    attributes: Facts = field(default_factory=dict)
    problem: str = ""

    @property
    def key(self) -> str:
        return f"{self.name} {self.of}".strip()


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that people want to be told. ``id`` is the same each time it is sent."""

    id: str
    kind: NoticeKind
    at: float
    text: str
    island: str = ""


MIXTURE = {
    "expert_share_max": "share_max",
    "expert_entropy_ratio": "entropy_ratio",
    "loss_before_adoption": "loss_before",
    "loss_after_adoption": "loss_after",
}
"""The figures of a mixture of experts by the names of their fields (``core.messages.MixtureFigures``)."""


@dataclass(slots=True)
class Batch:
    """The rows, spans and notices of some records. ``outcome`` is set at the end: completed, cancelled or failed."""

    rows: list[Row] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """The facts of a job that trackers are sent. ``started_at`` is in Unix seconds."""

    job: str
    name: str
    caller: str
    started_at: float
    specification: dict[str, Any]
    resumed_from: str = ""

    def settings(self) -> dict[str, str | int | float | bool]:
        """Return the fields of the specification by their paths, without those that are not set."""
        return settings_of(self.specification)


# ── the fold ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class SeenIsland(BaseModel):
    """``tokens`` are those of this incarnation. ``row_…`` is what its last row said; ``steps`` is (step, when reported)."""

    incarnation: int = 0
    tokens: int = 0
    loss: float | None = None
    row_at: float | None = None
    row_tokens: int = 0
    steps: list[tuple[int, float]] = []


class HeldContribution(BaseModel):
    island: str
    incarnation: int
    fragment: int
    base_version: int
    tokens: int
    offered_at: float
    arrived_at: float


class OrderedMerge(BaseModel):
    at: float
    reason: str
    contributions: list[HeldContribution]


class PublishedVersion(BaseModel):
    """``adopters`` are the lives of islands that have reported its adoption; a report may be repeated."""

    version: int
    at: float
    adopters: list[str] = []


class Story(BaseModel):
    """A job as told by the first ``n`` records of its tape.

    ``tape`` counts the tapes: a job that was salvaged continues on a new one.
    """

    n: int = 0
    at: float = 0.0
    tape: int = 1
    row_count: int = 0
    tokens_before: int = 0
    """Trained by earlier incarnations, or before the job was resumed or salvaged."""
    islands: dict[str, SeenIsland] = {}
    held: dict[str, HeldContribution] = {}
    ordered: dict[str, OrderedMerge] = {}
    published: dict[str, list[PublishedVersion]] = {}
    versions: dict[str, int] = {}
    merges_row_at: float | None = None
    traced: dict[str, int] = {}
    """The newest version of each fragment whose merge round was a span."""
    lost: list[str] = []
    outcome: str = ""

    @property
    def tokens(self) -> int:
        return self.tokens_before + sum(island.tokens for island in self.islands.values())

    def begin_again(self) -> None:
        """Forget what the tape before said of things in flight. Rows, tokens and versions go on."""
        self.n, self.at, self.tape = 0, 0.0, self.tape + 1
        self.held, self.ordered, self.published, self.traced = {}, {}, {}, {}

    def read(self, n: int, event: Mapping[str, Any], effects: Sequence[Mapping[str, Any]], every_s: float) -> Batch:
        """Add a record, and return what came of it. Series that change with each step get a row each ``every_s``."""
        batch = Batch()
        self.n, self.at = n, float(event.get("at", self.at))
        reader = _READERS.get(str(event["type"]))
        if reader is not None:
            reader(self, event, batch, every_s)
        for effect in effects:
            decided = _DECISIONS.get(str(effect["type"]))
            if decided is not None:
                decided(self, effect, batch, every_s)
        return batch

    # ── events ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _progress(self, event: Mapping[str, Any], batch: Batch, every_s: float) -> None:
        island = self._island(event)
        island.tokens = max(island.tokens, int(event["tokens_total"]))
        island.loss = _finite(event.get("loss"))
        island.steps = [*island.steps[-STEPS_KEPT + 1 :], (int(event["step"]), self.at)]
        if island.row_at is None or self.at - island.row_at >= every_s:
            self._add_row(batch, self._speeds(event, island) | self._losses(event["island"]))
            island.row_at, island.row_tokens = self.at, island.tokens

    def _speeds(self, event: Mapping[str, Any], island: SeenIsland) -> dict[str, float | None]:
        mixture = event.get("mixture") or {}
        name, passed = f"island/{event['island']}", self.at - island.row_at if island.row_at is not None else 0.0
        return {
            f"{name}/tokens_per_second": (island.tokens - island.row_tokens) / passed if passed > 0 else None,
            f"{name}/step": float(event["step"]),
            f"{name}/learning_rate": _finite(event.get("learning_rate")),
            f"{name}/gradient_norm": _finite(event.get("gradient_norm")),
            f"{name}/mfu_ratio": _finite(event.get("mfu_ratio")),
            **{f"{name}/{figure}": _finite(mixture.get(field)) for figure, field in MIXTURE.items()},
        }

    def _losses(self, *islands: str) -> dict[str, float | None]:
        """Return the last training losses of these islands, and the mean of all that train."""
        losses = [seen.loss for seen in self.islands.values() if seen.loss is not None]
        mean = math.fsum(losses) / len(losses) if losses else None
        return {f"island/{name}/loss": self.islands[name].loss for name in islands} | {"training_loss": mean}

    def _evaluated(self, event: Mapping[str, Any], batch: Batch, _every_s: float) -> None:
        values = {
            "held_out_loss": _finite(event["loss"]),
            "held_out_bits_per_byte": _finite(event.get("bits_per_byte")),
            "global_version": float(event["global_version"]),
        }
        for source in event.get("sources") or ():
            values[f"held_out_loss/{source['source']}"] = _finite(source.get("loss"))
        self._add_row(batch, values)

    def _arrived(self, event: Mapping[str, Any], _batch: Batch, _every_s: float) -> None:
        contribution = event["contribution"]
        island = self._island(contribution)
        offered = (at for step, at in island.steps if step >= contribution["step"])
        self.held[contribution["payload"]] = HeldContribution(
            island=contribution["island"],
            incarnation=contribution["incarnation"],
            fragment=contribution["fragment"],
            base_version=contribution["base_version"],
            tokens=contribution["token_count"],
            offered_at=next(offered, self.at),
            arrived_at=self.at,
        )

    def _merged(self, event: Mapping[str, Any], batch: Batch, every_s: float) -> None:
        fragment, version = str(event["fragment"]), int(event["version"])
        self.versions[fragment] = version
        ordered = self.ordered.pop(f"{fragment}:{version}", None)
        if ordered is not None:
            self.traced[fragment] = version
            batch.spans += self._spans_of(fragment, version, ordered)
        if self.merges_row_at is None or self.at - self.merges_row_at >= every_s:
            self.merges_row_at = self.at
            values = {
                "global_version": float(sum(self.versions.values())),
                "merge_seconds": _finite(event["merge_seconds"]),
                "contributors": float(len(ordered.contributions)) if ordered else None,
                f"fragment/{fragment}/router_distance": _finite(event.get("router_distance")),
                f"fragment/{fragment}/router_travel": _finite(event.get("router_travel")),
            }
            self._add_row(batch, values)

    def _spans_of(self, fragment: str, version: int, ordered: OrderedMerge) -> Iterator[Span]:
        trace, root = self._trace(fragment, version), "merge round"
        inputs = ordered.contributions
        began = min([ordered.at, *(held.offered_at for held in inputs)])
        facts: Facts = {
            "atoll.fragment": int(fragment),
            "atoll.version": version,
            "atoll.close_reason": ordered.reason,
            "atoll.contributors": len(inputs),
        }
        yield Span(trace, root, "", "", began, self.at, facts)
        for held in inputs:
            way: Facts = {
                "atoll.island": held.island,
                "atoll.incarnation": held.incarnation,
                "atoll.tokens": held.tokens,
            }
            stale: Facts = way | {"atoll.staleness": version - 1 - held.base_version}
            contribution = Span(trace, "contribution", held.island, root, held.offered_at, self.at, stale)
            yield contribution
            yield Span(trace, "offer", held.island, contribution.key, held.offered_at, held.offered_at, way)
            yield Span(trace, "pull", held.island, contribution.key, held.offered_at, held.arrived_at, way)
            yield Span(trace, "admit", held.island, contribution.key, held.arrived_at, ordered.at, way)
        yield Span(trace, "merge", "", root, ordered.at, self.at, facts)

    def _adopted(self, event: Mapping[str, Any], batch: Batch, _every_s: float) -> None:
        island = self._island(event)
        island.tokens = max(island.tokens, int(event["tokens_total"]))
        fragment, version = str(event["fragment"]), int(event["version"])
        life = f"{event['island']}:{event['incarnation']}"
        for published in self.published.get(fragment, ()):
            if published.version == version and life not in published.adopters:
                published.adopters.append(life)
                facts: Facts = {
                    "atoll.island": event["island"],
                    "atoll.incarnation": event["incarnation"],
                    "atoll.kept_tokens": event["kept_tokens"],
                }
                trace = self._trace(fragment, version)
                batch.spans.append(Span(trace, "adopt", life, "publish", published.at, self.at, facts))

    def _lost(self, event: Mapping[str, Any], batch: Batch, _every_s: float) -> None:
        self._island(event).loss = None
        if event["island"] not in self.lost:
            self.lost.append(event["island"])
            self._note(batch, "island_lost", f"Island {event['island']} was lost: {event['reason']}", event["island"])

    def _returned(self, event: Mapping[str, Any], batch: Batch, _every_s: float) -> None:
        if event["island"] in self.lost:
            self.lost.remove(event["island"])
            self._note(batch, "island_returned", f"Island {event['island']} trains again.", event["island"])

    def _started(self, _event: Mapping[str, Any], batch: Batch, _every_s: float) -> None:
        self._note(batch, "job_started", "The job started.")

    def _restarted(self, event: Mapping[str, Any], batch: Batch, _every_s: float) -> None:
        self.held, self.ordered = {}, {}
        damage = f" Its files were damaged: {event['damage']}" if event.get("damage") else ""
        self._note(batch, "synchroniser_restarted", f"The synchroniser restarted, with epoch {event['epoch']}.{damage}")

    def _resumed(self, event: Mapping[str, Any], _batch: Batch, _every_s: float) -> None:
        self.tokens_before = int(event["tokens_trained"])
        self.versions = {str(fragment): version for fragment, version in enumerate(event["versions"])}

    def _salvaged(self, event: Mapping[str, Any], batch: Batch, _every_s: float) -> None:
        self.islands = {
            island["island"]: SeenIsland(incarnation=island["incarnation"], tokens=island["tokens_total"])
            for island in event["islands"]
        }
        self.tokens_before = 0
        self.tokens_before = max(0, int(event["tokens_trained"]) - self.tokens)
        self.versions = {str(fragment): version for fragment, version in enumerate(event["versions"])}
        self._note(batch, "job_salvaged", f"The job continues from what its islands held. {len(event['lost'])} lost.")

    def _checkpoint_failed(self, event: Mapping[str, Any], batch: Batch, _every_s: float) -> None:
        self._note(batch, "checkpoint_failed", f"Checkpoint {event['checkpoint']} failed: {event['reason']}")

    # ── decisions ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _order(self, effect: Mapping[str, Any], _batch: Batch, _every_s: float) -> None:
        inputs = [self.held[payload["payload"]] for payload in effect["inputs"] if payload["payload"] in self.held]
        merge = OrderedMerge(at=self.at, reason=effect["reason"], contributions=inputs)
        self.ordered[f"{effect['fragment']}:{effect['version']}"] = merge

    def _publish(self, effect: Mapping[str, Any], batch: Batch, _every_s: float) -> None:
        fragment, version = str(effect["fragment"]), int(effect["version"])
        before = self.published.get(fragment, [])
        if all(one.version != version for one in before):  # later it is published to islands that come
            newest = PublishedVersion(version=version, at=self.at)
            self.published[fragment] = [*before[-VERSIONS_KEPT + 1 :], newest]
            facts: Facts = {"atoll.fragment": int(fragment), "atoll.version": version}
            above = "merge round" if self.traced.get(fragment) == version else ""
            batch.spans.append(Span(self._trace(fragment, version), "publish", "", above, self.at, self.at, facts))

    def _refuse(self, effect: Mapping[str, Any], batch: Batch, _every_s: float) -> None:
        contribution = effect["contribution"]
        held = self.held.get(contribution["payload"])
        if held is None:
            return
        facts: Facts = {
            "atoll.island": held.island,
            "atoll.fragment": held.fragment,
            "atoll.refusal": effect["reason"],
        }
        trace = f"{self.tape}/{contribution['payload']}"
        problem = f"{effect['reason']}: {effect['detail']}"
        batch.spans.append(
            Span(trace, "contribution", held.island, "", held.offered_at, self.at, facts, problem=problem)
        )

    def _release(self, effect: Mapping[str, Any], _batch: Batch, _every_s: float) -> None:
        self.held.pop(effect["payload"], None)

    def _quarantine(self, effect: Mapping[str, Any], batch: Batch, _every_s: float) -> None:
        text = f"Island {effect['island']} was quarantined: {effect['detail']}"
        self._note(batch, "island_quarantined", text, effect["island"])

    def _finish(self, effect: Mapping[str, Any], batch: Batch, _every_s: float) -> None:
        self.outcome = batch.outcome = effect["outcome"]
        version = {"global_version": float(sum(self.versions.values()))}
        is_new = not any("global_version" in row.values for row in batch.rows)  # a series has one value at an instant
        self._add_row(batch, self._losses(*sorted(self.islands)) | (version if is_new else {}))
        self._note(batch, "job_ended", f"The job {effect['outcome']}: {effect['reason']}")

    # ── helpers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _island(self, message: Mapping[str, Any]) -> SeenIsland:
        name, incarnation = str(message["island"]), int(message["incarnation"])
        island = self.islands.setdefault(name, SeenIsland(incarnation=incarnation))
        if island.incarnation < incarnation:
            self.tokens_before += island.tokens
            self.islands[name] = island = SeenIsland(incarnation=incarnation)
        return island

    def _add_row(self, batch: Batch, values: Mapping[str, float | None]) -> None:
        present = {name: value for name, value in values.items() if value is not None}
        if present:
            self.row_count += 1
            batch.rows.append(Row(self.row_count, self.tokens, self.at, present))

    def _note(self, batch: Batch, kind: NoticeKind, text: str, island: str = "") -> None:
        batch.notices.append(Notice(f"{self.tape}-{self.n}-{kind}", kind, self.at, text, island))

    def _trace(self, fragment: str, version: int) -> str:
        return f"{self.tape}/{fragment}:{version}"


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


_Reader = Callable[[Story, Mapping[str, Any], Batch, float], None]
_READERS: Mapping[str, _Reader] = {
    "ProgressReported": Story._progress,
    "EvaluationCompleted": Story._evaluated,
    "ContributionArrived": Story._arrived,
    "MergeCompleted": Story._merged,
    "FragmentAdopted": Story._adopted,
    "ConnectionLost": Story._lost,
    "IslandCaughtUp": Story._returned,
    "ConnectionRestored": Story._returned,
    "JobStarted": Story._started,
    "SynchroniserRestarted": Story._restarted,
    "JobResumed": Story._resumed,
    "JobSalvaged": Story._salvaged,
    "CheckpointFailed": Story._checkpoint_failed,
}
_DECISIONS: Mapping[str, _Reader] = {
    "MergeFragment": Story._order,
    "PublishFragment": Story._publish,
    "RefuseContribution": Story._refuse,
    "ReleasePayload": Story._release,
    "QuarantineIsland": Story._quarantine,
    "FinishJob": Story._finish,
}


# ── who takes it ──────────────────────────────────────────────────────────────────────────────────────────────────

Mark = dict[str, Any]
"""What a sink wants to know again at its next delivery for this run, such as the id that the tracker gave it."""


class TrackerUnavailable(InfrastructureError):
    """A tracker does not answer, or refuses what it is sent, and may take it later."""


class Sink(Protocol):
    """A tracker. ``deliver`` raises TrackerUnavailable for anything that may work later."""

    def deliver(self, run: Run, batch: Batch, mark: Mark, in_doubt: bool) -> Mark | None:
        """Hand over a batch, and return the next mark once it is durable; None while it, and those before, are not.

        An empty mark is that of a new run. ``in_doubt``: parts of the batch may have been delivered before.
        """
        ...

    def close(self) -> None: ...
