"""Nothing that comes from elsewhere commands a terminal, forges a line, or hides (finding 19)."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from api.client import error_of
from api.terminal.listing import Screen
from orchestrator.errors import TooManyFailures
from orchestrator.system import printable
from orchestrator.system.logbook import write_printable
from tests.api.installation import CONTROL, ROOT, Installation
from tests.waiting import PATIENCE_S, wait_until

HOSTILE = (
    "\x1b]0;PWNED\x07",  # the title
    "\x1b[31mred\x1b[0m",
    "\x1b[2J\x1b[H",  # the screen
    "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]52;c;ZXZpbA==\x07",  # the clipboard
    "\x1bP+q\x1b\\",
    "\x9b31m",  # C1's own introducer
    "\x90x\x9c",
    "over\rwritten",
    "back\b\b\b\bspaced",
    "a\nforged line",
    "a\x0b\x0c\x85\u2028\u2029line",
    "\u202egnirts\u2066\u2069",
    "zero\u200bwidth\ufeff\u2060",
    "soft\xadhyphen",
    "tag\U000e0041",
    "\x00\x7f",
    "\ud800",
    "[red]markup[/red][link=http://evil]x[/link]",
    ":bomb:",
)
MOVES = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\xad\ud800-\udfff]"
)
COLOURS = re.compile("\x1b\\[[0-9;]*m")


@pytest.mark.parametrize("text", HOSTILE)
def test_a_line_stays_a_line_of_visible_characters(text: str) -> None:
    shown = printable.line(text)
    assert len(shown) == len(text)
    assert not MOVES.search(shown)
    assert "\n" not in shown


@given(st.text())
def test_what_is_shown_has_nothing_that_a_terminal_obeys(text: str) -> None:
    hidden = {c for c in printable.line(text) if unicodedata.category(c) in ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")}
    assert hidden <= {"\u200c", "\u200d"}  # some scripts and emoji need these
    assert printable.lines(text).count("\n") == text.count("\n")
    assert printable.line(printable.line(text)) == printable.line(text)


@given(st.text(alphabet=st.characters(exclude_categories=("Cs",))))
def test_json_says_the_same_escaped(text: str) -> None:
    written = printable.json_text(json.dumps({"a": text}, ensure_ascii=False))
    assert json.loads(written) == {"a": text}
    assert not MOVES.search(written)


def test_letters_of_all_scripts_are_left_alone() -> None:
    for text in ("Zürich", "日本", "עברית", "नमस्ते", "می\u200cخواهم", "👩\u200d👩\u200d👧", "–·→▶"):
        assert printable.line(text) == text


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("colours", [False, True])
def test_whatever_is_drawn_is_text(text: str, colours: bool) -> None:
    screen = Screen()
    screen.file, screen._force_terminal, screen.width = io.StringIO(), colours, 200
    table = Table("name", title=Text(text))
    table.add_row(text)
    table.add_row(Text(text, style="red"))
    with Live(table, console=screen, auto_refresh=False, transient=False) if colours else screen:
        screen.print(table)
        screen.print(text)
        screen.print(Panel(Text(text), title=Text(text)))
    drawn = screen.file.getvalue()
    own = re.sub(r"\x1b\[(\d+A|2K|\?25[lh]|1A)|\r", "", COLOURS.sub("", drawn)) if colours else drawn
    assert not MOVES.search(own.replace("\n", ""))
    assert "http://evil" not in drawn or "[link=" in drawn or "]8;;" in drawn.replace("\x1b]8;;", "")
    assert "\x1b]8" not in drawn
    if "[red]" in text:
        assert own.count(text) >= 3


def test_a_cell_is_one_line_however_many_its_text_has() -> None:
    screen = Screen()
    screen.file, screen.width = io.StringIO(), 80
    table = Table("name", "state", box=None)
    table.add_row("a\nb  completed", "failed")
    screen.print(table)
    assert len(screen.file.getvalue().splitlines()) == 2


def calls(path: Path) -> Iterator[tuple[int, str]]:
    """What a module calls that could write to a terminal."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("typer.echo", "click.echo"):
            yield node.lineno, ast.unparse(node)


