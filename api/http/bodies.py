"""Limits on request bodies, in bytes and in time: one middleware for all routes, before any of them.

    413    more than the route's limit: at once where Content-Length says so, else when so much has come
    408    the body was not whole in time

No route can read more than the limit. After an answer that did not wait for the body, the rest of a small body is read and
discarded, so that the connection stays usable. After a large one the answer says ``Connection: close``, and its last byte
is held back for a moment while more is discarded: closing a socket over unread data resets it, and the answer may be lost.

Bodies are parsed in a thread, whatever route they are for (``api.http.pools``).

Source: RFC 9110, 15.5.14 (413) and 10.1.1 (Expect); RFC 9112, 9.6 (closing a connection in stages).
"""

from __future__ import annotations

import asyncio
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.problems import refused, response

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
