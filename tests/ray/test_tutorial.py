"""A newcomer's walk through docs/tutorial.md, word for word: each block in order, in one shell, with real Ray.

The words are the tutorial's own. What differs from a newcomer's is around them: a folder that looks like a fresh checkout,
so that home and runs are the test's own; jobs that are shorter, the second more so, for nobody watches it to its end;
curl's own settings, which lead the tutorial's port to the one that was free; and once `atoll up` was typed, a shell that
has `atoll` forked, which costs a tenth.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.client import Client
from api.installation.home import DATABASE_VARIABLE, DEFAULT_HOME, TOKEN_VARIABLE, Home
from tests import forked
from tests.documents import ROOT, TUTORIAL, blocks
from tests.programs import required

PORT = 8470
"""The tutorial's."""
UNTIL = "# again, until"
"""What the tutorial says of a command that is to be repeated."""
PATIENCE_S, AGAIN_S = 120.0, 0.5
WHOLE = "budget: {steps: 800}"
"""Forty seconds, as synthetic.yaml has it."""
LONG, SHORT = "budget: {steps: 440}", "budget: {steps: 300}"
"""Of the job that is watched from a shell, whose every command takes a second of its life or more; of the next one."""
SAYS = {
    r"atoll up": r"up at http",
    r"atoll submit": r"submitted synthetic-\S+: 4 islands",
    r"atoll islands": r"(?s)(\btraining\b.*){4}",
    r"atoll chaos kill": r"kill asia of synthetic-\S+: accepted",
    r"atoll watch": r"completed",
    r"atoll explain": r"fragment 0, version 0 to 1(?s:.*)contributor",
    r"atoll report": r"goodput +\d+\.\d % of(?s:.*)report\.html",
    r"atoll replay": r"identical",
    r"curl .*--data-binary": r'"job":"synthetic-',
    r"curl .*/islands +#": r'("state":"training".*){4}',
    r"curl .*/kill$": r'"kind":"kill"',
    r"curl .*/merges/": r'"because":"',
    r"atoll down": r"down",
}
"""By a command's beginning, what it must print. Each must be in the tutorial; of others the exit code is enough."""
PRINTS = re.compile(r"\A(\d+ \d+\.\d+\n)+.+\ncompleted 0\.\d+\n\Z")
"""The Python: losses by version, why a merge closed, how the job ended and with what goodput."""
MARK = "-- exit code "


class Newcomer:
    """Somebody at a shell in a fresh checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, Home(folder / DEFAULT_HOME)
        (folder / ".venv").symlink_to(Path(sys.prefix))
        shutil.copytree(ROOT / "deploy", folder / "deploy")
        self.shorten(WHOLE, LONG)
        secrets = {TOKEN_VARIABLE, DATABASE_VARIABLE}
        self._environment = {name: value for name, value in os.environ.items() if name not in secrets}
        ours = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._environment |= {"PYTHONPATH": ours, "CURL_HOME": str(folder), "COLUMNS": "160", "no_proxy": "127.0.0.1"}
        self._shell = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def shorten(self, before: str, after: str) -> None:
        """Jobs that are submitted from here on take less time."""
        config = self.folder / "deploy/configs/synthetic.yaml"
        text = config.read_text()
        assert before in text
        config.write_text(text.replace(before, after))

    def type(self, command: str) -> str:
        """What the command printed. It must have succeeded."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(f"{{ {command}\n}} </dev/null\nprintf '\\n{MARK}%s\\n' $?\n")
        self._shell.stdin.flush()
        said: list[str] = []
        for line in self._shell.stdout:
            if line.startswith(MARK):
                assert line == f"{MARK}0\n", f"$ {command}\n{''.join(said)}{line}"
                return "".join(said)
            said.append(line)
        raise AssertionError(f"the shell ended at: {command}\n{''.join(said)}")

    def obey(self, command: str) -> str:
        """Type it, and again where the tutorial says so, until it says what it must; that."""
        wanted, deadline = wanted_of(command), time.monotonic() + PATIENCE_S
        while not re.search(wanted, said := self.type(command)):
            assert UNTIL in command, f"$ {command}\n{said}"
            assert time.monotonic() < deadline, f"$ {command}\n{said}"
            time.sleep(AGAIN_S)
        return said

    def run(self, program: str) -> str:
        """What the Python program printed. It must have succeeded."""
        line = [self.folder / ".venv/bin/python", "-c", program]
        done = subprocess.run(line, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def lead_curl_to_the_service(self) -> None:
        address = self.home.address()
        assert address is not None
        port = address.url.rpartition(":")[2]
        (self.folder / ".curlrc").write_text(f'connect-to = "127.0.0.1:{PORT}:127.0.0.1:{port}"\nsilent\n')

    def leave(self) -> None:
        """Nothing is left running, whatever happened."""
        self._shell.communicate(timeout=60)
        done = subprocess.run([sys.executable, "-m", "api.cli", "down"], cwd=self.folder, env=self._environment)
        assert done.returncode == 0


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[Newcomer]:
    required("curl")
    somebody = Newcomer(tmp_path)
    yield somebody
    somebody.leave()


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_tutorial_works_word_for_word(newcomer: Newcomer) -> None:
    walk = blocks(TUTORIAL.read_text())
    typed = [command for block in walk for command in block.commands]
    assert [start for start in SAYS if not any(re.match(start, command) for command in typed)] == []
    assert [block.kind for block in walk].count("python") == 1
    for block in walk:
        if block.kind == "python":
            printed = newcomer.run(block.text)
            assert PRINTS.match(printed), printed
        for command in block.commands:
            if command.startswith("atoll down"):
                look_back(newcomer)
            newcomer.obey(command)
            if command.startswith("atoll up"):
                newcomer.lead_curl_to_the_service()
                newcomer.type(forked.shell_function())
            if command.startswith("atoll watch"):
                newcomer.shorten(LONG, SHORT)


def wanted_of(command: str) -> str:
    return next((says for start, says in SAYS.items() if re.match(start, command)), "")


def look_back(newcomer: Newcomer) -> None:
    """One job by each door; both kills were accepted, and asia came back."""
    with Client.at(newcomer.home.path) as client:
        jobs = [client.wait(found.job) for found in client.jobs()]
        assert [job.state for job in jobs] == ["completed"] * 3
        killed = [command for job in jobs for command in client.commands(job.job)]
        assert [(command.kind, command.island, command.state) for command in killed] == [
            ("kill", "asia", "accepted")
        ] * 2
        lives = {job.job: island.incarnation for job in jobs for island in job.islands if island.island == "asia"}
        assert list(lives.values()) == [2, 2]
