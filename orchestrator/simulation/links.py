"""The simulated links between islands and synchroniser: reports, payloads and deliveries, with their faults.

Payloads are corrupted, reports duplicated or reordered, and donors fail, each with the probability in the plan. Reordering
delays one report so that later ones overtake it. A live link never does that, but the core must tolerate it.

As live, an offer is not pulled that is refused for its age, because newer versions of its fragment were published to the
island (``runtime.report_link``). It travels as other reports do, and arrives without a displacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, assert_never

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.events import event_of
from orchestrator.core.faults import Delay, Drop
from orchestrator.core.messages import CatchUpFailure, CaughtUp, IslandReport, LeftState, Offer, Ready, contribution_of
from orchestrator.core.vocabulary import (
    Duration,
    FragmentId,
    Incarnation,
    IslandId,
    JobPolicy,
    Life,
    MergedOffer,
    RefusalReason,
    Version,
)
from orchestrator.errors import InternalError
from orchestrator.simulation.island import (
    Clock,
    Host,
    Listener,
    Odds,
    Processes,
    SimulatedIsland,
    StateChunk,
    Stepping,
    life_of,
)

OVERTAKEN_S = (0.05, 0.5)
EXPLOSION = 1e6
"""How many times further away than usual an exploded island is."""


class LinksWorld(Clock, Odds, Listener, Processes, Protocol):
    """The two ends of the links."""

    policy: JobPolicy
    stepping: Stepping

    def delivered(self, host: Host, effect: f.PublishFragment) -> None:
        """Note that a published version has arrived in the island's mailbox."""

    def left_by(self, host: Host) -> LeftState | None:
        """Return the state that an earlier incarnation of this island left on its machine, if it did."""


@dataclass(frozen=True, slots=True)
class Flight:
    """A report on its way from the island that wrote it.

    ``under_way``: an offer whose bytes are in flight, which a newer one does not stop. ``outdated``: one without its bytes.
    """

    report: IslandReport
    writer: IslandId
    under_way: bool = False
    outdated: bool = False


