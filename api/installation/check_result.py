"""The result of one check of `atoll doctor`: the check, its state, the detail, and the remedy."""

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
