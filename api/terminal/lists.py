"""A live list: drawn anew as it changes, until whoever watches has seen enough.

Responsible for the three places where a list may go: a terminal (the whole, in place of the last one), a file or pipe for
people (the lines that changed), and one for programs (the whole as a line of JSON). Refuses to know what is listed.

Source: kubectl's `get --watch`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from pydantic import BaseModel
from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.text import Text

from api.terminal.poller import Poller

View = TypeVar("View")
EVERY_S = 1.0


def never(_view: object) -> bool:
    return False


def show(
    poller: Poller[View],
    draw: Callable[[View], RenderableType],
    screen: Console,
    over: Callable[[View], bool] = never,
) -> None:
    """Draw what there is, again whenever it has changed, until it is ``over``. KeyboardInterrupt passes."""
    before: list[str] = []
    while True:
        view = poller()
        drawn = draw(view)
        if poller.note:
            drawn = Group(drawn, Text(poller.note, style="cyan"))
        if screen.is_terminal:
            with screen:  # in one go, so that it does not flicker
                screen.control(Control.home(), Control.clear())
                screen.print(drawn)
        else:
            with screen.capture() as captured:
                screen.print(drawn)
            lines = {" ".join(line.split()): line for line in captured.get().splitlines()}
            screen.file.writelines(f"{line}\n" for words, line in lines.items() if words not in before)
            screen.file.flush()
            before = list(lines)  # by its words: columns may be wider next time
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
    """For programs: the list as one line of JSON, and again whenever it has changed, until it is ``over``.

    With a ``name`` each line is an object that has the list under it, as the API answers.
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
