"""One simulated island process: the replica that live islands have, without the mathematics.

``orchestrator.replica`` decides what is adopted, offered and reported; the simulated process adds who it is, what a step
trains, and how its reports are put together. It knows no clock and no chance: the world tells it when a step ends and how
long it took, and at which instants it stands at a boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from orchestrator.core.messages import IslandReport, Offer, Progress
from orchestrator.core.vocabulary import (
    NO_ANCHOR,
    Duration,
    FragmentId,
    Incarnation,
    IslandId,
    JobPolicy,
    ScheduleAnchor,
    Version,
)
from orchestrator.replica.odometer import Odometer
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
from orchestrator.replica.work import AdoptionRule


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
        self, fragment: FragmentId, version: Version, step: int, merged_offer: int, fix: ScheduleAnchor = NO_ANCHOR
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
