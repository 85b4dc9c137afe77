"""Node groups that take nothing new. What operators want is in the store; every living job is told what it lacks of that.

Responsible for the two agreeing in the end: jobs are told by comparing, not by passing a message on, so that a SIGKILL
between storing and telling loses nothing: the next service compares again, and a job that did not answer is compared again
when it does. What is on its way to a job counts as known to it. What trains on a cordoned node group goes on; that the job
decides. Refuses to know what jobs do with it.
"""

from __future__ import annotations

import logging
import time
from threading import Lock

from api.jobs.background_loop import ProblemLog, reason_of
from api.jobs.control import ControlPort
from api.jobs.idempotency import digest_of
from api.jobs.outbox import Outbox, row_of
from api.jobs.status_cache import refuse_outdated
from api.jobs.translate import request_in
from api.schemas import JobState, NodeGroup
from api.storage.store import CommandRow, CordonRow, Store
from orchestrator.core.commands import Cordon, Uncordon
from orchestrator.core.vocabulary import NodeGroupId
from orchestrator.errors import InfrastructureError, NotFound

logger = logging.getLogger(__name__)


NOT_OVER = frozenset(state for state in JobState if not state.final)


class Cordons:
    def __init__(self, control: ControlPort, store: Store, outbox: Outbox) -> None:
        self._control = control
        self._store = store
        self._outbox = outbox
        self._lock = Lock()
        """Two that compare at once would tell a job twice, or one of them what has just been taken back."""
        self._missed: dict[str, str] = {}
        """Jobs that did not answer when they were to be told, and on whose behalf."""
        self._problem_log = ProblemLog(logger)

    def node_groups(self) -> list[NodeGroup]:
        """The fleet's node groups, by name, each with who cordoned it."""
        cordoned = self.callers()
        groups = self._control.node_groups()
        return [NodeGroup(**g, cordoned=g["name"] in cordoned, cordoned_by=cordoned.get(g["name"])) for g in groups]

    def callers(self) -> dict[str, str]:
        """The cordoned node groups, and who cordoned each."""
        return {name: row.caller for name, row in self._store.cordons().items()}

    def generation(self) -> str:
        """Another one whenever a node group was cordoned or uncordoned."""
        rows = self._store.cordons().values()
        return digest_of([(row.node_group, row.caller, row.cordoned_at) for row in rows])[:8]

    def change(
        self, name: str, caller: str, cordoned: bool, if_match: str | None = None
    ) -> tuple[NodeGroup, list[CommandRow]]:
        """Cordon the node group, or take that back, and tell all living jobs. Asked twice, the second changes nothing.

        With ``if_match`` it is refused if anything was cordoned or uncordoned since the caller read it.
        """
        names = {group.name for group in self.node_groups()}
        if name not in names:
            there = ", ".join(sorted(names)) or "none at all"
            raise NotFound(detail=f"There is no node group {name!r}.", remedy=f"The fleet has {there}.")
        with self._lock:
            refuse_outdated(if_match, self.generation(), "the node groups")
            if cordoned:
                self._store.cordon(CordonRow(node_group=name, caller=caller, cordoned_at=time.time()))
            else:
                self._store.uncordon(name)
        commands = self.tell_all(caller)
        return next(group for group in self.node_groups() if group.name == name), commands

    def tell_all(self, caller: str) -> list[CommandRow]:
        """Every living job knows what is cordoned, or is on its way to. One that does not answer is told when it does."""
        commands: list[CommandRow] = []
        for row in self._store.jobs():
            if row.state in NOT_OVER:
                commands += self.tell(row.job, caller)
        return commands

    def tell_missed(self) -> None:
        """Those that did not answer are told, if they do now."""
        for job, caller in list(self._missed.items()):
            self.tell(job, caller)

    def tell(self, job: str, caller: str) -> list[CommandRow]:
        """The commands by which the job is told what it lacks; none for one that has ended, or does not answer."""
        with self._lock:
            try:
                lacks = self._lacks(job)
            except Exception as error:  # it does not answer, or its answer is none; that is no matter of the others
                why = str(error) if isinstance(error, InfrastructureError) else reason_of(error)
                self._problem_log.note(f"job {job}", f"it could not be told what is cordoned: {why}")
                self._missed[job] = caller
                return []
            self._missed.pop(job, None)
            self._problem_log.settle(f"job {job}")
            stored = [
                self._stored(job, by or caller, Cordon(name) if by else Uncordon(name)) for name, by in lacks.items()
            ]
        self._outbox.push(job)
        return [self._store.command(row.command) or row for row in stored]

    def _lacks(self, job: str) -> dict[NodeGroupId, str | None]:
        """The node groups of which the job knows the contrary; by whom each is cordoned, None where it no longer is."""
        open_commands = self._store.open_commands(job)
        try:
            knows = set(map(NodeGroupId, self._control.status(job)["view"]["cordoned"]))
        except NotFound:
            return {}  # it has just ended
        for command in open_commands:
            match request_in(command):
                case Cordon(node_group):
                    knows.add(node_group)
                case Uncordon(node_group):
                    knows.discard(node_group)
        wanted = self.callers()
        return {NodeGroupId(name): wanted.get(name) for name in sorted(knows ^ wanted.keys())}

    def _stored(self, job: str, caller: str, command: Cordon | Uncordon) -> CommandRow:
        return self._store.add_command(row_of(job, caller, command))
