"""The middlewares that guard the service: requests refused before any route sees them, and headers added to every answer.

``Guard`` runs before authentication and refuses three kinds of requests with 403. On loopback, a request whose ``Host`` is
not a loopback name was redirected by DNS rebinding; beyond loopback the service cannot know its names. A request with a
foreign ``Origin`` comes from a web page (cross-site request forgery). A path with the character NUL is never valid, and
databases fail on it. No token is needed to send any of these, and a browser on this machine reaches loopback.

``SecurityHeaders`` sets defaults for every answer, including errors: no content sniffing, no framing, nothing loaded unless
the route's own ``Content-Security-Policy`` allows it, no caching of what needed a token, and HSTS over TLS. A header that
the route sets wins. Browsers ignore HSTS for addresses without a name; with a name it covers all ports, so a Prometheus on
the same name needs TLS as well.

``Bodies`` limits request bodies, in bytes and in time:

    413    more than the route's limit: at once where Content-Length says so, else when so much has come
    408    the body was not whole in time

No route can read more than the limit. After an answer that did not wait for the body, the rest of a small body is read and
discarded, so that the connection stays usable. After a large one the answer says ``Connection: close``, and its last byte
is held back for a moment while more is discarded: closing a socket over unread data resets it, and the answer may be lost.
Bodies are parsed in a thread, whatever route they are for (``api.http.pools``).

Sources: OWASP, Cross-Site Request Forgery Prevention (origin checks), HTTP Headers and REST Security Cheat Sheets; RFC 6797;
RFC 9110, 15.5.14 (413) and 10.1.1 (Expect); RFC 9112, 9.6 (closing a connection in stages).
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.problems import document_of, refused, response
from orchestrator.errors import Forbidden
from orchestrator.system.ports import is_loopback

BODY_BYTES_MAX = 64 << 10
LARGE_BODIES = dict.fromkeys((("POST", "/v1/jobs"), ("POST", "/v1/jobs/check")), 1 << 20)
"""Only specifications may be long, submitted or only checked."""
PLAN_BYTES_MAX = 256 << 10
"""The text of a chaos plan has at most 65,536 characters, of up to four bytes each."""
BODY_WITHIN_S = 20.0
REST_WITHIN_S = 0.2
"""How long an answer waits for the rest of a small body."""
LINGER_S = 1.0
LINGER_BYTES_MAX = 1 << 20
NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
DOCUMENT = f"{NOTHING}; style-src 'unsafe-inline'; img-src data:; sandbox"
"""For a page that is complete in itself: its style is inline, and it has no script."""
ALWAYS = {
    "Content-Security-Policy": NOTHING,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
STRICT_TRANSPORT = "max-age=31536000"


class SecurityHeaders:
    """Middleware: add the headers to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in ALWAYS.items():
                    headers.setdefault(name, value)
                if "principal" in scope.get("state", {}):
                    headers.setdefault("Cache-Control", "no-store")
                if scope["scheme"] == "https":
                    headers.setdefault("Strict-Transport-Security", STRICT_TRANSPORT)
            await send(message)

        await self._app(scope, receive, send_with_headers)


class Guard:
    """Middleware: answer 403 to requests that no well-behaved program sends."""

    def __init__(self, app: ASGIApp, loopback: bool) -> None:
        self._app = app
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (detail := self._refusal(scope["path"], dict(scope["headers"]))):
            where = "from a program on the same machine" if self._loopback else "from a program"
            error = Forbidden(detail=detail, remedy=f"Use the service's own address, {where}.")
            await response(document_of(error, scope["path"]))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> str | None:
        """Return the reason to refuse a request with this path and these headers, or None."""
        host = headers.get(b"host", b"").decode("latin-1")
        if self._loopback and not is_loopback(name_in(host)):
            return f"The request names the host {host!r}, which is not a loopback name."
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and origin.partition("://")[2] != host:
            return f"The request comes from a web page of another origin, {origin!r}."
        if "\0" in path:
            return f"The path {path!r} contains a NUL character."
        return None


def name_in(host: str) -> str:
    """Return the name or address in a ``Host`` header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # an unbalanced bracket, as in an incomplete IPv6 address
        return ""


class Bodies:
    """Middleware: hold request bodies to their limits, in size and in time."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        length = headers.get("content-length", "0")
        if length == "0" and "transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        body = Body(receive, limit_of(scope["method"], scope["path"]), may_wait="expect" not in headers)
        answer = Answer(body, send)
        if int(length) > body.bytes_max:  # h11 has refused a length that is not a number
            document = refused(413, body.too_large(), scope["path"])
            await response(document)(scope, body.receive, answer.send)
            return
        await self._app(scope, body.read, answer.send)


def limit_of(method: str, path: str) -> int:
    """Return how many bytes a body for this route may have."""
    if path.startswith("/v1/jobs/") and path.endswith("/chaos/runs"):
        return PLAN_BYTES_MAX
    return LARGE_BODIES.get((method, path), BODY_BYTES_MAX)


class Body:
    """The part of a request's body that has arrived. ``may_wait``: the client sends it without waiting for a 100."""

    def __init__(self, receive: Receive, bytes_max: int, may_wait: bool) -> None:
        self.receive = receive
        self.bytes_max = bytes_max
        self.may_wait = may_wait
        self.whole = False
        self.answering = False
        self._bytes_count = 0
        self._due_at = time.monotonic() + BODY_WITHIN_S

    async def read(self) -> Message:
        """Return the next message of the request. Raises HTTPException when the body is too large or too slow."""
        if self.whole:
            return await self.receive()
        try:
            message = await asyncio.wait_for(self.receive(), max(0.0, self._due_at - time.monotonic()))
        except TimeoutError as error:
            if self.answering:  # the answer no longer needs the body; this call waits for the client to disconnect
                return {"type": "http.disconnect"}
            raise HTTPException(408, f"The request body did not arrive within {BODY_WITHIN_S:g} s.") from error
        self._note(message)
        if self._bytes_count > self.bytes_max and not self.answering:
            raise HTTPException(413, self.too_large())
        return message

    async def discard(self, within_s: float, bytes_max: int) -> None:
        """Read and drop data until the body is complete, ``bytes_max`` have arrived, or the time is up."""
        until, limit = time.monotonic() + within_s, self._bytes_count + bytes_max
        while not self.whole and self._bytes_count < limit:
            try:
                self._note(await asyncio.wait_for(self.receive(), max(0.0, until - time.monotonic())))
            except TimeoutError:
                return

    def too_large(self) -> str:
        return f"The request body exceeds the limit of {self.bytes_max} bytes for this path."

    def _note(self, message: Message) -> None:
        self._bytes_count += len(message.get("body", b""))
        self.whole = message["type"] == "http.disconnect" or not message.get("more_body", False)


class Answer:
    """The answer to a request whose body may be incomplete."""

    def __init__(self, body: Body, send: Send) -> None:
        self._body = body
        self._send = send
        self._closes = False

    async def send(self, message: Message) -> None:
        body = self._body
        if message["type"] == "http.response.start":
            body.answering = True
            if body.may_wait:
                await body.discard(REST_WITHIN_S, BODY_BYTES_MAX)
            if not body.whole:
                self._closes = True
                MutableHeaders(scope=message)["Connection"] = "close"
        elif self._closes and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await body.discard(LINGER_S, LINGER_BYTES_MAX)
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)
