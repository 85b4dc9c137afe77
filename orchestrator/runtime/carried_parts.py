"""The synchroniser's side of parts of checkpoints that travel: to its disk from islands that do not see it, and back.

    ``PartCollector``   asks each process of an island for its files, window by window, and stores them in the checkpoint
    ``SavedWindows``    gives islands windows of the checkpoint that the job resumed from

A process that sees the checkpoint's folder writes there itself, and there is nothing to collect. What arrives is written in
windows, a file under its name only when it is whole and durable. All windows under way here hold at most ``BYTES_MAX``. A
part that does not arrive as a whole is removed; the island reports that it is not saved.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from orchestrator.actors import ActorHandle, IslandInterface, PartWindow, SavedWindow
from orchestrator.channel.endpoint import Endpoint, Payload
from orchestrator.channel.stream import SLICE_S, ByteBudget
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import MANIFEST
from orchestrator.checkpoints.resumption import Resumption
from orchestrator.core.vocabulary import Epoch, IslandId
from orchestrator.errors import NotFound, PayloadDamaged, TransferError, first_line, in_words
from orchestrator.host.checkpoint_writer import CheckpointWriter
from orchestrator.host.job_context import JobContext
from orchestrator.runtime.parameter_link import ImpairedLink
from orchestrator.system.roots import AllowedRoots

log = logging.getLogger(__name__)

BYTES_MAX = 256 << 20
ASK_S = 5.0
ANSWER_S = 20.0
RETRY_S = 0.2
IDLE_S = 60.0
"""A window of a saved file that was not asked for again for so long is dropped when another one is asked for."""


@dataclass(frozen=True, slots=True)
class PartSource:
    """One process of an island, with the link to it. ``gone`` tells whether the link is closed or the process dead."""

    island: IslandId
    rank: int
    actor: ActorHandle[IslandInterface]
    epoch: Epoch
    link: ImpairedLink
    gone: Callable[[], bool]

    def __str__(self) -> str:
        return f"{self.island}, host {self.rank}" if self.rank else self.island


class _Ended(Exception):
    """The checkpoint does not wait for this part any more."""


class PartCollector:
    """``start`` collects one process's part in a thread of its own."""

    def __init__(self, context: JobContext, checkpoints: CheckpointWriter, endpoint: Endpoint) -> None:
        self._context, self._checkpoints, self._endpoint = context, checkpoints, endpoint
        self._budget = ByteBudget(BYTES_MAX)

    def start(self, source: PartSource, checkpoint: int) -> None:
        if not source.actor.has(IslandInterface.give_part):
            return  # an island of an earlier build writes its part itself
        work, arguments = self._context.guarded, (self._collect, source, checkpoint)
        threading.Thread(target=work, args=arguments, name=f"part of {source}", daemon=True).start()

    def _collect(self, source: PartSource, checkpoint: int) -> None:
        problem, some_arrived = "", False
        try:
            place = self._checkpoints.place(checkpoint)
            for name, windows in groupby(self._windows(source, checkpoint, place), itemgetter(0)):
                some_arrived = True
                self._checkpoints.receive(checkpoint, source.island, name, (content for _, content in windows))
        except _Ended:
            problem = "the checkpoint does not wait for it any more"
        except RayTaskError as error:
            problem = in_words(error)  # the process gave its part up, and says so itself
        except Exception as error:  # a full disk, for example
            problem = in_words(error)
            log.warning("the part of %s of checkpoint %d is not stored: %s", source, checkpoint, problem)
        if problem and some_arrived:
            self._checkpoints.forget_part(checkpoint, source.island)
        self._tell(source, checkpoint, problem)

    def _windows(self, source: PartSource, checkpoint: int, place: str) -> Iterator[tuple[str, memoryview]]:
        """Yield the windows with the names of their files. The budget counts each until the next one is asked for."""
        number, call = 0, self._ask(source, checkpoint, place, 0)
        while True:
            window = self._answer(source, checkpoint, place, number, call)
            if window.content is None:
                return
            with self._budget.hold(window.byte_count, lambda: self._is_over(source, checkpoint), SLICE_S) as held:
                if not held:
                    raise _Ended
                call = self._ask(source, checkpoint, place, number + 1)
                content = self._pulled(source, checkpoint, place, number, window)
                source.link.delay(len(content))
                yield window.name, content
            number += 1

    def _ask(self, source: PartSource, checkpoint: int, place: str, number: int) -> ray.ObjectRef[PartWindow | None]:
        return source.actor.call(IslandInterface.give_part, source.epoch, checkpoint, place, number, ASK_S)

    def _answer(
        self,
        source: PartSource,
        checkpoint: int,
        place: str,
        number: int,
        call: ray.ObjectRef[PartWindow | None] | None = None,
    ) -> PartWindow:
        """Return the window, once the process has it. Raises _Ended, and RayTaskError if the process gave its part up."""
        while not self._is_over(source, checkpoint):
            call = call or self._ask(source, checkpoint, place, number)
            try:
                window = source.link.get(call, ASK_S)
            except TimeoutError:
                continue  # the same call: a stopped island answers it when it goes on
            except ActorDiedError as error:
                raise _Ended from error
            except RayError as error:
                if isinstance(error, RayTaskError) and not isinstance(error.cause, TransferError):
                    raise
                call = None
                time.sleep(RETRY_S)
                continue
            if window is not None:
                return window
            call = None
        raise _Ended

    def _pulled(self, source: PartSource, checkpoint: int, place: str, number: int, window: PartWindow) -> memoryview:
        while True:
            assert window.content is not None
            try:
                return self._endpoint.received(
                    window.content, lambda: self._is_over(source, checkpoint) or source.link.is_cut()
                )
            except (TransferError, PayloadDamaged) as error:
                if self._is_over(source, checkpoint):
                    raise _Ended from error
                log.info("a window of the part of %s is asked for again: %s", source, in_words(error))
                time.sleep(RETRY_S)
            window = self._answer(source, checkpoint, place, number)

    def _tell(self, source: PartSource, checkpoint: int, problem: str) -> None:
        """Tell the process that its part is stored, or why it is not."""
        while not source.gone():
            call = source.actor.call(IslandInterface.part_stored, source.epoch, checkpoint, problem)
            try:
                source.link.get(call, ANSWER_S)
                return
            except (ActorDiedError, RayTaskError):
                return
            except (RayError, TimeoutError) as error:
                log.info("%s has not heard of its part of checkpoint %d: %s", source, checkpoint, first_line(error))
                if not self._checkpoints.is_open(checkpoint):
                    return

    def _is_over(self, source: PartSource, checkpoint: int) -> bool:
        return source.gone() or not self._checkpoints.is_open(checkpoint)


