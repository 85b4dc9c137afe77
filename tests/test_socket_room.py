"""The folder of a Ray node is short enough for its sockets, whatever TMPDIR and the node's name are."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from orchestrator.errors import ConfigurationError
from orchestrator.system import socket_room
from tests.programs import missing


@pytest.fixture
def use_tmpdir(monkeypatch: pytest.MonkeyPatch):
    """Set TMPDIR, as for a process that has just begun."""

    def use(folder: Path | str) -> None:
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr(tempfile, "tempdir", None)

    return use


@pytest.fixture
def short():
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    "name", ["control", "us-east", "europe-west4-a-spot-preemptible-l4-x8", "a" * 40, "b" * 40 + "-999"]
)
def test_a_socket_can_be_bound_for_every_name_of_a_node_under_a_tmpdir_of_60_characters(name, use_tmpdir, short):
    deep = short / ("t" * (60 - len(str(short)) - 1))
    deep.mkdir()
    use_tmpdir(deep)
    room = socket_room.for_cluster()
    assert room.folder != deep
    with tempfile.TemporaryDirectory(prefix=socket_room.CLUSTER_PREFIX, dir=room.folder) as made:
        path = Path(made, socket_room.node_folder(name), socket_room.SOCKET)
        path.parent.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    assert str(deep) in room.note
    assert "60 bytes" in room.note
    assert "TMPDIR" in room.note


def test_the_longest_tmpdir_that_fits_is_used_and_one_byte_more_is_not(use_tmpdir, short):
    for room_of in (socket_room.for_cluster, socket_room.for_join):
        fitting = []
        for length in range(len(str(short)) + 2, 40):
            place = short / ("u" * (length - len(str(short)) - 1))
            place.mkdir(exist_ok=True)
            use_tmpdir(place)
            fitting += [length] if room_of().folder == place else []
        longest = max(fitting)
        assert fitting == list(range(len(str(short)) + 2, longest + 1))
        prefix, below = (
            (socket_room.JOIN_PREFIX, "")
            if room_of is socket_room.for_join
            else (socket_room.CLUSTER_PREFIX, "n" * 8 + "/")
        )
        whole = f"{'u' * longest}/{prefix}{'r' * 8}/{below}{socket_room.SOCKET}"
        assert len(whole) == socket_room.PATH_BYTES_MAX


def test_a_node_whose_name_is_short_has_it_for_its_folder_and_no_two_have_the_same():
    names = ["control", "us-east", "asia", *(f"a-long-name-of-a-group-{number}" for number in range(2000))]
    assert [socket_room.node_folder(name) for name in names[:3]] == names[:3]
    assert len({socket_room.node_folder(name) for name in names}) == len(names)
    assert max(len(socket_room.node_folder(name)) for name in names) <= socket_room.NODE_CHARACTERS_MAX


def test_a_tmpdir_that_is_missing_is_named(use_tmpdir, tmp_path):
    use_tmpdir("/nowhere")
    room = socket_room.for_cluster()
    assert room.folder == Path("/tmp")
    assert "TMPDIR (/nowhere) cannot be written" in room.note


def test_where_no_place_is_short_enough_the_remedy_names_tmpdir_and_its_length(use_tmpdir, tmp_path, monkeypatch):
    deep = tmp_path / ("t" * 80)
    deep.mkdir()
    use_tmpdir(deep)
    monkeypatch.setattr(socket_room, "PLACES", (Path("/nowhere"),))
    for room_of in (socket_room.for_cluster, socket_room.for_join):
        with pytest.raises(ConfigurationError) as refused:
            room_of()
        assert str(deep) in str(refused.value)
        assert "Set TMPDIR to a folder" in str(refused.value)


def test_a_name_of_many_bytes_counts_by_bytes(use_tmpdir, short):
    wide = short / "été"
    wide.mkdir()
    use_tmpdir(wide)
    assert socket_room.for_join().folder == (wide if len(str(wide).encode()) <= 23 else Path("/tmp"))


def test_a_tmpdir_on_a_full_disk_is_named_with_the_reason(use_tmpdir, short):
    if os.geteuid() != 0:
        missing("root, which mounts need,")
    full, also_full = short / "a", short / "b"
    for place in (full, also_full):
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], check=True)
    try:
        use_tmpdir(full)
        room = socket_room.for_cluster()
        assert room.folder == Path("/tmp")
        assert f"TMPDIR ({full}) cannot be written (No space left on device)" in room.note
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket_room, "PLACES", (also_full,))
            patch.setattr(tempfile, "gettempdir", lambda: str(full))
            with pytest.raises(
                ConfigurationError, match=f"{also_full} .No space left on device. cannot be written either"
            ):
                socket_room.for_cluster()
    finally:
        for place in (full, also_full):
            subprocess.run(["umount", place], check=True)
