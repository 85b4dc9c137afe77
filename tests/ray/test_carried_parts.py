"""How the synchroniser collects an island's part of a checkpoint, against an island and a channel of plain objects."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from orchestrator.actors import PART_ENDS, PartWindow
from orchestrator.core.vocabulary import Epoch, IslandId
from orchestrator.errors import PayloadDamaged
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("port"),
]  # Ray is not imported before the cluster's environment is set
EAST = IslandId("east")
FILES = {"arrays.safetensors": [b"one", b"two", b"three"], "part.json": [b"the part"]}
WINDOWS = [(name, content) for name, contents in FILES.items() for content in contents]


class Island:
    """Gives these windows. ``heard`` is the answer to its part; ``at`` is called before each window is given."""

    def __init__(self, windows: list[tuple[str, bytes]], at: Callable[[int], None] = lambda number: None) -> None:
        self._windows, self._at = windows, at
        self.heard: list[str] = []

    def has(self, method: Any) -> bool:
        return True

    def call(self, method: Any, *arguments: Any) -> Any:
        if method.__name__ == "part_stored":
            self.heard.append(arguments[-1])
            return None
        number = arguments[3]
        self._at(number)
        if number >= len(self._windows):
            return PART_ENDS
        name, content = self._windows[number]
        return PartWindow(name, len(content), np.frombuffer(content, np.uint8))


class Line:
    def get(self, answer: Any, timeout_s: float) -> Any:
        return answer

    def delay(self, size_bytes: int) -> None: ...

    def is_cut(self) -> bool:
        return False


class Checkpoints:
    """Those of a job: one is open until it is closed."""

    def __init__(self) -> None:
        self.open, self.full = True, False
        self.stored: dict[str, bytes] = {}
        self.forgotten: list[str] = []

    def place(self, number: int) -> str:
        return "text"

    def is_open(self, number: int) -> bool:
        return self.open

    def receive(self, number: int, island: str, name: str, chunks: Iterable[memoryview]) -> None:
        content = b"".join(map(bytes, chunks))
        if self.full:
            raise OSError(28, "No space left on device")
        self.stored[f"{island}/{name}"] = content

    def forget_part(self, number: int, island: str) -> None:
        self.forgotten.append(island)


class Channel:
    """Delivers, after as many damaged windows as ``damaged``."""

    damaged = 0

    def received(self, carried: Any, abandoned: Callable[[], bool]) -> memoryview:
        if self.damaged:
            self.damaged -= 1
            raise PayloadDamaged(payload="part", detail="It is damaged.")
        return memoryview(carried)


def collected(island: Island, checkpoints: Checkpoints, channel: Channel | None = None) -> None:
    """Collect the island's part. Returns once the thread has ended."""
    from orchestrator.runtime.carried_parts import PartCollector, PartSource  # imports Ray

    failures: list[BaseException] = []
    over = threading.Event()

    def guarded(work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            failures.append(error)
        over.set()

    collector: Any = PartCollector(SimpleNamespace(guarded=guarded), checkpoints, channel or Channel())  # type: ignore[arg-type]
    collector.start(PartSource(EAST, 0, island, Epoch(1), Line(), lambda: False), 7)  # type: ignore[arg-type]
    assert over.wait(PATIENCE_S)
    assert not failures


def test_windows_are_stored_as_the_files_that_they_are_of_and_the_island_hears_of_it() -> None:
    island, checkpoints = Island(WINDOWS), Checkpoints()
    collected(island, checkpoints)
    assert checkpoints.stored == {f"east/{name}": b"".join(contents) for name, contents in FILES.items()}
    assert (island.heard, checkpoints.forgotten) == ([""], [])


def test_a_part_that_the_island_writes_itself_is_left_alone() -> None:
    island, checkpoints = Island([]), Checkpoints()
    collected(island, checkpoints)
    assert (island.heard, checkpoints.forgotten, checkpoints.stored) == ([""], [], {})


def test_a_full_disk_is_told_to_the_island_and_what_arrived_is_removed() -> None:
    island, checkpoints = Island(WINDOWS), Checkpoints()
    checkpoints.full = True
    collected(island, checkpoints)
    assert checkpoints.forgotten == ["east"]
    assert "No space left on device" in island.heard[0]


def test_a_damaged_window_is_asked_for_again() -> None:
    island, checkpoints, channel = Island(WINDOWS), Checkpoints(), Channel()
    channel.damaged = 3
    collected(island, checkpoints, channel)
    assert checkpoints.stored["east/arrays.safetensors"] == b"onetwothree"


def test_a_part_that_the_checkpoint_no_longer_waits_for_is_removed() -> None:
    checkpoints = Checkpoints()

    def close(number: int) -> None:
        if number == 2:
            checkpoints.open = False

    island = Island(WINDOWS, close)
    collected(island, checkpoints)
    wait_until(lambda: checkpoints.forgotten == ["east"])
    assert checkpoints.stored == {}


def test_head_copies_begin_anew_where_they_do_not_continue_and_keep_the_older_part(tmp_path: Path) -> None:
    from orchestrator.runtime import head_copies
    from orchestrator.runtime.placement import Placement
    from orchestrator.system.logbook import addition, island_logbook

    there, here = island_logbook(tmp_path / "there", "east", 1), island_logbook(tmp_path / "here", "east", 1)
    there.path.parent.mkdir(parents=True)
    here.path.parent.parent.mkdir(parents=True)
    copied: Any = head_copies._Copied(here, Placement("actor", "id", "machine", 1, 0.0), at=0)

    def copy() -> None:
        more = addition(there.path, copied.at)
        assert more is not None
        if more.content:
            head_copies._append(copied, more)
        copied.at = more.end

    for number in range(3):
        with there.path.open("a") as file:
            file.write(f"line {number}\n")
        copy()
    heading = f"[copy of {here.path} on machine from byte 0]\n"
    assert here.path.read_text() == f"{heading}line 0\nline 1\nline 2\n"
    assert head_copies._copied_so_far(here.path) == copied.at == 21
    with there.path.open("a") as file:
        file.write("x" * (3 * head_copies.COPY_BYTES))
    copy()
    assert here.older.read_text().endswith("line 2\n")
    assert here.path.read_text().startswith(
        f"[copy of {here.path} on machine from byte {21 + 2 * head_copies.COPY_BYTES}]"
    )
    assert here.path.stat().st_size < 2 * head_copies.COPY_BYTES
