"""Connections to PostgreSQL whose every wait has a time limit.

The time limits are on the client's side. The server's own (``statement_timeout``) does not help while the server is stopped
or the network drops packets: TCP then shows an idle connection for hours. The server gets a slightly shorter limit as well,
because a statement that the server cancels leaves the connection usable.

Source: PostgreSQL 15, chapter 20.11 (statement behaviour); psycopg 3, "Connection.wait".
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg
from sqlalchemy import Engine, event

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
