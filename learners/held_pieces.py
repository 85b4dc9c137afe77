"""What one process of an island has of the pieces, and of the state that belongs to them, by what its trainer says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from learners.checkpointing import Needs
from learners.contract import HeldPart, SpreadTrainer, Trainer
from orchestrator.checkpoints.blocks import Window
from orchestrator.core.vocabulary import FragmentId
from orchestrator.parameters.holding import Holding
from orchestrator.parameters.parts import Bounds, whole
from orchestrator.parameters.pieces import piece_named
from orchestrator.parameters.roles import Shape

Names = tuple[str, ...]


class HeldPieces:
    """What of the pieces this process has, and which of that it offers: of what several have, the first of them does.

    ``pieces[p]`` are those of fragment p. ``rank`` is None where the island is one process, which has all and offers all.
    """

    def __init__(self, trainer: Trainer, pieces: Sequence[Names], rank: int | None) -> None:
        self._trainer, self._pieces, self._rank = trainer, tuple(pieces), rank
        self._shapes = trainer.tensor_shapes()
        self.holding = Holding()
        self.fragments = self.offered = self._pieces
        if rank is None:
            return
        spread = cast(SpreadTrainer, trainer)
        held = {name: spread.held(name) for names in pieces for name in names}
        parts: list[tuple[str, Bounds]] = []
        for name, own in sorted(held.items()):
            if own.bounds != whole(self._shape(name)):
                parts.append((name, own.bounds))
        self.holding = Holding(tuple(parts))
        there = {name for name, own in held.items() if not _is_empty(own)}
        self.fragments = tuple(tuple(name for name in names if name in there) for names in self._pieces)
        mine = {name for name in there if held[name].processes[0] == rank}
        self.offered = tuple(tuple(name for name in names if name in mine) for names in self._pieces)

    @property
    def is_whole(self) -> bool:
        """Whether this process has all of the model."""
        return not self.holding.parts

    def wanted(self, fragment: FragmentId) -> dict[str, Bounds] | None:
        """What of a state of this fragment is to lie here, by the names of its arrays; None for all of it."""
        if self.is_whole:
            return None
        held = cast(SpreadTrainer, self._trainer).held_state(self._pieces[fragment])
        return {name: own.bounds for name, own in held.items()}

    def needs(self) -> Needs:
        """What of a checkpoint is to lie here: of the state by whole tensors, in whatever pieces it was written."""
        bounds = self.holding.bounds()
        outer = [
            {name: Window(bounds.get(name, whole(self._shape(name))), self._shape(name)) for name in names}
            for names in self.fragments
        ]
        if self.is_whole:
            return Needs(outer=outer)
        held = cast(SpreadTrainer, self._trainer).held_state(self._shapes)
        return Needs({name: Window(own.bounds, own.shape) for name, own in held.items()}, outer)

    def _shape(self, piece: str) -> Shape:
        named = piece_named(piece)
        return named.shape(self._shapes[named.tensor])

    def gives(self, fragments: Iterable[int]) -> dict[str, Bounds] | None:
        """What of a state of what it offers of these fragments this process gives; None for all of it.

        Each block has one giver, so what belongs to a piece must lie like it.
        """
        if self.is_whole:
            return None
        held = cast(SpreadTrainer, self._trainer).held_state([name for p in fragments for name in self.offered[p]])
        return {name: own.bounds for name, own in held.items() if own.processes[0] == self._rank and not _is_empty(own)}


def _is_empty(part: HeldPart) -> bool:
    return any(start >= stop for start, stop in part.bounds)
