"""What an island holds between two steps, and the ways in which it comes by it: from Θ, a peer, a checkpoint, as a standby.

Responsible for a state being taken whole or not at all, and only by who has none, or has not trained on it. Refuses to know
when steps are taken and what is offered (``loop``).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from learners.adoption import FragmentWork
from learners.checkpointing import Restored
from learners.contract import Arrays, Trainer
from learners.exports import require_numbers
from learners.gathering import Gathered
from learners.mailbox import Mailbox
from orchestrator.core.vocabulary import Version
from orchestrator.errors import InternalError


class Holder:
    """``fragments[p]`` names the tensors of fragment p; with ``keeps_bases`` what a peer gave is remembered as the base."""

    def __init__(self, trainer: Trainer, fragments: Sequence[Sequence[str]], *, keeps_bases: bool) -> None:
        self._trainer, self._names, self._keeps_bases = trainer, fragments, keeps_bases
        self._mailbox = Mailbox()
        self._loading = threading.Lock()
        self._thread: threading.Thread | None = None
        self._fragments: list[FragmentWork] = []
        self._step = self._asked_step = 0

    @property
    def fragment_count(self) -> int:
        return len(self._names)

    def load(self, arrays: Mapping[str, np.ndarray], versions: Sequence[int], step: int, cursor: int) -> None:
        """Begin from the synchroniser's parameters, with a fresh inner optimizer."""
        with self._loading:
            self._refuse_unless_idle(versions)
            self._trainer.load(arrays)
            self._begin_from(versions, step, cursor, [{name: arrays[name] for name in p} for p in self._names])

    def load_peer(self, state: Gathered, cursor: int) -> None:
        """Begin from what peers gave. Their uncontributed work is not ours to count, or to keep."""
        with self._loading:
            self._refuse_unless_idle(state.versions)
            self._trainer.import_state(state.arrays)
            bases = [self._trainer.snapshot(n).arrays() if self._keeps_bases else None for n in self._names]
            self._begin_from(state.versions, state.step, cursor, bases)

    def take_over(self, shard_index: int, cursor: int) -> tuple[tuple[Version, ...], int]:
        """Begin from the state that was loaded and what was published since; tell its versions, and the logical step.

        Nothing was trained on it, so it is overwritten, and said to nobody. Asked again before ``start``, it tells the same.
        """
        with self._loading:
            if self._thread is not None or not self._fragments:
                raise InternalError(
                    detail="only an island that holds a state, and has not trained, takes a place over."
                )
            for mail in self._mailbox.take_all():
                if mail.version > self._fragments[mail.fragment].version:
                    self._trainer.load(mail.arrays)
                    self._fragments[mail.fragment] = FragmentWork(mail.version, base=mail.arrays)
                    self._step = max(self._step, mail.step)
            self._asked_step = self._step
            self._trainer.take_shard(shard_index)
            self._trainer.seek(cursor)
            return tuple(fragment.version for fragment in self._fragments), self._step

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

    def _refuse_unless_idle(self, versions: Sequence[int]) -> None:
        """Before anything is changed: a catch-up may be asked twice, and the second must not touch who trains already."""
        if self._fragments:
            raise InternalError(detail="an island was given a state while it has one: it keeps the first that came.")
        if len(versions) != len(self._names):
            raise InternalError(detail=f"{len(versions)} versions came for {len(self._names)} fragments.")

    def _begin_from(self, versions: Sequence[int], step: int, cursor: int, bases: Sequence[Arrays | None]) -> None:
        self._trainer.seek(cursor)
        self._fragments = [FragmentWork(Version(v), base) for v, base in zip(versions, bases, strict=True)]
        self._step = self._asked_step = step
