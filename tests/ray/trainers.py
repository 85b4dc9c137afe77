"""Synthetic islands in which something goes wrong: one takes seconds to hand over its state, one hangs once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from learners.contract import Arrays, HostCopy, StepResult
from learners.synthetic import SyntheticTrainer

HANDING_OVER_S = 2.0
HUNG_SHARD, HANGS_AT = 1, 60


def create_slow_donor(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> SyntheticTrainer:
    """Return a trainer whose state takes seconds to be handed over, so that a donor can be caught in the act."""
    return SlowDonor(spec, shard_index)


def create_hanging(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> SyntheticTrainer:
    """Return a trainer that, in the island of shard 1, waits for ever for a lock, once: a process that begins later in
    its data steps on. The island answers all the while, because only its loop waits.
    """
    return HangingTrainer(spec, shard_index) if shard_index == HUNG_SHARD else SyntheticTrainer(spec, shard_index)


class SlowCopy(HostCopy):
    def arrays(self) -> Arrays:
        time.sleep(HANDING_OVER_S)
        return super().arrays()


class SlowDonor(SyntheticTrainer):
    def export_state(self, tensors: Iterable[str] | None = None) -> HostCopy:
        return SlowCopy(super().export_state(tensors).arrays())


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
