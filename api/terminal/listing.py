"""The console of all commands, and its tables, whose ids and numbers are never cut, whatever the terminal's width.

On a terminal only the columns named as *prose* (reasons, folders) wrap, down to ``PROSE_MIN`` characters. In a file or pipe
nothing wraps. A table that needs more room is printed wider than the terminal, which then wraps it: a number on the next
line is better than one with missing digits.

Text that reaches the terminal through a ``Screen`` cannot control the terminal. No markup is interpreted (a name may be
``[red]`` or ``[link=…]``), a table cell is one line, and only rich's own control characters pass. ``api.commands.common``
does the same for plain lines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from orchestrator.system import printable

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
        before = self.width
        self.width = max(before, *(width_of(one, self._prose_max) for one in drawn), 1)
        try:
            super().print(*drawn, **how)
        finally:
            self.width = before

    def render_str(self, text: str, **how: Any) -> Text:
        """Return the text of a cell. Rich measures and draws cells through this."""
        return super().render_str(printable.line(text), **how)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """Make control characters visible in text, at the last point where rich distinguishes it from control codes."""
        return super()._render_buffer(
            segment if segment.control else segment._replace(text=printable.lines(segment.text)) for segment in buffer
        )
