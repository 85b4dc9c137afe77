"""Commands for science that need no service: `atoll compare`, and those for tapes.

A tape is replayed, has a world fitted to it, tries another policy in that world, or decides a training. `atoll compare`
trains a job's method and its baselines in one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from api.commands.common import (
    INTERRUPTED,
    SEED_MAX,
    CsvOption,
    JsonOption,
    PackagesOption,
    ParquetOption,
    RunsOption,
    console,
    echo,
    echo_lines,
    print_json,
    run_to_end,
    say,
)
from api.commands.simulate import Progress
from api.installation.home import DEFAULT_RUNS
from orchestrator.errors import ConfigurationError
from orchestrator.system import python_process
from orchestrator.system.run_folder import TAPE

if TYPE_CHECKING:
    from orchestrator.simulation.whatif import WhatIf
    from orchestrator.tape.schema import Tape


TapeArgument = Annotated[Path, typer.Argument(metavar="TAPE", help="A tape.jsonl, or the folder of a run.")]


def replay(tape: TapeArgument, as_json: JsonOption = False) -> None:
    """Replay a tape, and compare this build's decisions with the recorded ones. Exit code 1 at the first difference."""
    from orchestrator.tape.replay import replay as replay_tape

    path, recorded = _path(tape), _read(tape)
    result = replay_tape(recorded)
    sealed = recorded.footer.digest if recorded.footer else None
    if as_json:
        facts = {"tape": str(path), "steps": result.steps, "matching": result.matching, "exact": result.exact}
        facts |= {"digest": result.digest, "digest_recorded": sealed, "torn": recorded.torn}
        print_json(facts | {"divergence": str(result.divergence) if result.divergence else None})
    elif result.exact:
        seal = "the digest matches" if sealed else "the tape is not sealed, because its job has not ended properly"
        echo(f"identical: all {result.steps:,} steps of {path} give the recorded effects; {seal} ({result.digest})")
        if recorded.torn:
            say(f"note: {recorded.torn}")
    else:
        echo_lines(f"different after {result.matching:,} of {result.steps:,} steps of {path}\n{result.divergence}")
    if not result.exact:
        raise typer.Exit(1)


def fit(tape: TapeArgument) -> None:
    """Fit a world to a tape and print it as YAML for `atoll simulate`: `atoll tape fit TAPE > world.yaml`."""
    from orchestrator.simulation import worldfile
    from orchestrator.simulation.fit import fit as fit_world

    world = fit_world(_read(tape))
    echo_lines(worldfile.dump(world), nl=False)
    for note in world.notes:
        say(f"note: {note}")


def export(tape: TapeArgument, csv: CsvOption = None, parquet: ParquetOption = None) -> None:
    """Write a tape as a table, a row for each record, for pandas, DuckDB and the like."""
    from api.run import tables

    if csv is None and parquet is None:
        raise ConfigurationError(detail="there is nothing to write. Give --parquet FILE, or --csv FILE.")
    recorded = _read(tape)
    for line in tables.write_all(csv, parquet, tables.TAPE_COLUMNS, lambda: tables.tape_rows(recorded)):
        say(line)


def whatif(
    tape: TapeArgument,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="Change a synchroniser setting: quorum=2 or H=48. Repeatable."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=SEED_MAX, help="Seed of the random draws.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Estimate what would have happened under another policy, with the same faults and speeds.

    The column `unchanged` simulates the recorded policy: its distance to `happened` is the error of the fit. Ctrl-C prints
    partial results.
    """
    from orchestrator.simulation.whatif import WhatIf

    wanted = {}
    for change in changes or []:
        name, equals, value = change.partition("=")
        if not equals:
            raise ConfigurationError(detail=f"--set {change!r} is not NAME=VALUE. Write, for example, quorum=2.")
        wanted[name.strip()] = value.strip()
    question = WhatIf(_read(tape), wanted, seed)
    interrupted = False
    with Progress("what if") as bar:
        try:
            for progress in question.run():
                bar.show(progress.ratio, progress.column)
        except KeyboardInterrupt:
            interrupted = True
    if as_json:
        print_json({**question.summary(), "partial": interrupted})
    else:
        _show(question)
    if interrupted:
        say("interrupted: the results above are partial")
        raise typer.Exit(INTERRUPTED)


def _show(question: WhatIf) -> None:
    from api.simulation import figure
    from api.terminal.listing import Listing

    names = [name if column.complete else f"{name} (partial)" for name, column in question.columns.items()]
    table = Listing("", *names, right=names, pad_edge=False)
    for row in question.rows():
        table.add_row(row.name, *(figure(row.values.get(name), row.unit) for name in question.columns))
    console().print(table)
    for note in question.fitted.notes:
        echo(f"note: {note}")


def train_tape(
    tape: TapeArgument,
    config: Annotated[
        Path, typer.Option("--config", metavar="CFG", help="Job specification: model, data, optimizers.")
    ],
    baselines: Annotated[
        list[str] | None, typer.Option("--baseline", help="no-failures or data-parallel. Repeatable.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=1000, help="Number of seeds; their mean is printed.")] = 1,
    runs: RunsOption = DEFAULT_RUNS,
    packages: PackagesOption = None,
    again: Annotated[bool, typer.Option("--again", help="Repeat finished runs, and compare the bits.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train in one process, driven by a tape, to measure what its failures do to the model."""
    # In a separate process: it imports JAX, which the command line must not.
    command = python_process.command("orchestrator.laboratory.train_tape", str(tape), "--config", str(config))
    command += ["--runs", str(runs), "--seeds", str(seeds)]
    for baseline in baselines or []:
        command += ["--baseline", baseline]
    command += ["--again"] * again + ["--json"] * as_json
    raise typer.Exit(run_to_end(command, packages=packages or ()))


def _path(tape: Path) -> Path:
    return tape / TAPE if tape.is_dir() else tape


def _read(tape: Path) -> Tape:
    from orchestrator.tape.storage import read_tape

    return read_tape(_path(tape))


def compare(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A comparison file: a job, and the values to try.")],
    baselines: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            help="data-parallel, diloco or equal-speeds. Repeatable.",
            show_default="data-parallel",
        ),
    ] = None,
    packages: PackagesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a job's method and its baselines on the same tokens, each at its best learning rate, and print a table."""
    # A process of its own: it imports JAX, which the command line must not.
    command = python_process.command("orchestrator.laboratory.compare", str(file))
    for baseline in baselines or ["data-parallel"]:
        command += ["--baseline", baseline]
    raise typer.Exit(run_to_end([*command, "--json"] if as_json else command, packages=packages or ()))


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Science")(replay)
    app.command(rich_help_panel="Science")(whatif)
    app.command("train-tape", rich_help_panel="Science")(train_tape)
    app.command(rich_help_panel="Science")(compare)
    group = typer.Typer(no_args_is_help=True, help="Fit a world to a tape, or write it as a table.")
    group.command("fit")(fit)
    group.command("export")(export)
    group.callback()(_tape)
    app.add_typer(group, name="tape", rich_help_panel="Science")


def _tape() -> None:
    """Fit a world to a tape, or write it as a table."""
