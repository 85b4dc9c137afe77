"""A control port whose jobs are simulated: the real core and the real folds in the seeded world, with weather.

Time passes faster than outside, so that within seconds there is something of everything to be seen: islands that crash and
come back, payloads that arrive corrupt or twice, catch-ups that fail, commands. Only the journal is a real one, for a
simulated merge needs no disk. Jobs end with the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.accounting.merges import JOURNAL_BOUNDS_S
from orchestrator.accounting.series import Histogram
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.commands import Command
from orchestrator.core.vocabulary import CommandId
from orchestrator.errors import InfrastructureError, NotFound
from orchestrator.parameters import tensors
from orchestrator.parameters.journal import Facts, Journal
from orchestrator.parameters.outer_state import FragmentState
from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan
from orchestrator.specification.config import JobSpec
from orchestrator.specification.memory_budget import NodeMemory
from orchestrator.status import CertificateRecord, Helper, NodeGroupRecord, Shard, StatusDocument, UnseenFile
from tests.harness.carried import add_lines, add_steps
from tests.harness.simulated_job import GROUPS, SimulatedJob, Taken

PACE = 5.0
"""Seconds over there for a second here."""
YEAR_S = 365 * 86400.0
PAST_S = 30.0
"""How old a job is when it is first looked at."""
CRASH_EVERY_S, CRASHES = 5.0, 100
FRAGMENT_PARAMETERS = 25_000
UNSYNCED_MAX = 20
"""Merges that are not on the disk yet: a job's past of many merges is lived through at once."""


def connect(home: Path) -> Voyages:
    return Voyages(home)


class Voyages:
    def __init__(self, home: Path) -> None:
        self._home = home
        self._jobs: dict[str, Voyage] = {}
        self._one_at_a_time = threading.Lock()

    def node_groups(self) -> list[NodeGroupRecord]:
        return GROUPS

    def cordon_nodes(self, names: Collection[str]) -> None:
        """Do nothing: nothing here is placed by node."""

    def unseen_files(self, groups: Collection[str], sizes: Mapping[str, int | None]) -> list[UnseenFile]:
        return []

    def begin(self, runs: Path) -> None:
        """Do nothing: there is one machine."""

    def delete_log(self, job_id: str) -> None:
        pass

    def has_store(self) -> bool:
        return False

    def has_log(self, job_id: str) -> bool:
        return False

    def sweep(self, runs: Path, is_known: Callable[[str], bool], *, again: bool) -> None:
        """Do nothing: there is one machine."""

    def node_memory(self) -> list[NodeMemory]:
        return []

    def certificates(self) -> list[CertificateRecord]:
        return [CertificateRecord(place="head", expires_at=time.time() + YEAR_S, lifetime_s=YEAR_S)]

    def start_job(self, job_id: str, spec: JobSpec, run_dir: Path, *about: Any) -> None:
        with self._one_at_a_time:
            if job_id not in self._jobs:
                self._jobs[job_id] = Voyage(spec, self._home / job_id)

    def status(self, job_id: str) -> StatusDocument:
        with self._one_at_a_time:
            return self._job(job_id).status(job_id)

    def submit(self, job_id: str, command_id: str, caller: str, command: Command) -> None:
        with self._one_at_a_time:
            self._job(job_id).submit(command_id, caller, command)

    def restart_job(self, job_id: str) -> str:
        raise NotFound(detail=f"No synchroniser of job {job_id} runs here.")

    def close(self) -> None:
        pass

    def _job(self, job_id: str) -> Voyage:
        if job_id not in self._jobs:
            raise NotFound(detail=f"No job {job_id} runs here.")
        return self._jobs[job_id]


class Voyage:
    """One simulated job, brought up to the present whenever somebody looks."""

    def __init__(self, spec: JobSpec, folder: Path) -> None:
        islands = list(spec.island_sections())
        crashes = [Fault(n * CRASH_EVERY_S, FaultKind.CRASH, islands[n % len(islands)]) for n in range(1, CRASHES)]
        weather = WorldPlan(
            step_s=(0.05, 0.055, 0.06, 0.08),
            faults=tuple(crashes),
            corrupt=0.02,
            duplicate=0.02,
            catch_up_failure=0.1,
            placement_failure=0.1,
        )
        self._keeping = Keeping(folder)
        self._began = time.time()
        self._job = SimulatedJob(spec, (), PAST_S, weather, (self._keeping,))

    def submit(self, command: str, caller: str, request: Command) -> None:
        self._catch_up()
        self._job.take(Taken(self._job.now, CommandId(command), caller, request))

    def status(self, job_id: str) -> StatusDocument:
        self._catch_up()
        status = self._job.status(job_id, self._began - PAST_S, self._job.now)
        status["statistics"] |= {"journal_seconds": self._keeping.seconds.summary()}
        status["fragment_parameters"] = [FRAGMENT_PARAMETERS] * self._job.policy.fragment_count
        add_lines(status)
        add_steps(status)
        status["disk_trouble"] = status["fenced"] = None
        puts = int(10 * self._job.now)
        status["store"] = {"puts": puts, "put_bytes": 900 * puts, "put_seconds": 0.01 * puts, "trouble": None}
        status["helpers"] = [Helper(name="controller", condition="running", reason="", restarts=0).model_dump()]
        shard = Shard(shard=0, node="merge-a", fragments=[0], byte_count=400, condition="running", reason="")
        status["shards"] = [shard.model_dump()]
        return status

    def _catch_up(self) -> None:
        self._job.resume(PAST_S + PACE * (time.time() - self._began))


SLOW_ROUNDS = 30
"""So long a store is slow before it takes nothing any more, for both alerts to fire."""


