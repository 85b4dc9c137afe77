"""The cost of synchronising for an inner step: the same four islands with it and without it, in turn, on one cluster.

`micro` with P = 24 and H = 24, so one fragment is offered, merged and adopted at every step, with the default batch.
"Without" has an interval longer than the job, so nothing is offered before the end. Processes, Ray and merges are real.
The four islands share this machine, so the cores that the synchroniser's side uses count as well. The two take turns as A
B B A, so that a machine that slows down or warms up affects both.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

from orchestrator.runtime import embedded
from orchestrator.runtime.control_port import connect
from orchestrator.runtime.groups import DEFAULT_GROUPS
from orchestrator.specification.config import JobSpec, parse_job
from tests.bench.goals import Goal, at_most
from tests.bench.options import Options

STEPS, RATIO_GOAL = 40, 1.05
SMALL_STEPS = 4
TURNS = (True, False, False, True)
WITHOUT_INTERVAL = 10_000
JOB_TIMEOUT_S = 600


def main(asked: Options) -> list[Goal]:
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        home = Path(folder) / "home"
        embedded.up(home, DEFAULT_GROUPS)
        try:
            control = connect(home)
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for turn, synchronised in enumerate(TURNS):
                run_dir = Path(folder) / f"{turn}-{'with' if synchronised else 'without'}"
                seconds[synchronised].append(_step_seconds(control, _spec(synchronised, asked.small), run_dir))
            control.close()
        finally:
            embedded.down(home)
    with_it, without = (statistics.median(seconds[key]) for key in (True, False))
    ratio = with_it / without
    goal = at_most("overhead step ratio", ratio, RATIO_GOAL)
    print(f"overhead   step with synchronisation {with_it:.3f} s, without {without:.3f} s: ratio {ratio:.3f} ", end="")
    told = {name: [round(s, 3) for s in seconds[key]] for name, key in (("with", True), ("without", False))}
    print(f"({goal}; jobs' medians {told})")
    return [goal]


def _spec(synchronised: bool, small: bool) -> JobSpec:
    return parse_job(
        {
            "name": "bench",
            "model": {"preset": "nano" if small else "micro", "compute_dtype": "float32"},
            "synchroniser": {"fragments": 24, "interval_steps": 24 if synchronised else WITHOUT_INTERVAL},
            "islands": [{"node_group": group.name} for group in DEFAULT_GROUPS],
            "budget": {"steps": SMALL_STEPS if small else STEPS},
            "evaluation": {"every_merges": 0, "sequences": 4},
        }
    )


def _step_seconds(control: object, spec: JobSpec, run_dir: Path) -> float:
    """Return the median step time of the whole job, from its own report."""
    job = run_dir.name
    control.start_job(job, spec, run_dir)  # type: ignore[attr-defined]
    report = run_dir / "report.json"
    deadline = time.monotonic() + JOB_TIMEOUT_S
    while not report.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run_dir} has no report after {JOB_TIMEOUT_S} s; see its tape and crash.txt")
        time.sleep(0.5)
    return float(json.loads(report.read_text())["step_time_median_s"])
