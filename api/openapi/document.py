"""The OpenAPI document, and the reference of the API as a page of HTML that is rendered from it (/docs).

Here are the parts that FastAPI cannot derive: roles, refusals and examples of each operation.

Roles come from the rule that the middleware applies (``api.auth.permissions.required_role``), and refusals from
``refusals_of`` alone, so that a new route cannot forget them. schemathesis checks the running service against the result
(tests/api/test_openapi.py).

The page loads only two of the service's own style sheets and runs no script, so it may share an origin with the page that
holds the token. The usual viewers load a megabyte of script from a CDN. Everything from the document is escaped.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from fastapi import FastAPI

from api.auth.permissions import required_role
from api.http.problems import CONTENT_TYPE
from api.openapi.examples import PARAMETERS, SHAPES, SPECIFICATION
from api.schemas import ProblemDocument

SCHEMAS = "#/components/schemas/"
METHODS = ("get", "post", "put", "patch", "delete")


def reference(document: Mapping[str, Any], styles: str) -> str:
    """Return the page. ``styles`` is the path of the folder with its style sheets."""
    sections: dict[str, list[str]] = defaultdict(list)
    for path, operations in document["paths"].items():
        for method in (method for method in METHODS if method in operations):
            operation = operations[method]
            sections[operation.get("tags", ["service"])[0]].append(_operation(path, method, operation))
    shapes = document.get("components", {}).get("schemas", {})
    links = "".join(f'<li><a href="#{escape(tag)}">{escape(tag)}</a></li>' for tag in [*sections, "shapes"])
    body = "".join(_section(tag, entries) for tag, entries in sections.items())
    about = document["info"]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(about['title'])}: API</title>"
        f'<link rel="icon" href="{escape(styles)}icon.svg" type="image/svg+xml">'
        f'<link rel="stylesheet" href="{escape(styles)}colours.css">'
        f'<link rel="stylesheet" href="{escape(styles)}reference.css"></head><body class="reference"><main>'
        f"<h1>{escape(about['title'])}: API</h1><p>{escape(about.get('description', ''))}</p>"
        '<p>For programs: <a href="/openapi.json">openapi.json</a></p>'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>{body}'
        f"{_section('shapes', [_shape(name, shapes[name]) for name in sorted(shapes)])}</main></body></html>\n"
    )


def _section(name: str, entries: list[str]) -> str:
    return f'<section id="{escape(name)}"><h2>{escape(name)}</h2>{"".join(entries)}</section>'


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    rows = [
        (p["name"], p["in"], _kind(p.get("schema", {})), "required" if p.get("required") else "", about_parameter(p))
        for p in operation.get("parameters", ())
    ]
    parts = [f"<p>{escape(operation.get('description', ''))}</p>", _table("Parameters", rows)]
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(_content("Body", media_type, content))
    answers = operation.get("responses", {})
    parts.append(_table("Answers", [(status, answer.get("description", "")) for status, answer in answers.items()]))
    for status, answer in answers.items():
        if status.startswith("2"):
            parts += [
                _content(f"Answer {status}", kind, content) for kind, content in answer.get("content", {}).items()
            ]
    heading = f"<b>{method.upper()}</b> <code>{escape(path)}</code> <span>{escape(operation.get('summary', ''))}</span>"
    return f"<details><summary>{heading}</summary>{''.join(parts)}</details>"


def _content(what: str, media_type: str, content: Mapping[str, Any]) -> str:
    kind = _kind(content.get("schema", {}))
    example = content.get("example")
    shown = example if isinstance(example, str) else json.dumps(example, indent=2, ensure_ascii=False)
    more = f"<pre>{escape(shown)}</pre>" if example is not None else ""
    return f"<p>{escape(what)}, <code>{escape(media_type)}</code>: {kind}</p>{more}"


def _shape(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (field, _kind(about), "required" if field in required else "", about_parameter({"schema": about}))
        for field, about in schema.get("properties", {}).items()
    ]
    words = f"<p>{escape(schema.get('description', ''))}</p>" + (
        f"<p>{escape(', '.join(map(str, schema['enum'])))}</p>" if "enum" in schema else ""
    )
    title = f'<summary id="{escape(name)}"><code>{escape(name)}</code></summary>'
    return f"<details>{title}{words}{_table('Fields', rows)}</details>"


def _table(caption: str, rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table. Cells are text, except for types from ``_kind``, which are HTML."""
    if not rows:
        return ""
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(row))}</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption>{lines}</table>"


def _cells(row: tuple[str, ...]) -> Iterator[str]:
    return (cell if cell.startswith("<code>") else escape(cell) for cell in row)


def _kind(schema: Mapping[str, Any]) -> str:
    """Return the type as HTML, with a link if it is one of the schemas."""
    return "<code>" + _type(schema) + "</code>"


def _type(schema: Mapping[str, Any]) -> str:
    if name := schema.get("$ref", "").removeprefix(SCHEMAS):
        return f'<a href="#{escape(name)}">{escape(name)}</a>'
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(map(_type, choices))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if "const" in schema or "enum" in schema:
        return escape(" or ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")])))
    return escape(str(schema.get("type", schema.get("title", "anything"))))


def figure(bound: float) -> str:
    """Return a bound as people write it: OpenAPI writes 16.0 for the bound of an integer."""
    return f"{int(bound):,}" if float(bound).is_integer() else f"{bound:g}"


