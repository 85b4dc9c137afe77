"""One simulated island process: the replica that live islands have, without the mathematics.

``orchestrator.replica`` decides what is adopted, offered and reported; the simulated process adds who it is, what a step
trains, and how its reports are put together. It knows no clock and no chance: the world tells it when a step ends and how
long it took, and at which instants it stands at a boundary.

A simulated process and the link to it: in which order reports arrive, and what a frozen or cut-off island does.

Reports are carried one by one, in order, as ``runtime``'s links do: an offer's bytes are pulled before the next report is
read. While the island is frozen or cut off nothing is carried either way; what was sent waits. Bytes that were not pulled
die with the process.

The inner steps of simulated islands: how long each takes, on how many tokens, and which islands stand still.

Responsible for what the plan says of speed: step times (recorded, sampled, or a mean with jitter), pauses between steps,
and capacities that change over time. Refuses to know what a step does; ``world`` asks, and schedules.

Protocols through which a part of the simulated world uses the rest: the world imports its parts, and none of them it.

A part names in a protocol of its own what it needs beyond these. ``World`` is all of them, as is one whose synchroniser
dies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, Protocol, TypeVar

from orchestrator.core.effects import Evaluate
from orchestrator.core.events import Event
from orchestrator.core.messages import IslandReport, Offer, Progress
from orchestrator.core.vocabulary import (
    NO_ANCHOR,
    Duration,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    JobPolicy,
    MergedOffer,
    ScheduleAnchor,
    Version,
)
from orchestrator.errors import InternalError
from orchestrator.replica.replica import (
    Action,
    BoundaryPlan,
    Continuation,
    CutState,
    Position,
    Publication,
    Replica,
    ReplicaPolicy,
    reports_of,
)
from orchestrator.replica.work import AdoptionRule, Odometer
from orchestrator.simulation.impairment import LinkImpairment
from orchestrator.simulation.plan import IncarnationStart, Latency, Pace, WorldPlan


class BoundaryObserver(Protocol):
    """Whoever checks what an island does at its boundaries."""

    def arrived(self, publication: Publication) -> None:
        """It is adopted at the next boundary, unless a newer one of its fragment comes before."""

    def carried_out(self, actions: Sequence[Action]) -> None: ...


class SimulatedIsland:
    """The process of one incarnation. ``diverged``: its parameters are no numbers; ``exploded``: far from everybody's.

    It holds Θ at version 0 from the beginning, so that what is published while it catches up has something to be newer than.
    """

    def __init__(
        self,
        island: IslandId,
        incarnation: Incarnation,
        policy: JobPolicy,
        tokens_per_step: int,
        adoption: AdoptionRule,
        *,
        median_over: int = 1,
    ) -> None:
        self.island = island
        self.incarnation = incarnation
        self.tokens_per_step = tokens_per_step
        self.stepping = False
        self.diverged = self.exploded = False
        self.replica = Replica(
            ReplicaPolicy(
                fragment_count=policy.fragment_count,
                interval_steps=policy.sync_interval_steps,
                adoption=adoption,
                tokens_per_schedule_step=len(policy.islands) * tokens_per_step,
                snapshots_max=None,  # they have no bytes here
                exact=False,
                offers_counted="by fragment",
            )
        )
        self.replica.hold((Version(0),) * policy.fragment_count, 0)
        self._odometer = Odometer(median_over)
        self._cuts: list[Callable[[Position], None]] = []
        self.observer: BoundaryObserver | None = None

    def load(self, versions: tuple[Version, ...], step: int) -> None:
        """Take over a state: its versions and logical clock."""
        self.replica.hold(versions, step)

    def deliver(
        self,
        fragment: FragmentId,
        version: Version,
        step: int,
        merged_offer: MergedOffer,
        fix: ScheduleAnchor = NO_ANCHOR,
    ) -> None:
        """A published version has arrived; the newest is adopted at the next boundary."""
        publication = Publication(fragment, version, step, merged_offer, fix)
        if self.replica.publication_arrived(publication) and self.observer is not None:
            self.observer.arrived(publication)

    def cut(self, take: Callable[[Position], None]) -> None:
        """``take`` gets what the replica is at the next boundary, before anything is adopted there."""
        self._cuts.append(take)

    def end_step(self, seconds: Duration, gap: Duration) -> list[IslandReport]:
        """A step ended, and the process is at a boundary. Progress is told before anything that depends on it."""
        replica = self.replica
        replica.step_taken(self.tokens_per_step)
        self._odometer.count(seconds, gap)
        if replica.flushing:
            return self.flush()
        if replica.draining:
            return self.hand_over()
        reports = self._carry_out(replica.boundary(cut=bool(self._cuts)))
        return [self.progress(), *reports] if reports else []

    def flush(self) -> list[IslandReport]:
        """Step no more, and offer what is left; progress is told first, however often this is asked for."""
        progress = self.progress()
        return [progress, *self._carry_out(self.replica.flush_boundary(cut=bool(self._cuts)))]

    def hand_over(self) -> list[IslandReport]:
        """Step no more, and offer what is left; when versions hold all work, say so and be done with it."""
        progress = self.progress()
        return [progress, *self._carry_out(self.replica.drain_boundary(cut=bool(self._cuts)))]

    def progress(self) -> Progress:
        replica = self.replica
        self._odometer.loss = 1.5 + 4.0 / (1.0 + replica.step / 60.0)
        return self._odometer.report(replica.step, replica.steps_total, replica.tokens_total)

    def holds(self, offer: Offer) -> bool:
        """Whether the bytes of this offer can still be pulled: a newer offer of the fragment replaces it."""
        return self.replica.fragments[offer.fragment].latest_offer == offer.offer

    def standing_offers(self) -> list[Offer]:
        """The latest offer of each fragment, but for those that an adopted version contains as far as is known here."""
        versions = self.replica.versions
        return [offer for offer in self.replica.standing_offers() if offer.base_version == versions[offer.fragment]]

    def _carry_out(self, plan: BoundaryPlan) -> list[IslandReport]:
        self.stepping = plan.continuation is Continuation.STEP
        if not plan.actions:
            return []
        if isinstance(plan.actions[0], CutState):
            cuts, self._cuts = self._cuts, []
            for take in cuts:
                take(plan.actions[0].position)
        if self.observer is not None:
            self.observer.carried_out(plan.actions)
        return reports_of(plan.actions)


class StateChunk(NamedTuple):
    """A fragment of the state that a donor gave, and the logical step of that donor."""

    donor: IslandId
    version: Version
    step: int


@dataclass(slots=True)
class Host:
    """``impairment`` is its link's, but for cuts, which hold calls back as a freeze does: ``cut_until`` and ``frozen_until``
    lie in the past while all is well, and ``waiting`` are calls held back by either.

    ``began_at`` is when the present step began, ``step_s`` what it takes, ``owed`` the time in it that the island stood
    still and has yet to make up for, ``held_at`` when it would have ended, if the island stood still then (``stepping``).
    ``hung_until``: its step does not end before that.
    ``chunks`` are the fragments that its donors gave so far, ``evaluation`` is what it is to measure at a boundary.
    """

    process: SimulatedIsland
    alive: bool = True
    placed: bool = False
    suspected: bool = False
    carrying: bool = False
    frozen_until: Instant = 0.0
    cut_until: Instant = 0.0
    hung_until: Instant = 0.0
    last_step_end: Instant = 0.0
    began_at: Instant = 0.0
    step_s: Duration = 0.0
    held_at: Instant | None = None
    owed: Duration = 0.0
    reported_at: Instant = 0.0
    impairment: LinkImpairment = field(default_factory=LinkImpairment)
    evaluation: Evaluate | None = None
    chunks: dict[FragmentId, StateChunk] = field(default_factory=dict)
    outbox: deque[IslandReport] = field(default_factory=deque)
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def silent(self, now: Instant) -> bool:
        return now < self.frozen_until or now < self.cut_until

    def post(self, reports: list[IslandReport]) -> None:
        self.outbox.extend(reports)


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


class Clock(Protocol):
    """The virtual time, and what is to happen in it."""

    now: Instant

    def later(self, seconds: float, thunk: Callable[[], None]) -> None: ...

    def while_alive(self, seconds: float, thunk: Callable[[], None]) -> None:
        """As ``later``, for what the synchroniser's own process does or hears."""


class Odds(Protocol):
    """What the plan says, and what it leaves to chance."""

    plan: WorldPlan

    def draw(self, latency: Latency) -> float: ...

    def chance(self, probability: float) -> bool: ...

    def life(self, host: Host) -> IncarnationStart: ...


class Listener(Protocol):
    """The synchroniser's ear."""

    def tell(self, event: Event) -> None: ...

    def unless_over(self, event: Event) -> None:
        """Tell it while the job is not finished."""


class Processes(Protocol):
    """The islands' processes, and calls into them."""

    hosts: dict[tuple[IslandId, Incarnation], Host]

    def latest(self, island: IslandId) -> Host | None: ...

    def addressed(self, host: Host, call: Callable[[], None]) -> Callable[[], None]:
        """A call as the synchroniser that lives now makes it; it may arrive later."""

    def reach(self, host: Host, call: Callable[[], None]) -> None: ...

    def die(self, host: Host, reason: str, *, announced: bool) -> None: ...
