"""The lines between the node groups of a running cluster, measured for `atoll doctor --lines`.

    python -m orchestrator.runtime.line_probe --home .atoll [--ports 24000 24999]

    one JSON object a line on stdout, for each line measured

One short-lived actor on one node of every group, and one on the head, answer and call each other beside Ray, over a plain
TCP connection (``line_measurement``), one line at a time so that none slows another. They book nothing and end with this
process. Each object has ``one``, ``other``, and either ``round_trip_s`` and ``forth_bits_per_second``,
``back_bits_per_second``, or ``problem``. Exit codes: 0 measured, 1 there is no cluster to measure.
"""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.errors import AtollError, first_line
from orchestrator.runtime import cluster
from orchestrator.runtime.line_measurement import KEY_BYTES, Answerer, Bounds, measured, reach
from orchestrator.runtime.settings import CONTROL_GROUP, GROUP_LABEL
from orchestrator.system.ports import Reach

START_TIMEOUT_S = 60.0
MEASURE_TIMEOUT_S = 60.0
BOUNDS = Bounds(bytes_max=4 << 20, seconds_max=2.0)
REMEDY = "Let TCP through between these addresses, both ways, on transport.ports"
ALL_PAIRS_MAX = 8
"""Of node groups: beyond that only their lines to the head are measured, which are those that parameters take."""


class LineProbe:
    """On one node: the answering end of lines to it, and the calling end of lines from it."""

    def __init__(self, host: str, key: bytes, ports: tuple[int, int]) -> None:
        self._key, self._host = key, host
        self._answerer = Answerer(host, key, BOUNDS, ports)

    def address(self) -> tuple[str, int]:
        return self._host, self._answerer.port

    def measure(self, host: str, port: int) -> dict[str, Any]:
        """The line from here to the probe there, or what is in its way."""
        try:
            return asdict(measured(host, port, self._key, BOUNDS))
        except OSError as error:
            return {"problem": self._problem(host, port, error)}

    def problem(self, host: str, port: int) -> str | None:
        """Return what prevents connections from here to the probe there; None if nothing does."""
        try:
            reach(host, port, self._key)
        except OSError as error:
            return self._problem(host, port, error)
        return None

    def _problem(self, host: str, port: int, error: OSError) -> str:
        return f"nothing gets through from {self._host} to {host}:{port}: {first_line(error)}. {REMEDY}"


def lines(ports: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Measure the head's line to every node group, then those between groups. This process has joined the cluster.

    Probes answer on ``ports``, as a job's processes do on those of its specification; each must reach the other.
    """
    import ray

    key = secrets.token_bytes(KEY_BYTES)
    places = _places(ray.nodes(), cluster.node_reaches())
    probes = {group: _probe(node, host, key, ports) for group, (node, host) in places.items()}
    addresses: dict[str, tuple[str, int]] = {}
    problems: dict[str, str] = {}
    for group, probe in probes.items():
        try:
            addresses[group] = ray.get(probe.address.remote(), timeout=START_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            problems[group] = f"no process could be started on a node of {group}: {_reason_of(error)}"
    for one, other in _pairs(list(places)):
        problem = problems.get(one) or problems.get(other)
        figures: dict[str, Any] = {"problem": problem}
        if not problem:
            try:
                figures = ray.get(probes[one].measure.remote(*addresses[other]), timeout=MEASURE_TIMEOUT_S)
                back = ray.get(probes[other].problem.remote(*addresses[one]), timeout=MEASURE_TIMEOUT_S)
                figures = {"problem": back} if back and not figures.get("problem") else figures
            except (ray.exceptions.RayError, TimeoutError) as error:
                figures = {"problem": f"no answer from {one}: {type(error).__name__}"}
        yield {"one": one, "other": other, **figures}
    for probe in probes.values():
        ray.kill(probe)


def _places(nodes: list[Mapping[str, Any]], reaches: Mapping[str, Reach]) -> dict[str, tuple[str, str]]:
    """Return the id and address of one living node of each group, the head's group first; a node in reach, if one is."""
    places: dict[str, tuple[str, str]] = {}

    def rank(entry: Mapping[str, Any]) -> tuple[bool, str]:
        return reaches.get(entry["NodeID"]) is not Reach.TAKEN, str(entry["NodeID"])

    for entry in sorted(nodes, key=rank):
        group = entry.get("Labels", {}).get(GROUP_LABEL, "")
        if entry["Alive"] and group:
            places.setdefault(group, (entry["NodeID"], entry["NodeManagerAddress"]))
    return {group: places[group] for group in sorted(places, key=lambda group: (group != CONTROL_GROUP, group))}


def _pairs(groups: list[str]) -> list[tuple[str, str]]:
    pairs = list(itertools.combinations(groups, 2))
    return pairs if len(groups) <= ALL_PAIRS_MAX + 1 else [pair for pair in pairs if pair[0] == CONTROL_GROUP]


def _probe(node: str, host: str, key: bytes, ports: tuple[int, int]) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {**cluster.NEXT_TO_NOTHING, "scheduling_strategy": strategy}
    return ray.remote(LineProbe).options(**options).remote(host, key, ports)


def _reason_of(error: Exception) -> str:
    """Return what the probe said, or else the kind of its failure."""
    cause = getattr(error, "cause", None)
    return first_line(cause) if isinstance(cause, AtollError) else type(error).__name__


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The lines between node groups, as JSON.")
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--ports", type=int, nargs=2, default=(0, 0))
    options = parser.parse_args(arguments)
    try:
        cluster.join(options.home)
        for line in lines(tuple(options.ports)):
            print(json.dumps(line), flush=True)
    except AtollError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        cluster.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
