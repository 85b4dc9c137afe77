"""The synchroniser of one job, live: a detached Ray actor around the core.

    links, timers, shard, commands ──▶ one queue ──▶ pump: driver.step ──▶ interpreter ──▶ links, shard, controller
                                       stamped                │
                                                              └──▶ tape, folds

This is the live driver of the core, whose contract is ``orchestrator.core``: one order of events, stamped on entry, and
nothing done before it is on the tape. Also responsible for the job's files at its end, and for ending all of its actors.
If its process dies, Ray makes it again with the same arguments, and it continues from its files while islands train on, or
from what islands hold (``salvaging``). A bug of ours ends the job: ``status.json`` says so, and ``crash.txt`` has its story.
"""

from __future__ import annotations

import logging
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray

from orchestrator.accounting import report
from orchestrator.accounting.goodput import Goodput
from orchestrator.accounting.statistics import Statistics
from orchestrator.actors import SavedWindow, SynchroniserInterface
from orchestrator.checkpoints.resumption import Resumption
from orchestrator.core import effects as f
from orchestrator.core import events
from orchestrator.core.commands import (
    Command,
    Cordon,
    Inject,
    IslandCommand,
    OperatorCommand,
    Scale,
    Set,
    island_of,
    kind_of,
)
from orchestrator.core.faults import IslandFault
from orchestrator.core.saving import HandOver
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import (
    FIRST_EPOCH,
    CommandId,
    Incarnation,
    Instant,
    IslandId,
    JobPhase,
    JobPolicy,
    Life,
    NodeGroupId,
)
from orchestrator.errors import Conflict, DataError, Fenced, NotFound, in_words
from orchestrator.host import job_files, records
from orchestrator.host.checkpoint_writer import CheckpointWriter
from orchestrator.host.job_context import EventQueue, JobContext, Timers
from orchestrator.host.job_files import JobFiles
from orchestrator.host.line_traffic import by_region, trouble_of
from orchestrator.host.retry import (
    TAPE_REFUSES,
    NoSync,
    PeriodicSync,
    Retrier,
    RetryingSink,
    SnapshotWriter,
    left_undone,
    store_status,
    tape_sync_of,
)
from orchestrator.host.state_view import CommandTable, StateView, pending_command, recovered_commands
from orchestrator.runtime import faults, published, restart, salvaging
from orchestrator.runtime.carried_parts import SavedWindows
from orchestrator.runtime.controller import Controller
from orchestrator.runtime.controllers import controller_of
from orchestrator.runtime.evaluation import Evaluation
from orchestrator.runtime.interpreter import Interpreter, Workers
from orchestrator.runtime.remote_shard import ShardProcesses, one_shard, several_shards
from orchestrator.runtime.salvaging import Survey
from orchestrator.runtime.shard_worker import JobChannel, ShardWorker
from orchestrator.runtime.supervision import Helper, Supervisor, SynchroniserFacts
from orchestrator.simulation.advice import advice
from orchestrator.specification.config import JobSpec, parse_job
from orchestrator.status import FragmentNorms, JobStatus, LinesStatus, StatusDocument
from orchestrator.status import Helper as HelperStatus
from orchestrator.system import logbook, release
from orchestrator.system.mirror import MirroredDisk
from orchestrator.system.roots import AllowedRoots
from orchestrator.system.run_folder import DUMP, SNAPSHOT
from orchestrator.tape import codec
from orchestrator.tape.driver import Driver
from orchestrator.tape.replay import Recovered

log = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 2.0
"""Longer the pump works on one event only while it waits for the tape's disk."""


