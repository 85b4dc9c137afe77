"""The island's outbox, the offers in it, and the priorities of the threads around it.

The loop puts reports in, and Ray's threads read them and deliver commands. Which reports are sent again, and which commands
are fenced, is decided in ``orchestrator.replica.outbox``. Thread-safe.

An ``OfferedFragment`` is a snapshot of an island's parameters, its payload, and what the synchroniser decodes from that.

   payload   Δ = Θ_base − θ in the codec, encoded when it is first fetched; every fetch gets the same bytes
   decoded   θ as the synchroniser decodes it, Θ_base − Δ̂; θ itself before the first fetch, or if nothing is lost
   residue   θ − decoded

If the island does not hold Θ_base, its parameters themselves are the payload, and nothing is lost. In an island of several
hosts each process offers the pieces that it owns, and decodes all that it holds. Pieces that several processes hold are
encoded alike by each of them, so they stay equal everywhere.

Threads that compute on the host's cores run at a lower priority than the service's. Linux keeps niceness per thread, and a
new thread inherits it: XLA's pool, and the island's loop. Without this, four islands on two cores starve the synchroniser
for seconds, and every process looks dead. Ray's own threads keep their priority.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from learners.contract import Arrays, Snapshot
from orchestrator.core.messages import IslandReport
from orchestrator.core.vocabulary import Epoch, Version
from orchestrator.parameters import wire_format
from orchestrator.parameters.codec.registry import EXACT, CodecName
from orchestrator.parameters.parts import Bounds
from orchestrator.parameters.wire_format import EncodedTensors, displacement
from orchestrator.replica.outbox import Numbered, ReliableOutbox


class PublishedVersion(NamedTuple):
    """A fragment of Θ as it was published."""

    version: Version
    arrays: Mapping[str, np.ndarray]


class OfferedFragment:
    """``base`` is the published version on which the island is based; None if it does not hold it.

    ``owned`` are the pieces that this process offers, each with the bounds of its part, or None for all of it.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        base: PublishedVersion | None,
        codec_name: CodecName,
        *,
        owned: Mapping[str, Bounds | None] | None = None,
        residue_wanted: bool = False,
    ) -> None:
        self._snapshot: Snapshot | None = snapshot
        self._owned = owned
        self._base, self._codec, self._residue_wanted = base, codec_name, residue_wanted
        self._content: EncodedTensors | None = None
        self._residue: Arrays | None = None
        self._lock = threading.Lock()

    def payload(self) -> memoryview:
        """Return the bytes for the synchroniser, once the snapshot is on the host."""
        with self._lock:
            if self._base is None or self._codec == EXACT:
                assert self._snapshot is not None
                arrays = self._snapshot.arrays()
                if self._base is None:
                    return self._written(wire_format.encoded(arrays, EXACT))
                return self._written(displacement(self._base.arrays, arrays, self._base.version, self._codec))
            return self._written(self._coded())

    def arrays(self) -> Arrays:
        """Return what the synchroniser decodes from it."""
        with self._lock:
            if self._content is not None:
                return self._decoded(self._content)
            assert self._snapshot is not None
            return self._snapshot.arrays()

    def merge(self) -> None:
        """Record that a version contains this offer: it was decoded, even if another process of the island sent it."""
        with self._lock:
            if self._base is not None and self._codec != EXACT:
                self._coded()

    def residue(self) -> Arrays | None:
        """Return what the codec lost; None if it lost nothing."""
        with self._lock:
            return self._residue

    def _written(self, content: EncodedTensors) -> memoryview:
        if self._owned is not None:
            own = {name: replace(content.tensors[name], part=part) for name, part in self._owned.items()}
            content = EncodedTensors(content.codec, content.base, own)
        return wire_format.written(content)

    def _coded(self) -> EncodedTensors:
        """Return the snapshot in its codec, which is much smaller and replaces it. Requires the lock to be held."""
        if self._content is None:
            assert self._snapshot is not None
            assert self._base is not None
            arrays = self._snapshot.arrays()
            self._content = displacement(self._base.arrays, arrays, self._base.version, self._codec)
            if self._residue_wanted:
                self._residue = {name: arrays[name] - array for name, array in self._decoded(self._content).items()}
            self._snapshot = None
        return self._content

    def _decoded(self, content: EncodedTensors) -> Arrays:
        assert self._base is not None
        return {name: array - content.decoded(name) for name, array in self._base.arrays.items()}


