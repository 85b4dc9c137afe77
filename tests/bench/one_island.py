"""What the benches of a trainer share: the specification of one island, and the time of a piece of work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from orchestrator.specification.config import JobSpec, parse_job
from tests.bench.options import Options


def specification(asked: Options, **sections: Mapping[str, Any]) -> JobSpec:
    """Return a specification of ``small`` in float32, or of nano at the smallest sizes."""
    return parse_job(
        {
            "islands": [{"node_group": "here"}],
            "budget": {"steps": 1},
            "model": {"preset": "nano" if asked.small else "small", "compute_dtype": "float32"},
            **sections,
        }
    )


def seconds_of(work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began
