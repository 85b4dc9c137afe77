"""The service's own page, for whoever has no Grafana at hand: one document at ``/`` and its files, from ``api/web``.

Responsible for how they are served. The files are read once, and stand under a path that names their content: a browser
may keep them for ever, because other content has another path. The document names that path, so it is asked for anew each
time, which costs a 304. Nothing else is served from disk: a name is looked up among the files that were read.

The page holds no data and needs no token; what it shows it asks of ``/v1`` with the token of whoever looks.

Source: MDN, HTTP caching ("cache busting"); W3C, Content Security Policy Level 3.

Answers that are open to all and the same for all: the reference of the API, and its OpenAPI document.

Responsible for strangers taking no thread of anybody. Each answer is made once, in a pool of its own, and is bytes from then
on. Whoever asks meanwhile waits for the same making.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException

from api.auth.roles import Principal, Role
from api.http.pools import ACCESS, OPEN_PAGES, runs_in
from api.openapi.reference import reference
from api.schemas import Answer

router = APIRouter(route_class=runs_in(ACCESS))

FOLDER = Path(__file__).resolve().parent.parent / "web"
DOCUMENT = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
ASK_AGAIN = "no-cache"
KEEP = "public, max-age=31536000, immutable"


class Whoami(Answer):
    """Whoever asks."""

    name: str
    role: Role


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def document(request: Request) -> Response:
    """The page. A browser that has it already is told so."""
    files, digest = web()
    tag = f'"{digest}"'
    headers = HEADERS | {"ETag": tag, "Cache-Control": ASK_AGAIN}
    cached_tags = [
        tag_text.strip().removeprefix("W/") for tag_text in request.headers.get("if-none-match", "").split(",")
    ]
    if tag in cached_tags or "*" in cached_tags:
        return Response(status_code=304, headers=headers)
    body = files[DOCUMENT].replace(b'"web/', f'"web/{digest}/'.encode())
    return Response(body, media_type=MEDIA_TYPES[".html"], headers=headers)


@router.api_route("/web/{digest}/{name}", methods=["GET", "HEAD"], include_in_schema=False)
async def static_file(digest: str, name: str) -> Response:
    """A style, a module or the icon of the page as it is now."""
    files, current = web()
    if digest != current or name not in files or name == DOCUMENT:
        raise HTTPException(404, f"The page has no file {name!r} of this version; load it again.")
    return Response(files[name], media_type=MEDIA_TYPES[Path(name).suffix], headers=HEADERS | {"Cache-Control": KEEP})


@router.get("/v1/whoami", tags=["access"])
async def whoami(request: Request) -> Whoami:
    """Whose token this is, and what it allows. The page shows no button that would be refused."""
    principal: Principal = request.state.principal
    return Whoami(name=principal.name, role=principal.role)


@cache
def web() -> tuple[dict[str, bytes], str]:
    """All files of the page by name, and the digest of their names and content."""
    files = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in MEDIA_TYPES}
    digest = blake2b(digest_size=8)
    for name, content in files.items():
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return files, digest.hexdigest()


open_pages_router = APIRouter()


class OpenPages:
    """The bytes of each page, by path."""

    def __init__(self) -> None:
        self._pages: dict[str, bytes] = {}
        self._making = asyncio.Lock()

    async def page(self, path: str, make: Callable[[], bytes]) -> bytes:
        if (page := self._pages.get(path)) is not None:
            return page
        async with self._making:
            if path not in self._pages:
                self._pages[path] = await OPEN_PAGES.run(make)
            return self._pages[path]


async def _answer(request: Request, media_type: str, make: Callable[[], bytes]) -> Response:
    pages: OpenPages = request.app.state.open_pages
    body = await pages.page(request.url.path, make)
    return Response(body, media_type=media_type, headers=HEADERS | {"Cache-Control": ASK_AGAIN})


@open_pages_router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """The reference of the API, which loads nothing but the page's own styles."""
    app: FastAPI = request.app
    return await _answer(request, MEDIA_TYPES[".html"], lambda: reference(app.openapi(), f"web/{web()[1]}/").encode())


@open_pages_router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """The API for programs."""
    app: FastAPI = request.app
    return await _answer(
        request,
        "application/json",
        lambda: json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")).encode(),
    )
