"""The synchroniser of one job, live: a detached Ray actor around the core.

    links, timers, shard, commands ──▶ one queue ──▶ pump: driver.step ──▶ interpreter ──▶ links, shard, controller
                                       stamped                │
                                                              └──▶ tape, folds

Responsible for: one order of events, stamped on entry; nothing done before it is on the tape; the job's files at its end,
and everything let go. It outlives whoever started it. Where its process dies, Ray makes it again with the same arguments,
and it goes on from its files (``files``); islands train meanwhile. Refuses to decide (``core``). A bug of ours ends the job
loudly: ``status.json`` says so, and ``crash.txt`` tells the story.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.accounting import report
from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.actors.records import CommandRecord, HelperRecord, LinesRecord, NormsRecord, StatusRecord
from orchestrator.actors.synchroniser import SynchroniserInterface
from orchestrator.chaos.kinds import ISLANDLESS
from orchestrator.checkpoints.resumption import Resumption
from orchestrator.core import effects as f
from orchestrator.core import events
from orchestrator.core.commands import Command, Cordon, Inject, IslandCommand, Scale, island_of, kind_of
from orchestrator.core.vocabulary import (
    CommandId,
    Incarnation,
    Instant,
    IslandId,
    IslandState,
    JobPhase,
    Life,
    NodeGroupId,
)
from orchestrator.errors import Conflict, DataError, Fenced, NotFound, in_words
from orchestrator.host import records
from orchestrator.host import retry as tape_sync
from orchestrator.host.checkpoint_writer import CheckpointWriter
from orchestrator.host.job_context import JobContext, Timers, Undated
from orchestrator.host.line_traffic import by_region, pause_reason
from orchestrator.host.retry import RUN_FOLDER_REFUSES, TAPE_REFUSES, RetryingSink, SnapshotWriter, only_full
from orchestrator.host.state_view import StateView
from orchestrator.parameters.shard import ParameterShard
from orchestrator.runtime import cluster, faults, restart
from orchestrator.runtime.controller import Controller, controller_of
from orchestrator.runtime.evaluation import Evaluation
from orchestrator.runtime.interpreter import Interpreter
from orchestrator.runtime.shard_worker import JobChannel, ShardWorker
from orchestrator.runtime.supervision import Helper, Supervisor
from orchestrator.simulation.advice import advice
from orchestrator.specification.config import JobSpec
from orchestrator.system import logbook
from orchestrator.system.roots import AllowedRoots
from orchestrator.system.run_folder import SNAPSHOT
from orchestrator.tape import codec
from orchestrator.tape.driver import Driver

log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 2.0
"""Longer the pump works on one event only while it waits for the tape's disk."""


