"""The merged parameters Θ as a download: what an ended job left, or a dump of what a running one has merged so far.

Responsible for an open file of safetensors, whose metadata holds the job's specification (``spec``), the model's
configuration with it. A running job writes the dump into its folder; its name is taken away at once, so that nothing
stays behind however the reading ends. Whoever asks within ``KEEP_S`` reads the same dump: however many ask, the job
writes one, and the disk bears one for as long as somebody reads it. Refuses to know what is in it.
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
from api.run.files import open_below
from orchestrator.errors import AtollError, Conflict, InfrastructureError, NotFound, in_words
from orchestrator.system.run_folder import PARAMETERS

CHUNK_BYTES = 256 << 10
KEEP_S = 5.0


@dataclass(frozen=True, slots=True)
class OpenParameters:
    """``job`` is the job's own id, also where ``latest`` was asked for. Several may read of the same file."""

    job: str
    file: BinaryIO

    @property
    def bytes_count(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def chunks(self) -> Iterator[bytes]:
        """All of it. The file is closed when the last of its readers has let go of it."""
        at = 0
        while chunk := os.pread(self.file.fileno(), CHUNK_BYTES, at):
            at += len(chunk)
            yield chunk


@dataclass(slots=True)
class Dump:
    """The last dump of one job's parameters, and since when it is there. One thread makes it; the others wait for it."""

    making: Lock = field(default_factory=Lock)
    parameters: OpenParameters | None = None
    made_at: float = float("-inf")


class Parameters:
    def __init__(self, service: Service, control: ControlPort) -> None:
        self._service, self._control = service, control
        self._dumps: dict[str, Dump] = {}
        self._changing = Lock()

    def open(self, job: str) -> OpenParameters:
        """Raises NotFound for a job that ended and left none, Conflict for one that has none yet."""
        run = self._service.run(job)
        try:
            return OpenParameters(run.job, self._service.result(run.job, PARAMETERS))
        except Conflict:  # it still runs
            pass
        dump = self._dump(run.job)
        with dump.making:
            if dump.parameters is None or time.monotonic() - dump.made_at > KEEP_S:
                dump.parameters = None  # the disk need not bear two
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
        """Nobody new reads this dump. Its file is gone with the last of those who still do."""
        with self._changing:
            dump = self._dumps.get(job)
            if dump and dump.parameters is parameters:
                del self._dumps[job]

    def _written(self, job: str, folder: Path) -> BinaryIO:
        """A new dump, open, and without a name. Raises InfrastructureError where the disk refuses it."""
        try:
            name = self._control.save_parameters(job)
            file = open_below(folder, name)
            (folder / name).unlink()
        except AtollError:
            raise
        except Exception as error:  # of the job's process, or of what writes the file there
            detail = f"The parameters of job {job} could not be written into {folder}: {in_words(error)}."
            raise InfrastructureError(
                detail=detail, remedy="See whether its disk is full; training goes on."
            ) from error
        return file

    def _dump(self, job: str) -> Dump:
        with self._changing:
            return self._dumps.setdefault(job, Dump())
