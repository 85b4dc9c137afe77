"""The overseer of running jobs restarts, from its run folder, a job that the cluster no longer knows.

    running ──▶ starting ──▶ running    it resumes with the next epoch, and its islands are placed again
       │  ▲        │  └────▶ failed     after ``TRIES_MAX`` failed starts, or if its own files do not allow it
       │  └────────┘ this start failed
       └──▶ failed                      it left no tape, or the installation was stopped on purpose while it ran

After a power loss, or when every process was killed, the next cluster knows no jobs; tape and journal survive. Each of these
arrows is taken once, whatever is killed when: a process that dies while it starts a job leaves it ``starting``, and the next
process settles it. A job whose synchroniser Ray restarts is left alone.

A synchroniser that exists and does not answer for minutes hangs: its process is ended, and Ray makes a new one that
continues from tape and journal. That is not done to a job that was paused when it was last heard: it waits for its disk or
its islands, and a restart brings neither. If the new one is silent as well, each attempt waits twice as long as the last.

The file ``taken_down`` exists from a deliberate stop of the installation until the jobs that ran then have been failed,
because a user who stops everything does not expect the next start to undo that.

A job that has cost what its budget allows is finished early, as by an operator, or paused until its limit is raised.

Jobs are isolated: a problem with one job's row, folder or answer is reported once, for that job, and the round continues.
The progress of each job is stored now and then, for a job that fails without being able to report it.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from api.jobs.background_loop import BackgroundLoop, ProblemLog, reason_of
from api.jobs.checkpoints import checkpoints_of
from api.jobs.control import ControlPort
from api.jobs.cordons import Cordons
from api.jobs.outbox import row_of
from api.jobs.path_check import refuse_outside
from api.jobs.translate import SenselessAnswer, last_known_of
from api.run.folder import Run, damage_of_status, is_there, read_status
from api.schemas import JobState
from api.storage.store import DuplicateKey, JobRow, Store
from orchestrator.checkpoints.resumption import how_to_continue
from orchestrator.core import commands
from orchestrator.errors import AtollError, FilesElsewhere, InfrastructureError, LogStoreUnavailable, NotFound
from orchestrator.specification.config import parse_job
from orchestrator.status import JobStatus
from orchestrator.system.roots import AllowedRoots

logger = logging.getLogger(__name__)

POLL_EVERY_S = 5.0
TRIES_MAX = 3
RESTART_SILENT_AFTER_MIN = 5.0
"""Far longer than the longest merge of a large fragment keeps a synchroniser from answering."""
RESTART_WAIT_MAX_S = 3600.0
FILES_AWAITED_S = 600.0
"""How long a job waits for the machine that has its files."""
LIVES_MAX = 20
"""A job that was restarted this often without being seen alive dies at once each time, and is failed."""
WRITE_EVERY_S = 30.0
"""How often a job's progress is stored. A new epoch is stored at once."""
CLOSE_TIMEOUT_S = 5.0
TAKEN_DOWN = "it was running when the installation was stopped (`atoll down`)."
UNSEEN = "it is unknown whether it runs:"
NOTHING_LEFT = "it no longer runs, and it left neither a final state nor a tape."
THE_SERVICE = "the service, which restarted it"
THE_BUDGET = "budget.cost"
"""The caller of the commands that a job gets because of what it has cost."""


class Presence(Enum):
    """A job answers or has left a final state (THERE), does not run (GONE), or does not answer (SILENT)."""

    THERE = auto()
    GONE = auto()
    SILENT = auto()


@dataclass(frozen=True, slots=True)
class Silence:
    """Since when a job does not answer, or since the last attempt to restart it, and when to restart it."""

    since: float
    restart_at: float


