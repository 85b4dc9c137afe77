"""Synthetic islands that keep a diary: a line for each inner step, so that what an island did does not rest on its word.

    trainer     a synthetic island that notes each step in a file of its process, by the machine's monotonic clock
    connect     a control port to real Ray that makes its jobs of synthetic islands of such ones

All regions are on one machine, so all diaries have one clock, and can be read from outside while lines are cut.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learners.contract import StepResult
from learners.synthetic import SyntheticTrainer
from orchestrator.runtime import control_port
from orchestrator.specification.config import JobSpec
from orchestrator.specification.training_sections import TrainerSection


class DiaryTrainer(SyntheticTrainer):
    def __init__(self, spec: Mapping[str, Any], shard_index: int, shard_count: int) -> None:
        super().__init__(spec, shard_index, shard_count)
        path = diary_of(spec["seed"], os.getpid())
        path.parent.mkdir(exist_ok=True)
        self._diary = path.open("a", buffering=1)

    def step(self, schedule_step: int) -> StepResult:
        cursor = self.cursor()
        result = super().step(schedule_step)
        self._diary.write(f"{time.monotonic()} {cursor}\n")
        return result


def create(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> DiaryTrainer:
    return DiaryTrainer(spec, shard_index, shard_count)


def folder_of(seed: int) -> Path:
    """Jobs are told apart by their seed, which the test draws."""
    return Path(tempfile.gettempdir()) / f"atoll-diaries-{seed}"


def diary_of(seed: int, pid: int) -> Path:
    return folder_of(seed) / str(pid)


class Diary:
    """The steps of one process: when each ended, and where in its shard it read."""

    def __init__(self, seed: int, pid: int) -> None:
        lines = [line.split() for line in diary_of(seed, pid).read_text().splitlines(keepends=True) if line[-1] == "\n"]
        self.ends = [float(at) for at, _ in lines]
        self.cursors = [int(cursor) for _, cursor in lines]

    def count(self, since: float, until: float = math.inf) -> int:
        return sum(since < at <= until for at in self.ends)


class DiaryKeeping(control_port.RayControlPort):
    def start_job(self, job_id: str, spec: JobSpec, *arguments: Any, **more: Any) -> None:
        if spec.trainer.is_synthetic:
            spec = spec.model_copy(update={"trainer": TrainerSection(factory=f"{__name__}:create")})
        super().start_job(job_id, spec, *arguments, **more)


def connect(home: Path) -> DiaryKeeping:
    control_port.connect(home)
    return DiaryKeeping()
