"""The connection to one incarnation of an island: its report link and its parameter link, over one impaired link."""

from __future__ import annotations

import threading
from collections.abc import Callable

from orchestrator.actors.handle import ActorHandle
from orchestrator.actors.island import IslandInterface
from orchestrator.channel.endpoint import Membership
from orchestrator.core.vocabulary import Incarnation, IslandId
from orchestrator.host.job_context import JobContext
from orchestrator.runtime.impaired_link import ImpairedLink
from orchestrator.runtime.parameter_link import ParameterLink
from orchestrator.runtime.report_link import ReportLink
from orchestrator.runtime.shard_worker import ShardWorker


class Connection:
    """Open from its creation to ``close``. ``lost``: the process did not answer the synchroniser before this one.

    ``membership`` is what the process gets to take part in the job's channel.
    """

    def __init__(
        self,
        island: IslandId,
        incarnation: Incarnation,
        actor: ActorHandle[IslandInterface],
        context: JobContext,
        shard: ShardWorker,
        membership: Membership,
        durable_count: Callable[[], int],
        *,
        lost: bool = False,
    ) -> None:
        self.actor, self.subject = actor, membership.subject
        self._closed = threading.Event()
        self.link = ImpairedLink(self._closed)
        self.line = context.lines.of(island)
        name, shared = f"{island}.{incarnation}", (self.link, self._closed)
        self.parameters = ParameterLink(name, actor, context, *shared, shard, membership, self.line)
        self.reports = ReportLink(
            island, incarnation, actor, context, *shared, self.parameters, durable_count, lost=lost
        )

    def close(self) -> None:
        """Read nothing more of this incarnation. Returns at once."""
        self._closed.set()
        self.reports.close()
        self.parameters.close()
