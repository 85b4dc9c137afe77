"""Traces of an island's inner steps, recorded while it trains, for ``atoll profile``.

    begin ─▶ waiting ─boundary─▶ recording ─boundary after the last step─▶ packing ─▶ a zip, which the service reads
                └──────────cancelled──────┴─boundary─▶ no trace

The loop starts and stops the profiler at its boundaries, so a trace has whole steps. It stands still meanwhile, and
``stalled_s`` says how long. The files are packed in another thread.

A recording is bounded in steps, seconds and bytes, and the process drops it when no byte of it was read for ``KEPT_S``.
Nothing here ends training: whatever fails becomes the ``problem`` of the recording. The zip is a file without a name, so a
process that is killed leaves nothing. Only between the profiler's writing and the packing do files have names; the next
recording on that machine removes those of a process that was killed meanwhile.

Sources: ``jax.profiler``, whose files TensorBoard, XProf and Perfetto open; ``torch.profiler``, for the last.
"""

from __future__ import annotations

import fcntl
import logging
import secrets
import shutil
import socket
import tempfile
import threading
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import IO, Any, Protocol

from learners.contract import Trainer
from orchestrator.actors import ProfileRecord
from orchestrator.core.commands import CANCEL_PROFILE
from orchestrator.errors import Conflict, NotFound, in_words, is_interrupt

log = logging.getLogger(__name__)

SECONDS_MAX = 120.0
"""A recording ends at the first boundary after this time, with the steps that it has."""
FILES_BYTES_MAX, ZIP_BYTES_MAX = 2 << 30, 256 << 20
"""The profiler's files as they are, and packed."""
KEPT_S = 600.0
"""How long a complete recording waits for its reader, who may fetch it over a slow line: for the first byte or the next."""
WINDOW_BYTES_MAX = 8 << 20
FOLDER, LOCK = "atoll-profile-", "lock"


class Trace(Protocol):
    """A profiler of this process. The loop's thread calls its methods, between two steps."""

    def start(self, folder: Path) -> None: ...

    def step(self, number: int) -> None:
        """Mark in the trace that this step begins, and that the one before has ended."""
        ...

    def stop(self, folder: Path) -> None:
        """End the recording and write its files below ``folder``."""
        ...


STEP = "inner step"
"""The name of each step's mark in a trace."""


class JaxTrace:
    """Leaves out the calls of Python's functions, which would make a trace many times as large and steps slower."""

    def __init__(self) -> None:
        self._marked: Any = None

    def start(self, folder: Path) -> None:
        import jax

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        jax.profiler.start_trace(str(folder), profiler_options=options)

    def step(self, number: int) -> None:
        import jax

        self._end_step()
        self._marked = jax.profiler.StepTraceAnnotation(STEP, step_num=number)
        self._marked.__enter__()

    def stop(self, folder: Path) -> None:
        import jax

        self._end_step()
        jax.profiler.stop_trace()

    def _end_step(self) -> None:
        if self._marked is not None:
            self._marked.__exit__(None, None, None)
            self._marked = None


class TorchTrace:
    """Marks steps itself: PyTorch's profiler marks those of a schedule only."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._marked: Any = None

    def start(self, folder: Path) -> None:
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def step(self, number: int) -> None:
        import torch

        self._end_step()
        self._marked = torch.profiler.record_function(STEP, str(number))
        self._marked.__enter__()

    def stop(self, folder: Path) -> None:
        self._end_step()
        self._profile.stop()
        folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(folder / f"{socket.gethostname()}.pt.trace.json.gz"))

    def _end_step(self) -> None:
        if self._marked is not None:
            self._marked.__exit__(None, None, None)
            self._marked = None


TRACES: dict[str, Callable[[], Trace]] = {"jax": JaxTrace, "torch": TorchTrace}
"""The profilers by what a trainer's attribute ``profiler`` says (``contract.ProfiledTrainer``)."""