class SynchroniserActor:
    """Made with several threads: status is answered while the pump works."""

    def __init__(
        self,
        job: str,
        spec: JobSpec,
        regions: dict[str, str],
        run_dir: str,
        cordoned: dict[str, str],
        roots: AllowedRoots,
    ) -> None:
        self._job, self._spec, self._run_dir = job, spec, Path(run_dir)
        roots = roots.with_run(self._run_dir)
        logbook.keep(logbook.service_logbook(self._run_dir, "synchroniser"))
        log.info("the synchroniser of %s begins", job)
        self._policy = restart.policy_of(spec, regions, self._run_dir)
        self._entry = threading.Lock()
        self._queue: queue.SimpleQueue[events.Event | BaseException] = queue.SimpleQueue()
        self._commands: dict[str, CommandRecord] = {}
        self._noticed: set[Life] = set()
        folds = Goodput(self._policy), Statistics(self._policy)
        resumption = restart.resumption_of(spec, self._run_dir, roots)
        self._files = restart.files_of(job, spec, self._policy, self._run_dir, folds)
        core, past = self._files.core, self._files.past
        self._state = StateView(core)
        goodput, statistics = self._files.folds  # these two, or a snapshot's of the same kinds
        assert isinstance(goodput, Goodput)
        assert isinstance(statistics, Statistics)
        self._goodput, self._statistics = goodput, statistics
        self._started_at, self._zero = restart.clock(self._files, self._run_dir)
        self._posted = past.count if past else 0
        self._retrier, self._tape_sync = tape_sync.tape_sync_of(spec, self._files.tape)
        sink = RetryingSink(self._files.tape, self._retrier, self._files.journal.settle)
        self._driver = Driver(core, (self._files.pending, *self._files.folds), sink, self._posted)
        every = spec.synchroniser.durability.snapshot_every_records
        self._snapshots = SnapshotWriter(self._run_dir / SNAPSHOT, self._files.tape, past.before if past else 0, every)
        self._supervisor = Supervisor("helpers")
        self._controller = self._supervisor.add(
            Helper(
                "controller",
                lambda: controller_of(job, spec, run_dir, roots),
                on_made=lambda: restart.introduce(self._state, self._interpreter, self._controller),
                ask=Controller.helpers,
            )
        )
        epoch, retry = self._files.epoch, self._retrier.until_done
        context = JobContext(job, spec, self._run_dir, roots, epoch, self._now, self._post, self._queue.put)
        self._lines = context.lines
        shard = ParameterShard(self._files.journal, epoch, retry)
        self._shard = ShardWorker(context, shard, JobChannel(context), cluster.node_memory)
        self._evaluation = Evaluation(context, self._shard, self._supervisor)
        timers = Timers(self._now, lambda timer, serial: self._post(lambda at: events.TimerFired(at, timer, serial)))
        self._interpreter = Interpreter(
            context,
            island_count=len(self._state.island_ids),
            controller=self._controller,
            shard=self._shard,
            evaluation=self._evaluation,
            timers=timers,
            durable_count=self._tape_sync.durable_count,
            resolve=self._resolve,
            finish=self._finish,
            checkpoints=CheckpointWriter(
                context,
                resumption,
                self._state,
                self._goodput.ledger,
                self._shard.cut,
                lambda: retry(TAPE_REFUSES, self._files.tape.sync),
            ),
        )
        self._chaos = faults.Chaos(self._controller, self._interpreter, self._post, self._resolve, self._incarnation_of)
        if past is not None:
            self._commands = restart.commands(past)
        self._last_status = self._status(self._now())
        if self._state.phase is JobPhase.FINISHED:
            threading.Thread(target=self._finish, name="pump", daemon=True).start()
            return
        for make in self._files.first_events:
            self._post(make)
        if not self._files.started:
            self._begin(cordoned, resumption)
        if self._files.outer is not None:
            self._shard.recover(self._files)
        elif resumption is not None:
            self._shard.resume(resumption)
        else:
            self._shard.seed(self._evaluation)
        self._evaluation.measure_unigram()
        reconnect: Callable[[], None] | None = None
        if past is not None:
            reconnect = partial(restart.reconnect, past, self._state, self._interpreter, timers, self._controller)
        self._supervisor.begin()
        threading.Thread(target=self._pump, args=(reconnect,), name="pump", daemon=True).start()

    def _begin(self, cordoned: dict[str, str], resumption: Resumption | None) -> None:
        if resumption is not None:
            names = frozenset(plan.island for plan in self._policy.islands)
            self._post(lambda at: resumption.event(at, names))
        for group, caller in sorted(cordoned.items()):
            self._submit(CommandId(f"cordon-{group}-before-the-start"), caller, Cordon(NodeGroupId(group)))
        for node_group, count in self._spec.wanted_counts().items():
            command = CommandId(f"scale-{node_group}-at-the-start")
            self._submit(command, "the specification", Scale(NodeGroupId(node_group), count))
        self._post(events.JobStarted)

    # ── called by the control port ────────────────────────────────────────────────────────────────────────────────

    def ready(self) -> bool:
        return True

    def status(self) -> StatusRecord:
        """The job as it stands, or stood when the tape could last be written."""
        with self._state.unchanged(STATUS_TIMEOUT_S) as held:
            if held:
                self._last_status = self._status(self._now())
        helpers: list[HelperRecord] = [*self._supervisor.records(), *(self._controller.said or ())]
        view, trouble, lines = self._last_status["view"], self._retrier.trouble, self._line_records()
        return self._last_status | {
            "disk_trouble": trouble,
            "view": view | {"pause_reason": trouble or view["pause_reason"] or self._line_trouble(view, lines)},
            "lines": lines,
            "helpers": helpers,
        }

    def _line_trouble(self, view: Mapping[str, Any], lines: LinesRecord) -> str | None:
        if view["phase"] != JobPhase.RUNNING:
            return None
        training = [island["island"] for island in view["islands"] if island["state"] == IslandState.TRAINING]
        return pause_reason(lines["islands"], training, self._policy.quorum)

    def submit(self, command: str, caller: str, document: Mapping[str, Any]) -> None:
        """Queue the command that ``document`` is the plain form of; its outcome appears among the status's commands.

        Raises Conflict, and does nothing, for one that this build does not know, and when the job has ended; NotFound for an
        island that the job has not.
        """
        try:
            request = codec.decode_command(document)
        except DataError as error:
            detail = f"The synchroniser of job {self._job} cannot carry it out: {error}"
            raise Conflict(
                detail=detail, remedy="It is of another build than the service; its job trains on."
            ) from error
        self._submit(CommandId(command), caller, request)

    def save_parameters(self) -> str:
        """Write Θ as it stands into the run folder, for the caller to read and remove; returns the file's name."""
        if not self._shard.seeded:
            raise Conflict(detail=f"Job {self._job} has no parameters yet.", remedy="Ask again once it trains.")
        parameters, versions = self._shard.parameters()
        facts = {"job": self._job, "versions": ",".join(map(str, versions)), "spec": self._spec.model_dump_json()}
        name = f"parameters-{uuid.uuid4().hex}.safetensors"
        records.write_parameters(self._run_dir, parameters, facts, name)
        return name

    def notice(self, island: str, incarnation: int, cause: str, seconds: float | None) -> None:
        """A node of this life is about to go, in so many seconds. Called by the controller, again and again; heard once."""
        life = (IslandId(island), Incarnation(incarnation))
        with self._state.unchanged():
            if life in self._noticed or self._state.phase is JobPhase.FINISHED:
                return
            self._noticed.add(life)
        log.warning("%s.%s is on a node that is about to go: %s", island, incarnation, cause)
        self._post(lambda at: events.NoticeReceived(at, *life, cause, seconds))

    def _submit(self, command: CommandId, caller: str, request: Command) -> None:
        names, island = self._state.island_ids, island_of(request)
        islandless = isinstance(request, Inject) and request.fault in ISLANDLESS
        if isinstance(request, IslandCommand | Inject) and not islandless and island not in names:
            remedy = f"Its islands are {', '.join(names)}."
            raise NotFound(detail=f"Job {self._job} has no island {island!r}.", remedy=remedy)
        if isinstance(request, Inject) and request.fault not in faults.NAMES:
            detail = f"The synchroniser of job {self._job} knows no fault {request.fault!r}."
            raise Conflict(detail=detail, remedy=f"It knows {', '.join(sorted(faults.NAMES))}.")
        if not self._noted(command, caller, request):
            return
        for_the_core = self._chaos.inject(command, caller, request) if isinstance(request, Inject) else request
        if for_the_core is not None:
            self._post(lambda at: events.CommandRequested(at, command, caller, for_the_core))

    def _noted(self, command: str, caller: str, request: Command) -> bool:
        """Whether the command is new. Raises Conflict when the job has ended."""
        if self._state.phase is JobPhase.FINISHED:
            raise Conflict(detail=f"Job {self._job} has ended.", remedy="Submit it again to run it once more.")
        record = restart.command_record(kind_of(request), island_of(request), caller, self._now())
        with self._state.unchanged():
            return self._commands.setdefault(command, record) is record

    # ── the pump ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _now(self) -> Instant:
        return time.monotonic() - self._zero

    def _post(self, undated: Undated) -> int:
        """Stamp an event and queue it. The lock makes the order of stamps that of the queue, and of the records."""
        with self._entry:
            self._queue.put(undated(self._now()))
            self._posted += 1
            return self._posted

    def _pump(self, reconnect: Callable[[], None] | None) -> None:
        try:
            if reconnect is not None:
                self._go_on(reconnect)
            while self._state.phase is not JobPhase.FINISHED:
                for effect in self._step():
                    self._interpreter.act(effect)
        except Fenced as error:  # it was cut off, and replaced: what it has is not its own any more
            log.critical("this synchroniser steps aside: %s", error)
            self._close()
            self._files.tape.let_go()
        except Exception as error:
            close = (self._close, self._files.tape.close)
            restart.crash(self._job, self._run_dir, error, close, lambda: self._status(self._now()))

    def _go_on(self, reconnect: Callable[[], None]) -> None:
        """Islands hear of this epoch once the tape has it: a life that died sooner leaves its number to the next one, and
        two lives of one number would be one to islands, with the certificates and the requests of either.
        """
        decided = [effect for _ in self._files.first_events for effect in self._step()]
        self._retrier.until_done(TAPE_REFUSES, self._files.tape.sync)
        reconnect()
        for effect in decided:
            self._interpreter.act(effect)

    def _step(self) -> Sequence[f.Effect]:
        """Have the next event decided on and written; what was decided is for the caller to have done."""
        event = self._queue.get()
        if isinstance(event, BaseException):
            raise event
        with self._state.changing():
            decided = self._driver.step(event)
            self._state.check()
            self._goodput.check()
            self._snapshots.consider(self._driver, event.at)
        faults.kill_own_process(event)
        if isinstance(event, events.ConnectionLost) and event.dead:
            self._interpreter.forget(event.island, event.incarnation)
        return decided

    def _close(self) -> None:
        self._supervisor.close()
        self._retrier.close()
        self._tape_sync.close()
        self._interpreter.close()

    def _resolve(self, effect: f.ResolveCommand) -> None:
        with self._state.unchanged():
            if (noted := self._commands.get(effect.command)) is not None:
                noted["accepted"], noted["detail"] = effect.accepted, effect.detail

    def _finish(self, effect: f.FinishJob | None = None) -> None:
        """Write the job's files, then end every actor of the job, this one included. A job that has ended is ended again."""
        if effect is not None:
            log.info("the job ends as %s: %s", effect.outcome, effect.reason)
        self._retrier.until_done(TAPE_REFUSES, self._files.tape.close)
        if records.ended_as(self._run_dir, self._job):
            self._close()
            restart.end_job(self._job)
            return
        problems = [self._left("its parameters", self._leave_parameters), self._left("its report", self._leave_report)]
        with self._state.unchanged():
            status = self._status(self._now())
        view = status["view"]
        status["view"] = view | {"reason": "; ".join(reason for reason in (view["reason"], *problems) if reason)}
        self._left("its final state", lambda: records.write_status(self._run_dir, status))
        self._close()
        if not problems[0]:  # else the journal is all that there is of Θ
            for what, work in (("journal", self._files.journal.clear), ("snapshot", self._snapshots.close)):
                try:
                    work()
                except Exception:  # it takes room, and nothing rests on it
                    log.exception("the %s cannot be removed", what)
        restart.end_job(self._job)

    def _left(self, what: str, work: Callable[[], None]) -> str:
        """``work`` is done, once a full disk has room again; else why it could not be: no reason to call the job failed."""
        try:
            self._retrier.until_done(RUN_FOLDER_REFUSES, lambda: only_full(work))
        except Exception as error:
            log.exception("%s could not be written", what)
            return f"{what} could not be written ({in_words(error)})"
        return ""

    def _leave_parameters(self) -> None:
        outcome = self._state.outcome
        assert outcome is not None
        facts = {"job": self._job, "outcome": outcome.value, "spec": self._spec.model_dump_json()}
        if self._files.outer is not None:  # it ended in an earlier life
            records.write_parameters(self._run_dir, self._files.outer.parameters(), facts)
        elif self._shard.seeded:
            parameters, _ = self._shard.parameters()
            records.write_parameters(self._run_dir, parameters, facts)

    def _leave_report(self) -> None:
        with self._state.unchanged():
            document = self._report()
        records.write_report(self._run_dir, document)

    def _report(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"job_id": self._job, "name": self._spec.name, "started_at": self._started_at}
        facts["loss_unigram"] = self._evaluation.unigram_loss
        facts |= {"wire": self._spec.synchroniser.wire.model_dump(), "lines": self._line_records()}
        facts["fragment_norms"] = self._norm_records()
        facts["warnings"] = [asdict(problem) for problem in advice(self._spec)]
        return report.build(self._policy, self._goodput, self._statistics, facts)

    def _line_records(self) -> LinesRecord:
        lines = self._lines.records()
        plans = (*self._policy.islands, *self._policy.standbys)
        return LinesRecord(islands=lines, regions=by_region(lines, {plan.island: plan.region for plan in plans}))

    def _norm_records(self) -> list[NormsRecord]:
        return [
            NormsRecord(fragment=p, version=own.version, update_norm=own.update_norm, residue_norm=own.residue_norm)
            for p, own in self._shard.norms().items()
        ]

    def _incarnation_of(self, island: IslandId) -> Incarnation:
        return self._state.islands()[island].incarnation

    def _status(self, at: Instant) -> StatusRecord:
        view = self._state.picture(at)
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
            "commands": {name: noted.copy() for name, noted in self._commands.items()},
            "unigram_loss": self._evaluation.unigram_loss,
            "fragment_parameters": self._shard.fragment_parameters(),
            "lines": self._line_records(),
            "fragment_norms": self._norm_records(),
        }


_: type[SynchroniserInterface] = SynchroniserActor  # type checkers compare what it answers with what others call
