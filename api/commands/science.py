"""Commands that need no service: replay a tape, compare training methods."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from api.commands.common import JsonOption, print_json


def replay(
    tape: Annotated[Path, typer.Argument(metavar="TAPE", help="A tape.jsonl, or the folder of a run.")],
    as_json: JsonOption = False,
) -> None:
    """Say whether this build decides as the recorded one did. Exit code 1 at the first difference."""
    from orchestrator.tape.replay import replay as replay_tape
    from orchestrator.tape.storage import read_tape

    path = tape / "tape.jsonl" if tape.is_dir() else tape
    recorded = read_tape(path)
    result = replay_tape(recorded)
    sealed = recorded.footer.digest if recorded.footer else None
    if as_json:
        facts = {"tape": str(path), "steps": result.steps, "matching": result.matching, "exact": result.exact}
        facts |= {"digest": result.digest, "digest_recorded": sealed, "torn": recorded.torn}
        print_json(facts | {"divergence": str(result.divergence) if result.divergence else None})
    elif result.exact:
        seal = "the digest is the recorded one" if sealed else "the tape is not sealed: its job has not ended properly"
        typer.echo(
            f"identical: all {result.steps:,} steps of {path} give the recorded effects; {seal} ({result.digest})"
        )
        if recorded.torn:
            typer.echo(f"note: {recorded.torn}", err=True)
    else:
        typer.echo(f"different after {result.matching:,} of {result.steps:,} steps of {path}\n{result.divergence}")
    if not result.exact:
        raise typer.Exit(1)


def compare(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A comparison: a job, and what to try.")],
    baselines: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline", help="data-parallel or diloco; may be given several times.", show_default="data-parallel"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a job's method and its baselines on the same tokens, each at its best learning rate; print the table."""
    # A process of its own: it imports JAX, which the command line must not.
    command = [sys.executable, "-m", "orchestrator.laboratory.compare", str(file)]
    for baseline in baselines or ["data-parallel"]:
        command += ["--baseline", baseline]
    code = subprocess.run([*command, "--json"] if as_json else command, check=False).returncode
    raise typer.Exit(code if code >= 0 else 1)


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Science")(replay)
    app.command(rich_help_panel="Science")(compare)
