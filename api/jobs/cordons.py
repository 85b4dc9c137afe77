"""Cordoned node groups: the store holds what operators want, and every living job is brought in line with it.

Jobs are reconciled by comparison, not by forwarding messages, so that a SIGKILL between storing and sending loses nothing:
the next service compares again, and a job that did not answer is compared again when it does. A command under way counts as
known to the job. Jobs decide by themselves what a cordon means; islands that train on a cordoned node group continue.
"""

from __future__ import annotations

import logging
import time
from threading import Lock

from api.jobs.background_loop import ProblemLog, reason_of
from api.jobs.control import ControlPort
from api.jobs.outbox import Outbox, digest_of, row_of
from api.jobs.status_cache import refuse_outdated
from api.jobs.translate import request_in, status_in
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
        """Two threads that compare at once could send a job the same command twice, or an outdated one."""
        self._missed: dict[str, str] = {}
        """Jobs that did not answer, and the caller whose change they missed."""
        self._problem_log = ProblemLog(logger)

    def node_groups(self) -> list[NodeGroup]:
        """Return the fleet's node groups, by name, each with who cordoned it."""
        cordoned = self.callers()
        groups = self._control.node_groups()
        return [NodeGroup(**g, cordoned=g["name"] in cordoned, cordoned_by=cordoned.get(g["name"])) for g in groups]

    def callers(self) -> dict[str, str]:
        """Return the cordoned node groups, and who cordoned each."""
        return {name: row.caller for name, row in self._store.cordons().items()}

    def generation(self) -> str:
        """Return a text that changes whenever a node group is cordoned or uncordoned."""
        rows = self._store.cordons().values()
        return digest_of([(row.node_group, row.caller, row.cordoned_at) for row in rows])[:8]

    def change(
        self, name: str, caller: str, cordoned: bool, if_match: str | None = None
    ) -> tuple[NodeGroup, list[CommandRow]]:
        """Cordon or uncordon the node group, and tell all living jobs. Idempotent.

        With ``if_match`` it is refused if any node group was cordoned or uncordoned since the caller read them.
        """
        names = {group.name for group in self.node_groups()}
        if name not in names:
            there = ", ".join(sorted(names)) or "none"
            raise NotFound(detail=f"Node group {name!r} does not exist.", remedy=f"The fleet has {there}.")
        with self._lock:
            refuse_outdated(if_match, self.generation(), "the node groups")
            if cordoned:
                self._store.cordon(CordonRow(node_group=name, caller=caller, cordoned_at=time.time()))
            else:
                self._store.uncordon(name)
        commands = self.tell_all(caller)
        return next(group for group in self.node_groups() if group.name == name), commands

    def tell_all(self, caller: str) -> list[CommandRow]:
        """Tell every living job what is cordoned. A job that does not answer is told when it does."""
        commands: list[CommandRow] = []
        for row in self._store.jobs():
            if row.state in NOT_OVER:
                commands += self.tell(row.job, caller)
        return commands

    def tell_missed(self) -> None:
        """Tell the jobs that did not answer before, if they do now."""
        for job, caller in list(self._missed.items()):
            self.tell(job, caller)

    def tell(self, job: str, caller: str) -> list[CommandRow]:
        """Send the job the commands that it lacks, and return them; none if it has ended or does not answer."""
        with self._lock:
            try:
                lacks = self._lacks(job)
            except Exception as error:  # no answer, or an invalid one; other jobs are not affected
                why = str(error) if isinstance(error, InfrastructureError) else reason_of(error)
                self._problem_log.note(f"job {job}", f"could not send it the cordons: {why}")
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
        """Return the node groups whose cordon the job does not know; by whom each is cordoned, None if it no longer is."""
        open_commands = self._store.open_commands(job)
        try:
            knows = set(map(NodeGroupId, status_in(job, self._control.status(job)).view.cordoned))
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
