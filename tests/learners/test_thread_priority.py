"""An island lowers the priority of the threads that it started for itself, and of no others in its process."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from learners.outbox import TRAINING_NICENESS, lower_priority, lower_priority_of_new, thread_ids

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="niceness is of a whole process elsewhere")


LOWEST = 19


def niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def test_a_thread_that_lowers_its_priority_once_ready_does_so_for_all_it_started_and_no_others() -> None:
    initial, seen = niceness(0), {}
    lower = max(initial, TRAINING_NICENESS)
    with ThreadPoolExecutor(1) as other:
        seen["other"] = other.submit(threading.get_native_id).result()

        def prepare() -> None:
            before = thread_ids()
            with ThreadPoolExecutor(1) as pool:
                seen["pool"], seen["own"] = pool.submit(threading.get_native_id).result(), threading.get_native_id()
                at_first = niceness(seen["pool"])
                lower_priority_of_new(before)
                seen["niceness"] = (at_first, niceness(seen["pool"]), niceness(seen["own"]), niceness(seen["other"]))

        preparing = threading.Thread(target=prepare)
        preparing.start()
        preparing.join()
    assert seen["niceness"] == (initial, lower, lower, initial)
    assert niceness(0) == initial


def test_a_priority_that_is_low_already_is_not_lowered() -> None:
    initial, lowered = niceness(0), []

    def twice() -> None:
        os.nice(TRAINING_NICENESS + 5)
        lower_priority()
        lowered.append(niceness(0))

    thread = threading.Thread(target=twice)
    thread.start()
    thread.join()
    assert lowered == [min(LOWEST, initial + TRAINING_NICENESS + 5)]
