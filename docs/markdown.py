"""Formats docstrings and descriptions as Markdown, in lines of the width of our pages."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator

COLUMNS = 110
MADE = "<!-- Made by `make reference` from {}: change the code, not this page. -->"


def paragraphs(text: str) -> Iterator[str]:
    """Yield a docstring as Markdown: paragraphs are wrapped, and indented lines are kept."""
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(text.replace("\b", "")).replace("``", "`"))
    for index, block in enumerate(blocks):
        if index:
            yield ""
        if block.startswith("    "):
            yield from block.splitlines()
        else:
            yield from prose(block)


def prose(text: str, hanging: str = "") -> list[str]:
    flat = " ".join(text.replace("``", "`").split())
    return textwrap.wrap(flat, COLUMNS, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
