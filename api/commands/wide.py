"""Everything that is known of a job's islands in one table, for `atoll islands -o wide`. Pure: a table from an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from api.schemas import Island, Job
from api.terminal.listing import Listing
from api.terminal.watch import last_merge

WORDS = ("island", "node group", "region", "state", "node")
FIGURES = (
    *("pid", "life", "restarts", "steps/s", "step", "behind", "tokens", "loss"),
    *("last merge", "merges", "refused", "gap"),
)


def island_table(job: Job) -> Listing:
    """A line for each island.

    ``behind`` is its staleness in logical steps, against the furthest that trains; ``gap`` its longest time between steps.
    """
    table = Listing(*WORDS, *FIGURES, "why", prose=("why",), right=FIGURES, padding=(0, 2, 0, 0))
    furthest = max((island.step for island in job.islands if island.state == "training"), default=0)
    for island in job.islands:
        table.add_row(*_words(island), *_figures(island, job, furthest), island.reason)
    return table


def _words(island: Island) -> tuple[str, ...]:
    return island.island, island.node_group, island.region, island.state.replace("_", " "), island.node or "–"


def _figures(island: Island, job: Job, furthest: int) -> tuple[str, ...]:
    statistics = job.statistics
    return (
        _number(island.pid, "d"),
        str(island.incarnation or "–"),
        str(island.restarts),
        _number(island.steps_per_second, ".2f"),
        f"{island.step:,}",
        f"{furthest - island.step:,}" if island.state == "training" else "–",
        f"{island.tokens_total:,}",
        _number(island.loss, ".3f"),
        last_merge(island, job),
        str(_of(statistics, "merges_per_island", island) or 0),
        str(_of(statistics.get("traffic", {}), "refused", island) or 0),
        "–" if (gap := _of(statistics, "gaps_max_s", island)) is None else f"{gap:.2f} s",
    )


def _of(statistics: Mapping[str, Any], figure: str, island: Island) -> Any:
    """The island's own part of a figure; None where the job does not tell it."""
    return statistics.get(figure, {}).get(island.island)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
