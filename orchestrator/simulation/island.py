"""The islands of a simulated world: their processes, their hosts, the duration of their steps, and the world they need.

    SimulatedIsland    the process of one incarnation: the replica of live islands, without the mathematics.
                       ``orchestrator.replica`` decides what it adopts, offers and reports
    Host               the process and the link to it: what waits while it is frozen or cut off
    Stepping           how long each step takes and on how many tokens, as the plan says: recorded, sampled, or a mean
                       with jitter; pauses between steps; capacity that changes over time
    Clock … Processes  protocols through which a part of the simulated world uses the rest, so that the world imports its
                       parts and they do not import it. ``World`` implements all of them, as does a world whose
                       synchroniser dies (``tests/swarm``)

Nothing here schedules anything or draws chance on its own: ``world`` says when a step ends and how long it took.
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
from orchestrator.core.faults import LinkImpairment
from orchestrator.core.messages import IslandReport, LeftState, Offer, Progress
from orchestrator.core.vocabulary import (
    NO_ANCHOR,
    Duration,
    FragmentId,
    Incarnation,
    Instant,
    IslandId,
    JobPolicy,
    Life,
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
from orchestrator.simulation.plan import IncarnationStart, Latency, Pace, WorldPlan


class BoundaryObserver(Protocol):
    """A checker of what an island does at its boundaries."""

    def arrived(self, publication: Publication) -> None:
        """A publication has arrived. It is due at the next boundary, unless a newer one of its fragment replaces it."""

    def carried_out(self, actions: Sequence[Action]) -> None: ...


class SimulatedIsland:
    """The process of one incarnation. ``diverged``: its parameters are not finite. ``exploded``: they are far off.

    It holds Θ at version 0 from the start, so that anything published while it catches up is newer than what it holds.
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
                schedule=policy.schedule,
                adoption=adoption,
                tokens_per_schedule_step=len(policy.islands) * tokens_per_step,
                snapshots_max=None,  # snapshots have no bytes here
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
        """Receive a published version. The newest is adopted at the next boundary."""
        publication = Publication(fragment, version, step, merged_offer, fix)
        if self.replica.publication_arrived(publication) and self.observer is not None:
            self.observer.arrived(publication)

    def cut(self, take: Callable[[Position], None]) -> None:
        """Call ``take`` with the replica's position at the next boundary, before anything is adopted there."""
        self._cuts.append(take)

    def end_step(self, seconds: Duration, gap: Duration) -> list[IslandReport]:
        """End a step, which brings the process to a boundary. Progress is reported before anything that depends on it."""
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
        """Stop stepping and offer what is left. Progress is reported first, also on a repeated call."""
        progress = self.progress()
        return [progress, *self._carry_out(self.replica.flush_boundary(cut=bool(self._cuts)))]

    def hand_over(self) -> list[IslandReport]:
        """Stop stepping and offer what is left. Once versions contain all work, report that the island is drained."""
        progress = self.progress()
        return [progress, *self._carry_out(self.replica.drain_boundary(cut=bool(self._cuts)))]

    def progress(self) -> Progress:
        replica = self.replica
        self._odometer.loss = 1.5 + 4.0 / (1.0 + replica.step / 60.0)
        return self._odometer.report(replica.step, replica.steps_total, replica.tokens_total)

    def left(self) -> LeftState:
        """Return what it leaves in a file of its machine as it ends."""
        at = self.replica.position
        stepping_s = self._odometer.stepping_seconds
        return LeftState(
            self.incarnation, at.versions, at.step, at.steps_total, at.tokens_total, stepping_s, at.token_counts
        )

    def holds(self, offer: Offer) -> bool:
        """Return whether the bytes of this offer can still be pulled. A newer offer of the fragment replaces them."""
        return self.replica.fragments[offer.fragment].latest_offer == offer.offer

    def standing_offers(self) -> list[Offer]:
        """Return the latest offer of each fragment, except those that an adopted version is known to contain."""
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
    """A fragment of the state that a donor gave, with the donor's logical step."""

    donor: IslandId
    version: Version
    step: int


