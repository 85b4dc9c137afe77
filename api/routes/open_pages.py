"""Answers that are open to all and the same for all: the reference of the API, and its OpenAPI document.

Responsible for strangers taking no thread of anybody. Each answer is made once, in a pool of its own, and is bytes from then
on. Whoever asks meanwhile waits for the same making.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from fastapi import APIRouter, FastAPI, Request, Response

from api.http.pools import OPEN_PAGES
from api.openapi.reference import reference
from api.routes.page import ASK_AGAIN, HEADERS, MEDIA_TYPES, web

router = APIRouter()


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


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """The reference of the API, which loads nothing but the page's own styles."""
    app: FastAPI = request.app
    return await _answer(request, MEDIA_TYPES[".html"], lambda: reference(app.openapi(), f"web/{web()[1]}/").encode())


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """The API for programs."""
    app: FastAPI = request.app
    return await _answer(
        request,
        "application/json",
        lambda: json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")).encode(),
    )
