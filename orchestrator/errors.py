"""The errors that users and operators may see, as one tree. The class says whose fault the error is.

    AtollError
    ├── ConfigurationError      the job specification or the service's settings
    │   ├── InvalidJobSpec      … with every problem at once
    │   ├── OutsideRoots        a file or folder that jobs may not use (system/roots.py)
    │   ├── UnfitWeights        weights that do not fit the job's model (models/huggingface)
    │   └── UnreadableData      more unreadable text than the job allows (learners/streaming)
    ├── RequestError            an invalid request
    │   ├── NotFound
    │   ├── Conflict            not possible in the current state
    │   ├── PreconditionFailed  changed since the caller read it
    │   ├── Fenced              the caller was replaced by a newer one
    │   ├── Unauthenticated     the token is missing or invalid
    │   ├── Forbidden           the token's role is insufficient
    │   └── TooManyFailures     too many invalid tokens from one address
    ├── InfrastructureError     nodes, Ray, disks, the network
    │   ├── ServiceUnreachable
    │   ├── StoreUnavailable    the service answers, but its database does not work
    │   ├── LogStoreUnavailable the store of durable logs (``--store``) cannot be used just now
    │   ├── FilesElsewhere      no reachable machine has the files of a job that is to be restarted
    │   └── TransferError       a payload did not arrive (channel/)
    │       ├── TransferCancelled   it is no longer wanted
    │       ├── TransferRefused     its ticket is invalid at the server, or the server is not trusted
    │       ├── PayloadWithdrawn    the server does not hold it (any more)
    │       └── TransferStalled     no byte moved within the limit
    ├── DataError               a damaged tape or payload
    │   ├── PayloadDamaged      damaged in transit between processes (channel/), repeatedly
    │   ├── InvalidPayload      not a valid payload (parameters/wire_format.py); becomes a refusal
    │   └── NotFinite           parameters that are not finite (parameters/outer_state.py); the merge is not published
    └── InternalError           a bug in atoll: an invariant does not hold

Each message says what is wrong, with which values, what it means, and what to change. Facts are typed fields. Refusing a
contribution is a decision with a reason (``vocabulary.RefusalReason``), not an error.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass, fields
from typing import Any


@dataclass(eq=False, kw_only=True)
class AtollError(Exception):
    """Base of all our errors. Keyword-only, and can be sent through Ray (``__reduce__``)."""

    def __post_init__(self) -> None:
        Exception.__init__(self, str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), {field.name: getattr(self, field.name) for field in fields(self)})


def _rebuild(kind: type[AtollError], facts: dict[str, Any]) -> AtollError:
    return kind(**facts)


@dataclass(eq=False, kw_only=True)
class ConfigurationError(AtollError):
    """The job specification or the service's settings are invalid."""

    detail: str

    def __str__(self) -> str:
        return self.detail


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a specification: where it is, what is wrong, and what to do."""

    path: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message} {self.remedy}".rstrip()


PROBLEMS_MAX = 50


@dataclass(eq=False, kw_only=True)
class InvalidJobSpec(ConfigurationError):
    """A job specification with at least one problem; nothing was started."""

    detail: str = "the job specification is invalid"
    problems: tuple[Problem, ...] = ()
    omitted_count: int = 0
    """Problems beyond the first ``PROBLEMS_MAX``, left out so that answers stay short."""

    def __post_init__(self) -> None:
        self.omitted_count += max(0, len(self.problems) - PROBLEMS_MAX)
        self.problems = self.problems[:PROBLEMS_MAX]
        super().__post_init__()

    def __str__(self) -> str:
        more = [f"  … and {self.omitted_count:,} more"] if self.omitted_count else []
        count = len(self.problems) + self.omitted_count
        counted = "1 problem" if count == 1 else f"{count:,} problems"
        return "\n".join([f"{self.detail} ({counted}):", *(f"  - {p}" for p in self.problems), *more])


@dataclass(eq=False, kw_only=True)
class OutsideRoots(ConfigurationError):
    """A file or folder outside the roots that the service was started with (``atoll up --checkpoints``)."""

    remedy: str = ""

    def __str__(self) -> str:
        return _joined(self.detail, self.remedy)


@dataclass(eq=False, kw_only=True)
class UnfitWeights(ConfigurationError):
    """Weights that do not fit the job's model (``model.initial_weights``), or a model that other libraries lack."""

    remedy: str = ""

    def __str__(self) -> str:
        return _joined(self.detail, self.remedy)


