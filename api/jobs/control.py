"""The control port: a small protocol for what the service asks of whatever runs the jobs, so that ``api`` never meets Ray.

Responsible for the protocol; the plain data that crosses it is in ``orchestrator.actors.records``. It refuses to know how
jobs are run. ``orchestrator.runtime.control_port:connect`` is the implementation used by the service; ``api.serve``
loads it by its dotted name.

All methods may be called from several threads at once and must answer or fail within seconds. They raise
``NotFound`` for a job that is not running here, ``Conflict`` where the job is in no state for the request, and
``InfrastructureError`` when the cluster does not answer.

Source: ports and adapters (Cockburn, 2005).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from orchestrator.actors.records import NodeGroupRecord, StatusRecord
from orchestrator.core.commands import Command
from orchestrator.specification.config import JobSpec
from orchestrator.specification.memory_budget import NodeMemory
from orchestrator.system.roots import AllowedRoots


class ControlPort(Protocol):
    """Runs jobs. Every job it was given outlives the process that holds the port."""

    def node_groups(self) -> list[NodeGroupRecord]:
        """The node groups of the fleet, by name."""
        ...

    def node_memory(self) -> list[NodeMemory]:
        """What every node of the fleet has for processes, the head's own included; 0 where it does not say."""
        ...

    def start_job(
        self, job_id: str, spec: JobSpec, run_dir: Path, cordoned: Mapping[str, str], roots: AllowedRoots
    ) -> None:
        """From here on the job exists and runs by itself, and writes its tape and report under ``run_dir``.

        Files that its specification names it touches below ``roots`` only, for as long as it lives.

        ``cordoned`` says which node groups it places nothing on until it is told otherwise, and who cordoned each.
        Where ``run_dir`` holds the job's tape, and nothing of it runs, it goes on from there, with what it knew of cordons.
        Idempotent by ``job_id``. When it raises, nothing of the job is left running.
        """
        ...

    def status(self, job_id: str) -> StatusRecord:
        """The job as it stands. Raises NotFound when nothing of it runs here (any more)."""
        ...

    def submit(self, job_id: str, command_id: str, caller: str, command: Command) -> None:
        """Hand a command to the job; its outcome appears in ``status()["commands"]``. Idempotent by ``command_id``.

        Raises Conflict where the job's own build knows no such command; the job goes on.
        """
        ...

    def save_parameters(self, job_id: str) -> str:
        """Have the running job write Θ as it stands into its run folder; returns the file's name, for the caller to remove.

        Raises Conflict while there is no Θ yet. May take as long as the disk does.
        """
        ...

    def close(self) -> None:
        """Let go of the cluster. Jobs go on."""
        ...
