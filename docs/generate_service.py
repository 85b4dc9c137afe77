"""Generates the pages about the service: the REST API from its OpenAPI document, and the metrics from their catalogue.

``docs.generate`` writes them with the others, and wraps its own prose with the functions at the end. Operations and metrics
are described in the code, not here.
"""

from __future__ import annotations

import inspect
import json
import re
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from api.app import create_app
from api.jobs.control import ControlPort
from api.metrics.catalogue import FAMILIES
from api.openapi.document import METHODS, SCHEMAS, about_parameter
from api.storage.store import Store

Json = Mapping[str, Any]
COLUMNS = 110
MADE = "<!-- Made by `make reference` from {}: change the code, not this page. -->"


def rest_page() -> Iterator[str]:
    """Yield every operation by path, with its parameters, body and answers, and then the shapes."""
    document = openapi_document()
    yield from ["# The REST API", "", MADE.format("the routes, by way of /openapi.json"), ""]
    yield from prose(
        "A running service shows the same at `/docs`, with examples, and serves it to programs at `/openapi.json`. Every "
        "operation may also refuse with 401, 403 and 429. Each refusal is a [ProblemDocument](#problemdocument)."
    )
    sections: dict[str, list[str]] = defaultdict(list)
    for path, operations in document["paths"].items():
        for method in (method for method in METHODS if method in operations):
            operation = operations[method]
            sections[operation.get("tags", ["service"])[0]] += operation_lines(path, method, operation)
    for tag, lines in sections.items():
        yield from ["", f"## {tag}", "", *lines[:-1]]
    yield from ["", "## Shapes", ""]
    for name, schema in sorted(document["components"]["schemas"].items()):
        yield from shape_lines(name, schema)


def metrics_page() -> Iterator[str]:
    """Yield every family in the order of the catalogue: its name in queries, its kind, labels and meaning."""
    yield from ["# Metrics", "", MADE.format("api/metrics/catalogue.py"), ""]
    yield from prose(
        "The metrics that `/metrics` exposes. Names are in base units. A histogram has the series `_bucket`, `_sum` and "
        "`_count`. [The guide](../guide/metrics.md) says how Prometheus scrapes them, and lists the alerts and dashboards."
    )
    yield ""
    for family in FAMILIES.values():
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        labels = f" by {', '.join(f'`{label}`' for label in family.labels)}" if family.labels else ""
        yield from prose(f"- `{name}`, a {family.kind}{labels}: {family.help}", hanging="  ")


def openapi_document() -> Json:
    """Return the OpenAPI document as the service serves it. The control port is not used."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"sqlite:///{Path(folder) / 'service.sqlite'}")
        try:
            return create_app(cast(ControlPort, None), store, Path(folder) / "runs").openapi()
        finally:
            store.close()


def operation_lines(path: str, method: str, operation: Json) -> Iterator[str]:
    yield from [f"### {method.upper()} `{path}`", "", *paragraphs(operation.get("description", "")), ""]
    parameters = operation.get("parameters", ())
    for parameter in parameters:
        need = ", required" if parameter.get("required") else ""
        said = about_parameter(parameter)
        kind = type_of(parameter.get("schema", {}))
        yield from prose(
            f"- `{parameter['name']}` ({parameter['in']}{need}), {kind}{f': {said}' if said else ''}", hanging="  "
        )
    if parameters:
        yield ""
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        yield from prose(f"Body, `{media_type}`: {type_of(content.get('schema', {}))}.")
        yield ""
    yield from ["Answers:", ""]
    for status, answer in operation.get("responses", {}).items():
        if status in {"401", "403", "429"}:
            continue
        kinds = [type_of(content.get("schema", {})) for content in answer.get("content", {}).values()]
        shapes = sorted({kind for kind in kinds if "ProblemDocument" not in kind and kind != "anything"})
        yield from prose(
            f"- {status}: {answer.get('description', '')}{f', {shapes[0]}' if shapes else ''}", hanging="  "
        )
    yield ""


def shape_lines(name: str, schema: Json) -> Iterator[str]:
    yield from [f"### {name}", ""]
    if said := schema.get("description", ""):
        yield from [*paragraphs(said), ""]
    if "enum" in schema:
        yield from [*prose("One of " + ", ".join(f"`{value}`" for value in schema["enum"]) + "."), ""]
    required = schema.get("required", ())
    fields = schema.get("properties", {})
    for field, about in fields.items():
        need = "" if field in required else ", optional"
        said = about_parameter({"schema": about})
        yield from prose(f"- `{field}`{need}, {type_of(about)}{f': {said}' if said else ''}", hanging="  ")
    if fields:
        yield ""


def type_of(schema: Json) -> str:
    """Return the type in Markdown, as a link if it is one of the shapes."""
    if name := schema.get("$ref", "").removeprefix(SCHEMAS):
        return f"[{name}](#{name.lower()})"
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(type_of, choices)))
    if schema.get("type") == "array":
        return f"list of {type_of(schema.get('items', {}))}"
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    return str(schema.get("type", "anything"))


def paragraphs(text: str) -> Iterator[str]:
    """Yield a docstring as Markdown: paragraphs are wrapped, and indented lines are kept."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(text.replace("\b", "")).replace("``", "`"))
    for index, block in enumerate(blocks):
        if index:
            yield ""
        if block.startswith("    "):
            yield from block.splitlines()
        else:
            yield from prose(block)


def prose(text: str, hanging: str = "") -> list[str]:
    flat = " ".join(text.replace("``", "`").split())
    return textwrap.wrap(flat, COLUMNS, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
