"""Errors as problem documents: the one place where an exception meets an HTTP status.

Every exception becomes ``application/problem+json``; clients turn it into the same exception again (``api.client``).
Tracebacks never leak: an unforeseen exception is logged here and answered with a plain 500. ``ErrorHandler`` covers the
middleware inside it too, and keeps the connection usable. The framework's own handler would answer, raise again, and have
the connection closed after an answer that did not announce it.

Source: RFC 9457, Problem Details for HTTP APIs.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.schemas import ProblemDocument, ProblemItem
from orchestrator.errors import (
    PROBLEMS_MAX,
    AtollError,
    ConfigurationError,
    Conflict,
    DataError,
    Forbidden,
    InfrastructureError,
    InternalError,
    InvalidJobSpec,
    NotFound,
    PreconditionFailed,
    RequestError,
    StoreUnavailable,
    TooManyFailures,
    Unauthenticated,
    disk_remedy,
)
from orchestrator.specification.validation import Location, joined, problem_of

CONTENT_TYPE = "application/problem+json"
UNIONS = (Union, UnionType)
PREFIX = "urn:atoll:problem:"

# Most particular first: the first class an error belongs to decides.
KINDS: tuple[tuple[type[AtollError], str, int, str], ...] = (
    (InvalidJobSpec, "invalid-job-spec", 422, "Invalid job specification"),
    (ConfigurationError, "configuration", 422, "Invalid configuration"),
    (NotFound, "not-found", 404, "Not found"),
    (Conflict, "conflict", 409, "Not possible in the current state"),
    (PreconditionFailed, "precondition-failed", 412, "Changed since it was read"),
    (Unauthenticated, "unauthenticated", 401, "Authentication required"),
    (Forbidden, "forbidden", 403, "Insufficient role"),
    (TooManyFailures, "too-many-failures", 429, "Too many invalid tokens"),
    (RequestError, "request", 400, "Invalid request"),
    (StoreUnavailable, "store", 503, "Database unavailable"),
    (InfrastructureError, "infrastructure", 503, "Infrastructure unavailable"),
    (DataError, "data", 500, "Stored data is damaged"),
    (InternalError, "internal", 500, "Internal error"),
    (AtollError, "failure", 500, "Request failed"),
)

TITLES = {
    404: "No such path",
    405: "Method not allowed",
    408: "Request timed out",
    413: "Request body too large",
}
RETRY_AFTER_S = 2
REFUSALS_OF_THE_MACHINE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE})
"""Errors of full disks and exhausted descriptors. Any other error of the operating system is a bug in atoll."""

logger = logging.getLogger(__name__)


def document_of(error: AtollError, instance: str = "") -> ProblemDocument:
    """Return the problem document for ``error``."""
    slug, status, title = next(row[1:] for row in KINDS if isinstance(error, row[0]))
    problems = error.problems if isinstance(error, InvalidJobSpec) else ()
    return ProblemDocument(
        type=PREFIX + slug,
        title=title,
        status=status,
        detail=_detail_of(error),
        instance=instance,
        remedy=getattr(error, "remedy", ""),
        problems=[ProblemItem(path=p.path, message=p.message, remedy=p.remedy) for p in problems],
    )


def _detail_of(error: AtollError) -> str:
    detail = getattr(error, "detail", str(error))
    if isinstance(error, InvalidJobSpec) and error.omitted_count:
        return f"{detail}; {error.omitted_count:,} further problems are not shown"
    return detail


def install(app: FastAPI) -> None:
    """Make the app answer refusals of routes with problem documents. None of these functions blocks."""

    @app.exception_handler(AtollError)
    async def _ours(request: Request, error: AtollError) -> JSONResponse:
        return answer_to(error, request.method, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        items = [_item_of(detail) for detail in joined(_in_document(error.errors(), request))[:PROBLEMS_MAX]]
        detail = "the request has invalid fields"
        return response(_plain(422, "request", "Invalid request", detail, request.url.path, items))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        document = refused(error.status_code, str(error.detail), request.url.path)
        headers = dict(error.headers or {})
        if error.status_code == 405 and (methods := _methods_of(request)):
            headers["Allow"] = ", ".join(methods)
        return response(document, headers=headers)


class ErrorHandler:
    """Middleware: answer every exception that was not answered inside, and stop it here."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def noted_send(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noted_send)
        except Exception as error:
            if begun:
                raise  # the answer has begun; close the connection, so that the client sees that it is incomplete
            await answer_to(error, scope["method"], scope["path"])(scope, receive, send)


def answer_to(error: Exception, method: str, path: str) -> JSONResponse:
    """Return the answer to this error; log the error unless the caller is at fault."""
    if isinstance(error, OSError) and error.errno in REFUSALS_OF_THE_MACHINE:
        where = f" ({error.filename})" if error.filename else ""
        detail = f"The service's machine refused the operation: {error.strerror}{where}."
        error = InfrastructureError(detail=detail, remedy=f"{disk_remedy(error)}, and repeat the request.")
    match error:
        case AtollError():
            document = document_of(error, path)
            if document.status == 503:
                logger.error("%s %r: %s", method, path, error)
            elif document.status >= 500:
                logger.error("%s %r: %s", method, path, error, exc_info=error)
        case HTTPException():
            document = refused(error.status_code, str(error.detail), path)
        case ClientDisconnect():  # no client reads this, but the audit trail keeps the status
            document = refused(400, "The client disconnected before its request was complete.", path)
        case _:
            logger.error("%s %r failed", method, path, exc_info=error)
            detail = f"{type(error).__name__} while answering this request. This is a bug in atoll."
            document = _plain(500, "internal", "Internal error", detail, path)
            document.remedy = "Please report it, with service.log of the service's home folder."
    return response(document)


