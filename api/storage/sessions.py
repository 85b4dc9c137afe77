"""Transactions with the database that end within seconds, whatever state the database is in.

    closed ──slow failure──▶ open ──after RETRY_S──▶ one caller is let through ──▶ closed, or open again
                               └── all others fail at once, with the last caller's error

A database that is gone, silent, locked, full or read-only raises StoreUnavailable, with the database's own error and what it
means for the request. While a database makes callers wait, only one at a time is let through, so that a hundred callers do
not block a hundred threads. Reads and writes have separate breakers: an SQLite file that another process writes to can
still be read.

Source: Nygard, Release It! (2nd edition, 2018), "Circuit Breaker" and "Timeouts".

Connections to PostgreSQL whose every wait has a time limit.

The time limits are on the client's side. The server's own (``statement_timeout``) does not help while the server is stopped
or the network drops packets: TCP then shows an idle connection for hours. The server gets a slightly shorter limit as well,
because a statement that the server cancels leaves the connection usable.

Source: PostgreSQL 15, chapter 20.11 (statement behaviour); psycopg 3, "Connection.wait".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import psycopg
from sqlalchemy import URL, Engine, event
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, PendingRollbackError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.errors import LogStoreUnavailable, StoreUnavailable, first_line

Result = TypeVar("Result")


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that fails and closes when the server sends nothing for ``answer_timeout_s``."""

    answer_timeout_s = float("inf")

    def wait(self, gen: Generator[Any, Any, Result], *arguments: Any, **options: Any) -> Result:
        return super().wait(self._bounded(gen), *arguments, **options)

    def _bounded(self, waiting: Generator[Any, Any, Result]) -> Generator[Any, Any, Result]:
        """Drive ``waiting`` until the time is up. psycopg resumes it several times a second, even with nothing to read."""
        give_up_at = time.monotonic() + self.answer_timeout_s
        try:
            wanted = next(waiting)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > give_up_at:
                    self.pgconn.finish()  # the answer could come later, to another question
                    waiting.close()
                    raise psycopg.OperationalError(f"the server said nothing for {self.answer_timeout_s:g} s")
                wanted = waiting.send(ready)
        except StopIteration as end:
            result: Result = end.value
            return result


def bound(engine: Engine, answer_timeout_s: float) -> None:
    """Limit every wait of the connections that this engine opens from now on."""
    statement_timeout_ms = int(answer_timeout_s * 800)

    @event.listens_for(engine, "do_connect")
    def _connect(_dialect: Any, _record: Any, arguments: list[Any], options: dict[str, Any]) -> BoundedConnection:
        options = {"connect_timeout": max(2, int(answer_timeout_s)), **options}  # a URL may say otherwise
        connection = BoundedConnection.connect(*arguments, **options)
        connection.answer_timeout_s = answer_timeout_s
        connection.autocommit = True  # a setting made in a transaction would end with it
        connection.execute(f"SET statement_timeout = {statement_timeout_ms}".encode())
        connection.autocommit = False
        return connection


ANSWER_TIMEOUT_S = 4.0
"""How long to wait for a statement, a lock or a free connection. All of our statements take milliseconds."""
RETRY_S = 1.0
SLOW_S = 1.0
"""A failure that took longer opens the breaker, so that the next caller does not wait as well."""
OURS = (IntegrityError, DataError, ProgrammingError)
"""Errors for which the database works and its input is at fault."""
READING = "Nothing was changed. The service recovers by itself once the database does; then repeat the request."
WRITING = (
    "The change may or may not be stored. The service recovers by itself once the database does; then check, or repeat the "
    "request: with an Idempotency-Key that is safe."
)


class Sessions:
    """Sessions with one engine: ``sessions()`` to read, ``sessions.begin()`` to write. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._session = engine, sessionmaker(engine, expire_on_commit=False)
        self._name = name_of(engine.url)
        self._reading, self._writing = _breakers.setdefault(engine, (Breaker(), Breaker()))

    @contextmanager
    def __call__(self) -> Iterator[Session]:
        """Yield a session for reading. Raises StoreUnavailable if the database fails."""
        with answering(self._reading, self._name, READING), self._session() as session:
            yield session

    @contextmanager
    def begin(self) -> Iterator[Session]:
        """Yield a transaction, committed at the end of the block, and then copied (``copy_with``).

        After StoreUnavailable its outcome may be unknown.
        """
        with answering(self._writing, self._name, WRITING):
            with self._session.begin() as session:
                yield session
            if (copied := _copies.get(self._engine)) is not None:
                copied(ANSWER_TIMEOUT_S)

    @property
    def write_failed(self) -> bool:
        """Return whether the last attempt to write failed."""
        return self._writing.failed


class Breaker:
    """A circuit breaker: it decides whether a caller may use the database."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failure = ""
        """The error that a caller met after a wait; empty while callers are let through."""
        self._failed_at = 0.0
        self._trying = False
        self.failed = False

    def enter(self, remedy: str) -> bool:
        """Return True for the caller that tests the database after a failure. Raises StoreUnavailable for others."""
        with self._lock:
            if not self._failure:
                return False
            if self._trying or time.monotonic() - self._failed_at < RETRY_S:
                raise StoreUnavailable(detail=self._failure, remedy=remedy)
            self._trying = True
            return True

    def leave(self, trying: bool, failed: bool, failure: str | None) -> None:
        """Record a result. ``failure``: the error after a slow failure; empty otherwise; None if it proves nothing."""
        with self._lock:
            if trying:
                self._trying = False
            if failure is not None:
                self.failed = failed
                self._failure, self._failed_at = failure, time.monotonic()


_breakers: WeakKeyDictionary[Engine, tuple[Breaker, Breaker]] = WeakKeyDictionary()
"""The breakers of each database, for reading and for writing. All stores of a database share them."""


@contextmanager
def answering(breaker: Breaker, name: str, remedy: str) -> Iterator[None]:
    """Turn failures of the database into StoreUnavailable. Errors of its input pass unchanged."""
    trying, began, failed, failure = breaker.enter(remedy), time.monotonic(), False, None
    try:
        yield
        failure = ""
    except OURS:
        failure = ""
        raise
    except (DBAPIError, PoolTimeout, PendingRollbackError, LogStoreUnavailable) as error:
        what = "has no current copy in its store" if isinstance(error, LogStoreUnavailable) else "is unavailable"
        detail = f"The database {name} {what}: {message_of(error)}"
        failed, failure = True, detail if time.monotonic() - began > SLOW_S else ""
        raise StoreUnavailable(detail=detail, remedy=remedy) from error
    finally:
        breaker.leave(trying, failed, failure)


_copies: WeakKeyDictionary[Engine, Callable[[float], None]] = WeakKeyDictionary()


def copy_with(engine: Engine, copied: Callable[[float], None]) -> None:
    """Have all transactions of this database wait for ``copied``, which gets a timeout and may raise LogStoreUnavailable."""
    _copies[engine] = copied


def name_of(url: URL) -> str:
    """Return the database's name for messages, without credentials."""
    return f"{url.host}:{url.port or ''}/{url.database}" if url.host else str(url.database)


def message_of(error: Exception) -> str:
    """Return the error as one line, without the statement and its values."""
    if isinstance(error, PoolTimeout):
        return "all connections to it are busy."
    message = first_line(error.orig) if isinstance(error, DBAPIError) and error.orig else first_line(error)
    return message if message.endswith(".") else f"{message}."
