"""A checkpoint's files on their way to another machine and back, over a real channel: whole and in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learners import carried_parts, checkpointing, plain_arrays
from learners.carried_parts import HeadStore, PartSpool
from orchestrator.channel.endpoint import Endpoint, Membership, Payload, Terms
from orchestrator.channel.frames import SHARD
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import MANIFEST, PART, PART_BYTES_MAX, decode_part
from orchestrator.checkpoints.writing import is_place, mark_place
from orchestrator.core.vocabulary import Incarnation, IslandId, Version
from orchestrator.errors import InfrastructureError
from orchestrator.replica.replica import Position
from tests.waiting import PATIENCE_S, wait_until

WINDOW_BYTES = 64 << 10
EAST = IslandId("east")


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried_parts, "WINDOW_BYTES", WINDOW_BYTES)


@pytest.fixture
def ends() -> Iterator[tuple[Endpoint, Endpoint]]:
    terms = Terms(inline_bytes_max=1 << 10, shared_memory=False)
    own = [Endpoint(Membership("job", name, 1, terms), "127.0.0.1") for name in ("east:1", SHARD)]
    yield own[0], own[1]
    for end in own:
        end.close()


def cut(parameter_count: int) -> checkpointing.Cut:
    values = np.random.default_rng(1).standard_normal(parameter_count, np.float32)
    arrays = {"parameters/embed": values, "moments/embed": values.astype(np.float64), "steps": np.array(7)}
    position = Position(7, 0, 7, 700, (Version(0),), (7,), (700,))

    class Snapshot:
        def arrays(self) -> dict[str, np.ndarray]:
            return arrays

    return checkpointing.Cut(Snapshot(), position, 7, 0.0)  # type: ignore[arg-type]


class Head:
    """What the synchroniser does: it asks for window after window, pulls each and stores it."""

    def __init__(self, spool: PartSpool, end: Endpoint, folder: Folder, disk_full_after: int | None = None) -> None:
        self._spool, self._end, self._folder, self._full = spool, end, folder, disk_full_after
        self.held: list[int] = []

    def collect(self) -> None:
        content: dict[str, list[bytes]] = {}
        for number in count():
            while (window := self._spool.window("place", number, 0.2)) is None:
                pass
            if window.content is None:
                break
            content.setdefault(window.name, []).append(bytes(self._end.received(window.content)))
            if number == self._full:
                self._spool.stored("OSError: No space left on device")
                return
        for name, chunks in content.items():
            self._folder.write_all(name, chunks)
        self._spool.stored("")


def given(tmp_path: Path, ends: tuple[Endpoint, Endpoint], **of_head: Any) -> Callable[[], Any]:
    """Return what writes a part through a spool that a head empties into ``tmp_path``."""
    spool = PartSpool(ends[0].payload)
    (tmp_path / EAST).mkdir()
    head = Head(spool, ends[1], Folder.own(tmp_path / EAST), **of_head)

    def write() -> Any:
        collecting = threading.Thread(target=head.collect)
        collecting.start()
        try:
            part = checkpointing.write(cut(100_000), spool, EAST, Incarnation(1))
            spool.finish()
        finally:
            collecting.join(PATIENCE_S)
        return part

    return write


def test_a_part_that_travels_is_the_part_that_is_written_in_place(
    tmp_path: Path, ends: tuple[Endpoint, Endpoint]
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    part = given(there, ends)()
    assert part == checkpointing.write(cut(100_000), Folder.own(here), EAST, Incarnation(1))
    for name in Folder.own(here / EAST).names():
        assert (there / EAST / name).read_bytes() == (here / EAST / name).read_bytes()
    stored = Folder.own(there).sub(EAST).read(PART, PART_BYTES_MAX)
    read = checkpointing.read(Folder.own(there), decode_part(stored, PART))
    assert {name: array.tolist() for name, array in read.items()} == {
        name: array.tolist() for name, array in cut(100_000).snapshot.arrays().items()
    }


def test_a_full_disk_on_the_other_machine_is_the_reason_why_the_part_is_not_saved(
    tmp_path: Path, ends: tuple[Endpoint, Endpoint]
) -> None:
    with pytest.raises(OSError, match="No space left on device"):
        given(tmp_path, ends, disk_full_after=3)()


def test_a_slow_reader_stops_the_writer_and_not_more_than_a_few_windows_are_held(
    ends: tuple[Endpoint, Endpoint],
) -> None:
    served: list[Payload] = []

    def hand(name: str, content: memoryview) -> Payload:
        served.append(ends[0].payload(name, content))
        return served[-1]

    spool = PartSpool(hand)

    def write() -> None:
        with pytest.raises(OSError, match="a newer checkpoint has begun"):
            spool.write("file", bytes(20 * WINDOW_BYTES))

    writing = threading.Thread(target=write)
    writing.start()
    for number in range(15):
        wait_until(lambda number=number: spool.window("place", number, 0.1) is not None)
        assert len(served) <= number + carried_parts.WINDOWS_MAX
        assert len(spool._windows) <= carried_parts.WINDOWS_MAX
    spool.end("a newer checkpoint has begun")
    with pytest.raises(InfrastructureError, match="a newer checkpoint has begun"):
        spool.window("place", 15, 0.1)
    writing.join(PATIENCE_S)
    assert not writing.is_alive()


def test_a_part_is_given_up_when_nobody_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carried_parts, "PATIENCE_S", 0.0)
    with pytest.raises(OSError, match="has not asked for this part"):
        PartSpool(lambda _, __: pytest.fail("nothing is served")).place()


def test_only_the_machine_that_sees_the_folder_recognises_the_mark(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    text = mark_place(Folder.own(tmp_path / "one"))
    assert is_place(Folder.own(tmp_path / "one"), text)
    assert not is_place(Folder.own(tmp_path / "other"), text)
    mark_place(Folder.own(tmp_path / "other"))
    assert not is_place(Folder.own(tmp_path / "other"), text), "a folder of the same name, on another disk"
    assert not is_place(Folder.own(tmp_path / "none"), text)


def test_files_of_another_machine_are_read_in_windows_as_those_of_a_folder(tmp_path: Path) -> None:
    checkpointing.write(cut(100_000), Folder.own(tmp_path), EAST, Incarnation(1))
    (tmp_path / MANIFEST).write_bytes(b"manifest")
    own, largest = Folder.own(tmp_path), 0

    def window(name: str, start: int, stop: int) -> tuple[int, memoryview]:
        nonlocal largest
        largest = max(largest, stop - start)
        size = own.size(name)
        with own.opened(name) as between:
            return size, memoryview(between(min(start, size), min(stop, size)))

    remote = Folder.through(HeadStore(str(tmp_path), window), str(tmp_path))
    assert remote.read(MANIFEST, 100) == b"manifest"
    part = decode_part(remote.sub(EAST).read(PART, PART_BYTES_MAX), PART)
    for file in part.files:
        assert remote.sub(EAST).fingerprint(file.name) == (file.size, file.digest)
    read, expected = checkpointing.read(remote, part), checkpointing.read(own, part)
    assert plain_arrays.flattened(read)[1] == plain_arrays.flattened(expected)[1]
    assert 0 < largest <= WINDOW_BYTES
