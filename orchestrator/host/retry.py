"""Writes that are retried until they are done: a disk that refuses must not end a job, and everybody can see why it waits.

While the journal cannot be written no merge is announced, while the tape cannot be written nothing is decided; islands train
on either way, keep their work, and offer it again. Both would be lies to go on without.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable

from orchestrator.core.events import SynchroniserRestarted
from orchestrator.errors import InfrastructureError, first_line
from orchestrator.tape.schema import Record
from orchestrator.tape.storage import TapeWriter

log = logging.getLogger(__name__)

RETRY_S = 1.0
TAPE_REFUSES = "the tape cannot be written"
JOURNAL_REFUSES = "the journal cannot be written"
RUN_FOLDER_REFUSES = "the run's folder cannot be written"
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Retrier:
    """``trouble`` says what is being waited for, if anything is."""

    def __init__(self, retry_s: float = RETRY_S) -> None:
        self._retry_s = retry_s
        self._closed = threading.Event()
        self._troubles: dict[str, str] = {}

    @property
    def trouble(self) -> str | None:
        troubles = dict(self._troubles)
        return "; ".join(f"{operation}: {error}" for operation, error in sorted(troubles.items())) or None

    def until_done(self, operation: str, work: Callable[[], None]) -> None:
        """``work`` is done when this returns. Raises InfrastructureError once the retrier is closed."""
        while True:
            try:
                work()
            except OSError as error:
                if self._troubles.get(operation) != first_line(error):
                    log.error("%s, and is tried again: %s", operation, error)
                self._troubles[operation] = first_line(error)
            else:
                self._troubles.pop(operation, None)
                return
            if self._closed.wait(self._retry_s):
                raise InfrastructureError(detail=f"{operation}: {self._troubles[operation]}")

    def close(self) -> None:
        """End every retry under way."""
        self._closed.set()


def only_full(work: Callable[[], None]) -> None:
    """Do the work. OSError is raised only for a disk that is full, for which one waits; InfrastructureError for others."""
    try:
        work()
    except OSError as error:
        if error.errno in FULL:
            raise
        raise InfrastructureError(detail=str(error)) from error


class RetryingSink:
    """A tape whose disk may refuse for a while. An epoch is durable before it is announced: none is used twice.

    Before anything is announced ``settle`` makes durable what is in the journal.
    """

    def __init__(self, tape: TapeWriter, retrier: Retrier, settle: Callable[[], None]) -> None:
        self._tape, self._retrier, self._settle = tape, retrier, settle
        self._settled = False

    def append(self, record: Record) -> None:
        if not self._settled:
            self._retrier.until_done(JOURNAL_REFUSES, self._settle)
            self._settled = True
        self._retrier.until_done(TAPE_REFUSES, lambda: self._tape.append(record))
        if isinstance(record.event, SynchroniserRestarted):
            self._retrier.until_done(TAPE_REFUSES, self._tape.sync)
