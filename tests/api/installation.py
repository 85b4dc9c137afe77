"""An installation of real processes: the command line, and the service under uvicorn on loopback, run by clockwork."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import yaml

from api.client import Client
from api.installation.home import Home
from orchestrator.system import signals
from tests import forked
from tests.waiting import PATIENCE_S, once_answered, wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
CONTROL = "tests.api.clockwork:connect"
JOBS_MAX = 400
"""So that no test waits for the jobs of another; the queue's own tests give theirs."""


SILENT = "has not answered for"
"""What the service says of a synchroniser that did not answer in time. On a busy machine any synchroniser may be late."""


class PatientClient(Client):
    """Reads again what a synchroniser did not answer in time, as a user does who is told so."""

    def _request(self, method: str, path: str, **options: Any) -> httpx.Response:
        if method != "GET":
            return super()._request(method, path, **options)
        return once_answered(lambda: super(PatientClient, self)._request(method, path, **options), SILENT)


class PatientHttp(httpx.Client):
    """Does the same in plain HTTP, and for commands, which are refused with that before they are stored.

    Prints each such answer, so that a test which fails shows them. A job may be stored, so it is submitted once.
    """

    def send(self, request: httpx.Request, *, stream: bool = False, **options: Any) -> httpx.Response:
        if stream or (request.method, request.url.path) == ("POST", "/v1/jobs"):
            return super().send(request, stream=stream, **options)

        def in_time() -> httpx.Response | None:
            answer = super(PatientHttp, self).send(request, **options)
            if answer.status_code != 503 or SILENT not in answer.text:
                return answer
            print(f"asked again: {answer.text}")
            return None

        answer: httpx.Response = wait_until(in_time, f"an answer in time to {request.method} {request.url.path}")
        return answer


class Installation:
    """One home, one runs folder, and the command line as a user types it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = Home(folder / "home")
        self.runs = folder / "runs"
        # where the folders of one session's tests are
        self.roots = ("--checkpoints", str(folder.parent), "--data", str(folder.parent))

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "api.cli", *arguments, "--home", str(self.home.path)]

    def atoll(self, *arguments: str, code: int | None = 0) -> str:
        """What the command printed. Its exit code is checked unless it is None, and that no traceback is shown."""
        done = forked.atoll(*arguments, "--home", str(self.home.path), environment=environment())
        said = done.stdout + done.stderr
        assert code in (None, done.returncode), said
        assert "Traceback" not in said
        return done.stdout if "--json" in arguments and done.returncode == 0 else said

    def up(self, *options: str) -> str:
        return self.atoll(
            "up", "--runs", str(self.runs), "--control", CONTROL, "--jobs-max", str(JOBS_MAX), *self.roots, *options
        )

    def client(self) -> Client:
        """The typed client, with the installation's own token: an admin's, named ``local``."""
        return PatientClient.at(self.home.path)

    def http(self, token: str | None = None, *, patient: bool = True) -> httpx.Client:
        """Plain HTTP, with this token or the installation's own; none at all with the empty one.

        Unless it is ``patient``, a late synchroniser's 503 is an answer.
        """
        address, token = self.home.address(), self.home.token() if token is None else token
        assert address is not None
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return (PatientHttp if patient else httpx.Client)(base_url=address.url, timeout=PATIENCE_S, headers=headers)

    def spec(self, steps: int = 20_000, **changes: Any) -> dict[str, Any]:
        """A synthetic job of four islands; 20 steps take a second, 20,000 outlast any test. Hundreds of them fit."""
        document: dict[str, Any] = {
            "name": "trial",
            "trainer": "learners.synthetic:create",
            "islands": [{"node_group": name, "cpus": 0.01} for name in ("us-east", "us-west", "europe", "asia")],
            "synchroniser": {"fragments": 4, "interval_steps": 8},
            "evaluation": {"every_merges": 8},
            "budget": {"steps": steps},
        }
        return document | changes

    def spec_file(self, **changes: Any) -> str:
        path = self.folder / "job.yaml"
        path.write_text(yaml.safe_dump(self.spec(**changes)))
        return str(path)


def interruptible() -> None:
    """Let signals end a child that is about to start. A shell in the background, or nohup, has it ignore some of them."""
    for number in signals.ENDING:
        signal.signal(number, signal.SIG_DFL)


def environment() -> dict[str, str]:
    return {**os.environ, "COLUMNS": "160", "NO_COLOR": "1"}
