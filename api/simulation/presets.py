"""The presets of `atoll simulate`: runs each one and prepares its table, chart, notes and JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from api.simulation import simulated
from api.terminal.listing import Listing

Progress = Callable[..., None]


@dataclass(frozen=True, slots=True)
class PresetResult:
    """``plain`` is what --json prints, ``chart`` draws what --plot writes, and ``notes`` are printed below the table."""

    plain: Any
    table: Listing
    chart: Callable[[], str]
    notes: tuple[str, ...] = ()
    partial: bool = field(default=False)


def goodput_table(seed: int, progress: Progress) -> PresetResult:
    from orchestrator.report.simulated import goodput_curves
    from orchestrator.simulation import goodput_table as preset

    rows: list[dict[str, Any]] = []
    total, partial = len(preset.SYSTEMS) * len(preset.CHIPS), False

    def done(row: preset.Row) -> None:
        rows.append(dict(row))
        progress(len(rows) / total)

    try:
        rows = [dict(row) for row in preset.run(seed, progress=done)]
    except KeyboardInterrupt:
        partial = True
    head = [f"Each chip is interrupted once a year on average and takes its slice out of service; seed {seed}."]
    notes = ("Columns: total chips. ± is the 95 % interval. Uptime is that of the largest fleet.",)
    table = simulated.goodput_table(rows)
    return PresetResult(rows, table, lambda: goodput_curves(rows, _published(), head), notes, partial)


def heterogeneous(seed: int, progress: Progress) -> PresetResult:
    from orchestrator.report.simulated import systems_chart
    from orchestrator.simulation import goodput_table as preset

    rows, partial = _as_far_as_it_goes(preset.rows(seed), len(preset.SETTINGS), progress)
    head = ["Eight learners, half of them 18 % slower, each class spread over ±10 %. Goodput is merged tokens over the"]
    head.append("tokens that they would train at full speed. The rest was not trained, or trained and overwritten.")

    def chart() -> str:
        bars = [
            {
                "label": row["setting"],
                "goodput": min(1.0, row["goodput"]),
                "stderr": row["stderr"],
                "badput": {
                    "waiting for the slowest": max(0.0, 1.0 - row["stepping"]),
                    "trained, not merged": max(0.0, row["stepping"] - row["goodput"]),
                },
            }
            for row in rows
        ]
        return systems_chart(bars, "Learners of two speeds: what a quorum costs", head)

    notes = (
        "goodput counts merged tokens, stepping all trained tokens, both relative to the same learners at full speed.",
        "The published 100 % of K = 1 is stepping. Counting merged tokens, only adoption rebase reaches 100 %.",
    )
    return PresetResult(rows, simulated.heterogeneous_table(rows), chart, notes, partial)


def scavenging(seed: int, progress: Progress) -> PresetResult:
    from orchestrator.report.simulated import SYSTEMS, Axis, Line, lines_chart
    from orchestrator.simulation import scavenging as preset

    rows, partial = _as_far_as_it_goes(preset.rows(seed), preset.COUNT, progress)
    head = [
        "Wall-clock time to a fixed number of tokens if extra compute arrives at half time and stays; 1 is without extra.",
        "Dashed: elastic if an all-reduce between sites costs c, or c·p(1−p), of a step (p: share of the extra compute).",
    ]

    def chart() -> str:
        lines = []
        for key in dict.fromkeys((r["system"], r["all_reduce"]) for r in rows if r["pattern"] == preset.HALFWAY):
            mine = [r for r in rows if (r["system"], r["all_reduce"]) == key and r["pattern"] == preset.HALFWAY]
            marks = [(r["extra"], r["published"]) for r in mine] if key[1] is None else []
            dashes = {None: "", preset.CONSTANT: "7 5"}.get(key[1], "2 5")
            name = "elastic" if key[0] != "decoupled" else "decoupled"
            points = [(r["extra"], r["wall_clock"]) for r in mine]
            lines.append(Line(name if key[1] is None else f"+ {key[1]}", SYSTEMS[key[0]], points, marks, dashes))
        ticks = tuple(preset.EXTRAS)
        across = Axis("extra compute", lambda x: f"+{100 * x:.0f} %", 0.22, 3.0, logarithmic=True, ticks=ticks)
        up = Axis("wall-clock time", lambda y: f"{y:.1f}", 0.5, 1.2, ticks=(0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2))
        return lines_chart(lines, across, up, "Wall-clock time with scavenged compute", head)

    notes = (
        "The paper does not say when its extra compute is available. orchestrator/simulation/scavenging.py discusses why "
        "the simulated elastic system differs from the published one.",
    )
    return PresetResult(rows, simulated.scavenging_table(rows), chart, notes, partial)


def bandwidth(seed: int, progress: Progress) -> PresetResult:
    from orchestrator.report.simulated import SYSTEMS, Axis, Line, lines_chart
    from orchestrator.simulation import bandwidth as preset

    del seed  # nothing is random
    traffic = preset.Traffic()
    rows, ratios = preset.table(traffic), preset.ratios(traffic)
    progress(1.0)
    what = (
        f"{traffic.parameters / 1e9:g}B parameters, {traffic.step_s:g} s per step, {traffic.learners} datacentres; "
        f"P = {traffic.fragments}, H = {traffic.interval_steps}, τ = {traffic.overlap_steps:g}; decoupled sends "
        f"{traffic.wire_bits:g} bits per parameter"
    )

    def chart() -> str:
        names_at = {"data-parallel": 0.4, "diloco": 0.55, "streaming-diloco": 0.55, "decoupled": None}
        marks = {"data-parallel": [(198.0, ratios["utilisation"])], "decoupled": [(0.84, 1.0)]}
        lines = []
        for system in preset.SYSTEMS:
            points, height = preset.curve(system, traffic, 0.1, 1000.0), names_at[system]
            named = (0.1, 0.965) if height is None else next(one for one in points if one[1] >= height)
            lines.append(Line(system, SYSTEMS[system], points, marks.get(system, ()), name_at=named))
        across = Axis("Gbps per datacentre, each way", lambda x: f"{x:g}", 0.1, 1000.0, logarithmic=True)
        up = Axis("compute utilisation", lambda y: f"{100 * y:.0f} %", 0.0, 1.0, ticks=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0))
        return lines_chart(lines, across, up, "Compute utilisation against bandwidth", [what])

    notes = (
        what,
        f"data-parallel : decoupled = {ratios['data_parallel_gbps']:.0f} : {ratios['decoupled_gbps']:.2f} Gbps = "
        f"{ratios['ratio']:.0f} at {100 * ratios['utilisation']:.0f} % utilisation (published 198 : 0.84 = 236), "
        f"{ratios['ratio_without_4_bit']:.0f} without 4-bit (published about 61)",
    )
    plain: Mapping[str, Any] = {"rows": rows, "ratios": ratios, "published": preset.PUBLISHED}
    return PresetResult(plain, simulated.bandwidth_table(rows), chart, notes)


PRESETS: Mapping[str, Callable[[int, Progress], PresetResult]] = {
    "goodput-table": goodput_table,
    "heterogeneous": heterogeneous,
    "scavenging": scavenging,
    "bandwidth": bandwidth,
}


def _published() -> list[dict[str, Any]]:
    """Return the paper's cells, for the chart."""
    from orchestrator.simulation import calibration

    rows = [("data-parallel", 1, calibration.NO_ELASTICITY), ("elastic-data-parallel", 1, calibration.ELASTIC)]
    learners, chips, goodput = calibration.PREDICTED
    rows.append(("decoupled", learners, {chips: goodput}))
    return [{"system": s, "learners": m, "chips": c, "goodput": g} for s, m, row in rows for c, g in row.items()]


def _as_far_as_it_goes(rows: Any, total: int, progress: Progress) -> tuple[list[dict[str, Any]], bool]:
    """Return the rows of a generator, and whether Ctrl-C interrupted it."""
    done: list[dict[str, Any]] = []
    try:
        for row in rows:
            done.append(row)
            progress(min(1.0, len(done) / total))
    except KeyboardInterrupt:
        return done, True
    return done, False
