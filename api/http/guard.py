"""The origin guard, before a token is asked for: it refuses web pages of others in a browser of this machine.

Responsible for three refusals. On loopback, a request whose ``Host`` is not this machine's is one that a foreign name was
bent to (DNS rebinding); beyond loopback the service has names that it cannot know. A request with a foreign ``Origin`` was
written by a web page (cross-site request forgery). A path with the character NUL names nothing, and databases stumble
over it. None of the three needs a password to be a nuisance: loopback is not a border for a browser.

Source: OWASP, Cross-Site Request Forgery Prevention (origin checks).

The security headers of every answer: it is the type that it says, and is framed, scripted and cached by nobody.

Responsible for defaults that hold for answers nobody thought of: no content is sniffed, nothing is loaded by or around an
answer unless its route says what (``Content-Security-Policy``), what a token was shown for is stored nowhere, and over TLS
a browser never again comes without it. A route's own header goes before the default. Browsers ignore the last one for
addresses without a name; it speaks for the whole name, so that a Prometheus on the same name needs TLS, too.

Source: OWASP, HTTP Headers Cheat Sheet and REST Security Cheat Sheet; RFC 6797 (HSTS).
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
"""For a page that is complete in itself, with its style in it, and without a script."""
ALWAYS = {
    "Content-Security-Policy": NOTHING,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
STRICT_TRANSPORT = "max-age=31536000"


class SecurityHeaders:
    """Middleware: every answer has them."""

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
    """Middleware: answer 403 to what cannot come from a program that means well."""

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
        """The reason to refuse a request with this path and these headers, or None."""
        host = headers.get(b"host", b"").decode("latin-1")
        if self._loopback and not is_loopback(name_in(host)):
            return f"The request names the host {host!r}, which is not a loopback name."
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and origin.partition("://")[2] != host:
            return f"The request comes from a web page of {origin!r}."
        if "\0" in path:
            return f"The path {path!r} has a character that no name has."
        return None


def name_in(host: str) -> str:
    """The name or address of a ``Host`` header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # half an IPv6 address
        return ""