class Profiler:
    """Makes one recording at a time. Any thread calls ``state`` and ``read``; the loop's thread calls ``boundary``."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._lock = threading.Lock()
        self._latest: Recording | None = None

    def state(self, profile: str, steps: int | None) -> ProfileRecord:
        """Return how far the recording of this name is. With ``steps``, begin it if it is not known, or cancel
        it with ``CANCEL_PROFILE``.

        Raises NotFound for an unknown one; Conflict if another is being recorded, or this trainer has no profiler.
        """
        with self._lock:
            latest = self._latest
            if latest is None or latest.name != profile:
                if not steps:
                    raise _unknown(profile)
                if latest is not None and latest.is_active and latest.is_cancelled:
                    raise Conflict(
                        detail="The trace that was recorded before is being cancelled.",
                        remedy="Repeat the command after the island's next step.",
                    )
                if latest is not None and latest.is_active:
                    raise Conflict(
                        detail=f"Another trace of this island is being recorded, {latest.steps_taken} of {latest.steps} "
                        "steps so far.",
                        remedy="Wait for its end.",
                    )
                if latest is not None:
                    latest.drop()
                latest = self._latest = Recording(profile, steps, self._trace())
            elif steps == CANCEL_PROFILE:
                latest.cancel()
            return latest.record()

    def read(self, profile: str, start: int, stop: int) -> bytes:
        """Return these bytes of the zip. Raises NotFound if there is none of this name (any more)."""
        with self._lock:
            latest = self._latest
        if latest is None or latest.name != profile:
            raise _unknown(profile)
        return latest.read(start, min(stop, start + WINDOW_BYTES_MAX))

    def boundary(self, *, steps: bool) -> None:
        """Start or stop what is due. ``steps``: an inner step follows."""
        if (latest := self._latest) is not None and latest.is_active:
            latest.boundary(steps=steps)

    def _trace(self) -> Trace:
        kind = getattr(self._trainer, "profiler", None)
        if kind not in TRACES:
            name = type(self._trainer).__name__
            raise Conflict(
                detail=f"The trainer of this island ({name}) has no profiler.",
                remedy=f"A trainer of your own names one as its attribute `profiler`: {' or '.join(map(repr, TRACES))}.",
            )
        return TRACES[kind]()


CANCELLED = "It was cancelled."


class Recording:
    """One trace: ``steps_taken`` of ``steps`` are in it so far."""

    def __init__(self, name: str, steps: int, trace: Trace) -> None:
        self.name, self.steps, self.steps_taken = name, steps, 0
        self._trace = trace
        self._folder = Path(tempfile.gettempdir()) / f"{FOLDER}{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._began: float | None = None
        self._seconds = self._stalled_s = 0.0
        self._zip: IO[bytes] | None = None
        self._byte_count: int | None = None
        self._read_at = 0.0
        self._problem = ""
        self.is_cancelled = False
        self.is_active = True
        """Until the loop has nothing more to do with it."""

    def record(self) -> ProfileRecord:
        return ProfileRecord(
            profile=self.name,
            steps=self.steps,
            steps_taken=self.steps_taken,
            seconds=self._seconds,
            stalled_s=self._stalled_s,
            byte_count=self._byte_count,
            problem=self._problem,
        )

    def boundary(self, *, steps: bool) -> None:
        """Start at the first boundary that a step follows; end after the last step, or if no step follows."""
        entered = monotonic()
        try:
            if self.is_cancelled:
                if self._began is not None:
                    self._write().close()
                    shutil.rmtree(self._folder, ignore_errors=True)
                self._end(CANCELLED)
                return
            if self._began is None:
                if not steps:
                    self._end("The island stopped training before a step could be recorded.")
                    return
                self._trace.start(self._folder / "trace")
                self._began = monotonic()
                self._stalled_s += self._began - entered
            else:
                self.steps_taken += 1
            if self.steps_taken == self.steps or not steps or entered - self._began > SECONDS_MAX:
                self._seconds = entered - self._began
                self._stop()
                self._stalled_s += monotonic() - entered
            else:
                self._trace.step(self.steps_taken)
        except BaseException as error:  # a profiler that fails must not end training
            if is_interrupt(error):
                raise
            log.warning("the trace of this island's steps has failed: %s", in_words(error))
            shutil.rmtree(self._folder, ignore_errors=True)
            self._end(f"The profiler failed: {in_words(error)}")

    def cancel(self) -> None:
        """End without a trace: at the next boundary, or now if the trace is complete."""
        self.is_cancelled = True
        self.drop(CANCELLED)

    def _write(self) -> IO[str]:
        """End the recording and write the profiler's files. Return their lock, which the caller closes."""
        _remove_abandoned(self._folder.parent)
        self._folder.mkdir(mode=0o700)
        lock = (self._folder / LOCK).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._trace.stop(self._folder / "trace")
        except BaseException:
            lock.close()
            raise
        return lock

    def _stop(self) -> None:
        lock = self._write()
        self.is_active = False
        threading.Thread(target=self._pack, args=(lock,), name="profile", daemon=True).start()

    def _pack(self, lock: IO[str]) -> None:
        """Put the profiler's files into one zip without a name, and remove them."""
        packed: IO[bytes] | None = None
        problem, byte_count = "", 0
        try:
            packed, byte_count = _packed(self._folder / "trace")
        except Exception as error:  # a full disk, for example
            problem = in_words(error)
        shutil.rmtree(self._folder, ignore_errors=True)
        lock.close()
        if packed is None:
            log.warning("the trace of this island's steps is not kept: %s", problem)
            self._end(problem)
            return
        with self._lock:
            self._zip, self._byte_count, self._read_at = packed, byte_count, monotonic()
        if self.is_cancelled:  # meanwhile
            self.drop(CANCELLED)
            return
        log.info("recorded a trace of %d steps, %d bytes", self.steps_taken, byte_count)
        self._drop_after(KEPT_S)

    def _drop_after(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._drop_unread)
        timer.daemon = True
        timer.start()

    def _drop_unread(self) -> None:
        if (left := self._read_at + KEPT_S - monotonic()) > 0.0:
            self._drop_after(left)
        else:
            self.drop()

    def _end(self, problem: str) -> None:
        self._problem, self.is_active = problem, False

    def read(self, start: int, stop: int) -> bytes:
        with self._lock:
            if self._zip is None:
                raise _unknown(self.name)
            self._read_at = monotonic()
            self._zip.seek(start)
            return self._zip.read(max(0, stop - start))

    def drop(self, problem: str = "The trace was not fetched in time, and the island has dropped it.") -> None:
        """Forget the zip. Its bytes are gone with it."""
        with self._lock:
            if self._zip is not None:
                self._zip.close()
                self._zip, self._byte_count = None, None
                self._problem = problem


