"""The merge's arithmetic at a stated size (``orchestrator.merge.benchmark``), the best of five. It has no goal."""

from __future__ import annotations

from time import perf_counter

from orchestrator.merge import benchmark
from tests.bench.goals import Goal
from tests.bench.options import Options

SMALL_PARAMETERS = 10_000


def main(asked: Options) -> list[Goal]:
    for case in benchmark.cases(parameter_count=SMALL_PARAMETERS) if asked.small else benchmark.cases():
        took = []
        for _ in range(5):
            began = perf_counter()
            case.run()
            took.append(perf_counter() - began)
        seconds = min(took)
        print(f"{case.name:<44} {seconds * 1000:8.1f} ms   {case.payload_bytes / seconds / 1e9:6.2f} GB/s")
    return []
