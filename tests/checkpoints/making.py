"""Small checkpoints for tests, written by the code that writes real ones."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from learners.checkpointing import ORBAX, Cut, write
from learners.contract import Arrays
from learners.loop import IslandLoop, LoopPlan
from learners.outbox import Outbox
from learners.synthetic import SyntheticTrainer
from orchestrator.checkpoints import blocks, writing
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import PART, File, Fragment, Manifest, Part, encode_part, part_digest
from orchestrator.core.messages import Offer
from orchestrator.core.vocabulary import FragmentId, Incarnation, IslandId
from orchestrator.parameters import fragment_map
from orchestrator.parameters.outer_optimizer import Nesterov
from orchestrator.parameters.outer_state import Averaging, FragmentState, OuterState, OuterStep
from orchestrator.system.roots import AllowedRoots
from tests.waiting import PATIENCE_S

SPEC: dict[str, Any] = {
    "seed": 3,
    "synthetic": {"parameters": 600, "step_s": 1e-4, "step_jitter_ratio": 0.0, "start_s": 0.0},
    "synchroniser": {"fragments": 2},
    "training": {"batch_size": 2},
    "data": {"sequence_length": 8},
    "evaluation": {"sequences": 24},
    "islands": [{"node_group": "here"}],
    "budget": {"steps": 100},
}
FRAGMENTS = fragment_map.build(SyntheticTrainer(SPEC, 0).tensor_shapes(), 2)


def outer() -> OuterState:
    step = OuterStep(Averaging.MEAN, Nesterov(0.7, 0.9))
    return OuterState(initial_pieces(SyntheticTrainer(SPEC, 0)), FRAGMENTS, step)


def initial_pieces(trainer: SyntheticTrainer) -> Arrays:
    return fragment_map.pieces_of(trainer.initial_parameters(), FRAGMENTS)


def cut_of_island(shard: int) -> Cut:
    """The state of an island that trains, and has trained for a few steps."""
    trainer, outbox = SyntheticTrainer(SPEC, shard), Outbox()
    loop = IslandLoop(trainer, LoopPlan(FRAGMENTS, interval_steps=4, tokens_per_schedule_step=64), outbox)
    loop.load(initial_pieces(trainer), (0, 0), 0, 0)
    loop.start()
    while not any(isinstance(letter, Offer) for letter in outbox.take(10.0)):
        pass
    try:
        return loop.request_cut().result(PATIENCE_S)
    finally:
        loop.stop()


def as_earlier_builds_wrote_it(folder: Folder, part: Part, arrays: Arrays) -> Part:
    """The part's arrays are in the folder as Orbax writes them, by way of this disk, and plainly no more."""
    import orbax.checkpoint as ocp

    own = folder.sub(part.island)
    for file in part.files:
        own.remove(file.name)
    with tempfile.TemporaryDirectory() as here, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(here) / ORBAX, dict(arrays))
        checkpointer.wait_until_finished()
        written = Folder.own(Path(here))
        for name in written.names():
            own.write_all(name, written.chunks(name))
    names = [name for name in own.names() if name != PART]
    part = replace(part, files=tuple(File(name, *own.fingerprint(name)) for name in names))
    own.write(PART, encode_part(part))
    return part


def without_blocks(folder: Folder, files: list[File]) -> list[File]:
    """The files of a build that wrote no lists of their blocks."""
    for file in files:
        if file.name.endswith(blocks.SUFFIX):
            folder.remove(file.name)
    return [file for file in files if not file.name.endswith(blocks.SUFFIX)]


def make(
    root: Path | str, number: int, islands: tuple[str, ...] = ("a", "b"), *, orbax: bool = False, **changes: Any
) -> Folder:
    """Checkpoint ``number`` of these islands, at version 0 of everything; ``orbax``: as earlier builds wrote it."""
    folder = writing.checkpoint_folder(Folder.within(AllowedRoots.only(root), str(root)), number)
    states = {FragmentId(p): outer().state(FragmentId(p)) for p in range(2)}
    files = list(writing.write_outer(folder, states))
    if orbax:
        files = without_blocks(folder, files)
    parts = []
    for shard, island in enumerate(islands):
        cut = cut_of_island(shard)
        written = write(cut, folder, IslandId(island), Incarnation(1))
        if orbax:
            written = as_earlier_builds_wrote_it(folder, written, cut.snapshot.arrays())
        part, of_part = writing.read_part(folder, island, part_digest(written))
        parts.append(part)
        files.extend(of_part)
    return complete(folder, number, states, parts, files, **changes)


def complete(
    folder: Folder,
    number: int,
    states: Mapping[FragmentId, FragmentState],
    parts: Sequence[Part],
    files: Sequence[File],
    **changes: Any,
) -> Folder:
    """The manifest of these is in the folder, which is a checkpoint from here on."""
    facts: dict[str, Any] = {
        "job": "job-1",
        "number": number,
        "at": 10.0 * number,
        "taken_at": 1e9 + number,
        "spec": SPEC,
        "fragments": tuple(Fragment(state.version, 0, state.digest) for state in states.values()),
        "tokens_trained": sum(part.tokens_total for part in parts),
        "merged_tokens": (0,) * len(states),
        "cursors": tuple(part.cursor for part in parts),
        "legs": (),
        "batch_sizes": (2,) * len(parts),
        "parts": tuple(parts),
        "files": tuple(files),
    }
    writing.write_manifest(folder, Manifest(**{**facts, **changes}))
    return folder
