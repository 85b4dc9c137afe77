"""The cost of a specification before anything runs: many legal islands validated, far too many refused, hostile text
read.

The figures are CPU seconds, which a request takes from the service. ``tests/attack`` shows that they grow only with the
length.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from orchestrator.errors import ConfigurationError
from orchestrator.specification.bounds import ISLANDS_MAX
from orchestrator.specification.config import parse_job
from orchestrator.specification.documents import FILE, REQUEST, read_json, read_yaml
from tests.bench.goals import Goal, at_most
from tests.bench.options import Options

LEGAL_GOAL_S, REFUSED_GOAL_S, YAML_GOAL_S = 1.0, 0.1, 1.0
TIMES = 3


def main(_: Options) -> list[Goal]:
    budget = {"budget": {"steps": 10}}
    legal = json.dumps(budget | {"islands": [{"node_group": "asia", "name": f"i{n}"} for n in range(ISLANDS_MAX)]})
    crowds = {
        "count": [{"node_group": "asia", "count": 10**6}],
        "entries": [{"node_group": "asia"}] * 10**6,
        "entries of many": [{"node_group": "asia", "count": ISLANDS_MAX}] * 100,
    }
    ones = "a: [" + "1," * (REQUEST.yaml_bytes_max // 2 - 8) + "1]"
    long = "a: [" + "1," * (1 << 19) + "1]"
    return [
        _row("10,000 legal islands, from JSON", lambda: parse_job(read_json(legal)), LEGAL_GOAL_S),
        *(
            _row(
                f"1,000,000 islands refused, by {how}",
                partial(parse_job, budget | {"islands": islands}),
                REFUSED_GOAL_S,
            )
            for how, islands in crowds.items()
        ),
        _row("hostile YAML as long as a request's may be", lambda: parse_job(read_yaml(ones)), YAML_GOAL_S),
        _row("1 MiB of YAML in a request", lambda: read_yaml(long), REFUSED_GOAL_S),
        _row("1 MiB of YAML in a file", lambda: read_yaml(long, FILE), 3 * YAML_GOAL_S),
    ]


def _row(name: str, act: Callable[[], object], bound: float) -> Goal:
    goal = at_most(f"{name}, s", min(_cpu_s(act) for _ in range(TIMES)), bound)
    print(f"documents  {goal.value:>8.3f} s of CPU   {name} ({goal})")
    return goal


def _cpu_s(act: Callable[[], object]) -> float:
    began = time.thread_time()
    with suppress(ConfigurationError):
        act()
    return time.thread_time() - began
