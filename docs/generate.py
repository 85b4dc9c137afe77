"""Generates the reference pages from code: ``make reference``.

    docs/reference/config.md               every field of a job specification, from the pydantic sections
    docs/reference/cli.md                  every command and option of ``atoll``, from its command line
    docs/reference/events-and-effects.md   every event and effect of the core, from its dataclasses
    docs/reference/rest.md                 every operation of the service, from its OpenAPI document
    docs/reference/metrics.md              every metric, from its catalogue
    docs/reference/kubernetes.md           every value of an installation on Kubernetes, and their JSON schema
    docs/reference/simulation.md           every field of a simulated fleet, from its pydantic sections
    docs/reference/published.md            published tables beside ours, from docs/published (``make reproduce``)
    run-dir.md, tape.md, wire.md, data-index.md    the facts of formats, within prose written by hand

``rendered`` returns the pages, and a test compares them with the committed ones. Only headings and introductions are
written here. Anything else that a page lacks belongs into a docstring.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from pathlib import Path
from types import ModuleType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import click
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from api.cli import app
from api.simulation import cell_words, columns_of
from docs import generate_formats, generate_service
from docs.generate_service import MADE, paragraphs, prose
from orchestrator.core import commands, vocabulary
from orchestrator.core.effects import Effect
from orchestrator.core.events import Event, IslandReported
from orchestrator.kubernetes import manifests, values
from orchestrator.simulation import published, spec
from orchestrator.simulation.distributions import Distribution
from orchestrator.specification import bounds, config
from orchestrator.tape.codec import REPORTED

FOLDER = Path(__file__).resolve().parent / "reference"
READ_AS: dict[Any, str] = {
    spec.Seconds: "a duration: seconds, or such as `90s`, `30min`, `1y`",
    spec.PositiveSeconds: "a duration above 0: seconds, or such as `90s`, `30min`, `1y`",
    spec.Spread: "a duration, or a distribution of them: `exponential`, `uniform`, `lognormal` or `samples`",
    spec.Bandwidth: "bits per second, or such as `800Mbps`, `5Gbps`",
    spec.Number: "a whole number from 1, also as `8e9`",
}
"""What a type with a reader of its own takes."""
SCHEMA = FOLDER.parent.parent / "deploy" / "kubernetes" / "values.schema.json"


def main() -> None:
    for path, text in rendered().items():
        path.write_text(text)
        print(path.relative_to(FOLDER.parent.parent))


def rendered() -> dict[Path, str]:
    """Return the text of every generated page."""
    pages = {
        "config.md": config_page(),
        "cli.md": cli_page(),
        "events-and-effects.md": events_page(),
        "rest.md": generate_service.rest_page(),
        "metrics.md": generate_service.metrics_page(),
        "kubernetes.md": kubernetes_page(),
        "published.md": published_page(),
        "simulation.md": simulation_page(),
    }
    made = {FOLDER / name: "\n".join(lines).rstrip() + "\n" for name, lines in pages.items()}
    made[SCHEMA] = json.dumps(manifests.schema(), indent=2) + "\n"
    return made | generate_formats.pages(FOLDER)


# ── the job specification ─────────────────────────────────────────────────────────────────────────────────────────────


def config_page() -> Iterator[str]:
    yield "# The job specification"
    yield ""
    yield MADE.format("orchestrator/specification")
    yield ""
    yield from prose(
        "A job is one YAML or JSON document with these sections. A field that you leave out has its default. All "
        "mistakes are reported together, each with a remedy, and nothing is started. Durations are in seconds, and "
        "their names end in `_s`. `deploy/configs/` has complete examples."
    )
    yield ""
    yield "## The document"
    yield ""
    yield from fields_of(config.JobSpec, "")
    for name, field in config.JobSpec.model_fields.items():
        inner = annotation_model(field)
        if inner is not None:
            yield from section_of(inner, name)
    yield "## Reasons for the bounds"
    yield ""
    for name, reason in attribute_docs(bounds).items():
        if get_origin(getattr(bounds, name)) is Annotated:
            yield from prose(f"- **{name}**, {in_words(getattr(bounds, name))}: {reason}", hanging="  ")


def kubernetes_page() -> Iterator[str]:
    yield from document_page(
        "Values on Kubernetes",
        "orchestrator/kubernetes/values.py",
        "One YAML document describes an installation ([Kubernetes](../guide/kubernetes.md)). All mistakes are reported "
        "together. `deploy/kubernetes/` has complete examples, and `values.schema.json` for editors and for Helm.",
        values.Values,
    )


def simulation_page() -> Iterator[str]:
    yield from document_page(
        "The simulator's file",
        "orchestrator/simulation/spec.py",
        "`atoll simulate SPEC` reads one YAML or JSON document with these sections ([simulate](../simulate.md)): a `fleet`, "
        "or a `world` that `atoll tape fit` wrote. All mistakes are reported together. `deploy/configs/simulate.yaml` is a "
        "complete example.",
        spec.SimulationSpec,
    )


def document_page(title: str, module: str, about: str, kind: type[BaseModel]) -> Iterator[str]:
    """Yield the page of a document, followed by its sections."""
    yield f"# {title}"
    yield ""
    yield MADE.format(module)
    yield ""
    yield from prose(about)
    yield ""
    yield from headed("## The document", kind)
    yield from fields_of(kind, "")
    yield from sections_of(kind, "")


def section_of(kind: type[BaseModel], path: str) -> Iterator[str]:
    """Yield a section, followed by the sections within it."""
    yield from headed(f"## `{path}`", kind)
    yield from fields_of(kind, path)
    yield from sections_of(kind, f"{path}.")


def sections_of(kind: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        inner = annotation_model(field)
        if inner is not None:
            yield from section_of(inner, f"{prefix}{name}")


def fields_of(kind: type[BaseModel], path: str) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        takes, default = takes_of(f"{path}.{name}".lstrip("."), field), default_of(field)
        said = f"; {field.description}" if field.description else ""
        yield from prose(f"- `{field.alias or name}`: {takes}, {default}{said}", hanging="  ")
    yield ""


def annotation_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the section that a field holds, alone, in a tuple, or as an option."""
    for kind in (field.annotation, *flattened(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def flattened(kind: Any) -> Iterator[Any]:
    for part in get_args(kind):
        yield part
        yield from flattened(part)


def takes_of(path: str, field: FieldInfo) -> str:
    """Return what a field takes, in words. A section is a link."""
    if annotation_model(field):
        link = f"[`{path}`](#{path.replace('.', '')})"
        parts = (field.annotation, *flattened(field.annotation))
        return f"a list of {link}" if any(get_origin(part) is tuple for part in parts) else link
    return in_words(field.annotation, tuple(field.metadata))


def in_words(kind: Any, limits: tuple[Any, ...] = ()) -> str:
    """Describe a type with its limits. ``limits`` are those of the field; those of a part are in its annotation."""
    for known, words in READ_AS.items():
        if known == kind or get_args(known)[1] in limits:
            return words
    if get_origin(kind) is Annotated:
        base, *inner = get_args(kind)
        return in_words(base, (*limits, *(limit for one in inner for limit in getattr(one, "metadata", (one,)))))
    if literals(kind):
        return " or ".join(f"`{value}`" for value in literals(kind))
    if get_origin(kind) is tuple:
        return f"a list, each {in_words(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"a mapping to {in_words(get_args(kind)[1])}"
    if kind is Any:
        return "any value"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join("`null`" if part is type(None) else in_words(part, limits) for part in get_args(kind))
    return limits_in_words(kind, {name: value for limit in limits for name, value in limit_values(limit)})


def literals(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return "all defaults"
    if value is None or value == ():
        return "absent if not given"
    if isinstance(value, get_args(Distribution)):
        return f"default `{json.dumps(value.plain())}`"
    if isinstance(value, tuple):
        return f"default `{json.dumps(value)}`"
    if isinstance(value, bool):
        return f"default `{str(value).lower()}`"
    return f"default `{value:,}`".replace(",", "") if isinstance(value, int) else f"default `{value}`"


def limits_in_words(base: type[Any], limits: dict[str, Any]) -> str:
    if base is str:
        pattern, most = limits.get("pattern"), limits.get("max_length")
        length = f" of {limits.get('min_length', 0)} to {most:,} characters" if most else ""
        if pattern == bounds.PRINTABLE:
            return f"text{length} without control characters"
        return f"text{length} that matches `{pattern}`" if pattern else f"text{length}"
    if base is bool:
        return "`true` or `false`"
    what = {int: "a whole number", float: "a number"}[base]
    return f"{what} {range_in_words(limits)}" if limits else what


def limit_values(limit: Any) -> Iterator[tuple[str, Any]]:
    """Yield the limits that one piece of pydantic's metadata sets."""
    for name in ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern"):
        if (value := getattr(limit, name, None)) is not None:
            yield name, value


def range_in_words(found: dict[str, Any]) -> str:
    """Describe a range: ``from 1 to 10,000``; ``from 0 to below 1``; ``above 1, to 1e+12``."""
    least = f"from {figure(found['ge'])}" if "ge" in found else f"above {figure(found['gt'])},"
    most = f"to {figure(found['le'])}" if "le" in found else f"to below {figure(found['lt'])}"
    return f"{least} {most}"


def figure(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def attribute_docs(module: ModuleType) -> dict[str, str]:
    """Return the text below each assignment, as one line, by the assigned name."""
    body = ast.parse(inspect.getsource(module)).body
    found = {}
    for before, after in pairwise(body):
        told = after.value if isinstance(after, ast.Expr) else None
        if isinstance(before, ast.Assign) and isinstance(told, ast.Constant) and isinstance(told.value, str):
            (target,) = before.targets
            found[ast.unparse(target)] = " ".join(told.value.split())
    return found


# ── the command line ──────────────────────────────────────────────────────────────────────────────────────────────────


def cli_page() -> Iterator[str]:
    yield "# The command line"
    yield ""
    yield MADE.format("api/cli.py and api/commands")
    yield ""
    root = typer.main.get_command(app)
    yield from command_of(root, "atoll", None)


def command_of(command: Any, name: str, parent: click.Context | None) -> Iterator[str]:
    """Yield a command with its options, or a group followed by its commands."""
    context = command.context_class(command, info_name=name.rpartition(" ")[2], parent=parent)
    if parent is not None:
        yield f"## `{name}`"
        yield ""
    yield from paragraphs(command.help or "")
    yield ""
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    yield from ["```text", usage, "```", ""]
    lines = list(parameters_of(command, context))
    if lines:
        yield from [*lines, ""]
    for inner in sorted(getattr(command, "commands", {})):
        if not command.commands[inner].hidden:
            yield from command_of(command.commands[inner], f"{name} {inner}", context)


def parameters_of(command: Any, context: click.Context) -> Iterator[str]:
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None or "--help" in parameter.opts:
            continue
        written, said = (" ".join(part.split()) for part in record)
        if isinstance(parameter, click.Argument) or parameter.param_type_name == "argument":
            written = written.removesuffix("*").strip()
        yield from prose(f"- `{written}`{f': {said}' if said else ''}", hanging="  ")


# ── events and effects ────────────────────────────────────────────────────────────────────────────────────────────────


def events_page() -> Iterator[str]:
    yield "# Events and effects"
    yield ""
    yield MADE.format("orchestrator/core")
    yield ""
    yield from prose(
        "The core receives *events*, each of which is already true, and answers with *effects*, which the shell carries "
        "out in order. Both are frozen dataclasses. A line of the [tape](tape.md) holds one event and the effects that "
        "were decided on it, as JSON: the name of each class is under `type`, and each field under its own name. "
        "The report of an island is an event named after it, with the report's fields beside the island's."
    )
    events: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Event) if kind is not IslandReported}
    effects: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Effect)}
    for heading, messages in (("Events", events | REPORTED), ("Effects", effects)):
        yield from ["", f"## {heading}", ""]
        for name, kind in sorted(messages.items()):
            yield from message_of(kind, name)
    yield from ["## Records and enumerations within them", ""]
    for kind in sorted(nested_kinds(), key=lambda kind: kind.__name__):
        yield from words_of(kind) if issubclass(kind, Enum) else message_of(kind, kind.__name__)


