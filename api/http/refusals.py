"""Turn a problem document back into the error that the service raised.

The inverse of ``api.http.problems``, for clients, which need no web framework for it. An answer that is not a problem
document did not come from an atoll service.
"""

from __future__ import annotations

import httpx

from api.schemas import ProblemDocument
from orchestrator.errors import (
    AtollError,
    ConfigurationError,
    Conflict,
    Forbidden,
    InfrastructureError,
    InternalError,
    InvalidJobSpec,
    NotFound,
    PreconditionFailed,
    Problem,
    RequestError,
    StoreUnavailable,
    TooManyFailures,
    Unauthenticated,
)

WAIT_DIGITS_MAX = 9
"""The longest Retry-After that is believed, in digits: the answer may come from some other server."""


def error_of(answer: httpx.Response) -> AtollError:
    """Return the error that this answer reports."""
    try:
        document = ProblemDocument.model_validate_json(answer.content)
    except ValueError:
        detail = (
            f"{answer.request.method} {answer.request.url} was answered {answer.status_code} {answer.reason_phrase}."
        )
        return InfrastructureError(detail=detail, remedy="Is this the address of an atoll service?")
    detail, remedy = document.detail, document.remedy
    problems = tuple(Problem(item.path, item.message, item.remedy) for item in document.problems)
    match document.type.rpartition(":")[2]:
        case "invalid-job-spec":
            return InvalidJobSpec(detail=detail, problems=problems)
        case "configuration":
            return ConfigurationError(detail=detail)
        case "not-found":
            return NotFound(detail=detail, remedy=remedy)
        case "conflict":
            return Conflict(detail=detail, remedy=remedy)
        case "precondition-failed":
            return PreconditionFailed(detail=detail, remedy=remedy)
        case "unauthenticated":
            return Unauthenticated(detail=detail, remedy=remedy)
        case "forbidden":
            return Forbidden(detail=detail, remedy=remedy)
        case "too-many-failures":
            seconds = answer.headers.get("Retry-After", "")
            wait_s = (
                int(seconds) if seconds.isascii() and seconds.isdecimal() and len(seconds) <= WAIT_DIGITS_MAX else 0
            )
            return TooManyFailures(detail=detail, remedy=remedy, retry_after_s=wait_s)
        case "request":
            lines = "".join(f"\n  - {problem}" for problem in problems)
            return RequestError(detail=detail, remedy=remedy + lines)
        case "internal":
            return InternalError(detail=detail)
        case "store":
            return StoreUnavailable(detail=detail, remedy=remedy)
    return InfrastructureError(detail=detail, remedy=remedy)
