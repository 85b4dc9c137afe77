"""One process of a PyTorch island of two, of which ``test_processes.py`` starts both: real process groups, without Ray.

python -m tests.learners.pytorch.processes RANK PORT SPEC FOLDER      the last line is JSON: losses, and what is held

The island trains, saves itself below FOLDER, and continues from what one process saved there. Then rank 1 dies.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from learners import checkpointing
from learners.factories import trainer_of
from learners.group import link
from learners.island_arrays import HeldPieces
from learners.island_spec import IslandSpec
from orchestrator.actors import MeetingPlace, Rank
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import PART, PART_BYTES_MAX, decode_part
from orchestrator.core.vocabulary import Incarnation
from orchestrator.errors import InfrastructureError
from orchestrator.system.roots import EVERYTHING
from tests.learners.host_processes import HOSTS, ONE, STEPS, cut_of, island_named

NAME = "fsdp"
PIECES_MIN = 8
"""A tensor with at least so many rows is two pieces, which the processes' rows do not match."""


def pieces_of(trainer: Any) -> tuple[str, ...]:
    pieces: list[str] = []
    for name, shape in trainer.tensor_shapes().items():
        if shape[0] < PIECES_MIN:
            pieces.append(name)
        else:
            at = shape[0] // 3
            pieces += [f"{name}[0:{at}]", f"{name}[{at}:{shape[0]}]"]
    return tuple(pieces)


def main(rank: int, port: int, spec: dict[str, Any], path: Path) -> None:
    link.join_devices(Rank(rank, HOSTS, MeetingPlace("127.0.0.1", 0, port), b""), in_torch=True)
    parsed = IslandSpec.of({**spec, "roots": EVERYTHING})
    trainer = trainer_of(parsed, 0, 2)
    trainer.warm_up()
    pieces = pieces_of(trainer)
    held = HeldPieces(trainer, (pieces,), rank)
    version_0 = trainer.initial_parameters(pieces)
    trainer.load(version_0)
    losses = [trainer.step(step).loss for step in range(STEPS)]
    folder, own = Folder.own(path), held.offered[0]
    bounds = {name: part.bounds for name, part in trainer.held_state(own).items()}
    checkpointing.write(cut_of(trainer.export_state(own), bounds), folder, island_named(NAME, rank), Incarnation(1))
    saved = decode_part(folder.sub(ONE).read(PART, PART_BYTES_MAX), PART)
    trainer.import_state(checkpointing.read(folder, saved, held.needs().state))
    trainer.seek(STEPS)
    following = [trainer.step(STEPS).loss]
    added = {name: array * 0 + 1 for name, array in trainer.snapshot(own).arrays().items()}
    before = trainer.snapshot(own).arrays()
    trainer.add(added)
    moved = all((trainer.snapshot(own).arrays()[name] - before[name]).min() > 0.999 for name in own)
    parts = {name: trainer.held(name).bounds for name in trainer.tensor_shapes()}
    answer: dict[str, Any] = {"losses": losses, "following": following, "parts": parts, "moved": moved, "lost": ""}
    if rank:
        print(json.dumps(answer), flush=True)
        os._exit(0)  # as one that is killed
    try:
        trainer.step(STEPS + 1)
    except InfrastructureError as error:  # one of the specification would be final
        answer["lost"] = str(error)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), Path(sys.argv[4]))
