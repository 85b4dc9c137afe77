"""A process that takes an island's state from it, as a peer does that comes back: ``python -m tests.bench.peer HOME ACTOR``.

For each line of its input, a number of seconds, it asks for the whole state again and again for so long, and answers with a
line of JSON: how long each took. The first answer, before any question, is that of one state, with which all is connected.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import perf_counter

from orchestrator.runtime import cluster

TRANSFER_TIMEOUT_S = 60.0


def main(home: Path, actor: str) -> None:
    cluster.join(home)
    _answer([_take(actor)])
    for line in sys.stdin:
        until, took = perf_counter() + float(line), []
        while perf_counter() < until:
            took.append(_take(actor))
        _answer(took)
    cluster.leave()


def _take(actor: str) -> float:
    import ray

    began = perf_counter()
    donor = cluster.actor_named(actor)
    assert donor is not None, f"there is no {actor}"
    state = ray.get(donor.export_state.remote(None), timeout=TRANSFER_TIMEOUT_S)
    assert state["trainer"], "an empty state"
    return perf_counter() - began


def _answer(took: list[float]) -> None:
    print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
