"""The synchroniser's link to one incarnation of an island: letters and payloads in, published fragments out.

    poll      one long poll after another; an answer that fails is how a death is known, within milliseconds
              of one that is over and was silent, the last words: what it trained meanwhile, once it can be heard again
    relay     letters in their order → events; an offer's bytes are pulled and examined before its event exists; a letter
              is acknowledged, so that the island need not keep it, once its event is kept on the tape
    deliver   newest version of each fragment; at most one batch is under way, so a silent island costs no memory

Each is a thread of its own, so an island that hangs holds up nobody else. Refuses to decide what silence means: it says
"lost" with what it knows (``dead``, ``cut_off``), and "restored" when an answer comes. Chaos is in its ``passage``.

Source: Ray 2.60 as measured: pending calls to a killed actor fail in 10 ms with ActorDiedError; calls
to a stopped or cut-off one hang, so every get has a timeout and keeps waiting on the *same* call, whose answer still comes.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from orchestrator.core import events, messages
from orchestrator.core.hearing import contribution_of, event_of
from orchestrator.core.vocabulary import Epoch, Fix, FragmentId, Incarnation, Instant, IslandId, Version
from orchestrator.errors import Fenced, first_line
from orchestrator.merge.examination import examine
from orchestrator.merge.wire import WireError
from orchestrator.runtime import cluster
from orchestrator.runtime.passage import Passage
from orchestrator.runtime.payloads import Arrays, PayloadTable

log = logging.getLogger(__name__)

POLL_S = 0.5
SILENCE_S = 2.5
"""Beyond a poll's own length: a node busy compiling answers within this, a stopped process does not."""
LAST_ANSWERS = 2
"""Of one that is over: the first may have been given long ago, and been under way ever since."""
PULL_SLICE_S = 5.0
RETRY_S = 0.2
MARKER_TIMEOUT_S = 10.0
"""What waits behind it has a way that does not work, either."""
PARAMETER_BYTES = 4
"""Of a publication, which is float32 whatever the uplink."""

Post = Callable[[Callable[[Instant], events.Event]], int]
"""Stamps and queues an event; answers with the number that its record will have on the tape."""
Outgoing = tuple[Version, int, int, Fix, Any]
"""Version, step, merged offer, fix, and the bytes or a reference to them."""
Failed = Callable[[BaseException], None]
Anchor = Callable[[FragmentId], Arrays]