TRAINING_NICENESS, LOWEST_NICENESS = 10, 19


def lower_priority(niceness: int = TRAINING_NICENESS) -> None:
    """Lower the priority of this thread, and of the threads that it starts from now on."""
    _lower(0, niceness)


def thread_ids() -> frozenset[int]:
    """Return the threads that this process has."""
    return frozenset(int(task.name) for task in Path("/proc/self/task").iterdir()) if _PER_THREAD else frozenset()


def python_thread_ids() -> frozenset[int]:
    """Return the threads of this process that Python has started."""
    return frozenset(thread.native_id for thread in threading.enumerate() if thread.native_id is not None)


def lower_priority_of_new(before: frozenset[int], niceness: int = TRAINING_NICENESS) -> None:
    """Lower the priority of this thread, and of every thread that is not in ``before``."""
    lower_priority(niceness)
    for thread in thread_ids() - before:
        try:
            _lower(thread, niceness)
        except ProcessLookupError:
            continue  # the thread has ended


def _lower(thread: int, niceness: int) -> None:
    """Lower the priority of a thread, 0 being the calling one. Only root could raise it, so a lower one is kept."""
    os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), niceness))


_PER_THREAD = Path("/proc/self/task").is_dir()


class Outbox:
    """The reports of an island, for several threads.

    ``standing`` returns what a new synchroniser may not know: offers that are not merged as far as this island knows, and
    before it holds a state, that it is ready for one. It is called with the outbox's lock held, so whatever it calls must
    hold no lock of its own while it puts reports in.
    """

    def __init__(self, standing: Callable[[], Iterable[IslandReport]] = lambda: ()) -> None:
        self._standing = standing
        self._changed = threading.Condition()
        self._reading = threading.Lock()  # one long poll at a time; a second one waits
        self._outbox = ReliableOutbox()

    def put(self, report: IslandReport) -> None:
        with self._changed:
            self._outbox.put(report)
            self._changed.notify_all()

    def take(self, timeout_s: float) -> list[IslandReport]:
        """Return all unread reports, oldest first, after waiting for one up to ``timeout_s``. Each is returned once."""
        taken: list[IslandReport] = []

        def took() -> bool:
            taken.extend(self._outbox.take())
            return bool(taken)

        with self._changed:
            self._changed.wait_for(took, timeout_s)
        return taken

    @property
    def epoch(self) -> Epoch:
        """The newest epoch that has commanded; 0 before any."""
        with self._changed:
            return self._outbox.epoch

    def check_epoch(self, epoch: Epoch) -> None:
        """Note the epoch of a command. Raises Fenced if a newer one has commanded."""
        with self._changed:
            if self._outbox.check_epoch(epoch):
                self._outbox.restate(self._standing())
                self._changed.notify_all()

    def read(self, epoch: Epoch, after: int, acknowledged: int, timeout_s: float) -> Numbered:
        """Return the reports after number ``after``, oldest first; waits for one. Forget those up to ``acknowledged``."""
        self.check_epoch(epoch)
        with self._reading, self._changed:
            self._outbox.acknowledge(acknowledged)
            self._changed.wait_for(lambda: self._outbox.has_after(after), timeout_s)
            return self._outbox.read(after)

    def forget(self) -> None:
        """Forget all reports: the next reader is that of another incarnation."""
        with self._changed:
            self._outbox.forget_all()
