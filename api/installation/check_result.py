"""What `atoll doctor` says of one thing it looked at: the check, how it stands, what was found, what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class CheckResult:
    check: str
    state: State
    detail: str
    remedy: str = ""
