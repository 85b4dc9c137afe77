"""A control port whose jobs live by themselves: clockwork's world, advanced by a thread, its tape written as it happens.

A job of clockwork goes on, and writes its tape, only when somebody asks how it stands: right for tests that restart the
service. Here a job is one world that moves on ten times a second, as a page shows it, and dies with the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from orchestrator.core.commands import Command
from orchestrator.core.vocabulary import CommandId, JobPhase
from orchestrator.errors import InfrastructureError, NotFound
from orchestrator.specification.config import JobSpec
from orchestrator.specification.memory_budget import NodeMemory
from orchestrator.status import CertificateRecord, NodeGroupRecord, StatusDocument, UnseenFile
from orchestrator.tape.schema import Header
from orchestrator.tape.storage import TapeWriter
from tests.api.clockwork import leave_logs, leave_results
from tests.harness.carried import add_lines, add_steps
from tests.harness.simulated_job import GROUPS, SimulatedJob, Taken

BEAT_S = 0.1


HEAD_IS_DEAD = "head-is-dead"


def connect(home: Path) -> Live:
    return Live(home / HEAD_IS_DEAD)


class Live:
    """While the file ``dead`` exists no question is answered, and after that those asked meanwhile fail."""

    def __init__(self, dead: Path) -> None:
        self._dead = dead
        self._jobs: dict[str, Job] = {}

    def _ask_head(self) -> None:
        if self._dead.exists():
            while self._dead.exists():
                time.sleep(BEAT_S)
            raise InfrastructureError(detail="The head of the cluster was lost.")

    def node_groups(self) -> list[NodeGroupRecord]:
        self._ask_head()
        return GROUPS

    def cordon_nodes(self, names: Collection[str]) -> None:
        """Do nothing: nothing here is placed by node."""

    def unseen_files(self, groups: Collection[str], sizes: Mapping[str, int | None]) -> list[UnseenFile]:
        return []

    def begin(self, runs: Path) -> None:
        """Do nothing: there is one machine."""

    def delete_log(self, job_id: str) -> None:
        pass

    def has_store(self) -> bool:
        return False

    def has_log(self, job_id: str) -> bool:
        return False

    def sweep(self, runs: Path, is_known: Callable[[str], bool], *, again: bool) -> None:
        """Do nothing: there is one machine."""

    def node_memory(self) -> list[NodeMemory]:
        return []

    def certificates(self) -> list[CertificateRecord]:
        return []

    def start_job(self, job_id: str, spec: JobSpec, run_dir: Path, *about: Any) -> None:
        if job_id not in self._jobs:
            leave_logs(run_dir, spec)
            self._jobs[job_id] = Job(job_id, spec, run_dir)

    def status(self, job_id: str) -> StatusDocument:
        self._ask_head()
        return self._job(job_id).status()

    def submit(self, job_id: str, command_id: str, caller: str, command: Command) -> None:
        self._job(job_id).submit(CommandId(command_id), caller, command)

    def restart_job(self, job_id: str) -> str:
        raise NotFound(detail=f"No synchroniser of job {job_id} runs here.")

    def close(self) -> None:
        for job in self._jobs.values():
            job.stop()

    def _job(self, job_id: str) -> Job:
        if (job := self._jobs.get(job_id)) is None or job.over:
            raise NotFound(detail=f"No job {job_id} runs here.")
        return job


class Job:
    """One world, its thread and its tape."""

    def __init__(self, job_id: str, spec: JobSpec, run_dir: Path) -> None:
        self.over = False
        self._id = job_id
        self._run_dir = run_dir
        self._started_at = time.time()
        self._world = SimulatedJob(spec, [], 0.0)
        self._written = 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def status(self) -> StatusDocument:
        with self._lock:
            return self._status(time.time() - self._started_at)

    def submit(self, command: CommandId, caller: str, request: Command) -> None:
        with self._lock:
            if command not in self._world.commands:
                self._world.take(Taken(time.time() - self._started_at, command, caller, request))

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _live(self) -> None:
        header = Header(self._id, self._world.policy, self._started_at)
        with TapeWriter(self._run_dir / "tape.jsonl", header) as tape:
            while not self.over and not self._stopping.wait(BEAT_S):
                with self._lock:
                    self._beat(tape)

    def _beat(self, tape: TapeWriter) -> None:
        now = time.time() - self._started_at
        self._world.resume(now)
        for record in self._world.sink.records[self._written :]:
            tape.append(record)
        self._written = len(self._world.sink.records)
        if self._world.core.state.phase is JobPhase.FINISHED:
            leave_results(self._run_dir, self._id, self._world, self._status(now))
            self.over = True

    def _status(self, now: float) -> StatusDocument:
        status = self._world.status(self._id, self._started_at, now)
        add_lines(status)
        add_steps(status)
        return status