def refused(status: int, detail: str, path: str = "") -> ProblemDocument:
    """Return the problem document for a request that the framework refused."""
    document = _plain(status, "request", TITLES.get(status, "Request refused"), detail, path)
    if status in (404, 405):
        document.remedy = "GET /openapi.json lists every path and method."
    return document


def response(document: ProblemDocument, headers: dict[str, str] | None = None) -> JSONResponse:
    body = document.model_dump(exclude_defaults=True) | {"status": document.status}
    if document.status == 503:
        headers = {"Retry-After": str(RETRY_AFTER_S), **(headers or {})}
    return JSONResponse(body, status_code=document.status, media_type=CONTENT_TYPE, headers=headers)


def _plain(
    status: int, slug: str, title: str, detail: str, instance: str, problems: Sequence[ProblemItem] = ()
) -> ProblemDocument:
    return ProblemDocument(
        type=PREFIX + slug, title=title, status=status, detail=detail, instance=instance, problems=list(problems)
    )


def _methods_of(request: Request) -> list[str]:
    """Return the methods of all routes of the path: the router names those of the first route only."""
    paths: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    matching = (operations for path, operations in paths.items() if compile_path(path)[0].match(request.url.path))
    return sorted({method.upper() for operations in matching for method in operations})


def _in_document(errors: Sequence[Any], request: Request) -> list[Any]:
    """Return pydantic's errors as the document has them: without the names of models, and of one branch of a union.

    Pydantic validates a body that may be one of several models against each, and names the model in the location. Users
    do not know these models. The branch that fits best is the one that was meant.
    """
    body = getattr(request.scope.get("route"), "body_field", None)
    if body is None:
        return list(errors)
    errors_at: dict[Location, dict[str, list[Any]]] = {}
    shown: list[Any] = []
    for error in errors:
        inner: Location = error["loc"][1:] if error["loc"][:1] == ("body",) else ()
        names = list(_names_of_models(body.field_info, inner))
        place = tuple(part for at, part in enumerate(inner) if at not in names)
        named = {**error, "loc": ("body", *place)} if names else error
        if names:
            first = names[0]
            errors_at.setdefault(inner[:first], {}).setdefault(str(inner[first]), []).append(named)
        else:
            shown.append(named)
    return shown + [error for union, branches in errors_at.items() for error in _of_union(("body", *union), branches)]


def _of_union(place: Location, branches: Mapping[str, list[Any]]) -> list[Any]:
    """Return the errors of the branch that fits best; if nothing tells the branches apart, which fields would do so."""
    unknown, missing = (
        [[one for one in errors if one["type"] == kind] for errors in branches.values()]
        for kind in ("extra_forbidden", "missing")
    )
    alike = all([one["loc"] for one in errors] == [one["loc"] for one in unknown[0]] for errors in unknown)
    if len(branches) == 1 or not all(missing) or not alike:
        return min(branches.values(), key=_unlike)
    fields = " or ".join(repr(errors[0]["loc"][-1]) for errors in missing)
    return [{"type": "union_tag_not_found", "loc": place, "ctx": {"discriminator": fields}}, *unknown[0]]


def _names_of_models(field: FieldInfo, location: Location) -> Iterator[int]:
    """Yield which parts of the location name a model of a union, and no field or entry of the document."""
    kind, tag = field.annotation, field.discriminator
    for at, part in enumerate(location):
        options, tag = _options_of(kind, tag)
        if len(options) > 1:
            models = [one for one in options if isinstance(one, type) and issubclass(one, BaseModel)]
            kind, tag = next((one for one in models if part in (one.__name__, *_values_of(one, tag))), None), None
            if kind is None:
                return
            yield at
            continue
        (kind,) = options
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if (inner := kind.model_fields.get(str(part))) is None:
                return
            kind, tag = inner.annotation, inner.discriminator
        else:
            kind = next(reversed([one for one in get_args(kind) if one is not Ellipsis]), None)


def _options_of(kind: Any, tag: Any) -> tuple[list[Any], Any]:
    """Return the types that a value may have but for null, and the name of the field that selects one, if there is one."""
    while True:
        if get_origin(kind) is Annotated:
            kind, *notes = get_args(kind)
            tag = next((note.discriminator for note in notes if isinstance(note, FieldInfo)), tag)
            continue
        options = [one for one in get_args(kind) if one is not NoneType] if get_origin(kind) in UNIONS else [kind]
        if options == [kind] or len(options) > 1:
            return options, tag
        (kind,) = options


def _values_of(model: type[BaseModel], tag: Any) -> tuple[Any, ...]:
    """Return the values of the model's field that selects it in a union."""
    return get_args(model.model_fields[tag].annotation) if tag in model.model_fields else ()


def _unlike(errors: Sequence[Any]) -> tuple[int, int]:
    """Return how far a document is from a model: by its fields that are not there, then by all else."""
    return sum(one["type"] in ("missing", "extra_forbidden") for one in errors), len(errors)


def _item_of(detail: Any) -> ProblemItem:
    problem = problem_of(detail)
    return ProblemItem(path=problem.path, message=problem.message, remedy=problem.remedy)
