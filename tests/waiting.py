"""Waiting in tests: for what must become true, never for a time.

No test bounds the time that something takes, because the machine may be busy with something else. ``PATIENCE_S`` is
only there so that a wait which would never end names what it waited for, before pytest's own timeout ends the test.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from orchestrator.errors import InfrastructureError

PATIENCE_S = 300.0

Answer = TypeVar("Answer")


def wait_until(situation: Callable[[], Any], what: str = "this", pause_s: float = 0.05) -> Any:
    """Return what ``situation`` answers once that is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (answer := situation()):
        assert time.monotonic() < deadline, f"{what} did not become true within {PATIENCE_S:.0f} s"
        time.sleep(pause_s)
    return answer


def once_answered(ask: Callable[[], Answer], of: str = "", pause_s: float = 0.05) -> Answer:
    """Ask again while nobody answers in time: any process of a busy machine may stand still for longer than that.

    With ``of``, only a failure whose words contain this is taken for that.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except InfrastructureError as error:
            if of not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(pause_s)
