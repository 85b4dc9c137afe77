"""What pydantic finds wrong with a document, told as our problems: where, what was given, and the remedy. Pure.

Responsible for the words that all specifications share. Refuses to know any one of them, and the rules between fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from orchestrator.errors import Problem

COMPLETE = ("duration", "bandwidth", "number", "comparison")
"""Kinds of errors whose message is our own and says the remedy itself (``simulation.spec``, ``chaos.plan``)."""


def problem_of(item: Any, *, unknown: str, missing: str = "Add it.", under: str = "") -> Problem:
    """One of ``ValidationError.errors()``. ``unknown`` and ``missing`` are remedies, ``under`` where the document stands."""
    path = ".".join([*([under] if under else []), *(str(part) for part in item["loc"])]) or "(the whole document)"
    if item["type"] in COMPLETE:
        return Problem(path, item["msg"], "")
    given = "" if item["type"] == "missing" else f" (given: {item['input']!r:.60})"
    remedies = {"extra_forbidden": unknown, "missing": missing}
    return Problem(path, f"{item['msg']}{given}.", remedies.get(item["type"], "Change the value accordingly."))


def valid_fields(model: type[BaseModel], document: Mapping[str, Any]) -> dict[str, Any]:
    """Those top-level fields that are right on their own, so that rules between them are still checked."""
    valid: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if name not in document and field.is_required():
            continue
        try:
            annotated: Any = Annotated[field.annotation, field]
            valid[name] = TypeAdapter(annotated).validate_python(document.get(name, field.default))
        except ValidationError:
            continue
    return valid
