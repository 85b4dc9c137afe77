"""The errors a user or operator may meet, as one tree. Whose fault it is decides the class.

    AtollError
    ├── ConfigurationError      the job specification or the service's settings
    │   ├── InvalidJobSpec      … with every problem at once
    │   ├── OutsideRoots        … a file or folder that jobs may not touch (roots.py)
    │   ├── UnfitWeights        … weights of another model, or of none (models/huggingface)
    │   └── UnreadableData      … more of the text cannot be read than the job passes over (learners/streaming)
    ├── RequestError            a command that cannot be done as asked
    │   ├── NotFound
    │   ├── Conflict
    │   ├── PreconditionFailed  … as things stand now, which the caller has not seen
    │   ├── Fenced              … by somebody whose place another has taken
    │   ├── Unauthenticated     nobody known asks
    │   ├── Forbidden           somebody known asks, whose role does not reach
    │   └── TooManyFailures     … with tokens that are none, too often
    ├── InfrastructureError     nodes, Ray, disks, the network
    │   ├── ServiceUnreachable
    │   ├── StoreUnavailable    the service answers, and cannot read or keep what it must not forget
    │   └── TransferError       a payload did not come over (channel/)
    │       ├── TransferCancelled   … because nobody wants it any more
    │       ├── TransferRefused     … its ticket is not valid at the server, or the server cannot be trusted
    │       ├── PayloadWithdrawn    … the server does not hold it, or no longer
    │       └── TransferStalled     … no byte moved for as long as the limit says
    ├── DataError               a tape or payload that is not what it claims to be
    │   ├── PayloadDamaged      … on its way from process to process (channel/), again and again
    │   ├── InvalidPayload      … a payload (parameters/wire_format.py); becomes a refusal
    │   └── NotFinite           … parameters (parameters/outer_state.py); what they would have become is not published
    └── InternalError           us: an invariant does not hold

Each says what was wrong with which values, what it means, and what to change. Facts are typed fields. Refusing a
contribution is a decision with a reason (``vocabulary.RefusalReason``), not an error.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass, fields
from typing import Any


@dataclass(eq=False, kw_only=True)
class AtollError(Exception):
    """Base of all errors of ours. Keyword-only, and able to cross Ray (``__reduce__``)."""

    def __post_init__(self) -> None:
        Exception.__init__(self, str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), {field.name: getattr(self, field.name) for field in fields(self)})


def _rebuild(kind: type[AtollError], facts: dict[str, Any]) -> AtollError:
    return kind(**facts)


@dataclass(eq=False, kw_only=True)
class ConfigurationError(AtollError):
    """The job specification or the service's settings ask for something that cannot be."""

    detail: str

    def __str__(self) -> str:
        return self.detail


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a specification: where, what, and what to do about it."""

    path: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message} {self.remedy}".rstrip()


PROBLEMS_MAX = 50


@dataclass(eq=False, kw_only=True)
class InvalidJobSpec(ConfigurationError):
    """A job specification with at least one problem; nothing was started."""

    detail: str = "the job specification cannot be used"
    problems: tuple[Problem, ...] = ()
    omitted_count: int = 0
    """Problems beyond the first ``PROBLEMS_MAX``, which nobody reads: an answer stays short whatever was asked."""

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
    """A file or folder that no root holds which was named when the service was started (``atoll up --checkpoints``)."""

    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.detail} {self.remedy}".rstrip()


@dataclass(eq=False, kw_only=True)
class UnfitWeights(ConfigurationError):
    """Weights that are not those of the job's model (``model.initial_weights``), or a model that others' libraries lack."""

    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.detail} {self.remedy}".rstrip()


@dataclass(eq=False, kw_only=True)
class UnreadableData(ConfigurationError):
    """More records, or pieces of files, cannot be read than ``data.unreadable_max`` passes over."""

    most: int

    def __str__(self) -> str:
        return (
            f"data.unreadable_max is {self.most:,}. {self.detail} Correct the file, leave it out, or raise the limit."
        )


@dataclass(eq=False, kw_only=True)
class RequestError(AtollError):
    """A command or question that cannot be answered as asked."""

    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.detail} {self.remedy}".rstrip()


@dataclass(eq=False, kw_only=True)
class NotFound(RequestError):
    """No such job, island or command."""


@dataclass(eq=False, kw_only=True)
class Conflict(RequestError):
    """The thing exists, but is not in a state in which this can be done."""


@dataclass(eq=False, kw_only=True)
class PreconditionFailed(RequestError):
    """The thing was changed since the caller has looked at it."""


@dataclass(eq=False, kw_only=True)
class Fenced(RequestError):
    """The caller was replaced by a newer one, and may do nothing more."""


@dataclass(eq=False, kw_only=True)
class Unauthenticated(RequestError):
    """The caller showed no token, or one that is not valid."""


@dataclass(eq=False, kw_only=True)
class Forbidden(RequestError):
    """The caller is known, and may not do this."""


@dataclass(eq=False, kw_only=True)
class TooManyFailures(RequestError):
    """One address showed wrong tokens so often that it has to wait."""

    retry_after_s: int


@dataclass(eq=False, kw_only=True)
class InfrastructureError(AtollError):
    """Nodes, Ray, a disk or the network failed us."""

    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.detail} {self.remedy}".rstrip()


@dataclass(eq=False, kw_only=True)
class ServiceUnreachable(InfrastructureError):
    """The control plane does not answer."""


@dataclass(eq=False, kw_only=True)
class StoreUnavailable(InfrastructureError):
    """The service's database is gone, silent, locked, full or read-only."""


