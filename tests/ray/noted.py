"""Islands that note each batch that they train on, and nearly stand still from a step on while a test says so.

Whoever imports this module does so by the job's trainer.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from learners import jax_trainer
from learners.contract import StepResult
from learners.island_spec import Draw

BATCHES, GATE = "batches", "gate"
SLOW_STEP_S = 0.5  # an island that stood still would reach no boundary between steps to give its state at


def create(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> jax_trainer.JaxTrainer:
    """As ``jax_trainer.create``. What is noted lies beside the job's tokenizer: by then that folder is known to be there."""
    trainer = jax_trainer.create(spec, shard_index, shard_count)
    folder = Path(spec["data"]["tokenizer"]).parent
    trainer.__class__ = _Noting
    assert isinstance(trainer, _Noting)
    trainer.begin(folder, shard_index)
    return trainer


class _Noting(jax_trainer.JaxTrainer):
    def begin(self, folder: Path, shard_index: int) -> None:
        self._gate = folder / f"{GATE}-{shard_index}"
        self._notes = (folder / f"{BATCHES}-{shard_index}").open("a", buffering=1)
        make_draw = self._make_draw

        def noting(index: int) -> Draw:
            draw = make_draw(index)

            def draw_noted(number: int) -> np.ndarray:
                batch = draw(number)
                self._notes.write(f"{os.getpid()} {number} {digest(batch)}\n")
                return batch

            return draw_noted

        self._make_draw = noting

    def step(self, schedule_step: int) -> StepResult:
        goes_on_at = time.monotonic() + SLOW_STEP_S
        while schedule_step >= self._last_step() and time.monotonic() < goes_on_at:
            time.sleep(0.02)
        return super().step(schedule_step)

    def _last_step(self) -> float:
        """Where it becomes slow: what the gate's file says, and nowhere without one."""
        try:
            return int(self._gate.read_text())
        except FileNotFoundError:
            return math.inf


def digest(batch: np.ndarray) -> str:
    return blake2b(batch.tobytes(), digest_size=16).hexdigest()
