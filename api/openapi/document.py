"""The parts of the OpenAPI document that FastAPI does not know: how each operation refuses, and an example of everything.

Refusals follow from what an operation is, by ``refusals_of`` alone, so that a new route cannot forget them; who may call
it is told by ``api.auth.openapi``. schemathesis holds the running service to the result (tests/api/test_openapi.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from api.auth import openapi as access
from api.auth.openapi import SCHEMAS
from api.http.problems import CONTENT_TYPE
from api.openapi.examples import PARAMETERS, SHAPES, SPECIFICATION

PROBLEM = {"schema": {"$ref": SCHEMAS + "ProblemDocument"}, "example": SHAPES["ProblemDocument"]}
CHANGING = ("post", "put", "patch", "delete")
_RUN = "/v1/jobs/{job}/chaos/runs/{run}"
_JOB = "/v1/jobs/{job}"
LEFT_AT_THE_END = (
    f"{_JOB}/report",
    f"{_JOB}/parameters",
    f"{_JOB}/tokenizer",
    f"{_JOB}/origin",
    f"{_RUN}/verdict",
    f"{_RUN}/report",
)
SPEAKS_OF_JOBS = ("/v1/jobs", "/v1/node-groups", "/readyz")
"""Paths that need whatever runs the jobs to answer."""


def install(app: FastAPI) -> None:
    """From here on the app's document is whole: who may do what, how each operation refuses, and examples."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        if not app.openapi_schema:
            document = described()
            access.describe(document)
            describe(document)
        return described()

    app.openapi = openapi  # type: ignore[method-assign]


def describe(document: dict[str, Any]) -> None:
    """Every operation says how it refuses, and has an example for what it takes and what it answers."""
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
    """The statuses, with their meaning, by which such an operation refuses."""
    names = {parameter["name"] for parameter in operation.get("parameters", ())}
    has_body = "requestBody" in operation
    if method in CHANGING:
        yield "400", "The request contradicts itself or an earlier one"
    if "{" in path or "cursor" in names:
        yield "404", "There is no such thing"
    if method in CHANGING or path.startswith(LEFT_AT_THE_END):
        yield "409", "Not possible as things stand"
    if "if-match" in names:
        yield "412", "Something else was asked of it since the look that `If-Match` names"
    if has_body:
        yield "408", "The body did not come in time"
        yield "413", "The body is too large"
    if names or has_body:
        yield "422", "A value cannot be used; `problems` names each one"
    if path.startswith(SPEAKS_OF_JOBS):
        yield "503", "The cluster, the disk or this service has no room or does not answer; try again"


def _exemplify(container: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Show an example of what this body or answer holds: the shape's own, or else the one of ``SHAPES``."""
    for content in container.get("content", {}).values():
        schema = content.get("schema", {})
        for choice in (schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())):
            name = choice.get("$ref", "").removeprefix(SCHEMAS)
            for example in (*schemas.get(name, {}).get("examples", ()), *filter(None, [SHAPES.get(name)])):
                content.setdefault("example", example)
