"""The command that takes a job's merged parameters out of it, for use elsewhere."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.commands.common import HomeOption, JobArgument, UrlOption, connect, say
from api.installation.home import DEFAULT_HOME
from orchestrator.errors import ConfigurationError, DataError, NotFound, RequestError
from orchestrator.system import python_process

if TYPE_CHECKING:
    from api.client import Client  # importing it takes a third of a second, so only when it is needed

HEADER_BYTES_MAX = 100_000_000
"""As safetensors itself allows."""
WRITER = "learners.orbax_export"


class Format(StrEnum):
    SAFETENSORS = "safetensors"
    ORBAX = "orbax"
    HUGGINGFACE = "huggingface"


def export(
    job: JobArgument,
    form: Annotated[Format, typer.Option("--format", help="Format of the parameters.")] = Format.SAFETENSORS,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder to write.", show_default="JOB-export")
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
) -> None:
    """Write the merged parameters of a running or ended job, with its specification."""
    with connect(home, url) as client:
        name = client.job(job).job
        folder = out or Path(f"{name}-export")
        target = folder / ("checkpoint" if form is Format.ORBAX else "model.safetensors")
        if target.exists():
            raise ConfigurationError(detail=f"{target} already exists. Remove it, or give another --out.")
        with _draft_of(folder) as (parameters, draft):
            client.download_parameters(name, parameters)
            facts = described(parameters)
            notes = []
            if form is Format.HUGGINGFACE:
                notes = _write_for_transformers(client, name, parameters, draft, facts["spec"])
            else:
                (draft / "config.json").write_text(json.dumps(facts, indent=1) + "\n")
                if form is Format.SAFETENSORS:
                    parameters.rename(draft / target.name)
                else:
                    _write_for_orbax(parameters, draft / target.name)
            written = sorted(path.name for path in draft.iterdir())
    say(f"wrote {', '.join(written)} into {folder}")
    for note in notes:
        say(note)


@contextmanager
def _draft_of(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a file for the parameters, and a folder whose files are moved into ``folder`` unless the block raises.

    Both are on the disk of ``folder``. If the block raises, ``folder`` is unchanged.
    """
    above = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    with TemporaryDirectory(prefix=".atoll-export-", dir=above) as temporary:
        draft = Path(temporary, "files")
        draft.mkdir()
        yield Path(temporary, "parameters"), draft
        folder.mkdir(parents=True, exist_ok=True)
        for path in draft.iterdir():
            path.replace(folder / path.name)


def _write_for_orbax(parameters: Path, target: Path) -> None:
    # In a separate process: Orbax imports JAX, which the command line must not.
    command = python_process.module(WRITER, str(parameters), str(target))
    written = subprocess.run(command, env=python_process.cleaned(os.environ), check=False)
    if written.returncode:
        raise typer.Exit(1)


def _write_for_transformers(client: Client, job: str, parameters: Path, draft: Path, spec: dict[str, Any]) -> list[str]:
    """Write the export and return notes for the user. Files that the service no longer has do not stop the export."""
    from orchestrator.models.huggingface import export as huggingface  # brings NumPy
    from orchestrator.models.huggingface import origin as origins
    from orchestrator.specification.bounds import BYTES  # brings pydantic

    if problem := huggingface.not_of_transformers(spec):
        raise problem
    notes = []
    tokenizer, origin = parameters.with_name("tokenizer"), None
    if spec["data"]["tokenizer"] != BYTES:
        try:
            client.download_tokenizer(job, tokenizer)
        except RequestError as error:
            notes.append(f"The export has no tokenizer: {error}")
    try:
        client.download_origin(job, path := parameters.with_name("origin"))
        origin = origins.parsed(path.read_bytes(), "the service's record of the checkpoint")
    except NotFound:
        pass
    except RequestError as error:
        notes.append(f"The export has no settings of the job's initial checkpoint: {error}")
    notes += huggingface.write(parameters, draft, spec, tokenizer if tokenizer.exists() else None, origin)
    if (draft / "tokenizer_config.json").exists():
        notes.append("transformers can load it, and its AutoTokenizer the tokenizer.")
    return notes


def described(path: Path) -> dict[str, Any]:
    """Return the file's metadata, with the specification parsed. Raises DataError if it has none."""
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        try:
            facts = json.loads(file.read(min(length, HEADER_BYTES_MAX)))["__metadata__"]
            return {**facts, "spec": json.loads(facts["spec"])}
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(detail=f"{path} has no metadata of a job ({error!r}).") from error


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Jobs")(export)