@dataclass(eq=False, kw_only=True)
class UnreadableData(ConfigurationError):
    """More records or parts of files are unreadable than ``data.unreadable_max`` allows."""

    most: int

    def __str__(self) -> str:
        return f"data.unreadable_max is {self.most:,}. {self.detail} Correct the file, remove it, or raise the limit."


@dataclass(eq=False, kw_only=True)
class RequestError(AtollError):
    """A request that is invalid or not possible."""

    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return _joined(self.detail, self.remedy)


@dataclass(eq=False, kw_only=True)
class NotFound(RequestError):
    """No such job, island or command."""


@dataclass(eq=False, kw_only=True)
class Conflict(RequestError):
    """The job, island or token exists, but its state does not allow the request."""


@dataclass(eq=False, kw_only=True)
class PreconditionFailed(RequestError):
    """It was changed since the caller read it."""


@dataclass(eq=False, kw_only=True)
class Fenced(RequestError):
    """The caller was replaced by a newer one and may not act any more."""


@dataclass(eq=False, kw_only=True)
class Unauthenticated(RequestError):
    """The caller's token is missing or invalid."""


@dataclass(eq=False, kw_only=True)
class Forbidden(RequestError):
    """The caller's role does not allow the request."""


@dataclass(eq=False, kw_only=True)
class TooManyFailures(RequestError):
    """One address has shown so many invalid tokens that it has to wait."""

    retry_after_s: int


@dataclass(eq=False, kw_only=True)
class InfrastructureError(AtollError):
    """Nodes, Ray, a disk or the network failed."""

    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return _joined(self.detail, self.remedy)


@dataclass(eq=False, kw_only=True)
class ServiceUnreachable(InfrastructureError):
    """The control plane does not answer."""


@dataclass(eq=False, kw_only=True)
class StoreUnavailable(InfrastructureError):
    """The service's database is gone, silent, locked, full or read-only."""


@dataclass(eq=False, kw_only=True)
class LogStoreUnavailable(InfrastructureError):
    """The store of durable logs is gone, silent, full or refuses. A mirrored job waits for it."""


@dataclass(eq=False, kw_only=True)
class FilesElsewhere(InfrastructureError):
    """The machine to which the job's synchroniser wrote is no node just now. The head has copies without a journal."""


@dataclass(eq=False, kw_only=True)
class TransferError(InfrastructureError):
    """A payload did not arrive; the received part remains usable for the next try."""


@dataclass(eq=False, kw_only=True)
class TransferCancelled(TransferError):
    """The payload is no longer wanted."""


@dataclass(eq=False, kw_only=True)
class TransferRefused(TransferError):
    """The ticket is of another job, epoch or island, is forged, or has impossible values."""


@dataclass(eq=False, kw_only=True)
class PayloadWithdrawn(TransferError):
    """No server of the ticket holds the payload."""


@dataclass(eq=False, kw_only=True)
class TransferStalled(TransferError):
    """No byte has moved for ``stall_s`` seconds."""

    stall_s: float
    detail: str = "No byte of it has moved"

    def __str__(self) -> str:
        return f"{self.detail} for {self.stall_s:g} s. Check that the other end is alive and reachable."


@dataclass(eq=False, kw_only=True)
class DataError(AtollError):
    """A tape, a payload or another file is damaged."""

    detail: str

    def __str__(self) -> str:
        return self.detail


@dataclass(eq=False, kw_only=True)
class PayloadDamaged(DataError):
    """The bytes of a payload do not match the checksum in its ticket."""

    payload: str

    def __str__(self) -> str:
        return f"{self.payload}: {self.detail}"


