"""The published tables that ``atoll reproduce`` computes anew: each cell as ours and as published.

**goodput** is the goodput of six systems at five sizes, all with the calibrated parameters. All systems of one size
see the same failure trace over the same virtual time, as long as the wanted standard error needs. The ten cells of one job
were fitted with two parameters (``calibration``). The 20 cells of several learners are predicted.

**heterogeneous** is eight learners of two speeds, and the cost of a quorum of all of them. arXiv:2604.21428 mixes TPU v6e
and v5p, which are 18 % apart, with another 10 % of variance, and reports goodput: 84 % with K = 8, 100 % with K = 1, with
grace or without. Here the real core decides, at protocol level, over four learners of each class whose step times are evenly
spread within ±10 % of their class. Nothing below is written into the simulation.

*Goodput* is merged tokens over the tokens that the same learners would train at full speed (``protocol``); *stepping* counts
all trained tokens, merged or not.

  - K = 8 gives 83 % by either measure if learners wait for each other as those of a synchronous method do: all go at the
    pace of the slowest, 1.18 × 1.10. If the 10 % are read as variance from step to step, an overlap of τ = 2 hides most of
    it and 92 % is left (``NOISE``); without overlap that reading gives 83 % too. Learners of this project never wait and
    lose nothing with K = 8 either: the work of a fast learner is only merged later.
  - K = 1 gives 100 % by stepping in any case. By merged tokens it gives 100 % with ``rebase``, this project's adoption. With
    the paper's ``replace`` the fastest learner merges alone and overwrites the work of the others: only 14 % of the tokens
    are merged. We conclude that the published 100 % is stepping time, which also explains its worse quality (51.4, with
    grace 55.3).

**scavenging** (``scavenging``) and **bandwidth** (``bandwidth``) have modules of their own. **quality** and **ablations**
(``TRAINED``) are trainings, which ``laboratory.trained_tables`` does; this module has what was published.

Sources: Decoupled DiLoCo, arXiv:2604.21428, whose cells were read in summaries of the paper; Streaming DiLoCo,
arXiv:2501.18512, and the scaling laws of DiLoCo, arXiv:2503.09799, read in the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from math import fsum
from random import Random
from typing import Any

from orchestrator.core.vocabulary import Duration
from orchestrator.simulation import bandwidth, calibration, oracles, protocol, scavenging
from orchestrator.simulation.fleet import FleetPlan, System
from orchestrator.simulation.fleet_world import simulate
from orchestrator.simulation.world import World
from orchestrator.system.plain import count

SYSTEMS: tuple[tuple[System, int], ...] = (
    (System.DATA_PARALLEL, 1),
    (System.ELASTIC_DATA_PARALLEL, 1),
    (System.DECOUPLED, 2),
    (System.DECOUPLED, 4),
    (System.DECOUPLED, 8),
    (System.DECOUPLED, 16),
)
CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
DECOUPLED_DILOCO = "arXiv:2604.21428"
UPTIME = "uptime at 2.4M"
STDERR = 0.0018
"""The wanted standard error. The 95 % interval is then about ±0.36 pp. It is an estimate itself, so ±0.5 pp is promised."""

LEARNERS, SPEED_GAP, SPREAD = 8, 1.18, 0.10
STEP_S: Duration = 1.0
START, STOP = 60.0, 300.0
PUBLISHED = {"K = 8, waiting": 0.84, "K = 1": 1.0, "K = 1 with grace": 1.0}
NOISE = "K = 8, waiting, step noise"


PUBLISHED_QUALITY: Mapping[str, tuple[float, float]] = {
    "K = 8, waiting": (54.4, 37.6),
    "K = 1": (51.4, 25.7),
    "K = 1 with grace": (55.3, 37.0),
}
"""Published mean scores of text and images. We do not train these settings."""
MERGED, STEPPING = "merged", "stepping"


class Unit(StrEnum):
    PERCENT = "%"
    GBPS = "Gbps"
    RATIO = "ratio"
    CHANGE = "% more loss"
    NATS = "nats"
    EXPONENT = "exponent"


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: ``ours`` and ``published``, each None if there is none. Percentages are ratios from 0 to 1.

    ``at`` is the column's place on an axis. ``is_fitted``: the published figure, or its row, chose a parameter of ours.
    ``is_secondary``: the published figure was read in a summary of the paper. ``unit`` is the table's if it is absent.
    """

    row: str
    column: str
    ours: float | None
    published: float | None = None
    at: float | None = None
    is_fitted: bool = False
    stderr: float | None = None
    is_secondary: bool = False
    unit: Unit | None = None

    @property
    def error(self) -> float | None:
        """Ours less the published figure."""
        return None if self.ours is None or self.published is None else self.ours - self.published


