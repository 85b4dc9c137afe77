"""Two kinds of jobs over the regions' lines, watched alike: one held together by all-reduces, and one of the service.

A fleet tells when each region's steps ended, by the machine's clock, which all regions share. ``boundary`` waits for a
moment at which what one window counts can be told from what the next one does.
"""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from orchestrator.runtime.groups import NodeGroup
from tests.api.installation import ROOT
from tests.waiting import wait_until
from tests.wan.archipelago import Archipelago, WideJob
from tests.wan.diary import folder_of
from tests.wan.lab.plan import OURS, WINDOW_BYTES, Plan
from tests.wan.line import Line
from tests.wan.regions import Regions

SEED = secrets.randbelow(1 << 30)
"""Of every method: the same in one run, and no other's, for diaries go by it."""
STEPS_MAX = 10_000_000
PAUSE_S = 0.002


@dataclass(frozen=True, slots=True)
class Tokens:
    """Over all regions together, since the job began; ``merged`` are those that reached the common parameters."""

    trained: float
    merged: float


class Fleet(Protocol):
    method: str
    regions: Regions
    lines: Mapping[str, Line]
    hub: str | None

    def boundary(self, after: int) -> float:
        """Wait until the next moment between two windows, ``after`` exchanges from now. Return its time."""
        ...

    def steps(self, since: float, until: float) -> list[list[float]]:
        """The ends of each region's steps in that time."""
        ...

    def step_count(self, since: float, until: float) -> float:
        """Of a region, from boundary to boundary."""
        ...

    def tokens(self) -> Tokens: ...


