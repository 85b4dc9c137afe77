"""The calls that a job's synchroniser answers to the control port, and to the job's controller.

``runtime.synchroniser_actor.SynchroniserActor`` implements them and says what each of them does. A service asks without
importing that: it may be of another build than the synchroniser, and needs nothing of a job's machinery.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from orchestrator.status import StatusDocument


class SynchroniserInterface(Protocol):
    def ready(self) -> bool: ...

    def status(self) -> StatusDocument: ...

    def submit(self, command: str, caller: str, document: Mapping[str, Any], /) -> None: ...

    def save_parameters(self) -> str: ...

    def notice(self, island: str, incarnation: int, cause: str, seconds: float | None, /) -> None: ...
