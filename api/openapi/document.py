"""The parts of the OpenAPI document that FastAPI cannot derive: roles, refusals and examples of each operation.

Roles come from the rule that the middleware applies (``api.auth.roles.required_role``), and refusals from ``refusals_of``
alone, so that a new route cannot forget them. schemathesis checks the running service against the result
(tests/api/test_openapi.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from api.auth.roles import required_role
from api.http.problems import CONTENT_TYPE
from api.openapi.examples import PARAMETERS, SHAPES, SPECIFICATION
from api.schemas import ProblemDocument

SCHEME = "token"
REFUSALS = {
    "401": "The token is missing or invalid",
    "403": "Insufficient role, or the request comes from a web page of another origin",
    "429": "Too many invalid tokens from this address; `Retry-After` says how long to wait",
}
SCHEMAS = "#/components/schemas/"
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
    if method in CHANGING or path.startswith(LEFT_AT_THE_END):
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
