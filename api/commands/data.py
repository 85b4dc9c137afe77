"""`atoll data`, `atoll tokenizer` and `atoll model`: the files that jobs read. They need no service.

They prepare the text of streamed jobs, make tokenizers, and say what a folder of weights is.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from api.commands.common import echo, echo_json, run_to_end
from orchestrator.system import python_process
from orchestrator.system.plain import counted


def train(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILES", help="Text, .jsonl, .parquet, .arrayrecord, also .gz or .zst; or URLs."),
    ],
    output: Annotated[Path, typer.Option("--output", help="Tokenizer file to write, a tokenizer.json.")],
    vocabulary_size: Annotated[
        int, typer.Option("--vocabulary-size", min=257, max=1 << 20, help="Number of tokens.")
    ] = 32_000,
    text_field: Annotated[
        str, typer.Option("--text-field", help="Field of JSON and Parquet that has the text.")
    ] = "text",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and no progress.")] = False,
) -> None:
    """Train byte-level BPE on files and write it as a tokenizer.json. The same files give the same tokenizer."""
    # In a separate process: the library keeps threads and much memory, and is an optional dependency.
    command = python_process.command("learners.tokenizer_training", "--vocabulary-size", str(vocabulary_size))
    command += ["--output", str(output), "--text-field", text_field, *(["--json"] if as_json else []), "--", *files]
    raise typer.Exit(run_to_end(command))


YAML_ENDINGS = tuple(yaml + packed for yaml in (".yaml", ".yml") for packed in ("", ".gz", ".gzip", ".zst", ".zstd"))
SPECIFICATION_BYTES_MAX = 1 << 20
SPECIFICATION_FIELDS = frozenset({"islands", "budget"})
"""Every job specification has these, and a line of training text is unlikely to be an object with both."""
OF_A_SPECIFICATION = "the specification sets this; leave the option out"
PROCESSES_MAX = 256


def index(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="SPEC-OR-FILES",
            help="A job specification, to count its data.sources; or the files of one source.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", help="Index file to write, for data.index.")],
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", help="A tokenizer.json, or a .model. Default: bytes.", show_default=False),
    ] = None,
    text_field: Annotated[
        str | None,
        typer.Option(
            "--text-field", help="Field of JSON and Parquet that has the text. Default: text.", show_default=False
        ),
    ] = None,
    held_out_ratio: Annotated[
        float | None,
        typer.Option("--held-out-ratio", help="The job's data.held_out_ratio. Default: 0.02.", show_default=False),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            min=1,
            max=PROCESSES_MAX,
            help="Number of processes. Default: one for each core.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and no progress.")] = False,
) -> None:
    """Count the tokens of streamed text, once for each tokenizer and set of files. Repeat the command to continue."""
    options = {"tokenizer": tokenizer, "text_field": text_field, "held_out_ratio": held_out_ratio}
    options_set = {name: value for name, value in options.items() if value is not None}
    specification = next(filter(_is_specification, files), None)
    if specification is None:
        section = _of_files(files, options_set)
    elif len(files) > 1:
        raise typer.BadParameter(f"{specification} is a specification, which names its files; give no other files")
    else:
        section = _of_specification(specification, options_set)
    command = python_process.command("learners.data_indexing", "--output", str(output))
    command += ["--processes", str(processes)] if processes is not None else []
    # In a separate process: the tokenizers' libraries keep threads and much memory, and are optional dependencies.
    text = json.dumps(section).encode()
    raise typer.Exit(run_to_end([*command, *(["--json"] if as_json else [])], text))


def _is_specification(path: str) -> bool:
    """Return whether the file is a job specification, by its name or content. Specifications are never counted as text."""
    if path.lower().endswith(YAML_ENDINGS):
        return True
    from orchestrator.errors import ConfigurationError
    from orchestrator.specification.documents import read_document

    try:
        if "://" in path or Path(path).stat().st_size > SPECIFICATION_BYTES_MAX:
            return False
        return read_document(Path(path)).keys() >= SPECIFICATION_FIELDS
    except (ConfigurationError, OSError):
        return False


def _of_specification(path: str, options_set: dict[str, Any]) -> dict[str, Any]:
    from orchestrator.specification.config import read_job_document

    if options_set:
        raise typer.BadParameter(f"--{next(iter(options_set)).replace('_', '-')}: {OF_A_SPECIFICATION}")
    document = read_job_document(Path(path))
    data = document.get("data")
    if isinstance(data, dict):  # the index that the specification names is the one being made
        document = {**document, "data": {name: value for name, value in data.items() if name != "index"}}
    return _section(document)


def _of_files(files: list[str], options_set: dict[str, Any]) -> dict[str, Any]:
    text_field = {"text_field": options_set["text_field"]} if "text_field" in options_set else {}
    source = {"name": "files", "files": [_absolute(path) for path in files], **text_field}
    data: dict[str, Any] = {"source": "streamed", "sources": [source]}
    if "tokenizer" in options_set:
        # the token between documents does not change their number
        data |= {"tokenizer": _absolute(options_set["tokenizer"]), "separator": 0}
    if "held_out_ratio" in options_set:
        data["held_out_ratio"] = options_set["held_out_ratio"]
    section = _section({"islands": [{"node_group": "any"}], "budget": {"steps": 1}, "data": data})
    section["sources"][0]["name"] = None  # it fits a source of any name
    return section


def _section(document: dict[str, Any]) -> dict[str, Any]:
    """Return the ``data`` section of a valid specification, with files in place of patterns."""
    from orchestrator.errors import ConfigurationError
    from orchestrator.specification.config import parse_job
    from orchestrator.specification.data_check import with_found_files
    from orchestrator.system.roots import EVERYTHING

    data = with_found_files(parse_job(document), EVERYTHING).data
    if data.source != "streamed":
        detail = (
            f"data.source is {data.source}, but only streamed text has an index. Set it to streamed, with data.sources."
        )
        raise ConfigurationError(detail=detail)
    if data.has_conversations:
        detail = f"data.format is {data.format}, but an index counts text."
        detail += " Leave it out: islands count conversations as they read."
        raise ConfigurationError(detail=detail)
    return data.model_dump(mode="json")


def _absolute(path: str) -> str:
    return path if "://" in path or path == "bytes" else os.path.abspath(path)


def inspect(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder with config.json and safetensors files.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Say what model a folder of weights has, the memory that a job with it needs, and whether atoll can train it.

    Only headers are read. Exits with 0 also if the model cannot be trained here: then the output says why.
    """
    facts = _model_facts(_absolute(folder))
    if as_json:
        echo_json(json.dumps(facts, indent=2))
        return
    for name, text in _model_lines(facts):
        echo(f"{name:<11} {text}")


