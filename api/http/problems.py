"""Errors as problem documents: the one place where an exception meets an HTTP status.

Responsible for the mapping: every exception becomes ``application/problem+json`` (``api.http.refusals`` turns it into the
same exception again). It refuses to leak tracebacks: an unforeseen exception is logged here and answered with a plain 500.

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
from starlette.routing import compile_path

from api.schemas import ProblemDocument, ProblemItem
from orchestrator.errors import (
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
)

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

REFUSALS_OF_THE_MACHINE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE})
"""Of disks and descriptors there may be too few. Whatever else an operating system says is a bug of ours."""

logger = logging.getLogger(__name__)


def document_of(error: AtollError, instance: str = "") -> ProblemDocument:
    """The problem document that says what ``error`` says."""
    slug, status, title = next(row[1:] for row in KINDS if isinstance(error, row[0]))
    problems = error.problems if isinstance(error, InvalidJobSpec) else ()
    return ProblemDocument(
        type=PREFIX + slug,
        title=title,
        status=status,
        detail=getattr(error, "detail", str(error)),
        instance=instance,
        remedy=getattr(error, "remedy", ""),
        problems=[ProblemItem(path=p.path, message=p.message, remedy=p.remedy) for p in problems],
    )


def install(app: FastAPI) -> None:
    """From here on every failure of the app is answered with a problem document."""

    @app.exception_handler(AtollError)
    def _ours(request: Request, error: AtollError) -> JSONResponse:
        document = document_of(error, request.url.path)
        if document.status >= 500:
            bug = error if document.status == 500 else None  # the others have said all that is to be said
            logger.error("%s %s: %s", request.method, request.url.path, error, exc_info=bug)
        return response(document)

    @app.exception_handler(OSError)
    def _refused_by_machine(request: Request, error: OSError) -> JSONResponse:
        if error.errno not in REFUSALS_OF_THE_MACHINE:
            return _unforeseen(request, error)
        where = f" ({error.filename})" if error.filename else ""
        detail = f"The service's machine cannot do that at present: {error.strerror}{where}."
        return _ours(request, InfrastructureError(detail=detail, remedy="Make room, and repeat the request."))

    @app.exception_handler(RequestValidationError)
    def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        items = [_item_of(detail) for detail in error.errors()]
        detail = "the request has fields that cannot be used"
        return response(_plain(422, "request", "The request cannot be used", detail, request.url.path, items))

    @app.exception_handler(HTTPException)
    def _http(request: Request, error: HTTPException) -> JSONResponse:
        title = {404: "There is no such path", 405: "The path does not know this method"}.get(
            error.status_code, "The request was refused"
        )
        document = _plain(error.status_code, "request", title, str(error.detail), request.url.path)
        if error.status_code in (404, 405):
            document.remedy = "GET /openapi.json lists every path and method."
        headers = dict(error.headers or {})
        if error.status_code == 405 and (methods := _methods_of(request)):
            headers["Allow"] = ", ".join(methods)
        return response(document, headers=headers)

    @app.exception_handler(Exception)
    def _unforeseen(request: Request, error: Exception) -> JSONResponse:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        detail = f"{type(error).__name__} while answering this request. This is a bug in atoll."
        document = _plain(500, "internal", "A mistake of atoll's own", detail, request.url.path)
        document.remedy = "Please report it with service.log of the service's home folder."
        return response(document)


def response(document: ProblemDocument, headers: dict[str, str] | None = None) -> JSONResponse:
    body = document.model_dump(exclude_defaults=True) | {"status": document.status}
    return JSONResponse(body, status_code=document.status, media_type=CONTENT_TYPE, headers=headers)


def _plain(
    status: int, slug: str, title: str, detail: str, instance: str, problems: Sequence[ProblemItem] = ()
) -> ProblemDocument:
    return ProblemDocument(
        type=PREFIX + slug, title=title, status=status, detail=detail, instance=instance, problems=list(problems)
    )


def _methods_of(request: Request) -> list[str]:
    """What the path knows, by all its routes: the router names the methods of the first one only."""
    paths: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
    matching = (operations for path, operations in paths.items() if compile_path(path)[0].match(request.url.path))
    return sorted({method.upper() for operations in matching for method in operations})


def _item_of(detail: Any) -> ProblemItem:
    path = ".".join(str(part) for part in detail["loc"])
    return ProblemItem(path=path, message=f"{detail['msg']}.", remedy="Change the value accordingly.")
