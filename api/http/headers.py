"""The security headers of every answer: it is the type that it says, and is framed, scripted and cached by nobody.

Responsible for defaults that hold for answers nobody thought of: no content is sniffed, nothing is loaded by or around an
answer unless its route says what (``Content-Security-Policy``), what a token was shown for is stored nowhere, and over TLS
a browser never again comes without it. A route's own header goes before the default. Browsers ignore the last one for
addresses without a name; it speaks for the whole name, so that a Prometheus on the same name needs TLS, too.

Source: OWASP, HTTP Headers Cheat Sheet and REST Security Cheat Sheet; RFC 6797 (HSTS).
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
