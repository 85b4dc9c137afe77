"""What a channel is to those who use it. Three things implement it: ``server`` and ``client`` over sockets or a machine's
memory, and ``in_process`` for tests and the laboratory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from orchestrator.channel.client import Reception
from orchestrator.channel.frames import Ticket


class PayloadServer(Protocol):
    """Payloads of one process that others may pull."""

    def serve(self, payload: str, content: memoryview) -> None:
        """Have this content ready under this name, in place of what had it. It must not change until it is withdrawn."""
        ...

    def ticket(self, payload: str, island: str) -> Ticket:
        """A ticket by which this island can pull the payload. Raises PayloadWithdrawn if there is none of this name."""
        ...

    def withdraw(self, payload: str) -> None:
        """Nobody gets it any more. A range that is under way goes to its end."""
        ...

    def close(self) -> None: ...


class PayloadClient(Protocol):
    """Pulls payloads that other processes serve."""

    def pull(
        self,
        ticket: Ticket,
        into: memoryview | None = None,
        *,
        reception: Reception | None = None,
        abandoned: Callable[[], bool] = ...,
    ) -> memoryview:
        """The payload, every range of it verified; in ``into`` if that is passed, which must have its size.

        With a ``reception`` only what is missing there is pulled, and what arrives stays in it whatever happens.
        Raises TransferError, PayloadDamaged; TransferCancelled soon after ``abandoned`` says so.
        """
        ...

    def close(self) -> None: ...
