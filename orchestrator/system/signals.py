"""Signals that ask a command to end, raised as exceptions at moments when it can still end what it has started.

    with as_exceptions():                   SIGINT raises KeyboardInterrupt, SIGTERM and SIGHUP raise SystemExit(128 + n)
        with held():                        no exception between the start of a process and the assignment to its name
            process = subprocess.Popen(…)
        …                                   the clean-up is not interrupted: after the first signal all are ignored

A request by a file: ``Listener`` and ``ask_to_leave``. A process of Ray runs no handlers of Python for signals, because its
main thread is never in Python.

Responsible for commands that start processes (``atoll up``, ``atoll demo``, the embedded cluster) leaving none behind when
a user, a closing terminal, ``timeout`` or a batch system ends them. Leaves the clean-up itself to its callers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
SIGNALLED = 128
"""Shells report a command that a signal ended by this number plus the signal's."""


class _Ending:
    """The state of ``as_exceptions`` in this process. Only the main thread uses it, because only that gets signals."""

    held_count = 0
    pending: int | None = None


_state = _Ending()


@contextmanager
def as_exceptions() -> Iterator[None]:
    """Raise the first signal of ``ENDING`` in this block as an exception, and ignore those that follow.

    A signal that was ignored before, as SIGHUP is under ``nohup``, stays ignored. Does nothing in other threads than the
    main one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    _state.pending = None
    for number in _not_ignored():
        signal.signal(number, _on_signal)
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def held() -> Iterator[None]:
    """Delay the exception of a signal to the end of this block. It replaces an exception of the block itself."""
    _state.held_count += 1
    try:
        yield
    finally:
        _state.held_count -= 1
        if _state.pending is not None and not _state.held_count:
            _raise(_state.pending)


@contextmanager
def ignored() -> Iterator[None]:
    """Ignore the signals of ``ENDING`` in this block and in the processes that it starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        _restore(before)


def block() -> None:
    """Block the signals of ``ENDING`` in this process, and in those that it starts: for ``preexec_fn`` of a child.

    Slurm, a pod and a service manager send SIGTERM to every process at once, and a closing terminal SIGHUP. Processes
    that leave only after work was handed over must not hear it: their parent does, and ends them by SIGKILL.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def end_with_parent() -> None:
    """Have the kernel end this process by SIGKILL when its parent's thread ends: for ``preexec_fn`` of a child.

    A parent that is killed cannot end its children itself. Does nothing where the kernel is not Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _on_signal(number: int, _frame: FrameType | None) -> None:
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    if _state.held_count:
        _state.pending = number
    else:
        _raise(number)


def _raise(number: int) -> None:
    _state.pending = None
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(SIGNALLED + number)


def _not_ignored() -> list[signal.Signals]:
    return [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]


def _restore(before: Mapping[signal.Signals, Any]) -> None:
    for number, handler in before.items():
        if handler is not None:  # of one that C code has set
            signal.signal(number, handler)


LEFT_STATES_VARIABLE = "ATOLL_LEFT_STATES"
"""In the environment of a node's processes: the folder in which islands leave their states as the node ends."""
LOOK_S = 0.2
_REQUEST, _LISTENS = "leave", ".listens"


class Listener:
    """A process that leaves its state in ``folder`` when that is asked for. It is listed there until it has."""

    def __init__(self, folder: Path, leave: Callable[[], None]) -> None:
        """Listen in a thread from now on. Raises OSError if the folder cannot be written."""
        self._folder, self._leave = folder, leave
        self._mark = folder / f"{os.getpid()}{_LISTENS}"
        self._mark.touch(0o600)
        threading.Thread(target=self._run, name="leave-listener", daemon=True).start()

    def _run(self) -> None:
        while not (self._folder / _REQUEST).exists():
            time.sleep(LOOK_S)
        try:
            self._leave()
        finally:
            with suppress(OSError):
                self._mark.unlink()


def ask_to_leave(folder: Path, timeout_s: float) -> list[int]:
    """Ask the processes that listen in this folder to leave their states, and wait until they have, or have ended.

    Returns those that have not after ``timeout_s``; at once if the folder cannot be written.
    """
    until, request = time.monotonic() + timeout_s, folder / _REQUEST
    try:
        request.touch(0o600)
    except OSError:
        return _listening(folder)
    while (pending := _listening(folder)) and time.monotonic() < until:
        time.sleep(LOOK_S)
    request.unlink()
    for mark in folder.glob(f"*{_LISTENS}"):
        mark.unlink(missing_ok=True)
    return pending


def left_label(owner: str) -> str:
    """Return the label of a node whose machine has a state that ``JOB.ISLAND`` left. Labels are short, names need not be."""
    return f"atoll-left-{blake2b(owner.encode(), digest_size=8).hexdigest()}"


def left_labels(folder: Path) -> dict[str, str]:
    """Return the labels of the states in this folder, each of which is called ``JOB.ISLAND.INCARNATION``."""
    owners = (path.name.rpartition(".")[0] for path in folder.glob("*.*") if path.is_dir())
    return {left_label(owner): "1" for owner in owners if owner}


def _listening(folder: Path) -> list[int]:
    """Return the processes that listen and live."""
    import psutil  # late: every command imports this module

    listed, alive = [int(mark.name.removesuffix(_LISTENS)) for mark in folder.glob(f"*{_LISTENS}")], []
    for pid in listed:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
    return alive
