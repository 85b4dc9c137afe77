"""The operators' surface beside a running job: how soon a kill kills, how long reads take, and what they cost the
islands.

A real service runs on real Ray with four synthetic islands. Kills are requested over REST, one after the other, each of
an island that trains; the clock stops when the kernel says that the process is gone. Reads are sent at a steady rate,
independently of earlier answers, and each is measured from when it was due, so that one slow answer does not hide those
that wait behind it. Steps per second come from the job's own tape, for equal times before, during and after the reads.
Synthetic islands sleep through their steps, so their steps get longer only if the machine has no spare time.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import statistics
import time
from collections.abc import Mapping
from itertools import cycle
from typing import Any, NamedTuple

import psutil

from api.client import Client
from api.installation.up import Installation
from tests.bench.goals import Goal, at_most
from tests.bench.options import Options
from tests.bench.service import SITUATION_TIMEOUT_S, end, service, step_seconds, wait
from tests.ray.jobs import EVERY_GROUP, STEP_S, synthetic

KILL_MEDIAN_GOAL_S, KILL_P99_GOAL_S = 0.5, 2.0
READS_PER_SECOND, READ_P99_GOAL_S, STEP_RATIO_GOAL = 200, 0.1, 1.05
CONNECTIONS = 16


class Size(NamedTuple):
    """The number of kills, the time of reading, and the time before anything is measured."""

    kills: int
    read_s: float
    settle_s: float


FULL, SMALL = Size(50, 30.0, 3.0), Size(3, 2.0, 1.0)


def main(asked: Options) -> list[Goal]:
    load = os.getloadavg()[0]
    with service() as (client, installation):
        figures = measure(client, installation, SMALL if asked.small else FULL)
    figures["load_before"] = round(load, 1)
    goals = judged(figures)
    if asked.as_json:
        print(json.dumps(figures, indent=2))
    else:
        show(figures, goals)
    return list(goals.values())


def measure(client: Client, installation: Installation, size: Size) -> dict[str, Any]:
    recovery = {"restarts_max": 10 * size.kills, "backoff_max_s": 0.5}
    job = client.submit(synthetic(100_000, EVERY_GROUP, name="surface", recovery=recovery)).job
    wait(lambda: client.job(job).islands_training == len(EVERY_GROUP), "all islands train")
    time.sleep(size.settle_s)
    address = installation.home.address()
    assert address is not None
    reads = Reads(address.url, str(installation.home.token()), job, psutil.Process(address.pid))
    times = [time.time()]
    time.sleep(size.read_s)
    times.append(time.time())
    figures = asyncio.run(reads.run(size.read_s))
    times.append(time.time())
    time.sleep(size.read_s + size.settle_s)
    began_at = client.job(job).started_at
    assert began_at is not None
    bounds = [at - began_at for at in (*times, times[-1] + size.read_s)]
    steps = step_seconds(installation.runs / job, bounds, EVERY_GROUP)
    kills = [
        kill_seconds(client, job, island) for island, _ in zip(cycle(EVERY_GROUP), range(size.kills), strict=False)
    ]
    end(client, job)
    return {
        "kills": spread(kills),
        "reads": figures,
        "step_s": dict(zip(("before", "during", "after"), steps, strict=True)),
    }


def kill_seconds(client: Client, job: str, island: str) -> float:
    """Return the time from the request to the end of the process. A new one trains before, and may not yet train after
    it.
    """
    pid = wait(lambda: pid_of(client, job, island), f"{island} trains")
    process = os.pidfd_open(pid)
    try:
        began = time.perf_counter()
        client.kill(job, island)
        ended, _, _ = select.select([process], [], [], SITUATION_TIMEOUT_S)
        if not ended:
            raise TimeoutError(f"{island}'s process {pid} lives on")
        return time.perf_counter() - began
    finally:
        os.close(process)


def pid_of(client: Client, job: str, island: str) -> int | None:
    """Return the process of an island that trains."""
    return next((i.pid for i in client.islands(job) if i.island == island and i.state == "training"), None)


class Reads:
    """Requests at a steady rate over a few connections, to one address after the other."""

    def __init__(self, url: str, token: str, job: str, service: psutil.Process) -> None:
        self._host, self._port = url.removeprefix("http://").split(":")
        self._service, self._token = service, token
        island = f"/v1/jobs/{job}/islands/{EVERY_GROUP[0]}"
        self._paths = (f"/v1/jobs/{job}", "/v1/jobs", f"/v1/jobs/{job}/islands", island, f"/v1/jobs/{job}/commands")
        self._seconds: dict[str, list[float]] = {path.replace(job, "JOB"): [] for path in self._paths}
        self._failed = 0

    async def run(self, seconds: float) -> dict[str, Any]:
        due: asyncio.Queue[tuple[float, str] | None] = asyncio.Queue()
        readers = [asyncio.create_task(self._read(due)) for _ in range(CONNECTIONS)]
        before, began = cpu_seconds(self._service), time.perf_counter()
        for number, path in zip(range(round(READS_PER_SECOND * seconds)), cycle(self._paths), strict=False):
            at = began + number / READS_PER_SECOND
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            due.put_nowait((at, path))
        for _ in readers:
            due.put_nowait(None)
        await asyncio.gather(*readers)
        took, used = time.perf_counter() - began, cpu_seconds(self._service) - before
        everything = [seconds for some in self._seconds.values() for seconds in some]
        by_path = {path: spread(seconds) for path, seconds in self._seconds.items()}
        more = {"failed": self._failed, "per_second": round(len(everything) / took, 1), "by_path": by_path}
        return spread(everything) | more | {"service_cores": round(used / took, 2)}

    async def _read(self, due: asyncio.Queue[tuple[float, str] | None]) -> None:
        reader, writer = await asyncio.open_connection(self._host, int(self._port))
        while (work := await due.get()) is not None:
            at, path = work
            head = f"GET {path} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {self._token}\r\n\r\n"
            writer.write(head.encode())
            answer = await reader.readuntil(b"\r\n\r\n")
            headers = dict(line.split(": ", 1) for line in answer.decode().lower().split("\r\n")[1:-2])
            await reader.readexactly(int(headers["content-length"]))
            self._failed += b" 200 " not in answer.split(b"\r\n", 1)[0]
            name = next(name for name, asked in zip(self._seconds, self._paths, strict=True) if asked == path)
            self._seconds[name].append(time.perf_counter() - at)
        writer.close()


def cpu_seconds(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return float(spent.user + spent.system)


def spread(seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    named = {"median_s": cuts[49], "p95_s": cuts[94], "p99_s": cuts[98], "max_s": max(seconds)}
    return {"count": len(seconds)} | {name: round(value, 4) for name, value in named.items()}


def judged(figures: Mapping[str, Any]) -> dict[str, Goal]:
    kills, reads, step = figures["kills"], figures["reads"], figures["step_s"]
    ratio = step["during"] / statistics.mean((step["before"], step["after"]))
    return {
        "kill median": at_most("surface kill to death, median s", kills["median_s"], KILL_MEDIAN_GOAL_S),
        "kill p99": at_most("surface kill to death, p99 s", kills["p99_s"], KILL_P99_GOAL_S),
        "read p99": at_most("surface reads, p99 s", reads["p99_s"], READ_P99_GOAL_S),
        "failed": at_most("surface failed reads", reads["failed"], 0),
        "step ratio": at_most("surface step ratio", ratio, STEP_RATIO_GOAL),
    }


def show(figures: Mapping[str, Any], goals: Mapping[str, Goal]) -> None:
    kills, reads, step = figures["kills"], figures["reads"], figures["step_s"]
    told = f"median {goals['kill median']}, p99 {goals['kill p99']}"
    print(f"surface    kill to death  {_row(kills)}   ({kills['count']} kills; {told})")
    told = f"{reads['per_second']:.0f}/s, {reads['failed']} failed, service on {reads['service_cores']} cores"
    print(f"surface    API reads      {_row(reads)}   ({told}; p99 {goals['read p99']})")
    for path, seconds in reads["by_path"].items():
        print(f"surface                   {_row(seconds)}   {path}")
    ratio = goals["step ratio"]
    print(f"surface    step time      before {step['before']:.4f} s, during reads {step['during']:.4f} s, ", end="")
    told = f"{ratio}; synthetic steps of {STEP_S} s; load before {figures['load_before']}"
    print(f"after {step['after']:.4f} s: ratio {ratio.value:.3f} ({told})")


def _row(spread: Mapping[str, float]) -> str:
    return "  ".join(
        f"{name.removesuffix('_s')} {1000 * spread[name]:7.1f} ms" for name in ("median_s", "p95_s", "p99_s", "max_s")
    )
