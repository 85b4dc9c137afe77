"""Transactions with the database, each of which ends within seconds, however the database is.

    closed ──slow failure──▶ open ──after RETRY_S──▶ one is let through ──▶ closed, or open again
                               └── all others fail at once, with what the last one met

Responsible for the one seam between rows and what a database may do to them: it is gone, silent, locked, full or read-only.
All of these are StoreUnavailable, with what the database said and what it means for whoever asked. A database that makes
callers wait is asked by one of them at a time, so that a hundred callers do not hold a hundred threads for its sake. Reading
and writing are judged apart: an SQLite file that another process writes to can be read. Refuses to know any row.

Source: Nygard, Release It! (2nd edition, 2018), "Circuit Breaker" and "Timeouts".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from sqlalchemy import URL, Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, PendingRollbackError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, sessionmaker

from orchestrator.errors import StoreUnavailable, first_line

ANSWER_TIMEOUT_S = 4.0
"""So long a statement may take, a lock be waited for, and a free connection. All of ours take milliseconds."""
RETRY_S = 1.0
SLOW_S = 1.0
"""A failure that took longer cost its caller a wait, which the next one is spared."""
OURS = (IntegrityError, DataError, ProgrammingError)
"""The database answered, and what it was given is at fault."""
READING = "Nothing was changed. The service goes on by itself once the database is well: repeat the request."
WRITING = (
    "Whether it was stored is not known. The service goes on by itself once the database is well: look, or repeat the "
    "request, which with an Idempotency-Key does nothing twice."
)


class Sessions:
    """Sessions with one engine: ``sessions()`` to read, ``sessions.begin()`` to write. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._session = sessionmaker(engine, expire_on_commit=False)
        self._name = name_of(engine.url)
        self._reading, self._writing = _breakers.setdefault(engine, (Breaker(), Breaker()))

    @contextmanager
    def __call__(self) -> Iterator[Session]:
        """A session to read with. Raises StoreUnavailable if the database does not do its part."""
        with answering(self._reading, self._name, READING), self._session() as session:
            yield session

    @contextmanager
    def begin(self) -> Iterator[Session]:
        """One transaction, committed at the end of the block. Raises as reading does; then its outcome may be unknown."""
        with answering(self._writing, self._name, WRITING), self._session.begin() as session:
            yield session

    @property
    def write_failed(self) -> bool:
        """Whether the database did not do its part when something was to be stored last."""
        return self._writing.failed


class Breaker:
    """Whether the database may be asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failure = ""
        """The error that a caller met after a wait; empty while callers are let through."""
        self._failed_at = 0.0
        self._trying = False
        self.failed = False

    def enter(self, remedy: str) -> bool:
        """True for the one who finds out whether the database is well again. Raises StoreUnavailable for others."""
        with self._lock:
            if not self._failure:
                return False
            if self._trying or time.monotonic() - self._failed_at < RETRY_S:
                raise StoreUnavailable(detail=self._failure, remedy=remedy)
            self._trying = True
            return True

    def leave(self, trying: bool, failed: bool, failure: str | None) -> None:
        """``failure``: what the caller met after a wait; empty without a wait; None if it says nothing of the database."""
        with self._lock:
            if trying:
                self._trying = False
            if failure is not None:
                self.failed = failed
                self._failure, self._failed_at = failure, time.monotonic()


_breakers: WeakKeyDictionary[Engine, tuple[Breaker, Breaker]] = WeakKeyDictionary()
"""The breakers of each database, to read and to write: what one store has met, its others need not meet again."""


@contextmanager
def answering(breaker: Breaker, name: str, remedy: str) -> Iterator[None]:
    """Turn what the database cannot do into an InfrastructureError; errors of its input pass as they are."""
    trying, began, failed, failure = breaker.enter(remedy), time.monotonic(), False, None
    try:
        yield
        failure = ""
    except OURS:
        failure = ""
        raise
    except (DBAPIError, PoolTimeout, PendingRollbackError) as error:
        detail = f"The database {name} does not do its part: {message_of(error)}"
        failed, failure = True, detail if time.monotonic() - began > SLOW_S else ""
        raise StoreUnavailable(detail=detail, remedy=remedy) from error
    finally:
        breaker.leave(trying, failed, failure)


def name_of(url: URL) -> str:
    """The database's name for whoever is to mend it, without any credentials."""
    return f"{url.host}:{url.port or ''}/{url.database}" if url.host else str(url.database)


def message_of(error: Exception) -> str:
    """In one line, without the statement and its values."""
    if isinstance(error, PoolTimeout):
        return "all connections to it are busy."
    message = first_line(error.orig) if isinstance(error, DBAPIError) and error.orig else first_line(error)
    return message if message.endswith(".") else f"{message}."
