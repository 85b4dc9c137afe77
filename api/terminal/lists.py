"""A poller of the service, and live lists that are drawn again when they change.

``Poller`` returns the newest answer, or the last one while the service is away for a while, such as during a restart. A list
goes to a terminal (the whole list, in place of the last one), to a file or pipe for people (the changed lines), or to a
program (the whole list as a line of JSON).

Source: kubectl's `get --watch`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from pydantic import BaseModel
from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.text import Text

from orchestrator.errors import InfrastructureError

View = TypeVar("View")

POLL_S = 0.5
PATIENCE_S = 60.0
"""How long the service may be away before it is an error."""


class Poller(Generic[View]):
    """Each call polls once and returns the newest answer. ``note`` is a remark for people, or None.

    ``observer`` gets every new answer; what it returns becomes the note. Raises what ``ask`` raises, but InfrastructureError
    only if there was no answer yet, or none for PATIENCE_S.
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
            self.note = f"no answer for {away_s:.0f} s; jobs keep running meanwhile ({error})"
            return self._last
        self._last, self._answered_at = view, time.monotonic()
        if self._observer:
            self._remark = self._observer(view) or self._remark
        self.note = self._remark
        return view


EVERY_S = 1.0


def never(_view: object) -> bool:
    return False


def show(
    poller: Poller[View],
    draw: Callable[[View], RenderableType],
    screen: Console,
    over: Callable[[View], bool] = never,
) -> None:
    """Draw the view, and again whenever it has changed, until it is ``over``. KeyboardInterrupt passes."""
    before: list[str] = []
    while True:
        view = poller()
        drawn = draw(view)
        if poller.note:
            drawn = Group(drawn, Text(poller.note, style="cyan"))
        if screen.is_terminal:
            with screen:  # in one write, so that it does not flicker
                screen.control(Control.home(), Control.clear())
                screen.print(drawn)
        else:
            with screen.capture() as captured:
                screen.print(drawn)
            lines = {" ".join(line.split()): line for line in captured.get().splitlines()}
            screen.file.writelines(f"{line}\n" for words, line in lines.items() if words not in before)
            screen.file.flush()
            before = list(lines)  # compared by words: columns may be wider next time
        if over(view):
            return
        time.sleep(EVERY_S)


def emit(
    poller: Poller[View],
    items: Callable[[View], Sequence[BaseModel]],
    write: Callable[[str], None],
    over: Callable[[View], bool] = never,
    name: str | None = None,
) -> None:
    """Write the list as one line of JSON, and again whenever it has changed, until it is ``over``.

    With a ``name`` each line is an object with the list under that name, as in the API's answer.
    """
    before = None
    while True:
        view = poller()
        listed = [item.model_dump(mode="json") for item in items(view)]
        if (line := json.dumps({name: listed} if name else listed)) != before:
            write(line)
            before = line
        if over(view):
            return
        time.sleep(EVERY_S)
