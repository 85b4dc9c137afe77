"""docs/guide/own-model.md is typed word for word: three jobs, each with a kill, and what their exports answer.

``make torch-test`` runs this in an environment with torch, transformers and PEFT; elsewhere it skips itself.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.client import Client
from tests.documents import OWN_MODEL, blocks
from tests.newcomer import Newcomer
from tests.waiting import PATIENCE_S

for needed in ("torch", "transformers", "peft"):
    pytest.importorskip(needed, reason=f"needs {needed}: make torch-test has it")

FILE = re.compile(r"# (\S+\.(?:py|yaml))\n")
INSTALLS = "pip install "
UNTIL = "# again, until"
AGAIN_S = 0.5
PROGRAMS = 'atoll() { .venv/bin/python -m api.cli "$@"; }; python() { .venv/bin/python "$@"; }'
SAYS = {
    r"atoll model inspect": r"trainable +yes",
    r"atoll check": r"can be submitted",
    r"atoll submit": r"submitted \S+: 2 islands",
    r"atoll islands": r"(?s)(\btraining\b.*){2}",
    r"atoll kill": r"accepted",
    r"atoll watch": r"completed",
    r"atoll report": r"goodput",
    r"atoll export": r"wrote ",
    r"python ask\.py finished/": r"The capital of France is Paris",
    r"python chat\.py": r"Paris",
}
"""By a command's beginning, what it must print. Each must be on the page; of others the exit code is enough."""


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[Newcomer]:
    somebody = Newcomer(tmp_path)
    yield somebody
    somebody.leave()


@pytest.mark.soak("three live jobs with two islands each")
@pytest.mark.ray
@pytest.mark.timeout(3600)
def test_three_models_go_from_a_folder_to_an_export_that_answers(newcomer: Newcomer) -> None:
    walk = blocks(OWN_MODEL.read_text())
    typed = [command for block in walk for command in block.commands if not command.startswith(INSTALLS)]
    assert [start for start in SAYS if not any(re.match(start, command) for command in typed)] == []
    newcomer.type(PROGRAMS)
    for block in walk:
        if named := FILE.match(block.text):
            (newcomer.folder / named[1]).write_text(block.text)
        for command in block.commands:
            if command.startswith("atoll down"):
                look_back(newcomer)
            if not command.startswith(INSTALLS):
                obey(newcomer, command)
            if command.startswith("atoll up"):
                newcomer.fork_commands()


def obey(newcomer: Newcomer, command: str) -> None:
    """Type it, and again where the page says so, until it says what it must."""
    wanted = next((says for start, says in SAYS.items() if re.match(start, command)), "")
    deadline = time.monotonic() + PATIENCE_S
    while not re.search(wanted, said := newcomer.type(command)):
        assert UNTIL in command, f"$ {command}\n{said}"
        assert time.monotonic() < deadline, f"$ {command}\n{said}"
        time.sleep(AGAIN_S)


def look_back(newcomer: Newcomer) -> None:
    """Three jobs completed, and each lost an island on the way."""
    with Client.at(newcomer.home.path) as client:
        jobs = [client.wait(found.job) for found in client.jobs()]
        assert [job.state for job in jobs] == ["completed"] * 3
        killed = [command for job in jobs for command in client.commands(job.job)]
        assert [(one.kind, one.island, one.state) for one in killed] == [("kill", "europe", "accepted")] * 3
