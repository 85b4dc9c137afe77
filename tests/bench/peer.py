"""A process that takes an island's state from it, as a recovering peer does.

    python -m tests.bench.peer HOME ACTOR FRAGMENT_COUNT

It asks for one fragment after the other and pulls each by the job's channel, which is not encrypted on loopback.

Each line of its input is two numbers of seconds. For the first, it takes the whole state again and again, not sooner than
the second after the last request, and then answers with a line of JSON: how long each took. Before any input it takes one
state, which connects everything, and answers with its time.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from time import perf_counter

from learners.plain_arrays import restored
from orchestrator.actors import IslandInterface
from orchestrator.channel.client import ChannelClient
from orchestrator.channel.frames import Ticket
from orchestrator.core.vocabulary import Epoch
from orchestrator.runtime import cluster

TRANSFER_TIMEOUT_S = 60.0
SUBJECT = "bench:peer"


def main(home: Path, actor: str, fragment_count: int) -> None:
    cluster.join(home)
    client = ChannelClient(SUBJECT)
    _answer([_take(client, actor, fragment_count)])
    for line in sys.stdin:
        seconds, every_s = map(float, line.split())
        until, took = perf_counter() + seconds, []
        while (began := perf_counter()) < until:
            took.append(_take(client, actor, fragment_count))
            time.sleep(max(0.0, every_s - (perf_counter() - began)))
        _answer(took)
    client.close()
    cluster.leave()


def _take(client: ChannelClient, actor: str, fragment_count: int) -> float:
    import ray

    began = perf_counter()
    donor = cluster.actor_named(actor)
    assert donor is not None, f"there is no {actor}"
    for fragment in range(fragment_count):
        call = donor.call(IslandInterface.export_state, Epoch(1), fragment, SUBJECT, False)
        reply = ray.get(call, timeout=TRANSFER_TIMEOUT_S)
        carried = reply["content"]
        is_pulled = isinstance(carried, Ticket)
        assert restored(reply["table"], client.pull(carried) if is_pulled else carried.data), "an empty fragment"
        if is_pulled:
            donor.call(IslandInterface.release_state, carried.payload)
    return perf_counter() - began


def _answer(took: list[float]) -> None:
    print(json.dumps(took), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
