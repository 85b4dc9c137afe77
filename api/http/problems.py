"""Errors as problem documents: the one place where an exception meets an HTTP status.

Responsible for the mapping: every exception becomes ``application/problem+json`` (``api.http.refusals`` turns it into the
same exception again). It refuses to leak tracebacks: an unforeseen exception is logged here and answered with a plain 500.
``ErrorHandler`` does so for whatever raises, the middleware inside it included; the connection stays as good as it was. The
framework would answer, raise again, and have the connection cut behind an answer that did not say so.

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
from orchestrator.specification.validation import problem_of

CONTENT_TYPE = "application/problem+json"
PREFIX = "urn:atoll:problem:"

# Most particular first: the first class an error belongs to decides.
KINDS: tuple[tuple[type[AtollError], str, int, str], ...] = (
    (InvalidJobSpec, "invalid-job-spec", 422, "The job specification cannot be used"),
    (ConfigurationError, "configuration", 422, "The configuration cannot be used"),
    (NotFound, "not-found", 404, "There is no such thing"),
    (Conflict, "conflict", 409, "Not possible as things stand"),
    (PreconditionFailed, "precondition-failed", 412, "It was changed meanwhile"),
    (Unauthenticated, "unauthenticated", 401, "Nobody known asks"),
    (Forbidden, "forbidden", 403, "The role does not reach"),
    (TooManyFailures, "too-many-failures", 429, "Too many wrong tokens"),
    (RequestError, "request", 400, "The request cannot be answered"),
    (StoreUnavailable, "store", 503, "The service's store does not do its part"),
    (InfrastructureError, "infrastructure", 503, "The infrastructure does not answer"),
    (DataError, "data", 500, "Stored data is damaged"),
    (InternalError, "internal", 500, "A mistake of atoll's own"),
    (AtollError, "failure", 500, "The request failed"),
)

TITLES = {
    404: "There is no such path",
    405: "The path does not know this method",
    408: "The request came too slowly",
    413: "The body is too large",
}
RETRY_AFTER_S = 2
REFUSALS_OF_THE_MACHINE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE})
"""Errors of full disks and too few descriptors. Any other error of the operating system is a bug of ours."""

logger = logging.getLogger(__name__)


def document_of(error: AtollError, instance: str = "") -> ProblemDocument:
    """The problem document that says what ``error`` says."""
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
    """From here on what a route refuses is answered with a problem document. None of these functions waits for anything."""

    @app.exception_handler(AtollError)
    async def _ours(request: Request, error: AtollError) -> JSONResponse:
        return answer_to(error, request.method, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        items = [_item_of(detail) for detail in error.errors()[:PROBLEMS_MAX]]
        detail = "the request has fields that cannot be used"
        return response(_plain(422, "request", "The request cannot be used", detail, request.url.path, items))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        document = refused(error.status_code, str(error.detail), request.url.path)
        headers = dict(error.headers or {})
        if error.status_code == 405 and (methods := _methods_of(request)):
            headers["Allow"] = ", ".join(methods)
        return response(document, headers=headers)


class ErrorHandler:
    """Middleware: what was raised and not answered inside is answered here, and goes no further."""

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
                raise  # the answer cannot be taken back; the connection is cut, so that nobody takes it for whole
            await answer_to(error, scope["method"], scope["path"])(scope, receive, send)


def answer_to(error: Exception, method: str, path: str) -> JSONResponse:
    """The answer to this error, which is logged where it is no fault of the caller's."""
    if isinstance(error, OSError) and error.errno in REFUSALS_OF_THE_MACHINE:
        where = f" ({error.filename})" if error.filename else ""
        detail = f"The service's machine cannot do that at present: {error.strerror}{where}."
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
        case ClientDisconnect():  # nobody hears this, but the audit trail keeps the status
            document = refused(400, "The client left before its request was whole.", path)
        case _:
            logger.error("%s %r failed", method, path, exc_info=error)
            detail = f"{type(error).__name__} while answering this request. This is a bug in atoll."
            document = _plain(500, "internal", "A mistake of atoll's own", detail, path)
            document.remedy = "Please report it with service.log of the service's home folder."
    return response(document)


def refused(status: int, detail: str, path: str = "") -> ProblemDocument:
    """The problem document of a request that does not come as far as our own errors."""
    document = _plain(status, "request", TITLES.get(status, "The request was refused"), detail, path)
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
    """The methods of the path, by all its routes: the router names those of the first one only."""
    paths: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    matching = (operations for path, operations in paths.items() if compile_path(path)[0].match(request.url.path))
    return sorted({method.upper() for operations in matching for method in operations})


def _item_of(detail: Any) -> ProblemItem:
    problem = problem_of(detail)
    return ProblemItem(path=problem.path, message=problem.message, remedy=problem.remedy)
