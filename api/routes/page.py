"""The routes beside jobs: the web page with its files, the API's reference and OpenAPI document, health and metrics.

The web page is one document at ``/`` and its files from ``api/web``. The files are read once and served under a path that
contains the digest of their content, so a browser may cache them for ever. The document names that path and is revalidated
each time, which costs a 304. Nothing else is served from disk: names are looked up among the files that were read. The page
holds no data and needs no token; it requests data from ``/v1`` with the user's token.

``/docs`` and ``/openapi.json`` are rendered once, in a thread pool of their own, so that requests without a token block no
others; concurrent requests wait for the same rendering.

There are two health checks: the process is alive (``/healthz``), and it can do its work (``/readyz``). ``/metrics`` is for
Prometheus.

Source: MDN, HTTP caching ("cache busting"); W3C, Content Security Policy Level 3.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException

from api.auth.permissions import Principal, Role
from api.http.pools import ACCESS, FLEET, LISTS, OPEN_PAGES, runs_in
from api.jobs.status_cache import ANSWER_WITHIN_S, Readiness, group_count
from api.metrics.exposition import Metrics
from api.openapi.document import reference
from api.schemas import Answer, Health
from orchestrator.system import release

metrics_router = APIRouter(tags=["metrics"], route_class=runs_in(LISTS))
health_router = APIRouter(tags=["health"], route_class=runs_in(FLEET))
router = APIRouter(route_class=runs_in(ACCESS))
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
open_pages_router = APIRouter()


class Whoami(Answer):
    """The caller's token name and role."""

    name: str
    role: Role


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def document(request: Request) -> Response:
    """Return the page, or 304 if the browser has it already."""
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
    """Return a style sheet, a module or the icon of the current page."""
    files, current = web()
    if digest != current or name not in files or name == DOCUMENT:
        raise HTTPException(404, f"The current page has no file {name!r}. Reload the page.")
    return Response(files[name], media_type=MEDIA_TYPES[Path(name).suffix], headers=HEADERS | {"Cache-Control": KEEP})


@router.get("/v1/whoami", tags=["access"])
async def whoami(request: Request) -> Whoami:
    """Return the name and role of the token. The web page uses it to hide buttons that would be refused."""
    principal: Principal = request.state.principal
    return Whoami(name=principal.name, role=principal.role)


@cache
def web() -> tuple[dict[str, bytes], str]:
    """Return all files of the page by name, and the digest of their names and content."""
    files = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in MEDIA_TYPES}
    digest = blake2b(digest_size=8)
    for name, content in files.items():
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return files, digest.hexdigest()


class OpenPages:
    """The rendered pages, by path."""

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
    """Return the reference of the API. It loads only the page's style sheets."""
    app: FastAPI = request.app
    return await _answer(request, MEDIA_TYPES[".html"], lambda: reference(app.openapi(), f"web/{web()[1]}/").encode())


@open_pages_router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """Return the OpenAPI document."""
    app: FastAPI = request.app
    return await _answer(
        request,
        "application/json",
        lambda: json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")).encode(),
    )


@metrics_router.get("/metrics", response_class=PlainTextResponse)
def get_metrics(request: Request) -> PlainTextResponse:
    """Return all metrics in Prometheus's text format. Live jobs are queried; the answer comes within seconds."""
    metrics: Metrics = request.app.state.metrics
    return PlainTextResponse(metrics.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@health_router.get("/healthz")
async def healthz() -> Health:
    """Answer that the process is alive. Restart it if this fails."""
    return Health(status="ok", build=str(release.own()))


@health_router.get("/readyz")
async def readyz(request: Request) -> Health:
    """Check that the database and the cluster answer; if not, answer 503 with the reason within a second.

    Send no requests here while this fails.
    """
    readiness: Readiness = request.app.state.readiness
    question = readiness.question()
    answer = asyncio.wrap_future(question)
    answer.add_done_callback(
        lambda done: done.exception()
    )  # retrieve it, so that asyncio does not log it; ``group_count`` raises it
    await asyncio.wait({answer}, timeout=ANSWER_WITHIN_S)
    detail = f"{group_count(question)} node groups"
    return Health(status="ok", detail=detail, build=str(release.own()))


FOLDER = Path(__file__).resolve().parent.parent / "web"
