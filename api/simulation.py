"""The output of `atoll simulate` and `atoll reproduce`: tapes, and tables and charts for people. Nothing is computed here.

A run of ``simulate`` writes one tape, sealed when the command ends, also after Ctrl-C. A specification with several systems
is several runs, and every tape is named after its run: out.jsonl becomes out-decoupled.jsonl. Nothing is overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from api.terminal.listing import Listing
from orchestrator.errors import ConfigurationError
from orchestrator.system.plain import counted, money, percent, scaled, seconds, three_digits
from orchestrator.tape.schema import FleetHeader, Header
from orchestrator.tape.storage import TapeWriter

if TYPE_CHECKING:
    from orchestrator.report.simulated import Line
    from orchestrator.simulation.planner import Figure, Fleet, Planned
    from orchestrator.simulation.published import Cell, Table
    from orchestrator.simulation.run import Simulated

Row = Mapping[str, Any]
DURATIONS = {"mtbf_host", "step_s", "round_trip", "host_return", "start"}
"""The figures of a plan that are in seconds."""


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
    priced = ("cost", "per million tokens") if any("cost" in row for row in rows) else ()
    table = _table("system", "goodput", "uptime", "merges", "islands/merge", "Gbps used", *priced)
    for row in rows:
        cost = row.get("cost", {})
        sums = ("so_far", "per_merged_million_tokens") if priced else ()
        table.add_row(
            label(row),
            with_error(row["goodput"], row["stderr"]),
            percent(row["uptime"]),
            "–" if row["merges"] is None else f"{row['merges']:,}",
            "–" if row["contributors_mean"] is None else f"{row['contributors_mean']:.2f}",
            "–" if row["bandwidth_gbps"] is None else f"{row['bandwidth_gbps']:.3g}",
            *(money(cost.get(name), cost.get("currency", "")) for name in sums),
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


# ── published tables ──────────────────────────────────────────────────────────────────────────────────────────────────


FOOT_OF_TRAINED = (
    "In brackets: the published figure, and ours less it. A dagger marks secondary ones, read in summaries."
)
FOOT = "A star marks what was fitted to the published figure or its row. Published figures are in brackets."


def stored_cells(path: Path, seed: int) -> list[Cell]:
    """Return the cells of a table that was stored with this seed, or none."""
    from orchestrator.simulation.published import cells_of

    with suppress(OSError, ValueError, KeyError, TypeError):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["seed"] == seed:
            return cells_of(document)
    return []


def published_table(table: Table, cells: Sequence[Cell]) -> Listing:
    """Return rows and columns as published: ours, a star if it was fitted, and the published figure in brackets."""
    columns = columns_of(cells)
    listing = _table(table.unit, *columns)
    for row in dict.fromkeys(cell.row for cell in cells):
        mine = {cell.column: cell for cell in cells if cell.row == row}
        listing.add_row(row, *(cell_words(table, mine[column]) if column in mine else "" for column in columns))
    return listing


def columns_of(cells: Sequence[Cell]) -> tuple[str, ...]:
    """Return the columns by their places, and those without one last."""
    placed = sorted(cells, key=lambda cell: inf if cell.at is None else cell.at)
    return tuple(dict.fromkeys(cell.column for cell in placed))


def cell_words(table: Table, cell: Cell) -> str:
    unit = cell.unit or table.unit
    ours, published = _figure(unit, cell.ours), _figure(unit, cell.published)
    star = "*" if cell.is_fitted and cell.ours is not None else ""
    if cell.published is None:
        return f"{ours}{star}"
    dagger = "†" if cell.is_secondary else ""
    difference = "" if table.cells is not None or cell.error is None else f"; {_figure(unit, cell.error, '+')}"
    return f"{ours}{star} ({published}{dagger}{difference})"


def _figure(unit: str, value: float | None, sign: str = "") -> str:
    if value is None:
        return "–"
    match unit:
        case "%":
            return f"{100 * value:{sign}.1f}"
        case "% more loss":
            return f"{100 * value:+.1f}"
        case "exponent":
            return f"{value:{sign}.4f}"
    return f"{value:{sign}.4g}" if unit == "nats" else f"{value:{sign}.3g}"


def published_chart(table: Table, cells: Sequence[Cell]) -> str:
    """Draw our figures as curves or bars, and the published ones as marks."""
    charts = {
        "goodput": _goodput,
        "heterogeneous": _heterogeneous,
        "scavenging": _scavenging,
        "bandwidth": _bandwidth,
        "quality": _quality,
        "ablations": _ablations,
    }
    return charts[table.name](table, cells)


def _goodput(table: Table, cells: Sequence[Cell]) -> str:
    from orchestrator.report.simulated import GOODPUT_SHADES, RATIO, Axis, lines_chart

    lines = _lines(cells, dict(zip(dict.fromkeys(cell.row for cell in cells), GOODPUT_SHADES, strict=True)))
    chips = sorted({cell.at for cell in cells if cell.at is not None})
    names = {cell.at: cell.column for cell in cells}
    across = Axis("chips, all learners together", lambda x: names[x], chips[0] / 1.15, chips[-1] * 1.15, True, chips)
    return lines_chart(lines, across, RATIO, table.title, table.notes)


def _heterogeneous(table: Table, cells: Sequence[Cell]) -> str:
    from orchestrator.report.simulated import systems_chart
    from orchestrator.simulation.published import MERGED, STEPPING

    by_row: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        by_row.setdefault(cell.row, {})[cell.column] = cell
    bars = []
    for row, columns in by_row.items():
        merged, stepping = columns[MERGED].ours or 0.0, columns[STEPPING].ours or 0.0
        lost = {
            "waiting for the slowest": max(0.0, 1.0 - stepping),
            "trained, not merged": max(0.0, stepping - merged),
        }
        bars.append({"label": row, "goodput": min(1.0, merged), "stderr": columns[MERGED].stderr, "badput": lost})
    return systems_chart(bars, table.title, [table.notes[0]])


def _scavenging(table: Table, cells: Sequence[Cell]) -> str:
    from orchestrator.report.simulated import GOOD, SYSTEMS, Axis, lines_chart

    drawn = [cell for cell in cells if cell.ours is not None]
    elastic = SYSTEMS["elastic-data-parallel"]
    colours = {row: GOOD if row.startswith("decoupled") else elastic for row in dict.fromkeys(c.row for c in drawn)}
    ticks = sorted({cell.at for cell in drawn if cell.at is not None})
    across = Axis("extra compute", lambda x: f"+{100 * x:.0f} %", 0.22, 3.0, logarithmic=True, ticks=ticks)
    up = Axis("wall-clock time", lambda y: f"{y:.1f}", 0.3, 1.2, ticks=[n / 10 for n in range(3, 13)])
    return lines_chart(_lines(drawn, colours), across, up, table.title, table.notes[:1])


def _bandwidth(table: Table, cells: Sequence[Cell]) -> str:
    from orchestrator.report.simulated import GOOD, SHADES, SYSTEMS, Axis, Line, lines_chart

    model = "10B, "
    colours = {**SYSTEMS, "overlapped": GOOD, "overlapped, 4 bits": SHADES[2]}
    lines = []
    for row in dict.fromkeys(cell.row for cell in cells if cell.row.startswith(model)):
        mine = [cell for cell in cells if cell.row == row and cell.at is not None]
        ours = [(cell.ours, cell.at) for cell in mine if cell.ours is not None and cell.at is not None]
        theirs = [(cell.published, cell.at) for cell in mine if cell.published is not None and cell.at is not None]
        name = row.removeprefix(model)
        lines.append(Line(name, colours[name], ours, theirs))
    across = Axis("Gbps per datacentre, each way", lambda x: f"{x:g}", 0.1, 1000.0, logarithmic=True)
    up = Axis("compute utilisation", lambda y: f"{100 * y:.0f} %", 0.4, 1.0, ticks=(0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0))
    below = [table.notes[0].split(". ")[0] + "."]
    return lines_chart(lines, across, up, "Compute utilisation against bandwidth: 10B parameters", below)


def _quality(table: Table, cells: Sequence[Cell]) -> str:
    from orchestrator.report.simulated import CAUSES, GOODPUT_SHADES, Axis, Line, lines_chart
    from orchestrator.simulation.published import LEARNER_COUNTS, by_learners

    columns = {by_learners(learners) for learners in LEARNER_COUNTS}
    shown = [cell for cell in cells if cell.column in columns and (cell.ours is not None or cell.row.startswith("35M"))]
    rows = list(dict.fromkeys(cell.row for cell in shown))
    shades = (*GOODPUT_SHADES, *CAUSES)
    lines = []
    for row in rows:
        mine = [(cell, cell.at) for cell in shown if cell.row == row and cell.at is not None]
        ours = [(at, cell.ours) for cell, at in mine if cell.ours is not None]
        theirs = [(at, cell.published) for cell, at in mine if cell.published is not None and not ours]
        lines.append(Line(row, shades[rows.index(row) % len(shades)], ours, theirs))
    figures = [0.0, *(value for line in lines for _, value in (*line.points, *line.published))]
    across = Axis("learners", lambda x: f"{x:g}", 0.9, 9.0, logarithmic=True, ticks=LEARNER_COUNTS)
    up = Axis("more loss than data-parallel", lambda y: f"{100 * y:+.1f} %", min(figures) - 0.005, max(figures) + 0.005)
    return lines_chart(lines, across, up, "Held-out loss by M, against data-parallel", table.notes[:2])


def _ablations(table: Table, cells: Sequence[Cell]) -> str:
    from orchestrator.report.simulated import changes_chart

    changes = [
        (f"{cell.row}, {cell.column}", cell.ours, cell.published)
        for cell in cells
        if cell.ours is not None and cell.unit is None
    ]
    return changes_chart(changes, "More held-out loss than the setting it replaces", table.notes[:1])


def _lines(cells: Sequence[Cell], colours: Mapping[str, str]) -> list[Line]:
    """Return a curve of our figures for each row, with the published ones as marks. Cells without a place are left out."""
    from orchestrator.report.simulated import Line

    lines = []
    for row, colour in colours.items():
        placed = [(cell, cell.at) for cell in cells if cell.row == row and cell.at is not None]
        ours = [(at, cell.ours) for cell, at in placed if cell.ours is not None]
        theirs = [(at, cell.published) for cell, at in placed if cell.published is not None]
        lines.append(Line(_curve_name(row), colour, ours, theirs))
    return lines


def _curve_name(row: str) -> str:
    """Return a name with room beside a chart."""
    for long, short in (
        ("elastic-data-parallel, all-reduce costs ", "elastic + "),
        ("elastic-data-parallel, from half on", "elastic"),
        ("decoupled, half the time", "half the time"),
        ("decoupled, from half on", "decoupled"),
        ("one job, ", ""),
        ("decoupled, ", ""),
    ):
        if row.startswith(long):
            return short + row.removeprefix(long)
    return row


# ── plans ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def plan_words(fleet: Fleet, outcome: Planned) -> Iterator[str]:
    """Yield what was planned, the settings for the line, the memory, and what was assumed."""
    best, settings = outcome.best, outcome.best.settings
    islands, parameters = counted(fleet.islands, "island"), "parameter" if fleet.parameters == 1 else "parameters"
    yield (
        f"{amount(fleet.parameters)} {parameters}, {islands}, each of {fleet.hosts:,} × {fleet.accelerators:,} "
        f"accelerators. A host dies every {span(fleet.mtbf_host)} and is back after {span(fleet.host_return)}: an island "
        f"dies every {span(1.0 / fleet.death_rate)} and trains again after {span(fleet.outage_s)}."
    )
    changes = outcome.advice.changes(outcome.current)
    words = ", ".join(f"{name} {value}" for name, value in changes.items())
    yield (
        f"H = {settings.interval_steps}, P = {settings.fragments}, τ = {settings.overlap_steps}, {settings.codec}"
        + (f" (change {words})" if changes else "")
        + f": {percent(best.line_use)} of each line, and {scaled(best.synchroniser_bits_per_s, 'bps')} each way at the "
        f"synchroniser{'' if fleet.shards == 1 else f', shared by {fleet.shards:,} shards'}."
    )
    yield (
        f"Memory: {scaled(best.host_bytes, 'B')} of each host, {scaled(best.accelerator_bytes, 'B')} and activations of "
        f"each accelerator, {scaled(best.shard_bytes, 'B')} of {'the synchroniser' if fleet.shards == 1 else 'each shard'}."
    )
    if outcome.data_parallel is None or outcome.data_parallel.line_use > 1.0:
        needed = (
            "" if outcome.data_parallel is None else f" ({three_digits(outcome.data_parallel.line_use)} times the line)"
        )
        yield f"Data-parallel over these lines waits for its all-reduce in each step{needed}."
    yield (
        f"With {amount(fleet.tokens_per_step)} tokens in an island's step of {fleet.step_s:.3g} s, "
        f"{amount(fleet.budget)} token{'' if fleet.budget == 1 else 's'} in all."
    )


def source_words(fleet: Fleet, figures: Mapping[str, Figure]) -> Iterator[str]:
    """Yield a line for each figure of the plan: its value, and whether it was measured, specified or assumed."""
    for name, value in fleet.model_dump().items():
        if name.startswith("outer_") or value is None:
            continue
        source = figures[name].source if name in figures else "assumed"
        words = span(value) if name in DURATIONS else scaled(value, "bps") if name == "line" else amount(value)
        yield f"  {name.replace('_', '-')}: {words} ({source})"


def plan_table(fleet: Fleet, outcome: Planned) -> Listing:
    from orchestrator.simulation.planner import rows

    columns = ("goodput", "time", *(() if fleet.price is None else ("money",)))
    listing = _table("", *columns)
    for name, plan in rows(outcome):
        money = () if plan.money is None else (f"{plan.money:,.0f}",)
        listing.add_row(name, with_error(plan.goodput, plan.spread), span(plan.seconds), *money)
    return listing


def amount(value: float) -> str:
    """Return a large number with a letter: 8B, 1.05M."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{three_digits(value / unit)}{letter}"
    return f"{value:g}"
