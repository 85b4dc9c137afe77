"""Who gives way: what an island started for itself, and nobody else in its process."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from learners.niceness import TRAINING_NICENESS, give_way, give_way_since, threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="niceness is of a whole process elsewhere")


LOWEST = 19


def niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def test_who_gives_way_once_ready_takes_all_threads_along_that_it_started_and_no_others() -> None:
    usual, told = niceness(0), {}
    lower = max(usual, TRAINING_NICENESS)
    with ThreadPoolExecutor(1) as other:
        told["other"] = other.submit(threading.get_native_id).result()

        def prepare() -> None:
            before = threads()
            with ThreadPoolExecutor(1) as pool:
                told["pool"], told["own"] = pool.submit(threading.get_native_id).result(), threading.get_native_id()
                hurried = niceness(told["pool"])
                give_way_since(before)
                told["niceness"] = (hurried, niceness(told["pool"]), niceness(told["own"]), niceness(told["other"]))

        preparing = threading.Thread(target=prepare)
        preparing.start()
        preparing.join()
    assert told["niceness"] == (usual, lower, lower, usual)
    assert niceness(0) == usual


def test_who_gives_way_already_goes_no_lower() -> None:
    usual, told = niceness(0), []

    def twice() -> None:
        os.nice(TRAINING_NICENESS + 5)
        give_way()
        told.append(niceness(0))

    thread = threading.Thread(target=twice)
    thread.start()
    thread.join()
    assert told == [min(LOWEST, usual + TRAINING_NICENESS + 5)]
