"""`atoll tokenizer`: make a tokenizer for `data.tokenizer`. Needs no service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from api.commands.tapes import run_to_end
from orchestrator import python_process


def train(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILES", help="Text, .jsonl, .parquet, .arrayrecord; with .gz or .zst; or URLs."),
    ],
    output: Annotated[Path, typer.Option("--output", help="The tokenizer.json to write.")],
    vocabulary_size: Annotated[
        int, typer.Option("--vocabulary-size", min=257, max=1 << 20, help="How many tokens it has.")
    ] = 32_000,
    text_field: Annotated[str, typer.Option("--text-field", help="Where JSON and Parquet have the text.")] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="Print what was made as JSON, and no progress.")] = False,
) -> None:
    """Train byte-level BPE on files and write it as a tokenizer.json. The same files give the same tokenizer."""
    # A process of its own: the library keeps threads and much memory, and is an extra of atoll.
    command = python_process.module("learners.tokenizer_training", "--vocabulary-size", str(vocabulary_size))
    command += ["--output", str(output), "--text-field", text_field, *(["--json"] if as_json else []), "--", *files]
    raise typer.Exit(run_to_end(command))


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Make a tokenizer for data.tokenizer.")
    group.command("train")(train)
    app.add_typer(group, name="tokenizer", rich_help_panel="Science")