def test_commands_print_through_one_seam() -> None:
    """A new command that prints by itself would have to escape by itself."""
    direct = re.compile(
        r"^(print|typer\.(echo|secho|style)|click\.(echo|secho)|(sys\.)?std(out|err)(\.buffer)?\.write|"
        r"sys\.std(out|err)(\.buffer)?\.write(lines)?|(rich\.)?print|Console|(rich\.)?console\.Console|os\.write)$"
    )
    seams = {
        "api/commands/common.py": {"typer.echo"},
        "api/commands/records.py": {"sys.stdout.write"},
        "api/installation/home.py": {"os.write"},  # into the lock's file
    }
    found = []
    for path in [ROOT / "api" / "cli.py", *(ROOT / "api").rglob("*.py")]:
        name = str(path.relative_to(ROOT))
        if name in ("api/serve.py", "api/openapi/__main__.py", "api/jobs/autopilot.py"):
            continue  # no command of a user's; what it prints is printable, or JSON for the service
        found += [
            f"{name}:{at} {call}" for at, call in calls(path) if direct.match(call) and call not in seams.get(name, ())
        ]
    assert found == []


def test_a_log_has_a_line_for_each_entry(capsys: pytest.CaptureFixture[str]) -> None:
    root, before = logging.getLogger(), logging.getLogger().handlers[:]
    stream = io.StringIO()
    root.handlers[:] = [logging.StreamHandler(stream)]
    try:
        write_printable("%(levelname)s: %(message)s")
        logging.getLogger("x").warning("job %s of %s", "a\nERROR: forged", "\x1b[2J")
    finally:
        root.handlers[:] = before
    assert stream.getvalue() == "WARNING: job a␊ERROR: forged of ␛[2J\n"


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    made = Installation(tmp_path_factory.mktemp("terminal"))
    made.atoll("up", "--runs", str(made.runs), "--control", CONTROL)
    yield made
    made.atoll("down")


def on_a_terminal(command: list[str]) -> bytes:
    """What a person's terminal would get of it."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs, stdin=theirs, close_fds=True)
    os.close(theirs)
    said = b""
    try:
        while block := os.read(ours, 65536):
            said += block
    except OSError:
        pass  # Linux' way to say that nobody has it open any more
    os.close(ours)
    process.wait(PATIENCE_S)
    return said


def test_the_audit_trail_shows_a_path_and_does_not_obey_it(installation: Installation) -> None:
    path = "/v1/jobs/" + quote("\x1b]0;PWNED\x07\x1b[31mfake\nadmin-line\u202e", safe="") + "/cancel"
    with installation.http() as http:
        http.post(path)
    said = installation.atoll("audit")
    assert "PWNED" in said
    assert not MOVES.search(said.replace("\n", ""))
    assert "admin-line" not in [line.strip() for line in said.splitlines()]
    drawn = on_a_terminal(installation.command("audit"))
    assert b"PWNED" in drawn
    assert b"\x1b]0;" not in drawn
    assert b"\x1b[31mfake" not in drawn
    log = installation.home.log.read_text()
    assert not MOVES.search(log.replace("\n", ""))


def test_a_log_is_shown_escaped_and_piped_as_it_is(installation: Installation) -> None:
    with installation.client() as client:
        job = client.submit(installation.spec()).job
        wait_until(lambda: client.logs(job))
        island = next(log.source for log in client.logs(job) if log.source != "synchroniser")
    path = next((installation.runs / job / "logs" / "islands").glob(f"{island}-*.log"))
    with path.open("a") as log:
        log.write("\x1b]0;PWNED\x07\x1b[2Jlast words\n")
    drawn = on_a_terminal(installation.command("logs", job, island))
    assert b"last words" in drawn
    assert b"\x1b]0;" not in drawn
    assert b"\x1b[2J" not in drawn
    piped = subprocess.run(
        installation.command("logs", job, island), cwd=ROOT, capture_output=True, check=True, timeout=PATIENCE_S
    ).stdout
    assert b"\x1b]0;PWNED\x07\x1b[2Jlast words\n" in piped


def test_errors_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "api.cli", "replay", str(tmp_path / "\x1b]0;PWNED\x07\x1b[2J")]
    drawn = on_a_terminal(command)
    assert b"PWNED" in drawn
    assert b"\x1b]0;" not in drawn


@pytest.mark.parametrize("said", ["9" * 5000, "-1", "1e9", "soon", "\u0663", ""])
def test_a_server_of_somebodys_cannot_break_the_client_by_when_to_come_back(said: str) -> None:
    document = {"type": "urn:atoll:problem:too-many-failures", "title": "t", "status": 429, "detail": "no"}
    answer = httpx.Response(429, json=document, headers=[(b"Retry-After", said.encode())])
    assert isinstance(error := error_of(answer), TooManyFailures)
    assert error.retry_after_s == 0