@dataclass(frozen=True, slots=True)
class Table:
    """A published table. ``seconds`` is the processor time that its cells took, ``agreement`` puts them into words.

    ``cells`` is None for a table of ``TRAINED``, which this package cannot compute.
    """

    name: str
    title: str
    source: str
    unit: Unit
    count: int
    seconds: float
    cells: Callable[[int], Iterator[Cell]] | None
    agreement: Callable[[Sequence[Cell]], str]
    notes: tuple[str, ...] = ()

    def plain(self, cells: Sequence[Cell], seed: int, more: Sequence[str] = ()) -> dict[str, Any]:
        """Return the table as plain data, with ``more`` notes. ``cells_of`` reads the cells back."""
        return {
            "table": self.name,
            "title": self.title,
            "source": self.source,
            "unit": str(self.unit),
            "seed": seed,
            "agreement": self.agreement(cells),
            "notes": [*self.notes, *more],
            "cells": [asdict(cell) for cell in cells],
        }


def cells_of(document: Mapping[str, Any]) -> list[Cell]:
    cells = [Cell(**cell) for cell in document["cells"]]
    return [cell if cell.unit is None else replace(cell, unit=Unit(cell.unit)) for cell in cells]


# ── goodput ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def plans(stderr: float = STDERR) -> Iterator[FleetPlan]:
    """Yield a plan for each cell, column by column. All of a column last as long as the longest."""
    for chips in CHIPS:
        column = [FleetPlan(chips, 1.0, system, learners) for system, learners in SYSTEMS]
        duration = max(oracles.duration_for(plan, stderr) for plan in column)
        yield from (replace(plan, duration=duration) for plan in column)


def goodput(seed: int = 0, *, stderr: float = STDERR) -> Iterator[Cell]:
    """Yield goodput by system and chips, and the uptime of the largest fleet."""
    for plan in plans(stderr):
        outcome = simulate(plan, seed)
        name, is_fitted = _system_name(plan.system, plan.learner_count), plan.learner_count == 1
        theirs = _published_goodput(plan.system, plan.learner_count)
        yield Cell(
            name, chips_name(plan.chips), outcome.goodput, theirs[plan.chips], plan.chips, is_fitted, outcome.stderr
        )
        if plan.chips == CHIPS[-1]:
            yield Cell(name, UPTIME, outcome.uptime, 1.0 if plan.learner_count >= 4 else None)


def _published_goodput(system: System, learners: int) -> Mapping[int, float]:
    if system is System.DECOUPLED:
        return calibration.DECOUPLED[learners]
    return calibration.NO_ELASTICITY if system is System.DATA_PARALLEL else calibration.ELASTIC


def _system_name(system: System, learners: int) -> str:
    names = {System.DATA_PARALLEL: "one job, no elasticity", System.ELASTIC_DATA_PARALLEL: "one job, elastic"}
    return names.get(system, f"decoupled, M = {learners}")


def chips_name(chips: int) -> str:
    return count(chips).replace(" ", "")


# ── heterogeneous ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Setting:
    """One row. ``waiting`` learners run in lock-step. ``noisy`` ones vary from step to step."""

    name: str
    quorum: int
    grace_cap_steps: float | None
    waiting: bool = False
    noisy: bool = False
    adoption: str = "rebase"


SETTINGS = (
    Setting("K = 8, waiting", 8, None, waiting=True),
    Setting("K = 1", 1, 0.0),
    Setting("K = 1 with grace", 1, 1.0),
    Setting("K = 8, nobody waits", 8, None),
    Setting(NOISE, 8, None, waiting=True, noisy=True),
    Setting("K = 1, replace", 1, 0.0, adoption="replace"),
    Setting("K = 1 with grace, replace", 1, 1.0, adoption="replace"),
)


def step_times() -> tuple[Duration, ...]:
    """Return the mean step times: four learners of each class, evenly spread within ±10 %."""
    each = LEARNERS // 2
    around = [1.0 - SPREAD + 2.0 * SPREAD * n / (each - 1) for n in range(each)]
    return tuple(STEP_S * gap * factor for gap in (1.0, SPEED_GAP) for factor in around)


