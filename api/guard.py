"""Who may talk to a service without tokens: programs of this machine, and no web page in its browsers.

Responsible for two refusals. A request whose ``Host`` is not this machine's is one that a foreign name was bent to
(DNS rebinding). A request with a foreign ``Origin`` was written by a web page (cross-site request forgery). Neither
needs a password to be dangerous: loopback is not a border for a browser.

Source: OWASP, Cross-Site Request Forgery Prevention (origin checks).
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from api.problems import PREFIX, response
from api.schemas import ProblemDocument


def is_loopback(host: str) -> bool:
    """Whether this name or address can only mean this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class LoopbackOnly:
    """Middleware: answer 403 to what did not come from a program of this machine."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (detail := refusal(dict(scope["headers"]))):
            document = ProblemDocument(
                type=PREFIX + "forbidden",
                title="The request was refused",
                status=403,
                detail=detail,
                instance=scope["path"],
                remedy="Use the service's own address, from a program on the same machine.",
            )
            await response(document)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def refusal(headers: dict[bytes, bytes]) -> str | None:
    """Why a request with these headers is refused, or None."""
    host = headers.get(b"host", b"").decode("latin-1")
    if not is_loopback(urlsplit(f"//{host}").hostname or ""):
        return f"The request names the host {host!r}, which is not a loopback name."
    origin = headers.get(b"origin", b"").decode("latin-1")
    if origin and urlsplit(origin).netloc != host:
        return f"The request comes from a web page of {origin!r}."
    return None
