"""The merged parameters Θ as a download: the file of an ended job, or a dump of what a running job has merged so far.

A follower asks for what is newer than the versions of the fragments that it holds (``orchestrator.host.records``).

The file is safetensors, with the job's specification (``spec``) in its metadata. A running job writes the dump into its
folder; it is unlinked at once, so that nothing stays behind however reading ends. Requests within ``KEEP_S`` share a dump,
so that any number of readers costs the job one write and the disk one file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import ge
from pathlib import Path
from threading import Lock, Timer
from typing import BinaryIO

from api.jobs.control import ControlPort
from api.jobs.service import Service
from api.run.folder import Run, open_below
from orchestrator.errors import AtollError, Conflict, InfrastructureError, NotFound, in_words
from orchestrator.host import records
from orchestrator.system.run_folder import PARAMETERS

Held = tuple[int, ...]
"""The version of each fragment that a follower holds, ``UNKNOWN`` for none; empty if it holds nothing."""
Key = tuple[str, Held | None]
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

    making: Lock
    parameters: OpenParameters | None = None
    made_at: float = float("-inf")


class Parameters:
    def __init__(self, service: Service, control: ControlPort) -> None:
        self._service, self._control = service, control
        self._dumps: dict[Key, Dump] = {}
        self._writing: dict[str, Lock] = {}
        self._changing = Lock()

    def open(self, job: str) -> OpenParameters:
        """Open the job's parameters. Raises NotFound if the job ended without any, Conflict if it has none yet."""
        run = self._service.run(job)
        try:
            return OpenParameters(run.job, self._service.result(run.job, PARAMETERS))
        except Conflict:  # it still runs
            return self._dumped(run, None)

    def updates(self, job: str, held: Held) -> Iterator[bytes] | OpenParameters | None:
        """Return what is newer than the versions held of each fragment; None if nothing is. Raises as ``open`` does."""
        run = self._service.run(job)
        try:
            final = self._service.result(run.job, PARAMETERS)
        except Conflict:  # it still runs
            pass
        else:
            return map(bytes, records.final_updates(final, held))
        current = [fragment.version for fragment in self._service.job(run.job).fragments]
        if current and len(held) == len(current) and all(map(ge, held, current)):
            return None
        return self._dumped(run, held)

    def _dumped(self, run: Run, held: Held | None) -> OpenParameters:
        key = run.job, held
        dump = self._dump(key)
        with dump.making, self._forgotten_on_failure(key):
            if dump.parameters is None or time.monotonic() - dump.made_at > KEEP_S:
                dump.parameters = None  # let the disk hold only one
                try:
                    dump.parameters = OpenParameters(run.job, self._written(run.job, run.folder, held))
                except NotFound:  # it ended meanwhile
                    if held is not None:
                        raise Conflict(detail=f"Job {run.job} is ending.", remedy="Repeat the request.") from None
                    return OpenParameters(run.job, self._service.result(run.job, PARAMETERS))
                dump.made_at = time.monotonic()
                timer = Timer(KEEP_S, self._let_go, [key, dump.parameters])
                timer.daemon = True
                timer.start()
            return dump.parameters

    @contextmanager
    def _forgotten_on_failure(self, key: Key) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with self._changing:
                self._dumps.pop(key, None)
            raise

    def _let_go(self, key: Key, parameters: OpenParameters) -> None:
        """Forget this dump. Its file is gone when its last reader closes it."""
        with self._changing:
            dump = self._dumps.get(key)
            if dump and dump.parameters is parameters:
                del self._dumps[key]

    def _written(self, job: str, folder: Path, held: Held | None) -> BinaryIO:
        """Return a new dump, open and unlinked. Raises InfrastructureError if writing it fails."""
        try:
            name = self._control.save_parameters(job, held)
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

    def _dump(self, key: Key) -> Dump:
        """Return the dump of this request. A job writes one of them at a time, whatever its readers hold."""
        with self._changing:
            making = self._writing.setdefault(key[0], Lock())
            return self._dumps.setdefault(key, Dump(making))
