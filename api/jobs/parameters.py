"""The merged parameters Θ as a download: the file of an ended job, or a dump of what a running job has merged so far.

The file is safetensors, with the job's specification (``spec``) in its metadata. A running job writes the dump into its
folder; it is unlinked at once, so that nothing stays behind however reading ends. Requests within ``KEEP_S`` share a dump,
so that any number of readers costs the job one write and the disk one file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Timer
from typing import BinaryIO

from api.jobs.control import ControlPort
from api.jobs.service import Service
from api.run.folder import open_below
from orchestrator.errors import AtollError, Conflict, InfrastructureError, NotFound, in_words
from orchestrator.system.run_folder import PARAMETERS

CHUNK_BYTES = 256 << 10
KEEP_S = 5.0


@dataclass(frozen=True, slots=True)
class OpenParameters:
    """An open file of parameters. ``job`` is the job's id, also for ``latest``. Several readers may share the file."""

    job: str
    file: BinaryIO

    @property
    def bytes_count(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def chunks(self) -> Iterator[bytes]:
        """Yield the whole file. It is closed when its last reader releases it."""
        at = 0
        while chunk := os.pread(self.file.fileno(), CHUNK_BYTES, at):
            at += len(chunk)
            yield chunk


@dataclass(slots=True)
class Dump:
    """The last dump of a job's parameters, and its time. One thread writes it; the others wait for it."""

    making: Lock = field(default_factory=Lock)
    parameters: OpenParameters | None = None
    made_at: float = float("-inf")


class Parameters:
    def __init__(self, service: Service, control: ControlPort) -> None:
        self._service, self._control = service, control
        self._dumps: dict[str, Dump] = {}
        self._changing = Lock()

    def open(self, job: str) -> OpenParameters:
        """Open the job's parameters. Raises NotFound if the job ended without any, Conflict if it has none yet."""
        run = self._service.run(job)
        try:
            return OpenParameters(run.job, self._service.result(run.job, PARAMETERS))
        except Conflict:  # it still runs
            pass
        dump = self._dump(run.job)
        with dump.making:
            if dump.parameters is None or time.monotonic() - dump.made_at > KEEP_S:
                dump.parameters = None  # let the disk hold only one
                try:
                    dump.parameters = OpenParameters(run.job, self._written(run.job, run.folder))
                except NotFound:  # it ended meanwhile
                    return OpenParameters(run.job, self._service.result(run.job, PARAMETERS))
                dump.made_at = time.monotonic()
                timer = Timer(KEEP_S, self._let_go, [run.job, dump.parameters])
                timer.daemon = True
                timer.start()
            return dump.parameters

    def _let_go(self, job: str, parameters: OpenParameters) -> None:
        """Forget this dump. Its file is gone when its last reader closes it."""
        with self._changing:
            dump = self._dumps.get(job)
            if dump and dump.parameters is parameters:
                del self._dumps[job]

    def _written(self, job: str, folder: Path) -> BinaryIO:
        """Return a new dump, open and unlinked. Raises InfrastructureError if writing it fails."""
        try:
            name = self._control.save_parameters(job)
            file = open_below(folder, name)
            (folder / name).unlink()
        except AtollError:
            raise
        except Exception as error:  # from the job's process
            detail = f"The parameters of job {job} could not be written into {folder}: {in_words(error)}."
            raise InfrastructureError(
                detail=detail, remedy="Check whether its disk is full. Training continues."
            ) from error
        return file

    def _dump(self, job: str) -> Dump:
        with self._changing:
            return self._dumps.setdefault(job, Dump())
