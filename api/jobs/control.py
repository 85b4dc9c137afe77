"""The control port: the protocol between the service and what runs the jobs, so that ``api`` never imports Ray.

The data that crosses it is in ``orchestrator.status``. The service uses the implementation
``orchestrator.runtime.control_port:connect``; ``api.serve`` loads it by its dotted name.

All methods may be called from several threads at once, and must answer or fail within seconds. They raise ``NotFound`` for a
job that is not running here, ``Conflict`` if the job's state does not allow the request, and ``InfrastructureError`` if the
cluster does not answer.

Source: ports and adapters (Cockburn, 2005).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from orchestrator.core.commands import Command, Upgrade
from orchestrator.core.vocabulary import Life
from orchestrator.specification.config import JobSpec
from orchestrator.specification.memory_budget import NodeMemory
from orchestrator.status import CertificateRecord, NodeGroupRecord, StatusDocument, UnseenFile
from orchestrator.system.roots import AllowedRoots


class ControlPort(Protocol):
    """Runs jobs. Jobs outlive the process that holds the port."""

    def node_groups(self) -> list[NodeGroupRecord]:
        """Return the node groups of the fleet, by name."""
        ...

    def cordon_nodes(self, names: Collection[str]) -> None:
        """Place nothing new on the nodes of machines of these names, and only on these. What runs there continues."""
        ...

    def node_memory(self) -> list[NodeMemory]:
        """Return the memory for processes of every node, the head included; 0 if a node does not report it."""
        ...

    def certificates(self) -> list[CertificateRecord]:
        """Return the certificates that the cluster depends on; none if it works without TLS."""
        ...

    def unseen_files(self, groups: Collection[str], sizes: Mapping[str, int | None]) -> list[UnseenFile]:
        """Return which nodes of the groups do not see these files with these sizes (None: any size).

        Nodes that do not answer are left out.
        """
        ...

    def has_store(self) -> bool:
        """Return whether the service was started with a store for the durable logs of mirrored jobs."""
        ...

    def delete_log(self, job_id: str) -> None:
        """Remove what the store has of an ended job, if there is a store. Idempotent.

        Raises InfrastructureError if the store does not do it.
        """
        ...

    def begin(self, runs: Path) -> None:
        """The service reads and writes its jobs' folders below ``runs``. Called once, before anything is asked of jobs.

        Where the jobs' processes do not see that folder, what they write appears in it nevertheless.
        """
        ...

    def sweep(self, runs: Path, is_known: Callable[[str], bool], *, again: bool) -> None:
        """Remove what islands of unknown jobs left below ``runs`` on machines that do not share that folder.

        A machine is swept when its node joins, or with ``again`` once more; one that does not answer, at a later call.
        """
        ...

    def start_job(
        self,
        job_id: str,
        spec: JobSpec,
        run_dir: Path,
        cordoned: Mapping[str, str],
        roots: AllowedRoots,
        last_known: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Start the job. It then runs by itself and writes its tape and report under ``run_dir``. Idempotent by ``job_id``.

        The job uses files of its specification only below ``roots``. It places nothing on ``cordoned`` node groups (with who
        cordoned each) until a command says otherwise. If ``run_dir`` holds the job's tape and the job does not run, it
        resumes from there, with the cordons that it knew. ``last_known`` is what the service last knew of a job that
        has run: a store that has nothing of it was emptied, and a release before its ``build`` does not continue it. If this
        raises, nothing of the job is left running.
        """
        ...

    def has_log(self, job_id: str) -> bool:
        """Return whether the store has the log of a mirrored job. Raises LogStoreUnavailable while that is unknown."""
        ...

    def status(self, job_id: str) -> StatusDocument:
        """Return the status of a job, which may be of another build, as JSON data. Raises NotFound if it does not run."""
        ...

    def submit(self, job_id: str, command_id: str, caller: str, command: Command) -> None:
        """Hand a command to the job; its outcome appears among the commands of its status. Idempotent by ``command_id``.

        Raises Conflict if the job's own build does not know the command; the job continues.
        """
        ...

    def restart_job(self, job_id: str) -> str:
        """End the process of the job's synchroniser, even one that hangs, so that a new one continues from its files.

        Return what was ended. Raises NotFound if there is no such process, and InfrastructureError if the process could not
        be reached.
        """
        ...

    def upgrade_of(self, job_id: str, spec: JobSpec, run_dir: Path) -> Upgrade:
        """Return the command that upgrades the running job to the release of this process, which has tried that.

        Raises Conflict with the reason if that is not possible. May take as long as a replay of the job's tape.
        """
        ...

    def save_parameters(self, job_id: str, held: Sequence[int] | None = None) -> str:
        """Make the running job write its current Θ into its run folder, and return the file's name. The caller removes it.

        With ``held``, versions of the fragments, the file has what is newer (``host.records``). Raises Conflict while there
        is no Θ yet. May take as long as the disk does.
        """
        ...

    def profile(self, job_id: str, life: Life, profile: str, steps: int | None) -> Mapping[str, Any]:
        """Begin to record a trace of an island's inner steps under this name, with None say how far it is, or cancel it
        with ``commands.CANCEL_PROFILE``.

        Returns the fields of ``actors.ProfileRecord``. Idempotent by name. Raises NotFound if this incarnation is gone or
        knows no such trace, and Conflict if it records another one or its trainer has no profiler.
        """
        ...

    def read_profile(self, job_id: str, life: Life, profile: str, start: int, stop: int) -> bytes:
        """Return bytes of the complete trace, a zip; fewer than requested if they are many. Raises as ``profile`` does."""
        ...

    def close(self) -> None:
        """Disconnect from the cluster. Jobs continue."""
        ...
