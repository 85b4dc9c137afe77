"""The outbox of commands: each is stored first, handed to its job until that has it, and followed to its outcome.

    stored ──handed over──▶ delivered ──the job decides──▶ accepted, refused
       ├──── a queued job is cancelled ──────▶ accepted
       └──── the job ended, or does not know the target ──────▶ refused, with the reason

Every stored command gets an outcome, whatever is killed in between, and a job gets its commands in the order in which they
were stored. Everything needed for that is in the row. A command that was handed over but not yet marked as delivered is
handed over again: jobs identify commands by id, and do nothing twice. A job that does not answer is tried again with the
next ``turn``.

An ``Idempotency-Key`` is used for one request only, which ``digest_of`` identifies.

Source: Richardson, Microservices Patterns (2018), "transactional outbox"; at-least-once delivery with idempotent receivers.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from hashlib import blake2b
from threading import Lock
from typing import Any, Protocol

from api.clocks import Ages
from api.jobs.background_loop import ProblemLog, reason_of
from api.jobs.control import ControlPort
from api.schemas import FINAL
from api.storage.store import CommandRow, JobRow, Store
from orchestrator.core.commands import Cancel, Command, Inject, kind_of
from orchestrator.core.faults import Kind
from orchestrator.errors import AtollError, Conflict, DataError, InfrastructureError, NotFound, RequestError
from orchestrator.status import JobStatus
from orchestrator.system.plain import brief
from orchestrator.tape import codec

logger = logging.getLogger(__name__)

RecordOf = Callable[[JobRow], JobStatus | None]
"""Returns a job's status record: its final state if it left one, else the live one; None if there is neither."""

STRIKE_WITHIN_S = 10.0
"""A fault that cannot be handed over for this long is refused: it would happen later than planned."""
TRIES_MAX = 3
"""How often a command is tried that fails for an unforeseen reason, which is likely to stay."""
NEVER_REACHED = "the job ended before the command reached it."
TOO_LATE = "the job did not answer when the fault was due."
UNDECIDED = "the job ended before it decided."


def digest_of(request: Any) -> str:
    """Return a digest that is equal for equal requests, also for requests that validation would refuse."""
    try:
        canonical = json.dumps(request, sort_keys=True, default=str).encode()
    except (TypeError, ValueError, RecursionError):
        canonical = b"".join(_pieces(request))
    return blake2b(canonical, digest_size=16).hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    """Yield a canonical form of what JSON cannot encode, without recursion: mixed keys, cycles, depth, huge integers."""
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        yield type(item).__name__.encode("utf-8", "backslashreplace")
        if isinstance(item, dict | list | tuple):
            yield str(len(item)).encode()
            if id(item) not in seen:
                seen.add(id(item))
                pairs = sorted(item.items(), key=lambda pair: brief(pair[0])) if isinstance(item, dict) else [item]
                waiting += [part for pair in pairs for part in pair]
        elif isinstance(item, int):
            yield hex(item).encode()
        else:
            yield str(item).encode("utf-8", "backslashreplace")


class KeyedRow(Protocol):
    """A row that a request with a key has created."""

    @property
    def request_digest(self) -> Any: ...


def refuse_other_request(row: KeyedRow, digest: str, key: str | None) -> None:
    """Raise RequestError if the row was created by a different request under the same key."""
    if row.request_digest != digest:
        raise RequestError(
            detail=f"The Idempotency-Key {key!r} was already used for a different request.",
            remedy="Use a new key for each new request, and repeat a key only with the same request.",
        )


