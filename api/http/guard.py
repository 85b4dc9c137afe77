"""Protect browsers: refuse requests that foreign web pages make, and add security headers to every answer.

``Guard`` runs before authentication and refuses three kinds of requests with 403. On loopback, a request whose ``Host`` is
not a loopback name was redirected by DNS rebinding; beyond loopback the service cannot know its names. A request with a
foreign ``Origin`` comes from a web page (cross-site request forgery). A path with the character NUL is never valid, and
databases fail on it. No token is needed to send any of these, and a browser on this machine reaches loopback.

``SecurityHeaders`` sets defaults for every answer, including errors: no content sniffing, no framing, nothing loaded unless
the route's own ``Content-Security-Policy`` allows it, no caching of what needed a token, and HSTS over TLS. A header that
the route sets wins. Browsers ignore HSTS for addresses without a name; with a name it covers all ports, so a Prometheus on
the same name needs TLS as well.

Source: OWASP, Cross-Site Request Forgery Prevention (origin checks), HTTP Headers and REST Security Cheat Sheets; RFC 6797.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.problems import document_of, response
from orchestrator.errors import Forbidden
from orchestrator.system.ports import is_loopback

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
