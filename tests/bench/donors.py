"""The cost of giving a state for the steps of the donor: the same island while it gives states and while it does not, in
turn.

A job of one real island (nano) runs on a real service. In every other stretch a process on another node takes its whole
state (``peer``): first as often as an island that is killed again and again would ask for it, which is judged, and then
back to back, which shows the cost of one state. No other island trains, none is killed or started, and the donor is
fixed, so nothing but the giving distinguishes the stretches. In exchange, the island has more of this machine's cores
than one of four would have. ``given`` shows the effect on donors in jobs with kills.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from api.client import Client
from api.installation.up import Installation
from orchestrator.core.vocabulary import Incarnation, IslandId
from orchestrator.runtime.settings import island_name
from tests.bench import given
from tests.bench.goals import Goal, at_most
from tests.bench.options import Options
from tests.bench.service import end, service, step_seconds, stretches, wait, with_and_without
from tests.ray.jobs import EVERY_GROUP

RATIO_GOAL = 1.05
STRETCH_S, SMALL_STRETCH_S = 15.0, 5.0
BACK_EVERY_S = 4.4  # from a SIGKILL to the first merge of who comes back, by the bench of recovery
DONOR = EVERY_GROUP[0]
FRAGMENTS = 8


def main(asked: Options) -> list[Goal]:
    with service() as (client, installation):
        goal = measure(client, installation, SMALL_STRETCH_S if asked.small else STRETCH_S)
        for donors in () if asked.small else (1, 2):
            given.show(f"40 MB, {donors} at most", given.measure(client, installation, donors))
    return [goal]


def measure(client: Client, installation: Installation, stretch_s: float) -> Goal:
    job = client.submit(document()).job
    wait(lambda: client.job(job).islands_training == 1, "it trains")
    with Peer(installation.home.path, island_name(job, IslandId(DONOR), Incarnation(1))) as peer:
        now_and_then = stretches(client, job, stretch_s, lambda: peer.take_for(stretch_s, BACK_EVERY_S))
        peer.took.clear()
        all_the_time = stretches(client, job, stretch_s, lambda: peer.take_for(stretch_s, 0.0))
        end(client, job)
    giving, alone = with_and_without(step_seconds(installation.runs / job, now_and_then, [DONOR]))
    goal = at_most("donors' step ratio", giving / alone, RATIO_GOAL)
    print(
        f"donors     step {1000 * giving:.1f} ms while it gives a state every {BACK_EVERY_S} s, {1000 * alone:.1f} ms ",
        end="",
    )
    print(f"otherwise: ratio {goal.value:.3f} ({goal})")
    giving, alone = with_and_without(step_seconds(installation.runs / job, all_the_time, [DONOR]))
    took = 1000 * sum(peer.took) / len(peer.took)
    cost = took * (1 - alone / giving)  # what a state adds to the steps taken meanwhile
    print(
        f"           back to back: ratio {giving / alone:.3f} ({len(peer.took)} states of nano in {took:.0f} ms each, ",
        end="",
    )
    print(f"at {cost:.1f} ms; no goal)")
    return goal


def document() -> dict[str, object]:
    """Return a job of one island of the demo's model that does not end by itself."""
    return {
        "name": "donor",
        "model": {"preset": "nano", "compute_dtype": "float32"},
        "synchroniser": {"fragments": FRAGMENTS},
        "islands": [{"node_group": DONOR}],
        "budget": {"steps": 10_000_000},
        "evaluation": {"every_merges": 0, "sequences": 4},
    }


class Peer:
    """The process of ``tests.bench.peer``. ``took`` has the seconds of every state that it got in a stretch."""

    def __init__(self, home: Path, actor: str) -> None:
        command = [sys.executable, "-m", "tests.bench.peer", str(home), actor, str(FRAGMENTS)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.took: list[float] = []

    def __enter__(self) -> Peer:
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def take_for(self, seconds: float, every_s: float) -> None:
        assert self._process.stdin is not None
        print(seconds, every_s, file=self._process.stdin, flush=True)
        self.took += self._answer()

    def _answer(self) -> list[float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the peer has ended with {self._process.wait()}"
        answer: list[float] = json.loads(line)
        return answer
