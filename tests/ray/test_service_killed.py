"""The service is killed again and again while operators go on sending commands to a job on Ray.

Half of the kills come at moments drawn from a seed, the others as soon as the store holds a command that was not handed over
yet. Operators hold on to what they asked under an ``Idempotency-Key`` until it is answered; of what they asked without one,
and got no answer to, anything may have become, once.
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections import Counter, defaultdict
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx

from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.tape.storage import read_tape
from tests.ray.jobs import synthetic
from tests.ray.reign import Reign
from tests.waiting import PATIENCE_S, wait_until

SEED = 11
KILLS, OPERATORS = int(os.environ.get("ATOLL_SERVICE_KILLS", "2")), 5
"""``make soak`` wants 100."""
KILLED_AFTER_MAX_S = 0.5
THINK_MAX_S = 0.3
ISLANDS = ("us-east", "europe", "asia")


class Operator(Thread):
    """Sends commands until told to stop; remembers what was promised."""

    def __init__(self, reign: Reign, job: str, seed: str, stop: Event) -> None:
        super().__init__(daemon=True)
        self._reign, self._job, self._stop_asked, self._chance = reign, job, stop, random.Random(seed)
        self.promised: list[str] = []
        """Ids of commands answered 202."""
        self.of_key: defaultdict[str, set[str]] = defaultdict(set)
        self.cut = 0
        """Requests that no answer came to."""
        self.trouble: list[str] = []

    def run(self) -> None:
        with self._reign.http() as http:
            while not self._stop_asked.wait(self._chance.uniform(0, THINK_MAX_S)):
                key = secrets.token_hex(8) if self._chance.random() < 0.75 else None
                self._ask(http, *self._next(), key)

    def _next(self) -> tuple[str, dict[str, Any] | None]:
        island = self._chance.choice(ISLANDS)
        kind = self._chance.choices(["kill", "drain", "readd", "stop", "continue"], [2, 1, 4, 4, 4])[0]
        if kind in ("stop", "continue"):
            fault = {"kind": kind, "island": island} | ({"duration_s": 0.05} if kind == "stop" else {})
            return "chaos/faults", fault
        return f"islands/{island}/{kind}", {"restart": self._chance.random() < 0.8} if kind == "kill" else None

    def _ask(self, http: httpx.Client, what: str, body: dict[str, Any] | None, key: str | None) -> None:
        headers = {"Idempotency-Key": key} if key else {}
        while True:
            try:
                answer = http.post(f"/v1/jobs/{self._job}/{what}", json=body, headers=headers)
            except httpx.TransportError:
                self.cut += 1
                if key is None:
                    return
                continue
            if answer.status_code != 202:
                self.trouble.append(f"{what}: {answer.status_code} {answer.text}")
                return
            self.promised.append(answer.json()["command"])
            if key is None:
                return
            self.of_key[key].add(self.promised[-1])
            if self._chance.random() < 0.9:  # now and then an operator asks once more, to be sure
                return


def test_no_command_is_lost_or_done_twice_however_often_the_service_is_killed(reign: Reign) -> None:
    recovery = {"restarts_max": 1000, "backoff_max_s": 0.5}
    spec = synthetic(100_000, ISLANDS, name="reign", recovery=recovery)
    with reign.http() as http:
        job = http.post("/v1/jobs", json=spec).raise_for_status().json()["job"]
        wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["islands_training"] == len(ISLANDS), "they train")
    stop, chance = Event(), random.Random(SEED)
    operators = [Operator(reign, job, f"{SEED}-{number}", stop) for number in range(OPERATORS)]
    for operator in operators:
        operator.start()
    caught = 0
    for number in count():
        if number >= KILLS and caught and any(operator.cut for operator in operators):
            break  # else no request was in flight when it was killed, or none came between storing and handing over
        time.sleep(chance.uniform(0, KILLED_AFTER_MAX_S))
        if number % 2:
            wait_until(reign.undelivered, "a command is on its way", pause_s=0.0)
        reign.kill()
        caught += reign.undelivered() > 0
        reign.succeed()
    wait_until(lambda: len(Lives(reign.runs / job).killed) > len(ISLANDS), "the premise: enough islands were killed")
    stop.set()
    for operator in operators:
        operator.join(PATIENCE_S)

    with reign.http() as http:
        commands = wait_until(lambda: all_decided(http, job), "every command has its outcome")
        wait_until(lambda: Lives(reign.runs / job).killed_are_gone(), "who was killed is gone")
        http.post(f"/v1/jobs/{job}/cancel").raise_for_status()
        wait_until(lambda: http.get(f"/v1/jobs/{job}").json()["state"] == "cancelled", "the end")
        outcomes = {c["command"]: c["state"] for c in http.get(f"/v1/jobs/{job}/commands").json()["commands"]}
    cut = sum(operator.cut for operator in operators)
    print(f"{len(commands)} commands, {cut} requests cut, {caught} kills left some undelivered")
    assert [operator.trouble for operator in operators] == [[]] * OPERATORS
    lives = Lives(reign.runs / job)
    assert lives.died <= lives.killed | lives.stopped, "somebody died of nothing that is on the tape"
    told = told_on_tape(reign.runs / job)
    assert all(len(ids) == 1 for operator in operators for ids in operator.of_key.values()), "one key, two commands"
    promised = {name for operator in operators for name in operator.promised}
    assert promised <= outcomes.keys(), "promised and forgotten"
    assert told == Counter(name for name in outcomes if name in told), "done twice, or done and not known"
    refused_on_the_way = {
        c["command"] for c in commands if c["kind"] in ("stop", "continue") and c["state"] == "refused"
    }
    assert outcomes.keys() - told.keys() == refused_on_the_way, "a fault whose island had no process is not on the tape"
    assert set(outcomes.values()) <= {"accepted", "refused"}


def all_decided(http: httpx.Client, job: str) -> list[dict[str, Any]] | None:
    commands: list[dict[str, Any]] = http.get(f"/v1/jobs/{job}/commands").raise_for_status().json()["commands"]
    return None if any(command["state"] in ("pending", "undelivered") for command in commands) else commands


def told_on_tape(run_dir: Path) -> Counter[str]:
    """How often each operator's command, or fault of chaos, is on the tape."""
    happened = [record.event for record in read_tape(run_dir / "tape.jsonl").records]
    return Counter(event.command for event in happened if hasattr(event, "command"))


class Lives:
    """Which lives of islands were killed and stopped by what was decided, and which have died, by the job's tape."""

    def __init__(self, run_dir: Path) -> None:
        records = read_tape(run_dir / "tape.jsonl").records
        decided = [effect for record in records for effect in record.effects]
        self.killed = {(d.island, d.incarnation) for d in decided if isinstance(d, f.KillIsland)}
        self.stopped = {(d.island, d.incarnation) for d in decided if isinstance(d, f.StopIsland)}
        ends = [record.event for record in records if isinstance(record.event, e.ConnectionLost) and record.event.dead]
        self.died = {(end.island, end.incarnation) for end in ends}

    def killed_are_gone(self) -> bool:
        """One that was draining may have ended before the kill came."""
        return self.killed <= self.died | self.stopped
