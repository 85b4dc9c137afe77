"""The output of `atoll simulate`: tapes, tables for people, and its presets.

``PRESETS`` runs each preset and prepares its table, chart, notes and JSON. The rest computes nothing. A run writes one tape,
sealed when the command ends, also after Ctrl-C. A specification with several systems is several runs, and every tape is
named after its run: out.jsonl becomes out-decoupled.jsonl. Nothing is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from api.terminal.listing import Listing
from orchestrator.errors import ConfigurationError
from orchestrator.system.plain import count, percent, seconds
from orchestrator.tape.schema import FleetHeader, Header
from orchestrator.tape.storage import TapeWriter

if TYPE_CHECKING:
    from orchestrator.simulation.run import Simulated

Row = Mapping[str, Any]
Progress = Callable[..., None]


class TapeFiles:
    """The tapes of the runs ``names``. A single run writes ``path`` itself."""

    def __init__(self, path: Path, names: tuple[str, ...]) -> None:
        self.paths = {name: path if len(names) == 1 else path.with_stem(f"{path.stem}-{name}") for name in names}
        self._writers: list[TapeWriter] = []
        for one in self.paths.values():
            if not one.absolute().parent.is_dir():
                raise ConfigurationError(
                    detail=f"{one} cannot be written: the folder {one.absolute().parent} does not exist."
                )
            if one.exists():
                raise ConfigurationError(detail=f"{one} already exists. Remove it, or name another tape.")

    def open(self, name: str, header: Header | FleetHeader) -> TapeWriter:
        writer = TapeWriter(self.paths[name], header)
        self._writers.append(writer)
        return writer

    def digests(self) -> dict[str, str]:
        """Return the digest of every tape, as in its footer, by path."""
        return {str(writer.path): writer.digest for writer in self._writers}

    def __enter__(self) -> TapeFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.close()


def headline(result: Simulated) -> tuple[str, list[str]]:
    """Return a title, and lines that say what was simulated."""
    spec, fleet = result.spec, result.spec.fleet
    when = f"{span(result.simulated_s)} of virtual time, seed {spec.seed}"
    if result.partial:
        when = f"interrupted after {span(result.simulated_s)} of {span(spec.duration)}, seed {spec.seed}"
    if fleet is None:
        return f"{spec.name}: where island time went", [f"a world fitted to a tape; {when}"]
    what = (
        f"{fleet.chips:,} chips in slices of {fleet.chips_per_slice}, {fleet.learners} learners; "
        f"mean time between interruptions per chip {span(fleet.mtbi_chip)}"
    )
    return f"{spec.name}: where the fleet's time went", [what, when]


def systems_table(rows: Sequence[Row]) -> Listing:
    table = _table("system", "goodput", "uptime", "merges", "islands/merge", "Gbps used")
    for row in rows:
        table.add_row(
            label(row),
            with_error(row["goodput"], row["stderr"]),
            percent(row["uptime"]),
            "–" if row["merges"] is None else f"{row['merges']:,}",
            "–" if row["contributors_mean"] is None else f"{row['contributors_mean']:.2f}",
            "–" if row["bandwidth_gbps"] is None else f"{row['bandwidth_gbps']:.3g}",
        )
    return table


def badput_table(rows: Sequence[Row]) -> Listing:
    """Return lost time by cause, largest first; systems are rows and causes columns, or the reverse if causes are more."""
    causes = {cause for row in rows for cause, ratio in row["badput"].items() if ratio >= 0.0005}
    ranked = sorted(causes, key=lambda c: (-sum(row["badput"].get(c, 0.0) for row in rows), c))
    cells = {(label(row), c): percent(row["badput"][c]) for row in rows for c in ranked if row["badput"].get(c)}
    names = [label(row) for row in rows]
    short = {c: c.replace("stalled: ", "").replace("waiting for the slowest learner", "waiting") for c in ranked}
    if len(ranked) <= len(rows):
        table = _table("lost to", *short.values())
        for name in names:
            table.add_row(name, *(cells.get((name, c), "–") for c in ranked))
        return table
    table = _table("lost to", *names)
    for cause in ranked:
        table.add_row(short[cause], *(cells.get((name, cause), "–") for name in names))
    return table


def label(row: Row) -> str:
    return str(row["system"]) if row["level"] == "fleet" else f"{row['system']} ({row['level']})"


def goodput_table(rows: Sequence[Row]) -> Listing:
    """Return a table with systems as rows and chips as columns; the last column is the uptime of the largest fleet."""
    chips = sorted({row["chips"] for row in rows})
    sizes = [count(size).replace(" ", "") for size in chips]
    table = _table("goodput, %", *sizes, "uptime")
    for system, learners in dict.fromkeys((row["system"], row["learners"]) for row in rows):
        mine = {r["chips"]: r for r in rows if (r["system"], r["learners"]) == (system, learners)}
        cells = [f"{100 * mine[c]['goodput']:.1f}±{196 * mine[c]['stderr']:.1f}" if c in mine else "–" for c in chips]
        name = system.replace("-data-parallel", "") if learners == 1 else f"{system}, M = {learners}"
        table.add_row(name, *cells, percent(mine[chips[-1]]["uptime"]) if chips[-1] in mine else "–")
    return table


def heterogeneous_table(rows: Sequence[Row]) -> Listing:
    table = _table("setting", "goodput", "stepping", "islands/merge", "published")
    for row in rows:
        published = "–" if row["published"] is None else percent(row["published"])
        figures = (
            with_error(row["goodput"], row["stderr"]),
            percent(row["stepping"]),
            f"{row['contributors_mean']:.2f}",
        )
        table.add_row(row["setting"], *figures, published)
    return table


def scavenging_table(rows: Sequence[Row]) -> Listing:
    """Return a table with systems as rows and extras as columns; published rows follow ours."""
    extras = sorted({row["extra"] for row in rows})
    table = _table("wall-clock, 1 = no extra", *(f"+{100 * extra:.0f} %" for extra in extras), "available")
    for key in dict.fromkeys((row["system"], row["pattern"], row["all_reduce"]) for row in rows):
        mine = {r["extra"]: r for r in rows if (r["system"], r["pattern"], r["all_reduce"]) == key}
        system, pattern, law = key
        name = system if law is None else f"  all-reduce {law}, c = {next(iter(mine.values()))['c']:.2f}"
        table.add_row(name, *(f"{mine[x]['wall_clock']:.2f}" if x in mine else "–" for x in extras), pattern)
    published = {(r["system"], r["extra"]): r["published"] for r in rows if r["published"] is not None}
    for system in dict.fromkeys(system for system, _ in published):
        cells = [f"{published[system, x]:.2f}" if (system, x) in published else "–" for x in extras]
        table.add_row(f"{system}, published", *cells, "not stated", style="dim")
    return table


def bandwidth_table(rows: Sequence[Row]) -> Listing:
    levels = list(rows[0]["needed_gbps"])
    table = _table("Gbps each way", "mean", *(f"{100 * float(level):g} %" for level in levels))
    for row in rows:
        needed = [row["needed_gbps"][level] for level in levels]
        table.add_row(row["system"], f"{row['mean_gbps']:.3g}", *("never" if n is None else f"{n:.3g}" for n in needed))
    return table


def _table(first: str, *headings: str) -> Listing:
    return Listing(first, *headings, right=headings, pad_edge=False)


def with_error(goodput: float, stderr: float | None) -> str:
    """Return the figure with its 95 % interval."""
    has_error = stderr is not None and stderr == stderr
    return f"{100 * goodput:.1f} ± {196 * (stderr or 0.0):.1f} %" if has_error else percent(goodput)


def figure(value: float | None, unit: str) -> str:
    """Return a what-if's figure in its unit."""
    if value is None:
        return "–"
    if unit == "ratio":
        return percent(value)
    return seconds(value) if unit == "s" else f"{value:,.4g}{unit and ' ' + unit}"


def span(duration: float) -> str:
    """Return a duration in the largest unit of which there are at least two, or exactly one."""
    for unit, name in ((365.25 * 86400.0, "year"), (86400.0, "day"), (3600.0, "hour"), (60.0, "minute")):
        if duration >= 2 * unit or duration == unit:
            return f"{duration / unit:.3g} {name}{'' if duration == unit else 's'}"
    return f"{duration:.3g} s"


@dataclass(frozen=True, slots=True)
class PresetResult:
    """``plain`` is what --json prints, ``chart`` draws what --plot writes, and ``notes`` are printed below the table."""

    plain: Any
    table: Listing
    chart: Callable[[], str]
    notes: tuple[str, ...] = ()
    partial: bool = field(default=False)


def goodput_table_preset(seed: int, progress: Progress) -> PresetResult:
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
    table = goodput_table(rows)
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
    return PresetResult(rows, heterogeneous_table(rows), chart, notes, partial)


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
    return PresetResult(rows, scavenging_table(rows), chart, notes, partial)


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
    return PresetResult(plain, bandwidth_table(rows), chart, notes)


PRESETS: Mapping[str, Callable[[int, Progress], PresetResult]] = {
    "goodput-table": goodput_table_preset,
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
