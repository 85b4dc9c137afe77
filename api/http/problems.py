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
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
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
from orchestrator.specification.validation import joined, problem_of

CONTENT_TYPE = "application/problem+json"
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
        items = [_item_of(detail) for detail in joined(error.errors())[:PROBLEMS_MAX]]
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


def _item_of(detail: Any) -> ProblemItem:
    problem = problem_of(detail)
    return ProblemItem(path=problem.path, message=problem.message, remedy=problem.remedy)
