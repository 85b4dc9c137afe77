"""What documents tell people to type and to open: blocks, commands, links and paths, as data for tests.

Nothing is run here. A command is read by the command line's own parser, so that an option which is gone, or an argument too
many, is found without doing what it says.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import typer

from api.cli import app

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
README, RUNBOOK = ROOT / "README.md", ROOT / "deploy" / "RUNBOOK.md"
TUTORIAL, DECISIONS = DOCS / "tutorial.md", DOCS / "decisions"
OWN_MODEL = DOCS / "guide" / "own-model.md"
PROMPT = "$ "
PROGRAM = "atoll"
ROOT_COMMAND: Any = typer.main.get_command(app)
OPTION = re.compile(r"^\[?(--?[a-z][a-z-]*)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between two fences; ``kind`` is the word behind the first."""

    kind: str
    text: str

    @property
    def commands(self) -> list[str]:
        """What is typed at the prompt, with its comment; a line that ends with a backslash goes on in the next."""
        joined = self.text.replace("\\\n", " ")
        return [line.removeprefix(PROMPT) for line in joined.splitlines() if line.startswith(PROMPT)]


def documents() -> list[Path]:
    """Every Markdown file of the repository, those included that are not committed yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return sorted(ROOT / name for name in listed if (ROOT / name).exists())


def blocks(text: str) -> list[Block]:
    return [Block(kind, body) for kind, body in FENCE.findall(text)]


def prompted(text: str) -> list[list[str]]:
    """The words of every command of ours that is typed at a prompt, from the program's name to where a shell takes over."""
    found = []
    for command in (command for block in blocks(text) for command in block.commands):
        words = shlex.split(command, comments=True)
        if Path(words[0]).name == PROGRAM:
            found.append(list(takewhile(lambda word: word not in (">", "|"), words[1:])))
    return found


def quoted(text: str) -> list[list[str]]:
    """The words of every command of ours that is named between backticks in prose. It may leave arguments out."""
    prose = FENCE.sub("", text)
    return [found.split() for found in re.findall(rf"`(?:\.venv/bin/)?{PROGRAM} ([^`]+)`", prose)]


def headings(text: str) -> set[str]:
    """The headings of a document, as links name them."""
    found = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def parse(words: list[str]) -> None:
    """Read a command as if it were typed, and do nothing. Raises what the command line says of a mistake."""
    command, name, context = ROOT_COMMAND, PROGRAM, None
    try:
        while True:
            context = command.make_context(name, list(words), parent=context)
            if not hasattr(command, "commands"):
                return
            _, (name, *words), _ = command.make_parser(context).parse_args(list(words))
            assert name in command.commands, f"there is no command {name!r}"
            command = command.commands[name]
    except typer.Exit:  # --help: it has been answered
        return


def unknown(words: list[str]) -> list[str]:
    """What the command line does not know of a quoted command: a command's name, or options."""
    command, rest = ROOT_COMMAND, list(words)
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return rest[:1]
        command = command.commands[rest.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    return [option for word in rest for option in OPTION.findall(word) if option not in known]
