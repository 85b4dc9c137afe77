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
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np

from learners.adoption import FragmentWork, Rule, Sent, combine
from learners.checkpointing import Cut, Restored, cut_of
from learners.contract import Arrays, Snapshot, Trainer
from learners.exports import Exports, require_numbers
from learners.mailbox import Mail, Mailbox
from learners.odometer import Odometer
from learners.outbox import Outbox
from orchestrator.core import schedule
from orchestrator.core.messages import ALL_OFFERS, Adopted, Broken, Drained, Flushed, Offer
from orchestrator.core.vocabulary import FragmentId, Version
from orchestrator.errors import InternalError

DRAINING_POLL_S = 0.1
"""How soon an island that drains, and waits for mail, notices anything else."""


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """``fragments[p]`` names the tensors of fragment p; ``interval_steps`` is H; ``mix_alpha`` α weighs one's own."""

    fragments: tuple[tuple[str, ...], ...]
    interval_steps: int
    adoption: Rule = "replace"
    mix_alpha: float = 0.5
    report_every_s: float = 0.5


class IslandLoop:
    """One incarnation's training. ``load`` or ``load_peer`` once, then ``start``; all else at any time, any thread."""

    def __init__(self, trainer: Trainer, plan: LoopPlan, outbox: Outbox) -> None:
        self._trainer, self._plan, self._outbox = trainer, plan, outbox
        self._mailbox = Mailbox()
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping, self._flushing, self._draining, self._gave_all = (threading.Event() for _ in range(4))
        self._standing: dict[FragmentId, tuple[Offer, Snapshot]] = {}  # under the lock: other threads take from it
        self._exports: Exports[tuple[Snapshot, tuple[Version, ...], int]] = Exports()
        self._cuts: Exports[Cut] = Exports()
        self._fragments: list[FragmentWork] = []
        self._offers_made = 0
        self._step = self._asked_step = 0
        self._odometer = Odometer(monotonic())

    # ── asked by other threads ────────────────────────────────────────────────────────────────────────────────────

    def load(self, arrays: Mapping[str, np.ndarray], versions: Sequence[int], step: int, cursor: int) -> None:
        """Begin from the synchroniser's parameters, with a fresh inner optimizer."""
        with self._loading:
            self._refuse_unless_idle(versions)
            self._trainer.load(arrays)
            self._begin_from(versions, step, cursor, [{name: arrays[name] for name in p} for p in self._plan.fragments])

    def load_peer(self, state: Mapping[str, Any], cursor: int) -> None:
        """Begin from what a peer's ``export_state`` returned. Its uncontributed work is not ours to count, or to keep."""
        with self._loading:
            self._refuse_unless_idle(state["versions"])
            require_numbers(state["trainer"])
            self._trainer.import_state(state["trainer"])
            keeps = self._plan.adoption == "rebase"
            bases = [self._trainer.snapshot(names).arrays() if keeps else None for names in self._plan.fragments]
            self._begin_from(state["versions"], state["step"], cursor, bases)

    def load_saved(self, saved: Restored, cursor: int) -> None:
        """Begin where the checkpoint cut this island. Work that Θ has moved past is overwritten, the rest goes on."""
        with self._loading:
            self._refuse_unless_idle(saved.versions)
            require_numbers(saved.arrays)
            self._trainer.import_state(saved.arrays)
            self._begin_from(saved.versions, saved.part.step, cursor, saved.outer)
            self._asked_step = saved.part.asked_step
            for p, fragment in enumerate(self._fragments):
                if not saved.goes_on_with(p, fragment):
                    self._trainer.load(saved.outer[p])

    def start(self) -> None:
        """Train until flushed, drained or stopped. Asked again, it calls a drain off, or changes nothing."""
        self._draining.clear()
        self._begin()

    def drain(self) -> None:
        """Finish the step and step no more; offer all work, again what a version lacks, then say ``Drained``."""
        self._draining.set()
        self._begin()

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None:
                if not self._fragments:
                    raise InternalError(detail="an island was started before it held a state.")
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

    def deliver(self, fragment: FragmentId, version: Version, step: int, arrays: Arrays, merged_offer: int = 0) -> None:
        """Put a published value into the mailbox; it is adopted at the next boundary unless it is no news."""
        self._mailbox.put(Mail(fragment, version, step, arrays, merged_offer))

    def take(self, fragment: FragmentId, offer: int) -> Arrays | None:
        """The offer's arrays, once they are on the host; ``None`` if a newer offer replaced it, or it was merged."""
        with self._lock:
            standing = self._standing.get(fragment)
        return standing[1].arrays() if standing is not None and standing[0].offer == offer else None

    def standing_offers(self) -> list[Offer]:
        """The latest offer of each fragment, but for those whose work is in a version that was adopted."""
        with self._lock:
            return [offer for offer, _ in self._standing.values()]

    def export_state(self, timeout_s: float) -> dict[str, Any]:
        """What a peer needs to begin from here: ``{"trainer": arrays, "versions": (…), "step": int}``.

        Taken at one boundary, so it is consistent; the copy to the host happens in the calling thread.
        Raises InfrastructureError when this island does not train, or reaches no boundary in time.
        """
        snapshot, versions, step = self._exports.ask(timeout_s)
        return {"trainer": snapshot.arrays(), "versions": versions, "step": step}

    def request_cut(self) -> Future[Cut]:
        """The state at the next boundary, before what is delivered from now on is adopted; raises as ``export_state``."""
        return self._cuts.request()

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
        self._cuts.answer(lambda: cut_of(self._trainer, self._odometer, self._fragments, self._step, self._asked_step))
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
        result = self._trainer.step(self._step)
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
        self._report()
        total = self._odometer.tokens_total
        self._outbox.put(Adopted(mail.fragment, mail.version, self._step, total, after.token_count))

    def _state(self) -> tuple[Snapshot, tuple[Version, ...], int]:
        return self._trainer.export_state(), tuple(f.version for f in self._fragments), self._step

    def _report(self) -> None:
        """Say how far training is, unless that was said already."""
        progress = self._odometer.read(self._step, monotonic())
        if progress is not None:
            self._outbox.put(progress)

    def _refuse_unless_idle(self, versions: Sequence[int]) -> None:
        """Before anything is changed: a catch-up may be asked twice, and the second must not touch who trains already."""
        if self._fragments:
            raise InternalError(detail="an island was given a state while it has one: it keeps the first that came.")
        if len(versions) != len(self._plan.fragments):
            raise InternalError(detail=f"{len(versions)} versions came for {len(self._plan.fragments)} fragments.")

    def _begin_from(self, versions: Sequence[int], step: int, cursor: int, bases: Sequence[Arrays | None]) -> None:
        self._trainer.seek(cursor)
        self._fragments = [FragmentWork(Version(v), base) for v, base in zip(versions, bases, strict=True)]
        self._step = self._asked_step = step
