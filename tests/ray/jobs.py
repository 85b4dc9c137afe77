"""Jobs of synthetic islands, and how a test watches one: through the control port and the job's tape."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.accounting.causes import Diagnosis
from orchestrator.accounting.diagnosis import Diagnostician
from orchestrator.accounting.goodput import Goodput
from orchestrator.core import effects, events
from orchestrator.core.commands import Command
from orchestrator.core.messages import CaughtUp, Progress
from orchestrator.core.saving import FragmentRestored, FromJournal, JobResumed, JobSalvaged
from orchestrator.errors import AtollError, DataError, NotFound
from orchestrator.runtime import cluster
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.runtime.groups import DEFAULT_GROUPS
from orchestrator.runtime.settings import CLUSTER_MARKER, synchroniser_name
from orchestrator.tape.reading import begin, parse
from orchestrator.tape.replay import replay
from orchestrator.tape.schema import CONTINUATION_BYTES, Record, continuation_at, decode_line
from orchestrator.tape.storage import read_tape
from tests.harness.reports import of_kind
from tests.waiting import PATIENCE_S, once_answered, wait_until

STEP_S = 0.05
PAUSE_S = 0.2
"""Between two looks at a job: each is work for its synchroniser, or a tape to read."""
BRIEF_S = 0.02
"""Where what is waited for passes soon."""
STEPS_ON = 40
"""Steps by which an island shows that it trains on: several times what may be under way, and two seconds at least."""
EVERY_GROUP = tuple(group.name for group in DEFAULT_GROUPS)
GROUPS = ("us-east", "europe", "asia")
"""Of most tests' jobs: when one dies, two are left, and each has another to ask."""
ENDLESS = 10**12
"""Steps."""
PLUGGED = "tests.ray.plugged:create"
"""A trainer; see there."""


