"""One process of an island of two hosts, of which ``test_host_processes.py`` starts both: real process groups, without Ray.

python -m tests.learners.host_processes RANK DEVICES_PORT FOLDER      the last line is JSON: what came of each of ``MESHES``

FOLDER has what one device saved after ``STEPS`` steps. Each mesh trains, saves itself beside it, and goes on from it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learners import checkpointing
from learners.group import link
from learners.island_arrays import HeldPieces
from orchestrator.actors import MeetingPlace, Rank
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import PART, PART_BYTES_MAX, decode_part
from orchestrator.core.vocabulary import Incarnation, IslandId, Version
from orchestrator.replica.replica import Position

HOSTS, DEVICES = 2, 2
"""So many of each host."""
MESHES: Mapping[str, dict[str, int]] = {
    "parameters over all": {"fsdp": 4},
    "matrices over hosts": {"fsdp": 1, "data": 1, "tensor": 4},
}
STEPS = 3
ONE = IslandId("one")
"""The island of one device."""


def cut_of(snapshot: Any, parts: Mapping[str, Any]) -> checkpointing.Cut:
    """After ``STEPS`` steps, and before any was offered."""
    position = Position(STEPS, 0, STEPS, STEPS, (Version(0),), (STEPS,), (STEPS,))
    return checkpointing.Cut(snapshot, position, STEPS, 0.0, parts)


def island_named(mesh: str, rank: int | None = None) -> IslandId:
    """Each process has a folder of its own, for there is nobody here who lists the files of all."""
    return IslandId(f"{mesh.replace(' ', '-')}-{rank}")


def main(rank: int, port: int, path: Path) -> None:
    counts = link.join_devices(Rank(rank, HOSTS, MeetingPlace("127.0.0.1", 0, port), b""))
    from tests.learners import meshes  # its model asks for devices, which are there from here on

    folder = Folder.own(path)
    saved = decode_part(folder.sub(ONE).read(PART, PART_BYTES_MAX), PART)

    def trained(mesh: str, section: Mapping[str, int]) -> dict[str, Any]:
        one = meshes.trainer(section, HOSTS)
        losses = meshes.losses(one, 0, STEPS)
        parts = {name: one.held(name).bounds for name in meshes.SHAPES}
        held = HeldPieces(one, (meshes.PIECES,), rank)
        own = held.offered[0]
        bounds = {name: part.bounds for name, part in one.held_state(own).items()}
        checkpointing.write(cut_of(one.export_state(own), bounds), folder, island_named(mesh, rank), Incarnation(1))
        arrays = checkpointing.read(folder, saved, held.needs().state)
        one.import_state(arrays)
        one.seek(STEPS)
        following = meshes.losses(one, STEPS, 1)
        largest = {
            name: array.size for name, array in arrays.items() if name in ("parameters/mix", "parameters/unembed")
        }
        return {"losses": losses, "held": parts, "following": following, "read": largest}

    print(json.dumps({"counts": counts, "meshes": {name: trained(name, section) for name, section in MESHES.items()}}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