def row_of(job: str, caller: str, command: Command) -> CommandRow:
    """Return the row of a new command, which is stored before it is handed over."""
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
        """One for each job, so that two threads do not interleave its commands."""
        self._ages = Ages()
        self._problem_log = ProblemLog(logger)
        self._failures: Counter[str] = Counter()
        """The number of failed hand-overs for an unforeseen reason, by command."""

    def turn(self) -> None:
        """Hand over and settle all open commands. A job that does not answer, or is broken, does not block others."""
        jobs = self._store.jobs_with_open_commands()
        for job in jobs:
            try:
                self.push(job)
                self.settle(job)
            except Exception as error:
                self._problem_log.note(f"job {job}", f"handling its commands failed: {reason_of(error)}", error)
        self._problem_log.keep(f"job {job}" for job in jobs)

    def push(self, job: str) -> None:
        """Hand over the job's commands in order, up to the first for which it does not answer."""
        with self._locks[job]:
            row, waiting = self._store.job(job), self._undelivered(job)
            try:
                while row and waiting and self._reached(row, waiting[0]):
                    self._ages.forget(waiting.pop(0).command)
            except InfrastructureError as error:
                self._note(job, f"commands are waiting, {', '.join(w.command for w in waiting)}: {error}")
            else:
                self._note(job, "")

    def settle(self, job: str) -> None:
        """Store the outcomes of the job's commands, as far as it has decided them and answers."""
        row = self._store.job(job)
        waiting = [command for command in self._store.open_commands(job) if command.delivered]
        if row is None or not waiting:
            return
        try:
            record = self._record_of(row)
        except AtollError as error:
            self._note(job, f"cannot get the outcomes of commands: {error}")
            return
        if record is None and row.state not in FINAL:
            return  # it is about to be restarted, and its tape holds its decisions
        for command in waiting:
            self._settle(command, record)

    def _settle(self, command: CommandRow, record: JobStatus | None) -> None:
        outcome = record.commands.get(command.command) if record else None
        if outcome is not None and outcome.accepted is not None:
            self._store.update_command(command.command, accepted=outcome.accepted, detail=outcome.detail)
        elif over(record):
            self._store.update_command(command.command, accepted=False, detail=UNDECIDED)
        elif outcome is None:
            # The job got it, and lost it with its process before it was on the tape.
            self._store.update_command(command.command, delivered=False)

    def _reached(self, row: JobRow, command: CommandRow) -> bool:
        """Hand over a command. Return False while the outcome of that is unknown; raise if the job does not answer."""
        try:
            request = codec.decode_command(command.request)
        except DataError as error:
            self._store.update_command(command.command, accepted=False, detail=f"it could not be delivered: {error}")
            return True
        if isinstance(request, Cancel) and self._store.cancel_queued(command):
            return True
        if isinstance(request, Inject) and request.fault != Kind.CONTINUE and self._is_late(row, command):
            return True
        try:
            self._control.submit(command.job, command.command, command.caller, request)
        except InfrastructureError:
            raise
        except (NotFound, Conflict) as error:
            record = self._record_of(row)  # it may have taken the command, and ended
            if record and command.command in record.commands:
                self._store.update_command(command.command, delivered=True)
            elif record is None and row.state not in FINAL:
                return False  # it is about to be started or restarted
            else:
                detail = NEVER_REACHED if over(record) else str(error)
                self._store.update_command(command.command, accepted=False, detail=detail)
        except Exception as error:
            self._failures[command.command] += 1
            if self._failures[command.command] < TRIES_MAX:
                raise InfrastructureError(detail=f"{command.command} failed: {reason_of(error)}") from error
            detail = f"it could not be delivered: {reason_of(error)}"
            self._store.update_command(command.command, accepted=False, detail=detail)
        else:
            self._store.update_command(command.command, delivered=True)
        self._failures.pop(command.command, None)
        return True

    def _is_late(self, row: JobRow, command: CommandRow) -> bool:
        """Return whether a fault is overdue, and settle it then. Raises if the job does not answer."""
        if self._ages.of(command.command, command.requested_at) < STRIKE_WITHIN_S:
            return False
        record = self._record_of(row)
        if record and command.command in record.commands:
            self._store.update_command(
                command.command, delivered=True
            )  # it was injected, but not yet marked as delivered
        else:
            self._store.update_command(command.command, accepted=False, detail=TOO_LATE)
        return True

    def _undelivered(self, job: str) -> list[CommandRow]:
        return [command for command in self._store.open_commands(job) if not command.delivered]

    def _note(self, job: str, trouble: str) -> None:
        """Log trouble when it changes, not each time it occurs."""
        if trouble:
            self._problem_log.note(f"job {job}", trouble)
        else:
            self._problem_log.settle(f"job {job}")


def over(record: JobStatus | None) -> bool:
    """Return whether the job decides nothing more."""
    return record is None or record.view.has_decided
