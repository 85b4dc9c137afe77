"""Two processes of an installation are killed at the same moment: which, and how long until its job merges again.

    python -m tests.ray.killed_pairs [SEED [KIND ...]]     every pair once, in an order that the seed draws; or these at once

Responsible for a live installation with one job, for finding the processes of each kind, and for one strike: both are
killed, ``atoll up`` is run, the job merges, and every island trains. Refuses to judge how long that may take: the test
has no bound on wall time, and this prints what it saw.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from api.schemas import Job as JobSeen
from orchestrator.core import events as e
from orchestrator.errors import AtollError
from orchestrator.runtime import processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.settings import CONTROL_GROUP, NODE_MARKER
from tests.api.installation import Installation
from tests.ray.jobs import GrowingTape, synthetic
from tests.waiting import wait_until

GROUPS = ("us-east", "europe", "asia")
ENDLESS = 10**9
SEED = 27
PAUSE_S = 0.1


def _ray_process(name: str, node: str | None = None) -> Callable[[Campaign], list[int]]:
    """Processes of this program; on the control node, on a node group's, or anywhere."""

    def find(campaign: Campaign) -> list[int]:
        return [p.pid for p in campaign.marked(node) if _name(p) == name]

    return find


def _actor(kind: str) -> Callable[[Campaign], list[int]]:
    def find(campaign: Campaign) -> list[int]:
        return [p.pid for p in campaign.marked(None) if _title(p).startswith(f"ray::{kind}")]

    return find


def _agents(campaign: Campaign) -> list[int]:
    """Ray's own agents of nodes: a raylet ends when one of its two does."""
    return [p.pid for p in campaign.marked(None) if "orchestrator.runtime.idle_agent" in _title(p)]


def _service(campaign: Campaign) -> list[int]:
    address = campaign.home.address()
    return [address.pid] if address is not None else []


KINDS: MappingProxyType[str, Callable[[Any], list[int]]] = MappingProxyType(
    {
        "head": _ray_process("gcs_server"),
        "head-raylet": _ray_process("raylet", CONTROL_GROUP),
        "node-raylet": _ray_process("raylet", ""),
        "service": _service,
        "synchroniser": _actor("SynchroniserActor"),
        "controller": _actor("Controller"),
        "evaluator": _actor("Evaluator"),
        "island": _actor("Island"),
        "node-agent": _actor("NodeAgent"),
        "ray-agent": _agents,
    }
)
"""How the processes of each kind are found."""
PAIRS: tuple[tuple[str, str], ...] = (*combinations(KINDS, 2), ("island", "island"), ("node-raylet", "node-raylet"))


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from the return of ``atoll up``: until the first merge that was decided after it, and until all train."""

    up_s: float
    merge_s: float
    whole_s: float
    epoch: int


class Campaign(Installation):
    """One cluster and one job, struck again and again."""

    def __init__(self, folder: Path, seed: int = SEED) -> None:
        super().__init__(folder)
        self.chance = random.Random(seed)
        self.job = ""
        self._tape = GrowingTape(Path())

    def begin(self) -> None:
        groups = self.folder / "groups.yaml"
        nodes = ", ".join(f"{{name: {name}, region: {name}, cpus: 4}}" for name in GROUPS)
        groups.write_text(f"node_groups: [{nodes}]\n")
        self.atoll("up", "--runs", str(self.runs), "--groups", str(groups))
        recovery = {"restarts_max": 1000, "backoff_max_s": 5.0}
        with self.client() as client:
            self.job = client.submit(synthetic(ENDLESS, GROUPS, recovery=recovery)).job
        self._tape = GrowingTape(self.runs / self.job / "tape.jsonl")
        self.wait_until_whole()
        wait_until(self.merges, "a merge", PAUSE_S)

    def strike(self, pair: Sequence[str]) -> Recovery:
        """Kill one process of each kind at once, run ``atoll up``, and wait until the job is whole again."""
        struck = self._drawn(pair)
        for pid in struck:
            os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        self.atoll("up", "--runs", str(self.runs))
        up = time.monotonic()
        before = self.merges()
        wait_until(lambda: self.merges() > before, f"a merge after the deaths of {' and '.join(pair)}", PAUSE_S)
        merged = time.monotonic()
        seen = self.wait_until_whole(but=struck)
        return Recovery(up - began, merged - up, time.monotonic() - up, seen.epoch)

    def wait_until_whole(self, but: Sequence[int] = ()) -> JobSeen:
        """Every island trains, and every kind of process is there, these ones gone."""

        def whole() -> JobSeen | None:
            with suppress(AtollError), self.client() as client:
                seen: JobSeen = client.job(self.job)
                pids = {kind: find(self) for kind, find in KINDS.items()}
                if seen.islands_training == len(GROUPS) and all(pids.values()):
                    return None if {pid for each in pids.values() for pid in each} & set(but) else seen
            return None

        found: JobSeen = wait_until(whole, "the whole installation", PAUSE_S)
        return found

    def merges(self) -> int:
        return sum(isinstance(record.event, e.MergeCompleted) for record in self._tape.records())

    def marked(self, node: str | None) -> Iterator[psutil.Process]:
        """Processes of the cluster: all, those of this node, or with an empty name those of any but the head's."""
        cluster = ClusterFile.find(self.home.path)
        for process in processes.marked(cluster.id) if cluster is not None else ():
            with suppress(psutil.Error):
                on = process.environ().get(NODE_MARKER, "")
                if node is None or (on == node if node else on not in ("", CONTROL_GROUP)):
                    yield process

    def _drawn(self, pair: Sequence[str]) -> list[int]:
        """A process of each kind; two where both are of one."""
        chosen: list[int] = []
        for kind in pair:
            found = sorted(set(KINDS[kind](self)) - set(chosen))
            assert found, f"there is no {kind}"
            chosen.append(self.chance.choice(found))
        return chosen


def _name(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return str(process.name())
    return ""


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@contextmanager
def campaign(folder: Path, seed: int = SEED) -> Iterator[Campaign]:
    """A live installation and its job; nothing of it is left afterwards."""
    one = Campaign(folder, seed)
    try:
        one.begin()
        yield one
    finally:
        one.atoll("down")


def main(arguments: list[str]) -> int:
    seed = int(arguments[0]) if arguments else SEED
    pairs = [tuple(arguments[1:])] if len(arguments) > 1 else list(PAIRS)
    random.Random(seed).shuffle(pairs)
    with tempfile.TemporaryDirectory(prefix="pairs-") as folder, campaign(Path(folder), seed) as one:
        print(f"{'killed':32} {'up':>6} {'merge':>6} {'whole':>6}  epoch", flush=True)
        for pair in pairs:
            took = one.strike(pair)
            name = " + ".join(pair)
            print(f"{name:32} {took.up_s:6.1f} {took.merge_s:6.1f} {took.whole_s:6.1f}  {took.epoch}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