class Link:
    """Open from its making to ``close``.

    ``post`` stamps and queues an event, ``anchor`` is Θ of a fragment, ``kept_count`` is the number of the last record that
    is kept, ``failed`` hears of our own bugs, and of Fenced when the island listens to a newer synchroniser. ``lost``: it
    did not answer the one before.
    """

    def __init__(
        self,
        island: IslandId,
        incarnation: Incarnation,
        actor: Any,
        epoch: Epoch,
        payloads: PayloadTable,
        post: Post,
        kept_count: Callable[[], int],
        anchor: Anchor,
        failed: Failed,
        *,
        lost: bool = False,
    ) -> None:
        self._island, self._incarnation, self.actor, self._epoch = island, incarnation, actor, epoch
        self._payloads, self._post, self._kept_count, self._anchor = payloads, post, kept_count, anchor
        self._failed, self.silent = failed, lost
        self._address: tuple[str, int] | None = None
        self._over = threading.Event()
        self._closed = threading.Event()
        self.passage = Passage(self._closed)
        self._inbox: queue.SimpleQueue[tuple[int, messages.Letter, Any] | str | None] = queue.SimpleQueue()
        self._told: deque[tuple[int, int]] = deque()
        """Letters by number, with the record that each became: the relay adds at one end, the poll takes at the other."""
        self._outgoing: dict[FragmentId, Outgoing] = {}
        self._marker: tuple[int, str] | None = None
        self._outgoing_changed = threading.Condition()
        for work in (self._poll, self._relay, self._deliver):
            name = f"{island}.{incarnation}.{work.__name__}"
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True).start()

    def publish(self, fragment: FragmentId, outgoing: Outgoing) -> None:
        """Send this version on when the batch before it has arrived."""
        with self._outgoing_changed:
            self._outgoing[fragment] = outgoing
            self._outgoing_changed.notify()

    def hear_out(self) -> None:
        """The incarnation is over: nothing but its last words is wanted. Returns at once."""
        self._over.set()

    def mark(self, checkpoint: int, folder: str) -> None:
        """Send a checkpoint's marker, behind all that was published before and ahead of all that is published after."""
        with self._outgoing_changed:
            self._marker = (checkpoint, folder)
            self._outgoing_changed.notify()

    def close(self) -> None:
        """Hear nothing more of this incarnation. Returns at once."""
        self._closed.set()
        self._inbox.put(None)
        with self._outgoing_changed:
            self._outgoing_changed.notify()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # a bug of ours; a thread that ended in silence would be an island nobody hears
            self._failed(error)

    # ── poll ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _poll(self) -> None:
        read, acknowledged, answers_of_over = 0, 0, 0
        last_words: list[tuple[int, messages.Letter]] = []
        self._address = cluster.address_of(self.actor)
        while not self._closed.is_set():
            while self._told and self._told[0][0] <= self._kept_count():
                _, acknowledged = self._told.popleft()
            asked = self.actor.letters.remote(self._epoch, read, acknowledged, POLL_S)
            try:
                while True:
                    try:
                        letters = self.passage.get(asked, POLL_S + SILENCE_S)
                        break
                    except TimeoutError:
                        if self._closed.is_set():
                            return
                        self._say_silent(f"no answer for {POLL_S + SILENCE_S:.1f} s")
                        # where a line was cut after the question and before its answer, this side has nothing under way
                        # by which it could notice, and would wait for minutes after the line is whole again
                        self.actor.hello.remote()
            except ActorDiedError as error:
                self._inbox.put(_death_of(error))  # behind the letters that were read: they were true before
                return
            except RayError as error:
                if isinstance(error, RayTaskError) and isinstance(error.cause, Fenced):
                    self._failed(error.cause)
                    return
                self._say_silent(f"{type(error).__name__}: {first_line(error)}")
                self._closed.wait(RETRY_S)
                continue
            if self._over.is_set():
                last_words = [*last_words, *(item for item in letters if item[0] > read)]
                read, answers_of_over = max([read, *(number for number, _ in letters)]), answers_of_over + 1
                if answers_of_over < LAST_ANSWERS:
                    continue
                self._give_last_words(letter for _, letter in last_words)
                return
            if self.silent:
                self.silent = False
                self._post(lambda at: events.ConnectionRestored(at, self._island, self._incarnation))
            for number, letter in letters:
                if number <= read:
                    continue
                read = number
                pulled = None
                # where it is slow, offers wait: bytes asked for now would pile up here, and most are replaced by then
                if isinstance(letter, messages.Offer) and not self.passage.slow():
                    pulled = self.actor.take_payload.remote(letter.fragment, letter.offer)
                self._inbox.put((number, letter, pulled))

    def _say_silent(self, reason: str) -> None:
        """Once, until it is heard again."""
        if not self.silent:
            self.silent = True
            cut_off = self._address is not None and cluster.reach(*self._address) is cluster.Reach.NOTHING
            why = f"{reason}; its node cannot be reached" if cut_off else reason
            self._post(lambda at: events.ConnectionLost(at, self._island, self._incarnation, False, why, cut_off))

    def _say_dead(self, reason: str) -> None:
        self._post(lambda at: events.ConnectionLost(at, self._island, self._incarnation, True, reason))

    def _give_last_words(self, letters: Iterable[messages.Letter]) -> None:
        """What it trained while nobody heard it counts, as lost; that it is back is said behind that, for it is its end."""
        for letter in letters:
            if isinstance(letter, messages.Progress):
                self._post(lambda at, letter=letter: event_of(letter, at, self._island, self._incarnation))
        self._post(lambda at: events.ConnectionRestored(at, self._island, self._incarnation))

    # ── relay ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _relay(self) -> None:
        while (item := self._inbox.get()) is not None and not self._closed.is_set():
            if isinstance(item, str):
                self._say_dead(item)
                return
            number, letter, pulled = item
            if isinstance(letter, messages.Offer):
                record = self._take(letter, pulled)
            else:
                record = self._post(lambda at, letter=letter: event_of(letter, at, self._island, self._incarnation))
            self._told.append((record, number))

    def _take(self, offer: messages.Offer, pulled: Any) -> int:
        """Hold the offer's bytes and say so; an offer that was replaced meanwhile, or died with its island, is no event."""
        if pulled is None:
            pulled = self.actor.take_payload.remote(offer.fragment, offer.offer)
        payload = self.passage.bring(self._pull(offer, pulled))
        if payload is None or self._closed.is_set():
            return 0
        contribution = contribution_of(offer, self._island, self._incarnation)
        try:
            arrays, displacement = examine(payload, self._anchor(offer.fragment))
        except WireError as error:
            reason, detail = error.reason, error.detail
            return self._post(lambda at: events.ContributionUnusable(at, contribution, reason, detail))
        self._payloads.hold(contribution.payload, arrays)
        return self._post(lambda at: events.ContributionArrived(at, contribution, displacement))

    def _pull(self, offer: messages.Offer, pulled: Any) -> bytes | None:
        while not self._closed.is_set():
            try:
                payload: bytes | None = self.passage.get(pulled, PULL_SLICE_S)
                return payload
            except TimeoutError:
                continue  # the same call: a stopped island answers it when it goes on
            except ActorDiedError:
                return None  # the poll says so, too
            except RayTaskError as error:  # its own code failed, and would again: the letters behind must be heard
                log.error("%s.%s: offer %d is skipped: %s", self._island, self._incarnation, offer.offer, error)
                return None
            except RayError:
                self._closed.wait(RETRY_S)
                pulled = self.actor.take_payload.remote(offer.fragment, offer.offer)
        return None

    # ── deliver ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _deliver(self) -> None:
        while True:
            with self._outgoing_changed:
                self._outgoing_changed.wait_for(lambda: self._outgoing or self._marker or self._closed.is_set())
                batch, self._outgoing = self._outgoing, {}
                marker, self._marker = self._marker, None
            if marker is not None:
                self._carry_marker(*marker)
            self.passage.carry(
                PARAMETER_BYTES * sum(a.size for fragment in batch for a in self._anchor(fragment).values())
            )
            if not self.passage.open():
                return
            calls = {
                self.actor.deliver.remote(self._epoch, fragment, *rest): (fragment, rest)
                for fragment, rest in sorted(batch.items(), key=lambda item: item[0])
            }
            self._await(calls)

    def _carry_marker(self, checkpoint: int, folder: str) -> None:
        """Until the island has it, or the checkpoint would not wait for it any more; nothing newer overtakes it."""
        while self.passage.open():
            try:
                self.passage.get(self.actor.save.remote(self._epoch, checkpoint, folder), MARKER_TIMEOUT_S)
                return
            except ActorDiedError:
                return  # the poll says so, too
            except RayTaskError as error:
                log.error("%s.%s: a marker is not taken: %s", self._island, self._incarnation, error)
                return
            except (RayError, TimeoutError) as error:
                log.warning("%s.%s: a marker did not arrive: %s", self._island, self._incarnation, error)
                self._closed.wait(RETRY_S)

    def _await(self, calls: dict[Any, tuple[FragmentId, Outgoing]]) -> None:
        """Until all have arrived. What was lost is sent again, unless something newer waits, until the link is closed."""
        waiting = list(calls)
        while waiting and not self._closed.is_set():
            done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S)
            for call in done:
                try:
                    self.passage.get(call, POLL_S)
                except RayTaskError as error:  # its own code failed, and would again: the next version may do better
                    log.error("%s.%s: a fragment is not taken: %s", self._island, self._incarnation, error)
                except (RayError, TimeoutError) as error:
                    log.warning("%s.%s: a fragment did not arrive: %s", self._island, self._incarnation, error)
                    fragment, rest = calls[call]
                    with self._outgoing_changed:
                        self._outgoing.setdefault(fragment, rest)
                    self._closed.wait(RETRY_S)


def _death_of(error: ActorDiedError) -> str:
    return f"its process is gone: {first_line(error)}"
