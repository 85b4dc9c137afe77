"""The island's own loop: inner steps back to back, and at each boundary between two what the protocol wants.

                    ┌──────────── a boundary ────────────┐
    … inner step ──▶ adopt mail ▸ offer what is due ▸ export ──▶ inner step …

At a boundary published fragments are adopted first, then fragments that have come due are offered: an offer made on a
base that is about to be replaced would only be refused. An offer starts a copy and leaves a letter; the bytes are
fetched by other threads while steps go on. The loop waits for nobody. It knows the trainer by its contract only, and
nothing of Ray or JAX: calls come in from any thread, letters go out through the outbox. What adoption does to a fragment
is ``adoption``'s business.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from learners.adoption import FragmentWork, Rule, Sent, combine
from learners.checkpointing import Cut, cut_of
from learners.contract import Arrays, Snapshot, Trainer
from learners.exports import Exports
from learners.gathering import Fragments
from learners.holder import Holder
from learners.mailbox import Mail
from learners.odometer import Odometer
from learners.outbox import Outbox
from learners.reckoning import schedule_step
from orchestrator.core import schedule
from orchestrator.core.messages import ALL_OFFERS, Adopted, Broken, Drained, Flushed, Offer
from orchestrator.core.vocabulary import NO_FIX, Fix, FragmentId, Version
from orchestrator.errors import InternalError

DRAINING_POLL_S = 0.1
"""How soon an island that drains, and waits for mail, notices anything else."""


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """``fragments[p]`` names the tensors of fragment p; ``interval_steps`` is H; ``mix_alpha`` α weighs one's own.

    ``tokens_per_schedule_step`` are those of an inner step of all islands together.
    """

    fragments: tuple[tuple[str, ...], ...]
    interval_steps: int
    adoption: Rule = "replace"
    mix_alpha: float = 0.5
    report_every_s: float = 0.5
    tokens_per_schedule_step: int = field(kw_only=True)


class IslandLoop(Holder):
    """One incarnation's training. ``load`` or ``load_peer`` once, then ``start``; all else at any time, any thread."""

    def __init__(self, trainer: Trainer, plan: LoopPlan, outbox: Outbox) -> None:
        super().__init__(trainer, plan.fragments, keeps_bases=plan.adoption == "rebase")
        self._plan, self._outbox = plan, outbox
        self._lock = threading.Lock()
        self._stopping, self._flushing, self._draining, self._gave_all = (threading.Event() for _ in range(4))
        self._standing: dict[FragmentId, tuple[Offer, Snapshot]] = {}  # under the lock: other threads take from it
        self._exports: Exports[Fragments, tuple[Snapshot, tuple[Version, ...], int]] = Exports()
        self._cuts: Exports[None, Cut] = Exports()
        self._offers_made = 0
        self._fix = NO_FIX
        self._odometer = Odometer(monotonic())

    # ── asked by other threads ────────────────────────────────────────────────────────────────────────────────────

    def start(self, fix: Fix = NO_FIX) -> None:
        """Train until flushed, drained or stopped. Asked again, it calls a drain off, or changes nothing."""
        self._draining.clear()
        self._begin(fix)

    def drain(self) -> None:
        """Finish the step and step no more; offer all work, again what a version lacks, then say ``Drained``."""
        self._draining.set()
        self._begin()

    def _begin(self, fix: Fix = NO_FIX) -> None:
        with self._lock:
            if self._thread is None:
                if not self._fragments:
                    raise InternalError(detail="an island was started before it held a state.")
                self._fix = fix
                self._exports.open()
                self._cuts.open()
                self._thread = threading.Thread(target=self._run, name="island-loop", daemon=True)
                self._thread.start()

    def flush(self) -> None:
        """Finish the step, offer all work not yet offered, say ``Flushed`` (whenever asked) and step no more. Returns."""
        self._flushing.set()
        if not self._fragments or self._gave_all.is_set():
            self._outbox.put(Flushed())
        else:
            self._begin()

    def stop(self) -> None:
        """End after the present step, offering nothing; returns when the loop has ended. Offers stay takeable."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def deliver(
        self,
        fragment: FragmentId,
        version: Version,
        step: int,
        arrays: Arrays,
        merged_offer: int = 0,
        fix: Fix = NO_FIX,
    ) -> None:
        """Put a published value into the mailbox (see ``Mail``); it is adopted at the next boundary unless it is no news."""
        self._mailbox.put(Mail(fragment, version, step, arrays, merged_offer, fix))

    def take(self, fragment: FragmentId, offer: int) -> Arrays | None:
        """The offer's arrays, once they are on the host; ``None`` if a newer offer replaced it, or it was merged."""
        with self._lock:
            standing = self._standing.get(fragment)
        return standing[1].arrays() if standing is not None and standing[0].offer == offer else None

    def standing_offers(self) -> list[Offer]:
        """The latest offer of each fragment, but for those whose work is in a version that was adopted."""
        with self._lock:
            return [offer for offer, _ in self._standing.values()]

    def export_state(self, timeout_s: float, fragments: Fragments = None) -> dict[str, Any]:
        """What a peer needs to begin from here: ``{"trainer": arrays, "versions": (…), "step": int}``.

        With ``fragments`` only the arrays of these; versions are always all.
        Taken at one boundary, so it is consistent; the copy to the host happens in the calling thread.
        Raises InfrastructureError when this island does not train, or reaches no boundary in time.
        """
        snapshot, versions, step = self._exports.ask(fragments, timeout_s)
        return {"trainer": snapshot.arrays(), "versions": versions, "step": step}

    def request_cut(self) -> Future[Cut]:
        """The state at the next boundary, before what is delivered from now on is adopted; raises as ``export_state``."""
        return self._cuts.request(None)

    # ── the loop's own thread ─────────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._flushing.is_set():
                    self.give_all()
                    break
                if not self._draining.is_set():
                    self.advance()
                elif self.hand_over():
                    self._outbox.put(Drained())
                    break
                else:
                    self._mailbox.wait(DRAINING_POLL_S)
        except Exception as error:  # whatever failed, the service must hear of it: this thread has nobody to raise to
            logging.getLogger(__name__).exception("the island's loop failed")
            self._outbox.put(Broken(traceback.format_exception_only(error)[-1].strip()))
        finally:
            self._exports.close()
            self._cuts.close()

    def advance(self) -> None:
        """One boundary and the inner step after it, in the calling thread."""
        self.adopt_mail()
        self.offer_due()
        self._exports.answer(self._state)
        self.train()

    def give_all(self) -> None:
        """The last boundary: adopt, offer all work not yet offered, and say ``Flushed``."""
        self.adopt_mail()
        self._offer_all(range(len(self._fragments)))
        self._report()
        self._gave_all.set()
        self._outbox.put(Flushed())

    def hand_over(self) -> bool:
        """A boundary that no step follows: adopt, and offer what no offer covers. Whether versions hold all work."""
        self.adopt_mail()
        self._offer_all(range(len(self._fragments)))
        self._exports.answer(self._state)
        return all(fragment.token_count == 0 for fragment in self._fragments)

    def adopt_mail(self) -> None:
        """Take over what was published and has arrived."""
        arrived = self._mailbox.take_all()
        # looked at only now: a marker that came before any of this mail is seen before it is adopted
        self._cuts.answer(
            lambda _: cut_of(self._trainer, self._odometer, self._fragments, self._step, self._asked_step)
        )
        for mail in arrived:
            self._adopt(mail)

    def offer_due(self) -> None:
        """Offer the fragments whose due point the logical clock has passed."""
        due = schedule.due(self._asked_step, self._step, len(self._fragments), self._plan.interval_steps)
        self._asked_step = self._step
        self._offer_all(due)

    def train(self) -> None:
        """One inner step, measured and counted."""
        began = monotonic()
        result = self._trainer.step(schedule_step(self._fix, self._step, self._plan.tokens_per_schedule_step))
        ended = monotonic()
        self._step += 1
        for fragment in self._fragments:
            fragment.step_count += 1
            fragment.token_count += result.token_count
        self._odometer.count(began, ended, result.token_count, result.loss)
        if ended - self._odometer.read_at >= self._plan.report_every_s:
            self._report()

    def _offer_all(self, fragments: Sequence[int]) -> None:
        """Offer those of these fragments that hold work which no offer covers."""
        for number in fragments:
            fragment = self._fragments[number]
            if fragment.unsent_tokens == 0:
                continue
            self._report()
            self._offers_made += 1
            snapshot = self._trainer.snapshot(self._plan.fragments[number])
            sent = Sent(self._offers_made, snapshot, fragment.step_count, fragment.token_count)
            fragment.remember(sent, self._plan.adoption)
            offer = Offer(
                fragment=FragmentId(number),
                offer=self._offers_made,
                step=self._step,
                base_version=fragment.version,
                step_count=fragment.step_count,
                token_count=fragment.token_count,
                tokens_total=self._odometer.tokens_total,
            )
            with self._lock:
                self._standing[offer.fragment] = (offer, snapshot)
            self._outbox.put(offer)

    def _adopt(self, mail: Mail) -> None:
        before = self._fragments[mail.fragment]
        if mail.version <= before.version:
            return
        rule = self._plan.adoption
        after = FragmentWork(mail.version, base=mail.arrays, offers_before=self._offers_made)
        since = None if mail.merged_offer == ALL_OFFERS else before.kept_since(mail.merged_offer, rule)
        if since is None:
            self._trainer.load(mail.arrays)
        else:
            own = self._trainer.snapshot(mail.arrays).arrays()
            self._trainer.load(combine(mail.arrays, own, since.snapshot.arrays(), rule, self._plan.mix_alpha))
            after.step_count = before.step_count - since.step_count
            after.token_count = before.token_count - since.token_count
        self._fragments[mail.fragment] = after
        with self._lock:
            if (standing := self._standing.get(mail.fragment)) and standing[0].offer <= mail.merged_offer:
                del self._standing[mail.fragment]
        self._step = max(self._step, mail.step)
        self._fix = max(self._fix, mail.fix)
        self._report()
        total = self._odometer.tokens_total
        self._outbox.put(Adopted(mail.fragment, mail.version, self._step, total, after.token_count, self._fix))

    def _state(self, fragments: Fragments) -> tuple[Snapshot, tuple[Version, ...], int]:
        tensors = None if fragments is None else [name for p in fragments for name in self._names[p]]
        return self._trainer.export_state(tensors), tuple(f.version for f in self._fragments), self._step

    def _report(self) -> None:
        """Say how far training is, unless that was said already."""
        progress = self._odometer.read(self._step, monotonic())
        if progress is not None:
            self._outbox.put(progress)
