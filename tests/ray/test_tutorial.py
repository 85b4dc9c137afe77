"""A newcomer's walk through docs/tutorial.md, word for word: each block in order, in one shell, with real Ray.

The words are the tutorial's own. Jobs are shorter than a newcomer's, the second more so, for nobody watches it to its end;
what else differs is around the words (``tests/newcomer.py``).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.client import Client
from tests.documents import TUTORIAL, blocks
from tests.newcomer import Newcomer
from tests.programs import required
from tests.waiting import PATIENCE_S

UNTIL = "# again, until"
"""What the tutorial says of a command that is to be repeated."""
AGAIN_S = 0.5
WHOLE = "budget: {steps: 800}"
"""Forty seconds, as synthetic.yaml has it."""
LONG, SHORT = "budget: {steps: 220}", "budget: {steps: 150}"
"""Of the job that is watched from a shell, whose every command takes a second of its life or more; of the next one."""
QUICK, SLOW = "step_s: 0.05", "step_s: 0.1"
"""Half as many steps of twice the length are as much time, and half the work."""
SAYS = {
    r"atoll up": r"running at http",
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
    r"atoll down": r"stopped",
}
"""By a command's beginning, what it must print. Each must be in the tutorial; of others the exit code is enough."""
PRINTS = re.compile(r"\A(\d+ \d+\.\d+\n)+.+\ncompleted 0\.\d+\n\Z")
"""The Python: losses by version, why a merge closed, how the job ended and with what goodput."""


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[Newcomer]:
    required("curl")
    somebody = Newcomer(tmp_path)
    rewrite(somebody, WHOLE, LONG)
    rewrite(somebody, QUICK, SLOW)
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
            obey(newcomer, command)
            if command.startswith("atoll up"):
                newcomer.find_the_service()
                newcomer.fork_commands()
            if command.startswith("atoll watch"):
                rewrite(newcomer, LONG, SHORT)


def rewrite(newcomer: Newcomer, before: str, after: str) -> None:
    """Jobs that are submitted from here on have this in place of that."""
    config = newcomer.folder / "deploy/configs/synthetic.yaml"
    text = config.read_text()
    assert before in text
    config.write_text(text.replace(before, after))


def obey(newcomer: Newcomer, command: str) -> None:
    """Type it, and again where the tutorial says so, until it says what it must."""
    wanted, deadline = wanted_of(command), time.monotonic() + PATIENCE_S
    while not re.search(wanted, said := newcomer.type(command)):
        assert UNTIL in command, f"$ {command}\n{said}"
        assert time.monotonic() < deadline, f"$ {command}\n{said}"
        time.sleep(AGAIN_S)


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
