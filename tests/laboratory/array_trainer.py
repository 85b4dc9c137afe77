"""What trainers whose parameters are plain arrays in this process have in common: all but the inner step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from learners.contract import Arrays
from orchestrator.parameters.pieces import BY_NAME, Roles, piece_named, taken

TOKENS = 32


class Copy:
    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def arrays(self) -> Arrays:
        return self._arrays


class ArrayTrainer:
    """A ``learners.contract.Trainer`` but for ``step``, ``evaluate`` and what it begins from."""

    device_count = 1

    def __init__(self, shard: int, parameters: Arrays) -> None:
        self.parameters = parameters
        self._shard = shard
        self._cursor = 0

    def warm_up(self) -> None:
        """There is nothing to compile."""

    def roles(self) -> Roles:
        return BY_NAME

    def snapshot(self, pieces: Iterable[str]) -> Copy:
        return Copy({name: part.copy() for name, part in taken(self.parameters, pieces).items()})

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            piece = piece_named(name)
            self.parameters[piece.tensor] = np.array(self.parameters[piece.tensor])
            self.parameters[piece.tensor][piece.index] = array

    def add(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.load({name: part + arrays[name] for name, part in taken(self.parameters, arrays).items()})

    def export_state(self, pieces: Iterable[str] | None = None) -> Copy:
        return self.snapshot(self.parameters if pieces is None else pieces)

    def import_state(self, state: Mapping[str, np.ndarray]) -> None:
        self.load(state)

    def cursor(self) -> int:
        return self._cursor

    def seek(self, cursor: int) -> None:
        self._cursor = cursor

    def unigram_loss(self) -> float:
        return 1.0
