"""Object stores have a place also where shared memory cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from api.installation import doctor
from api.installation.doctor import State
from orchestrator.system import socket_room


@pytest.mark.parametrize("shared_memory", [Path("/sys/kernel"), Path("/nowhere")], ids=["read-only", "missing"])
def test_where_shared_memory_cannot_be_written_a_node_has_its_store_in_its_own_folder(shared_memory, tmp_path):
    assert socket_room.options(tmp_path, shared_memory) == ["--plasma-directory", str(tmp_path)]
    assert str(shared_memory) in socket_room.note(shared_memory)


def test_where_it_can_be_written_nothing_is_said(tmp_path):
    assert socket_room.options(tmp_path, tmp_path) == []
    assert socket_room.note(tmp_path) == ""


def test_doctor_says_that_shared_memory_cannot_be_written():
    finding = doctor.shared_memory(Path("/sys/kernel"))
    assert finding.state is State.WARNING
    assert "Mount /sys/kernel writable" in finding.remedy