class SynchroniserActor:
    """The actor that Ray makes, and makes again after a death, with several threads. Its calls are those of ``LiveJob``.

    Ray calls nothing but the constructor when it makes an actor again, so the constructor starts the job.
    """

    def __init__(
        self,
        job: str,
        spec: Mapping[str, Any],
        regions: dict[str, str],
        run_dir: str,
        cordoned: dict[str, str],
        roots: AllowedRoots,
        store: str | None = None,
        has_begun: bool = False,
    ) -> None:
        folder, is_trial = Path(run_dir), job_files.hand_over_noted(Path(run_dir)) is not None
        try:
            self._live = open_job(job, parse_job(spec), regions, folder, roots, store, cordoned, has_begun=has_begun)
            self._live.start(cordoned)
        except Exception as error:
            restart.is_handed_over(folder, error)  # the release before says why
            raise
        if is_trial:
            self._live.begun.result()  # raises what keeps this release from going on

    def ready(self) -> bool:
        return True

    def status(self) -> StatusDocument:
        return self._live.status()

    def submit(self, command: str, caller: str, document: Mapping[str, Any]) -> None:
        self._live.submit(command, caller, document)

    def save_parameters(self) -> str:
        return self._live.save_parameters()

    def save_updates(self, held: Sequence[int]) -> str:
        return self._live.save_updates(held)

    def notice(self, island: str, incarnation: int, cause: str, seconds: float | None) -> None:
        self._live.notice(island, incarnation, cause, seconds)

    def read_saved(self, receiver: str, name: str, start: int, stop: int) -> SavedWindow | None:
        return self._live.saved.window(receiver, name, start, stop)


def open_job(
    job: str,
    spec: JobSpec,
    regions: Mapping[str, str],
    run_dir: Path,
    roots: AllowedRoots,
    store: str | None = None,
    cordoned: Mapping[str, str] = MappingProxyType({}),
    *,
    has_begun: bool = False,
) -> LiveJob:
    """Open or recover the job's files, and connect the parts of its process. No event is handed over yet.

    ``store`` is the URL of the service's, in which a mirrored job has its log, and ``has_begun`` that there must be one.
    Raises what ``restart.disk_of`` and ``restart.files_of`` raise.
    """
    roots = roots.with_run(run_dir)
    logbook.keep(logbook.service_logbook(run_dir, "synchroniser"))
    log.info("the synchroniser of %s begins", job)
    disk = restart.disk_of(job, spec, regions, run_dir, store, has_begun=has_begun)
    mirror = disk if isinstance(disk, MirroredDisk) else None
    policy = restart.policy_of(spec, regions, run_dir)
    resumption = restart.resumption_of(spec, run_dir, roots)
    restart.keep_inputs(disk, run_dir)
    survey = restart.survey_of(job, spec, policy, run_dir, roots) if mirror is None else None
    shards = None
    if spec.synchroniser.shards > 1:
        try:
            shards = ShardProcesses(job, spec, run_dir, store, is_salvaged=survey is not None)
        except DataError as error:
            restart.crash_at_start(job, spec, policy, run_dir, error)
            raise
    journals, epoch = shards.journals if shards is not None else None, FIRST_EPOCH if survey is None else survey.epoch
    folds = (Goodput(policy), Statistics(policy))
    files = restart.files_of(job, spec, policy, run_dir, folds, disk, journals, epoch)
    past, state = files.past, StateView(files.core)
    started_at, now = restart.clock(files, run_dir)
    retrier, tape_sync = tape_sync_of(spec, files.tape)
    queue = EventQueue(now, past.count if past else 0)
    if mirror is not None:
        mirror.writer.on_fenced = queue.fail
    context = JobContext(job, spec, run_dir, roots, files.epoch, now, queue.post, queue.fail, tape_sync.durable_count)
    sink = RetryingSink(files.tape, retrier, files.journal.settle)
    every = spec.synchroniser.durability.snapshot_every_records
    supervisor = Supervisor("helpers")
    start_facts = SynchroniserFacts(dict(regions), dict(cordoned), store, files.header.epoch)
    controller: Helper[Controller] = supervisor.add(
        Helper(
            "controller",
            lambda: restart.introduced(
                controller_of(job, spec, str(run_dir), roots), start_facts, had_theta=state.seeded
            ),
            on_made=lambda: restart.introduce(state, interpreter, controller),
            ask=Controller.helpers,
        )
    )
    channel = JobChannel(context)
    sync_tape = partial(retrier.until_done, TAPE_REFUSES, files.tape.sync)
    shard = (
        one_shard(context, files, channel, retrier)
        if shards is None
        else several_shards(context, shards, channel, supervisor, sync_tape)
    )
    goodput, statistics = files.folds  # those given above, or a snapshot's of the same kinds
    assert isinstance(goodput, Goodput)
    assert isinstance(statistics, Statistics)
    workers = Workers(
        controller=controller,
        shard=shard,
        evaluation=Evaluation(context, shard, supervisor),
        timers=Timers(now, lambda timer, serial: queue.post(lambda at: events.TimerFired(at, timer, serial))),
        checkpoints=CheckpointWriter(context, resumption, state, goodput.ledger, shard.cut, sync_tape),
    )
    commands = CommandTable(
        state,
        recovered_commands(past) if past is not None else {},
        lambda: live.driver.count,
        tape_sync.durable_count if mirror is not None else lambda: sys.maxsize,
    )
    interpreter = Interpreter(
        context,
        workers,
        resolve=commands.resolve,
        finish=lambda effect: live.finish(effect),
        hand_over=lambda effect: live.hand_over(effect),
        announced=state.announcement,
    )
    live = LiveJob(
        context=context,
        policy=policy,
        resumption=resumption,
        files=files,
        state=state,
        goodput=goodput,
        statistics=statistics,
        started_at=started_at,
        queue=queue,
        retrier=retrier,
        tape_sync=tape_sync,
        driver=Driver(files.core, (files.pending, *files.folds), sink, past.count if past else 0),
        snapshots=SnapshotWriter(run_dir / SNAPSHOT, files.tape, past.before if past else 0, every, disk),
        supervisor=supervisor,
        workers=workers,
        interpreter=interpreter,
        commands=commands,
        chaos=faults.Chaos(controller, interpreter, queue.post, commands.resolve, state.incarnation_of),
        saved=SavedWindows(resumption, roots, shard.channel.endpoint),
        mirror=mirror,
        survey=survey if survey is not None and survey.answers else None,
        start_facts=start_facts,
    )
    return live