def _packed(folder: Path) -> tuple[IO[bytes], int]:
    """Return the folder's files as a zip, and its size. Raises Conflict if that is too large, and OSError."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    size = sum(path.stat().st_size for path in files)
    if not files:
        raise Conflict(detail="The profiler wrote no file.", remedy="See the island's log (`atoll logs JOB ISLAND`).")
    if size <= FILES_BYTES_MAX:
        packed = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                for path in files:
                    kind = zipfile.ZIP_STORED if path.suffix == ".gz" else zipfile.ZIP_DEFLATED
                    archive.write(path, path.relative_to(folder), kind)
            size = packed.seek(0, 2)
        except BaseException:
            packed.close()
            raise
        if size <= ZIP_BYTES_MAX:
            return packed, size
        packed.close()
    raise Conflict(
        detail=f"The trace has {size:,} bytes, more than an island keeps ({ZIP_BYTES_MAX:,} packed).",
        remedy="Record fewer steps.",
    )


def _remove_abandoned(temporary: Path) -> None:
    """Remove the folders of processes that were killed while they held a trace's files."""
    for folder in temporary.glob(f"{FOLDER}*"):
        with suppress(OSError), (folder / LOCK).open("r+") as lock:  # another user's, or just removed
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _unknown(profile: str) -> NotFound:
    return NotFound(
        detail=f"This process of the island knows no trace {profile!r}.",
        remedy="Its process was replaced since, or the trace was dropped. Record another.",
    )
