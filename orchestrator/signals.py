"""Signals that ask a command to end, turned into exceptions at a moment when it can end what it has started.

    with as_exceptions():                   SIGINT raises KeyboardInterrupt, SIGTERM and SIGHUP raise SystemExit(128 + n)
        with held():                        no exception comes between a process and the name that it is kept under
            process = subprocess.Popen(…)
        …                                   whoever tidies up is not interrupted: after the first signal all are ignored

Responsible for each command that starts processes (``atoll up``, ``atoll demo``, the embedded cluster) leaving none behind,
whoever ends it: a user, a terminal that closes, ``timeout``, a batch system. It does not know what there is to tidy up.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SIGNALLED = 128
"""Added to the signal's number, it is the exit code that shells show for a command ended by a signal."""


class _Ending:
    """What ``as_exceptions`` has for this process, whose main thread alone gets signals."""

    held_count = 0
    pending: int | None = None


_state = _Ending()


@contextmanager
def as_exceptions() -> Iterator[None]:
    """In this block the first signal of ``ENDING`` is an exception, and those that follow are ignored.

    A signal that is ignored already, as SIGHUP is under ``nohup``, stays so. Other threads than the main one get no signals.
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
    """A signal that comes in this block is raised behind it, in the place of an exception of the block."""
    _state.held_count += 1
    try:
        yield
    finally:
        _state.held_count -= 1
        if _state.pending is not None and not _state.held_count:
            _raise(_state.pending)


@contextmanager
def ignored() -> Iterator[None]:
    """No signal of ``ENDING`` interrupts this block, nor the processes that it starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        _restore(before)


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
