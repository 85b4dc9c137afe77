"""A synthetic island whose trainer waits for ever for a lock, once: a process that begins later in its data steps on.

The island of shard 1 hangs, the others are well. It answers all the while, for only its loop waits.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from learners.contract import StepResult
from learners.synthetic import SyntheticTrainer

HUNG_SHARD, HANGS_AT = 1, 60


def create(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> SyntheticTrainer:
    return HangingTrainer(spec, shard_index) if shard_index == HUNG_SHARD else SyntheticTrainer(spec, shard_index)


class HangingTrainer(SyntheticTrainer):
    def seek(self, cursor: int) -> None:
        super().seek(cursor)
        self._hangs = cursor < HANGS_AT

    def step(self, schedule_step: int) -> StepResult:
        if self._hangs and self.cursor() >= HANGS_AT:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        return super().step(schedule_step)
