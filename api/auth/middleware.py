"""Authentication before all routes: it identifies the caller, checks the role, and records every change in the audit trail.

Responsible for default deny and for the audit trail. It runs before the router and not in it: what it does not know to be
open it refuses, also paths that lead nowhere, files, and routes added later; and no body is read of a request that it
refuses. What passes carries its principal in ``request.state.principal``.

    401     no token, or none that is valid           WWW-Authenticate: Bearer
    403     the role does not reach
    429     wrong tokens, too many from one address   Retry-After
    503     the store cannot be asked who that is, or cannot keep that it was asked

Every request to change something by a known principal has a row in the audit trail before it is carried out, and its status
before it is answered. Strangers leave no rows: they could fill the disk. A stream that was let in asks again by
itself (``api.http.streams``), and ends soon after its token does.

Source: OWASP Authorization Cheat Sheet (deny by default, check every request); RFC 6750, section 3.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import quote

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth.roles import READS, TOKEN_REMEDY, Principal, bearer, refuse_role, required_role
from api.auth.store import AccessStore, AuditRow
from api.auth.tokens import FailureLimit, Tokens
from api.http import problems
from api.http.pools import AUTHENTICATION, STRANGERS
from orchestrator.errors import AtollError, Forbidden, InfrastructureError, TooManyFailures, Unauthenticated

PATH_CHARACTERS_MAX = 500

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The parts of a request that access depends on."""

    method: str
    path: str
    authorization: str
    address: str


class AuthMiddleware:
    """Whatever is not open needs a token whose role reaches."""

    def __init__(self, app: ASGIApp, tokens: Tokens, store: AccessStore) -> None:
        self._app = app
        self._tokens = tokens
        self._store = store
        self._limit = FailureLimit()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = head_of(scope)
        try:
            principal = await self._principal(request)
        except (Unauthenticated, TooManyFailures, InfrastructureError) as error:
            await refusal(error, request.path)(scope, receive, send)
            return
        if principal is None:
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["principal"] = principal
        inner = self._app
        try:
            refuse_role(principal, request.method, request.path)
        except Forbidden as error:
            inner = refusal(error, request.path)
        if request.method in READS:
            await inner(scope, receive, send)
            return
        try:
            number = await AUTHENTICATION.run(self._store.begin_audit, audited(request, principal), key=request.address)
        except InfrastructureError as error:  # what cannot be kept is not done
            await refusal(error, request.path)(scope, receive, send)
            return
        async with self._audited(request, number, send) as send_audited:
            await inner(scope, receive, send_audited)

    async def _principal(self, request: RequestHead) -> Principal | None:
        """Whoever asks; None where nobody needs to be known. Raises what the refusal says."""
        if required_role(request.method, request.path) is None:
            return None
        token = bearer(request.authorization)
        pool = (
            AUTHENTICATION if self._tokens.is_known(token) else STRANGERS
        )  # a flood of guesses takes no holder's thread
        if principal := self._tokens.remembered(token) or await pool.run(
            self._tokens.principal_of, token, key=request.address
        ):
            return principal
        wait_s = self._limit.failed(request.address, time.monotonic())
        if wait_s:
            detail = f"{request.address} has shown too many tokens that are not valid."
            remedy = f"Wait {wait_s} s, and look for a program there that has an old token. {TOKEN_REMEDY}"
            raise TooManyFailures(detail=detail, remedy=remedy, retry_after_s=wait_s)
        logger.warning("%s %r from %s: a token that is not valid", request.method, request.path, request.address)
        raise Unauthenticated(detail="The token is unknown, expired or revoked.", remedy=TOKEN_REMEDY)

    @asynccontextmanager
    async def _audited(self, request: RequestHead, number: int, send: Send) -> AsyncIterator[Send]:
        """The answer is sent by what this yields, which completes the row of the audit trail first."""

        async def send_audited(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._end_audit(request, number, message["status"])
            await send(message)

        try:
            yield send_audited
        except Exception as error:  # it is answered further out
            await self._end_audit(request, number, 400 if isinstance(error, ClientDisconnect) else 500)
            raise

    async def _end_audit(self, request: RequestHead, number: int, status: int) -> None:
        """A store that fails only now keeps nobody from hearing what was done: whoever does not hear it does it again."""
        try:
            await AUTHENTICATION.run(self._store.end_audit, number, status, key=request.address)
        except InfrastructureError as error:
            logger.error(
                "request %d of the audit trail was answered with %d, which is not kept: %s", number, status, error
            )


def audited(request: RequestHead, principal: Principal) -> AuditRow:
    return AuditRow(
        at=time.time(),
        caller=principal.name,
        role=principal.role.value,
        address=request.address,
        method=request.method,
        path=printable(request.path)[:PATH_CHARACTERS_MAX],
    )


def printable(path: str) -> str:
    """The path with its control characters, and all that does not show, as a URL writes them. It is read in terminals."""
    return "".join(c if c.isprintable() and c != "%" else quote(c, safe="") for c in path)


def head_of(scope: Scope) -> RequestHead:
    headers = dict(scope["headers"])
    address = scope["client"][0] if scope.get("client") else "somewhere"
    return RequestHead(scope["method"], scope["path"], headers.get(b"authorization", b"").decode("latin-1"), address)


def refusal(error: AtollError, path: str) -> ASGIApp:
    """The problem document that says this error, with the header that its status asks for."""
    match error:
        case Unauthenticated():
            headers = {"WWW-Authenticate": 'Bearer realm="atoll"'}
        case TooManyFailures():
            headers = {"Retry-After": str(error.retry_after_s)}
        case _:
            headers = {}
    return problems.response(problems.document_of(error, path), headers=headers)