class Links:
    """The links of one world."""

    def __init__(self, world: LinksWorld) -> None:
        self._world = world
        self._newest_versions: dict[tuple[Life, FragmentId], Version] = {}
        """The newest version of each fragment that was published to an incarnation, whether it has come or not."""

    def carry(self, host: Host) -> None:
        """Send the next report, if there is one and nothing is in flight."""
        world = self._world
        if host.carrying or not host.outbox or not host.alive or host.silent(world.now):
            return
        report = host.outbox.popleft()
        host.carrying = True
        flight = Flight(report, host.process.island, outdated=self._is_outdated(host, report))
        pulled = isinstance(report, Offer) and not flight.outdated
        takes = world.draw(world.plan.pull_s if pulled else world.plan.letter_s)
        if isinstance(report, Offer) and pulled and host.process.holds(report):  # a replaced offer is not pulled
            carriage = world.stepping.carriage(host.process.island)
            carriage += host.impairment.transfer_delay_s(world.plan.payload_bytes, world.now)
            flight = replace(flight, under_way=carriage > 0.0)
            takes += carriage
        world.while_alive(takes, partial(self._arrive, host, flight))

    def begin_anew(self, life: Life) -> None:
        """Forget what another synchroniser published to this incarnation, as its successor's new link to it does."""
        self._newest_versions = {key: version for key, version in self._newest_versions.items() if key[0] != life}

    def _is_outdated(self, host: Host, report: IslandReport) -> bool:
        """Return whether it is an offer that is refused for its age, by what was published to its island."""
        if not isinstance(report, Offer):
            return False
        newest = self._newest_versions.get((life_of(host), report.fragment), Version(0))
        return newest - report.base_version > self._world.policy.staleness_max

    def say(self, event: e.Event, seconds: float) -> None:
        """Tell the core an event about an island after ``seconds``, stamped with that instant."""
        world = self._world
        world.while_alive(seconds, lambda: world.tell(replace(event, at=world.now)))

    def publish(self, host: Host, effect: f.PublishFragment, merged_offer: MergedOffer, *, lost: bool = False) -> None:
        """Send a version to the island's mailbox, where it does not arrive if it is ``lost``."""
        world = self._world
        self._newest_versions[life_of(host), effect.fragment] = effect.version
        if lost:
            return
        takes = world.draw(world.plan.delivery_s) + world.stepping.carriage(host.process.island)
        takes += host.impairment.transfer_delay_s(world.plan.payload_bytes, world.now)
        call = world.addressed(host, partial(self._deliver, host, effect, merged_offer))
        world.later(takes, lambda: world.reach(host, call))

    def _deliver(self, host: Host, effect: f.PublishFragment, merged_offer: MergedOffer) -> None:
        host.process.deliver(effect.fragment, effect.version, effect.step, merged_offer, effect.fix)
        self._world.delivered(host, effect)

    def make_ready(self, host: Host) -> None:
        world = self._world
        life = world.life(host)
        seconds = world.draw(world.plan.start_s) if life.start_s is None else life.start_s
        world.later(seconds, lambda: self._post(host, Ready(1, seconds, world.left_by(host))))

    def catch_up(self, effect: f.BeginCatchUp, outer: list[tuple[Version, int]]) -> None:
        """Transfer a state to an island. The state that it gets is the one at the end of the transfer."""
        world = self._world
        host = world.hosts[effect.island, effect.incarnation]
        life = world.life(host)
        source = effect.source
        seconds = world.draw(world.plan.transfer_s) if life.transfer_s is None else life.transfer_s
        seconds = 0.0 if isinstance(source, f.FromStandby) else seconds
        fails = world.chance(world.plan.catch_up_failure)

        def moved() -> None:
            match source:
                case f.FromStandby():
                    host.process.replica.promote()
                    self._load(host, CaughtUp(None, host.process.replica.versions, host.process.replica.step, 0.0))
                case f.FromSynchroniser():
                    versions = tuple(version for version, _ in outer)
                    self._load(host, CaughtUp(None, versions, max(step for _, step in outer), seconds))
                case f.FromPeers(donor):
                    if (process := self._giving(host, donor, fails)) is not None:
                        self._load(host, CaughtUp(donor[0], process.replica.versions, process.replica.step, seconds))
                case f.FromLeft(incarnation):
                    self._continue(host, incarnation, outer, seconds)
                case f.FromCheckpoint():
                    raise InternalError(
                        detail=f"{effect.island} is to resume from a checkpoint, which simulated jobs do not support."
                    )
                case _:
                    assert_never(source)

        if isinstance(source, f.FromPeers) and world.policy.donors_max > 1:
            self._fetch_chunks(host, (source.donor, *source.helpers), life.transfer_s)
        else:
            world.later(seconds, world.addressed(host, moved))

    def _fetch_chunks(
        self, host: Host, donors: Sequence[tuple[IslandId, Incarnation]], transfer_s: Duration | None
    ) -> None:
        """Divide the missing fragments among the donors. Each gives its share when its own transfer ends."""
        world, count = self._world, self._world.policy.fragment_count
        missing = [p for p in map(FragmentId, range(count)) if p not in host.chunks]
        began = world.now

        def give_chunk(donor: tuple[IslandId, Incarnation], share: Sequence[FragmentId], fails: bool) -> None:
            if len(host.chunks) == count or (process := self._giving(host, donor, fails)) is None:
                return
            for p in share:
                host.chunks.setdefault(p, StateChunk(donor[0], process.replica.versions[p], process.replica.step))
            if len(host.chunks) == count:
                chunks = [host.chunks[FragmentId(p)] for p in range(count)]
                lead = max(chunks, key=lambda chunk: chunk.step)
                versions, sources = tuple(chunk.version for chunk in chunks), tuple(chunk.donor for chunk in chunks)
                self._load(host, CaughtUp(lead.donor, versions, lead.step, world.now - began, sources))

        for index, donor in enumerate(donors):
            fails = world.chance(world.plan.catch_up_failure)
            takes = world.draw(world.plan.transfer_s) / len(donors) if transfer_s is None else transfer_s
            world.later(takes, world.addressed(host, partial(give_chunk, donor, missing[index :: len(donors)], fails)))

    def _giving(self, host: Host, donor: tuple[IslandId, Incarnation], fails: bool) -> SimulatedIsland | None:
        """Return the donor's process, or report a failed catch-up and return None if it has no state to give."""
        giver = self._world.hosts[donor]
        process = giver.process
        if fails or not giver.alive or giver.silent(self._world.now) or not process.stepping or process.diverged:
            self._post(host, CatchUpFailure(donor[0], "the donor went away, or its state is no use"))
            return None
        host.process.exploded |= process.exploded
        return process

    def _continue(
        self, host: Host, incarnation: Incarnation, outer: list[tuple[Version, int]], seconds: Duration
    ) -> None:
        """Load the state that an earlier incarnation left, and Θ for the fragments that it has moved past."""
        left = self._world.left_by(host)
        if left is None or left.incarnation != incarnation:
            self._post(host, CatchUpFailure(host.process.island, "the file is gone"))
            return
        if host.process.stepping or host.process.replica.flushing:
            return
        versions = tuple(version for version, _ in outer)
        former = self._world.hosts[host.process.island, incarnation].process
        position = former.replica.position
        lost = host.process.replica.hold_saved(position, versions)
        kept_tokens = tuple(0 if p in lost else tokens for p, tokens in enumerate(left.kept_tokens))
        host.process.exploded |= former.exploded
        report = CaughtUp(
            host.process.island, versions, position.step, seconds, left=replace(left, kept_tokens=kept_tokens)
        )
        self._post(host, report)

    def _load(self, host: Host, report: CaughtUp) -> None:
        if host.process.stepping or host.process.replica.flushing:
            return  # a repeated request, after a silence: it already trains on the state that came first
        host.process.load(report.versions, report.step)
        self._post(host, report)

    def _post(self, host: Host, report: IslandReport) -> None:
        if host.alive:
            host.post([report])
            self.carry(host)

    def _arrive(self, host: Host, flight: Flight) -> None:
        """End the flight of a report, unless the island died, fell silent or got another name meanwhile."""
        world, report = self._world, flight.report
        host.carrying = False
        if not host.alive:
            return
        if host.process.island != flight.writer:
            self.carry(host)
            return
        if host.silent(world.now):
            host.outbox.appendleft(report)
            return
        if not isinstance(report, Offer):
            self._tell(host, report)
        elif flight.outdated:
            if host.process.holds(report):
                self._tell(host, report, pulled=False)
        elif flight.under_way or host.process.holds(report):
            fault = host.impairment.payload_fault() if world.now < world.plan.calm_at else None
            if isinstance(fault, Delay):
                host.carrying = True  # no report overtakes it
                world.while_alive(fault.duration_s, lambda: self._come_late(host, report))
                return
            if not isinstance(fault, Drop):
                self._take(host, report, self._refusal(host, spoilt=fault is not None))
        self.carry(host)

    def _come_late(self, host: Host, offer: Offer) -> None:
        """Receive an offer that was delayed. Its bytes were pulled before, so they survive the island."""
        host.carrying = False
        if host.alive:
            self._take(host, offer, None)
            self.carry(host)

    def _refusal(self, host: Host, *, spoilt: bool) -> tuple[RefusalReason, str] | None:
        """Return what is wrong with the bytes of an offer, if anything."""
        if not spoilt and host.process.diverged:
            return RefusalReason.NON_FINITE, "a value is not finite"
        if spoilt or self._world.chance(self._world.plan.corrupt):
            return RefusalReason.CORRUPT, "the checksum does not fit"
        return None

    def _take(self, host: Host, offer: Offer, wrong: tuple[RefusalReason, str] | None) -> None:
        world = self._world
        if wrong is None:
            self._tell(host, offer)
            return
        offered = contribution_of(offer, host.process.island, host.process.incarnation)
        self.hear(host, e.ContributionUnusable(world.now, offered, *wrong), 0.0)

    def _tell(self, host: Host, report: IslandReport, *, pulled: bool = True) -> None:
        world = self._world
        island, incarnation = host.process.island, host.process.incarnation
        event: e.Event
        if isinstance(report, Offer):
            far = report.step_count * (EXPLOSION if host.process.exploded else 1.0)
            contribution = contribution_of(report, island, incarnation)
            event = e.ContributionArrived(world.now, contribution, far if pulled else None)
        else:
            event = event_of(report, world.now, island, incarnation)
        if world.chance(world.plan.duplicate):
            self.say(event, world.draw(OVERTAKEN_S))
        self.hear(host, event, world.draw(OVERTAKEN_S) if world.chance(world.plan.reorder) else 0.0)

    def hear(self, host: Host, event: e.Event, seconds: float) -> None:
        """Tell the core an event now, or after ``seconds``, when later reports may have overtaken it."""
        if seconds > 0.0:
            self.say(event, seconds)
        else:
            self._world.tell(event)
