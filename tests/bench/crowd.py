"""Many jobs on one service, and many islands on one machine. All processes are real; islands are synthetic.

``jobs`` runs twenty jobs of two islands. It reads the list of jobs, and adds up the memory of the processes that jobs
have on the head: synchronisers, controllers, evaluators. Resident sizes count what processes share once for each of
them, as `top` does; proportional ones (PSS) add up to what the machine lost.

``overload`` runs one job of 128 islands, and then takes the processors from it for two minutes with processes that only
count. How many islands are in a merge is read from the job's tape. Source: a job of 128 islands on two cores, whose merges
fell to one island of 128 and stayed there (docs/decisions/0217-a-merge-needs-half-of-the-islands-above-four.md).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from api.client import Client
from api.installation.up import Installation
from orchestrator.core.effects import MergeFragment
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.settings import CLUSTER_MARKER
from orchestrator.tape.schema import Record
from orchestrator.tape.storage import read_tape
from tests.bench.goals import Goal, at_least, at_most
from tests.bench.options import Options
from tests.bench.service import end, service, wait
from tests.ray.jobs import EVERY_GROUP

MIB = 1 << 20
HEAD_CLASSES = ("SynchroniserActor", "Controllers", "Evaluator")
LIST_P95_GOAL_S = 0.1
JOB_MIB_GOAL = 225.0
"""Half of the 450 MiB of a job whose synchroniser, controller and evaluator were a process each."""
DURING_GOAL, AFTERWARDS_GOAL = 0.5, 0.9
START_TIMEOUT_S, END_TIMEOUT_S = 1500.0, 600.0
NEARLY_ALL = 0.97
"""On a saturated machine one is always late, or placed again."""
READ_EVERY_S, MEMORY_EVERY_S = 0.25, 5.0
CPUS = 0.1
"""What an island reserves, so that the default node groups have room for all."""


class Crowd(NamedTuple):
    jobs: int
    read_s: float


class Load(NamedTuple):
    """``settle_s`` before the overload, and after it until merges must be whole again."""

    islands: int
    settle_s: float
    overload_s: float
    recovery_s: float
    measure_s: float


CROWD = Crowd(int(os.environ.get("ATOLL_BENCH_JOBS", "20")), 90.0)
SMALL_CROWD = Crowd(2, 3.0)
LOAD = Load(int(os.environ.get("ATOLL_BENCH_ISLANDS", "128")), 30.0, 120.0, 120.0, 60.0)
SMALL_LOAD = Load(8, 5.0, 5.0, 5.0, 10.0)


def jobs(asked: Options) -> list[Goal]:
    size = SMALL_CROWD if asked.small else CROWD
    with service(jobs_max=size.jobs) as (client, installation):
        names = [client.submit(job_document(2)).job for _ in range(size.jobs)]
        began = time.monotonic()
        wait(lambda: _training(client) == 2 * size.jobs, "all islands of all jobs train", START_TIMEOUT_S)
        print(f"jobs       {size.jobs} jobs of 2 islands train after {time.monotonic() - began:.0f} s")
        wait(lambda: all(client.job(name).global_version for name in names), "every job has merged", START_TIMEOUT_S)
        seconds, memory = _watched(installation, size)
        for name in names:
            client.cancel(name)
    resident, proportional = (statistics.mean(column) / size.jobs for column in zip(*memory, strict=True))
    p50, p95 = statistics.median(seconds), statistics.quantiles(seconds, n=20)[-1]
    goals = [at_most("jobs list p95 s", p95, LIST_P95_GOAL_S), at_most("jobs MiB a job", resident, JOB_MIB_GOAL)]
    print(f"jobs       GET /v1/jobs {len(seconds)} times: p50 {p50 * 1e3:.0f} ms, p95 {p95 * 1e3:.0f} ms ({goals[0]})")
    print(f"jobs       on the head {resident:.0f} MiB a job resident ({goals[1]}), {proportional:.0f} MiB proportional")
    return goals


def overload(asked: Options) -> list[Goal]:
    size = SMALL_LOAD if asked.small else LOAD
    with service() as (client, installation):
        job = client.submit(job_document(size.islands)).job
        began = time.monotonic()
        wanted = NEARLY_ALL * size.islands
        wait(lambda: client.job(job).islands_training >= wanted, "nearly all islands train", START_TIMEOUT_S)
        started_at = client.job(job).started_at
        assert started_at is not None
        print(f"overload   {size.islands} islands train after {time.monotonic() - began:.0f} s")
        calm = (time.time() - started_at, time.time() - started_at + size.settle_s)
        time.sleep(size.settle_s)
        with _busy_processors():
            overloaded = (time.time() - started_at, time.time() - started_at + size.overload_s)
            time.sleep(size.overload_s)
        time.sleep(size.recovery_s)
        recovered = (time.time() - started_at, time.time() - started_at + size.measure_s)
        time.sleep(size.measure_s)
        records = read_tape(installation.runs / job / "tape.jsonl").records
        spans = {"before": calm, "during": overloaded, "afterwards": recovered}
        counts = {when: _contributors(records, *span) for when, span in spans.items()}
        for when, span in spans.items():
            rate = f"{_events_per_second(records, *span):.0f} events/s of the live synchroniser"
            print(f"overload   {when}: {_merges_in_words(counts[when])}, {rate}")
        end(client, job, END_TIMEOUT_S)
    goals = [
        at_least("overload islands in each merge", min(counts["during"], default=0) / size.islands, DURING_GOAL),
        at_least(
            "overload islands in a merge two minutes later",
            _median(counts["afterwards"]) / size.islands,
            AFTERWARDS_GOAL,
        ),
    ]
    print("           " + "; ".join(f"{goal.figure} {goal.value:.2f} ({goal})" for goal in goals))
    return goals


def job_document(islands: int) -> dict[str, Any]:
    """Return a job of synthetic islands with 100,000 parameters and steps of a second, spread over all groups."""
    counts = {group: len(range(number, islands, len(EVERY_GROUP))) for number, group in enumerate(EVERY_GROUP)}
    return {
        "name": "crowd",
        "trainer": "learners.synthetic:create",
        "synthetic": {"parameters": 100_000, "step_s": 1.0},
        "islands": [{"node_group": group, "count": count, "cpus": CPUS} for group, count in counts.items() if count],
        "budget": {"steps": 1_000_000},
    }


def _training(client: Client) -> int:
    return sum(job.islands_training for job in client.jobs())


def _watched(installation: Installation, size: Crowd) -> tuple[list[float], list[tuple[float, float]]]:
    """Return the seconds of each read of the list, and the resident and proportional MiB of all jobs on the head."""
    address = installation.home.address()
    assert address is not None
    seconds, memory, until = [], [], time.monotonic() + size.read_s
    measure_at = time.monotonic()
    headers = {"Authorization": f"Bearer {installation.home.token()}"}
    with httpx.Client(base_url=address.url, headers=headers, timeout=60.0) as reader:
        while time.monotonic() < until:
            began = time.perf_counter()
            reader.get("/v1/jobs").raise_for_status()
            seconds.append(time.perf_counter() - began)
            if time.monotonic() >= measure_at:
                memory.append(_head_memory(installation.home.path))
                measure_at = time.monotonic() + MEMORY_EVERY_S
            time.sleep(READ_EVERY_S)
    return seconds, memory


def _head_memory(home: Path) -> tuple[float, float]:
    cluster = ClusterFile.find(home)
    assert cluster is not None
    resident = proportional = 0.0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            title = " ".join(process.cmdline())
            is_ours = title.startswith(tuple(f"ray::{name}" for name in HEAD_CLASSES))
            if is_ours and process.environ().get(CLUSTER_MARKER) == cluster.id:
                sizes = process.memory_full_info()
                resident, proportional = resident + sizes.rss / MIB, proportional + sizes.pss / MIB
    return resident, proportional


@contextmanager
def _busy_processors() -> Iterator[None]:
    """Have four processes for each processor count until the block ends."""
    counting = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in counting:
            process.kill()
            process.wait()


def _contributors(records: Sequence[Record], since: float, until: float) -> list[int]:
    """Return how many islands were in each merge that was ordered between these two moments of the job."""
    return [
        len(effect.inputs)
        for record in records
        if since <= record.event.at < until
        for effect in record.effects
        if isinstance(effect, MergeFragment)
    ]


def _events_per_second(records: Sequence[Record], since: float, until: float) -> float:
    """Return how many events the job's synchroniser decided on in a second between these two moments of the job."""
    return sum(since <= record.event.at < until for record in records) / (until - since)


def _merges_in_words(counts: Sequence[int]) -> str:
    if not counts:
        return "no merge"
    return f"{len(counts)} merges of {min(counts)} to {max(counts)} islands, {_median(counts):.0f} usual"


def _median(counts: Sequence[int]) -> float:
    return statistics.median(counts) if counts else 0.0
