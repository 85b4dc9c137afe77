"""The report of a job as one plain dictionary: what report.json holds and report.html draws.

The names at the top level do not change: users rely on them. Responsible for choosing; every figure comes from
the folds, or, where only the shell knows it, from ``extra``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.core.vocabulary import Instant, JobPolicy

SCHEMA = "atoll-report/1"
PLACES = ("islands", "standbys")
"""Fields of the policy that are shown island by island."""
POLICY_NAMES: Mapping[str, str] = {"fragment_count": "fragments", "sync_interval_steps": "interval_steps"}
"""The specification's names of settings, which a report has in place of the policy's own."""


def build(
    policy: JobPolicy,
    goodput: Goodput,
    statistics: Statistics,
    extra: Mapping[str, Any],
    at: Instant | None = None,
) -> dict[str, Any]:
    """Everything worth keeping of a job. ``extra`` may hold job_id, name, started_at, loss_unigram and more.

    ``at`` is only for a job that still runs; an ended one is reported at its end.
    """
    goodput_figures = goodput.summary(at)
    figures = statistics.summary(at)
    tokens = goodput_figures["tokens"]
    islands = _islands(policy, goodput_figures, figures)
    return {
        "schema": SCHEMA,
        "job_id": None,
        "name": None,
        "started_at": None,
        "loss_unigram": None,
        **extra,
        **figures,
        "tokens_trained": round(tokens["trained"]),
        "tokens_merged": round(tokens["merged"]),
        "tokens_discarded": round(tokens["discarded"]),
        "tokens_in_flight": round(tokens["in_flight"]),
        "tokens_merged_per_second": goodput_figures["tokens_merged_per_second"],
        "goodput_ratio": goodput_figures["goodput_ratio"],
        "uptime_ratio": goodput_figures["uptime_ratio"],
        "island_seconds": goodput_figures["island_seconds"],
        "badput_seconds": goodput_figures["badput_seconds"],
        "discarded_tokens": goodput_figures["discarded_tokens"],
        "cost": goodput_figures.get("cost"),
        "islands": islands,
        "policy": _policy(policy, sum(not island["spare"] for island in islands.values())),
    }


def _islands(
    policy: JobPolicy, goodput_figures: Mapping[str, Any], figures: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the figures by island. A ``spare`` is a scale-up slot that was never filled, of a job that placed others."""
    placed = {name for name, own in goodput_figures["islands"].items() if any(own["seconds"].values())}
    return {
        plan.island: {
            "spare": bool(placed) and plan.island not in placed,
            "region": plan.region,
            "node_group": plan.node_group,
            "accelerator_count": plan.accelerator_count,
            "seconds": goodput_figures["islands"][plan.island]["seconds"],
            "tokens": goodput_figures["islands"][plan.island]["tokens"],
            "step_time_median_s": figures["step_times_s"][plan.island],
            "gap_max_s": figures["gaps_max_s"].get(plan.island),
            "merges": figures["merges_per_island"].get(plan.island, 0),
        }
        for plan in policy.islands
    }


def _policy(policy: JobPolicy, islands: int) -> dict[str, Any]:
    """Return the policy's settings, which explain the figures; ``islands`` counts those without spares."""
    settings = {POLICY_NAMES.get(name, name): value for name, value in asdict(policy).items() if name not in PLACES}
    return {"islands": islands, **settings}
