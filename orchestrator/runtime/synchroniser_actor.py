"""The synchroniser of one job, live: a detached Ray actor around the core.

    links, timers, workshop, commands ──▶ one queue ──▶ pump: driver.step ──▶ interpreter ──▶ links, workshop, controller
                                          stamped                │
                                                                 └──▶ tape, folds

Responsible for: one order of events, stamped on entry; nothing done before it is on the tape; the job's files at its end,
and everything let go. It outlives whoever started it. Refuses to decide (``core``). A bug of ours ends the job loudly:
``status.json`` says so, and ``crash.txt`` tells the story.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray

from orchestrator.accounting import report
from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.config import JobSpec
from orchestrator.core import effects as f
from orchestrator.core import events, invariants
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import CommandId, Instant, IslandId, JobOutcome, JobPhase, NodeGroupId
from orchestrator.errors import Conflict, NotFound, first_line
from orchestrator.runtime import cluster, faults, records
from orchestrator.runtime.controller import CONCURRENCY, Controller
from orchestrator.runtime.interpreter import Interpreter
from orchestrator.runtime.names import controller_name, synchroniser_name
from orchestrator.runtime.payloads import PayloadTable
from orchestrator.runtime.settings import CONTROL_GROUP, GROUP_LABEL, NAMESPACE
from orchestrator.runtime.timers import Timers
from orchestrator.runtime.workshop import Workshop
from orchestrator.tape.driver import Driver
from orchestrator.tape.schema import Header
from orchestrator.tape.storage import TapeWriter

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 30.0

Make = Callable[[Instant], events.Event]


class SynchroniserActor:
    """Made with several threads: status is answered while the pump works."""

    def __init__(
        self, job: str, spec: JobSpec, regions: dict[str, str], run_dir: str, cordoned: dict[str, str]
    ) -> None:
        self._job, self._spec, self._run_dir = job, spec, Path(run_dir)
        self._started_at, self._zero = time.time(), time.monotonic()
        self._policy = spec.policy(regions, spares=True)
        self._entry = threading.Lock()
        self._queue: queue.SimpleQueue[events.Event | BaseException] = queue.SimpleQueue()
        self._state = threading.Lock()  # the pump changes what status reads
        self._commands: dict[str, dict[str, Any]] = {}
        self._core = Synchroniser(self._policy)
        self._goodput, self._statistics = Goodput(self._policy), Statistics(self._policy)
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._tape = TapeWriter(self._run_dir / "tape.jsonl", Header(job, self._policy, self._started_at))
        self._driver = Driver(self._core, (self._goodput, self._statistics), self._tape)
        controller = (
            ray.remote(Controller)
            .options(
                name=controller_name(job),
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=0,
                max_restarts=0,
                max_concurrency=CONCURRENCY,
                label_selector={GROUP_LABEL: CONTROL_GROUP},
            )
            .remote(job, spec)
        )
        self._controller: Any = controller
        payloads = PayloadTable()
        self._workshop = Workshop(job, spec, payloads, self._post, self._queue.put)
        timers = Timers(self._now, lambda timer, serial: self._post(lambda at: events.TimerFired(at, timer, serial)))
        self._interpreter = Interpreter(
            job,
            island_count=len(self._policy.islands),
            controller=controller,
            workshop=self._workshop,
            payloads=payloads,
            timers=timers,
            post=self._post,
            resolve=self._resolve,
            finish=self._finish,
            failed=self._queue.put,
        )
        for group, caller in sorted(cordoned.items()):
            self.set_cordon(f"cordon-{group}-before-the-start", caller, group, cordoned=True)
        for node_group, count in spec.wanted_counts().items():
            self.scale(f"scale-{node_group}-at-the-start", "the specification", node_group, count)
        self._post(events.JobStarted)
        self._workshop.seed()
        threading.Thread(target=self._pump, name="pump", daemon=True).start()

    # ── asked by the control port ─────────────────────────────────────────────────────────────────────────────────

    def ready(self) -> bool:
        return True

    def status(self) -> dict[str, Any]:
        """The job as it stands: ``api.control.StatusRecord``."""
        with self._state:
            return self._status(self._now())

    def command(
        self, kind: str, command: str, caller: str, island: str | None, restart: bool, duration_s: float | None = None
    ) -> None:
        """Put an operator's command into the queue; its outcome appears among the status's commands.

        With ``duration_s`` it is a fault of chaos, and put on the tape as that.
        """
        if kind != "cancel" and island not in {plan.island for plan in self._policy.islands}:
            known = ", ".join(plan.island for plan in self._policy.islands)
            raise NotFound(detail=f"Job {self._job} has no island {island!r}.", remedy=f"Its islands are {known}.")
        if not self._noted(command, kind, island, caller):
            return
        name, whom = CommandId(command), IslandId(island or "")
        if duration_s is not None and not self._injected(kind, name, caller, whom, duration_s):
            return
        makers: dict[str, Make] = {
            "kill": lambda at: events.KillRequested(at, name, caller, whom, restart),
            "drain": lambda at: events.DrainRequested(at, name, caller, whom),
            "readd": lambda at: events.ReaddRequested(at, name, caller, whom),
            "cancel": lambda at: events.CancelRequested(at, name, caller),
        }
        self._post(makers[kind])

    def _injected(self, kind: str, name: CommandId, caller: str, island: IslandId, duration: float) -> bool:
        """Chaos strikes, and the tape says so. True for what is a command of an operator's as well."""
        with self._state:
            incarnation = self._core.state.islands[island].incarnation
        fault = faults.recorded(kind, name, caller, island, incarnation, duration)
        if kind not in faults.SIGNALS:
            self._post(fault)
            return True
        why = faults.send(self._controller, kind, island, incarnation, duration)
        if not why:
            self._post(fault)
        self._resolve(f.ResolveCommand(name, not why, why or f"{island} is told to {kind}"))
        return False

    def save_parameters(self) -> str:
        """Write Θ as it stands into the run folder, for the caller to read and remove; returns the file's name."""
        return self._workshop.save_parameters(self._run_dir)

    def set_cordon(self, command: str, caller: str, node_group: str, cordoned: bool) -> None:
        """Put the cordoning of a node group, or its end, into the queue; its outcome appears as a command's."""
        make = events.CordonRequested if cordoned else events.UncordonRequested
        if self._noted(command, "cordon" if cordoned else "uncordon", None, caller):
            self._post(lambda at: make(at, CommandId(command), caller, NodeGroupId(node_group)))

    def scale(self, command: str, caller: str, node_group: str, count: int) -> None:
        """Put the number of islands that a node group shall have into the queue; its outcome appears as a command's."""
        if self._noted(command, "scale", None, caller):
            name, group = CommandId(command), NodeGroupId(node_group)
            self._post(lambda at: events.ScaleRequested(at, name, caller, group, count))

    def _noted(self, command: str, kind: str, island: str | None, caller: str) -> bool:
        """Whether the command is new. Raises Conflict when the job has ended."""
        if self._core.state.phase is JobPhase.FINISHED:
            raise Conflict(detail=f"Job {self._job} has ended.", remedy="Submit it again to run it once more.")
        with self._state:
            if command in self._commands:
                return False
            noted = {
                "kind": kind,
                "island": island,
                "caller": caller,
                "at": self._now(),
                "accepted": None,
                "detail": "",
            }
            self._commands[command] = noted
            return True

    # ── the pump ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _now(self) -> Instant:
        return time.monotonic() - self._zero

    def _post(self, make: Make) -> None:
        """Stamp an event and queue it. The lock makes the order of stamps the order of the queue."""
        with self._entry:
            self._queue.put(make(self._now()))

    def _pump(self) -> None:
        try:
            while self._core.state.phase is not JobPhase.FINISHED:
                event = self._queue.get()
                if isinstance(event, BaseException):
                    raise event
                with self._state:
                    decided = self._driver.step(event)
                    invariants.check(self._core.state)
                    self._goodput.check()
                if isinstance(event, events.ConnectionLost) and event.dead:
                    self._interpreter.forget(event.island, event.incarnation)
                for effect in decided:
                    self._interpreter.act(effect)
        except Exception as error:
            self._crash(error)

    def _resolve(self, effect: f.ResolveCommand) -> None:
        with self._state:
            if (noted := self._commands.get(effect.command)) is not None:
                noted["accepted"], noted["detail"] = effect.accepted, effect.detail

    def _finish(self, effect: f.FinishJob) -> None:
        """Write the job's files, then let everything go, this actor included."""
        self._interpreter.close()
        self._tape.close()
        facts = {"job": self._job, "outcome": effect.outcome.value, "spec": self._spec.model_dump_json()}
        if self._workshop.seeded:
            records.write_parameters(self._run_dir, self._workshop.parameters(), facts)
        with self._state:
            document = self._report()
            status = self._status(self._now())
        records.write_report(self._run_dir, document)
        records.write_status(self._run_dir, status)
        self._let_go()

    def _crash(self, error: Exception) -> None:
        """The job ends here, as failed. Islands would train on for nothing, so they are let go as well."""
        log.critical("the job cannot go on", exc_info=error)
        story = "".join(traceback.format_exception(error))

        def write_story() -> None:
            (self._run_dir / "crash.txt").write_text(story)

        def write_status() -> None:
            with self._state:
                status = self._status(self._now())
            reason = f"{type(error).__name__}: {first_line(error)} (see crash.txt)"
            over = {"phase": JobPhase.FINISHED, "outcome": JobOutcome.FAILED, "reason": reason}
            records.write_status(self._run_dir, {**status, "view": {**status["view"], **over}})

        try:
            for work in (write_story, self._interpreter.close, self._tape.close, write_status):
                try:
                    work()
                except Exception:  # what broke the job may break its telling; the rest is still to be done
                    log.exception("the end could not be told in full")
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """End all of this job, this actor last. Where the controller is dead or hangs, its actors are ended from here."""
        own = synchroniser_name(self._job)
        try:
            ray.get(self._controller.close.remote(), timeout=CLOSE_TIMEOUT_S)  # usually ends this very process
        except Exception as error:
            log.warning("the controller does not let go: %s", error)
        try:
            cluster.end_actors_of(self._job, but=own)
        finally:
            cluster.end_actor_named(own)

    def _report(self) -> dict[str, Any]:
        facts = {
            "job_id": self._job,
            "name": self._spec.name,
            "started_at": self._started_at,
            "loss_unigram": self._workshop.unigram_loss,
        }
        return report.build(self._policy, self._goodput, self._statistics, facts)

    def _status(self, at: Instant) -> dict[str, Any]:
        view = self._core.view(at)
        statistics = self._statistics.summary(at)
        return {
            "job_id": self._job,
            "name": self._spec.name,
            "started_at": self._started_at,
            "at": at,
            "view": asdict(replace(view, at=at)),
            "goodput": self._goodput.summary(at),
            "statistics": statistics,
            "loss_curve": statistics["loss_curve"],
            "commands": {name: dict(noted) for name, noted in self._commands.items()},
            "unigram_loss": self._workshop.unigram_loss,
            "fragment_parameters": self._workshop.fragment_parameters(),
        }