def heterogeneous(seed: int = 0) -> Iterator[Cell]:
    """Yield what each setting merges and trains. A published goodput stands beside the measure that it fits."""
    for setting in SETTINGS:
        outcome = _run(setting, seed)
        if outcome.until < STOP:
            raise KeyboardInterrupt  # a partial row is meaningless
        name = setting.name
        yield Cell(name, MERGED, outcome.goodput, stderr=outcome.stderr)
        yield Cell(name, STEPPING, outcome.trained_ratio, PUBLISHED.get(name))
        yield Cell(name, "islands in a merge / 8", outcome.contributors_mean / LEARNERS)
        if name in PUBLISHED_QUALITY:
            text, image = PUBLISHED_QUALITY[name]
            yield Cell(name, "text score", None, text / 100.0)
            yield Cell(name, "image score", None, image / 100.0)


def _run(setting: Setting, seed: int) -> protocol.ProtocolOutcome:
    policy = protocol.policy(LEARNERS, quorum=setting.quorum, grace_cap_steps=setting.grace_cap_steps)
    plan = protocol.plan(step_times(), adoption=setting.adoption)
    if setting.noisy:
        random = Random(seed)
        means = [STEP_S] * (LEARNERS // 2) + [STEP_S * SPEED_GAP] * (LEARNERS // 2)
        samples = tuple(tuple(mean * max(0.1, random.gauss(1.0, SPREAD)) for _ in range(997)) for mean in means)
        plan = replace(plan, step_s=tuple(means), step_samples=samples)
    world = (protocol.LockStepWorld if setting.waiting else World)(policy, plan, seed, checked=False)
    return protocol.run(world, START, STOP, protocol.at_full_speed(plan))


# ── scavenging and bandwidth ──────────────────────────────────────────────────────────────────────────────────────────


def extra_compute(seed: int = 0) -> Iterator[Cell]:
    """Yield wall-clock times relative to no extra compute, and the published scores."""
    for row in scavenging.rows(seed):
        law = row["all_reduce"]
        name = f"{row['system']}, {row['pattern']}" if law is None else f"{row['system']}, all-reduce costs {law}"
        halfway = row["pattern"] == scavenging.HALFWAY
        is_fitted = law is not None or (row["system"] == System.DECOUPLED and halfway)
        yield Cell(
            name,
            extra_name(row["extra"]),
            row["wall_clock"],
            row["published"] if halfway else None,
            row["extra"],
            is_fitted,
        )
    for score, figures in scavenging.PUBLISHED_SCORES.items():
        for extra, figure in figures.items():
            yield Cell(f"{System.ELASTIC_DATA_PARALLEL}, {score} / 100", extra_name(extra), None, figure / 100.0, extra)


def extra_name(extra: float) -> str:
    return f"+{100 * extra:.0f} %"


def lines(seed: int = 0) -> Iterator[Cell]:
    """Yield the bandwidth of Streaming DiLoCo's Table 4, and the two figures of Decoupled DiLoCo."""
    del seed  # nothing is random
    for model, system, wanted, ours, theirs in bandwidth.table_4():
        yield Cell(f"{model}, {system}", f"{100 * wanted:g} %", ours, theirs, wanted)
    ratios, published = bandwidth.ratios(bandwidth.Traffic()), bandwidth.PUBLISHED
    for name in ("data-parallel", "decoupled"):
        key = f"{name.replace('-', '_')}_gbps"
        yield Cell(f"8 datacentres, {name}", "98 %", ratios[key], published[key], 0.98, is_fitted=True)


# ── quality and ablations ─────────────────────────────────────────────────────────────────────────────────────────────

SCALING_LAWS, MULOCO, STREAMING_DILOCO = "arXiv:2503.09799", "arXiv:2505.23725", "arXiv:2501.18512"
DATA_PARALLEL = "data-parallel"
TRAINED_SIZES = ("0.01M", "0.03M", "0.1M", "0.3M", "1M", "3M")
"""The parameters of our trained models (``laboratory.trained_tables.SIZES``)."""
LEARNER_COUNTS = (1, 2, 4, 8)
SCALING_TABLE_4: Mapping[str, tuple[float, ...]] = {
    "35M": (3.485, -0.001, 0.007, 0.020, 0.039),
    "90M": (3.167, -0.001, 0.005, 0.015, 0.031),
    "180M": (2.950, -0.002, 0.003, 0.011, 0.023),
    "335M": (2.784, -0.003, 0.001, 0.009, 0.020),
    "550M": (2.653, -0.003, 0.002, 0.007, 0.017),
    "1.3B": (2.460, -0.004, 0.002, 0.005, 0.013),
    "2.4B": (2.326, -0.004, -0.001, 0.003, 0.011),
}
"""The loss of data-parallel by size, and how much more DiLoCo with M = 1, 2, 4 and 8 has, with H = 30."""
STREAMING_TABLE_6: Mapping[tuple[int, int], float] = {(2, 100): 3.56 / 3.51 - 1.0, (4, 100): 3.64 / 3.51 - 1.0}
"""How much more loss 35M parameters have with M and H = 100 than data-parallel (table 5)."""
EXPONENT_OF_M = 0.0116
"""b of L = a · N^−0.0985 · M^b, fitted to all sizes together (table 10)."""
EXPONENT_RANGE = (0.008, 0.016)


def by_learners(learners: int, interval: int = 30) -> str:
    return f"M = {learners}" if interval == 30 else f"M = {learners}, H = {interval}"


def quality_published() -> Iterator[Cell]:
    """Yield the rows of Table 4."""
    for size, (loss, *changes) in SCALING_TABLE_4.items():
        yield Cell(f"{size}, published", DATA_PARALLEL, None, loss, 0.5, unit=Unit.NATS)
        for learners, change in zip(LEARNER_COUNTS, changes, strict=True):
            yield Cell(f"{size}, published", by_learners(learners), None, change, learners)


def _shape_of_quality(cells: Sequence[Cell]) -> str:
    """Say for each row of ours whether it has the published shape."""
    parts = []
    for row in dict.fromkeys(cell.row for cell in cells if cell.ours is not None):
        ours = {cell.column: cell.ours for cell in cells if cell.row == row and cell.ours is not None}
        changes = [ours.get(by_learners(learners)) for learners in LEARNER_COUNTS]
        have = [change for change in changes if change is not None]
        words = []
        if changes[0] is not None:
            words.append(f"M = 1 is {'not ' if changes[0] <= 0.0 else ''}above data-parallel")
        if len(have) > 1:
            words.append(f"{'rises' if have == sorted(have) else 'does not always rise'} in M")
        if (exponent := ours.get("exponent of M")) is not None:
            low, high = EXPONENT_RANGE
            words.append(f"exponent {exponent:.4f}, {'' if low <= exponent <= high else 'not '}within {low} to {high}")
        if words:
            parts.append(f"{row}: {', '.join(words)}")
    return "; ".join(parts) or "nothing was trained yet"


def _shape_of_ablations(cells: Sequence[Cell]) -> str:
    """Count the differences in loss of which both have the same sign, ignoring published ones below 0.3 %."""
    both = [
        (cell.ours, cell.published, cell)
        for cell in cells
        if cell.unit is None and cell.ours is not None and cell.published is not None and abs(cell.published) >= 0.003
    ]
    differing = [f"{cell.row} at {cell.column}" for ours, published, cell in both if ours * published <= 0.0]
    count = sum(cell.ours is not None for cell in cells)
    text = f"{count} of {len(cells)} cells trained; {len(both) - len(differing)} of {len(both)} have the published sign"
    return f"{text}; not {', '.join(differing)}" if differing else text


def waiting_goodput(seed: int) -> float:
    """Return the goodput of eight learners of two speeds that wait for each other (``heterogeneous``)."""
    return _run(SETTINGS[0], seed).goodput


TRAINED: Mapping[str, Table] = {
    table.name: table
    for table in (
        Table(
            "quality",
            "Held-out loss of DiLoCo relative to data-parallel, by M, size and inner optimizer",
            f"Scaling laws for DiLoCo, {SCALING_LAWS}, tables 4 and 10; H = 100: Streaming DiLoCo, {STREAMING_DILOCO}, "
            "tables 5 and 6",
            Unit.CHANGE,
            0,
            0.0,
            None,
            _shape_of_quality,
            (
                "20 tokens per parameter, H = 30, one batch of the same tokens for all M, synchronous DiLoCo.",
                "Ours are far smaller than any published model, so they stand beside the smallest, 35M.",
                f"MuLoCo ({MULOCO}) says that Muon inside is better than Muon with data-parallel at M = 1; its cells could "
                "not be read.",
            ),
        ),
        Table(
            "ablations",
            "Held-out loss of a setting relative to that of the setting it replaces",
            f"Decoupled DiLoCo, {DECOUPLED_DILOCO}; τ: Streaming DiLoCo, {STREAMING_DILOCO}",
            Unit.CHANGE,
            0,
            0.0,
            None,
            _shape_of_ablations,
            (
                "Published are losses for bits and τ, and for the others by how much a mean score of text tasks is lower.",
                "AdamW, 20 tokens per parameter, H = 24, P = 8, τ = 2, all learners in a merge except at two speeds; with "
                "whole layers, P is their number. The goodput of learners that wait is that of the table heterogeneous.",
            ),
        ),
    )
}


def _within_a_step(cells: Sequence[Cell]) -> str:
    step = bandwidth.TABLE_4_GRID
    factors = [(c.ours / c.published, c) for c in cells if c.ours and c.published and not c.is_fitted]
    far = [
        f"{cell.row} at {cell.column} ({factor:.2f})" for factor, cell in factors if not 1.0 / step <= factor <= step
    ]
    return (
        f"{len(factors) - len(far)} of {len(factors)} cells within a step of the published grid; not {', '.join(far)}"
    )


def _differences(cells: Sequence[Cell]) -> str:
    parts = []
    for word, wanted in (("fitted", True), ("predicted", False)):
        counted = [cell for cell in cells if cell.is_fitted == wanted and cell.column != UPTIME]
        errors = [(100.0 * cell.error, cell) for cell in counted if cell.error is not None]
        if errors:
            mean = fsum(abs(error) for error, _ in errors) / len(errors)
            worst, cell = max(errors, key=lambda one: abs(one[0]))
            bias = fsum(error for error, _ in errors) / len(errors)
            parts.append(
                f"{len(errors)} {word} cells: mean absolute error {mean:.2f} points, bias {bias:+.2f}, "
                f"worst {worst:+.1f} ({cell.row}, {cell.column})"
            )
    return "; ".join(parts)


TABLES: Mapping[str, Table] = {
    table.name: table
    for table in (
        Table(
            "goodput",
            "Goodput of one job and of M learners, by chips",
            f"Decoupled DiLoCo, {DECOUPLED_DILOCO}, table 1",
            Unit.PERCENT,
            len(SYSTEMS) * (len(CHIPS) + 1),
            10.0,
            goodput,
            _differences,
            ("A chip is interrupted once a year on average, and takes its slice out of service.",),
        ),
        Table(
            "heterogeneous",
            "Eight learners of two speeds: what a quorum costs",
            f"Decoupled DiLoCo, {DECOUPLED_DILOCO}, table 5",
            Unit.PERCENT,
            3 * len(SETTINGS) + 2 * len(PUBLISHED_QUALITY),
            4.0,
            heterogeneous,
            _differences,
            (
                "merged counts merged tokens, stepping all trained tokens, relative to the same learners at full speed.",
                "The published 100 % of K = 1 is stepping. Counting merged tokens, only adoption rebase reaches 100 %.",
                "Scores of trained models are published; these settings were not trained here.",
            ),
        ),
        Table(
            "scavenging",
            "Time to a fixed number of tokens with extra compute, 1 without",
            f"Decoupled DiLoCo, {DECOUPLED_DILOCO}",
            Unit.RATIO,
            scavenging.COUNT + sum(len(figures) for figures in scavenging.PUBLISHED_SCORES.values()),
            8.0,
            extra_compute,
            _differences,
            (
                "Assumed: the extra arrives at half time and stays. The paper does not say when. This fits decoupled's row.",
                "orchestrator/simulation/scavenging.py discusses why the simulated elastic system differs.",
            ),
        ),
        Table(
            "bandwidth",
            "Gbps of each datacentre, each way, for a compute utilisation",
            "Streaming DiLoCo, arXiv:2501.18512, table 4; 198 and 0.84 Gbps: " + DECOUPLED_DILOCO,
            Unit.GBPS,
            len(bandwidth.TABLE_4) * 25 + 2,
            0.1,
            lines,
            _within_a_step,
            (
                "H = 100, two datacentres, fragments of three layers, overlapped: one step. A fragment is sent during the "
                "backward pass, which gives it two thirds of a step more. Without that, 30 cells would be near.",
                "198 and 0.84 Gbps follow from four assumptions that were chosen for them.",
                "For 10B at 50 %, diloco needs 1.7 Gbps here and 1.4 in a later paper of the authors (arXiv:2503.09799).",
            ),
        ),
    )
}
