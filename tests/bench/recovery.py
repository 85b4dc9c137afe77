"""The recovery time of an island: from its SIGKILL to the first merge with its new work, with real JAX islands.

The job of ``make demo`` runs on a real service. Islands are killed over REST, one after the other, each once all train
again and the last one's work has been merged. Parts and totals are those of the job's own report, folded from its tape.
There are two jobs, unless one is named: one whose islands are placed again from nothing (``cold``), and one with a
standby in each node group (``standby``).
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

from api.client import Client
from api.installation.home import CONFIGS
from api.installation.up import Installation
from orchestrator.accounting.island_time import PARTS
from orchestrator.accounting.statistics import Statistics
from orchestrator.specification.config import read_job_document
from orchestrator.tape.storage import read_tape
from tests.bench import given
from tests.bench.goals import Goal, at_most
from tests.bench.options import Options
from tests.bench.service import end, service, wait
from tests.bench.surface import pid_of

KILLS, SMALL_KILLS = int(os.environ.get("ATOLL_BENCH_KILLS", "8")), 1
GOALS_S = {"cold": 3.0, "standby": 1.0}


def main(asked: Options) -> list[Goal]:
    load = os.getloadavg()[0]
    kills = SMALL_KILLS if asked.small else KILLS
    with service() as (client, installation):
        figures = {name: measure(client, installation, kills, name == "standby") for name in asked.kinds}
    goals = {name: judged(name, recoveries) for name, recoveries in figures.items()}
    if asked.as_json:
        print(json.dumps({**figures, "load_before": round(load, 1)}, indent=2))
    else:
        show(figures, goals, load)
    return list(goals.values())


def measure(client: Client, installation: Installation, kills: int, standby: bool) -> list[dict[str, Any]]:
    """Return the recoveries of one job, as in its report."""
    document = read_job_document(CONFIGS / "demo.yaml")
    document["islands"] = [{**entry, "standby": 1} if standby else entry for entry in document["islands"]]
    document["budget"] = {"tokens": 100 * document["budget"]["tokens"]}
    job = client.submit(document).job
    tape = installation.runs / job / "tape.jsonl"
    groups = [entry["node_group"] for entry in document["islands"]]
    for number, group in zip(range(kills), cycle(groups), strict=False):
        wait(lambda done=number: settled(client, job, groups, standby) and len(complete(tape)) == done, "all train")
        island = next(i.island for i in client.islands(job) if i.island.startswith(group))
        assert pid_of(client, job, island) is not None
        client.kill(job, island)
    wait(lambda: len(complete(tape)) == kills, "the last one is back")
    end(client, job)
    if not standby:
        given.show("of nano", given.states_given(tape))
    return complete(tape)


def settled(client: Client, job: str, groups: list[str], standby: bool) -> bool:
    """Return whether every island trains and every standby is ready."""
    states = [island.state for island in client.islands(job)]
    return states.count("training") == len(groups) and states.count("standby") == (len(groups) if standby else 0)


def complete(tape: Path) -> list[dict[str, Any]]:
    return [recovery for recovery in summary(tape)["recoveries"] if recovery["complete"]]


def summary(tape: Path) -> dict[str, Any]:
    """Return the job's statistics, folded from its tape."""
    read = read_tape(tape)
    told = Statistics(read.header.policy)
    for record in read.records:
        told.apply(record.event, record.effects)
    return told.summary()


def judged(name: str, recoveries: list[dict[str, Any]]) -> Goal:
    median = statistics.median(recovery["total"] for recovery in recoveries)
    return at_most(f"recovery median seconds, {name}", median, GOALS_S[name])


def show(figures: dict[str, list[dict[str, Any]]], goals: dict[str, Goal], load: float) -> None:
    for name, recoveries in figures.items():
        totals = sorted(recovery["total"] for recovery in recoveries)
        median = goals[name].value
        print(
            f"recovery   {name:<8} SIGKILL to first merge: median {median:.2f} s, {totals[0]:.2f} to {totals[-1]:.2f} s "
            f"({len(totals)} kills; {goals[name]}; load before {load:.1f})"
        )
        print(f"           {' + '.join(parts(recoveries))}   (medians)")


def parts(recoveries: Iterable[dict[str, Any]]) -> list[str]:
    found = list(recoveries)
    return [f"{part} {statistics.median(recovery['parts'][part] for recovery in found):.2f}" for part in PARTS]
