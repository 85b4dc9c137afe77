"""The planted regression: islands that wait for the dead, as islands do whose every step needs everybody.

    trainer     a synthetic island that is heard by all others ten times a second, and does not step while one that was
                heard before is silent, up to a patience, as collectives have a timeout
    connect     a control port to real Ray that makes jobs of the name ``waiting`` of such islands

Nothing is faked: the processes stand still, their own clocks measure it, and the judge reads it off the tape.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learners.contract import StepResult
from learners.synthetic import SyntheticTrainer
from orchestrator.runtime import control_port
from orchestrator.specification.config import JobSpec
from orchestrator.specification.training_sections import TrainerSection

NAME = "waiting"
HEARD_EVERY_S = 0.1
SILENT_S = 1.0
"""Beyond what a busy machine keeps a thread from its turn."""
PATIENCE_S = 15.0
"""Longer than a busy machine keeps a process from its turn, so that who waits is told from who does not."""


class WaitingTrainer(SyntheticTrainer):
    """``folder`` holds a file for each island that trains, touched as long as its process runs."""

    def __init__(self, spec: Mapping[str, Any], shard_index: int, folder: Path) -> None:
        super().__init__(spec, shard_index)
        self._folder, self._own = folder, folder / str(shard_index)
        self._heard = False
        self._given_up: set[str] = set()

    def step(self, schedule_step: int) -> StepResult:
        if not self._heard:
            self._heard = True
            threading.Thread(target=self._be_heard, name="be-heard", daemon=True).start()
        self._wait_for_all()
        return super().step(schedule_step)

    def _be_heard(self) -> None:
        self._folder.mkdir(exist_ok=True)
        while True:
            self._own.touch()
            time.sleep(HEARD_EVERY_S)

    def _wait_for_all(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while waited_for := self._silent() - self._given_up:
            if time.monotonic() > deadline:
                self._given_up |= waited_for
                return
            time.sleep(0.02)
        self._given_up &= self._silent()

    def _silent(self) -> set[str]:
        now = time.time()
        return {path.name for path in self._folder.glob("*") if now - path.stat().st_mtime > SILENT_S}


def create(spec: Mapping[str, Any], shard_index: int, shard_count: int) -> WaitingTrainer:
    """Jobs are told apart by their seed, which the test draws."""
    return WaitingTrainer(spec, shard_index, Path(tempfile.gettempdir()) / f"atoll-waiting-{spec['seed']}")


class Planting(control_port.RayControlPort):
    def start_job(self, job_id: str, spec: JobSpec, *arguments: Any, **more: Any) -> None:
        if spec.name == NAME:
            spec = spec.model_copy(update={"trainer": TrainerSection(factory=f"{__name__}:create")})
        super().start_job(job_id, spec, *arguments, **more)


def connect(home: Path) -> Planting:
    control_port.connect(home)
    return Planting()
