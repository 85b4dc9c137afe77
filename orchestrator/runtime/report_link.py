"""The connection to one incarnation of an island: its report link and its parameter link, over one impaired link.

The report link carries reports in and commands out, and notices whether the island answers:

    poll      one long poll after another; a failing answer reports a death within milliseconds
              of an incarnation that is over and was silent: the final reports, once it answers again
    relay     reports in their order → events; an offer becomes one once the parameter link holds its bytes, or is known to
              need none. A report is acknowledged, so that the island may forget it, once its event is durable on the tape
    command   one command after another, each until it is answered. Otherwise a start that is made again could overtake a
              drain that was decided after it, and cancel it

Each is a thread of its own, so an island that hangs delays no other. An island that answers the parameter link is not
silent: payloads that fill its line delay the answers to polls. The link does not decide what silence means: it posts
"lost" with what it knows (``dead``, ``cut_off``), and "restored" when an answer comes. It sees no payload.

Source: Ray 2.60 as measured: pending calls to a killed actor fail in 10 ms with ActorDiedError; calls
to a stopped or cut-off one hang, so every get has a timeout and keeps waiting on the *same* call, whose answer still comes.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Concatenate, ParamSpec

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from orchestrator.actors import ActorHandle, IslandInterface
from orchestrator.channel.endpoint import Membership
from orchestrator.core import events, messages
from orchestrator.core.events import event_of
from orchestrator.core.messages import EventReport, contribution_of
from orchestrator.core.vocabulary import Epoch, Life, RefusalReason
from orchestrator.errors import Fenced, first_line, in_words
from orchestrator.host.job_context import JobContext, Undated
from orchestrator.parameters.shard import Unusable
from orchestrator.runtime import cluster
from orchestrator.runtime.parameter_link import ImpairedLink, ParameterLink, Request
from orchestrator.runtime.published import ShardAway
from orchestrator.runtime.shard_worker import ShardWorker
from orchestrator.system.ports import Reach, reach

log = logging.getLogger(__name__)
POLL_S = 0.5
SILENCE_S = 2.5
"""Beyond a poll's own length: a node busy compiling answers within this, a stopped process does not."""
LAST_ANSWERS = 2
"""Poll answers to read of a process that was replaced. The first may be an old one, in flight while the line was cut."""
RETRY_S = 0.2
COMMAND_TIMEOUT_S = 10.0
COMMAND_ATTEMPTS = 5
COMMAND_RETRY_S = 0.5
OFFERS_AHEAD = 2
"""Offers that are asked for before their turn. More small ones, which come in the answers, would fill a slow line before
reports and answers, and most would be replaced by the time that they are needed."""
LOOK_AHEAD = 16
"""Reports among which such offers are looked for: thousands may wait after a cut."""
Facts = ParamSpec("Facts")


@dataclass(slots=True)
class Received:
    """A report by its number; 0 for an offer that waited for its shard. ``request``: of an offer that was asked for."""

    number: int
    report: messages.IslandReport
    request: Request | None = None


class Connection:
    """Open from its creation to ``close``. ``lost``: the process did not answer the synchroniser before this one.

    ``ranks`` are its processes, one but for an island of many hosts, each with what it gets to take part in the job's
    channel. Reports and commands are rank 0's.
    """

    def __init__(
        self,
        life: Life,
        ranks: Sequence[tuple[ActorHandle[IslandInterface], Membership]],
        context: JobContext,
        shard: ShardWorker,
        *,
        lost: bool = False,
    ) -> None:
        self.actor = ranks[0][0]
        self.subjects = tuple(membership.subject for _, membership in ranks)
        self._closed = threading.Event()
        self.link = ImpairedLink(self._closed)
        self.line = context.lines.of(life[0])
        island, incarnation = life
        self.parameters = ParameterLink(
            f"{island}.{incarnation}", ranks, context, self.link, self._closed, shard, self.line
        )
        self.reports = ReportLink(life, self.actor, context, self.link, self.parameters, shard, lost=lost)

    def close(self) -> None:
        """Read nothing more of this incarnation. Returns at once."""
        self._closed.set()
        self.reports.close()
        self.parameters.close()


