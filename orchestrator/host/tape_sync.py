"""The durability of a tape: what survives a loss of power (``sync``), or only the death of the process (``async``)."""

from __future__ import annotations

import logging
import threading

from orchestrator.config import JobSpec
from orchestrator.errors import InfrastructureError, in_words
from orchestrator.host.retry import TAPE_REFUSES, Retrier
from orchestrator.tape.storage import TapeWriter

log = logging.getLogger(__name__)

SYNC_EVERY_S = 0.5


def of(spec: JobSpec, tape: TapeWriter) -> tuple[Retrier, PeriodicSync | NoSync]:
    """The sync of this job's tape, and the retrier of what its disk refuses."""
    retrier = Retrier()
    return retrier, PeriodicSync(tape, retrier) if spec.synchroniser.durability.kind == "sync" else NoSync(tape)


class PeriodicSync:
    """Makes the tape durable twice a second, so that islands need not keep their reports for long."""

    def __init__(self, tape: TapeWriter, retrier: Retrier) -> None:
        self._tape, self._retrier = tape, retrier
        self._closed, self._trouble = threading.Event(), ""
        threading.Thread(target=self._run, name="sync", daemon=True).start()

    def durable_count(self) -> int:
        """The number of the last record that is durable, as the job's policy has it."""
        return self._tape.synced_count

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(SYNC_EVERY_S):
            if self._tape.synced_count < self._tape.count:
                try:
                    self._retrier.until_done(TAPE_REFUSES, self._tape.sync)
                except (InfrastructureError, ValueError):
                    pass  # nobody waits any more, or the tape was closed just now
                except Exception as error:  # islands would keep all their reports for ever
                    reason = in_words(error)
                    if reason != self._trouble:
                        log.error("the tape cannot be made durable: %s", reason, exc_info=error)
                    self._trouble = reason


class NoSync:
    """For durability async: a record is kept once the operating system has it."""

    def __init__(self, tape: TapeWriter) -> None:
        self._tape = tape

    def durable_count(self) -> int:
        return self._tape.count

    def close(self) -> None:
        """There is nothing to end."""
