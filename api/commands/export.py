"""The command that takes a job's merged parameters out of it, for use elsewhere."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.commands.common import HomeOption, JobArgument, UrlOption, connect, say
from api.installation.home import DEFAULT_HOME
from orchestrator import python_process
from orchestrator.errors import ConfigurationError, DataError, RequestError

if TYPE_CHECKING:
    from api.client import Client  # takes a third of a second, which only who asks a service must wait for

HEADER_BYTES_MAX = 100_000_000
"""As safetensors itself allows."""
WRITER = "learners.orbax_export"


class Format(StrEnum):
    SAFETENSORS = "safetensors"
    ORBAX = "orbax"
    HUGGINGFACE = "huggingface"


def export(
    job: JobArgument,
    form: Annotated[Format, typer.Option("--format", help="What to write the parameters as.")] = Format.SAFETENSORS,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to.", show_default="JOB-export")
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
) -> None:
    """Write a job's merged parameters, also of one that runs, with the specification that says what they mean."""
    with connect(home, url) as client:
        name = client.job(job).job
        folder = out or Path(f"{name}-export")
        target = folder / ("checkpoint" if form is Format.ORBAX else "model.safetensors")
        if target.exists():
            raise ConfigurationError(detail=f"{target} is there already. Remove it, or give another --out.")
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / "model.safetensors.draft"
        client.download_parameters(name, draft)
        facts = described(draft)
        if form is Format.HUGGINGFACE:
            try:
                _write_for_transformers(client, name, draft, folder, facts["spec"])
            finally:
                draft.unlink()
            return
    (folder / "config.json").write_text(json.dumps(facts, indent=1) + "\n")
    if form is Format.ORBAX:
        # A process of its own: Orbax imports JAX, which the command line must not.
        written = subprocess.run(
            python_process.module(WRITER, str(draft), str(target)), env=python_process.cleaned(os.environ), check=False
        )
        draft.unlink()
        if written.returncode:
            raise typer.Exit(1)
    else:
        draft.rename(target)
    say(f"wrote {target} and {folder / 'config.json'}")


def _write_for_transformers(client: Client, job: str, draft: Path, folder: Path, spec: dict[str, Any]) -> None:
    """A tokenizer that the service does not have any more keeps nobody from the parameters."""
    from orchestrator.bounds import BYTES  # brings pydantic
    from orchestrator.models.huggingface import export as huggingface  # brings NumPy

    copy, lacking = None, ""
    try:
        if (path := spec["data"]["tokenizer"]) != BYTES:
            copy = folder / f"tokenizer.draft{Path(path).suffix}"
            try:
                client.download_tokenizer(job, copy)
            except RequestError as error:
                copy, lacking = None, f". It has no tokenizer: {error}"
        huggingface.write(draft, folder, spec, copy)
    finally:
        if copy is not None:
            copy.unlink(missing_ok=True)
    say(f"wrote {', '.join(sorted(each.name for each in folder.iterdir() if each != draft))} into {folder}{lacking}")
    if not lacking:
        say(f"transformers loads {folder}, its AutoTokenizer as well")


def described(path: Path) -> dict[str, Any]:
    """The file's metadata, with the specification as data. Raises DataError if it is no such file."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        try:
            facts = json.loads(file.read(min(length, HEADER_BYTES_MAX)))["__metadata__"]
            return {**facts, "spec": json.loads(facts["spec"])}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(detail=f"{path} does not say what job its parameters are of ({error!r}).") from error


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Jobs")(export)
