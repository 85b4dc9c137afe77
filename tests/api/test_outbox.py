"""Commands between the store and their job: the service is killed, or the job does not answer, at the worst moment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.jobs import background_loop
from api.jobs.control import ControlPort
from api.jobs.outbox import NEVER_REACHED, STRIKE_WITHIN_S, TOO_LATE, UNDECIDED, row_of
from api.jobs.service import Service
from api.schemas import JobState
from api.storage.store import Store
from orchestrator.core import commands
from orchestrator.tape.storage import read_tape
from tests.api.clockwork import Clockwork
from tests.api.installation import Installation
from tests.waiting import wait_until


class Desk:
    """A service that can be killed between any two of its steps, over a store and jobs that outlive it."""

    def __init__(self, installation: Installation) -> None:
        self.installation = installation
        self.folder = installation.folder / "clockwork"
        self.control: ControlPort = Clockwork(self.folder)
        self.store = Store(f"sqlite:///{installation.folder / 'atoll.db'}")
        self.service = self.next_service()
        self.job = self.service.submit(installation.spec(), "me", None).job

    def next_service(self) -> Service:
        """As a process finds things that comes after one that was killed."""
        service = Service(self.control, self.store, self.installation.runs)
        service.resume()
        return service

    def store_only(self, command: commands.Command, **values: Any) -> str:
        """A command as a service leaves it that is killed before it has handed it over."""
        row = row_of(self.job, "me", command)
        for name, value in values.items():
            setattr(row, name, value)
        return self.store.add_command(row).command

    def taken(self) -> dict[str, Any]:
        """What the job knows of commands, besides its own at the start."""
        noted = self.control.status(self.job)["commands"]
        return {name: record for name, record in noted.items() if record["caller"] == "me"}

    def on_tape(self) -> list[str]:
        """The ids of commands on the tape, in order."""
        self.control.status(self.job)
        records = read_tape(self.installation.runs / self.job / "tape.jsonl").records
        return [r.event.command for r in records if getattr(r.event, "caller", "") == "me"]

    def training(self, island: str, incarnation: int = 1) -> bool:
        view = next(i for i in self.control.status(self.job)["view"]["islands"] if i["island"] == island)
        return (view["state"], view["incarnation"]) == ("training", incarnation)

    def switch(self, name: str) -> Path:
        return self.folder / name


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(Installation(tmp_path))
    yield desk
    desk.store.close()


def test_what_a_killed_service_had_only_stored_reaches_the_job_in_order_and_once(desk: Desk) -> None:
    wait_until(lambda: desk.training("asia") and desk.training("europe"))
    stored = [
        desk.store_only(commands.Kill("asia", restart=False)),
        desk.store_only(commands.Readd("asia")),
        desk.store_only(commands.Inject("stop", "europe", 0.1)),
        desk.store_only(commands.Scale("us-east", 1)),
        desk.store_only(commands.Cordon("asia")),
    ]
    service = desk.next_service()
    service.tend()
    service.tend()
    desk.next_service().tend()
    assert list(desk.taken()) == stored
    wait_until(lambda: (service.tend(), all(c.state != "pending" for c in service.commands(desk.job)))[1])
    mine = [command for command in service.commands(desk.job) if command.command in stored]
    assert [command.state for command in mine[:3]] == ["accepted"] * 3
    assert (mine[3].node_group, mine[3].count, mine[3].state) == ("us-east", 1, "accepted")
    assert desk.on_tape() == stored


def test_a_command_that_its_job_does_not_answer_for_waits_and_keeps_its_place(desk: Desk) -> None:
    wait_until(lambda: desk.training("asia"))
    desk.switch("jobs-are-deaf").touch()
    first = desk.service.submit_command(desk.job, commands.Kill("asia", restart=False), "me", "key")
    second = desk.service.submit_command(desk.job, commands.Readd("asia"), "me")
    assert (first.state, second.state) == ("undelivered", "undelivered"), "202: they will be handed over"
    desk.service.tend()
    assert desk.taken() == {}
    desk.switch("jobs-are-deaf").unlink()
    third = desk.service.submit_command(desk.job, commands.Kill("europe"), "me")
    assert list(desk.taken()) == [first.command, second.command, third.command]
    again = desk.service.submit_command(desk.job, commands.Kill("asia", restart=False), "me", "key")
    assert again.command == first.command
    assert desk.on_tape() == [first.command, second.command, third.command]


def test_a_job_that_took_a_command_and_could_not_say_so_does_not_do_it_twice(desk: Desk) -> None:
    wait_until(lambda: desk.training("asia"))
    desk.switch("answers-are-lost").touch()
    kill = desk.service.submit_command(desk.job, commands.Kill("asia"), "me")
    assert kill.state == "undelivered"
    desk.switch("answers-are-lost").unlink()
    wait_until(lambda: desk.training("asia", incarnation=2))
    desk.next_service().tend()
    desk.service.tend()
    assert desk.service.command(desk.job, kill.command).state == "accepted"
    islands = {i["island"]: i["incarnation"] for i in desk.control.status(desk.job)["view"]["islands"]}
    assert islands == {"us-east": 1, "us-west": 1, "europe": 1, "asia": 2}
    assert desk.on_tape() == [kill.command]


def test_what_can_never_be_handed_over_is_refused_with_the_reason(desk: Desk) -> None:
    wait_until(lambda: desk.training("asia"))
    taken = desk.service.submit_command(desk.job, commands.Kill("asia"), "me")
    late = desk.store_only(commands.Kill("europe"))
    undecided = desk.store_only(commands.Kill("europe"), delivered=True)
    desk.control.submit(desk.job, "by-hand", "me", commands.Cancel())
    wait_until(lambda: desk.service.job(desk.job).state == JobState.CANCELLED)
    service = desk.next_service()
    service.tend()
    found = {command.command: (command.state, command.detail) for command in service.commands(desk.job)}
    assert found[taken.command][0] == "accepted"
    assert found[late] == ("refused", NEVER_REACHED)
    assert found[undecided] == ("refused", UNDECIDED)
    assert desk.store.jobs_with_open_commands() == []


def test_a_command_of_another_build_is_refused_with_the_reason_and_those_behind_it_are_done(desk: Desk) -> None:
    wait_until(lambda: desk.training("asia"))
    of_another = desk.store_only(commands.Cancel(), request={"kind": "banish", "island": "asia"})
    kill = desk.store_only(commands.Kill("asia"))
    desk.next_service().tend()
    wait_until(lambda: desk.training("asia", incarnation=2))
    command = desk.service.command(desk.job, of_another)
    assert (command.kind, command.state) == ("banish", "refused")
    assert "no command of the kind 'banish'" in command.detail
    assert list(desk.taken()) == [kill]


def test_a_fault_that_could_not_be_handed_over_in_time_strikes_nobody_later(desk: Desk) -> None:
    wait_until(lambda: desk.training("asia"))
    old = {"requested_at": time.time() - STRIKE_WITHIN_S - 1}
    late = desk.store_only(commands.Inject("kill", "asia"), **old)
    soon = desk.store_only(commands.Inject("kill", "europe"))
    goes_on = desk.store_only(commands.Inject("continue", "asia"), **old)
    struck = desk.store_only(commands.Inject("kill", "us-west"), **old)
    desk.control.submit(desk.job, struck, "me", commands.Inject("kill", "us-west"))
    desk.service.tend()
    assert set(desk.taken()) == {soon, goes_on, struck}
    found = {command.command: (command.state, command.detail) for command in desk.service.commands(desk.job)}
    assert found[late] == ("refused", TOO_LATE)
    assert found[struck][0] != "refused", "it was taken, and only that was not noted"


def test_a_command_that_died_with_the_process_that_took_it_is_handed_over_again(desk: Desk) -> None:
    wait_until(lambda: desk.training("asia"))
    forgotten = desk.store_only(commands.Kill("asia"), delivered=True)
    desk.service.tend()
    desk.service.tend()
    assert list(desk.taken()) == [forgotten]


def test_a_cordon_that_was_only_stored_is_told_once(desk: Desk) -> None:
    wait_until(lambda: desk.training("asia"))
    desk.switch("jobs-are-deaf").touch()
    told = desk.service.cordons.change("asia", "me", cordoned=True)[1]
    assert [row.delivered for row in told] == [False]
    assert desk.service.cordons.change("asia", "me", cordoned=True)[1] == [], "it is on its way"
    desk.service.cordons.change("asia", "me", cordoned=False)
    desk.service.cordons.change("asia", "me", cordoned=True)
    desk.switch("jobs-are-deaf").unlink()
    service = desk.next_service()
    service.tend()
    service.tend()
    assert [record["kind"] for record in desk.taken().values()] == ["cordon", "uncordon", "cordon"]
    wait_until(lambda: desk.control.status(desk.job)["view"]["cordoned"] == ["asia"])


def test_a_job_that_was_silent_when_a_node_group_was_cordoned_is_told_when_it_answers(desk: Desk) -> None:
    desk.switch("jobs-are-silent").touch()
    assert desk.service.cordons.change("asia", "me", cordoned=True)[1] == []
    desk.switch("jobs-are-silent").unlink()
    desk.service.tend()
    assert [record["kind"] for record in desk.taken().values()] == ["cordon"]


def test_a_scale_is_stored_with_its_node_group_and_count(desk: Desk) -> None:
    command = desk.service.submit_command(desk.job, commands.Scale("us-east", 1), "me")
    assert (command.node_group, command.count) == ("us-east", 1)


def test_a_running_service_hands_over_by_itself_what_waits(service: Installation, http: httpx.Client) -> None:
    job = http.post("/v1/jobs", json=service.spec()).json()["job"]
    island = f"/v1/jobs/{job}/islands/asia"
    wait_until(lambda: http.get(island).json()["state"] == "training")
    deaf = service.home.path / "clockwork" / "jobs-are-deaf"
    deaf.touch()
    answer = http.post(f"{island}/kill")
    assert (answer.status_code, answer.json()["state"]) == (202, "undelivered")
    assert "keeps trying to deliver it" in answer.json()["detail"]
    deaf.unlink()
    wait_until(lambda: http.get(answer.headers["Location"]).json()["state"] == "accepted")
    http.post(f"/v1/jobs/{job}/cancel")


def test_a_round_of_tending_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_loop, "EVERY_S", 0.01)
    rounds: list[int] = []

    def fail() -> None:
        rounds.append(len(rounds))
        raise OSError("the disk is full")

    thread = background_loop.BackgroundLoop(fail)
    thread.start()
    wait_until(lambda: len(rounds) > 2)
    thread.stop()
