"""The thread pools that requests run in, one for each kind of thing that can block them, and the routes that use them.

    AUTHENTICATION holders of known tokens, and the audit trail: the database
    STRANGERS      tokens that this process has never seen: the database
    OPEN_PAGES     pages for all, each made once: memory
    ACCESS         tokens and the audit trail, for admins: the database
    JOBS           a job's status, and commands to it: its synchroniser
    LISTS          all jobs, and the service's figures: all synchronisers
    FLEET          node groups: the cluster's head
    SUBMITS        new jobs: the head, and checkpoints to resume from, which may be in a remote store
    RECORDS        tapes, merges, logs, reports: the disk of runs
    STREAMS        the same, for answers that last
    DOWNLOADS      checkpoints and parameters: folders that may be in a remote store
    PARSING        bodies that take long to parse

A dead head, a silent job or a slow disk blocks the threads of its own pool only, and within a pool one job (or one address)
takes a part of the threads only. A request that finds no free thread waits a moment, without holding one, and is then
refused with 503. A call that exceeds the pool's deadline is answered with 503 as well, and keeps its thread until it
returns. FastAPI would run all calls in one pool of 40 threads.

``runs_in`` makes the class of a router's routes: their functions run in the router's pool, or in the one that ``in_pool``
names, and their bodies are parsed strictly (``orchestrator.specification.documents``). FastAPI itself would take the last
of two equal keys, and NaN for a number, and parse bodies in the event loop. ``tests/attack/test_silent_cluster.py`` fails
for a route without a pool.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from orchestrator.errors import ConfigurationError, InfrastructureError
from orchestrator.specification.documents import REQUEST, read_json
from orchestrator.system.threads import BoundedThreads

Answer = TypeVar("Answer")
PATIENCE_S = 2.0
"""How long a request waits for a thread."""
DEADLINE_S = 30.0
WAITING_MAX = 128
BODY = "the body"


class Pool:
    """``each_max`` bounds how many of the threads one key takes: a job's id, or an address."""

    def __init__(
        self,
        name: str,
        threads_max: int,
        *,
        each_max: int | None = None,
        deadline_s: float | None = DEADLINE_S,
        patience_s: float | None = PATIENCE_S,
        waiting_max: int = WAITING_MAX,
    ) -> None:
        self.name = name
        self._threads = BoundedThreads(name, threads_max)
        self._threads_max, self._each_max = threads_max, each_max or threads_max
        self._deadline_s, self._patience_s, self._waiting_max = deadline_s, patience_s, waiting_max
        self._taken: Counter[str] = Counter()
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()

    async def run(self, call: Callable[..., Answer], *arguments: Any, key: str = "") -> Answer:
        """Run the call in a thread and return its result. Raises InfrastructureError for want of a thread or an answer."""
        await self._enter(key)
        loop = asyncio.get_running_loop()
        try:
            future = self._threads.begin(partial(call, *arguments))
        except BaseException:
            self._leave(key)
            raise

        def leave(_: Future[Answer]) -> None:
            with suppress(RuntimeError):  # the loop is closed: the service has ended meanwhile
                loop.call_soon_threadsafe(self._leave, key)

        future.add_done_callback(leave)
        answer = asyncio.wrap_future(future)
        answer.add_done_callback(_forget)
        await asyncio.wait({answer}, timeout=self._deadline_s)
        if not answer.done():
            detail = f"The request exceeded the limit of {self._deadline_s:g} s for {self.name}."
            raise InfrastructureError(detail=detail, remedy="Try again in a moment.")
        return answer.result()

    async def _enter(self, key: str) -> None:
        """Take a thread for this key, waiting if none is free. Raises InfrastructureError if none becomes free."""
        if self._has_room(key):
            self._taken[key] += 1
            return
        if len(self._waiting) >= self._waiting_max:
            raise self._is_full()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, turn))
        try:
            await asyncio.wait({turn}, timeout=self._patience_s)
        except asyncio.CancelledError:
            if turn.done():
                self._leave(key)
            raise
        finally:
            with suppress(ValueError):
                self._waiting.remove((key, turn))
        if not turn.done():
            raise self._is_full()

    def _leave(self, key: str) -> None:
        """Free a thread, and give it to the request that has waited longest and whose key has room."""
        self._taken[key] -= 1
        if not self._taken[key]:
            del self._taken[key]
        for waiting_key, turn in self._waiting:
            if not turn.done() and self._has_room(waiting_key):
                self._taken[waiting_key] += 1
                turn.set_result(None)
                return

    def _has_room(self, key: str) -> bool:
        return self._taken[key] < self._each_max and self._taken.total() < self._threads_max

    def _is_full(self) -> InfrastructureError:
        detail = f"All threads that this request may use ({self._threads_max} for {self.name} in all) are busy."
        return InfrastructureError(detail=detail, remedy="Try again in a moment; what they wait for does not answer.")


