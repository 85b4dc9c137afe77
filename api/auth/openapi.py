"""The part of the OpenAPI document about access: the token's scheme, the role that each operation needs, and its refusals.

It is read off the same rule that the middleware applies (``api.auth.roles.required_role``), so that it cannot say otherwise.
"""

from __future__ import annotations

from typing import Any

from api.auth.roles import required_role
from api.http.problems import CONTENT_TYPE
from api.schemas import ProblemDocument

SCHEME = "token"
REFUSALS = {
    "401": "No token, or none that is valid",
    "403": "The role does not reach, or the request comes from elsewhere",
    "429": "Too many wrong tokens from this address; `Retry-After` says how long to wait",
}
SCHEMAS = "#/components/schemas/"


def describe(document: dict[str, Any]) -> None:
    """Every operation of the document says the role that it needs, and how it refuses."""
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
