"""Commands for a job's checkpoints and parameters: list checkpoints, fetch one, take one now, go back to one, export."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from api.commands.common import (
    NUMBER_MAX,
    HomeOption,
    JobArgument,
    JsonOption,
    UrlOption,
    connect,
    console,
    draft_of,
    echo_json,
    print_json,
    say,
    scratch,
    until_interrupted,
)
from api.commands.islands import conclude
from api.installation.home import DEFAULT_HOME
from orchestrator.errors import ConfigurationError, DataError, NotFound, UnfitWeights
from orchestrator.system import python_process

if TYPE_CHECKING:
    from api.client import Client
    from orchestrator.models.decoder import DecoderSection


HEADER_BYTES_MAX = 100_000_000
"""As safetensors itself allows."""
WRITER = "learners.export"


class Format(StrEnum):
    SAFETENSORS = "safetensors"
    ORBAX = "orbax"
    HUGGINGFACE = "huggingface"
    PEFT = "peft"


class Dtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def export(
    job: JobArgument,
    form: Annotated[Format, typer.Option("--format", help="Format of the parameters.")] = Format.SAFETENSORS,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder to write.", show_default="JOB-export")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            metavar="DIR",
            help="Folder of the job's initial weights on this machine, for huggingface from a job with `trainable`.",
            show_default="as in the job",
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option("--dtype", help="For huggingface: type of the tensors. Default: float32.", show_default=False),
    ] = None,
    shard_gb: Annotated[
        float | None,
        typer.Option(
            "--shard-gb", min=0.001, help="For huggingface: largest file, in GB. Default: 5.", show_default=False
        ),
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
) -> None:
    """Write the merged parameters of a running or ended job, with its specification.

    Those of a job with `trainable` are what it trained. With `peft` they are an adapter for its initial weights, with
    `huggingface` a whole model.
    """
    settings: dict[str, Any] = {} if dtype is None else {"dtype": dtype.value}
    settings |= {} if shard_gb is None else {"shard_bytes": shard_gb * 1e9}
    if settings and form is not Format.HUGGINGFACE:
        option = "--dtype" if dtype is not None else "--shard-gb"
        raise typer.BadParameter(f"{option} is for --format huggingface; {form.value} has float32 in one piece")
    with connect(home, url) as client:
        name = client.job(job).job
        folder = out or Path(f"{name}-export")
        target = folder / {Format.ORBAX: "checkpoint", Format.PEFT: "adapter_model.safetensors"}.get(
            form, "model.safetensors"
        )
        index = folder / "model.safetensors.index.json"
        if occupied := next((path for path in (target, index) if path.exists()), None):
            raise ConfigurationError(detail=f"{occupied} already exists. Remove it, or give another --out.")
        with _draft_of(folder) as (parameters, draft):
            client.download_parameters(name, parameters)
            facts = described(parameters)
            notes = []
            if form is Format.HUGGINGFACE:
                notes = _write_for_transformers(client, name, parameters, draft, facts["spec"], base, settings)
            elif form is Format.PEFT:
                notes = _write_for_peft(client, name, parameters, draft, facts["spec"])
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
    with scratch(above, ".atoll-export-") as here:
        draft = here / "files"
        draft.mkdir()
        yield here / "parameters", draft
        folder.mkdir(parents=True, exist_ok=True)
        for path in draft.iterdir():
            path.replace(folder / path.name)


def _write_for_orbax(parameters: Path, target: Path) -> None:
    # In a separate process: Orbax imports JAX, which the command line must not.
    _run_writer("orbax", parameters, target)


def _run_writer(form: str, source: Path, target: Path) -> None:
    command = python_process.command(WRITER, form, str(source), str(target))
    written = subprocess.run(command, env=python_process.cleaned(os.environ), check=False)
    if written.returncode:
        raise typer.Exit(1)


def _write_for_peft(client: Client, job: str, parameters: Path, draft: Path, spec: dict[str, Any]) -> list[str]:
    from api.run.following import origin_of  # brings NumPy
    from orchestrator.models.huggingface import adapters

    return adapters.write(parameters, draft, spec, origin_of(client, job, parameters.with_name("origin"), []))


def _base_of(spec: dict[str, Any], parameters: Path, folder: Path | None) -> Any:
    """Return the whole tensors that a job with ``trainable`` began with, which must be on this machine, or are drawn."""
    from orchestrator.models.huggingface import files
    from orchestrator.models.huggingface.weights import Weights
    from orchestrator.specification.training_sections import ModelSection
    from orchestrator.system.roots import EVERYTHING

    section = ModelSection.model_validate(spec["model"])
    if section.initial_weights is not None:
        own = str(section.initial_weights if folder is None else folder.absolute())
        try:
            network = cast("DecoderSection", section.network)  # otherwise there would be no such weights
            return Weights(network, own, EVERYTHING, section.weights_digest)
        except UnfitWeights as error:
            remedy = "The weights that the job began with must be on this machine: name their folder with --base DIR."
            raise UnfitWeights(detail=f"{own}: {error.detail}", remedy=remedy) from error
    described_in, drawn = parameters.with_name("spec.json"), parameters.with_name("drawn")
    described_in.write_text(json.dumps(spec))
    _run_writer("drawn", described_in, drawn)
    return files.read_header(lambda: drawn.open("rb"))


def merged_in_torch(spec: dict[str, Any], parameters: Path, base: Path | None) -> tuple[dict[str, Any], Path]:
    """Return the specification and the parameters of a torch job as if it had trained its whole model."""
    if base is not None:
        spec = {**spec, "trainer": {**spec["trainer"], "model": str(base.absolute())}}
    spec = {**spec, "trainable": {**spec["trainable"], "base": None}}  # merged into what was quantised
    described_in, merged = parameters.with_name("spec.json"), parameters.with_name("merged")
    described_in.write_text(json.dumps({"spec": spec, "parameters": str(parameters)}))
    _run_writer("merged", described_in, merged)
    return {**spec, "trainable": None}, merged


def _write_for_transformers(
    client: Client,
    job: str,
    parameters: Path,
    draft: Path,
    spec: dict[str, Any],
    base: Path | None,
    settings: dict[str, Any],
) -> list[str]:
    """Write the export and return notes for the user. Files that the service no longer has do not stop the export."""
    from api.run.following import write_for_transformers  # brings NumPy
    from orchestrator.models.huggingface import export as huggingface

    if problem := huggingface.not_of_transformers(spec):
        raise problem
    if spec.get("trainable") is not None and isinstance(spec["trainer"], dict):
        spec, parameters = merged_in_torch(spec, parameters, base)
    elif spec.get("trainable") is not None:
        settings = {**settings, "base": _base_of(spec, parameters, base)}
    tokenizer = parameters.with_name("tokenizer")
    notes = write_for_transformers(client, job, parameters, draft, spec, tokenizer, **settings)
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


def follow(
    job: JobArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to keep, new or from an earlier call.")],
    once: Annotated[bool, typer.Option("--once", help="Bring the newest version and end.")] = False,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Type of the tensors of a whole model.")] = Dtype.FLOAT32,
    keep: Annotated[int, typer.Option("--keep", min=1, max=NUMBER_MAX, help="Versions that stay on the disk.")] = 2,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.1, max=86_400, help="Time between two requests.")
    ] = 1.0,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep DIR/current at the newest merged parameters of a job, from the updates that its islands get.

    DIR/current is a Hugging Face folder where `atoll export` writes one. Ends with the job. After an interruption the
    same command continues from what DIR holds.
    """
    from api.run.following import follow as follow_job  # brings NumPy

    last, settings = None, {"once": once, "dtype": dtype.value, "keep": keep, "every_s": every, "say": say}
    with until_interrupted():
        for last in follow_job(lambda: connect(home, url), job, folder, **settings):  # type: ignore[arg-type]
            for note in last.notes:
                say(note)
            if as_json:
                echo_json(json.dumps({**asdict(last), "path": str(last.path)}))
            else:
                say(f"version {last.number} of {last.job} is {folder / 'current'} ({last.bytes_count:,} bytes came)")
    if last is None:
        say(f"{folder / 'current'} is the newest version already")


