"""A process that takes an island's state from it, as a peer does that comes back: ``python -m tests.bench.peer HOME ACTOR``.

Each line of its input is two numbers, seconds: for the first of them it asks for the whole state, not sooner than the second
after it asked last, and answers with a line of JSON: how long each took. The first answer, before any question, is that of
one state, with which all is connected.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from time import perf_counter

from orchestrator.actors.island import IslandInterface
from orchestrator.runtime import cluster

TRANSFER_TIMEOUT_S = 60.0


def main(home: Path, actor: str) -> None:
    cluster.join(home)
    _answer([_take(actor)])
    for line in sys.stdin:
        seconds, every_s = map(float, line.split())
        until, took = perf_counter() + seconds, []
        while (began := perf_counter()) < until:
            took.append(_take(actor))
            time.sleep(max(0.0, every_s - (perf_counter() - began)))
        _answer(took)
    cluster.leave()


def _take(actor: str) -> float:
    import ray

    began = perf_counter()
    donor = cluster.actor_named(actor)
    assert donor is not None, f"there is no {actor}"
    state = ray.get(donor.call(IslandInterface.export_state, None), timeout=TRANSFER_TIMEOUT_S)
    assert state["trainer"], "an empty state"
    return perf_counter() - began


def _answer(took: list[float]) -> None:
    print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
