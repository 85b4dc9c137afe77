"""A job around the real core: the core behind the real driver, folds, and a clock that is moved by hand.

The invariants of the core are checked after every event, and if Goodput is among the folds, that no token is lost or
counted twice. Events come from a test (``story``) or from islands (``shell``), which also carry out the effects.
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
    """The core with its driver. ``records`` is the tape so far, unless it goes to a ``sink``. ``count`` steps came
    before.
    """

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
        """Tell the core an event, and return the effects for the caller to carry out."""
        effects = self.driver.step(event)
        invariants.check(self.core.state)
        for account in self._accounts:
            account.check()
        return effects

    def happen(self, kind: Callable[..., e.Event], *facts: Any) -> tuple[Effect, ...]:
        """Tell an event of this kind at the present instant."""
        return self.tell(kind(self.now, *facts))

    def command(self, command: str, request: OperatorCommand, caller: str = "operator") -> tuple[Effect, ...]:
        return self.happen(e.CommandRequested, CommandId(command), caller, request)
