"""Links that break when the synchroniser dies, and islands that keep their reports until these are acknowledged.

They work like ``runtime.report_link`` and ``learners.outbox``, with the same ``replica.outbox``: reports are read in
order and acknowledged once their records are durable. A new synchroniser receives the unacknowledged ones again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol, cast

from orchestrator.core import events as e
from orchestrator.core.messages import IslandReport, Offer
from orchestrator.core.vocabulary import Epoch
from orchestrator.replica.outbox import NumberedReports
from orchestrator.simulation.island import Host, SimulatedIsland, life_of
from orchestrator.simulation.links import Flight, Links, LinksWorld


class UnreadReports:
    """Replaces the outbox of a host: the reports that this life of the synchroniser has not read yet.

    ``newest_epoch`` is the checker's own copy, separate from the one in ``reports``.
    """

    def __init__(self) -> None:
        self.reports = NumberedReports()
        self.connected = False
        self.newest_epoch = Epoch(0)
        self._read = self._acknowledged = 0
        self._records: dict[int, int] = {}
        self._overtaken: set[int] = set()

    def __bool__(self) -> bool:
        return self.connected and bool(self.reports.after(self._read))

    def extend(self, reports: Iterable[IslandReport]) -> None:
        self.reports.write(reports)

    def skip_replaced(self, process: SimulatedIsland) -> None:
        """Skip offers that newer ones have replaced: there is nothing to pull, and there may be many."""
        while reports := self.reports.after(self._read):
            number, report = reports[0]
            if not isinstance(report, Offer) or process.holds(report):
                return
            self._read = number

    def popleft(self) -> IslandReport:
        self._read, report = self.reports.after(self._read)[0]
        return report

    def appendleft(self, _: IslandReport) -> None:
        """Put a report back that was not delivered."""
        self._read -= 1

    def clear(self) -> None:
        """Drop the reports of a process that is gone."""
        self.reports = NumberedReports()
        self.connected = False

    def hang_up(self) -> None:
        """Forget the reader, which is gone."""
        self.connected = False
        self._read = self._acknowledged
        self._records.clear()
        self._overtaken.clear()

    # ── from reports to records ───────────────────────────────────────────────────────────────────────────────────

    def reading(self, *, overtaken: bool) -> int:
        """Return the number of the last report read. ``overtaken``: later ones will be delivered before it."""
        if overtaken:
            self._overtaken.add(self._read)
        return self._read

    def became(self, number: int, record: int) -> None:
        self._records[number] = record
        self._overtaken.discard(number)

    def acknowledge(self, durable_count: int, *, carrying: bool) -> None:
        """Let the island forget durable reports. A report that made no record need not be kept."""
        for number in range(self._acknowledged + 1, self._read + (0 if carrying else 1)):
            if number in self._overtaken or self._records.get(number, 0) > durable_count:
                break
            self._acknowledged = number
            self._records.pop(number, None)
        self.reports.forget(self._acknowledged)


def unread_reports_of(host: Host) -> UnreadReports:
    return cast(UnreadReports, host.outbox)


class MortalLinksWorld(LinksWorld, Protocol):
    """The parts of the world that links need. ``alive`` is the synchroniser's process, ``count`` its tape's last record,
    ``links`` those of the synchroniser that lives now."""

    alive: bool
    links: MortalLinks

    @property
    def count(self) -> int: ...

    def ours(self, thunk: Callable[[], None]) -> Callable[[], None]:
        """Return a ``thunk`` that does nothing once this life of the synchroniser has ended."""


class MortalLinks(Links):
    """The links of the synchroniser that lives now."""

    def __init__(self, world: MortalLinksWorld) -> None:
        super().__init__(world)
        self._mortal = world
        self.is_cut = False
        """Whether the synchroniser is cut off: it reads no more reports."""

    def carry(self, host: Host) -> None:
        if self.is_cut:  # what the island posted itself is its successor's
            if self._mortal.links is not self:
                self._mortal.links.carry(host)
            return
        if not host.carrying and unread_reports_of(host).connected:
            unread_reports_of(host).skip_replaced(host.process)
        super().carry(host)

    def hear(self, host: Host, event: e.Event, seconds: float) -> None:
        world, unread = self._mortal, unread_reports_of(host)
        number = unread.reading(overtaken=seconds > 0.0)

        def deliver() -> None:
            if self.is_cut:
                return
            world.tell(replace(event, at=world.now))
            if world.alive and not self.is_cut:
                unread.became(number, world.count)

        if seconds > 0.0:
            world.while_alive(seconds, deliver)
        else:
            deliver()

    def _arrive(self, host: Host, flight: Flight) -> None:
        if not self.is_cut:
            super()._arrive(host, flight)

    def _come_late(self, host: Host, offer: Offer) -> None:
        if not self.is_cut:
            super()._come_late(host, offer)

    def connect(self, host: Host, *, lost: bool) -> None:
        """Read this process's reports from the first unacknowledged one. ``lost``: it had not been heard of before."""
        world = self._mortal
        process = host.process
        self.begin_anew(life_of(host))
        host.suspected = lost
        if not host.alive:
            gone = e.ConnectionLost(0.0, process.island, process.incarnation, True, "its process is gone")
            self.say(gone, world.draw(world.plan.detect_s))
            return

        def answered() -> None:
            if self.is_cut:
                return
            unread_reports_of(host).connected = True
            if host.suspected:
                host.suspected = False
                world.tell(e.ConnectionRestored(world.now, process.island, process.incarnation))
            self.carry(host)

        def suspect() -> None:
            if host.alive and host.silent(world.now) and not host.suspected:
                host.suspected = True
                world.tell(e.ConnectionLost(world.now, process.island, process.incarnation, False, "no answer"))

        call = world.addressed(host, world.ours(answered))
        world.while_alive(world.draw(world.plan.letter_s), lambda: world.reach(host, call))
        world.while_alive(world.plan.silence_s, suspect)
