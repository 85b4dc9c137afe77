"""The threads behind runs of plans: one a run, which polls its job twice a second until nothing is left to do.

Responsible for going on whatever happens. A job or a cluster that does not answer is asked again, and so is a store that
does not. Anything unforeseen throws the run in memory away and builds it again from the rows, as after a restart: there
is one way back, used often. A run that fails so again and again is over: what is wrong lies in its rows, or in the job's.
Refuses to know what a poll does (``api.chaos.active_run``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import SQLAlchemyError

from api.chaos.active_run import ActiveRun
from api.chaos.schemas import RunState
from api.chaos.store import ChaosRunRow, ChaosStore
from api.installation.service_restart import RestartService
from api.jobs.background_loop import ProblemLog, reason_of
from api.jobs.service import Service
from api.storage.store import Store
from orchestrator.errors import DataError, InfrastructureError, NotFound, first_line

POLL_EVERY_S = 0.5
FAILURES_MAX = 20
"""In a row; between two of them lies one poll."""

logger = logging.getLogger(__name__)


class RunThreads:
    """The threads that carry out the runs of one service."""

    def __init__(self, service: Service, store: Store, book: ChaosStore, restart_service: RestartService) -> None:
        self._service, self._book = service, book
        self._rebuild = lambda row: ActiveRun(row, service, store, book, restart_service)
        self._changing = threading.Lock()
        self._under_way: dict[str, RunThread] = {}
        self._closed = False

    def resume(self) -> None:
        """After a restart: go on with every run that is not settled."""
        for row in self._book.unsettled():
            self.start_run(row)

    def start_run(self, row: ChaosRunRow) -> None:
        """Start the run's thread. Nothing happens if it was started before."""
        with self._changing:
            if row.run not in self._under_way and not self._closed:
                thread = RunThread(row, self._service, self._book, self._rebuild, self._forget)
                self._under_way[row.run] = thread
                thread.start()

    def stop(self, run: str, reason: str) -> None:
        """Stop a run: no further fault of it is injected. Does nothing if it is over."""
        with self._changing:
            thread = self._under_way.get(run)
        if thread:
            thread.stop(reason)

    def close(self) -> None:
        """Let go of every run; the next service goes on with it."""
        with self._changing:
            self._closed, threads = True, list(self._under_way.values())
        for thread in threads:
            thread.leave()
        for thread in threads:
            thread.join()

    def _forget(self, run: str) -> None:
        with self._changing:
            self._under_way.pop(run, None)


class RunThread(threading.Thread):
    """One run, looked after until it is settled."""

    def __init__(
        self,
        row: ChaosRunRow,
        service: Service,
        book: ChaosStore,
        rebuild: Callable[[ChaosRunRow], ActiveRun],
        forget: Callable[[str], None],
    ) -> None:
        super().__init__(name=row.run, daemon=True)
        self._job, self._run_id = row.job, row.run
        self._service, self._book, self._rebuild, self._forget = service, book, rebuild, forget
        self._one_at_a_time = threading.Lock()
        self._leaving = threading.Event()
        self._active: ActiveRun | None = None
        self._problem_log = ProblemLog(logger)
        self._failures = 0
        self._over = False

    def run(self) -> None:
        try:
            while self._poll() and not self._leaving.wait(POLL_EVERY_S):
                pass
        finally:
            self._forget(self._run_id)

    def stop(self, reason: str) -> None:
        with self._one_at_a_time:
            try:
                self._rebuilt().stop(reason)
            except (NotFound, SQLAlchemyError):
                raise
            except Exception as error:  # its rows are damaged: then this is all that can be done
                self._complain(reason_of(error))
                self._over = self._end(RunState.STOPPED, reason)
        self._poll()

    def leave(self) -> None:
        self._leaving.set()

    def _poll(self) -> bool:
        """Poll the job once. Returns whether to poll again."""
        with self._one_at_a_time:
            if self._over:
                return False  # the thread that stopped it has looked for the last time
            try:
                self._over = not self._rebuilt().advance(self._service.job(self._job))
                self._problem_log.settle(self._run_id)
                self._failures = 0
                return not self._over
            except (InfrastructureError, SQLAlchemyError) as error:
                self._complain(first_line(error))
            except NotFound:
                return False  # job and run were removed
            except DataError as error:
                self._complain(str(error))
                return not self._end(RunState.FAILED, str(error))
            except Exception as error:
                self._complain(f"begun again from its rows: {reason_of(error)}", error)
                self._active = None
                self._failures += 1
                if self._failures >= FAILURES_MAX:
                    return not self._end(RunState.FAILED, f"it cannot be conducted: {reason_of(error)}")
            return True

    def _end(self, state: RunState, reason: str) -> bool:
        """The run is over, by its row. False if that could not be written, and is to be tried again."""
        try:
            self._book.update(self._run_id, state, reason=reason, ended_at=time.time())
        except SQLAlchemyError as error:
            self._complain(first_line(error))
            return False
        return True

    def _rebuilt(self) -> ActiveRun:
        """The run in memory, from its rows where it is not there."""
        if self._active is None:
            row = self._book.run(self._job, self._run_id)
            if row is None:
                raise NotFound(detail=f"There is no run {self._run_id}.")
            self._active = self._rebuild(row)
        return self._active

    def _complain(self, words: str, error: Exception | None = None) -> None:
        """Once for each reason, not twice a second."""
        self._problem_log.note(self._run_id, words, error)
