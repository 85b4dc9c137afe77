"""The preset ``goodput-table``: goodput of six systems at five sizes, all with the calibrated parameters.

Responsible for: which cells there are, and how long each is simulated for the error that is wanted. All systems of one size
see the same failure trace over the same virtual time. Refuses to know any published figure.

Source: Decoupled DiLoCo, arXiv:2604.21428 (the table's rows and columns).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypedDict

from orchestrator.simulation import oracles
from orchestrator.simulation.fleet import FleetPlan, System
from orchestrator.simulation.fleet_world import simulate

SYSTEMS: tuple[tuple[System, int], ...] = (
    (System.DATA_PARALLEL, 1),
    (System.ELASTIC_DATA_PARALLEL, 1),
    (System.DECOUPLED, 2),
    (System.DECOUPLED, 4),
    (System.DECOUPLED, 8),
    (System.DECOUPLED, 16),
)
CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
STDERR = 0.0018
"""Aimed at, so that the 95 % interval is about ±0.36 pp: the standard error is itself an estimate, and ±0.5 is promised."""


class Row(TypedDict):
    """One cell. Ratios, not per cent."""

    system: str
    learners: int
    chips: int
    goodput: float
    stderr: float
    uptime: float


def plans(stderr: float = STDERR) -> Iterator[FleetPlan]:
    """A plan a cell, column by column; in a column all last as long as the one that needs longest."""
    for chips in CHIPS:
        column = [FleetPlan(chips, 1.0, system, learners) for system, learners in SYSTEMS]
        duration = max(oracles.duration_for(plan, stderr) for plan in column)
        yield from (replace(plan, duration=duration) for plan in column)


def run(seed: int = 0, *, stderr: float = STDERR, progress: Callable[[Row], None] | None = None) -> list[Row]:
    """All 30 cells, row by row of the table; ``progress`` hears of each as it is done."""
    rows = []
    for plan in plans(stderr):
        outcome = simulate(plan, seed)
        row = Row(
            system=str(plan.system),
            learners=plan.learner_count,
            chips=plan.chips,
            goodput=outcome.goodput,
            stderr=outcome.stderr,
            uptime=outcome.uptime,
        )
        rows.append(row)
        if progress is not None:
            progress(row)
    order = {(str(system), learners): n for n, (system, learners) in enumerate(SYSTEMS)}
    return sorted(rows, key=lambda row: (order[row["system"], row["learners"]], row["chips"]))
