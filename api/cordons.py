"""Node groups that take nothing new. What operators want is in the store; every living job is told what it lacks of that.

Responsible for the two agreeing in the end: jobs are told by comparing, not by passing a message on, so that a SIGKILL
between storing and telling loses nothing: the next service compares again. What trains on a cordoned node group goes on;
that the job decides. Refuses to know what jobs do with it.
"""

from __future__ import annotations

import logging
import secrets
import time

from api.control import CommandKind, ControlPort
from api.schemas import JobState, NodeGroup
from api.store import CommandRow, CordonRow, Store
from orchestrator.errors import Conflict, InfrastructureError, NotFound

logger = logging.getLogger(__name__)


class Cordons:
    def __init__(self, control: ControlPort, store: Store) -> None:
        self._control = control
        self._store = store

    def node_groups(self) -> list[NodeGroup]:
        """The fleet's node groups, by name, each with who cordoned it."""
        cordoned = self.callers()
        groups = self._control.node_groups()
        return [NodeGroup(**g, cordoned=g["name"] in cordoned, cordoned_by=cordoned.get(g["name"])) for g in groups]

    def callers(self) -> dict[str, str]:
        """The cordoned node groups, and who cordoned each."""
        return {name: row.caller for name, row in self._store.cordons().items()}

    def change(self, name: str, caller: str, cordoned: bool) -> tuple[NodeGroup, list[CommandRow]]:
        """Cordon the node group, or take that back, and tell all living jobs. Asked twice, the second changes nothing."""
        known = {group.name for group in self.node_groups()}
        if name not in known:
            there = ", ".join(sorted(known)) or "none at all"
            raise NotFound(detail=f"There is no node group {name!r}.", remedy=f"The fleet has {there}.")
        if cordoned:
            self._store.cordon(CordonRow(node_group=name, caller=caller, cordoned_at=time.time()))
        else:
            self._store.uncordon(name)
        told = self.tell_all(caller)
        return next(group for group in self.node_groups() if group.name == name), told

    def tell_all(self, caller: str) -> list[CommandRow]:
        """Every living job knows what is cordoned, or is on its way to. One that does not answer is told the next time."""
        told: list[CommandRow] = []
        for row in self._store.jobs():
            if not JobState(row.state).final:
                try:
                    told += self.tell(row.job, caller)
                except InfrastructureError as error:
                    logger.warning("job %s could not be told what is cordoned: %s", row.job, error)
        return told

    def tell(self, job: str, caller: str) -> list[CommandRow]:
        """The commands by which the job is told what it lacks; none for one that has ended."""
        told: list[CommandRow] = []
        try:
            knows = set(self._control.status(job)["view"]["cordoned"])
            wanted = self.callers()
            for name in sorted(knows ^ wanted.keys()):
                told.append(self._command(job, wanted.get(name, caller), "cordon" if name in wanted else "uncordon"))
                self._control.set_cordon(job, told[-1].command, told[-1].caller, name, name in wanted)
                self._store.update_command(told[-1].command, delivered=True)
        except (NotFound, Conflict):
            pass  # it has just ended
        return told

    def _command(self, job: str, caller: str, kind: CommandKind) -> CommandRow:
        row = CommandRow(
            command=f"{kind}-{secrets.token_hex(6)}",
            job=job,
            kind=kind,
            island=None,
            restart=True,
            caller=caller,
            requested_at=time.time(),
        )
        return self._store.add_command(row)
