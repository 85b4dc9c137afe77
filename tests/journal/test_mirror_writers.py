"""Several writers of one log, in every order of their requests: exactly one writes, and planted bugs are found."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import DataError, Fenced, InfrastructureError
from orchestrator.system import mirror as mirroring
from orchestrator.system.mirror import LogWriter, mirrored
from orchestrator.system.store_log import (
    Files,
)
from tests.journal.test_mirror import files_of, use_small_objects
from tests.swarm.disk import AtOnce, SimulatedDisk, SimulatedStore
from tests.waiting import PATIENCE_S

SCHEDULES = int(os.environ.get("ATOLL_MIRROR_SCHEDULES", "50"))
"""Orders of the writers' requests that are tried; ``make soak`` tries more."""


@pytest.fixture(autouse=True)
def small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_objects(monkeypatch)


LOCKED_S = 0.005


class Turns:
    """Lets one thread at a time do its next request to the store, drawn by chance."""

    def __init__(self, seed: int) -> None:
        self._random, self._changed = random.Random(seed), threading.Condition()
        self._waiting: list[int] = []
        self._running: set[int] = set()
        self._turn: int | None = None
        self._speeds: dict[int, float] = {}
        """Of each thread, in the order of their beginning. Slow ones wake long after others have taken over."""

    def begin(self, thread: int) -> None:
        with self._changed:
            self._running.add(thread)
            self._speeds[thread] = self._random.choice((1.0, 1.0, 0.02))

    def end(self, thread: int) -> None:
        with self._changed:
            self._running.discard(thread)
            self._pick()

    def wait(self) -> None:
        own = threading.get_ident()
        with self._changed:
            self._waiting.append(own)
            self._pick()
            while self._turn != own:
                if not self._changed.wait(LOCKED_S):
                    self._pick(len(self._waiting))  # the others wait for a lock that one of these holds
            self._turn = None
            self._waiting.remove(own)

    def _pick(self, enough: int | None = None) -> None:
        if self._turn is None and self._waiting and len(self._waiting) >= (enough or len(self._running)):
            able = [thread for thread in self._speeds if thread in self._waiting]
            (self._turn,) = self._random.choices(able, [self._speeds[thread] for thread in able])
            self._changed.notify_all()


class SharedStore(SimulatedStore):
    """A store each of whose requests waits for its turn."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns

    def _put(self, name: str, content: bytes, *, may_exist: bool) -> None:
        self._turns.wait()
        super()._put(name, content, may_exist=may_exist)

    def get(self, name: str) -> bytes:
        self._turns.wait()
        return super().get(name)

    def delete(self, names: Any) -> None:
        for name in list(names):
            self._turns.wait()
            super().delete([name])


def interleaved(seed: int, kind: type[SharedStore] = SharedStore) -> tuple[list[bytes], bytes]:
    """Let writers take over from each other while older ones go on, and return the words that were acknowledged, in the
    order of their acknowledgement, and the file as the store has it at the end.
    """
    turns = Turns(seed)
    store = kind(turns)
    acknowledged: list[bytes] = []
    failures: list[BaseException] = []

    def write(writer: int) -> None:
        background: list[Callable[[], None]] = []
        try:
            disk = mirrored(store, SimulatedDisk(), Path("/run"), AtOnce(), background.append)
            for number in range(4):
                word = f"<{writer}.{number}>".encode() * (40 if number == 2 else 1)
                disk.append(Path("/run/file"), [word])
                disk.sync(Path("/run/file"))
                acknowledged.append(word)
                if background:
                    threads.append(started(background.pop()))
        except (Fenced, InfrastructureError):
            pass
        except BaseException as error:
            failures.append(error)

    def started(work: Callable[[], None]) -> threading.Thread:
        began = threading.Event()

        def here() -> None:
            turns.begin(threading.get_ident())
            began.set()
            try:
                work()
            except BaseException as error:
                failures.append(error)
            finally:
                turns.end(threading.get_ident())

        thread = threading.Thread(target=here)
        thread.start()
        began.wait()
        return thread

    gate = threading.Event()
    threads: list[threading.Thread] = []
    for writer in range(3):
        threads.append(started(lambda writer=writer: (gate.wait(), write(writer))))
    gate.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failures, failures
    return acknowledged, files_of(store).get("file", b"")


def unsound(seed: int, kind: type[SharedStore] = SharedStore) -> str:
    """Return what is wrong with what was acknowledged in this order of requests, or nothing."""
    acknowledged, content = interleaved(seed, kind)
    at = -1
    for word in acknowledged:
        if (later := content.find(word)) <= at:
            return f"seed {seed}: {word!r} of {acknowledged} is not in its place in {content!r}"
        at = later
    return ""


@pytest.fixture
def tiny_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogWriter, "base_after_bytes", 300)
    monkeypatch.setattr(mirroring, "INLINE_BYTES_MAX", 60)


@pytest.mark.usefixtures("tiny_bases")
def test_of_several_writers_exactly_one_writes_whatever_the_order() -> None:
    assert [problem for seed in range(SCHEDULES) if (problem := unsound(seed))] == []


class NotExclusive(SharedStore):
    """A store that replaces what should only be created."""

    def create(self, name: str, content: bytes) -> None:
        self.put(name, content)


class ReplacedNext(SharedStore):
    """A store in which a writer that was replaced can still say which base follows another."""

    def create(self, name: str, content: bytes) -> None:
        self.put(name, content) if name.startswith("next/") else super().create(name, content)


class Forgetful(Files):
    """Files of which nobody knows which segments are claims."""

    def __init__(self, segment: int = 0, claims: Any = (), files: Any = None) -> None:
        super().__init__(segment, (), files)


class Early(LogWriter):
    """A writer that acknowledges what is only on its way."""

    def flush(self) -> None:
        if self._noted_count % 2:
            super().flush()


@pytest.mark.usefixtures("tiny_bases")
@pytest.mark.parametrize("bug", [NotExclusive, ReplacedNext, Forgetful, Early])
def test_the_interleavings_find_a_planted_bug(bug: type, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = bug if issubclass(bug, SharedStore) else SharedStore
    if bug is Forgetful:
        monkeypatch.setattr(mirroring, "Files", Forgetful)
    if bug is Early:
        monkeypatch.setattr(mirroring, "LogWriter", Early)

    def fails(seed: int) -> bool:
        try:
            return bool(unsound(seed, kind))
        except (AssertionError, DataError):
            return True  # a writer, or a reader, found the log damaged

    assert any(fails(seed) for seed in range(1000))