def about_parameter(parameter: Mapping[str, Any]) -> str:
    """Return the parameter's description, with bounds and default."""
    schema = parameter.get("schema", {})
    parts = [schema, *schema.get("anyOf", ())]
    words = [parameter.get("description") or schema.get("description", "")]
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<", "maxLength": "length ≤"}
    words += [f"{sign} {figure(part[bound])}" for bound, sign in signs.items() for part in parts if bound in part]
    if schema.get("default") is not None:
        words.append(f"default {json.dumps(schema['default'])}")
    return "; ".join(filter(None, words))


SCHEME = "token"
REFUSALS = {
    "401": "The token is missing or invalid",
    "403": "Insufficient role, or the request comes from a web page of another origin",
    "429": "Too many invalid tokens from this address; `Retry-After` says how long to wait",
}
PROBLEM = {"schema": {"$ref": SCHEMAS + "ProblemDocument"}, "example": SHAPES["ProblemDocument"]}
CHANGING = ("post", "put", "patch", "delete")
_RUN = "/v1/jobs/{job}/chaos/runs/{run}"
_JOB = "/v1/jobs/{job}"
LEFT_AT_THE_END = (
    f"{_JOB}/report",
    f"{_JOB}/parameters",
    f"{_JOB}/updates",
    f"{_JOB}/tokenizer",
    f"{_JOB}/origin",
    f"{_RUN}/verdict",
    f"{_RUN}/report",
)
SPEAKS_OF_JOBS = ("/v1/jobs", "/v1/node-groups", "/readyz")
"""Paths that need the cluster to answer."""


def describe_access(document: dict[str, Any]) -> None:
    """Add the token's scheme to the document, and to every operation its role and the refusals that follow from it."""
    components = document.setdefault("components", {})
    components["securitySchemes"] = {
        SCHEME: {"type": "http", "scheme": "bearer", "description": "Roles: viewer < operator < admin."}
    }
    schemas = components.setdefault("schemas", {})
    shape = ProblemDocument.model_json_schema(ref_template=SCHEMAS + "{model}")
    for name, schema in (*shape.pop("$defs", {}).items(), ("ProblemDocument", shape)):
        schemas.setdefault(name, schema)
    problem = {CONTENT_TYPE: {"schema": {"$ref": SCHEMAS + "ProblemDocument"}}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            needed = required_role(method.upper(), path)
            operation["security"] = [{SCHEME: []}] if needed else []
            if needed:
                operation["description"] = f"{operation.get('description', '')}\n\nNeeds the role {needed}.".strip()
            for status, meaning in REFUSALS.items():
                if needed or status == "403":
                    operation["responses"].setdefault(status, {"description": meaning, "content": problem})


def install(app: FastAPI) -> None:
    """Make the app's document complete, with roles, refusals and examples."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        if not app.openapi_schema:
            document = described()
            describe_access(document)
            describe(document)
        return described()

    app.openapi = openapi  # type: ignore[method-assign]


def describe(document: dict[str, Any]) -> None:
    """Add to every operation its refusals, and examples of its parameters, body and answers."""
    schemas = document["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)  # FastAPI's own words for 422; ours are problem documents
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            for status, meaning in refusals_of(method, path, operation):
                operation["responses"][status] = {"description": meaning, "content": {CONTENT_TYPE: PROBLEM}}
            for parameter in operation.get("parameters", ()):
                if parameter["name"] in PARAMETERS:
                    parameter["example"] = PARAMETERS[parameter["name"]]
            for container in (operation.get("requestBody"), *operation["responses"].values()):
                _exemplify(container or {}, schemas)
            operation["responses"] = dict(sorted(operation["responses"].items()))
    for path in ("/v1/jobs", "/v1/jobs/check"):
        for content in document["paths"][path]["post"]["requestBody"]["content"].values():
            content["example"] = SPECIFICATION


def refusals_of(method: str, path: str, operation: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the error statuses of an operation, each with its meaning."""
    names = {parameter["name"] for parameter in operation.get("parameters", ())}
    has_body = "requestBody" in operation
    if method in CHANGING:
        yield "400", "The request is invalid, or its Idempotency-Key was used for another request"
    if "{" in path or "cursor" in names:
        yield "404", "Not found"
    if method in CHANGING or path.startswith(LEFT_AT_THE_END) or "{profile}" in path:
        yield "409", "Not possible in the current state"
    if "if-match" in names:
        yield "412", "It was changed since the read that `If-Match` names"
    if has_body:
        yield "408", "The body did not arrive in time"
        yield "413", "The body is too large"
    if names or has_body:
        yield "422", "A value is invalid; `problems` lists each one"
    if path.startswith(SPEAKS_OF_JOBS):
        yield "503", "The cluster, the disk or the service is busy, full or does not answer; try again"


def _exemplify(container: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Add an example to this body or answer: the schema's own, or else the one in ``SHAPES``."""
    for content in container.get("content", {}).values():
        schema = content.get("schema", {})
        for choice in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())):
            name = choice.get("$ref", "").removeprefix(SCHEMAS)
            for example in (*schemas.get(name, {}).get("examples", ()), *filter(None, [SHAPES.get(name)])):
                content.setdefault("example", example)