AUTHENTICATION = Pool("tokens", 8, each_max=6, deadline_s=15.0)
STRANGERS = Pool("unknown tokens", 2, deadline_s=15.0)
OPEN_PAGES = Pool("open pages", 1)
ACCESS = Pool("access", 4)
JOBS = Pool("jobs", 24, each_max=8)
LISTS = Pool("lists of jobs", 4)
FLEET = Pool("the fleet", 4)
SUBMITS = Pool("submissions", 8, deadline_s=120.0, patience_s=10.0)
RECORDS = Pool("records", 8)
STREAMS = Pool("streams", 8, patience_s=None, waiting_max=1 << 16)
DOWNLOADS = Pool("downloads", 8, each_max=4, deadline_s=150.0)
PARSING = Pool("parsing", 2, deadline_s=60.0, patience_s=10.0)


def in_pool(pool: Pool) -> Callable[[Callable[..., Any]], Callable[..., Awaitable[Any]]]:
    """Return a decorator that runs the function in this pool, whatever its router says. Its parameter ``job`` is the key."""

    def decorated(function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        @wraps(function)
        async def pooled(**named: Any) -> Any:
            return await pool.run(partial(function, **named), key=str(named.get("job", "")))

        pooled.pool = pool  # type: ignore[attr-defined]
        return pooled

    return decorated


async def chunks_in(pool: Pool, chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the chunks, each produced in a thread of the pool. The iterator is closed in any case."""
    try:
        while (chunk := await pool.run(next, chunks, None)) is not None:
            yield chunk
    finally:
        close: Callable[[], None] = getattr(chunks, "close", lambda: None)
        with suppress(InfrastructureError, ValueError):  # ValueError: its thread still runs, and closes it at the end
            close()


def _forget(answer: asyncio.Future[Any]) -> None:
    """Retrieve the exception of an answer that came too late, so that asyncio does not log it."""
    if not answer.cancelled():
        answer.exception()


class StrictBody(APIRoute):
    """A route whose body is parsed by ``orchestrator.specification.documents``, or refused with the reason."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            try:
                return await handle(_Strict(request.scope, request.receive))
            except HTTPException as error:  # FastAPI wraps any failure to parse in this
                if isinstance(error.__cause__, ConfigurationError):
                    raise error.__cause__ from None
                raise

        return strictly


class _Strict(Request):
    async def json(self) -> Any:
        return await PARSING.run(read_json, await self.body(), REQUEST, BODY)


def runs_in(pool: Pool) -> type[APIRoute]:
    """Return a class of routes whose functions run in this pool. Coroutines run in the event loop and must not block."""

    class PooledRoute(StrictBody):
        def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
            chosen = hasattr(endpoint, "pool") or iscoroutinefunction(endpoint)
            super().__init__(path, endpoint if chosen else in_pool(pool)(endpoint), **options)

    return PooledRoute
