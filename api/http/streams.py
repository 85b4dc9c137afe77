"""Answers that last: streams that end with their token, a share of seats for each token, and files.

Responsible for every answer that is sent piece by piece being a ``Stream``: it asks again whether its token is still valid,
also while its client reads nothing, and ends within seconds when it is not. What has no promised length then ends; what has
one is cut, so that nobody takes it for whole. Whoever follows a job takes a seat, of which a token has a share only; what
ends by itself takes none.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, BinaryIO

from fastapi import Query, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.auth.roles import Holder, bearer
from api.auth.tokens import Tokens
from api.http.pools import GATE, RECORDS, chunks_in
from orchestrator.errors import InfrastructureError

SEATS_MAX = 64
"""Each looks at one file a few times a second. More than these are somebody's mistake."""
SEATS_EACH = 24
RECHECK_S = 2.0
"""How long a stream may outlive its token."""
LAST_WORD_S = 1.0
CHUNK_BYTES = 256 << 10

logger = logging.getLogger(__name__)


class Stream(StreamingResponse):
    """A streaming answer that ends with the token of its request."""

    def __init__(
        self,
        request: Request,
        chunks: AsyncIterable[bytes | str],
        media_type: str,
        headers: Mapping[str, str] | None = None,
        status_code: int = 200,
    ) -> None:
        super().__init__(chunks, status_code, headers, media_type)
        self._tokens: Tokens = request.app.state.tokens
        self._token = bearer(request.headers.get("Authorization", ""))
        self._holder: Holder = request.state.holder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        token_ended = asyncio.ensure_future(self._token_ended())
        client_left = asyncio.ensure_future(self.listen_for_disconnect(receive))
        tasks = (sending, token_ended, client_left)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if aclose := getattr(self.body_iterator, "aclose", None):
                await aclose()
        if not sending.cancelled():
            sending.result()
        elif not token_ended.cancelled():
            logger.info(
                "%s %r ends: the token %r is no longer valid", scope["method"], scope["path"], self._holder.name
            )
            if "content-length" not in self.headers:
                with suppress(TimeoutError):
                    await asyncio.wait_for(send({"type": "http.response.body", "body": b""}), LAST_WORD_S)

    async def _token_ended(self) -> None:
        """Returns when the token is no longer valid."""
        while True:
            await asyncio.sleep(RECHECK_S)
            with suppress(InfrastructureError):  # nobody can say just now; it is asked again
                if await GATE.run(self._tokens.holder_of, self._token) is None:
                    return


def file_stream(
    request: Request,
    file: BinaryIO,
    media_type: str,
    *,
    download_as: str = "",
    headers: Mapping[str, str] | None = None,
) -> Stream:
    """An open file to its present end, closed after. By its descriptor: its name may lead to another file by then."""
    size = os.fstat(file.fileno()).st_size
    about = {"Content-Length": str(size), **(headers or {})}
    if download_as:
        about["Content-Disposition"] = f'attachment; filename="{download_as}"'
    return Stream(request, chunks_in(RECORDS, _pieces(file, size)), media_type, about)


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    with file:
        while size > 0 and (piece := file.read(min(size, CHUNK_BYTES))):
            size -= len(piece)
            yield piece


class Seats:
    """Who follows a job, by token."""

    def __init__(self, seats_max: int = SEATS_MAX, each_max: int = SEATS_EACH) -> None:
        self._seats_max, self._each_max = seats_max, each_max
        self._taken: Counter[str] = Counter()

    def take(self, holder: str) -> None:
        """One more for this token. Raises InfrastructureError if it has its share, or if all are taken."""
        if self._taken[holder] >= self._each_max:
            detail = f"The token {holder!r} follows {self._each_max} event streams and logs, as many as one token may."
            raise InfrastructureError(detail=detail, remedy="Close one, and try again; or ask with follow=false.")
        if self._taken.total() >= self._seats_max:
            detail = f"{self._seats_max} event streams and logs are followed, as many as this service keeps."
            raise InfrastructureError(detail=detail, remedy="Try again later, or ask with follow=false.")
        self._taken[holder] += 1

    def leave(self, holder: str) -> None:
        self._taken[holder] -= 1
        if not self._taken[holder]:
            del self._taken[holder]


def following(default: bool, description: str) -> Callable[..., AsyncIterator[bool]]:
    """A dependency: whether the request is to follow, with a seat until its answer is through, if it is."""

    async def seat(
        request: Request, follow: Annotated[bool, Query(description=description)] = default
    ) -> AsyncIterator[bool]:
        if not follow:
            yield False
            return
        seats: Seats = request.app.state.seats
        holder: Holder = request.state.holder
        seats.take(holder.name)
        try:
            yield True
        finally:
            seats.leave(holder.name)

    return seat