def message_of(kind: type[Any], name: str) -> Iterator[str]:
    yield from headed(f"### {name}", kind)
    if name in REPORTED:
        yield from [f"Carries the report `{kind.__name__}` of an island.", ""]
        yield from message_fields(IslandReported, without="report")
    yield from message_fields(kind)
    yield ""


def message_fields(kind: type[Any], without: str = "") -> Iterator[str]:
    hints = inspect.get_annotations(kind)
    for field in dataclasses.fields(kind):
        default = "" if field.default is dataclasses.MISSING else f", default `{shown(field.default)}`"
        if field.name != without:
            yield f"- `{field.name}`: `{hints[field.name]}`{default}"


def words_of(kind: type[Enum]) -> Iterator[str]:
    yield from headed(f"### {kind.__name__}", kind)
    yield from prose("One of " + ", ".join(f"`{word.value}`" for word in kind) + ".")
    yield ""


def nested_kinds() -> set[type[Any]]:
    """Return the dataclasses and enumerations in the fields of events and effects, and in the fields of those."""
    seen: set[type[Any]] = set()
    waiting = [*get_args(Event), *get_args(Effect), *REPORTED.values()]
    messages = set(waiting)
    while waiting:
        for hint in get_type_hints(waiting.pop()).values():
            for kind in (hint, *flattened(hint)):
                ours = isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, Enum))
                if ours and kind not in seen | messages:
                    seen.add(kind)
                    waiting.extend([kind] if dataclasses.is_dataclass(kind) else [])
    return seen