class GrowingTape:
    """A tape that is read again and again while it is written: only what is new is decoded.

    It is read anew, as a whole, when the last line that was read is not where it was, for a synchroniser that came back may
    have cut it off; and when its end is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: list[Record] = []
        self._last_line, self._last_at = b"", 0

    def records(self) -> Sequence[Record]:
        raw = self._lines_from(self._last_at)
        if continuation_at(self._beginning()) is not None:  # read anew each time: the live tests' tapes are short
            self._last_line, self._last_at = b"", 0
            self._records = list(read_tape(self._path).records)
            return self._records
        fresh = self._after_last_line(raw)
        if fresh is not None:
            self._records += fresh
        else:
            self._last_at, raw = 0, self._lines_from(0)
            prefix = begin(str(self._path), raw)
            self._records = list(parse(str(self._path), prefix, raw[prefix.size :]).records)
        self._last_line = raw[raw[:-1].rfind(b"\n") + 1 :]
        self._last_at += len(raw) - len(self._last_line)
        return self._records

    def _after_last_line(self, raw: bytes) -> list[Record] | None:
        """What is new in ``raw``; None where that does not go on from the last line, or is damaged."""
        if not self._last_line or not raw.startswith(self._last_line):
            return None
        try:
            decoded = [decode_line(line) for line in raw[len(self._last_line) :].decode().splitlines()]
        except DataError:
            return None
        return [record for record in decoded if isinstance(record, Record)]

    def _beginning(self) -> bytes:
        with self._path.open("rb") as file:
            return file.read(CONTINUATION_BYTES)

    def _lines_from(self, at: int) -> bytes:
        """Whole ones only; the last may be on its way."""
        with self._path.open("rb") as file:
            file.seek(at)
            raw = file.read()
        return raw[: raw.rfind(b"\n") + 1]


class Job:
    """A running job, watched through the control port."""

    def __init__(self, port: RayControlPort, job_id: str, run_dir: Path, seed: int = 0) -> None:
        self.port, self.id, self.run_dir, self.seed = port, job_id, run_dir, seed
        self.last: dict[str, Any] = {}
        self._tape = GrowingTape(run_dir / "tape.jsonl")

    def status(self) -> dict[str, Any]:
        """Live while it runs, else from its folder. A synchroniser that does not answer in time is asked again."""
        self.last = once_answered(self.seen)
        return self.last

    def seen(self) -> dict[str, Any]:
        """What it answers at once. Raises InfrastructureError where that takes too long."""
        try:
            return self.port.status(self.id)
        except NotFound:
            found: dict[str, Any] = json.loads((self.run_dir / "status.json").read_text())
            return found

    def island(self, name: str) -> dict[str, Any]:
        return next(island for island in self.status()["view"]["islands"] if island["island"] == name)

    def wait_until(self, situation: Callable[[], Any], what: str, pause_s: float = PAUSE_S) -> Any:
        try:
            return wait_until(situation, what, pause_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.story()}") from None

    def story(self) -> str:
        """What is known of the job, for the message of a wait in vain."""
        crash, logs = self.run_dir / "crash.txt", sorted(self.run_dir.rglob("*synchroniser*.log"))
        said = [f"{log}:\n{log.read_text()[-3000:]}" for log in logs]
        broken = crash.read_text() if crash.exists() else "it has not crashed"
        return "\n".join([f"job: {self.last.get('view')}", broken, *said])

    def wait_for_state(self, island: str, *states: str, incarnation: int = 1) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            seen = self.island(island)
            return seen if seen["state"] in states and seen["incarnation"] >= incarnation else None

        return self.wait_until(there, f"{island} in {'/'.join(states)}")

    def wait_for_merge(self, island: str, incarnation: int) -> dict[str, Any]:
        """Until this incarnation's work has reached a merge."""

        def merged() -> dict[str, Any] | None:
            seen = self.island(island)
            if seen["incarnation"] < incarnation or seen["last_merge_at"] is None:
                return None
            since = self.at_of(events.IslandPlaced, island, incarnation)
            return seen if since is not None and seen["last_merge_at"] > since else None

        return self.wait_until(merged, f"a merge with incarnation {incarnation} of {island}")

    def wait_for_end(self) -> dict[str, Any]:
        self.wait_until((self.run_dir / "status.json").exists, "the end")
        assert not (self.run_dir / "crash.txt").exists(), (self.run_dir / "crash.txt").read_text()
        self.last = json.loads((self.run_dir / "status.json").read_text())
        return self.last

    def forget_tape(self) -> None:
        """Read the tape anew: it is another one."""
        self._tape = GrowingTape(self.run_dir / "tape.jsonl")

    def records(self) -> Sequence[Record]:
        """Of its tape, so far."""
        return self._tape.records()

    def events(self, kind: type[Any], island: str) -> list[Any]:
        return [event for event in of_kind((r.event for r in self.records()), kind) if event.island == island]

    def at_of(self, kind: type[Any], island: str, incarnation: int) -> float | None:
        return next((e.at for e in self.events(kind, island) if e.incarnation == incarnation), None)

    def gap_max_s(self, island: str, since: float) -> float:
        """The longest time between two steps of ``island``, by its own clock, in what it reported after ``since``."""
        return max(e.gap_max_seconds for e in self.events(Progress, island) if e.at > since)

    def answers(self) -> bool:
        """Whether its synchroniser does."""
        try:
            self.last = self.seen()
        except AtollError:
            return False
        return True

    def status_once_back(self) -> dict[str, Any]:
        """As soon as its synchroniser answers again."""
        self.wait_until(self.answers, "an answer")
        return self.last

    def restarts(self) -> list[events.SynchroniserRestarted]:
        return [r.event for r in self.records() if isinstance(r.event, events.SynchroniserRestarted)]

    def pid_of_synchroniser(self) -> int:
        import ray

        actor = cluster.actor_named(synchroniser_name(self.id))
        pid: int = ray.get(actor.ray_handle.__ray_call__.remote(lambda _actor: os.getpid()), timeout=PATIENCE_S)
        return pid

    def command(self, request: Command) -> str:
        """Its id, by which the job knows it if it has to be handed over twice."""
        name = uuid.uuid4().hex
        once_answered(lambda: self.port.submit(self.id, name, "test", request))
        return name

    def answer(self, command: str) -> dict[str, Any]:
        """What became of the command, once that is known. Its fault, if it is one, is on the tape soon after."""

        def known() -> dict[str, Any] | None:
            noted: dict[str, Any] = self.status()["commands"][command]
            return noted if noted["accepted"] is not None else None

        answered: dict[str, Any] = self.wait_until(known, "the answer to a command")
        return answered


def pid_of(actor_class: str, home: Path) -> int | None:
    """The process of the only such actor of this home's cluster, if there is one that was not ended."""
    return min(pids_of(actor_class, home), default=None)


