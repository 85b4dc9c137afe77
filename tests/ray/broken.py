"""Trainers of somebody's own whose code is wrong, each in its own way."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from learners.contract import StepResult
from learners.synthetic import SyntheticTrainer

RED = "\x1b[31m"


class Unsendable(Exception):
    """Pickle cannot carry it to another process."""

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.work = lambda: said


def exits(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> SyntheticTrainer:
    sys.exit(f"{RED}no licence for this machine")


def raises(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> SyntheticTrainer:
    raise Unsendable("the layers do not fit\nand here is much that nobody reads")


def is_killed(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> SyntheticTrainer:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def returns_nothing(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> None:
    return None


def fails_at_step_five(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> SyntheticTrainer:
    return Failing(spec, shard_index)


def fails_alone(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> SyntheticTrainer:
    return Failing(spec, shard_index) if shard_index == 1 else SyntheticTrainer(spec, shard_index)


def exits_at_step_five(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> SyntheticTrainer:
    return Exiting(spec, shard_index)


def exits_in_evaluator(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> SyntheticTrainer:
    return Unmeasured(spec, shard_index)


class Failing(SyntheticTrainer):
    def step(self, schedule_step: int) -> StepResult:
        if self.cursor() == 5:
            raise Unsendable(f"{RED}the batch is ragged")
        return super().step(schedule_step)


class Exiting(SyntheticTrainer):
    def step(self, schedule_step: int) -> StepResult:
        if self.cursor() == 5:
            sys.exit(3)
        return super().step(schedule_step)


class Unmeasured(SyntheticTrainer):
    def tensor_shapes(self) -> Any:
        sys.exit(f"{RED}no table")
