"""The console that all commands draw on: whatever text reaches the terminal through it is text, and no more.

Listings are never cut: on a terminal they are as wide as their ids and numbers need, in a file or pipe as wide as all.
Responsible for: no markup in what is printed (a name may be ``[red]`` or ``[link=…]``), one line in a cell of a table, and
no control character but those of rich itself. Refuses to know what is printed. ``api.commands.common`` has the same for
lines without a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from api.terminal.listing import PROSE_MIN, PROSE_WIDE, width_of
from orchestrator.system import printable


class Screen(Console):
    """Rich's console, of which nothing else is used by commands. ``wide``: prose has more room than the terminal."""

    def __init__(self, *, stderr: bool = False, wide: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)
        self._prose_max = (PROSE_WIDE if wide else PROSE_MIN) if self.is_terminal else None

    def print(self, *drawn: Any, **how: Any) -> None:
        """As rich's, and wide enough for the listings in it."""
        before = self.width
        self.width = max(before, *(width_of(one, self._prose_max) for one in drawn), 1)
        try:
            super().print(*drawn, **how)
        finally:
            self.width = before

    def render_str(self, text: str, **how: Any) -> Text:
        """A cell is measured, and drawn, by this."""
        return super().render_str(printable.line(text), **how)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        """The last place where text and control codes are still told apart."""
        return super()._render_buffer(
            segment if segment.control else segment._replace(text=printable.lines(segment.text)) for segment in buffer
        )
