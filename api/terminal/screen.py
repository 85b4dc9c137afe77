"""The console for the output of all commands. Text that reaches the terminal through it cannot control the terminal.

No markup is interpreted (a name may be ``[red]`` or ``[link=…]``), a table cell is one line, and only rich's own control
characters pass. Listings are never cut: on a terminal they are as wide as their ids and numbers need, in a file or pipe as
wide as everything. ``api.commands.common`` does the same for plain lines.
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
