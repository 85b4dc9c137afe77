"""A synthetic trainer of one process of an island whose tensors lie on several hosts."""

from __future__ import annotations

import numpy as np

from learners import synthetic
from learners.contract import HeldPart, HostCopy


class Sliced(synthetic.SyntheticTrainer):
    """Of every tensor each process has its share of the rows; what it computes of the others nobody asks for.

    Its state has a moment besides, which lies like the parameters.
    """

    def __init__(self, spec, rank: int, size: int) -> None:
        super().__init__(spec, 0, 2)
        self._rank, self._size = rank, size
        self.moments = {name: np.full(shape, len(name), np.float16) for name, shape in self._shapes.items()}

    def held(self, piece: str) -> HeldPart:
        rows, columns = self._shapes[piece]
        bounds = (rows * self._rank // self._size, rows * (self._rank + 1) // self._size)
        return HeldPart((bounds, (0, columns)), (self._rank,))

    def rows(self, piece: str) -> slice:
        return slice(*self.held(piece).bounds[0])

    def snapshot(self, pieces):
        return HostCopy({name: array[self.rows(name)] for name, array in super().snapshot(pieces).arrays().items()})

    def export_state(self, pieces=None):
        names = self._shapes if pieces is None else pieces
        moments = {f"moment/{name}": self.moments[name][self.rows(name)] for name in names}
        return HostCopy({**self.snapshot(names).arrays(), **moments, "steps": np.array(self._steps)})

    def held_state(self, pieces):
        held = {name: self.held(name) for name in pieces}
        moments = {f"moment/{name}": part for name, part in held.items()}
        return {**held, **moments, "steps": HeldPart((), tuple(range(self._size)))}

    def import_state(self, state) -> None:
        self.load({name: state[name] for name in self._shapes})
        for name, array in self._wide(
            {name: state[f"moment/{name}"] for name in self._shapes}, self.moments.get
        ).items():
            self.moments[name] = array
        self._steps = int(state["steps"])

    def _wide(self, arrays, fill):
        wide = {name: fill(name) for name in arrays}
        for name, array in arrays.items():
            wide[name][self.rows(name)] = array if len(array) < self._shapes[name][0] else array[self.rows(name)]
        return wide

    def load(self, arrays) -> None:
        super().load(self._wide(arrays, lambda name: self._parameters[name].copy()))

    def add(self, arrays) -> None:
        super().add(self._wide(arrays, lambda name: np.zeros(self._shapes[name], np.float32)))