@dataclass(eq=False, kw_only=True)
class InternalError(AtollError):
    """An invariant of atoll does not hold. Please report it with the tape."""

    detail: str

    def __str__(self) -> str:
        return f"{self.detail} This is a bug in atoll; please report it with the job's tape."


_DISK_REMEDIES = {
    errno.EROFS: "Mount the disk writable",
    errno.EACCES: "Let this user write there",
    errno.EPERM: "Let this user write there",
    errno.EEXIST: "Move the file away that is in place of the folder",
    errno.ENOTDIR: "Move the file away that is in place of a folder",
    errno.ENOENT: "Create the folder above it",
}


def _joined(detail: str, remedy: str) -> str:
    """Return both as sentences, also if ``detail`` is a reason without a full stop, as statuses and tables have them."""
    stop = "." * bool(remedy[:1].isupper() and (detail[-1:].isalnum() or detail[-1:] in tuple("'\"`)%")))
    return f"{detail}{stop} {remedy}".rstrip()


def disk_remedy(error: OSError) -> str:
    """Return the remedy for a disk or folder that cannot be written, without a full stop."""
    return _DISK_REMEDIES.get(error.errno or 0, "Free some space there")


_ESCAPES = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x84\x86-\x9f]")
"""Colours and other control sequences, which Ray puts into its messages."""
TRY_OUTSIDE = "Try it outside a job first, with the job's specification as plain data."
"""The remedy for an error that a job's own code raises."""
_SURROGATES = re.compile("[\ud800-\udfff]")
"""What Python makes of bytes in file names that are not UTF-8. No process could send them to another."""
LINE_CHARACTERS_MAX = 1_000
"""The limit for messages of foreign errors, which may quote a whole batch: they appear in statuses, tables and pages."""
_UNSENDABLE = "Original exception details:"
_IN_CREATION = "an error raised in its creation task, "
"""Ray quotes the traceback of an actor that failed to start, and carries no error with it."""
_OWN_CLASS = re.compile(r"^orchestrator\.errors\.\w+: ")


def origin(error: BaseException) -> BaseException:
    """Return the error that Ray has wrapped, if it comes from another process, else the error itself."""
    while hasattr(error, "as_instanceof_cause") and isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    return error


def is_interrupt(error: BaseException) -> bool:
    """Return whether this is Ctrl+C, which is not an error of the code in which it arrives. A derived class is one."""
    return type(error) is KeyboardInterrupt


def in_words(error: BaseException) -> str:
    """Return the error as one line, for a reason, a status or a log. Our own errors need no class name.

    Every text about an error of Ray or of user code is made here.
    """
    error = origin(error)
    lines = _lines(error)
    if isinstance(error, AtollError):
        return " ".join(lines)
    if _UNSENDABLE in lines:  # Ray could not send the error itself, and quotes its traceback instead
        return lines[-1]
    if _IN_CREATION in lines[0]:
        return _raised_in_creation(lines)
    return lines[0] if lines[0] == type(error).__name__ else f"{type(error).__name__}: {lines[0]}"


def first_line(error: BaseException) -> str:
    """Return the first line of the error, or its type's name, for a reason that names its kind already."""
    lines = _lines(origin(error))
    return _raised_in_creation(lines) if _IN_CREATION in lines[0] else lines[0]


def _raised_in_creation(lines: list[str]) -> str:
    """Return the error at the end of a traceback, with its class unless it is one of ours."""
    return _OWN_CLASS.sub("", lines[-1].rpartition(_IN_CREATION)[2])


def _lines(error: BaseException) -> list[str]:
    text = _SURROGATES.sub("\ufffd", _ESCAPES.sub("", _text_of(error)))
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return lines if isinstance(error, AtollError) else [_shortened(line) for line in lines]


def _text_of(error: BaseException) -> str:
    """Return the text of the error, or what it was made with if its class raises instead, as a package's may."""
    try:
        return str(error)
    except BaseException:
        return ", ".join(each for each in error.args if isinstance(each, str))


def _shortened(line: str) -> str:
    return line if len(line) <= LINE_CHARACTERS_MAX else f"{line[:LINE_CHARACTERS_MAX]}…"