def checkpoints(
    job: JobArgument = "latest", home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """List a job's checkpoints, oldest first. `atoll submit FILE --resume JOB` resumes from the newest."""
    with connect(home, url) as client:
        checkpoints = client.checkpoints(job)
    if as_json:
        print_json(checkpoints)
        return
    if not checkpoints:
        say(
            "there are no checkpoints; take one with `atoll checkpoint JOB`, or regularly with `checkpoints.every_merges`"
        )
        return
    from api.terminal.listing import Listing

    table = Listing("checkpoint", "taken", "version", "tokens", "islands", "MB", "folder")
    for one in checkpoints:
        taken = time.strftime("%m-%d %H:%M:%S", time.localtime(one.taken_at))
        islands = f"{len(one.islands)}"
        size = f"{one.bytes / 1e6:,.1f}"
        cells = (str(one.number), taken, str(one.global_version), f"{one.tokens_trained:,}", islands, size, one.url)
        table.add_row(*cells)
    console().print(table)


def fetch(
    job: JobArgument = "latest",
    number: Annotated[
        int | None,
        typer.Option("--checkpoint", min=1, max=NUMBER_MAX, help="Number of the checkpoint. Default: the newest."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder to write.", show_default="JOB-checkpoint-NUMBER")
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
) -> None:
    """Download a checkpoint and verify every byte. `atoll submit --resume` accepts the folder."""
    from api.run.archive import unpack

    with connect(home, url) as client:
        name, checkpoints = client.job(job).job, client.checkpoints(job)
        if number is None and not checkpoints:
            raise NotFound(detail=f"{name} has no checkpoints.", remedy="Take one with `atoll checkpoint JOB`.")
        number = number or checkpoints[-1].number
        target = (out or Path(f"{name}-checkpoint-{number}")).absolute()
        with draft_of(target, ".fetch-") as (here, whole):
            client.download_checkpoint(name, number, here / "packed.tar")
            unpack(here / "packed.tar", whole)
    say(f"wrote {target}; if the service and all nodes reach it, resume with `atoll submit FILE --resume {target}`")


def checkpoint(
    job: JobArgument = "latest", home: HomeOption = DEFAULT_HOME, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Make a running job take a checkpoint now. Training continues."""
    with connect(home, url) as client:
        conclude(client, client.take_checkpoint(job), as_json)


def rollback(
    job: JobArgument,
    to: Annotated[
        int | None, typer.Option("--to", min=1, max=NUMBER_MAX, help="Number of the checkpoint. Default: the newest.")
    ] = None,
    home: HomeOption = DEFAULT_HOME,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a running job back to a checkpoint. Merges since then are undone, and training continues from there."""
    with connect(home, url) as client:
        conclude(client, client.roll_back(job, to), as_json)


def register(app: typer.Typer) -> None:
    app.command()(checkpoints)
    app.command()(fetch)
    app.command()(checkpoint)
    app.command()(rollback)
    app.command(rich_help_panel="Jobs")(export)
    app.command(rich_help_panel="Jobs")(follow)
