"""A sentence that does not hold, named, so that a failing seed says at once which one it was.

Responsible for: how a checker says so. Refuses to know: any sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.errors import InternalError


@dataclass(eq=False, kw_only=True)
class Violation(InternalError):
    """``invariant`` is the sentence that ought to hold, ``detail`` what was seen instead."""

    invariant: str

    def __str__(self) -> str:
        return f"It does not hold that {self.invariant}: {self.detail}"


def require(holds: bool, invariant: str, detail: object) -> None:
    """Raise ``Violation`` unless it holds. ``detail`` is put into words only then."""
    if not holds:
        raise Violation(invariant=invariant, detail=str(detail))