def shown(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    for name, constant in {**vars(vocabulary), **vars(commands)}.items():
        if name.isupper() and dataclasses.is_dataclass(constant) and constant == value:
            return name
    return repr(value)


# ── docstrings of classes ──────────────────────────────────────────────────────────────────────────────────────────────────


def headed(heading: str, kind: type[Any]) -> Iterator[str]:
    """Yield the heading and the class's docstring."""
    yield from [heading, ""]
    if doc := own_doc(kind):
        yield from [*paragraphs(doc), ""]


def own_doc(kind: type[Any]) -> str:
    """Return the class's docstring, unless dataclasses or enumerations generated it."""
    doc = inspect.cleandoc(kind.__doc__ or "") if "__doc__" in vars(kind) else ""
    return "" if doc.startswith(f"{kind.__name__}(") else doc


# ── published tables ──────────────────────────────────────────────────────────────────────────────────────────────────


def published_page() -> Iterator[str]:
    yield "# Published tables, and ours"
    yield ""
    yield MADE.format("docs/published")
    yield ""
    yield from prose(
        "`atoll reproduce` computes these tables anew, and `make reproduce` also writes this page. Each cell has our figure "
        "and the published one in brackets. A star marks ours where the published figure, or its row, chose a parameter of "
        "ours; all others are predicted. Cells of arXiv:2604.21428 were read in summaries of the paper. Pictures are in "
        "`docs/published`."
    )
    yield ""
    yield from prose(
        "The cells of [quality](#quality) and [ablations](#ablations) are trainings. Their brackets also have ours less the "
        "published figure, a dagger marks published figures that were read in a summary (secondary), and a dash is not run."
    )
    for table in (*published.TABLES.values(), *published.TRAINED.values()):
        document = json.loads((FOLDER.parent / "published" / f"{table.name}.json").read_text())
        cells = published.cells_of(document)
        columns = columns_of(cells)
        yield ""
        yield f"## {document['table']}"
        yield ""
        yield from prose(f"{document['title']}, in {document['unit']}. {document['source']}.")
        yield ""
        yield f"| | {' | '.join(columns)} |"
        yield f"|{'---|' * (len(columns) + 1)}"
        for row in dict.fromkeys(cell.row for cell in cells):
            mine = {cell.column: cell_words(table, cell) for cell in cells if cell.row == row}
            yield f"| {row} | {' | '.join(mine.get(column, '') for column in columns)} |"
        yield ""
        yield from prose(". ".join(text.rstrip(".") for text in (document["agreement"], *document["notes"])) + ".")


if __name__ == "__main__":
    main()
