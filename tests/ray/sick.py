"""A synthetic island that falls ill three times, each time in another way, and is well again in a new process.

Which illness: by how far its data had been read when the process began. The island of shard 1 is ill, the others are well.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np

from learners.contract import StepResult
from learners.synthetic import SyntheticTrainer
from orchestrator.parameters import wire_format
from orchestrator.parameters.wire_format import EncodedTensors

SICK_SHARD = 1
DIVERGES_AT, GARBLES_FROM, EXPLODES_AT = 40, 100, 170
_written = wire_format.written
_kinds = cycle(("flipped", "truncated", "oversized"))


def create(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> SyntheticTrainer:
    return SickTrainer(spec, shard_index) if shard_index == SICK_SHARD else SyntheticTrainer(spec, shard_index)


class SickTrainer(SyntheticTrainer):
    def seek(self, cursor: int) -> None:
        super().seek(cursor)
        self._began_at = cursor

    def step(self, schedule_step: int) -> StepResult:
        result = super().step(schedule_step)
        read = self.cursor()
        if self._began_at < DIVERGES_AT == read:
            name = min(self._parameters)
            self._parameters[name] = np.where(np.arange(8) == 3, np.float32(np.nan), self._parameters[name])
        elif DIVERGES_AT <= self._began_at < GARBLES_FROM == read:
            wire_format.written = _garbled  # the bytes of its offers, on their way
        elif GARBLES_FROM <= self._began_at < EXPLODES_AT == read:
            self._parameters = {name: array * np.float32(1e6) for name, array in self._parameters.items()}
        return result


def _garbled(content: EncodedTensors) -> memoryview:
    """With a bit flipped, cut short, or with a tail, in turn."""
    payload = bytearray(_written(content))
    kind = next(_kinds)
    if kind == "flipped":
        payload[len(payload) // 2] ^= 0x10
    spoilt = payload[:-9] if kind == "truncated" else payload + payload if kind == "oversized" else payload
    return memoryview(spoilt)
