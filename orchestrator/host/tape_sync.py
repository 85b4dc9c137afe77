"""How far the tape survives what the job's durability is against: the power (``sync``), or only the process (``async``)."""

from __future__ import annotations

import logging
import threading

from orchestrator.config import JobSpec
from orchestrator.errors import InfrastructureError, first_line
from orchestrator.host.retry import TAPE_REFUSES, Retrier
from orchestrator.tape.storage import TapeWriter

log = logging.getLogger(__name__)

SYNC_EVERY_S = 0.5


def of(spec: JobSpec, tape: TapeWriter) -> tuple[Retrier, PeriodicSync | NoSync]:
    """What keeps the tape of this job, and retries what its disk refuses."""
    retrier = Retrier()
    return retrier, PeriodicSync(tape, retrier) if spec.synchroniser.durability.kind == "sync" else NoSync(tape)


class PeriodicSync:
    """Makes the tape durable twice a second, so that islands need not keep for long what they told."""

    def __init__(self, tape: TapeWriter, retrier: Retrier) -> None:
        self._tape, self._retrier = tape, retrier
        self._closed, self._trouble = threading.Event(), ""
        threading.Thread(target=self._run, name="sync", daemon=True).start()

    def kept_count(self) -> int:
        """The number of the last record that survives whatever the job's durability is against."""
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
                except Exception as error:  # islands would keep all they told for ever
                    reason = f"{type(error).__name__}: {first_line(error)}"
                    if reason != self._trouble:
                        log.error("the tape cannot be made durable: %s", reason, exc_info=error)
                    self._trouble = reason


class NoSync:
    """For durability async: a record is kept once the operating system has it."""

    def __init__(self, tape: TapeWriter) -> None:
        self._tape = tape

    def kept_count(self) -> int:
        return self._tape.count

    def close(self) -> None:
        """There is nothing to end."""