@dataclass(eq=False, kw_only=True)
class TransferError(InfrastructureError):
    """A payload did not come over; what has arrived of it stays usable for the next try."""


@dataclass(eq=False, kw_only=True)
class TransferCancelled(TransferError):
    """Nobody wants this payload any more."""


@dataclass(eq=False, kw_only=True)
class TransferRefused(TransferError):
    """The ticket is of another job, epoch or island, or forged; or what stands in it cannot be."""


@dataclass(eq=False, kw_only=True)
class PayloadWithdrawn(TransferError):
    """No server of the ticket holds the payload."""


@dataclass(eq=False, kw_only=True)
class TransferStalled(TransferError):
    """No byte has moved for ``stall_s`` seconds."""

    stall_s: float
    detail: str = "No byte of it has moved"

    def __str__(self) -> str:
        return f"{self.detail} for {self.stall_s:g} s. Look whether the other end lives and can be reached."


@dataclass(eq=False, kw_only=True)
class DataError(AtollError):
    """A tape or a payload is not what it claims to be."""

    detail: str

    def __str__(self) -> str:
        return self.detail


@dataclass(eq=False, kw_only=True)
class PayloadDamaged(DataError):
    """A payload whose bytes do not have the checksum that its ticket names."""

    payload: str

    def __str__(self) -> str:
        return f"{self.payload}: {self.detail}"


@dataclass(eq=False, kw_only=True)
class InternalError(AtollError):
    """One of our own invariants does not hold. Please report it with the tape."""

    detail: str

    def __str__(self) -> str:
        return f"{self.detail} This is a bug in atoll; please report it with the job's tape."


def disk_remedy(error: OSError) -> str:
    """What to do about a disk that takes nothing, to be gone on with."""
    return "Mount its disk writable" if error.errno == errno.EROFS else "Make room there"


_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
"""Colours and other commands to a terminal, which Ray puts into what it says."""
LINE_CHARACTERS_MAX = 1_000
"""Of what another's error says. It goes into statuses, tables and pages; an error may quote a whole batch."""
_UNSENDABLE = "Original exception details:"
_IN_CREATION = "an error raised in its creation task, "
"""Ray quotes the traceback of an actor that failed to begin, and carries no error with it."""
_OWN_CLASS = re.compile(r"^orchestrator\.errors\.\w+: ")


def origin(error: BaseException) -> BaseException:
    """Return the error itself, or the one that it carries from another process: Ray wraps what an actor raises."""
    while hasattr(error, "as_instanceof_cause") and isinstance(cause := getattr(error, "cause", None), BaseException):
        error = cause
    return error


def in_words(error: BaseException) -> str:
    """Return the error as one line, for a reason, a status or a log. Our own errors speak for themselves.

    All text that is made of an error of Ray's, or of user code, is made here.
    """
    error = origin(error)
    lines = _lines(error)
    if isinstance(error, AtollError):
        return " ".join(lines)
    if _UNSENDABLE in lines:  # Ray could not send the error itself, and quotes its traceback
        return lines[-1]
    if _IN_CREATION in lines[0]:
        return _raised_in_creation(lines)
    return lines[0] if lines[0] == type(error).__name__ else f"{type(error).__name__}: {lines[0]}"


def first_line(error: BaseException) -> str:
    """Return what the error says, for a reason that names its kind already: its first line, or its type's name."""
    lines = _lines(origin(error))
    return _raised_in_creation(lines) if _IN_CREATION in lines[0] else lines[0]


def _raised_in_creation(lines: list[str]) -> str:
    """The error at a traceback's end, with its class; our own errors speak for themselves."""
    return _OWN_CLASS.sub("", lines[-1].rpartition(_IN_CREATION)[2])


def _lines(error: BaseException) -> list[str]:
    text = _ESCAPES.sub("", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return lines if isinstance(error, AtollError) else [_shortened(line) for line in lines]


def _shortened(line: str) -> str:
    return line if len(line) <= LINE_CHARACTERS_MAX else f"{line[:LINE_CHARACTERS_MAX]}…"
