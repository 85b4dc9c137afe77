"""`atoll simulate`, `atoll plan` and `atoll reproduce`: a fleet in virtual time, by formulas, and as published.

Only a plan of what a service has (--job, --groups) needs one.

This module handles the options, shows progress on stderr and prints, writes and draws the results.
``orchestrator.simulation`` computes them. Ctrl-C prints what was simulated until then and exits with code 130.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.commands.common import (
    INTERRUPTED,
    SEED_MAX,
    HomeOption,
    JsonOption,
    UrlOption,
    connect,
    console,
    echo,
    print_json,
    run_to_end,
    say,
)
from api.installation.home import DEFAULT_HOME
from orchestrator.errors import ConfigurationError
from orchestrator.system.disk import LocalDisk

if TYPE_CHECKING:
    from api.client import Client
    from api.schemas import Island
    from orchestrator.simulation.line_advice import SyncSettings
    from orchestrator.simulation.planner import Figure
    from orchestrator.simulation.published import Cell, Table


SpecArgument = Annotated[
    Path, typer.Argument(metavar="SPEC", help="A fleet or a fitted world, such as deploy/configs/simulate.yaml.")
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", min=0, max=SEED_MAX, help="Seed. Default: the specification's.")
]
TapeOption = Annotated[Path | None, typer.Option("--tape", help="Write the run to a new tape.", metavar="OUT")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Draw the result.", metavar="OUT.svg")]
PlanJobArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[JOB.yaml]", help="A job whose model, islands, tokens and settings are planned."),
]
RunningOption = Annotated[
    str | None,
    typer.Option(
        "--job", metavar="JOB", help="Plan from what this job of the service has measured. latest: the newest."
    ),
]
GroupsOption = Annotated[bool, typer.Option("--groups", help="Plan an island for each node group of the service.")]
ParametersOption = Annotated[str | None, typer.Option(metavar="N", help="Trained parameters, such as 8e9.")]
IslandsOption = Annotated[str | None, typer.Option(metavar="N", help="Islands.")]
HostsOption = Annotated[str | None, typer.Option(metavar="N", help="Hosts of each island. It dies with any of them.")]
AcceleratorsOption = Annotated[str | None, typer.Option(metavar="N", help="Accelerators of each host. Default: 8.")]
MtbfOption = Annotated[str | None, typer.Option("--mtbf-host", metavar="TIME", help="Mean time until a host dies: 3d.")]
LineOption = Annotated[str | None, typer.Option(metavar="SPEED", help="An island's line, each way, such as 5Gbps.")]
RoundTripOption = Annotated[str | None, typer.Option(metavar="TIME", help="Its round trip. Default: 60ms.")]
StepOption = Annotated[str | None, typer.Option("--step-s", metavar="TIME", help="An inner step.")]
ReturnOption = Annotated[
    str | None, typer.Option("--host-return", metavar="TIME", help="Until a dead host is replaced. Default: 15min.")
]
StartOption = Annotated[
    str | None, typer.Option("--start", metavar="TIME", help="Start of an island's processes. Default: 90s.")
]
PerStepOption = Annotated[
    str | None, typer.Option("--tokens-per-step", metavar="N", help="Tokens of one island's step. Default: 1048576.")
]
TokensOption = Annotated[str | None, typer.Option(metavar="N", help="Token budget. Default: 20 for each parameter.")]
ShardsOption = Annotated[str | None, typer.Option(metavar="N", help="Shards of the synchroniser. Default: 1.")]
PriceOption = Annotated[
    str | None, typer.Option(metavar="KIND=PRICE", help="Price of an accelerator and hour, such as gpu=2.10.")
]
PRICE = re.compile(r"^[A-Za-z][\w.-]*=")
"""The kind of accelerator before a price. It is for people: a fleet has one kind."""
TablesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TABLE]...", help="Tables to compute. Default: those that are simulated.", show_default=False
    ),
]
SizeOption = Annotated[
    list[str] | None,
    typer.Option("--size", help="Parameters of the trained models: 0.01M to 3M, or all. Repeatable. Default: 0.01M."),
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="TEXT", help="Train for cells with this in their names. Repeatable."),
]
EstimateOption = Annotated[bool, typer.Option("--estimate", help="Say what the trainings cost, and do none.")]
IntoOption = Annotated[
    Path,
    typer.Option("--into", metavar="DIR", help="Folder for TABLE.json and TABLE.svg; it is made if it is missing."),
]
TableSeedOption = Annotated[int, typer.Option("--seed", min=0, max=SEED_MAX, help="Seed of what is random.")]
AgainOption = Annotated[bool, typer.Option("--again", help="Compute tables that the folder already has, too.")]


def simulate(
    file: SpecArgument,
    seed: SeedOption = None,
    tape: TapeOption = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a fleet under seeded failures: goodput, badput by cause, uptime, merges and bandwidth of several systems.

    Ctrl-C prints the results so far, marked as partial.
    """
    if plot is not None and not plot.absolute().parent.is_dir():
        raise ConfigurationError(
            detail=f"{plot} cannot be written: the folder {plot.absolute().parent} does not exist."
        )
    _run_spec(file, seed, tape, plot, as_json)