class CollectiveFleet:
    """A process a region, in lock-step: rank 0's steps are everybody's."""

    hub: str | None = None

    def __init__(self, method: str, plan: Plan, regions: Regions, lines: Mapping[str, Line]) -> None:
        self.method, self.regions, self.lines = method, regions, lines
        self._plan = plan
        self._cycle = plan.interval_steps if method == "diloco" else 1
        self._ends: list[list[float]] = [[] for _ in plan.names]
        self._processes: list[subprocess.Popen[str]] = []
        self.losses: list[tuple[int, float, float]] = []

    def start(self, more: Mapping[str, Any]) -> None:
        plan, places = self._plan, self.regions.places
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115, what gloo says, for the error of a wait in vain
        for rank, name in enumerate(plan.names):
            setting = {
                "method": self.method,
                "rank": rank,
                "count": plan.regions,
                "address": places[name].address,
                "coordinator": places[plan.names[0]].address,
                "parameters": plan.parameters,
                "step_s": plan.step_s,
                "fragments": plan.fragments,
                "interval_steps": plan.interval_steps,
                "overlap_steps": plan.overlap_steps,
                "steps": STEPS_MAX,
                **more,
            }
            command = [*places[name].enter, "unshare", "--uts", sys.executable, "-m", "tests.wan.lab.collective"]
            process = subprocess.Popen(
                [*command, json.dumps(setting)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
            self._processes.append(process)
            threading.Thread(target=self._follow, args=(rank, process), daemon=True).start()

        def stepping() -> bool:
            if any(process.poll() is not None for process in self._processes):
                log.seek(0)
                raise RuntimeError(f"a process of {self.method} ended:\n{log.read()[-3000:]}")
            return bool(self._ends[0])

        wait_until(stepping, f"{self.method}'s first step")

    def boundary(self, after: int = 1) -> float:
        done = len(self._ends[0])
        wanted = (done // self._cycle + after) * self._cycle
        while len(self._ends[0]) < wanted:
            time.sleep(PAUSE_S)
            if self._processes[0].poll() is not None:
                raise RuntimeError(f"{self.method} ended in the middle")
        return self._ends[0][wanted - 1]

    def steps(self, since: float, until: float) -> list[list[float]]:
        return [[at for at in ends if since < at <= until] for ends in self._ends]

    def step_count(self, since: float, until: float) -> float:
        return float(sum(since < at <= until for at in self._ends[0]))  # the others' last words may be on their way

    def tokens(self) -> Tokens:
        trained = float(len(self._ends[0]) * self._plan.regions * self._plan.tokens_per_step)
        return Tokens(trained, trained)

    def wait(self) -> None:
        """Until its last step, and the losses behind it."""
        while not self.losses:
            time.sleep(0.1)
            if self._processes[0].poll() not in (None, 0):
                raise RuntimeError(f"{self.method} ended before its losses were known")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def _follow(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for row in process.stdout:
            if not row.startswith("{"):
                continue  # gloo greets
            line = json.loads(row)
            if "at" in line:
                self._ends[rank].append(line["at"])
            elif rank == 0 and line.get("losses"):
                self.losses = line["losses"]


class ServiceFleet:
    """A job of the service, its synchroniser in a region of its own, whose line is as wide as this machine."""

    def __init__(self, codec: str, plan: Plan, archipelago: Archipelago, lines: Mapping[str, Line]) -> None:
        self.method, self.regions, self.lines = OURS + codec, archipelago.regions, lines
        self.hub: str | None = archipelago.names[0]
        self._plan, self._archipelago, self._codec = plan, archipelago, codec
        self.job: WideJob | None = None

    def start(self, document: Mapping[str, Any]) -> None:
        with self._archipelago.client() as client:
            job = client.submit(document)
        self.job = WideJob(self._archipelago, job.job, document["seed"])
        for name in self._plan.names:
            self.job.wait_for_merge(name, 1)
        self._pids = {name: self.job.island(name)["pid"] for name in self._plan.names}

    def boundary(self, after: int = 1) -> float:
        """Any moment will do: nothing waits for anything. A fragment may take τ steps."""
        time.sleep(after * self._plan.step_s * self._plan.overlap_steps)
        return time.monotonic()

    def steps(self, since: float, until: float) -> list[list[float]]:
        assert self.job is not None
        ends = [self.job.diary(self._pids[name]).ends for name in self._plan.names]
        return [[at for at in one if since < at <= until] for one in ends]

    def step_count(self, since: float, until: float) -> float:
        return fmean(len(ends) for ends in self.steps(since, until))

    def tokens(self) -> Tokens:
        assert self.job is not None
        counted = self.job.status()["goodput"]["tokens"]
        return Tokens(counted["trained"], counted["merged"])

    def close(self) -> None:
        if self.job is None:
            return
        if not (self.job.run_dir / "status.json").exists():
            self.job.cancel()
        self.job.wait_for_end()
        self.job.close()


def lines_of(plan: Plan, megabits: float, round_trip_s: float, frame_loss_ratio: float = 0.0) -> dict[str, Line]:
    """The same for every region; half of a round trip's delay, and of the losses each way, is of one region's line."""
    return {name: Line(megabits * 1e6, round_trip_s / 4, frame_loss_ratio / 2) for name in plan.names}


def document(plan: Plan, codec: str) -> dict[str, Any]:
    """The job of the service."""
    return {
        "name": f"lab-{codec}",
        "seed": SEED,
        "trainer": "learners.synthetic:create",
        "islands": [{"node_group": name} for name in plan.names],
        "budget": {"steps": STEPS_MAX},
        "training": {"batch_size": plan.batch_size},
        "data": {"sequence_length": plan.sequence_length},
        "synthetic": {"step_s": plan.step_s, "parameters": plan.parameters},
        "evaluation": {"every_merges": 0},
        "synchroniser": {
            "fragments": plan.fragments,
            "interval_steps": plan.interval_steps,
            "overlap_steps": plan.overlap_steps,
            "wire": codec,
        },
    }


@contextmanager
def collective_fleet(method: str, plan: Plan, lines: Mapping[str, Line], **more: Any) -> Iterator[CollectiveFleet]:
    regions = Regions(plan.names, lines, WINDOW_BYTES)
    fleet = CollectiveFleet(method, plan, regions, lines)
    try:
        fleet.start(more)
        yield fleet
    finally:
        fleet.close()
        regions.close()


@contextmanager
def archipelago_of(plan: Plan, lines: Mapping[str, Line], folder: Path) -> Iterator[Archipelago]:
    groups = [NodeGroup(name=name, region=name) for name in plan.names]
    archipelago = Archipelago(folder, groups, lines, WINDOW_BYTES)
    try:
        archipelago.up()
        yield archipelago
    finally:
        archipelago.down()


@contextmanager
def service_fleet(
    codec: str,
    plan: Plan,
    archipelago: Archipelago,
    lines: Mapping[str, Line],
    made: Callable[[Plan, str], dict[str, Any]] = document,
) -> Iterator[ServiceFleet]:
    """Its job is over in the end; after a failure or Ctrl-C it ends with the archipelago."""
    fleet = ServiceFleet(codec, plan, archipelago, lines)
    try:
        fleet.start(made(plan, codec))
        yield fleet
        fleet.close()
    finally:
        shutil.rmtree(folder_of(SEED), ignore_errors=True)