class Troubled(Voyages):
    """Jobs in trouble, each in what its name says. What is wrong is in their statuses as a real job would say it."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._begun: dict[str, tuple[str, float]] = {}
        self._simulated: StatusDocument | None = None
        """As one job has been simulated up to now; all start from it, and then stand still but for their trouble."""

    def switched(self, name: str) -> bool:
        return (self._home / name).exists()

    def node_groups(self) -> list[NodeGroupRecord]:
        self._refuse_without_head()
        return [group for group in GROUPS if group["name"] != "asia" or not self.switched("asia-is-gone")]

    def certificates(self) -> list[CertificateRecord]:
        return [CertificateRecord(place="head", expires_at=time.time() + 3600.0, lifetime_s=YEAR_S)]

    def start_job(self, job_id: str, spec: JobSpec, run_dir: Path, *about: Any) -> None:
        with self._one_at_a_time:
            self._simulated = self._simulated or Voyage(spec, self._home / job_id).status(job_id)
            self._begun[job_id] = spec.name, time.time()  # last, because the service asks meanwhile how it goes

    def status(self, job_id: str) -> StatusDocument:
        self._refuse_without_head()
        if job_id not in self._begun:
            raise NotFound(detail=f"No job {job_id} runs here.")
        name, begun_at = self._begun[job_id]
        rounds = int(time.time() - begun_at)
        status = deepcopy(self._simulated)
        assert status is not None
        status["job_id"] = job_id
        if rounds:  # else it was only just submitted
            getattr(self, f"_{name}")(status, rounds)
        return status

    def _lost(self, _status: StatusDocument, _rounds: int) -> None:
        raise NotFound(detail="No such job runs here.")

    def _silent(self, _status: StatusDocument, _rounds: int) -> None:
        raise InfrastructureError(detail="Its synchroniser does not answer.", remedy="Restart it.")

    def _refuse_without_head(self) -> None:
        if self.switched("head-is-gone"):
            raise InfrastructureError(detail="The head does not answer.", remedy="Start it with `atoll up`.")

    def _quorum(self, status: StatusDocument, _rounds: int) -> None:
        status["view"]["pause_reason"] = "1 of the 2 islands that the quorum needs are training"

    def _disk(self, status: StatusDocument, _rounds: int) -> None:
        status["disk_trouble"] = status["view"]["pause_reason"] = "the journal cannot be written: No space left"

    def _store(self, status: StatusDocument, rounds: int) -> None:
        """Its puts take two seconds each, and then none is taken any more."""
        trouble = "the store s3://logs has not answered for 6 s" if rounds > SLOW_ROUNDS else None
        status["store"] = {"puts": 9 + rounds, "put_bytes": 900, "put_seconds": 2.0 * rounds, "trouble": trouble}
        status["view"]["pause_reason"] = trouble

    def _fenced(self, status: StatusDocument, _rounds: int) -> None:
        status["fenced"] = status["view"]["pause_reason"] = "this synchroniser was replaced and has stopped"

    def _limit(self, status: StatusDocument, _rounds: int) -> None:
        status["view"] |= {"pause_reason": "the job is paused: it has cost its limit of 5 USD", "paused": True}

    def _stalled(self, status: StatusDocument, _rounds: int) -> None:
        assert status["view"]["pause_reason"] is None

    def _weary(self, status: StatusDocument, rounds: int) -> None:
        """Whatever a job that still merges may suffer from. ``rounds`` is what counters have risen by."""
        view, statistics, goodput = status["view"], status["statistics"], status["goodput"]
        first, last = view["islands"][0], view["islands"][-1]
        first |= {"overdue_s": 100.0, "flag": "its values are not numbers", "state": "training"}
        last |= {"state": "failed"}
        statistics["synchroniser"] = {"deaths": rounds, "damages": rounds}
        statistics["failures"] = {first["island"]: rounds}
        statistics["traffic"]["merge_failures"] = rounds
        statistics["refusals"] |= {"corrupt": 50 * rounds}
        statistics["traffic"]["admitted"] = {first["island"]: 1000 + 10 * rounds}
        statistics["merges_by_contributors"] = {"0": 10 * rounds}
        journal = statistics["journal_seconds"]
        journal["sum"] = 2.0 * rounds
        for island in goodput["islands"].values():
            island["seconds"] = dict.fromkeys(island["seconds"], 0.0) | {"productive": 1.0, "down": 10.0 * rounds}
        for island in view["islands"][:2]:
            island["state"] = "training"
        view["islands"][2]["state"] = "waiting"
        view["checkpoint"] = {"scheduled": True, "taken_at": None, "failures": rounds}
        status["lines"]["islands"][first["island"]]["trouble"] = "the firewall lets nothing through"
        status["helpers"] = [Helper(name="controller", condition="dead", reason="it died", restarts=1).model_dump()]


def troubled(home: Path) -> Troubled:
    return Troubled(home)


class Keeping:
    """A fold: every merge is kept in a journal, which takes as long as it takes."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder, merges_max=UNSYNCED_MAX)
        self._values = {"w": np.zeros(FRAGMENT_PARAMETERS, np.float32)}
        self._digest = tensors.digest(self._values)
        self.seconds = Histogram(JOURNAL_BOUNDS_S)

    def apply(self, event: e.Event, effects: tuple[f.Effect, ...]) -> None:
        if isinstance(event, e.MergeCompleted):
            began = time.perf_counter()
            facts = Facts(event.fragment, event.version, 0, 1, event.digest, "", (), event.merge_seconds)
            self._journal.append(facts, FragmentState(event.version, self._values, self._values, self._digest))
            self.seconds.observe(time.perf_counter() - began)
