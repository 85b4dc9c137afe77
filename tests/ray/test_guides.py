"""Every command that a document prompts for is typed, word for word, against a real service and jobs that train.

`make soak` asks for it: some of these take minutes. Each document has a job of its own, the demo's, submitted anew whenever
it is over; a command that needs what is not there yet is typed again. What this cannot type, ``ELSEWHERE`` names with where
it is run instead, or why it is not.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from api.client import Client
from orchestrator.errors import Conflict, InfrastructureError
from tests.documents import DECISIONS, OWN_MODEL, ROOT, TUTORIAL, blocks, documents
from tests.newcomer import Newcomer
from tests.programs import required
from tests.waiting import PATIENCE_S, wait_until

ELSEWHERE = {
    r"source |(\.venv/bin/)?atoll (up|down|--help)": "the tutorial, of which these are parts",
    r"pip install ": "environments of their own have what it installs (`make torch-test`)",
    r"make ": "CI and developers run these: they are what runs the tests",
    r".*python -m pytest": "parts of `make test`",
    r"kubectl |.*\| kubectl ": "no cluster is here; what is applied passes the schemas (`make kubernetes-check`), and "
    "has the names that are typed (tests/kubernetes)",
    r"docker ": "no engine is here; `make image-check` runs what it would",
    r"atoll join ": "tests/ray/test_departures.py, which has the head and the machines",
    r"atoll compare |atoll train-tape |python -m tests\.bench": "hours; short ones are in tests/laboratory and tests/bench",
    r"(\.venv/bin/)?python -m tests\.swarm": "`make soak`, longer",
    r"atoll export latest --format huggingface": "tests/api/test_export.py, whose job has a decoder; the demo's has none",
    r"atoll set latest cost=": "tests/api/test_cost.py, whose job has prices",
    r"atoll chaos run latest PLAN ": "tests/chaos/test_live.py, which has a plan and a reference",
    r"atoll up --allow|atoll submit JOB\.yaml": "tests/learners, with the model and the trainer that the page shows",
}
"""By a command's beginning, where it is run instead, or why it is not."""
DEMO = ROOT / "deploy/configs/demo.yaml"
ENDLESS = re.compile(r"--follow|--watch|curl -N")
"""Commands that stay. They are interrupted once they have said something."""
ASKS = re.compile(r"atoll delete")
"""Commands that ask whether that is meant."""
PROGRAM = ".venv/bin/python -m api.cli "
ENDED = "after the job's end"
AGAIN_S, STAYS_S = 1.0, 20
INTERRUPTED = (0, 124, 130)
"""Exit codes of a command that stays: it ended by itself, was interrupted and did not say, or said so."""
TEXT, PIECES = "The islands come and go, and {} of them is missed by nobody. ", 400
SPECIFICATION = """name: of-text
model: {preset: nano}
data:
  source: streamed
  sources: [{name: web, files: [data/0.jsonl]}, {name: books, files: [data/1.jsonl]}]
  tokenizer: data/tokenizer.json
  sequence_length: 64
islands: [{node_group: us-east}]
budget: {steps: 10}
"""


def commands_of(path: Path) -> list[str]:
    return [command for block in blocks(path.read_text()) for command in block.commands]


def elsewhere(command: str) -> list[str]:
    return [start for start in ELSEWHERE if re.match(start, command)]


WALKS = {
    path: typed
    for path in documents()
    if path not in (TUTORIAL, OWN_MODEL) and path.parent != DECISIONS
    if (typed := [command for command in commands_of(path) if not elsewhere(command)])
}


@dataclass
class Walk:
    """A document's commands and the job that they are about."""

    newcomer: Newcomer
    client: Client
    jobs: list[str] = field(default_factory=list)

    def submit(self) -> str:
        self.jobs.append(self.client.submit(yaml.safe_load(DEMO.read_text())).job)
        return self.jobs[-1]

    def train(self) -> None:
        """There is a job that trains, and it is the latest."""
        newest, *others = self.client.jobs() or [None]
        if newest is not None and not newest.state.final:
            return
        for found in others:  # they have the room that it needs
            if found is not None and not found.state.final:
                self.cancel(found.job)
        self.submit()

    def end(self) -> str:
        """A job that was cancelled, and so has ended; its id."""
        job = self.jobs[-1] if self.jobs else self.submit()
        self.cancel(job)
        return job

    def cancel(self, job: str) -> None:
        """As soon as its synchroniser hears it: one that was killed is away for a moment."""

        def ended() -> bool:
            with suppress(InfrastructureError, Conflict):
                if not self.client.job(job).state.final:
                    self.client.cancel(job)
                return self.client.wait(job).state.final
            return False

        wait_until(ended, f"the end of {job}", AGAIN_S)

    def queue(self) -> str:
        """A job that waits, because there is no room for it; its id."""
        while not (waiting := self.client.jobs(state="queued")):
            self.submit()
        return waiting[-1].job

    def ready(self, command: str) -> str:
        """The command, once its job is as the document takes it to be; names of the document's are some of here."""
        job = "latest"
        if ENDED in command or "delete JOB" in command:
            job = self.end()
        elif "prioritise JOB" in command:
            job = self.queue()
        else:
            self.train()
        line = command.partition("#")[0].rstrip()
        line = re.sub(r"\bJOB\b", job, line)
        line = re.sub(r"\bNAME\b", "guest", line).replace("/data/", "data/").replace(" job.yaml", " of-text.yaml")
        if ENDLESS.search(line):
            return f"timeout --signal INT {STAYS_S} {line.replace('atoll ', PROGRAM, 1)}"
        return f"yes | {line}" if ASKS.search(line) else line

    def obey(self, command: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            line = self.ready(command)
            code, said = self.newcomer.attempt(line)
            assert "Traceback" not in said, f"$ {line}\n{said}"
            if code == 0 or (line.startswith("timeout") and code in INTERRUPTED and said.strip()):
                return
            assert time.monotonic() < deadline, f"$ {line}\n{said}\nexit code {code}"
            time.sleep(AGAIN_S)

    def leave(self) -> None:
        for found in self.client.jobs():
            if not found.state.final:
                self.cancel(found.job)
        for group in ("us-east", "us-west", "europe", "asia"):
            self.newcomer.attempt(f"atoll uncordon {group}")


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Newcomer]:
    required("curl")
    somebody = Newcomer(tmp_path_factory.mktemp("guides"))
    data = somebody.folder / "data"
    data.mkdir()
    for number in range(2):
        lines = (json.dumps({"text": TEXT.format(piece) * 40, "content": ""}) for piece in range(PIECES))
        (data / f"{number}.jsonl").write_text("\n".join(lines))
    (somebody.folder / "of-text.yaml").write_text(SPECIFICATION)
    try:
        somebody.type(f'atoll() {{ {PROGRAM} "$@"; }}; atoll up')
        somebody.find_the_service()
        yield somebody
    finally:
        somebody.leave()


@pytest.mark.soak("minutes")
@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", WALKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_a_document_works(newcomer: Newcomer, path: Path) -> None:
    with Client.at(newcomer.home.path) as client:
        walk = Walk(newcomer, client)
        try:
            for command in WALKS[path]:
                walk.obey(command)
        finally:
            walk.leave()


def test_what_is_run_elsewhere_is_still_in_a_document() -> None:
    typed = [command for path in documents() if path.parent != DECISIONS for command in commands_of(path)]
    assert [start for start in ELSEWHERE if not any(re.match(start, command) for command in typed)] == []
