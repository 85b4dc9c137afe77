"""`atoll simulate`: simulates a fleet in virtual time, from a specification or a preset. Needs no service.

This module handles the options, shows progress on stderr and prints, writes and draws the results.
``orchestrator.simulation`` does the simulating. Ctrl-C prints what was simulated until then and exits with code 130.
"""

from __future__ import annotations

import signal
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from api.commands.common import INTERRUPTED, SEED_MAX, JsonOption, console, echo, print_json, say
from orchestrator.errors import ConfigurationError


class Preset(StrEnum):
    GOODPUT_TABLE = "goodput-table"
    HETEROGENEOUS = "heterogeneous"
    SCAVENGING = "scavenging"
    BANDWIDTH = "bandwidth"


SpecArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[SPEC]", help="A fleet or a fitted world, such as deploy/configs/simulate.yaml."),
]
PresetOption = Annotated[Preset | None, typer.Option("--preset", help="Reproduce a published result, instead of SPEC.")]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", min=0, max=SEED_MAX, help="Seed. Default: the specification's, or 0 for a preset."),
]
TapeOption = Annotated[Path | None, typer.Option("--tape", help="Write the run to a new tape.", metavar="OUT")]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="Draw the result.", metavar="OUT.svg")]


def simulate(
    file: SpecArgument = None,
    preset: PresetOption = None,
    seed: SeedOption = None,
    tape: TapeOption = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a fleet under seeded failures: goodput, badput by cause, uptime, merges and bandwidth of several systems.

    Ctrl-C prints the results so far, marked as partial.
    """
    if (file is None) == (preset is None):
        raise ConfigurationError(detail="Give either a specification or a --preset.")
    if preset is not None and tape is not None:
        raise ConfigurationError(
            detail="A preset consists of many runs, so it has no single tape. Use --tape with a SPEC."
        )
    if plot is not None and not plot.absolute().parent.is_dir():
        raise ConfigurationError(
            detail=f"{plot} cannot be written: the folder {plot.absolute().parent} does not exist."
        )
    if preset is not None:
        _run_preset(preset, seed or 0, plot, as_json)
    elif file is not None:
        _run_spec(file, seed, tape, plot, as_json)


def _run_spec(file: Path, seed: int | None, tape: Path | None, plot: Path | None, as_json: bool) -> None:
    from api.simulation import TapeFiles, badput_table, headline, label, systems_table
    from orchestrator.report.simulated import systems_chart
    from orchestrator.simulation import run, spec
    from orchestrator.specification.config import read_document

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


def _run_preset(preset: Preset, seed: int, plot: Path | None, as_json: bool) -> None:
    from api.simulation import PRESETS

    with Progress(preset.value) as progress:
        result = PRESETS[preset.value](seed, progress.show)
    if result.partial and not result.plain:
        say("interrupted before the first row was complete")
        raise typer.Exit(INTERRUPTED)
    if plot is not None:
        _draw(plot, result.chart())
    if as_json:
        print_json(result.plain)
    else:
        console().print(result.table)
        for note in result.notes:
            echo(note)
    if result.partial:
        say("interrupted: these rows were complete")
        raise typer.Exit(INTERRUPTED)


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
