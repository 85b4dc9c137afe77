"""What trainers whose parameters are plain arrays in this process have in common: all but the inner step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from learners.contract import Arrays

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

    def snapshot(self, names: Iterable[str]) -> Copy:
        return Copy({name: self.parameters[name].copy() for name in names})

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.parameters.update({name: array.copy() for name, array in arrays.items()})

    def export_state(self, tensors: Iterable[str] | None = None) -> Copy:
        return self.snapshot(self.parameters if tensors is None else tensors)

    def import_state(self, state: Mapping[str, np.ndarray]) -> None:
        self.load(state)

    def cursor(self) -> int:
        return self._cursor

    def seek(self, cursor: int) -> None:
        self._cursor = cursor

    def unigram_loss(self) -> float:
        return 1.0