def pids_of(actor_class: str, home: Path) -> set[int]:
    """The processes of such actors of this home's cluster that were not ended.

    Whoever wants to catch one in the act has to look often: names first, the costly environment of those that fit only.
    """
    marker, pids = ClusterFile.find(home).id, set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            named = " ".join(process.cmdline()).startswith(f"ray::{actor_class}")
            if named and process.environ().get(CLUSTER_MARKER) == marker:
                pids.add(process.pid)
    return pids


def steps_between(records: Iterable[Record], island: str, since: float, until: float) -> int:
    """Steps of the island between its last reports before these two moments, by the tape: hardly any of one that waits."""
    reports = [one for one in of_kind((record.event for record in records), Progress) if one.island == island]
    before, after = ([one.steps_total for one in reports if one.at <= at] or [0] for at in (since, until))
    return after[-1] - before[-1]


def assert_sound(job: Job) -> None:
    """Replayed; of each fragment versions rise by one, each made of the one before; no token lost or counted twice."""
    tape = read_tape(job.run_dir / "tape.jsonl")
    goodput = Goodput(tape.header.policy)
    assert replay(tape, (goodput,)).exact
    goodput.check()
    versions, digests = [0] * tape.header.policy.fragment_count, {}
    for record in tape.records:
        event = record.event
        if isinstance(event, JobResumed):
            versions = list(event.versions)
        elif isinstance(event, JobSalvaged):
            versions, digests = list(event.versions), dict(enumerate(event.digests))
        elif isinstance(event, (events.MergeCompleted, FragmentRestored)) and record.effects:
            lost = isinstance(event, FragmentRestored) and isinstance(
                event.checkpoint, FromJournal
            )  # what it is made of is
            made_of = event.base_digest if lost else digests.get(event.fragment, event.base_digest)
            assert (event.version, event.base_digest) == (versions[event.fragment] + 1, made_of), event
            versions[event.fragment], digests[event.fragment] = event.version, event.digest
    for tokens in (goodput.summary()["tokens"], job.last["goodput"]["tokens"]):
        assert tokens["trained"] == pytest.approx(tokens["merged"] + tokens["discarded"] + tokens["in_flight"])


def diagnosis_of(job: Job) -> Diagnosis:
    """The diagnosis of the job's tape so far."""
    tape = read_tape(job.run_dir / "tape.jsonl")
    fold = Diagnostician(tape.header.policy)
    for record in tape.records:
        fold.apply(record.n, record.event, record.effects)  # type: ignore[arg-type]  # its header says: a job's tape
    return fold.diagnosis()


def assert_nobody_gave_before_it_had_a_state(job: Job) -> None:
    holding: set[tuple[str, int]] = set()
    for record in job.records():
        if isinstance(record.event, events.IslandReported) and isinstance(record.event.report, CaughtUp):
            holding.add((record.event.island, record.event.incarnation))
        for effect in record.effects:
            if isinstance(effect, effects.AdmitContribution):
                assert (effect.contribution.island, effect.contribution.incarnation) in holding, record


def stop(pid: int) -> None:
    """Stop the process by SIGSTOP, and wait until no thread of it is inside the kernel any more, where it may be writing."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    wait_until(lambda: all(_state_of(task) == "T" for task in tasks.iterdir()), f"{pid} standing still", pause_s=0.01)


def _state_of(task: Path) -> str:
    return (task / "stat").read_text().rpartition(")")[2].split()[0]


def gone(pid: int) -> bool:
    """Whether this process has ended, waited for by its parent or not; it may do so while it is looked at."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def synthetic(steps: int, groups: tuple[str, ...] = GROUPS, **sections: Any) -> dict[str, Any]:
    """A job document: one synthetic island a group, steps of STEP_S."""
    return {
        "name": "test",
        "trainer": "learners.synthetic:create",
        "islands": [{"node_group": group} for group in groups],
        "budget": {"steps": steps},
        **sections,
        # a wide grace window: an island that is a few steps behind on a busy machine still reaches its round
        "synchroniser": {
            "fragments": 4,
            "interval_steps": 16,
            "overlap_steps": 12,
            "grace_cap_steps": 8.0,
            **sections.get("synchroniser", {}),
        },
        "synthetic": {"step_s": STEP_S, **sections.get("synthetic", {})},
    }
