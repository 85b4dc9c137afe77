"""The console of all commands, and its tables, whose ids and numbers are never cut, whatever the terminal's width.

On a terminal only the columns named as *prose* (reasons, folders) wrap, down to ``PROSE_MIN`` characters. In a file or pipe
nothing wraps. A table that needs more room is printed wider than the terminal, which then wraps it: a number on the next
line is better than one with missing digits.

Text that reaches the terminal through a ``Screen`` cannot control the terminal. No markup is interpreted (a name may be
``[red]`` or ``[link=…]``), a table cell is one line, and only rich's own control characters pass. ``api.commands.common``
does the same for plain lines.

A list may be live, which means drawn again when it changes. ``Poller`` returns the newest answer, or the last one while the
service is away for a while, such as during a restart. A list goes to a terminal (the whole list, in place of the last one),
to a file or pipe for people (the changed lines), or to a program (the whole list as a line of JSON).

Source: kubectl's `get --watch`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.control import Control
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from orchestrator.errors import InfrastructureError
from orchestrator.system import printable

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


PROSE_MIN, PROSE_WIDE = 16, 60
"""The minimum width of a column of prose, and its maximum for wide output."""
PANEL_CHARACTERS = 4
"""The border of a panel and its padding."""


class Listing(Table):
    """``prose`` and ``right`` name columns by their heading. Cells are text."""

    def __init__(
        self, *headings: str, prose: Collection[str] = (), right: Collection[str] = (), **options: Any
    ) -> None:
        super().__init__(**{"box": None, "header_style": "dim", **options})
        for heading in headings:
            is_prose = heading in prose
            self.add_column(
                heading,
                no_wrap=not is_prose,
                overflow="fold",
                min_width=min(PROSE_MIN, max(1, cell_len(heading))) if is_prose else cell_len(heading),
                justify="right" if heading in right else "left",
            )
        self._prose = [heading in prose for heading in headings]
        self._widths = [cell_len(heading) for heading in headings]

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a line of the table."""
        super().add_row(*cells, **options)
        for index, cell in enumerate(cells):
            text = cell.plain if isinstance(cell, Text) else str(cell)
            self._widths[index] = max(self._widths[index], *map(cell_len, text.split("\n")))
            if not self._prose[index]:
                self.columns[index].min_width = self._widths[index]

    def width_with(self, prose_max: int | None) -> int:
        """Return the table's width if columns of prose have at most so many characters; None: as many as they need."""
        cells = (
            width if not is_prose or prose_max is None else min(width, prose_max)
            for width, is_prose in zip(self._widths, self._prose, strict=True)
        )
        _, right, _, left = self.padding
        return sum(cells) + len(self._widths) * (left + right) + 2


def width_of(drawn: RenderableType, prose_max: int | None) -> int:
    """Return the width that the listings in it need; without a bound, also that of the text beside them."""
    match drawn:
        case Listing():
            return drawn.width_with(prose_max)
        case Group():
            return max((width_of(one, prose_max) for one in drawn.renderables), default=0)
        case Panel():
            return width_of(drawn.renderable, prose_max) + PANEL_CHARACTERS
        case Text():
            return cell_len(drawn.plain) if prose_max is None else 0
        case _:
            return 0


class Screen(Console):
    """Rich's console, restricted. ``wide``: columns of prose may exceed the terminal's width."""

    def __init__(self, *, stderr: bool = False, wide: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)
        self._prose_max = (PROSE_WIDE if wide else PROSE_MIN) if self.is_terminal else None

    def print(self, *drawn: Any, **how: Any) -> None:
        """Print as rich does, but wide enough for the listings in it."""
        fixed, (width, height) = (self._width, self._height), self.size
        needed = max(width, *(width_of(one, self._prose_max) for one in drawn), 1)
        self.size = ConsoleDimensions(needed, height)  # of a dumb terminal rich takes a width only with a height
        try:
            super().print(*drawn, **how)
        finally:
            self._width, self._height = fixed

    def render_str(self, text: str, **how: Any) -> Text:
        """Return the text of a cell. Rich measures and draws cells through this."""
        return super().render_str(printable.line(text), **how)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """Make control characters visible in text, at the last point where rich distinguishes it from control codes."""
        return super()._render_buffer(
            segment if segment.control else segment._replace(text=printable.lines(segment.text)) for segment in buffer
        )
