"""A poller of the service: it asks again and again, and bears that no answer comes for the moment.

Responsible for asking, and for the last answer while the service is away, restarting perhaps. Refuses to know what is
asked for, how it is drawn, and when to ask again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from orchestrator.errors import InfrastructureError

View = TypeVar("View")

POLL_S = 0.5
PATIENCE_S = 60.0
"""How long the service may be away before that is an error."""


class Poller(Generic[View]):
    """Each call polls once and returns the newest answer. ``note`` is a remark on it for people, or None.

    ``observer`` gets every new answer; what it returns is the note from then on. Raises what ``ask`` raises, and
    InfrastructureError only when there is no answer yet, or none for PATIENCE_S.
    """

    def __init__(self, ask: Callable[[], View], observer: Callable[[View], str | None] | None = None) -> None:
        self._ask = ask
        self._observer = observer
        self._last: View | None = None
        self._answered_at = time.monotonic()
        self._remark: str | None = None
        self.note: str | None = None

    def __call__(self) -> View:
        try:
            view = self._ask()
        except InfrastructureError as error:
            away_s = time.monotonic() - self._answered_at
            if self._last is None or away_s > PATIENCE_S:
                raise
            self.note = f"no answer for {away_s:.0f} s; what runs goes on without being watched ({error})"
            return self._last
        self._last, self._answered_at = view, time.monotonic()
        if self._observer:
            self._remark = self._observer(view) or self._remark
        self.note = self._remark
        return view