def _model_facts(folder: str) -> dict[str, Any]:
    from orchestrator.models.huggingface import origin
    from orchestrator.models.huggingface.weights import inspected  # brings NumPy
    from orchestrator.specification.config import parse_job
    from orchestrator.specification.memory_budget import demand_of
    from orchestrator.system.roots import EVERYTHING

    inspection = inspected(folder, EVERYTHING)
    unfit = inspection.problem
    memory = None
    if inspection.parameter_count is not None:
        islands = [
            {"node_group": "any", "name": "gpu", "accelerator": "gpu", "accelerators": 1},
            {"node_group": "any", "name": "cpu"},
        ]
        demand = demand_of(parse_job({"islands": islands, "budget": {"steps": 1}}), inspection.parameter_count)
        memory = {"island": demand.islands[0], "island_on_cpu": demand.islands[1], "head": demand.head}
    tokenizers = [name for name in origin.TOKENIZERS if os.path.isfile(os.path.join(folder, name))]
    return {
        "folder": folder,
        "model_type": inspection.model_type,
        "architectures": list(inspection.architectures),
        "parameters": inspection.parameter_count,
        "tensors": inspection.tensor_count,
        "dtypes": list(inspection.dtypes),
        "stored_bytes": inspection.stored_bytes,
        "context_length": inspection.context_length,
        "tokenizers": tokenizers,
        "memory_bytes": memory,
        "trainable": unfit is None,
        "problem": None
        if inspection.problem is None
        else {"message": inspection.problem.detail, "remedy": inspection.problem.remedy},
        "decoder": None if inspection.decoder is None else inspection.decoder.model_dump(mode="json"),
    }


def _model_lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    named = f" ({', '.join(facts['architectures'])})" if facts["architectures"] else ""
    lines = [("type", f"{facts['model_type'] or 'none in config.json'}{named}")]
    if decoder := facts["decoder"]:
        shape = (
            f"{counted(decoder['layer_count'], 'layer')}, width {decoder['width']:,}, {decoder['head_count']:,} heads of "
            f"{decoder['head_size']:,} ({decoder['key_value_head_count']:,} of keys), vocabulary "
            f"{decoder['vocabulary_size']:,}"
        )
        if experts := decoder["experts"]:
            shape += f", {experts['count']:,} experts ({experts['active']:,} active)"
        lines.append(("shape", f"{shape}, context {facts['context_length']:,} tokens"))
    if facts["parameters"] is not None:
        stored = ""
        if facts["tensors"] is not None:
            stored = (
                f": {facts['tensors']:,} tensors of {', '.join(facts['dtypes'])}, {facts['stored_bytes'] / 1e9:,.2f} GB"
            )
        lines.append(("parameters", f"{facts['parameters']:,}{stored}"))
        memory = {name: f"{amount / 2**30:,.2f} GiB" for name, amount in facts["memory_bytes"].items()}
        lines.append(
            (
                "memory",
                f"{memory['island']} on an island's accelerators ({memory['island_on_cpu']} on CPU), {memory['head']} on "
                "the head of a job of two islands, besides activations",
            )
        )
    lines.append(("tokenizer", ", ".join(facts["tokenizers"]) or "none in the folder"))
    if problem := facts["problem"]:
        lines.append(("trainable", f"no: {problem['message']} {problem['remedy']}"))
    else:
        lines.append(("trainable", f"yes: model: {{initial_weights: {facts['folder']}}}"))
    return lines


def register(app: typer.Typer) -> None:
    model = typer.Typer(no_args_is_help=True, help="Look at models that jobs can continue.")
    model.command("inspect")(inspect)
    app.add_typer(model, name="model", rich_help_panel="Science")
    tokenizer = typer.Typer(no_args_is_help=True, help="Make a tokenizer for data.tokenizer.")
    tokenizer.command("train")(train)
    app.add_typer(tokenizer, name="tokenizer", rich_help_panel="Science")
    group = typer.Typer(no_args_is_help=True, help="Prepare the text of streamed jobs.")
    group.command("index")(index)
    app.add_typer(group, name="data", rich_help_panel="Science")
