"""A running job's checkpoints: Θ and the accounts at the cut, the islands' parts, the manifest, and old ones removed.

    begin (pump)   accounts and cursors as the record that begins it leaves them; Θ behind the merges ordered before; not
                   before that record is durable: its number must not be used again for another, after a loss of power
    one thread     writes Θ, then the manifest once the core says whose parts belong in it; removes what is dropped, once
                   the record that says so survives a loss of power, and what a life before this one was to remove

Results return as events. Whatever goes wrong with one, foreseen or not, is that checkpoint's failure, and never the job's:
what it would have saved is still there. Refuses to decide when, who and which (``core.checkpoints``), and to know what is in
a part.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass

from orchestrator.accounting.ledger import Ledger, TokenTotals
from orchestrator.checkpoints import writing
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import PART, File, Fragment, Manifest, Part, manifest_digest
from orchestrator.checkpoints.resumption import Resumption
from orchestrator.checkpoints.writing import OuterCut
from orchestrator.core.commands import ChangedSettings
from orchestrator.core.saving import (
    BeginCheckpoint,
    CheckpointFailed,
    CheckpointTaken,
    DropCheckpoint,
    SavedPart,
    SavingEffect,
    SealCheckpoint,
)
from orchestrator.core.vocabulary import Instant, IslandId
from orchestrator.errors import AtollError, first_line, in_words
from orchestrator.host.job_context import JobContext
from orchestrator.host.state_view import StateView

log = logging.getLogger(__name__)

CutOuter = Callable[[], "Future[OuterCut]"]
"""Θ as it stands when the merges ordered so far are done."""


@dataclass(slots=True)
class _Open:
    order: BeginCheckpoint
    folder: Folder
    at: Instant
    began: float
    token_totals: TokenTotals
    cursors: Mapping[IslandId, int]
    outer: Future[OuterCut]
    changed: ChangedSettings
    fragments: tuple[Fragment, ...] = ()
    files: tuple[File, ...] = ()
    place: str = ""


class CheckpointWriter:
    """``act`` is called in the pump's thread, right after the folds have seen the record.

    ``sync_tape`` makes durable all that was decided, however long that takes, or raises InfrastructureError. OutsideRoots is
    raised where the job's folder of checkpoints lies below none of its roots. ``worker`` takes the place of the one thread.
    """

    def __init__(
        self,
        context: JobContext,
        resumption: Resumption | None,
        state: StateView,
        ledger: Ledger,
        cut_outer: CutOuter,
        sync_tape: Callable[[], None],
        worker: Executor | None = None,
    ) -> None:
        spec, self._roots = context.spec, context.roots
        self._job, self._spec, self._post = context.job, spec, context.post
        self._resumptions = resumption.resumptions if resumption else ()
        self.resumed_from = (resumption.url, manifest_digest(resumption.manifest)) if resumption else ("", "")
        """The checkpoint that the job resumed from, and the digest of its manifest."""
        self._state, self._ledger, self._cut_outer, self._sync_tape = state, ledger, cut_outer, sync_tape
        self._url = writing.root_of(spec.checkpoints.folder, context.job, context.run_dir)
        self._roots.checkpoint_folder(self._url)  # raises; a place that is only out of reach may come back
        self._root: Folder | None = None
        self._worker = worker or ThreadPoolExecutor(1, "checkpoint")
        self._open: dict[int, _Open] = {}
        self._marking = threading.Lock()
        if state.checkpoints().count:
            self._worker.submit(self._tidy)

    def act(self, effect: SavingEffect, now: Instant) -> None:
        match effect:
            case BeginCheckpoint(number):
                self._sync_tape()
                try:
                    opened = _Open(
                        effect,
                        self.folder(number),
                        now,
                        time.monotonic(),
                        self._ledger.token_totals(),
                        self._state.step_counts(),
                        self._cut_outer(),
                        self._state.changed(),
                    )
                except Exception as error:
                    self._fail(number, error)
                    return
                self._open[number] = opened
                self._worker.submit(self._guarded, number, lambda: self._write_outer(opened))
            case SealCheckpoint(number, parts):
                self._worker.submit(self._guarded, number, lambda: self._seal(number, parts))
            case DropCheckpoint(number, reason):
                log.info("checkpoint %d is removed: %s", number, reason)
                self._worker.submit(self._remove, number)

    @property
    def root(self) -> Folder:
        """Opened when it is first needed: one that cannot be is the misfortune of each checkpoint, not of the job."""
        if self._root is None:
            self._root = Folder.within(self._roots, self._url)
        return self._root

    @root.setter
    def root(self, folder: Folder) -> None:
        self._root = folder

    def folder(self, number: int) -> Folder:
        """Raises what an unusable ``checkpoints.folder`` raises."""
        return writing.checkpoint_folder(self.root, number)

    def is_open(self, number: int) -> bool:
        """Return whether this checkpoint was begun and has neither failed nor been sealed."""
        return number in self._open

    # ── parts that other machines give, from their own threads ────────────────────────────────────────────────────

    @property
    def collects(self) -> bool:
        """Return whether checkpoints are in a folder that some islands may not see, so that they give their parts."""
        return self.root.is_local

    def place(self, number: int) -> str:
        """Return the text by which islands recognise the checkpoint's folder, which is there then. Raises OSError."""
        with self._marking:
            opened = self._opened(number)
            if not opened.place:
                opened.place = writing.mark_place(opened.folder)
            return opened.place

    def receive(self, number: int, island: IslandId, name: str, chunks: Iterable[memoryview]) -> None:
        """Store a file of the island's part durably. Raises OSError, and whatever ``chunks`` raises."""
        own = self._opened(number).folder.sub(island)
        own.write_all(name, chunks)
        if name == PART:  # the last one
            own.sync()

    def forget_part(self, number: int, island: IslandId) -> None:
        """Remove what was received of the island's part."""
        try:
            self.folder(number).sub(island).remove_all()
        except Exception as error:  # it takes room until the checkpoint is removed
            log.warning("the part of %s in checkpoint %d cannot be removed: %s", island, number, first_line(error))

    def _opened(self, number: int) -> _Open:
        if (opened := self._open.get(number)) is None:
            raise OSError(f"checkpoint {number} is not being taken")
        return opened

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    # ── in the writing thread ─────────────────────────────────────────────────────────────────────────────────────

    def _guarded(self, number: int, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._fail(number, error)

    def _fail(self, number: int, error: Exception) -> None:
        reason = in_words(error)
        unforeseen = None if isinstance(error, AtollError | OSError) else error
        log.warning("checkpoint %d fails: %s", number, reason, exc_info=unforeseen)
        self._open.pop(number, None)
        self._post(lambda at: CheckpointFailed(at, number, reason))

    def _write_outer(self, opened: _Open) -> None:
        cut = opened.outer.result()
        versions = tuple(fragment.version for fragment in cut.fragments)
        if versions != opened.order.versions:  # a merge of the cut came to nothing
            raise OSError(f"Θ is at versions {versions}, and the cut at {opened.order.versions}")
        opened.files, opened.fragments = cut.write(opened.folder), cut.fragments

    def _seal(self, number: int, saved_parts: tuple[SavedPart, ...]) -> None:
        opened = self._open.pop(number, None)
        if opened is None:
            return  # Θ could not be written, which was said
        self._sync_tape()  # a synchroniser that was replaced is fenced here, and leaves its successor's files alone
        parts, files = [], list(opened.files)
        for saved in saved_parts:
            part, of_part = writing.read_part(opened.folder, saved.island, saved.digest)
            parts.append(part)
            files.extend(of_part)
        manifest = self._manifest(opened, tuple(parts), tuple(files))
        self._clear_of_others(opened, {part.island for part in parts})
        writing.write_manifest(opened.folder, manifest)
        seconds = time.monotonic() - opened.began
        self._post(lambda at: CheckpointTaken(at, number, manifest.byte_count, seconds))
        self._tidy()

    def _clear_of_others(self, opened: _Open, islands: set[str]) -> None:
        """Remove the mark, and what islands left that are not in the checkpoint: they died while they wrote."""
        number = opened.order.checkpoint
        try:
            if opened.place:
                opened.folder.remove(writing.PLACE)
            for name in opened.folder.folders() if opened.folder.is_local else ():
                if name not in islands:
                    opened.folder.sub(name).remove_all()
        except Exception as error:  # it takes room until the checkpoint is removed
            log.warning("checkpoint %d keeps what does not belong to it: %s", number, first_line(error))

    def _manifest(self, opened: _Open, parts: tuple[Part, ...], files: tuple[File, ...]) -> Manifest:
        totals, of_parts = opened.token_totals, {part.island: part for part in parts}
        since = sum(part.tokens_total - totals.totals.get((part.island, part.incarnation), 0) for part in parts)
        islands = self._spec.island_sections(slots=True)
        cursors = {**opened.cursors, **{IslandId(part.island): part.cursor for part in parts}}
        return Manifest(
            job=self._job,
            number=opened.order.checkpoint,
            at=opened.at,
            taken_at=time.time(),
            spec=self._spec.model_dump(mode="json"),
            fragments=opened.fragments,
            tokens_trained=totals.trained + since,
            merged_tokens=totals.merged,
            cursors=tuple(cursors[island] for island in islands),
            batch_sizes=tuple(map(self._spec.batch_size_of, islands.values())),
            legs=tuple(cursors for _, cursors in self._resumptions),
            granules=tuple(block for block, _ in self._resumptions),
            changed=opened.changed,
            parts=tuple(of_parts[name] for name in sorted(of_parts)),
            files=files,
        )

    def _remove(self, number: int) -> None:
        """Not before the tape is durable: with the power, the newer one could be forgotten that made this superfluous."""
        self._open.pop(number, None)
        try:
            self._sync_tape()
            writing.remove(self.folder(number))
        except Exception as error:  # it stays, and takes room; nothing rests on it
            log.warning("checkpoint %d cannot be removed: %s", number, first_line(error))

    def _tidy(self) -> None:
        """Remove what was dropped and is there: who was to remove it died, or an island wrote into it afterwards."""
        checkpoints = self._state.checkpoints()
        needed = {one.number for one in checkpoints.retained} | (
            {checkpoints.open.number} if checkpoints.open else set()
        )
        try:
            on_disk = {number for name in self.root.folders() if (number := writing.number_of(name)) is not None}
        except Exception as error:
            log.warning("the checkpoints cannot be listed: %s", first_line(error))
            return
        for number in sorted(on_disk - needed):
            if number <= checkpoints.count:
                self._remove(number)
