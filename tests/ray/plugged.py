"""Processes of a job that wait as long as a test needs to catch them in the act: before they write a file of a checkpoint,
an island before it says that it has started, and before it hands its state over, and the one that measures before that. And
islands that count their steps in a file that a test reads.

Whoever imports this module does so: islands by their trainer, the synchroniser by its class.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from learners import synthetic
from learners.contract import Arrays, HeldOutLoss, HostCopy, StepResult
from orchestrator.checkpoints.folder import Folder
from orchestrator.runtime import synchroniser_actor

PLUGS = Path(tempfile.gettempdir()) / "atoll-plugs"


WARM_UP, HAND_OVER, MEASURE, BEGIN = "warm-up", "hand-over", "measure", "begin"
"""Acts of an island. Another process may measure, and give the parameters that a job begins with."""


def create(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> synthetic.SyntheticTrainer:
    return PluggedTrainer(spec, shard_index, shard_count)


def act(seed: int, name: str) -> Path:
    """What to plug for an act of all islands of the job with this seed: no file is there."""
    return Path(f"{name}-{seed}")


def steps_of(pid: int) -> Path:
    """What to plug for an island's process to count its steps: a byte each of the plug, from then on."""
    return Path(f"steps-{pid}")


class PluggedCopy(HostCopy):
    def __init__(self, arrays: Arrays, seed: int) -> None:
        super().__init__(arrays)
        self._job_seed = seed

    def arrays(self) -> Arrays:
        _wait(act(self._job_seed, HAND_OVER))
        return super().arrays()


class PluggedTrainer(synthetic.SyntheticTrainer):
    def __init__(self, spec: Mapping[str, Any], shard_index: int, shard_count: int) -> None:
        super().__init__(spec, shard_index, shard_count)
        self._job_seed = spec["seed"]
        self._counted = plug_of(steps_of(os.getpid()))

    def initial_parameters(self, pieces: Iterable[str] | None = None) -> Arrays:
        _wait(act(self._job_seed, BEGIN))
        return super().initial_parameters(pieces)

    def step(self, schedule_step: int) -> StepResult:
        result = super().step(schedule_step)
        with suppress(FileNotFoundError):
            counter = os.open(self._counted, os.O_WRONLY | os.O_APPEND)
            os.write(counter, b".")
            os.close(counter)
        return result

    def warm_up(self) -> None:
        _wait(act(self._job_seed, WARM_UP))
        super().warm_up()

    def export_state(self, tensors: Iterable[str] | None = None) -> PluggedCopy:
        return PluggedCopy(super().export_state(tensors).arrays(), self._job_seed)

    def evaluate(self, arrays: Mapping[str, np.ndarray], limit_s: float = math.inf) -> HeldOutLoss:
        _wait(act(self._job_seed, MEASURE))
        return super().evaluate(arrays, limit_s)


class SynchroniserActor(synchroniser_actor.SynchroniserActor):
    """A synchroniser, in a process that has imported this module; processes are found by the class's name."""


def plug_of(path: Path) -> Path:
    """The file that exists while the writer of the file at ``path`` waits."""
    return PLUGS / blake2b(str(path).encode(), digest_size=16).hexdigest()


def _wait(path: Path) -> None:
    while plug_of(path).exists():
        time.sleep(0.02)


def _patient(
    write_all: Callable[[Folder, str, Iterable[bytes]], None],
) -> Callable[[Folder, str, Iterable[bytes]], None]:
    def write(folder: Folder, name: str, chunks: Iterable[bytes]) -> None:
        if folder.local is not None:
            _wait(folder.local / name)
        write_all(folder, name, chunks)

    return write


Folder.write_all = _patient(Folder.write_all)  # type: ignore[method-assign]
