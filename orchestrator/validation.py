"""Validation errors of pydantic as our problems: where, what was given, and the remedy. Pure.

Responsible for the words that all specifications share, and for their length: what was given is shown in brief, however long
it is. Refuses to know any one of them, and the rules between fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from orchestrator.errors import PROBLEMS_MAX, Problem
from orchestrator.plain import brief

COMPLETE = ("duration", "bandwidth", "number", "comparison")
"""Kinds of errors whose message is our own and says the remedy itself (``simulation.spec``, ``chaos.plan``)."""


def problems_of(error: ValidationError, *, unknown: str, missing: str = "Add it.", under: str = "") -> list[Problem]:
    """The problems that the error holds, as many as are ever shown; ``omitted_count`` says how many more there are.

    ``unknown`` and ``missing`` are remedies, ``under`` is where the document stands.
    """
    return [
        _problem_of(item, unknown=unknown, missing=missing, under=under)
        for item in error.errors(include_url=False, include_context=False)[:PROBLEMS_MAX]
    ]


def omitted_count(error: ValidationError) -> int:
    return max(0, error.error_count() - PROBLEMS_MAX)


def path_of(location: tuple[int | str, ...], under: str = "") -> str:
    """Where something stands in a document, as ``islands.0.count``. A key is shown in brief: it may be anything."""
    parts = [under] if under else []
    parts += [brief(part).replace("'", "") for part in location]
    return ".".join(parts) or "(the whole document)"


def _problem_of(item: Any, *, unknown: str, missing: str, under: str) -> Problem:
    path = path_of(item["loc"], under)
    if item["type"] in COMPLETE:
        return Problem(path, item["msg"], "")
    value = "" if item["type"] == "missing" else f" (given: {brief(item['input'])})"
    remedies = {"extra_forbidden": unknown, "missing": missing}
    return Problem(path, f"{item['msg']}{value}.", remedies.get(item["type"], "Change the value accordingly."))


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