@dataclass(slots=True)
class Host:
    """A simulated process and the link to it.

    Reports travel one by one and in order, as over the links of ``runtime``: the bytes of an offer, if they are wanted, are
    pulled before the next report is read. While the island is frozen or cut off, nothing travels either way and everything
    sent waits. Bytes that were not pulled are lost with the process.
    """

    process: SimulatedIsland
    alive: bool = True
    placed: bool = False
    suspected: bool = False
    carrying: bool = False
    """A report is in flight."""
    frozen_until: Instant = 0.0
    cut_until: Instant = 0.0
    """Both in the past while all is well. A cut holds calls back as a freeze does."""
    hung_until: Instant = 0.0
    """The present step does not end before this."""
    last_step_end: Instant = 0.0
    began_at: Instant = 0.0
    step_s: Duration = 0.0
    """Start and duration of the present step."""
    held_at: Instant | None = None
    """When the present step would have ended, if the island stood still then."""
    owed: Duration = 0.0
    """The time in the present step during which the island stood still, by which it ends later."""
    reported_at: Instant = 0.0
    impairment: LinkImpairment = field(default_factory=LinkImpairment)
    """The link's impairment, except cuts."""
    evaluation: Evaluate | None = None
    """What the island is to measure at a boundary."""
    chunks: dict[FragmentId, StateChunk] = field(default_factory=dict)
    """The fragments of the state that donors have given so far."""
    outbox: deque[IslandReport] = field(default_factory=deque)
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Calls held back by a freeze or a cut."""

    def silent(self, now: Instant) -> bool:
        """Return whether nothing gets through to the process."""
        return now < self.frozen_until or now < self.cut_until

    def post(self, reports: list[IslandReport]) -> None:
        self.outbox.extend(reports)


def life_of(host: Host) -> Life:
    return (host.process.island, host.process.incarnation)


Value = TypeVar("Value")


class Stepping:
    """The speeds and capacities of all islands of one world."""

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
        """Return the duration of the step that begins now."""
        samples = self._samples[island]
        if (pace := self._pace(island, now)) is not None:
            usual = pace.step_s
        elif samples:
            return self._random.choice(samples)
        else:
            usual = self._step_s[island]
        return usual * (1.0 + self._plan.step_jitter_ratio * self._random.uniform(-1.0, 1.0))

    def pause(self, island: IslandId, now: Instant) -> Duration:
        """Return how long the island pauses between two steps."""
        pace = self._pace(island, now)
        return self._pause_s[island] if pace is None else pace.pause_s

    def carriage(self, island: IslandId) -> Duration:
        """Return the transfer time of one fragment's bytes, from or to the island. It is 0 for a standby."""
        return self._carriage_s.get(island, 0.0)

    # ── capacity ──────────────────────────────────────────────────────────────────────────────────────────────────

    def still(self, island: IslandId) -> bool:
        return island in self._still_since

    def change(self, host: Host | None, island: IslandId, ratio: float, now: Instant) -> Duration | None:
        """Set the island's capacity to ``ratio`` from now on.

        Returns the rest of the step that was held (``Host.held_at``), after which it ends, or None if no step was held.
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
        left, host.held_at = (
            min(host.owed - (now - host.held_at), host.step_s),
            None,
        )  # if it was frozen too, count once
        host.owed = 0.0
        return left

    def held(self, host: Host, now: Instant) -> Duration | None:
        """Return how much longer the step lasts that would end now: 0 if it ends, None if only ``change`` can tell."""
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
    """Return the values by island, or ``default`` for all if the plan has none."""
    if not values:
        return dict.fromkeys(islands, default)
    if len(values) != len(islands):
        raise InternalError(detail=f"A plan gives {len(values)} values for {len(islands)} islands.")
    return dict(zip(islands, values, strict=True))


class Clock(Protocol):
    """Virtual time, and the things that will happen in it."""

    now: Instant

    def later(self, seconds: float, thunk: Callable[[], None]) -> None: ...

    def while_alive(self, seconds: float, thunk: Callable[[], None]) -> None:
        """Schedule like ``later``, but only if the synchroniser's process that schedules it still lives then."""


class Odds(Protocol):
    """The plan, and the random draws that it asks for."""

    plan: WorldPlan

    def draw(self, latency: Latency) -> float: ...

    def chance(self, probability: float) -> bool: ...

    def life(self, host: Host) -> IncarnationStart: ...


class Listener(Protocol):
    """The synchroniser, which receives events."""

    def tell(self, event: Event) -> None: ...

    def unless_over(self, event: Event) -> None:
        """Tell the event unless the job is finished."""


class Processes(Protocol):
    """The islands' processes, and calls into them."""

    hosts: dict[tuple[IslandId, Incarnation], Host]

    def latest(self, island: IslandId) -> Host | None: ...

    def addressed(self, host: Host, call: Callable[[], None]) -> Callable[[], None]:
        """Bind a call to the synchroniser that lives now. The call may arrive later."""

    def reach(self, host: Host, call: Callable[[], None]) -> None: ...

    def die(self, host: Host, reason: str, *, announced: bool) -> None: ...
