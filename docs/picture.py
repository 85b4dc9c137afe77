"""Records the real demo for the README: the page while an island is away, in light and dark, and the terminal session.

    python -m docs.picture    runs the demo (some four minutes) and writes docs/pictures

The session is stored twice: as it was typed (``demo.cast``, asciinema's second format, for ``asciinema play``), and as a
drawing (``demo.svg``), which browsers play shortened. Needs Chromium (``deploy/system-packages.sh``).
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from xml.sax.saxutils import escape

from playwright.sync_api import Page, sync_playwright
from rich.ansi import AnsiDecoder
from rich.text import Text

from api.client import Client
from api.installation.home import Home
from orchestrator.errors import AtollError

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
COLUMNS, LINES = 100, 26
TYPED_S, FILMED_S = 2.0, 5.0
"""Seconds between two recorded outputs, and between two drawn frames."""
WINDOW = {"width": 1280, "height": 1240}
SHOWN_AT = 0.45
"""The part of the budget that is trained when the screenshots are taken. The killed island has come back by then."""
Chunk = tuple[float, str]
Frame = tuple[float, list[Text]]


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="atoll-picture-") as folder, ThreadPoolExecutor(1) as beside:
        typed = beside.submit(session, Path(folder))
        photograph(Path(folder) / "home", typed)
        chunks = typed.result()
    header = {"version": 2, "width": COLUMNS, "height": LINES, "title": "make demo"}
    typed_out = ((at, untaken(text)) for at, text in merged(chunks, TYPED_S))
    lines = [json.dumps(header), *(json.dumps([round(at, 2), "o", text]) for at, text in typed_out)]
    (PICTURES / "demo.cast").write_text("\n".join(lines) + "\n")
    (PICTURES / "demo.svg").write_text(drawn(frames(chunks)))
    for path in sorted(PICTURES.iterdir()):
        print(f"{path.stat().st_size:9,} bytes  {path}")


# ── the terminal ──────────────────────────────────────────────────────────────────────────────────────────────────────


def session(folder: Path) -> list[Chunk]:
    """Return what ``atoll demo`` writes to a terminal, with the seconds since its start. Raises SystemExit if it fails."""
    command = [sys.executable, "-m", "api.cli", "demo", "--home", "home", "--runs", "runs"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
    environment["PYTHONPATH"] = str(ROOT)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    began, chunks, rest = time.monotonic(), [(0.0, "$ make demo\r\n")], b""
    while data := read(terminal):
        text, rest = whole_characters(rest + data)
        chunks.append((time.monotonic() - began, text.replace(str(folder), "~").replace(str(ROOT), "~")))
    if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise SystemExit(f"the demo ended with {code}:\n" + "".join(text for _, text in chunks))
    return chunks


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the writer has ended
        return b""


def whole_characters(data: bytes) -> tuple[str, bytes]:
    """Return the text, and the trailing bytes that are the beginning of a character."""
    for cut in range(len(data), max(-1, len(data) - 4), -1):
        try:
            return data[:cut].decode(), data[cut:]
        except UnicodeDecodeError:
            continue
    return data.decode(errors="replace"), b""


def merged(chunks: Sequence[Chunk], apart_s: float) -> list[Chunk]:
    """Merge chunks that are less than ``apart_s`` apart."""
    found: list[Chunk] = []
    for at, text in chunks:
        if found and at - found[-1][0] < apart_s:
            found[-1] = (found[-1][0], found[-1][1] + text)
        else:
            found.append((at, text))
    return found


REDRAWN = re.compile(r"\r?\x1b\[2K(?:\x1b\[1A\x1b\[2K)*")
"""The sequence with which a live display erases itself: its last line, and one more for each line above."""
UP = "\x1b[1A"
CONTROL = re.compile(r"\x1b\[\?\d+[hl]")


def untaken(text: str) -> str:
    """Remove what the text erases itself. Erasing of earlier text stays."""
    kept, at, live = "", 0, False
    for taken in REDRAWN.finditer(text):
        between = text[at : taken.start()]
        if not (live and between.count("\n") == taken.group().count(UP)):
            kept += between + taken.group()
        live, at = True, taken.end()
    return kept + text[at:]


def shown(written: str) -> str:
    """Return what is visible on the screen."""
    while taken := REDRAWN.search(written):
        kept = written[: taken.start()].split("\n")
        kept = kept[: len(kept) - 1 - taken.group().count(UP)]
        written = "".join(f"{line}\n" for line in kept) + written[taken.end() :]
    return written


def frames(chunks: Sequence[Chunk]) -> list[Frame]:
    """Return the screen at regular times, and at the end."""
    found: list[Frame] = []
    written = ""
    for at, text in merged(chunks, FILMED_S):
        written = shown(written + CONTROL.sub("", text))
        screen = list(AnsiDecoder().decode(written.replace("\r\n", "\n")))
        rows = [part for line in screen for part in line.divide(range(COLUMNS, len(line.plain), COLUMNS))]
        found.append((at, rows[-LINES:]))
    return found


# ── the drawing of it ─────────────────────────────────────────────────────────────────────────────────────────────────

FRAME_S, LAST_S = 0.5, 6.0
CELL, ROW, EDGE = 7.8, 17, 14
COLOURS = {1: "#f47067", 2: "#6bc46d", 3: "#daaa3f", 4: "#6cb6ff", 5: "#dcbdfb", 6: "#56d4dd"}
"""The colours of terminals by number. Those above 8 are the same, brighter."""
INK, DIM, GROUND = "#d1d7e0", "#8b949e", "#151b23"


def drawn(film: Sequence[Frame]) -> str:
    """Draw the frames as a looping film. Viewers who prefer no motion see the last frame."""
    width, height = round(2 * EDGE + CELL * COLUMNS), 2 * EDGE + ROW * LINES
    whole = FRAME_S * (len(film) - 1) + LAST_S
    groups, rules = [], []
    for n, (_, lines) in enumerate(film):
        rows = "".join(row(n_line, line) for n_line, line in enumerate(lines) if line.plain.strip())
        groups.append(f'<g class="f" id="f{n}">{rows}</g>')
        first, last = 100 * FRAME_S * n / whole, 100 * FRAME_S * (n + 1) / whole
        end = "" if n == len(film) - 1 else f"{last:.3f}%{{visibility:hidden}}"
        rules.append(f"@keyframes k{n}{{0%{{visibility:hidden}}{first:.3f}%{{visibility:visible}}{end}}}")
        rules.append(f"#f{n}{{animation:k{n} {whole:.1f}s step-end infinite}}")
    still = f".f{{animation:none!important}}#f{len(film) - 1}{{visibility:visible}}"
    style = f"text{{font:13px ui-monospace,Menlo,Consolas,monospace;white-space:pre;fill:{INK}}}.f{{visibility:hidden}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="A terminal in which make demo runs: four islands train, one is killed and comes back.">'
        f"<style>{style}{''.join(rules)}@media (prefers-reduced-motion:reduce){{{still}}}</style>"
        f'<rect width="{width}" height="{height}" rx="8" fill="{GROUND}"/>{"".join(groups)}</svg>\n'
    )


def row(number: int, line: Text) -> str:
    """Draw one line of the screen. Each span begins at its column, whatever the width of the viewer's characters."""
    parts = []
    for span in sorted(spans(line)):
        start, end, colour, bold = span
        text = line.plain[start:end]
        if text.strip():
            weight = ' font-weight="bold"' if bold else ""
            fill = f' fill="{colour}"' if colour != INK else ""
            length = f' textLength="{CELL * len(text):.1f}" lengthAdjust="spacingAndGlyphs"'
            parts.append(f'<tspan x="{EDGE + CELL * start:.1f}"{fill}{weight}{length}>{escape(text)}</tspan>')
    return f'<text y="{EDGE + ROW * (number + 1) - 5}">{"".join(parts)}</text>'