class ReportLink:
    """Works until ``link`` is closed; ``close`` then wakes the thread that relays.

    ``lost``: the process did not answer the synchroniser before this one.
    """

    def __init__(
        self,
        life: Life,
        actor: ActorHandle[IslandInterface],
        context: JobContext,
        link: ImpairedLink,
        parameters: ParameterLink,
        shard: ShardWorker,
        *,
        lost: bool,
    ) -> None:
        (self._island, self._incarnation), self._actor = life, actor
        self._epoch, self._post, self._failed = context.epoch, context.post, context.failed
        self._link, self._closed, self._parameters, self._shard = link, link.closed, parameters, shard
        self._durable_count, self.silent = context.durable_count, lost
        self._address: tuple[str, int] | None = None
        self._over = threading.Event()
        self._inbox: queue.SimpleQueue[Received | str | None] = queue.SimpleQueue()
        self._ahead = threading.Semaphore(OFFERS_AHEAD)
        self._losses: tuple[float, ...] = ()
        """The first that this synchroniser heard of this incarnation, and the last."""
        self._lr = context.spec.training.inner_optimizer.lr
        self._staleness_max = context.spec.synchroniser.staleness_max
        self._recorded: deque[tuple[int, int]] = deque()
        """The record that each report became, and its number: the relay adds at one end, the poll takes at the other."""
        self._commands: queue.SimpleQueue[Callable[[], ray.ObjectRef[None]] | None] = queue.SimpleQueue()
        for work in (self._poll, self._relay, self._command):
            name = f"{self._island}.{self._incarnation}.{work.__name__}"
            threading.Thread(target=context.guarded, args=(work,), name=name, daemon=True).start()

    def command(
        self,
        method: Callable[Concatenate[IslandInterface, Epoch, Facts], None],
        *facts: Facts.args,
        **named: Facts.kwargs,
    ) -> None:
        """Queue a call of the island behind the earlier ones. A call that gets lost is made again. Returns at once."""
        self._commands.put(partial(self._actor.call, method, self._epoch, *facts, **named))

    def read_final_reports(self) -> None:
        """The incarnation is over: nothing but its final reports is wanted. Returns at once."""
        self._over.set()

    def close(self) -> None:
        self._inbox.put(None)
        self._commands.put(None)

    # ── command ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _command(self) -> None:
        while (call := self._commands.get()) is not None:
            self._call_until_answered(call)

    def _call_until_answered(self, call: Callable[[], ray.ObjectRef[None]]) -> None:
        for _ in range(COMMAND_ATTEMPTS):
            if not self._link.wait_until_open() or self._over.is_set():
                return
            try:
                ray.get(call(), timeout=COMMAND_TIMEOUT_S)
                return
            except ActorDiedError:
                return  # the poll notices it, too
            except (RayError, TimeoutError) as error:
                log.warning("%s.%s did not answer a command: %s", self._island, self._incarnation, first_line(error))
                time.sleep(COMMAND_RETRY_S)

    # ── poll ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _poll(self) -> None:
        read, acknowledged, answers_of_over = 0, 0, 0
        final: list[tuple[int, messages.IslandReport]] = []
        self._address = cluster.address_of(self._actor)
        while not self._closed.is_set():
            while self._recorded and self._recorded[0][0] <= self._durable_count():
                _, acknowledged = self._recorded.popleft()
            poll = self._actor.call(IslandInterface.reports, self._epoch, read, acknowledged, POLL_S)
            heard_at = time.monotonic()
            try:
                while True:
                    try:
                        reports = self._link.get(poll, heard_at + POLL_S + SILENCE_S - time.monotonic())
                        break
                    except TimeoutError:
                        if self._closed.is_set():
                            return
                        if self._parameters.answered_at > heard_at:  # it is there, and payloads fill its line
                            heard_at = self._parameters.answered_at
                            continue
                        heard_at = time.monotonic()
                        self._post_silence(f"no answer for {POLL_S + SILENCE_S:.1f} s")
                        # where a line was cut after the question and before its answer, this side has nothing under way
                        # by which it could notice, and would wait for minutes after the line is whole again
                        self._actor.call(IslandInterface.hello)
            except ActorDiedError as error:
                self._parameters.abandon()  # a thread that relays must not wait for its bytes
                self._post_progress(report for _, report in final)
                self._inbox.put(_death_of(error))  # behind the reports that were read: they were true before
                return
            except RayError as error:
                if isinstance(error, RayTaskError) and isinstance(error.cause, Fenced):
                    self._failed(error.cause)
                    return
                self._post_silence(in_words(error))
                self._closed.wait(RETRY_S)
                continue
            if self._over.is_set():
                final = [*final, *(item for item in reports if item[0] > read)]
                read, answers_of_over = max([read, *(number for number, _ in reports)]), answers_of_over + 1
                if answers_of_over < LAST_ANSWERS:
                    continue
                self._post_progress(report for _, report in final)
                # that it is back ends it
                self._post(lambda at: events.ConnectionRestored(at, self._island, self._incarnation))
                return
            if self.silent:
                self.silent = False
                self._post(lambda at: events.ConnectionRestored(at, self._island, self._incarnation))
            for number, report in reports:
                if number <= read:
                    continue
                read, received = number, Received(number, report)
                if isinstance(report, messages.Offer):
                    self._parameters.note(report)
                    self._ask_ahead(received)
                self._inbox.put(received)

    def _post_silence(self, reason: str) -> None:
        """Once, until it answers again."""
        if not self.silent:
            self.silent = True
            cut_off = self._address is not None and reach(*self._address) is Reach.NOTHING
            why = f"{reason}; its node cannot be reached" if cut_off else reason
            self._post(lambda at: events.ConnectionLost(at, self._island, self._incarnation, False, why, cut_off))

    def _post_death(self, reason: str) -> None:
        self._post(lambda at: events.ConnectionLost(at, self._island, self._incarnation, True, reason))

    def _post_progress(self, reports: Iterable[messages.IslandReport]) -> None:
        """Post what the island trained while it was silent, which counts as lost."""
        for report in reports:
            if isinstance(report, messages.Progress):
                self._post(self._event_of(report))

    def _event_of(self, report: EventReport) -> Undated:
        return lambda at: event_of(report, at, self._island, self._incarnation)

    # ── relay ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _relay(self) -> None:
        waiting: deque[Received | str | None] = deque()
        while not self._closed.is_set():
            while not waiting or not self._inbox.empty():
                waiting.append(self._inbox.get())
            for later in islice(waiting, LOOK_AHEAD):
                if isinstance(later, Received) and not self._ask_ahead(later):
                    break
            item = waiting.popleft()
            if item is None:
                return
            if isinstance(item, str):
                self._post_death(item)
                return
            number, report = item.number, item.report
            if isinstance(report, messages.Offer):
                record = self._relay_offer(report, item.request)
                if item.request is not None:
                    self._ahead.release()
            else:
                if isinstance(report, messages.Progress):
                    self._losses = (*self._losses[:1], report.loss)
                record = self._post(self._event_of(report))
            if number:  # an offer that waited for its shard was acknowledged when it came first
                self._recorded.append((record, number))

    def _ask_ahead(self, received: Received) -> bool:
        """Ask for an offer before its turn, if it is one. Return whether others may be asked for, too."""
        if not isinstance(received.report, messages.Offer) or received.request is not None:
            return True
        if self._is_outdated(received.report):
            return True
        if self._link.slow() or not self._ahead.acquire(blocking=False):
            return False
        received.request = self._parameters.request(received.report)
        return True

    def _is_outdated(self, offer: messages.Offer) -> bool:
        """Return whether the core refuses it, whatever else it finds.

        It is as far behind for the core as here, or further: only versions that the core has are published, and a fragment's
        version never falls in a synchroniser's life. A rollback, and a shard that lost a version, make a newer one.
        """
        return self._parameters.versions_behind(offer) > self._staleness_max

    def _relay_offer(self, offer: messages.Offer, request: Request | None) -> int:
        """Have the offer's bytes held and say so; an offer that was replaced, or died with its island, is no event.

        One that is refused anyway, because its fragment has moved on, is an event without its bytes, unless an answer had
        them. Where a line is full, pulling them would keep the island as late as it is, with all its offers.
        """
        contribution = contribution_of(offer, self._island, self._incarnation)
        if self._is_outdated(offer) and (request is None or self._parameters.withdraw(offer, request)):
            if self._parameters.is_replaced(offer):
                return 0  # of many that wait after a cut, one is enough to be refused
            return self._post(lambda at: events.ContributionArrived(at, contribution))
        try:
            fetched = self._parameters.fetch(
                offer, contribution.payload, self._parameters.request(offer) if request is None else request
            )
        except ShardAway:  # offers for other shards do not wait for it
            self._shard.when_back(offer.fragment, lambda: self._inbox.put(Received(0, offer)))
            return 0
        if fetched is None:
            return 0
        if isinstance(fetched, Unusable):
            reason, detail = fetched.reason, fetched.detail
            if reason is RefusalReason.NON_FINITE:
                detail = diverged_in_words(detail, offer.step, self._losses, self._lr)
            return self._post(lambda at: events.ContributionUnusable(at, contribution, reason, detail))
        displacement = fetched.update_norm
        return self._post(lambda at: events.ContributionArrived(at, contribution, displacement))


def diverged_in_words(detail: str, step: int, losses: Sequence[float], lr: float) -> str:
    """Return the sentence about values that may not enter a merge: when, how the loss went, and the most frequent cause."""
    course = f"when its loss was {losses[-1]:.3g}, after {losses[0]:.3g} at first, " if losses else ""
    return f"{detail}; that was at step {step:,}, {course}with training.inner_optimizer.lr {lr:g}"


def _death_of(error: ActorDiedError) -> str:
    return f"its process is gone: {first_line(error)}"
