"""A shard's orders: in order for one fragment, at once for several, and nothing beside what concerns all."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from orchestrator.core.vocabulary import FragmentId
from orchestrator.host.job_context import MergePool
from tests.waiting import PATIENCE_S

A, B = FragmentId(0), FragmentId(1)


def test_orders_for_one_fragment_are_carried_out_in_their_order_and_those_for_all_alone() -> None:
    pool, done = MergePool(), list[tuple[str, int]]()
    running: set[tuple[str, int]] = set()
    lock = threading.Lock()

    def order(kind: str, number: int) -> Callable[[], None]:
        def work() -> None:
            with lock:
                assert kind != "all" or not running
                assert not any(other in ("all", kind) for other, _ in running)
                running.add((kind, number))
            time.sleep(chance.random() * 0.002)
            with lock:
                running.discard((kind, number))
                done.append((kind, number))

        return work

    chance, futures = random.Random(3), list[Future[Any]]()
    asked: list[tuple[str, int]] = []
    for number in range(300):
        kind = chance.choice(["a", "a", "b", "b", "all"])
        asked.append((kind, number))
        work = order(kind, number)
        futures.append(pool.submit_alone(work) if kind == "all" else pool.submit(A if kind == "a" else B, work))
    assert not wait(futures, PATIENCE_S).not_done
    for future in futures:
        future.result()
    for kind in ("a", "b", "all"):
        assert [one for one in done if one[0] in (kind, "all")] == [one for one in asked if one[0] in (kind, "all")]
    pool.close()


def test_different_fragments_are_merged_at_once() -> None:
    pool, both = MergePool(), threading.Barrier(2)
    futures = [pool.submit(fragment, lambda: both.wait(PATIENCE_S)) for fragment in (A, B)]
    assert sorted(future.result(PATIENCE_S) for future in futures) == [0, 1]
    pool.close()


def test_what_failed_does_not_hold_up_what_comes_behind_it() -> None:
    pool = MergePool()
    first = pool.submit(A, lambda: 1 / 0)
    assert pool.submit(A, lambda: 7).result(PATIENCE_S) == 7
    assert pool.submit_alone(lambda: 8).result(PATIENCE_S) == 8
    assert isinstance(first.exception(), ZeroDivisionError)
    pool.close()