class Overseer:
    """``record`` returns a job's status record, or None if it does not run and left no final state."""

    def __init__(
        self,
        control: ControlPort,
        store: Store,
        cordons: Cordons,
        record: Callable[[JobRow], JobStatus | None],
        roots: AllowedRoots,
        taken_down: Path | None = None,
        restart_silent_after_min: float = RESTART_SILENT_AFTER_MIN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roots = roots
        self._control, self._store, self._cordons, self._record = control, store, cordons, record
        self._taken_down = taken_down
        self._restart_silent_after_s, self._clock = 60.0 * restart_silent_after_min, clock
        self._silences: dict[str, Silence] = {}
        self._paused: set[str] = set()
        """Jobs that were paused when they were last heard."""
        self._pool = ThreadPoolExecutor(8, "overseer")
        self._loop = BackgroundLoop(self.check, "overseer", POLL_EVERY_S)
        self._closing = False
        self._tries: Counter[str] = Counter()
        """The number of failed starts in a row, by job."""
        self._waiting: dict[str, float] = {}
        """Since when jobs wait for the machine that has their files."""
        self._lives: Counter[str] = Counter()
        """The number of starts since the job was last seen alive, by job."""
        self._problem_log = ProblemLog(logger)
        self._ran_before: set[str] | None = None
        """While ``taken_down`` exists: the jobs that ran when the installation was stopped, and are not failed yet."""
        self._progress: dict[str, dict[str, Any]] = {}
        """Each job's progress when it was last seen."""
        self._written: dict[str, tuple[float, dict[str, Any]]] = {}
        """The progress in the store, and when it was stored."""
        self._unsettled: set[str] = set()
        """Jobs whose restart was interrupted by a failure of the store. They are restarted again if they do not run."""

    def begin(self) -> None:
        """Start the loop, with the first round at once."""
        self._loop.start()

    def close(self) -> None:
        """Stop restarting jobs. A start that does not end soon is left to the next process."""
        self._closing = True
        self._loop.stop(CLOSE_TIMEOUT_S)
        self._pool.shutdown(wait=False, cancel_futures=True)
        with suppress(Exception):  # the store may be what failed
            for job in list(self._progress):
                self._write_down(job)

    def check(self) -> None:
        """Restart every job that should run and does not, or fail it with the reason."""
        for job in list(self._unsettled):
            self._store.move_job(job, JobState.STARTING, JobState.RUNNING)
            self._unsettled.discard(job)
        rows = self._store.jobs(states={JobState.RUNNING})
        concerned = self._taken_down_with(rows)
        presences = list(self._pool.map(self._presence, rows))
        for row, presence in zip(rows, presences, strict=True):
            try:
                self._see_to(row, presence, row.job in concerned)
            except Exception as error:
                if not self._closing:
                    self._complain(row, f"supervising it failed: {reason_of(error)}", error)
                    concerned.discard(row.job)
            else:
                if presence is not Presence.SILENT:
                    concerned.discard(row.job)
        self._forget_all_but({row.job for row in rows})
        if self._ran_before is not None and not self._ran_before:
            self._forget_taken_down()

    def _taken_down_with(self, rows: Sequence[JobRow]) -> set[str]:
        """Return the jobs that ran when the installation was stopped on purpose. Later submissions are not affected."""
        there = self._taken_down is not None and os.path.lexists(self._taken_down)
        running = {row.job for row in rows}
        if not there:
            self._ran_before = None
        elif self._ran_before is None:
            self._ran_before = running
        else:
            self._ran_before &= running
        return self._ran_before if self._ran_before is not None else set()

    def _forget_taken_down(self) -> None:
        assert self._taken_down is not None
        try:
            self._taken_down.unlink(missing_ok=True)
        except OSError as error:
            self._problem_log.note(str(self._taken_down), f"cannot remove it: {error.strerror}. Remove it by hand")
        else:
            self._ran_before = None

    def _presence(self, row: JobRow) -> Presence:
        """Find out whether the job runs. Never raises."""
        try:
            record = self._record(row)
            if record is None:
                return Presence.GONE
        except InfrastructureError as error:
            if not isinstance(error, SenselessAnswer):
                return Presence.SILENT
            self._complain(row, f"its progress is unknown: {reason_of(error)}", error)
            return Presence.THERE
        except Exception as error:  # it exists, but has a problem
            self._complain(row, f"{UNSEEN} {reason_of(error)}", error)
            return Presence.THERE
        try:
            self._keep_to_limit(row, record)
            self._silences.pop(row.job, None)
            (self._paused.discard if record.view.pause_reason is None else self._paused.add)(row.job)
            self._progress[row.job] = last_known_of(record)
            self._tries.pop(row.job, None)
            self._waiting.pop(row.job, None)
            if not record.view.has_decided:
                self._lives.pop(row.job, None)
        except Exception as error:
            self._complain(row, f"its progress is unknown: {reason_of(error)}", error)
        else:
            if self._problem_log.settle(f"job {row.job}") and row.reason:
                self._store.update_job(row.job, reason="")
        return Presence.THERE

    def _keep_to_limit(self, row: JobRow, record: JobStatus) -> None:
        """Store the command that the job's limit of cost requires, once for each limit. The outbox delivers it."""
        command = command_at_limit(row.spec, record)
        if command is None:
            return
        changes = record.view.settings.changes if record.view.settings is not None else 0
        stored = row_of(row.job, THE_BUDGET, command)
        word = commands.kind_of(command)
        stored.idempotency_key = f"{THE_BUDGET}:{row.job}:{word}:{record.view.epoch}:{changes}"
        with suppress(DuplicateKey):
            self._store.add_command(stored)
            logger.warning("job %s gets the command to %s because of its limit of cost", row.job, word)

    def _see_to(self, row: JobRow, presence: Presence, taken_down: bool) -> None:
        if presence is Presence.THERE:
            self._write_down(row.job, WRITE_EVERY_S)
        elif presence is Presence.GONE and taken_down:
            self._fail(row, JobState.RUNNING, TAKEN_DOWN)
        elif presence is Presence.GONE:
            self._silences.pop(row.job, None)
            self._go_on(row)
        else:
            self._end_silence(row)

    def _end_silence(self, row: JobRow) -> None:
        """Restart a synchroniser that has not answered for long."""
        now = self._clock()
        silence = self._silences.setdefault(row.job, Silence(now, now + self._restart_silent_after_s))
        if not self._restart_silent_after_s or row.job in self._paused or now < silence.restart_at or self._closing:
            return
        wait_s = min(2 * (silence.restart_at - silence.since), RESTART_WAIT_MAX_S)
        self._silences[row.job] = Silence(now, now + wait_s)
        logger.warning("job %s has not answered for %.0f s; restarting its synchroniser", row.job, now - silence.since)
        try:
            logger.warning("job %s: %s", row.job, self._control.restart_job(row.job))
        except (InfrastructureError, NotFound) as error:  # the head is down as well, or Ray is making it again
            logger.warning("job %s: its synchroniser could not be restarted: %s", row.job, error)

    def _go_on(self, row: JobRow) -> None:
        run_dir = Path(row.run_dir)
        if problem := self._nothing_to_go_on_from(row, run_dir):
            self._fail(row, JobState.RUNNING, problem)
            return
        if self._closing:
            return
        cordoned = self._cordons.callers()
        self._unsettled.add(row.job)
        if self._store.move_job(row.job, JobState.RUNNING, JobState.STARTING):
            self._start_again(row, cordoned)
        self._unsettled.discard(row.job)

    def _start_again(self, row: JobRow, cordoned: Mapping[str, str]) -> None:
        logger.warning("job %s no longer runs; restarting it from its run folder", row.job)
        try:
            spec = parse_job(row.spec)
            refuse_outside(spec, self._roots, begun=True)
            last_known = self._progress.get(row.job) or row.last_known or {}
            self._control.start_job(row.job, spec, Path(row.run_dir), cordoned, self._roots, last_known)
        except Exception as error:
            if not self._closing:  # else this process has disconnected from the cluster; the next one settles it
                self._missed(row, error)
            return
        self._lives[row.job] += 1
        self._store.move_job(row.job, JobState.STARTING, JobState.RUNNING)
        self._cordons.tell(row.job, THE_SERVICE)

    def _nothing_to_go_on_from(self, row: JobRow, run_dir: Path) -> str:
        """Return the reason why the job cannot be restarted; empty if it is worth trying."""
        run, damage = Run(row.job, run_dir, False), damage_of_status(run_dir)
        is_in_store = is_mirrored(row)  # whatever the folder has lost
        if not is_in_store and not is_there(run_dir, run.tape.name):
            return f"{NOTHING_LEFT} {damage}".strip()
        progress = self._progress.get(row.job) or row.last_known or {}
        if is_in_store and progress.get("global_version") and self._is_lost_everywhere(row, run):
            return (
                f"it had merged {progress['global_version']} times, but its run folder has no tape and the store has "
                "nothing of it: both were lost."
            )
        if not is_in_store and run.tape.stat().st_size == 0 and progress.get("global_version"):
            return (
                f"its tape {run.tape} is empty, though it had merged {progress['global_version']} times: it is damaged."
            )
        if damage and self._lives[row.job] >= TRIES_MAX:  # restarts should have written the final state again
            return f"it no longer runs. {damage}"
        if self._lives[row.job] >= LIVES_MAX:
            return f"it was restarted {LIVES_MAX} times, and died at once each time."
        return ""

    def _is_lost_everywhere(self, row: JobRow, run: Run) -> bool:
        """Return whether neither folder nor store has anything of a mirrored job. A store that is away may have it."""
        try:
            return not is_there(run.folder, run.tape.name) and not self._control.has_log(row.job)
        except LogStoreUnavailable:
            return False

    def _missed(self, row: JobRow, error: Exception) -> None:
        """Handle a failed restart. If the job left a final state, that says more about the reason, and no retry helps."""
        if what := self._waits_for(row, error):
            self._complain(row, f"it waits for {what}: {error}", error)
            self._store.move_job(row.job, JobState.STARTING, JobState.RUNNING)
            return
        logger.warning("job %s could not be restarted: %s", row.job, error)
        self._tries[row.job] += 1
        is_given_up = isinstance(error, FilesElsewhere)
        if self._tries[row.job] < TRIES_MAX and not is_given_up and read_status(Path(row.run_dir)) is None:
            self._store.move_job(row.job, JobState.STARTING, JobState.RUNNING)
            return
        reason = f"it no longer ran, and could not be restarted: {reason_in(error)}"
        damage = damage_of_status(Path(row.run_dir))
        self._fail(row, JobState.STARTING, f"{reason} {damage}".strip())

    def _waits_for(self, row: JobRow, error: Exception) -> str:
        """Return what the job waits for, if nothing was tried because that is missing; else nothing."""
        if isinstance(error, LogStoreUnavailable):
            return "its store"
        if isinstance(error, FilesElsewhere):
            since = self._waiting.setdefault(row.job, self._clock())
            return "the machine that has its files" if self._clock() - since < FILES_AWAITED_S else ""
        return ""

    def _fail(self, row: JobRow, before: JobState, reason: str) -> None:
        self._tries.pop(row.job, None)
        self._lives.pop(row.job, None)
        self._problem_log.settle(f"job {row.job}")
        try:
            urls = [checkpoint.url for checkpoint in checkpoints_of(row, self._roots)]
            remedy = how_to_continue(row.job, Path(row.run_dir), urls[-1] if urls else None)
        except Exception as error:  # the job must be failed even if this is unknown
            logger.warning("job %s: it is unknown whether it has checkpoints: %s", row.job, reason_of(error))
            remedy = "Submit it again."
        values: dict[str, Any] = {"reason": f"{reason} {remedy}"}
        if progress := self._progress.get(row.job):
            values["last_known"] = progress
        self._store.move_job(row.job, before, JobState.FAILED, **values)

    # ── what is remembered of jobs ────────────────────────────────────────────────────────────────────────────────

    def _write_down(self, job: str, at_most_every_s: float = 0.0) -> None:
        """Store the job's progress, unless that was done less than ``at_most_every_s`` ago."""
        progress, (at, before) = self._progress.get(job), self._written.get(job, (-math.inf, {}))
        if progress is None or progress == before:
            return
        now = time.monotonic()
        if progress["epoch"] == before.get("epoch") and now - at < at_most_every_s:
            return
        self._store.update_job(job, last_known=progress)
        self._written[job] = (now, progress)

    def _forget_all_but(self, running: set[str]) -> None:
        self._paused &= running
        for per_job in (self._progress, self._written, self._tries, self._waiting, self._lives, self._silences):
            for job in per_job.keys() - running:
                del per_job[job]
        self._problem_log.keep({str(self._taken_down), *(f"job {job}" for job in running)})

    def _complain(self, row: JobRow, reason: str, error: Exception) -> None:
        """Report a problem once for each reason: in the log, and as the job's reason."""
        if self._problem_log.note(f"job {row.job}", reason, error):
            with suppress(Exception):  # the store may be the problem
                self._store.update_job(row.job, reason=reason)


def command_at_limit(spec: Any, record: JobStatus) -> commands.Finish | commands.Pause | commands.Continue | None:
    """Return what a running job must do now by its limit of cost: the one that was set last, else the specification's.

    A job that has no work which can be merged does nothing.
    """
    budget, cost, view = spec.get("budget") if isinstance(spec, dict) else None, record.goodput.get("cost"), record.view
    budget = budget if isinstance(budget, dict) else {}
    limit = budget.get("cost") if view.settings is None or view.settings.cost is None else view.settings.cost
    if not isinstance(limit, float | int) or cost is None or view.phase != "running" or not view.tokens_trained:
        return None
    so_far, currency = cost["so_far"], cost["currency"]
    if so_far < limit:
        return commands.Continue(f"the limit of cost is {limit:g} {currency} now") if view.paused else None
    if budget.get("at_cost") != "pause":
        return commands.Finish()
    reason = f"it has cost its limit of {limit:g} {currency}; raise it with `atoll set JOB cost=…` to continue"
    return None if view.paused else commands.Pause(reason)


def reason_in(error: Exception) -> str:
    """Return a failure as text; our own errors need no class name."""
    return str(error) if isinstance(error, AtollError) else reason_of(error)


def is_mirrored(row: JobRow | None) -> bool:
    """Return whether a store has the job's log. What is wrong with a damaged specification, the restart says."""
    try:
        return row is not None and parse_job(row.spec).synchroniser.durability.is_mirrored
    except Exception:  # a damaged row may have anything there
        return False
