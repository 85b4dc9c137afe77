"""The runs that were trained by a tape and against it, as a table: each seed, and the mean over seeds with its error.

A tape is one pattern of failures; a seed is another start and another order of the same data. What two runs of one seed
differ by is mostly chance where they are short, so it is the mean that says something, and its standard error how much.
Nothing is trained here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from typing import Literal

from rich.table import Table

from orchestrator.laboratory.matching import Match

Method = Literal["tape", "no-failures", "data-parallel"]
METHODS: tuple[Method, ...] = ("tape", "no-failures", "data-parallel")


@dataclass(frozen=True, slots=True)
class Run:
    """One training run. ``key`` names everything that decides its result, ``digest`` the parameters bit for bit.

    ``tokens`` are all that were trained, lost work too; ``contributors_mean`` is per merge, ``as_recorded_count`` the
    merges that gave the bits which the tape names (none, if it was simulated). ``curve`` is (tokens, held-out loss).
    """

    method: Method
    key: str
    loss: float
    curve: tuple[tuple[int, float], ...]
    tokens: int
    goodput_ratio: float
    digest: str
    merge_count: int = 0
    contributors_mean: float = 0.0
    as_recorded_count: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A run in the table; ``gap`` is the loss by the tape over this one's of the same seed, less one, as a ratio."""

    seed: int
    run: Run
    gap: float


@dataclass(frozen=True, slots=True)
class Mean:
    """Over all seeds; ``gap_stderr`` is the standard error of the mean gap, from its spread between seeds."""

    method: Method
    loss: float
    gap: float
    gap_stderr: float


def judge(seed: int, runs: Sequence[Run]) -> list[Row]:
    ours = next(run.loss for run in runs if run.method == "tape")
    return [Row(seed, run, ours / run.loss - 1) for run in runs]


def means(rows: Sequence[Row]) -> list[Mean]:
    """Of each method; none of a single seed."""
    if len({row.seed for row in rows}) < 2:
        return []
    methods = [method for method in METHODS if any(row.run.method == method for row in rows)]
    return [_mean(method, [row for row in rows if row.run.method == method]) for method in methods]


def _mean(method: Method, rows: Sequence[Row]) -> Mean:
    count = len(rows)
    gap = fsum(row.gap for row in rows) / count
    variance = fsum((row.gap - gap) ** 2 for row in rows) / (count - 1)
    return Mean(method, fsum(row.run.loss for row in rows) / count, gap, sqrt(variance / count))


def table(match: Match, rows: Sequence[Row]) -> Table:
    spec, sync, over_seeds = match.spec, match.spec.synchroniser, means(rows)
    caption = "held-out loss in nats per byte, each at the same token budget; gap: the tape's loss over this one's"
    drawn = Table(
        title=f"{spec.name}: {spec.model.preset}, {spec.island_count} islands × {spec.horizon_steps} steps × "
        f"{spec.training.batch_size} × {spec.data.sequence_length} bytes; H = {sync.interval_steps}, P = {sync.fragments}",
        caption=caption + (", ± its mean's standard error" if over_seeds else ""),
    )
    for column in ("seed", "trained by", "tokens", "goodput", "merges × contributors", "loss", "gap"):
        drawn.add_column(column, justify="left" if column == "trained by" else "right")
    for row in rows:
        run = row.run
        if run.method == "tape":
            drawn.add_section()
        merges = f"{run.merge_count:,} × {run.contributors_mean:.2f}" if run.merge_count else ""
        gap = "" if run.method == "tape" else f"{row.gap:+.2%}"
        goodput = f"{run.goodput_ratio:.1%}"
        drawn.add_row(str(row.seed), run.method, f"{run.tokens:,}", goodput, merges, f"{run.loss:.4f}", gap)
    drawn.add_section()
    for mean in over_seeds:
        gap = "" if mean.method == "tape" else f"{mean.gap:+.2%} ± {mean.gap_stderr:.2%}"
        drawn.add_row("mean", mean.method, "", "", "", f"{mean.loss:.4f}", gap)
    return drawn


def digests(rows: Sequence[Row]) -> str:
    """The parameters bit for bit, by name; and whether a live job's bits came out again."""
    lines = [f"parameters' digest, seed {row.seed}, {row.run.method}: {row.run.digest}" for row in rows]
    recorded = rows[0].run
    if recorded.as_recorded_count:
        lines.append(f"{recorded.as_recorded_count:,} of {recorded.merge_count:,} merges gave the bits on the tape.")
    return "\n".join(lines)
