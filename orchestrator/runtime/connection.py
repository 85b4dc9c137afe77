"""The connection to one incarnation of an island: its report link and its parameter link, over one impaired link."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

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

    ``ranks`` are its processes, one but for an island of many hosts, each with what it gets to take part in the job's
    channel. Reports and commands are rank 0's.
    """

    def __init__(
        self,
        island: IslandId,
        incarnation: Incarnation,
        ranks: Sequence[tuple[ActorHandle[IslandInterface], Membership]],
        context: JobContext,
        shard: ShardWorker,
        durable_count: Callable[[], int],
        *,
        lost: bool = False,
    ) -> None:
        self.actor = ranks[0][0]
        self.subjects = tuple(membership.subject for _, membership in ranks)
        self._closed = threading.Event()
        self.link = ImpairedLink(self._closed)
        self.line = context.lines.of(island)
        name, shared = f"{island}.{incarnation}", (self.link, self._closed)
        self.parameters = ParameterLink(name, ranks, context, *shared, shard, self.line)
        self.reports = ReportLink(
            island, incarnation, self.actor, context, *shared, self.parameters, durable_count, lost=lost
        )

    def close(self) -> None:
        """Read nothing more of this incarnation. Returns at once."""
        self._closed.set()
        self.reports.close()
        self.parameters.close()