class SavedWindows:
    """Windows of the files of the checkpoint that the job resumed from, at most one for each receiver. Thread-safe."""

    def __init__(self, resumption: Resumption | None, roots: AllowedRoots, endpoint: Endpoint) -> None:
        self._resumption, self._roots, self._endpoint = resumption, roots, endpoint
        self._names = {MANIFEST, *(file.name for file in resumption.manifest.files)} if resumption else frozenset()
        self._lock = threading.Lock()
        self._given: dict[str, tuple[Payload, float]] = {}
        self._folder: Folder | None = None

    def window(self, receiver: str, name: str, start: int, stop: int) -> SavedWindow | None:
        """Return the file's size and these bytes of it, as far as it has them. None: too many are out; ask again.

        An empty name only drops the receiver's last window. Raises NotFound for a file that the checkpoint does not list.
        """
        with self._lock:
            self._drop(receiver)
            if not name:
                return SavedWindow(0, None)
            if self._resumption is None or name not in self._names:
                raise NotFound(detail=f"The checkpoint that this job resumed from has no file {name!r}.")
            if sum(payload.byte_count for payload, _ in self._given.values()) + stop - start > BYTES_MAX:
                return None
            folder = self._folder = self._folder or self._resumption.folder(self._roots)
        size = folder.size(name)
        stop = min(stop, size)
        if stop <= start:
            return SavedWindow(size, None)
        with folder.opened(name) as between:
            content = between(start, stop)
        payload = self._endpoint.payload(f"saved/{name}/{start}", memoryview(content))
        with self._lock:
            self._given[receiver] = (payload, time.monotonic())
        return SavedWindow(size, payload.carried(receiver))

    def _drop(self, receiver: str) -> None:
        """Drop the windows of this receiver and idle ones. Requires the lock to be held."""
        now = time.monotonic()
        for name, (_, given_at) in list(self._given.items()):
            if name == receiver or now - given_at > IDLE_S:
                del self._given[name]
        self._endpoint.withdraw_unheld()