def colour_of(number: int | None) -> str:
    """Return one of 256 colours: the first sixteen by name, the last 24 greys; others are rare."""
    if number is None:
        return INK
    return COLOURS.get(number % 8, INK) if number < 16 else DIM if number >= 232 else COLOURS[6]


def spans(line: Text) -> list[tuple[int, int, str, bool]]:
    """Return runs of characters with the same look: from, until, colour, bold."""
    looks = [(INK, False)] * len(line.plain)
    for span in line.spans:
        style = span.style if not isinstance(span.style, str) else None
        if style is not None:
            colour = colour_of(style.color.number if style.color else None)
            colour = DIM if style.dim and colour == INK else colour
            looks[span.start : span.end] = [(colour, bool(style.bold))] * (min(span.end, len(looks)) - span.start)
    found: list[tuple[int, int, str, bool]] = []
    for at, (colour, bold) in enumerate(looks):
        if found and found[-1][1] == at and found[-1][2:] == (colour, bold):
            found[-1] = (found[-1][0], at + 1, colour, bold)
        else:
            found.append((at, at + 1, colour, bold))
    return found


# ── the page ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def photograph(home: Path, demo: Future[list[Chunk]]) -> None:
    """Take screenshots of the page in light and dark, once the job is far enough. Raises SystemExit if the demo ends
    before.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("chromium is not installed: deploy/system-packages.sh installs it")
    url = wait_for(lambda: trained(home), demo)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=WINDOW, color_scheme=scheme)  # type: ignore[arg-type]
            enter(page, url, (home / "token").read_text().strip())
            page.screenshot(path=PICTURES / ("page.png" if scheme == "light" else "page-dark.png"))
        browser.close()


def enter(page: Page, url: str, token: str) -> None:
    page.goto(url)
    page.get_by_label("Token").fill(token)
    page.keyboard.press("Enter")
    page.locator("body.ready").wait_for()
    page.locator("path.curve.loss").wait_for()
    page.mouse.click(2, 2)


def trained(home: Path) -> str | None:
    """Return the address of the job's page once enough of the budget is trained and every island trains."""
    address = Home(home).address()
    if address is None:
        return None
    try:
        with Client.at(home) as client:
            job = client.job("latest")
    except AtollError:
        return None
    lives = sum(island.incarnation > 1 and island.state == "training" for island in job.islands)
    return f"{address.url}/#{job.job}" if lives and job.tokens_trained > SHOWN_AT * job.token_budget else None


def wait_for(situation: Callable[[], str | None], demo: Future[list[Chunk]]) -> str:
    while not demo.done():
        if answer := situation():
            return answer
        time.sleep(0.5)
    demo.result()
    raise SystemExit("the demo ended before there was anything to see")


if __name__ == "__main__":
    main()
