"""An island that nobody listens to ends itself in time, and not while somebody does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

from learners.step_watch import Watchdog
from tests.waiting import PATIENCE_S

PROGRAM = """
import os, sys
from learners.step_watch import Watchdog
Watchdog(1.5, lambda: os._exit(7), tick_s=0.05)
print("on watch", flush=True)
sys.stdin.read()
"""


def test_a_watchdog_that_is_reset_again_and_again_does_not_expire_and_one_that_is_not_does() -> None:
    expired = threading.Event()
    watchdog = Watchdog(1.5, expired.set, tick_s=0.02)
    for _ in range(40):
        assert not expired.wait(0.05)
        watchdog.reset()
    assert expired.wait(PATIENCE_S)


def test_a_process_that_was_stopped_for_long_does_not_take_that_for_silence() -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(process.pid, signal.SIGCONT)
        continued_at = time.monotonic()
        assert process.wait(PATIENCE_S) == 7
        assert time.monotonic() - continued_at >= 0.2
    finally:
        process.kill()
        process.communicate()
