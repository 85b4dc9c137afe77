"""Lists that stay: in a terminal, in a pipe, for programs; they end quietly, and look away while the service is away."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from api.client import Client
from api.terminal.listing import Poller
from orchestrator.errors import ServiceUnreachable
from tests.api.installation import ROOT, Installation, environment, interruptible
from tests.waiting import PATIENCE_S, wait_until


@contextlib.contextmanager
def watching(service: Installation, *arguments: str, stdout: Any = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """The command runs; what it prints comes line by line."""
    with subprocess.Popen(
        service.command(*arguments),
        cwd=ROOT,
        env=environment() | {"TERM": "xterm"},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def interrupted(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Ctrl-C: the exit code, and what it had to say about it."""
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    return process.returncode, said


@pytest.fixture
def job(service: Installation, client: Client) -> str:
    name = client.submit(service.spec()).job
    wait_until(lambda: client.job(name).islands_training == 4)
    return name


def test_in_a_pipe_a_list_goes_on_with_the_lines_that_changed(service: Installation, client: Client, job: str) -> None:
    with watching(service, "islands", job, "--watch", "-o", "wide") as process:
        assert process.stdout is not None
        head = process.stdout.readline().split()
        first = [process.stdout.readline().split()[0] for _ in range(4)]
        assert (head[0], first) == ("island", ["us-east", "us-west", "europe", "asia"])
        client.kill(job, "asia")
        while "1005" not in (line := process.stdout.readline()).split():
            assert line, "it ended"
            assert line.split()[0] in first, "the heading stays the same, and is not said again"
        assert interrupted(process) == (130, "")


def test_for_programs_a_list_is_a_line_for_each_change(service: Installation, client: Client, job: str) -> None:
    with watching(service, "islands", job, "-w", "--json") as process:
        assert process.stdout is not None
        before, after = (json.loads(process.stdout.readline()) for _ in range(2))
        assert [island["island"] for island in after] == ["us-east", "us-west", "europe", "asia"]
        assert sum(i["tokens_total"] for i in after) > sum(i["tokens_total"] for i in before)
        client.cancel(job)
        *_, last = process.stdout.read().splitlines()
        assert {island["state"] for island in json.loads(last)} == {"stopped"}
        assert process.wait(timeout=PATIENCE_S) == 0, "islands are watched to the end of their job"


def test_a_list_of_jobs_goes_on_with_what_is_submitted_later(service: Installation, client: Client, job: str) -> None:
    with watching(service, "jobs", "--watch", "--name", "later", "--json") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"jobs": []}
        client.submit(service.spec(name="later"))
        assert [found["name"] for found in json.loads(process.stdout.readline())["jobs"]] == ["later"]
        assert interrupted(process) == (130, "")


def test_in_a_terminal_a_list_is_drawn_in_place_of_the_last_one(
    service: Installation, client: Client, job: str
) -> None:
    outside, inside = pty.openpty()
    with watching(service, "jobs", "-w", stdout=inside) as process:
        os.close(inside)
        shown = b""
        while shown.count(b"\x1b[H\x1b[2J") < 3:
            shown += os.read(outside, 65536)
        *_, whole, _ = shown.decode().split("\x1b[H\x1b[2J")
        assert job in whole
        assert whole.count("goodput") == 1
        assert interrupted(process) == (130, "")
    os.close(outside)


def test_while_the_service_is_away_the_last_picture_stays_and_says_so() -> None:
    away = ServiceUnreachable(detail="connection refused", remedy="")
    answers: Iterator[Any] = iter([["a"], away, ["b"]])

    def ask() -> list[str]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    look = Poller(ask)
    assert (look(), look.note) == (["a"], None)
    assert look() == ["a"]
    assert look.note is not None
    assert look.note.startswith("no answer for 0 s")
    assert (look(), look.note) == (["b"], None)


def test_a_service_that_never_answered_is_no_empty_list() -> None:
    def ask() -> list[str]:
        raise ServiceUnreachable(detail="connection refused", remedy="")

    with pytest.raises(ServiceUnreachable):
        Poller(ask)()
