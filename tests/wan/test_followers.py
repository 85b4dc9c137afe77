"""Followers on lines of 5 Mbit/s, killed at random: near the newest Θ, bit by bit, for few bytes, and unnoticed by islands.

    ATOLL_SOAK=1 FOLLOWERS_REPORT=out.json python -m pytest tests/wan/test_followers.py

Phases with followers alternate with phases without, so that both paces of the islands are of one run. Followers have the
lowest priority on this machine, because they stand for other machines; their lines are real.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from orchestrator.core.events import IslandReported, MergeCompleted
from orchestrator.core.messages import Progress
from orchestrator.parameters import tensors, wire_format
from orchestrator.runtime.groups import NodeGroup
from orchestrator.tape.storage import read_tape
from tests.api.installation import ROOT
from tests.ray.jobs import synthetic
from tests.waiting import wait_until
from tests.wan.archipelago import Archipelago
from tests.wan.line import Line

pytestmark = pytest.mark.ray
EAST, WEST = "east", "west"
READERS = tuple(f"reader-{number}" for number in range(8))
BYTES_PER_SECOND = 5e6 / 8
PARAMETERS, FRAGMENTS, INTERVAL = 1_600_000, 4, 240
"""A merge each three seconds, of 0.2 MB in int4: a ninth of a line. Eight followers share this machine's cores with the job,
and a merge each second would measure these, not the lines. Whole, the model is five seconds of a line in bfloat16."""
WHOLE_BFLOAT16 = 2 * PARAMETERS
PHASE_S = float(os.environ.get("FOLLOWERS_PHASE_S", "40"))
PHASES, SETTLE_S, KILL_EVERY_S, EVERY_S = 6, 4.0, 3.0, 1.0
SEED = 20_261_126


@dataclass
class Delivery:
    at: float
    number: int
    versions: tuple[int, ...]
    name: str
    byte_count: int
    is_first: bool
    """Of its process: what it waited for is not only the line."""


@dataclass
class Reader:
    """A follower that is started again whenever it was killed."""

    command: list[str]
    folder: Path
    deliveries: list[Delivery] = field(default_factory=list)
    kills: int = 0
    wanted: bool = False
    process: subprocess.Popen[str] | None = None
    thread: threading.Thread | None = None

    def begin(self) -> None:
        self.wanted = True
        self.thread = threading.Thread(target=self._keep, daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.wanted = False
        self.kill()
        assert self.thread is not None
        self.thread.join()

    def kill(self) -> None:
        if (process := self.process) is not None and process.poll() is None:
            process.kill()
            self.kills += 1

    def _keep(self) -> None:
        while self.wanted:
            with (self.folder.parent / f"{self.folder.name}.log").open("ab") as log:
                process = subprocess.Popen(
                    self.command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
                )
            self.process, is_first = process, True
            if not self.wanted:
                process.kill()
            assert process.stdout is not None
            for line in process.stdout:
                if line.endswith("\n"):
                    self._took(json.loads(line), is_first)
                    is_first = False
            process.wait()
            process.stdout.close()

    def _took(self, row: dict[str, Any], is_first: bool) -> None:
        versions, name = tuple(row["versions"]), Path(row["path"]).resolve().name
        self.deliveries.append(Delivery(time.time(), row["number"], versions, name, row["bytes_count"], is_first))


@pytest.fixture
def archipelago(tmp_path: Path) -> Iterator[Archipelago]:
    groups = (NodeGroup(name=EAST, region=EAST), NodeGroup(name=WEST, region=WEST))
    lines = dict.fromkeys(READERS, Line(8 * BYTES_PER_SECOND))
    built = Archipelago(tmp_path, groups, lines, readers=READERS)
    try:
        built.up()
        yield built
    finally:
        built.down()


@pytest.mark.soak("six minutes, with eight lines of 5 Mbit/s")
def test_eight_followers_on_slow_lines_are_near_theta_and_islands_do_not_notice(
    archipelago: Archipelago, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    settings = {"fragments": FRAGMENTS, "interval_steps": INTERVAL, "quorum": 2, "wire": {"down": "int4"}}
    spec = synthetic(10**6, groups=(EAST, WEST), synchroniser=settings, synthetic={"parameters": PARAMETERS})
    with archipelago.client() as client:
        job = client.submit(spec).job
        wait_until(lambda: client.job(job).global_version > 2 * FRAGMENTS)
        began = min(time.time() - client.job(job).after_s for _ in range(10))
        readers = {name: _reader(archipelago, name, job, tmp_path) for name in READERS}
        phases: list[tuple[bool, float, float]] = []
        before = {name: archipelago.regions.traffic(name) for name in READERS}
        for number in range(PHASES):
            follows = number % 2 == 1
            for reader in readers.values() if follows else ():
                reader.begin()
            phase_began = time.time() + SETTLE_S
            while (left := phase_began + PHASE_S - time.time()) > 0:
                time.sleep(min(left, chance.expovariate(1 / KILL_EVERY_S)))
                if follows and time.time() > phase_began:
                    readers[chance.choice(READERS)].kill()
            phases.append((follows, phase_began - began, time.time() - began))
            for reader in readers.values() if follows else ():
                reader.end()
        came = {name: (archipelago.regions.traffic(name) - before[name]).received_bytes for name in READERS}
        client.cancel(job)
        wait_until(lambda: client.job(job).state.final)
    records = read_tape(archipelago.runs / job / "tape.jsonl").records
    merges = [record.event for record in records if isinstance(record.event, MergeCompleted)]
    digests = {(int(merge.fragment), int(merge.version)): merge.digest for merge in merges}
    completed = [merge.at for merge in merges]
    named = _require_bits(readers, digests)
    late = [behind for reader in readers.values() for behind in _behind(reader, completed, began)]
    paces = {follows: fmean(_paces(records, phases, follows)) for follows in (False, True)}
    of_all = [delivery for reader in readers.values() for delivery in reader.deliveries]
    later = [each for each in of_all if each.byte_count < 2 * WHOLE_BFLOAT16]
    merged = sum(_merged(reader) for reader in readers.values())
    report: dict[str, Any] = {
        "kills": sum(reader.kills for reader in readers.values()),
        "deliveries": len(of_all),
        "deliveries_named_by_digests": named,
        "merges": len(merges),
        "behind_at_most_one_share": sum(behind <= 1 for behind in late) / len(late),
        "behind_max": max(late),
        "seconds_of_the_line_median": median(each.byte_count for each in later) / BYTES_PER_SECOND,
        "bytes_on_lines_with_first_fetch": sum(came.values()),
        "bytes_of_differences": sum(each.byte_count for each in later),
        "ratio_per_delivery": sum(each.byte_count for each in later) / len(later) / WHOLE_BFLOAT16,
        "ratio_per_delivery_on_lines": sum(came.values()) / len(of_all) / WHOLE_BFLOAT16,
        "ratio_per_version": sum(each.byte_count for each in later) / merged / WHOLE_BFLOAT16,
        "pace_ratio": paces[True] / paces[False],
        "paces": {str(follows): _paces(records, phases, follows) for follows in (False, True)},
    }
    print(json.dumps(report, indent=1))
    if path := os.environ.get("FOLLOWERS_REPORT"):
        Path(path).write_text(json.dumps(report, indent=1))
    assert report["kills"] > 10
    assert len(later) > 100
    assert named > 100
    assert report["ratio_per_version"] <= 1 / 7, "a whole model for each merge is what a follower would fetch otherwise"
    assert report["behind_at_most_one_share"] > 0.95
    assert report["pace_ratio"] >= 0.995


def _reader(archipelago: Archipelago, name: str, job: str, tmp_path: Path) -> Reader:
    enter = archipelago.regions.places[name].enter
    options = ["--home", str(archipelago.home.path), "--json", "--every", str(EVERY_S)]
    program = ["nice", "-n", "19", sys.executable, "-m", "api.cli", "follow"]
    return Reader([*enter, *program, job, str(tmp_path / name), *options], tmp_path / name)


def _require_bits(readers: dict[str, Reader], digests: dict[tuple[int, int], str]) -> int:
    """Require that versions have the digests of the tape, which has none of the seed. Return how many were compared."""
    count = 0
    for reader in readers.values():
        for delivery in reader.deliveries:
            if min(delivery.versions):
                own = "".join(digests[p, version] for p, version in enumerate(delivery.versions))
                assert delivery.name == f"{delivery.number:012d}-{blake2b(own.encode(), digest_size=4).hexdigest()}"
                count += 1
        rows = json.loads((reader.folder / ".follow" / "manifest.json").read_text())["fragments"]
        for p, row in enumerate(rows):
            content = (reader.folder / ".follow" / f"fragment-{p:04d}-{row['version']:08d}").read_bytes()
            assert tensors.digest(wire_format.decode(content)) == row["digest"] == digests[p, row["version"]]
    return count


def _behind(reader: Reader, completed: list[float], began: float) -> Iterator[int]:
    """Yield, right before each delivery, how many merges the folder lacks of those that the line allows by then.

    The line allows a merge that was complete before the last request, of which there is one each ``EVERY_S``, and before the
    bytes of the answer came at the line's rate. It allows nothing more if it was busy since the delivery before.
    """
    for before, after in pairwise(reader.deliveries):
        if after.is_first:
            continue
        asking_s = EVERY_S + after.byte_count / BYTES_PER_SECOND
        until = after.at - began - asking_s
        was_busy = after.at - before.at <= asking_s
        yield 0 if was_busy else max(0, sum(at <= until for at in completed) - before.number)


def _merged(reader: Reader) -> int:
    """Return how many merges came as differences."""
    pairs = pairwise(reader.deliveries)
    return sum(after.number - before.number for before, after in pairs if after.byte_count < 2 * WHOLE_BFLOAT16)


def _paces(records: Any, phases: list[tuple[bool, float, float]], follows: bool) -> list[float]:
    """Return the steps per second of all islands in each phase, between the first and the last report of each island."""
    paces = []
    for is_followed, first, last in phases:
        if is_followed is not follows:
            continue
        reports: dict[str, list[tuple[float, int]]] = {}
        for record in records:
            event = record.event
            if isinstance(event, IslandReported) and isinstance(event.report, Progress) and first <= event.at <= last:
                reports.setdefault(event.island, []).append((event.at, event.report.steps_total))
        paces.append(sum((each[-1][1] - each[0][1]) / (each[-1][0] - each[0][0]) for each in reports.values()))
    return paces
