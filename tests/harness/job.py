"""A job around the real core: the real core behind the real driver, folds, and a clock that moves only by hand.

Every event is checked: the core's invariants hold after it, and where Goodput is among the folds no token is lost or
doubled. Refuses to know where events come from (``story``: a test; ``shell``: islands) and who acts on the effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from orchestrator.accounting.goodput import Goodput
from orchestrator.core import events as e
from orchestrator.core import invariants
from orchestrator.core.commands import OperatorCommand
from orchestrator.core.effects import Effect
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import CommandId, Instant
from orchestrator.tape.driver import Driver, Fold, MemorySink, Sink
from orchestrator.tape.schema import Record


class Job:
    """``records`` is the tape so far, unless it goes to a ``sink``; a job that goes on has taken ``count`` steps before."""

    def __init__(
        self, core: Synchroniser, folds: Iterable[Fold] = (), sink: Sink | None = None, count: int = 0
    ) -> None:
        self.core, self.policy = core, core.state.policy
        self.now: Instant = 0.0
        self.records: list[Record] = []
        if sink is None:
            sink = MemorySink()
            self.records = sink.records
        self.driver = Driver(core, folds, sink, count)
        self._accounts = [fold for fold in self.driver.folds if isinstance(fold, Goodput)]

    def tell(self, event: e.Event) -> tuple[Effect, ...]:
        """The core hears of an event; the effects are whoever asks for to carry out."""
        effects = self.driver.step(event)
        invariants.check(self.core.state)
        for account in self._accounts:
            account.check()
        return effects

    def happen(self, kind: Callable[..., e.Event], *facts: Any) -> tuple[Effect, ...]:
        """As ``tell``, at the present instant."""
        return self.tell(kind(self.now, *facts))

    def command(self, command: str, request: OperatorCommand, caller: str = "operator") -> tuple[Effect, ...]:
        return self.happen(e.CommandRequested, CommandId(command), caller, request)