def plan(
    job: PlanJobArgument = None,
    parameters: ParametersOption = None,
    islands: IslandsOption = None,
    hosts: HostsOption = None,
    accelerators: AcceleratorsOption = None,
    mtbf_host: MtbfOption = None,
    line: LineOption = None,
    round_trip: RoundTripOption = None,
    step_s: StepOption = None,
    host_return: ReturnOption = None,
    start: StartOption = None,
    tokens_per_step: PerStepOption = None,
    tokens: TokensOption = None,
    shards: ShardsOption = None,
    price: PriceOption = None,
    running: RunningOption = None,
    groups: GroupsOption = False,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan a fleet before paying: goodput, H, P, τ and codec for its lines, memory, standbys, time and money.

    The figures come from options, from JOB.yaml, from a job of the service (--job), or from its node groups (--groups).
    Options count first. The formulas are those of `atoll doctor --lines` and of the fleet simulator.
    """
    from api.simulation import plan_table, plan_words, source_words
    from orchestrator.simulation import planner
    from orchestrator.specification.config import parse_job
    from orchestrator.specification.documents import read_document

    typed = {
        "parameters": parameters,
        "islands": islands,
        "hosts": hosts,
        "accelerators": accelerators,
        "mtbf_host": mtbf_host,
        "line": line,
        "round_trip": round_trip,
        "step_s": step_s,
        "host_return": host_return,
        "start": start,
        "tokens_per_step": tokens_per_step,
        "tokens": tokens,
        "shards": shards,
        "price": price and PRICE.sub("", price),
    }
    typed = {name: value for name, value in typed.items() if value is not None}
    if (job is not None) + (running is not None) + groups > 1:
        raise ConfigurationError(detail="JOB.yaml, --job and --groups exclude each other. Give one of them.")
    figures: dict[str, planner.Figure] = {}
    settings = None
    if job is not None:
        specified, settings = planner.of_job(parse_job(read_document(job)))
        figures = {name: planner.Figure(value, str(job)) for name, value in specified.items()}
    elif running is not None:
        with connect(home, url) as client:
            figures, settings = _running(client, running)
    elif groups:
        with connect(home, url) as client:
            there = client.node_groups()
        figures = planner.of_groups([(one.name, one.nodes, one.accelerators) for one in there if not one.cordoned])
    figures |= {name: planner.Figure(value, "an option") for name, value in typed.items()}
    fleet = planner.fleet_of({name: figure.value for name, figure in figures.items()})
    outcome = planner.planned(fleet, settings)
    if as_json:
        sources = {name: figures[name].source if name in figures else "assumed" for name in fleet.model_dump()}
        print_json({"fleet": fleet.model_dump(), "sources": sources, "plans": planner.plain(outcome)})
        return
    for text in (*plan_words(fleet, outcome), *(source_words(fleet, figures) if running is not None or groups else ())):
        echo(text)
    console().print(plan_table(fleet, outcome))


def _running(client: Client, name: str) -> tuple[dict[str, Figure], SyncSettings]:
    """Return what a job of the service has measured. Its whole tape is read."""
    from orchestrator.simulation import planner
    from orchestrator.simulation.observed import Observed
    from orchestrator.specification.config import parse_job
    from orchestrator.tape.codec import decode_tagged

    job, seen = client.job(name), Observed()
    spec = parse_job(client.specification(job.job).specification)
    for record in client.events(job.job, follow=False):
        seen.apply(decode_tagged(record.event), tuple(map(decode_tagged, record.effects)))
    paces = [
        planner.Pace(
            one.island,
            1.0 / one.steps_per_second if one.steps_per_second else None,
            one.tokens_total / one.steps_total if one.steps_total else None,
            _slower_way(one),
        )
        for one in job.islands
    ]
    return planner.of_running(spec, paces, seen)


def _slower_way(island: Island) -> float | None:
    """Return the bits per second of the slower way of its line; None before payloads went both ways."""
    if (line := island.line) is None:
        return None
    ways = ((line.up_bytes, line.up_busy_seconds), (sum(line.down_bytes.values()), line.down_busy_seconds))
    return min((8.0 * count / seconds if seconds else 0.0) for count, seconds in ways) or None


def _run_spec(file: Path, seed: int | None, tape: Path | None, plot: Path | None, as_json: bool) -> None:
    from api.simulation import TapeFiles, badput_table, headline, label, systems_table
    from orchestrator.report.simulated import systems_chart
    from orchestrator.simulation import run, spec
    from orchestrator.specification.documents import read_document

    document = read_document(file)
    parsed = spec.parse(document if seed is None else {**document, "seed": seed})
    with TapeFiles(tape, run.tape_names(parsed)) if tape else nullcontext() as tapes:
        with Progress(parsed.name) as progress:
            result = run.simulate(parsed, progress.show, tapes.open if tapes else None)
        digests = tapes.digests() if tapes else {}
    title, subtitle = headline(result)
    if plot is not None:
        _draw(plot, systems_chart([{**row, "label": label(row)} for row in result.rows], title, subtitle))
    if as_json:
        print_json({**result.plain(), "tapes": digests})
    else:
        for text in (title, *subtitle, ""):
            echo(text)
        console().print(systems_table(result.rows))
        echo()
        console().print(badput_table(result.rows))
        for note in (*result.notes, *(f"tape {path}, digest {digest}" for path, digest in digests.items())):
            echo(note)
    if result.partial:
        say(f"interrupted: results of {result.simulated_s:,.0f} s of {parsed.duration:,.0f} s")
        raise typer.Exit(INTERRUPTED)


def reproduce(
    tables: TablesArgument = None,
    into: IntoOption = Path("reproduced"),
    seed: TableSeedOption = 0,
    again: AgainOption = False,
    size: SizeOption = None,
    only: OnlyOption = None,
    estimate: EstimateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compute published tables anew, ours beside the published cells.

    Simulated in seconds: goodput, heterogeneous, scavenging, bandwidth. Trained, and only if they are named: quality and
    ablations, in minutes for the smallest models and in days for the largest. Their cost is announced first.

    Tables are stored as JSON and as pictures, and each training as soon as it ends. After Ctrl-C, the same command goes on.
    """
    from api.simulation import FOOT
    from orchestrator.simulation.published import TABLES, TRAINED, TRAINED_SIZES

    unknown = sorted({*(tables or ())} - {*TABLES, *TRAINED})
    if unknown:
        raise ConfigurationError(detail=f"There is no table {unknown[0]!r}. Tables: {', '.join((*TABLES, *TRAINED))}.")
    trained = [name for name in TRAINED if name in (tables or ())]
    options = {"--size": size, "--only": only, "--estimate": estimate}
    if not trained and (unused := [name for name, value in options.items() if value]):
        raise ConfigurationError(detail=f"{unused[0]} is for trained tables. Name one: {', '.join(TRAINED)}.")
    if other := sorted({*(size or ())} - {*TRAINED_SIZES, "all"}):
        raise ConfigurationError(detail=f"There is no --size {other[0]}. Sizes: {', '.join(TRAINED_SIZES)}, or all.")
    wanted = [table for name, table in TABLES.items() if not tables or name in tables]
    if estimate and wanted:
        detail = f"--estimate is for trained tables, and {wanted[0].name} is simulated. Leave {wanted[0].name} out."
        raise ConfigurationError(detail=detail)
    results: list[dict[str, Any]] = []
    try:
        into.mkdir(parents=True, exist_ok=True)
        for table, cells in _reproduced(wanted, into, seed, again):
            results.append(table.plain(cells, seed))
            if as_json:
                continue
            _show(table, cells, (table.agreement(cells), *table.notes, FOOT), into)
        if trained and (
            code := _trained(trained, into, seed, again, size or (), only or (), estimate, as_json, results)
        ):
            raise typer.Exit(code)
    except OSError as error:
        raise ConfigurationError(detail=f"--into {into}: {error.strerror}. Name another folder.") from None
    except KeyboardInterrupt:
        say(f"interrupted: {len(results)} of {len(wanted)} tables are complete; the same command computes the rest")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if as_json and not estimate:  # whose figures the process of the trainings prints
            print_json(results)


def _reproduced(wanted: Sequence[Table], into: Path, seed: int, again: bool) -> Iterator[tuple[Table, list[Cell]]]:
    """Yield each table with its cells: those in the folder, or computed and stored there. Says first what it will cost."""
    from api.simulation import stored_cells

    stored = {} if again else {table.name: stored_cells(into / f"{table.name}.json", seed) for table in wanted}
    left = [table for table in wanted if not stored.get(table.name)]
    if left:
        seconds = sum(table.seconds for table in left)
        say(f"{len(left)} of {len(wanted)} tables to compute, about {math.ceil(seconds)} s of one processor")
    for table in wanted:
        cells = stored.get(table.name) or []
        if not cells:
            with Progress(table.name) as progress:
                for cell in table.cells(seed) if table.cells is not None else ():
                    cells.append(cell)
                    progress.show(min(1.0, len(cells) / table.count))
            text = json.dumps(table.plain(cells, seed), indent=1, ensure_ascii=False) + "\n"
            LocalDisk().replace(into / f"{table.name}.json", text.encode())
        _draw_table(table, cells, into, is_new=table in left)
        yield table, cells


def _draw_table(table: Table, cells: Sequence[Cell], into: Path, *, is_new: bool) -> None:
    """Draw a table that is new, or whose picture is missing."""
    from api.simulation import published_chart

    if is_new or not (into / f"{table.name}.svg").exists():
        LocalDisk().replace(into / f"{table.name}.svg", published_chart(table, cells).encode())


def _trained(
    names: Sequence[str],
    into: Path,
    seed: int,
    again: bool,
    sizes: Sequence[str],
    only: Sequence[str],
    estimate: bool,
    as_json: bool,
    results: list[dict[str, Any]],
) -> int:
    """Train for these tables, print and draw what is finished, and return the exit code. Adds the tables to ``results``."""
    from api.simulation import FOOT_OF_TRAINED
    from orchestrator.simulation.published import TRAINED, cells_of
    from orchestrator.system import python_process

    # A process of its own: it imports JAX, which the command line must not.
    command = python_process.command("orchestrator.laboratory.trained_tables", *names, "--into", str(into))
    command += ["--seed", str(seed), *["--again"] * again]
    command += [*["--estimate"] * estimate, *["--json"] * (estimate and as_json)]
    for option, values in (("--size", sizes), ("--only", only)):
        for value in values:
            command += [option, value]
    code = run_to_end(command)
    if estimate or code not in (0, INTERRUPTED):
        return code
    for name in names:
        table, path = TRAINED[name], into / f"{name}.json"
        if not path.exists():
            continue
        document = json.loads(path.read_text(encoding="utf-8"))
        cells = cells_of(document)
        _draw_table(table, cells, into, is_new=True)
        results.append(document)
        if not as_json:
            _show(table, cells, (document["agreement"], *document["notes"], FOOT_OF_TRAINED), into)
    return code


def _show(table: Table, cells: Sequence[Cell], notes: Sequence[str], into: Path) -> None:
    from api.simulation import published_table

    echo(f"{table.title}. {table.source}")
    console().print(published_table(table, cells))
    for note in (*notes, f"{into / table.name}.json and .svg", ""):
        echo(note)


def _draw(path: Path, drawing: str) -> None:
    path.write_text(drawing, encoding="utf-8")
    say(f"drawn: {path}")


class Progress:
    """A progress bar on stderr if that is a terminal. Ctrl-C is held until the next ``show`` raises KeyboardInterrupt.

    An interruption thus falls between two parts of a simulation, with complete tapes. A second Ctrl-C acts at once.
    """

    def __init__(self, name: str) -> None:
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        self._bar = Bar(*columns, TimeRemainingColumn(), console=console(stderr=True), transient=True)
        self._task = self._bar.add_task(name, total=1.0)
        self._interrupted = False
        self._handler = signal.getsignal(signal.SIGINT)

    def show(self, ratio: float, what: str = "") -> None:
        """Show the progress and ``what`` is being simulated. Raises KeyboardInterrupt after Ctrl-C."""
        if self._interrupted:
            raise KeyboardInterrupt
        self._bar.update(self._task, completed=ratio, description=what or None)

    def __enter__(self) -> Progress:
        if self._handler is signal.default_int_handler:  # keep a handler that someone else has set
            signal.signal(signal.SIGINT, self._interrupt)
        if self._bar.console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        signal.signal(signal.SIGINT, self._handler)

    def _interrupt(self, *_: object) -> None:
        self._interrupted = True
        say("stopping after this part; press Ctrl-C again to stop at once")
        signal.signal(signal.SIGINT, self._handler)


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Science")(simulate)
    app.command(rich_help_panel="Science")(plan)
    app.command(rich_help_panel="Science")(reproduce)
