"""Long answers: streams and files that end when their token does, and a limited number of followers for each token.

Every answer that is sent piece by piece is a ``Stream`` or a ``File``. It checks every ``RECHECK_S`` whether its token is
still valid, even while its client reads nothing, and ends soon after the token. An answer without a Content-Length then
ends normally; one with a length is cut off, so that the client notices. A request that follows a job takes a seat, and each
token has a limited number of seats. An answer that ends by itself takes none.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

from fastapi import Query, Request
from fastapi.responses import FileResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from api.auth.permissions import Principal, bearer
from api.auth.tokens import Tokens
from api.http.pools import AUTHENTICATION
from orchestrator.errors import InfrastructureError

SEATS_MAX = 64
"""Each reads one file a few times a second. More than these are a mistake of some client."""
SEATS_EACH = 24
RECHECK_S = 2.0
"""The time that a stream may outlive its token."""
LAST_WORD_S = 1.0

logger = logging.getLogger(__name__)


class Stream(StreamingResponse):
    """An answer sent in pieces as they are produced. It ends when the request's token does."""

    def __init__(
        self,
        request: Request,
        chunks: AsyncIterable[bytes | str],
        media_type: str,
        headers: Mapping[str, str] | None = None,
        status_code: int = 200,
    ) -> None:
        super().__init__(chunks, status_code, headers, media_type)
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            token_ended = await while_its_token_is_valid(
                self._request, self.stream_response(send), self.listen_for_disconnect(receive)
            )
        finally:
            if aclose := getattr(self.body_iterator, "aclose", None):
                await aclose()
        if token_ended and "content-length" not in self.headers:
            with suppress(TimeoutError):
                await asyncio.wait_for(send({"type": "http.response.body", "body": b""}), LAST_WORD_S)


class File(FileResponse):
    """An open file, or the requested range of it. The answer is cut off when the request's token ends.

    The file is read through its descriptor, because its name may lead to another file by then, and is closed afterwards.
    """

    def __init__(
        self, request: Request, file: BinaryIO, media_type: str, status_code: int = 200, **options: Any
    ) -> None:
        super().__init__(f"/dev/fd/{file.fileno()}", status_code, media_type=media_type, **options)
        self._request, self._file = request, file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await while_its_token_is_valid(self._request, super().__call__(scope, receive, send))


async def while_its_token_is_valid(
    request: Request, answering: Coroutine[Any, Any, None], *ends: Coroutine[Any, Any, None]
) -> bool:
    """Run ``answering`` until it is done, one of ``ends`` is, or the token ends. Return True if the token ended."""
    sending = asyncio.ensure_future(answering)
    token_ended = asyncio.ensure_future(_token_ended(request))
    tasks = [sending, token_ended, *map(asyncio.ensure_future, ends)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not sending.cancelled():
        sending.result()
        return False
    if is_over := not token_ended.cancelled():
        principal: Principal = request.state.principal
        logger.info("%s %r ends: the token %r is no longer valid", request.method, request.url.path, principal.name)
    return is_over


async def _token_ended(request: Request) -> None:
    """Return when the token is no longer valid."""
    tokens: Tokens = request.app.state.tokens
    token = bearer(request.headers.get("Authorization", ""))
    while True:
        await asyncio.sleep(RECHECK_S)
        with suppress(InfrastructureError):  # the store does not answer at the moment; ask again
            if await AUTHENTICATION.run(tokens.principal_of, token) is None:
                return


class Seats:
    """Counts the requests that follow a job, by token."""

    def __init__(self, seats_max: int = SEATS_MAX, each_max: int = SEATS_EACH) -> None:
        self._seats_max, self._each_max = seats_max, each_max
        self._taken: Counter[str] = Counter()

    def take(self, token_name: str) -> None:
        """Take a seat for this token. Raises InfrastructureError if the token has its share, or if all are taken."""
        if self._taken[token_name] >= self._each_max:
            detail = (
                f"The token {token_name!r} follows {self._each_max} event streams and logs, the limit of one token."
            )
            raise InfrastructureError(detail=detail, remedy="Close one, and try again; or ask with follow=false.")
        if self._taken.total() >= self._seats_max:
            detail = f"{self._seats_max} event streams and logs are being followed, the limit of this service."
            raise InfrastructureError(detail=detail, remedy="Try again later, or ask with follow=false.")
        self._taken[token_name] += 1

    def leave(self, token_name: str) -> None:
        self._taken[token_name] -= 1
        if not self._taken[token_name]:
            del self._taken[token_name]


def following(default: bool, description: str) -> Callable[..., AsyncIterator[bool]]:
    """Return a dependency: whether the request follows; if it does, it holds a seat until its answer has ended."""

    async def seat(request: Request, follow: bool = Query(default, description=description)) -> AsyncIterator[bool]:
        if not follow:
            yield False
            return
        seats: Seats = request.app.state.seats
        principal: Principal = request.state.principal
        seats.take(principal.name)
        try:
            yield True
        finally:
            seats.leave(principal.name)

    return seat