@dataclass(eq=False, kw_only=True)
class LiveJob:
    """A job while this process is its synchroniser: the loop that decides, and calls of others. ``open_job`` makes one."""

    context: JobContext
    policy: JobPolicy
    resumption: Resumption | None
    files: JobFiles
    state: StateView
    goodput: Goodput
    statistics: Statistics
    started_at: float
    queue: EventQueue
    retrier: Retrier
    tape_sync: PeriodicSync | NoSync
    driver: Driver[Synchroniser]
    snapshots: SnapshotWriter
    supervisor: Supervisor
    workers: Workers
    interpreter: Interpreter
    commands: CommandTable
    chaos: faults.Chaos
    saved: SavedWindows
    mirror: MirroredDisk | None
    start_facts: SynchroniserFacts
    survey: Survey | None = None
    noticed: set[Life] = field(default_factory=set)
    missing_on_head: str = ""
    fenced: str | None = None
    begun: Future[None] = field(default_factory=Future)
    last_status: JobStatus = field(init=False)

    def start(self, cordoned: Mapping[str, str]) -> None:
        """Hand over the job's first events, make or recover Θ, and begin to decide. A job that has ended is ended again."""
        self.last_status = self._status(self.context.now())
        if self.state.phase is JobPhase.FINISHED:
            threading.Thread(target=self.finish, name="pump", daemon=True).start()
            return
        if self.survey is not None:
            salvage = (self._salvage, self.survey, cordoned)
            threading.Thread(target=self.context.guarded, args=salvage, daemon=True).start()
            threading.Thread(target=self._pump, name="pump", daemon=True).start()
            return
        for make in self.files.first_events:
            self.context.post(make)
        if not self.files.started:
            self._begin(cordoned, self.context.spec.wanted_counts(), [])
        shard, evaluation = self.workers.shard, self.workers.evaluation
        if self.files.merges:
            shard.recover(self.files)
        elif self.resumption is not None:
            shard.resume(self.resumption)
        else:
            shard.seed(evaluation)
        evaluation.measure_unigram()
        self.supervisor.begin()
        threading.Thread(target=self._pump, name="pump", daemon=True).start()

    def _salvage(self, survey: Survey, cordoned: Mapping[str, str]) -> None:
        """Pull Θ from the islands that hold it, and begin the tape with that. Islands that do not go on are ended."""
        shard, evaluation = self.workers.shard, self.workers.evaluation
        taken = salvaging.salvage(survey, self.context, self.policy, shard.channel, evaluation.outline().result())
        self.context.post(lambda at: replace(taken.event, at=at))
        shard.take_over(taken.outer, taken.steps).result()  # survivors offer work as soon as they are found
        self._begin(cordoned, salvaging.wanted_counts(self.context.spec, sorted(taken.survivors)), taken.settings)
        for life in sorted(set(survey.lives) - taken.survivors):
            self.interpreter.end(*life)
        evaluation.measure_unigram()
        self.supervisor.begin()

    def _begin(self, cordoned: Mapping[str, str], wanted_counts: Mapping[NodeGroupId, int], sets: list[Set]) -> None:
        if (resumption := self.resumption) is not None and self.survey is None:
            names = frozenset(plan.island for plan in self.policy.islands)
            self.context.post(lambda at: resumption.event(at, names))
            sets = resumption.settings(self.context.spec.model_dump(mode="json"))
        for group, caller in sorted(cordoned.items()):
            self._submit(CommandId(f"cordon-{group}-before-the-start"), caller, Cordon(NodeGroupId(group)))
        for node_group, count in wanted_counts.items():
            self._submit(CommandId(f"scale-{node_group}-at-the-start"), "the specification", Scale(node_group, count))
        for number, request in enumerate(sets):
            self._submit(CommandId(f"setting-{number}-at-the-start"), "what was set before", request)
        self.context.post(events.JobStarted)

    # ── called by the control port ────────────────────────────────────────────────────────────────────────────────

    def status(self) -> StatusDocument:
        """Return the job's status, or the last one before the tape's disk stopped answering."""
        with self.state.unchanged(STATUS_TIMEOUT_S) as held:
            if held:
                self.last_status = self._status(self.context.now())
        store = store_status(self.mirror) if self.mirror is not None else None
        of_disk = "; ".join(filter(None, (self.retrier.trouble, self.workers.shard.trouble))) or None
        trouble = store.trouble if store is not None and store.trouble else of_disk
        last, lines = self.last_status, self._line_status()
        of_nodes = map(HelperStatus.model_validate, self.workers.controller.said or ())
        now: dict[str, Any] = {"store": store, "fenced": self.fenced, "lines": lines}
        now |= {
            "disk_trouble": of_disk if trouble is of_disk else None,
            "shards": self.workers.shard.statuses(),
            "helpers": [*self.supervisor.statuses(), *of_nodes],
        }
        pause = self.fenced or trouble or self.missing_on_head or last.view.pause_reason or trouble_of(last.view, lines)
        return last.with_view(pause_reason=pause, build=str(release.own())).model_copy(update=now).document()

    def submit(self, command: str, caller: str, document: Mapping[str, Any]) -> None:
        """Queue the command that ``document`` is the plain form of; its outcome appears among the status's commands.

        Raises Conflict, and does nothing, for one that this build does not know, and when the job has ended; NotFound for an
        island that the job has not.
        """
        try:
            request = codec.decode_command(document)
        except DataError as error:
            detail = f"The synchroniser of job {self.context.job} cannot carry it out: {error}"
            raise Conflict(
                detail=detail, remedy="It belongs to another build than the service. Its job continues to train."
            ) from error
        self._submit(CommandId(command), caller, request)

    def save_parameters(self) -> str:
        """Write Θ as it stands into the head's run folder, for the caller to read and remove; returns the file's name."""
        facts = {"job": self.context.job, "spec": self.context.spec.model_dump_json()}
        return self._saved("safetensors", partial(published.write_parameters, self.context.run_dir, facts))

    def save_updates(self, held: Sequence[int]) -> str:
        """Do the same as ``save_parameters`` with what is newer than these versions of the fragments."""
        return self._saved("updates", partial(published.write_updates, self.context.run_dir, self.context.job, held))

    def _saved(self, kind: str, write: Callable[[ShardWorker, str], None]) -> str:
        if not self.workers.shard.seeded:
            raise Conflict(detail=f"Job {self.context.job} has no parameters yet.", remedy="Try again once it trains.")
        write(self.workers.shard, name := f"{DUMP}{uuid.uuid4().hex}.{kind}")
        if self.context.spec.synchroniser.node_groups:
            ray.get(self.workers.controller.call(Controller.take, name))
        return name

    def notice(self, island: str, incarnation: int, cause: str, seconds: float | None) -> None:
        """A node of this life is about to go, in so many seconds. Called by the controller, again and again; heard once."""
        life = (IslandId(island), Incarnation(incarnation))
        with self.state.unchanged():
            if life in self.noticed or self.state.phase is JobPhase.FINISHED:
                return
            self.noticed.add(life)
        log.warning("%s.%s is on a node that is about to go: %s", island, incarnation, cause)
        self.context.post(lambda at: events.NoticeReceived(at, *life, cause, seconds))

    def _submit(self, command: CommandId, caller: str, request: Command) -> None:
        names, island = self.state.island_ids, island_of(request)
        fault = faults.typed(self.context.job, request) if isinstance(request, Inject) else None
        needs_island = isinstance(request, IslandCommand) or isinstance(fault, IslandFault)
        if needs_island and island not in names:
            remedy = f"Its islands are {', '.join(names)}."
            raise NotFound(detail=f"Job {self.context.job} has no island {island!r}.", remedy=remedy)
        if not self._noted(command, caller, request):
            return
        for_the_core = request if isinstance(request, OperatorCommand) else None
        if fault is not None:
            for_the_core = self.chaos.inject(command, caller, fault)
        if for_the_core is not None:
            self.context.post(lambda at: events.CommandRequested(at, command, caller, for_the_core))

    def _noted(self, command: str, caller: str, request: Command) -> bool:
        """Note the command and return whether it is new. Raises Conflict if the job has ended."""
        if self.state.phase is JobPhase.FINISHED:
            raise Conflict(detail=f"Job {self.context.job} has ended.", remedy="Submit it again to run it once more.")
        status = pending_command(kind_of(request), island_of(request), caller, self.context.now())
        return self.commands.add(command, status)

    # ── the pump ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _pump(self) -> None:
        try:
            if self.files.past is not None:
                self._recover(self.files.past)
            while self.state.phase is not JobPhase.FINISHED:
                for effect in self._step():
                    self.interpreter.act(effect)
        except Fenced as error:  # it was cut off, and replaced: what it has is not its own any more
            log.critical("this synchroniser steps aside: %s", error)
            self.fenced = f"this synchroniser was replaced and has stopped: {error}"
            self._close()
            self.files.tape.let_go()
        except Exception as error:
            if not self.begun.done() and restart.is_handed_over(self.context.run_dir, error):
                self.begun.set_exception(error)  # nothing rests on this process yet: the release before goes on
                return
            close = (self._close, self.files.tape.close)
            restart.crash(
                self.context.job, self.context.run_dir, error, close, lambda: self._status(self.context.now())
            )

    def _recover(self, past: Recovered) -> None:
        """Contact islands only after the new epoch is durable.

        Otherwise a successor could reuse its number, and islands would take the two lives for one, with the certificates
        and the requests of either.
        """
        decided = [effect for _ in self.files.first_events for effect in self._step()]
        self.retrier.until_done(TAPE_REFUSES, self.files.tape.sync)
        job_files.end_hand_over(self.context.run_dir)
        self.begun.set_result(None)
        job, workers = self.context.job, self.workers
        restart.reconnect(job, past, self.state, self.interpreter, workers.timers, workers.controller)
        for effect in decided:
            self.interpreter.act(effect)

    def _step(self) -> Sequence[f.Effect]:
        """Have the next event decided on and written; what was decided is for the caller to have done."""
        event = self.queue.next()
        with self.state.changing():
            decided = self.driver.step(event)
            if self.driver.count % self.state.events_per_check == 0:
                self.state.check()
                self.goodput.check()
            self.snapshots.consider(self.driver, event.at)
        if isinstance(event, events.OuterStateSeeded):
            self._note_theta()
        if isinstance(event, events.FaultInjected):
            faults.kill_own_process(event)
        if isinstance(event, events.ConnectionLost) and event.dead:
            self.interpreter.forget(event.island, event.incarnation)
        return decided

    def _note_theta(self) -> None:
        """Have the controller, which outlives this machine, know that the job has Θ. A salvage is over by now."""
        self.workers.controller.call(Controller.note_synchroniser, self.start_facts, True)
        if self.survey is not None:
            job_files.end_salvage(self.context.run_dir)

    def _close(self) -> None:
        self.supervisor.close()
        self.retrier.close()
        self.tape_sync.close()
        self.interpreter.close()

    def hand_over(self, effect: HandOver) -> None:
        """End this process for one of another release, once all that was decided is durable. Returns only if that fails."""
        self.retrier.until_done(TAPE_REFUSES, self.files.tape.sync)
        restart.hand_over(self.context.job, self.context.run_dir, effect, self.workers.controller)

    def finish(self, effect: f.FinishJob | None = None) -> None:
        """Write the job's files, then end every actor of the job, this one included. A job that has ended is ended again."""
        if effect is not None:
            log.info("the job ends as %s: %s", effect.outcome, effect.reason)
        self.retrier.until_done(TAPE_REFUSES, self.files.tape.close)
        if records.ended_as(self.context.run_dir, self.context.job):
            self._close()
            restart.end_job(self.context.job, partial(setattr, self, "missing_on_head"))
            return
        problems = [
            left_undone(self.retrier, "its parameters", self._leave_parameters),
            left_undone(self.retrier, "its report", self._leave_report),
        ]
        with self.state.unchanged():
            status = self._status(self.context.now())
        status = status.with_view(reason="; ".join(reason for reason in (status.view.reason, *problems) if reason))
        left_undone(self.retrier, "its final state", lambda: records.write_status(self.context.run_dir, status))
        self._close()
        if not problems[0]:  # else the journal is all that there is of Θ
            for what, work in (("journal", self.files.journal.clear), ("snapshot", self.snapshots.close)):
                try:
                    work()
                except Exception:  # it takes room, and nothing rests on it
                    log.exception("the %s cannot be removed", what)
        if self.mirror is not None:
            try:
                self.mirror.writer.flush()
            except Exception as error:  # the store keeps a journal that nobody needs
                log.warning("the end of the job is not in the store: %s", in_words(error))
        restart.end_job(self.context.job, partial(setattr, self, "missing_on_head"))

    def _leave_parameters(self) -> None:
        outcome = self.state.outcome
        assert outcome is not None
        facts = {"job": self.context.job, "outcome": outcome.value, "spec": self.context.spec.model_dump_json()}
        shard = self.workers.shard
        if self.files.merges and not shard.seeded:  # it ended in an earlier life
            shard.recover(self.files)
        if shard.seeded:
            published.write_parameters(self.context.run_dir, facts, shard)

    def _leave_report(self) -> None:
        with self.state.unchanged():
            document = self._report()
        records.write_report(self.context.run_dir, document)

    def _report(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "job_id": self.context.job,
            "name": self.context.spec.name,
            "started_at": self.started_at,
        }
        facts["loss_unigram"] = self.workers.evaluation.unigram_loss
        facts |= {"wire": self.context.spec.synchroniser.wire.model_dump(), "lines": self._line_status().model_dump()}
        facts["fragment_norms"] = [norms.model_dump() for norms in self._norms()]
        facts["warnings"] = [asdict(problem) for problem in advice(self.context.spec)]
        return report.build(self.policy, self.goodput, self.statistics, facts)

    def _line_status(self) -> LinesStatus:
        lines = self.context.lines.statuses()
        plans = (*self.policy.islands, *self.policy.standbys)
        return LinesStatus(islands=lines, regions=by_region(lines, {plan.island: plan.region for plan in plans}))

    def _norms(self) -> list[FragmentNorms]:
        return [
            FragmentNorms(fragment=p, version=own.version, update_norm=own.update_norm, residue_norm=own.residue_norm)
            for p, own in self.workers.shard.norms().items()
        ]

    def _status(self, at: Instant) -> JobStatus:
        """Return the status between two events. The folds' figures are not validated: they are ours, and may be large."""
        return JobStatus.model_construct(
            job_id=self.context.job,
            name=self.context.spec.name,
            started_at=self.started_at,
            at=at,
            view=self.state.status(at, self.goodput.ledger.trained),
            goodput=self.goodput.summary(at),
            statistics=self.statistics.summary(at),
            loss_curve=self.statistics.evaluations.curve.all(),
            commands=self.commands.statuses(),
            unigram_loss=self.workers.evaluation.unigram_loss,
            fragment_parameters=self.workers.shard.fragment_parameters(),
            lines=self._line_status(),
            fragment_norms=self._norms(),
        )


_: type[SynchroniserInterface] = SynchroniserActor  # type checkers compare what it answers with what others call
