"""The origin guard, before a token is asked for: it refuses web pages of others in a browser of this machine.

Responsible for three refusals. On loopback, a request whose ``Host`` is not this machine's is one that a foreign name was
bent to (DNS rebinding); beyond loopback the service has names that it cannot know. A request with a foreign ``Origin`` was
written by a web page (cross-site request forgery). A path with the character NUL names nothing, and databases stumble
over it. None of the three needs a password to be a nuisance: loopback is not a border for a browser.

Source: OWASP, Cross-Site Request Forgery Prevention (origin checks).
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from api.http.problems import document_of, response
from orchestrator.errors import Forbidden
from orchestrator.ports import is_loopback


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
