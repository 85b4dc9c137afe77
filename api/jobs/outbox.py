"""The outbox of commands: each is stored first, handed to its job until that has it, and followed to its outcome.

    stored ──handed over──▶ delivered ──the job decides──▶ accepted, refused
       ├──── a queued job is cancelled ──────▶ accepted
       └──── the job ended, or does not know whom it is for ──────▶ refused, with the reason

Responsible for every stored command ending with an outcome, whatever is killed in between, and for a job being given its
commands in the order in which they were stored. Everything that is needed for that is in the row. What was handed over but
not yet noted as delivered is handed over again: jobs know commands by their ids, and do nothing twice. A job that does not
answer is asked again with the next ``turn``. It refuses to know who asks, and when.

Source: Richardson, Microservices Patterns (2018), "transactional outbox"; at-least-once delivery with idempotent receivers.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from threading import Lock

from api.clocks import Ages
from api.jobs.background_loop import ProblemLog, reason_of
from api.jobs.control import ControlPort
from api.jobs.translate import has_decided
from api.schemas import FINAL
from api.storage.store import CommandRow, JobRow, Store
from orchestrator.actors.records import StatusRecord
from orchestrator.chaos.kinds import CONTINUE
from orchestrator.core.commands import Cancel, Command, Inject, kind_of
from orchestrator.errors import AtollError, Conflict, DataError, InfrastructureError, NotFound
from orchestrator.tape import codec

logger = logging.getLogger(__name__)

RecordOf = Callable[[JobRow], StatusRecord | None]
"""Returns a job's status record: its final state if it left one, else the live one; None if there is neither."""

STRIKE_WITHIN_S = 10.0
"""A fault that cannot be handed over for so long is refused: it would strike at another time than planned."""
TRIES_MAX = 3
"""The tries of a command that fails for an unforeseen reason, which lies in its row or job and stays."""
NEVER_REACHED = "the job ended before the command reached it."
TOO_LATE = "the job did not answer when it was to strike."
UNDECIDED = "the job ended before it was decided."


def row_of(job: str, caller: str, command: Command) -> CommandRow:
    """A new command to the job, as it is stored before it is handed over."""
    return CommandRow(
        command=f"{kind_of(command)}-{secrets.token_hex(6)}",
        job=job,
        request=codec.encode_command(command),
        caller=caller,
        requested_at=time.time(),
    )


class Outbox:
    def __init__(self, control: ControlPort, store: Store, record_of: RecordOf) -> None:
        self._control = control
        self._store = store
        self._record_of = record_of
        self._locks: defaultdict[str, Lock] = defaultdict(Lock)
        """One a job: two threads could otherwise hand over its commands in turns."""
        self._ages = Ages()
        self._problem_log = ProblemLog(logger)
        self._failures: Counter[str] = Counter()
        """The number of failed hand-overs for an unforeseen reason, by command."""

    def turn(self) -> None:
        """Every open command is as far as its job lets it be. One that does not answer, or is broken, holds up no other."""
        jobs = self._store.jobs_with_open_commands()
        for job in jobs:
            try:
                self.push(job)
                self.settle(job)
            except Exception as error:
                self._problem_log.note(f"job {job}", f"its commands cannot be seen to: {reason_of(error)}", error)
        self._problem_log.keep(f"job {job}" for job in jobs)

    def push(self, job: str) -> None:
        """The job's commands have been handed over, in order, up to the first that it does not answer for."""
        with self._locks[job]:
            row, waiting = self._store.job(job), self._undelivered(job)
            try:
                while row and waiting and self._reached(row, waiting[0]):
                    self._ages.forget(waiting.pop(0).command)
            except InfrastructureError as error:
                self._note(job, f"commands wait, {', '.join(w.command for w in waiting)}: {error}")
            else:
                self._note(job, "")

    def settle(self, job: str) -> None:
        """The outcomes of the job's commands are stored, as far as it has decided and answers."""
        row = self._store.job(job)
        waiting = [command for command in self._store.open_commands(job) if command.delivered]
        if row is None or not waiting:
            return
        try:
            record = self._record_of(row)
        except AtollError as error:
            self._note(job, f"outcomes cannot be had: {error}")
            return
        if record is None and row.state not in FINAL:
            return  # it is about to be started again, and its tape says what it decided
        for command in waiting:
            self._settle(command, record)

    def _settle(self, command: CommandRow, record: StatusRecord | None) -> None:
        outcome = record["commands"].get(command.command) if record else None
        if outcome is not None and outcome["accepted"] is not None:
            self._store.update_command(
                command.command, accepted=bool(outcome["accepted"]), detail=str(outcome["detail"])
            )
        elif over(record):
            self._store.update_command(command.command, accepted=False, detail=UNDECIDED)
        elif outcome is None:
            # It had it, and has lost it with its process before it was on the tape.
            self._store.update_command(command.command, delivered=False)

    def _reached(self, row: JobRow, command: CommandRow) -> bool:
        """The job has the command, or never will. False while it is not known which; raises while it does not answer."""
        try:
            request = codec.decode_command(command.request)
        except DataError as error:
            self._store.update_command(command.command, accepted=False, detail=f"it could not be handed over: {error}")
            return True
        if isinstance(request, Cancel) and self._store.cancel_queued(command):
            return True
        if isinstance(request, Inject) and request.fault != CONTINUE and self._is_late(row, command):
            return True
        try:
            self._control.submit(command.job, command.command, command.caller, request)
        except InfrastructureError:
            raise
        except (NotFound, Conflict) as error:
            record = self._record_of(row)  # it may be over, and have taken the command before
            if record and command.command in record["commands"]:
                self._store.update_command(command.command, delivered=True)
            elif record is None and row.state not in FINAL:
                return False  # it is about to be started, or started again
            else:
                detail = NEVER_REACHED if over(record) else str(error)
                self._store.update_command(command.command, accepted=False, detail=detail)
        except Exception as error:
            self._failures[command.command] += 1
            if self._failures[command.command] < TRIES_MAX:
                raise InfrastructureError(detail=f"{command.command} failed: {reason_of(error)}") from error
            detail = f"it could not be handed over: {reason_of(error)}"
            self._store.update_command(command.command, accepted=False, detail=detail)
        else:
            self._store.update_command(command.command, delivered=True)
        self._failures.pop(command.command, None)
        return True

    def _is_late(self, row: JobRow, command: CommandRow) -> bool:
        """Whether it is too late for a fault to strike, which then is settled; raises while the job does not answer."""
        if self._ages.of(command.command, command.requested_at) < STRIKE_WITHIN_S:
            return False
        record = self._record_of(row)
        if record and command.command in record["commands"]:
            self._store.update_command(command.command, delivered=True)  # it had struck, and that was not yet noted
        else:
            self._store.update_command(command.command, accepted=False, detail=TOO_LATE)
        return True

    def _undelivered(self, job: str) -> list[CommandRow]:
        return [command for command in self._store.open_commands(job) if not command.delivered]

    def _note(self, job: str, trouble: str) -> None:
        """Trouble is logged when it changes, not each time it is met."""
        if trouble:
            self._problem_log.note(f"job {job}", trouble)
        else:
            self._problem_log.settle(f"job {job}")


def over(record: StatusRecord | None) -> bool:
    """Whether nothing more will be decided."""
    return record is None or has_decided(record)
