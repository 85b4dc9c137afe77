"""A mortal world whose job takes checkpoints and rolls back to them. The live code writes and removes them, in virtual
time.

The files of checkpoints are in memory, where no power is lost: ``checkpoints.folder`` syncs each before it counts.
Islands write their parts some time after their cut. The synchroniser's writer thread does one thing after another, and
what it had not done when its process died is never done. The world checks that whatever is sealed is complete and equals
its cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from typing import Any

from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import PART, Part, encode_part, part_digest
from orchestrator.checkpoints.reading import manifest_of, outer_states, verified
from orchestrator.checkpoints.writing import OuterCut, cut_of
from orchestrator.core import events as e
from orchestrator.core.effects import MergeFragment
from orchestrator.core.messages import NotSaved, Saved
from orchestrator.core.saving import (
    BeginCheckpoint,
    CheckpointFailed,
    CheckpointTaken,
    DropCheckpoint,
    RestoreFragments,
    SealCheckpoint,
)
from orchestrator.core.vocabulary import FragmentId, JobPolicy, Version
from orchestrator.errors import AtollError, InternalError
from orchestrator.host.checkpoint_writer import CheckpointWriter
from orchestrator.host.job_context import JobContext
from orchestrator.host.state_view import StateView
from orchestrator.parameters.outer_state import FragmentState
from orchestrator.replica.replica import Position
from orchestrator.simulation.island import Host
from orchestrator.simulation.plan import WorldPlan
from orchestrator.system.roots import AllowedRoots
from tests.swarm.checkers import Checkers
from tests.swarm.checkers.violation import require
from tests.swarm.configurations import CheckpointRequests
from tests.swarm.mortal_merge_worker import MortalMergeWorker, job_spec, retry_until_written
from tests.swarm.mortal_world import FOLDER, MortalWorld
from tests.swarm.mortality import Mortality
from tests.swarm.rough_world import EventFaults

WRITING_S = (0.001, 0.3)
FORESEEN = ("OSError:", "FileNotFoundError:", "DataError:", "InfrastructureError:")
"""The reasons for which a checkpoint may fail in this world. Any other reason is a bug here."""


class CheckpointingWorld(MortalWorld):
    """A world with checkpoints. ``close`` it to release what it keeps in memory."""

    def __init__(
        self,
        policy: JobPolicy,
        plan: WorldPlan,
        seed: int,
        event_faults: EventFaults,
        mortality: Mortality,
        checkers: Callable[[], Checkers],
        requests: CheckpointRequests | None,
    ) -> None:
        super().__init__(policy, plan, seed, event_faults, mortality, checkers)
        self._roots = AllowedRoots.only(f"memory://atoll-swarm-{seed}")
        self._memory = Folder.within(self._roots, f"memory://atoll-swarm-{seed}")
        names = [plan.island for plan in policy.islands]
        self._spec = job_spec(mortality.merges_max, policy.staleness_max, seed, names, self._memory.url)
        self._saver: tuple[int, CheckpointWriter] | None = None
        self._marked: set[tuple[int, int]] = set()
        for at, command in requests.commands() if requests is not None else ():
            self.later(at, partial(self._command, command))

    def close(self) -> None:
        self._memory.remove_all()

    def _command(self, command: e.CommandRequested) -> None:
        self.tell(replace(command, at=self.now))

    def begin_checkpoint(self, effect: BeginCheckpoint) -> None:
        saver = self._checkpoints()
        saver.act(effect, self.now)
        for life in effect.islands:
            if not self.chance(self.plan.publication_loss):
                self._mark(self.hosts[life], effect.checkpoint, saver.folder(effect.checkpoint))

    def seal_checkpoint(self, effect: SealCheckpoint) -> None:
        self._checkpoints().act(effect, self.now)

    def drop_checkpoint(self, effect: DropCheckpoint) -> None:
        self._checkpoints().act(effect, self.now)

    # ── the synchroniser's ────────────────────────────────────────────────────────────────────────────────────────

    def _checkpoints(self) -> CheckpointWriter:
        """The checkpoint writer of this life."""
        if self._saver is None or self._saver[0] != self.generation:
            worker = Worker(self)
            context = JobContext(
                "job", self._spec, FOLDER, self._roots, self.epoch, lambda: self.now, self._post, _raise, lambda: 0
            )
            sync_tape = partial(retry_until_written, "the tape cannot be written", self._files.tape.sync)
            ledger = self.goodput.ledger
            saver = CheckpointWriter(context, None, StateView(self.core), ledger, worker.outer, sync_tape, worker)
            self._saver = self.generation, saver
        return self._saver[1]

    def _post(self, make: Callable[[float], e.Event]) -> int:
        def deliver() -> None:
            event = make(self.now)
            if isinstance(event, CheckpointTaken):
                event = replace(event, seconds=0.0)  # by a clock that is not this world's
            self.tell(event)

        event = make(self.now)
        if isinstance(event, CheckpointTaken):
            self._check_sealed(event.checkpoint)
        if isinstance(event, CheckpointFailed) and not event.reason.startswith(FORESEEN):
            raise InternalError(detail=f"Checkpoint {event.checkpoint} failed as nobody foresaw: {event.reason}.")
        self.while_alive(0.0, deliver)
        return 0

    def restore_fragments(self, effect: RestoreFragments) -> None:
        folder = self._checkpoints().folder(effect.checkpoint)
        try:
            states = list(outer_states(folder, manifest_of(folder)))
        except (AtollError, OSError) as error:
            require(False, "a kept checkpoint can be gone back to", (effect, error))
            return
        self.merge_worker.restore(effect, states)

    def _check_sealed(self, number: int) -> None:
        manifest = verified(self._checkpoints().folder(number))
        for p, (fragment, merged) in enumerate(zip(manifest.fragments, manifest.merged_tokens, strict=True)):
            state_and_step = self.merge_worker.versions.get((FragmentId(p), Version(fragment.version)))
            held = state_and_step is not None and (state_and_step[0].digest, state_and_step[1]) == (
                fragment.digest,
                fragment.step,
            )
            require(held, "a sealed checkpoint has versions that Θ had", (number, p, fragment))
            ahead = [part.island for part in manifest.parts if part.versions[p] > fragment.version]
            require(not ahead, "no island is ahead of its checkpoint's Θ", (number, p, ahead))
            unmerged = sum(part.token_counts[p] for part in manifest.parts if part.versions[p] == fragment.version)
            merged_tokens = self.checkers.rounds.all[p].merged.get(Version(fragment.version), {})
            require(
                merged == sum(merged_tokens.values()),
                "a checkpoint has what was merged",
                (number, p, merged, merged_tokens),
            )
            right = merged + unmerged <= manifest.tokens_trained
            require(right, "a checkpoint has no token twice", (number, p, merged, unmerged, manifest.tokens_trained))
        true = sum(host.process.replica.tokens_total for host in self.hosts.values())
        require(manifest.tokens_trained <= true, "no more is in a checkpoint than was trained", (number, true))

    # ── the islands' ──────────────────────────────────────────────────────────────────────────────────────────────

    def _mark(self, host: Host, number: int, folder: Folder) -> None:
        """Deliver the marker at once, ahead of later publications. The island cuts at its next boundary."""

        def mark() -> None:
            if (id(host), number) in self._marked:
                return
            self._marked.add((id(host), number))
            if host.process.stepping:
                host.process.cut(cut)
            else:
                self._answer(host, NotSaved(number, "it does not train"))

        def cut(position: Position) -> None:
            part = Part(
                island=host.process.island,
                incarnation=host.process.incarnation,
                step=position.step,
                asked_step=position.step,
                steps_total=position.steps_total,
                tokens_total=position.tokens_total,
                cursor=position.steps_total,
                versions=position.versions,
                step_counts=position.step_counts,
                token_counts=position.token_counts,
            )
            self.later(self.draw(WRITING_S), partial(self._write, host, number, folder, part))

        self.reach(host, self.addressed(host, mark))

    def _write(self, host: Host, number: int, folder: Folder, part: Part) -> None:
        if host.alive:
            folder.write(f"{part.island}/{PART}", encode_part(part))
            self._answer(host, Saved(number, part_digest(part), part.tokens_total, 0.0))

    def _answer(self, host: Host, report: Saved | NotSaved) -> None:
        host.post([report])
        self.links.carry(host)


class Worker(Executor):
    """The synchroniser's thread that writes checkpoints. It takes time, and dies with the process."""

    def __init__(self, world: CheckpointingWorld) -> None:
        self._world, self._merge_worker = world, world.merge_worker
        self._queue: deque[Callable[[], Any]] = deque()
        self._awaited: set[MergeFragment] = set()

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        self._queue.append(partial(work, *arguments, **named))
        if len(self._queue) == 1:
            self._go_on()
        return Future()

    def outer(self) -> Future[OuterCut]:
        """Return Θ as of the end of the merges ordered so far."""
        self._awaited |= set(self._merge_worker.under_way.values())
        return Outer(self._merge_worker)

    def _go_on(self) -> None:
        self._world.while_alive(self._world.draw(WRITING_S), self._work)

    def _work(self) -> None:
        self._awaited &= set(self._merge_worker.under_way.values())
        if not self._awaited:
            self._queue[0]()
            self._queue.popleft()
        if self._queue:
            self._go_on()


class Outer(Future[OuterCut]):
    """The future Θ. A failed merge leaves its fragment unchanged, whatever is merged into it later."""

    def __init__(self, merge_worker: MortalMergeWorker) -> None:
        super().__init__()
        self._merge_worker = merge_worker
        self._stands, self._ordered = list(merge_worker.outer), dict(merge_worker.under_way)

    def result(self, timeout: float | None = None) -> OuterCut:
        return cut_of({p: self._cut_of(p) for p in map(FragmentId, range(len(self._stands)))})

    def _cut_of(self, fragment: FragmentId) -> tuple[FragmentState, int]:
        order = self._ordered.get(fragment)
        version = self._stands[fragment][0]
        if order is not None and order in self._merge_worker.completed:
            version = order.version
        return self._merge_worker.versions[fragment, version]


def _raise(error: BaseException) -> None:
    raise error
