"""Authentication before all routes: identify the caller, check the role, and record every change in the audit trail.

Denies by default. It runs before the router, so that it refuses everything that is not known to be open: unknown paths,
files, and routes added later. It reads no body of a request that it refuses. A request that passes carries its principal in
``request.state.principal``.

    401     no token, or an invalid one                 WWW-Authenticate: Bearer
    403     insufficient role
    429     too many invalid tokens from one address    Retry-After
    503     the store cannot look the token up, or cannot write the audit trail

Every changing request of a known principal gets its row in the audit trail before it is carried out, and the row gets its
status before the request is answered. Unknown callers leave no rows, because they could fill the disk. Streams check their
token again by themselves (``api.http.streams``) and end soon after it does.

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

from api.auth.permissions import READS, TOKEN_REMEDY, Principal, bearer, refuse_role, required_role
from api.auth.tokens import AccessStore, AuditRow, FailureLimit, Tokens
from api.http import problems
from api.http.connections import network_of
from api.http.pools import AUTHENTICATION, STRANGERS
from orchestrator.errors import AtollError, Forbidden, InfrastructureError, TooManyFailures, Unauthenticated

PATH_CHARACTERS_MAX = 500
LINES_MAX, LINE_CHARACTERS_MAX = 100, 120
"""How many invalid tokens the log names at once, and then each minute, and what of their paths: addresses and long requests
cost an unknown client nothing."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The parts of a request that access control needs."""

    method: str
    path: str
    authorization: str
    address: str


class AuthMiddleware:
    """Middleware: every path that is not open needs a token with a sufficient role."""

    def __init__(self, app: ASGIApp, tokens: Tokens, store: AccessStore) -> None:
        self._app = app
        self._tokens = tokens
        self._store = store
        self._limit = FailureLimit()
        self._lines = FailureLimit(LINES_MAX)
        self._untold = 0

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
        except InfrastructureError as error:  # do not carry out what cannot be recorded
            await refusal(error, request.path)(scope, receive, send)
            return
        async with self._audited(request, number, send) as send_audited:
            await inner(scope, receive, send_audited)

    async def _principal(self, request: RequestHead) -> Principal | None:
        """Return the caller, or None if the path is open. Raises the error to answer with."""
        if required_role(request.method, request.path) is None:
            return None
        token = bearer(request.authorization)
        # a flood of guesses must not take the threads of known tokens
        pool = AUTHENTICATION if self._tokens.is_known(token) else STRANGERS
        if principal := self._tokens.remembered(token) or await pool.run(
            self._tokens.principal_of, token, key=request.address
        ):
            return principal
        now = time.monotonic()
        wait_s = self._limit.failed(network_of(request.address), now)
        if wait_s:
            detail = f"Too many invalid tokens from {request.address}."
            remedy = f"Wait {wait_s} s, and look for a program on that machine with an old token. {TOKEN_REMEDY}"
            raise TooManyFailures(detail=detail, remedy=remedy, retry_after_s=wait_s)
        self._log(request, now)
        raise Unauthenticated(detail="The token is unknown, expired or revoked.", remedy=TOKEN_REMEDY)

    def _log(self, request: RequestHead, now: float) -> None:
        if self._lines.failed("", now):
            self._untold += 1
            return
        untold, self._untold = self._untold, 0
        logger.warning(
            "%s %s from %s: invalid token%s",
            request.method[:LINE_CHARACTERS_MAX],
            repr(request.path)[:LINE_CHARACTERS_MAX],
            request.address,
            f" ({untold} more were not listed)" if untold else "",
        )

    @asynccontextmanager
    async def _audited(self, request: RequestHead, number: int, send: Send) -> AsyncIterator[Send]:
        """Yield a ``send`` that completes the request's row in the audit trail before it sends the answer."""

        async def send_audited(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._end_audit(request, number, message["status"])
            await send(message)

        try:
            yield send_audited
        except Exception as error:  # an outer middleware answers it
            await self._end_audit(request, number, 400 if isinstance(error, ClientDisconnect) else 500)
            raise

    async def _end_audit(self, request: RequestHead, number: int, status: int) -> None:
        """Record the status. A failure is only logged: a client without an answer would repeat what was done."""
        try:
            await AUTHENTICATION.run(self._store.end_audit, number, status, key=request.address)
        except InfrastructureError as error:
            logger.error(
                "cannot record that request %d of the audit trail was answered with %d: %s", number, status, error
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
    """Return the path with control and invisible characters percent-encoded, because terminals show the audit trail."""
    return "".join(c if c.isprintable() and c != "%" else quote(c, safe="") for c in path)


def head_of(scope: Scope) -> RequestHead:
    headers = dict(scope["headers"])
    address = scope["client"][0] if scope.get("client") else "somewhere"
    return RequestHead(scope["method"], scope["path"], headers.get(b"authorization", b"").decode("latin-1"), address)


def refusal(error: AtollError, path: str) -> ASGIApp:
    """Return the answer to this error, with the header that its status requires."""
    match error:
        case Unauthenticated():
            headers = {"WWW-Authenticate": 'Bearer realm="atoll"'}
        case TooManyFailures():
            headers = {"Retry-After": str(error.retry_after_s)}
        case _:
            headers = {}
    return problems.response(problems.document_of(error, path), headers=headers)
