"""Θ for whoever wants it: what an ended job left, or a picture of what a running one has merged so far.

Responsible for an open file of safetensors, whose metadata holds the job's specification (``spec``), the model's
configuration with it. A running job writes the picture into its folder for this one reading; its name is taken away at
once, so that nothing stays behind however the reading ends. Refuses to know what is in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from api.jobs.control import ControlPort
from api.jobs.service import Service
from api.run.files import open_below
from orchestrator.errors import Conflict, InfrastructureError, NotFound

MERGED = "merged.safetensors"
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class OpenParameters:
    """``job`` is the job's own id, also where ``latest`` was asked for."""

    job: str
    file: BinaryIO

    @property
    def bytes_count(self) -> int:
        return os.fstat(self.file.fileno()).st_size

    def chunks(self) -> Iterator[bytes]:
        """All of it; the file is closed after."""
        with self.file:
            while chunk := self.file.read(CHUNK_BYTES):
                yield chunk


class Parameters:
    def __init__(self, service: Service, control: ControlPort) -> None:
        self._service, self._control = service, control

    def open(self, job: str) -> OpenParameters:
        """Raises NotFound for a job that ended and left none, Conflict for one that has none yet."""
        run = self._service.run(job)
        try:
            return OpenParameters(run.job, self._service.result(run.job, MERGED))
        except Conflict:  # it still runs
            pass
        try:
            name = self._control.save_parameters(run.job)
        except NotFound:  # it ended meanwhile
            return OpenParameters(run.job, self._service.result(run.job, MERGED))
        try:
            file = open_below(run.folder, name)
            (run.folder / name).unlink()
        except OSError as error:
            detail = f"The picture of job {run.job}, {name}, cannot be read: {error.strerror}."
            raise InfrastructureError(detail=detail, remedy="Ask again.") from error
        return OpenParameters(run.job, file)
