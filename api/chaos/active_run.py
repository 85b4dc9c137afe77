"""Runs of plans under way: each polls its job, lets the plan decide, stores the decision, and then injects the fault.

    poll ─▶ chaos.runner ─▶ rows ─▶ faults, commands under keys of their own ─▶ … the job ends ─▶ verdict

A run survives its process: it is rebuilt from its rows by replaying every status that something was decided on, so what was
decided stays decided. A fault's idempotency key names run and fault, so that none is injected twice, whenever the process is
killed. What was decided and not handed over by then is injected only if it is not late. The service's own death is not a
command: a reader that finds it decided knows that it has happened.

``ActiveRun`` is one run and knows no threads. ``RunThreads`` has one thread for each run, which polls the job twice a second
until nothing is left to do, whatever happens. A job, a cluster or a store that does not answer is asked again. Anything
unforeseen drops the run in memory and builds it again from the rows, as after a restart: there is one way back, used often.
A run that keeps failing is ended: the cause is in its rows, or in the job's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from itertools import groupby
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from api.chaos.schemas import RunState
from api.chaos.store import ChaosDecisionRow, ChaosRunRow, ChaosStore
from api.installation.service_restart import RestartService
from api.jobs.background_loop import ProblemLog, reason_of
from api.jobs.service import Service
from api.schemas import CommandState, Job, JobState
from api.storage.store import Store
from orchestrator.chaos.plan import ChaosPlan, figures_now, parse
from orchestrator.chaos.runner import LATE_MAX_S, ChaosRunner, Decision, PlannedFault, judge, schedule
from orchestrator.core.commands import Inject
from orchestrator.core.faults import Continue, Kind
from orchestrator.core.vocabulary import Incarnation, IslandId, IslandPlan, NodeGroupId
from orchestrator.errors import (
    AtollError,
    ConfigurationError,
    DataError,
    InfrastructureError,
    NotFound,
    RequestError,
    first_line,
    in_words,
)
from orchestrator.specification.documents import mapping, read_yaml

REPORT_TIMEOUT_S = 60.0
"""The time that an ended job may take to leave its report."""
MISSED = "missed: the service, or the job, was away when it was due"
logger = logging.getLogger(__name__)
POLL_EVERY_S = 0.5
FAILURES_MAX = 20
"""In a row; between two of them lies one poll."""


def planned(row: ChaosRunRow) -> tuple[ChaosPlan, tuple[PlannedFault, ...]]:
    """The plan of a run, and its faults. The same whenever it is asked. Raises DataError where the row is damaged."""
    try:
        return _planned(row.text, tuple(map(tuple, row.fleet)))
    except (TypeError, ValueError) as error:
        raise DataError(detail=f"The fleet of the run {row.run} is damaged in the store.") from error


@lru_cache(maxsize=64)
def _planned(text: str, fleet: tuple[tuple[Any, ...], ...]) -> tuple[ChaosPlan, tuple[PlannedFault, ...]]:
    try:
        plan = parse(mapping(read_yaml(text, name="the plan"), "the plan"))
    except ConfigurationError as error:
        raise DataError(
            detail=f"This plan was stored by another build, and this one cannot read it: {error}"
        ) from error
    islands = [IslandPlan(IslandId(island), NodeGroupId(group), region, n) for island, group, region, n in fleet]
    return plan, schedule(plan, islands)


def key_of(run: str, fault: int | str) -> str:
    """The idempotency key of what a run does about a fault."""
    return f"{run}/{fault}"


class ActiveRun:
    """The run of ``row``, as it stands in the store. Raises DataError if this build would have decided otherwise."""

    def __init__(
        self, row: ChaosRunRow, service: Service, store: Store, book: ChaosStore, restart_service: RestartService
    ) -> None:
        self._service, self._store, self._book, self._restart_service = service, store, book, restart_service
        self._reference = row.reference
        self._run, self._job, self._caller = row.run, row.job, row.caller
        self._state, self._reason = RunState(row.state), row.reason
        self._conduct = ChaosRunner(*planned(row))
        self._pending: list[int] = []
        self._report_due: float | None = None
        self._restore(row)

    def advance(self, job: Job) -> bool:
        """Do what is due as the job stands now. Returns whether anything is left to do later."""
        if self._state is RunState.STOPPED:
            return not self._let_go(job)
        if job.state.final:
            return not self._settle(job)
        if job.state is JobState.RUNNING and job.after_s is not None:
            if not self._conduct.over:
                self._decide(job, job.after_s)
            self._pending = [n for n in self._pending if not self._inject(n, job.after_s)]
        return True

    def stop(self, reason: str) -> None:
        """No fault is injected any more, and there will be no verdict. What is stopped goes on at the next poll."""
        self._conduct.abort(reason)
        self._tell(RunState.STOPPED, reason=reason)

    # ── deciding ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _decide(self, job: Job, now: float) -> None:
        conduct, before = self._conduct, self._conduct.begun_at
        training = {IslandId(i.island): Incarnation(i.incarnation) for i in job.islands if i.state == "training"}
        first = len(conduct.decisions)
        decided = conduct.look(now, training, lambda: figures_now(len(training), job.goodput, job.statistics))
        if before is None and conduct.begun_at is not None:
            self._tell(RunState.RUNNING, begun_at=conduct.begun_at)
        self._book.decide(
            [
                ChaosDecisionRow(run=self._run, fault=n, at=now, training=dict(training), decision=decision.plain())
                for n, decision in enumerate(decided, first)
            ]
        )
        self._pending += [n for n, decision in enumerate(decided, first) if not decision.skipped]
        if conduct.aborted is not None:
            self._tell(RunState.ABORTED, reason=conduct.aborted)
            self._continue_all(now)

    def _restore(self, row: ChaosRunRow) -> None:
        """Decide again what was decided, and find out what of it was handed over."""
        rows, conduct = self._book.decisions(self._run), self._conduct
        conduct.begun_at = row.begun_at
        for at, looked in groupby(rows, key=lambda decision: decision.at):
            training = {IslandId(i): Incarnation(n) for i, n in next(looked).training.items()}
            conduct.look(at, training, dict)  # of no figures, no condition to abort holds
        again = [_fault_in(decision.plain()) for decision in conduct.decisions]
        if again != [_fault_in(decision.decision) for decision in rows]:
            raise DataError(detail=f"The decisions of {self._run} differ from those of this build.")
        commands = self._commands()
        for n, (stored, decision) in enumerate(zip(rows, list(conduct.decisions), strict=True)):
            if (reason := stored.decision["spared"]) and not decision.skipped:
                conduct.refused(decision, reason)
            elif reason or decision.fault.kind is Kind.KILL_API:
                continue
            elif (command := commands.get(key_of(self._run, n))) is None or not command.delivered:
                self._pending.append(n)
        if not self._state.injects:
            conduct.abort(row.reason)

    # ── injecting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _inject(self, n: int, now: float) -> bool:
        """Hand a decided fault to the job. False if that is to be tried again."""
        decision, key = self._conduct.decisions[n], key_of(self._run, n)
        fault = decision.fault
        if fault.kind is Kind.KILL_API:
            return self._die(n, decision)
        if now - decision.at > LATE_MAX_S and self._store.command_by_key(key) is None:
            self._skip(n, decision, MISSED)
            return True
        try:
            self._service.submit_command(self._job, Inject.of(fault.fault), self._caller, key)
        except InfrastructureError as error:
            logger.warning("%s: %s could not be delivered: %s", self._run, fault.description(), error)
            return False
        except AtollError as error:
            self._skip(n, decision, str(error))
        return True

    def _die(self, n: int, decision: Decision) -> bool:
        """End this process soon, for another one to take its place; skip the fault where none would be started."""
        try:
            self._restart_service()
        except AtollError as error:
            self._skip(n, decision, str(error))
        return True

    def _skip(self, n: int, decision: Decision, reason: str) -> None:
        self._conduct.refused(decision, reason)
        self._book.skip(self._run, n, reason)

    def _continue_all(self, now: float) -> list[str]:
        """Continue every island that stands still. Returns those that were told to."""
        continued = []
        for island in self._conduct.still_stopped(now):
            key = key_of(self._run, f"continue/{island}")
            try:
                self._service.submit_command(self._job, Inject.of(Continue(island)), self._caller, key)
            except RequestError:
                continue  # the job has just ended
            continued.append(str(island))
        return continued

    # ── ending ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _let_go(self, job: Job) -> bool:
        """After a stop: what stands still was told to go on, once. Returns that nothing is left to do."""
        alive = not job.state.final and job.after_s is not None
        islands = self._continue_all(job.after_s or 0.0) if alive else []
        reason = f"{self._reason}; {', '.join(islands)} may go on" if islands else self._reason
        self._tell(RunState.STOPPED, reason=reason, ended_at=time.time())
        return True

    def _settle(self, job: Job) -> bool:
        """The job has ended: judge it by its report, once that is there. Returns that nothing is left to do."""
        if (report := self._report()) is None:
            self._report_due = self._report_due or time.monotonic() + REPORT_TIMEOUT_S
            if time.monotonic() < self._report_due:
                return False
            reason = f"the job is {job.state} and left no report to judge it by"
            self._tell(RunState.FAILED, reason=reason, ended_at=time.time())
            return True
        self._believe_outcomes()
        try:
            verdict = judge(self._conduct, report, self._reference)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
            reason = f"the job's report is damaged, so there is no verdict ({in_words(error)})"
            self._tell(RunState.FAILED, reason=reason, ended_at=time.time())
            return True
        state = RunState.ABORTED if self._conduct.aborted else RunState.PASSED if verdict.passed else RunState.FAILED
        self._tell(state, verdict=verdict.plain(), ended_at=time.time())
        return True

    def _believe_outcomes(self) -> None:
        """Mark the faults that the job refused as skipped."""
        self._service.commands(self._job)  # so that what the job decided is known
        commands = self._commands()
        for n, decision in enumerate(list(self._conduct.decisions)):
            if decision.skipped or decision.fault.kind is Kind.KILL_API:
                continue
            command = commands.get(key_of(self._run, n))
            if command is None:
                self._skip(n, decision, MISSED)
            elif not command.accepted:
                self._skip(n, decision, command.detail or CommandState.UNDELIVERED.value)

    def _report(self) -> dict[str, Any] | None:
        try:
            return self._service.report(self._job)
        except (RequestError, DataError):
            return None

    def _commands(self) -> dict[str | None, Any]:
        return {command.idempotency_key: command for command in self._store.commands(self._job)}

    def _tell(self, state: RunState, **values: Any) -> None:
        self._state, self._reason = state, values.get("reason", self._reason)
        self._book.update(self._run, state, **values)


def _fault_in(plain: dict[str, Any]) -> tuple[Any, ...]:
    return plain["at"], plain["planned_at"], str(plain["kind"]), plain["island"]


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
                self._complain(f"restarted from its rows: {reason_of(error)}", error)
                self._active = None
                self._failures += 1
                if self._failures >= FAILURES_MAX:
                    return not self._end(RunState.FAILED, f"it cannot be run: {reason_of(error)}")
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
                raise NotFound(detail=f"Run {self._run_id} does not exist.")
            self._active = self._rebuild(row)
        return self._active

    def _complain(self, words: str, error: Exception | None = None) -> None:
        """Once for each reason, not twice a second."""
        self._problem_log.note(self._run_id, words, error)
