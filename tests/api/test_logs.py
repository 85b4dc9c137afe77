"""What a job's processes said, over REST and the command line: the last lines, what is added, and the next incarnation."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import httpx
import pytest

from api.client import Client
from api.run.folder import LogReader
from orchestrator.errors import NotFound
from orchestrator.system.logbook import Logbook, island_logbook
from tests.api.installation import ROOT, Installation
from tests.waiting import PATIENCE_S, wait_until


def say(book: Logbook, *lines: str) -> None:
    book.path.parent.mkdir(parents=True, exist_ok=True)
    with book.path.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


@pytest.fixture
def book(tmp_path: Path) -> Logbook:
    return island_logbook(tmp_path, "asia", 1)


@pytest.mark.parametrize(("tail", "told"), [(1, "5\n"), (2, "4\n5\n"), (4, "2\n3\n4\n5\n"), (99, "1\n2\n3\n4\n5\n")])
def test_the_last_lines_are_those_of_both_halves_together(book: Logbook, tail: int, told: str) -> None:
    say(book, "1", "2", "3")
    os.replace(book.path, book.older)
    say(book, "4", "5")
    reader = LogReader(book, tail)
    assert reader.read() == told.encode()
    assert reader.read() == b""
    say(book, "6")
    assert reader.read() == b"6\n"
    reader.close()


def test_a_line_without_its_end_is_one_of_the_last_lines(book: Logbook) -> None:
    say(book, "1", "2")
    with book.path.open("a") as file:
        file.write("half")
    reader = LogReader(book, 2)
    assert reader.read() == b"2\nhalf"
    reader.close()


def test_nothing_is_missed_or_read_twice_while_a_logbook_is_cut_short(book: Logbook) -> None:
    say(book, "begin")
    reader, over = LogReader(book, 10), threading.Event()

    def write() -> None:
        for number in range(3000):
            say(book, str(number))
            if number % 100 == 99:  # the reader is never two halves behind, and nearly always within one
                wait_until(lambda number=number: f"\n{number - 99}\n".encode() in b"".join(read))
                os.replace(book.path, book.older)
        over.set()

    read = [reader.read()]
    writer = threading.Thread(target=write)
    writer.start()
    while not over.is_set() or read[-1]:
        read.append(reader.read())
    writer.join()
    reader.close()
    assert b"".join(read).decode().split() == ["begin", *map(str, range(3000))]


def test_the_logs_of_a_job_are_listed_and_read(service: Installation, client: Client, http: httpx.Client) -> None:
    job = client.submit(service.spec())
    listed = client.logs(job.job)
    islands = [("asia", 1), ("europe", 1), ("us-east", 1), ("us-west", 1)]
    assert [(log.source, log.incarnation) for log in listed] == [*islands, ("synchroniser", 1)]
    assert "".join(client.log(job.job, "synchroniser")) == "synchroniser begins\n"

    again = island_logbook(Path(job.run_dir), "asia", 2)
    say(again, "what came before", "ValueError: my own mistake")
    with again.path.open("ab") as file:
        file.write(b"no \xff text\n")
    assert "".join(client.log(job.job, "asia", tail=2)) == "ValueError: my own mistake\nno \ufffd text\n"
    assert "".join(client.log(job.job, "asia", incarnation=1)) == "asia begins\n"
    answer = http.get(f"/v1/jobs/{job.job}/logs/asia")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"

    assert "my own mistake" in service.atoll("logs", job.job, "asia")
    table = service.atoll("logs", job.job)
    assert "synchroniser" in table
    assert "europe" in table


def test_a_log_that_is_not_there_is_told_with_those_that_are(
    service: Installation, client: Client, http: httpx.Client
) -> None:
    job = client.submit(service.spec()).job
    with pytest.raises(NotFound, match=r"no log of atlantis here. There are asia 1, europe 1"):
        list(client.log(job, "atlantis"))
    with pytest.raises(NotFound, match="asia, incarnation 7,"):
        list(client.log(job, "asia", incarnation=7))
    for source in ("..%2f..%2fspec", "%2e%2e%2fasia", "islands%2fasia"):
        assert http.get(f"/v1/jobs/{job}/logs/{source}").status_code == 404
    for wrong in ({"tail": 0}, {"tail": 10_001}, {"incarnation": 0}):
        assert http.get(f"/v1/jobs/{job}/logs/asia", params=wrong).status_code == 422
    assert "no log of atlantis" in service.atoll("logs", job, "atlantis", code=2)


def test_an_island_that_bears_a_services_name_does_not_hide_it(service: Installation, client: Client) -> None:
    islands = [{"node_group": "asia", "cpus": 0.01, "name": "synchroniser"}]
    job = client.submit(service.spec(islands=islands))
    say(island_logbook(Path(job.run_dir), "synchroniser", 5), "an island")
    assert "".join(client.log(job.job, "synchroniser")) == "synchroniser begins\n"


def test_a_followed_log_goes_on_into_the_next_incarnation_and_ends_with_the_job(
    service: Installation, client: Client
) -> None:
    job = client.submit(service.spec())
    first, second = (island_logbook(Path(job.run_dir), "asia", number) for number in (1, 2))
    command = service.command("logs", job.job, "asia", "--follow")
    following = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert following.stdout is not None
    assert following.stdout.readline() == "asia begins\n"
    say(first, "one more")
    assert following.stdout.readline() == "one more\n"
    say(second, "back again")
    assert [following.stdout.readline() for _ in range(3)] == ["\n", "==> asia, incarnation 2 <==\n", "back again\n"]
    client.cancel(job.job)
    wait_until(lambda: client.job(job.job).state.final)
    assert following.wait(timeout=PATIENCE_S) == 0
    following.stdout.close()
