"""The calls by which islands get a state to start from, and the events for those calls that fail.

The island's own report says how it went. Refuses to choose the donor (``core.island_life``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import assert_never

import ray
from ray.exceptions import ActorDiedError, RayError

from orchestrator.actors.island import IslandInterface
from orchestrator.core import effects as f
from orchestrator.core import events
from orchestrator.core.vocabulary import Incarnation, IslandId
from orchestrator.errors import in_words
from orchestrator.host.checkpoint_writer import CheckpointWriter
from orchestrator.host.job_context import JobContext
from orchestrator.runtime.connection import Connection
from orchestrator.runtime.shard_worker import ShardWorker

ANSWER_TIMEOUT_S = 10.0


class CatchUps:
    """``connection`` finds the connection to an incarnation, ``name`` what Ray calls its process."""

    def __init__(
        self,
        context: JobContext,
        connection: Callable[[IslandId, Incarnation], Connection | None],
        name: Callable[[IslandId, Incarnation], str],
        shard: ShardWorker,
        checkpoints: CheckpointWriter,
    ) -> None:
        self._connection, self._name, self._shard = connection, name, shard
        self._epoch, self._post, self._checkpoints = context.epoch, context.post, checkpoints
        self._count = count(1)

    def begin(self, effect: f.BeginCatchUp) -> Callable[[], None] | None:
        """The rest of the work, for a thread of its own: until the island has answered, or is listened to no more.

        ``None`` where nobody listens to the island any more.
        """
        connection = self._connection(effect.island, effect.incarnation)
        if connection is None:
            return None
        island = connection.actor
        match effect.source:
            case f.FromStandby():
                call = island.call(IslandInterface.resume, self._epoch, effect.cursor)
            case f.FromSynchroniser():
                return lambda: self._give_outer(effect, connection)
            case f.FromCheckpoint():
                folder = self._checkpoints.resumed_from
                call = island.call(IslandInterface.load_saved, self._epoch, folder, effect.cursor)
            case f.FromPeers(donor, helpers):
                donors = {self._name(*life): life[0] for life in (donor, *helpers)}
                request = next(self._count)
                call = island.call(IslandInterface.load_from, self._epoch, request, donors, effect.cursor)
            case unknown:
                assert_never(unknown)
        return lambda: self._wait(effect, connection, call)

    def _give_outer(self, effect: f.BeginCatchUp, connection: Connection) -> None:
        """Θ to each of the island's processes, of what it has. The payloads are held until the island has answered."""
        versions, step, payloads = self._shard.whole_state(connection.parameters.holdings())
        contents = [
            [payload.carried(subject) for payload in own]
            for subject, own in zip(connection.subjects, payloads, strict=True)
        ]
        connection.line.sent("state", sum(payload.byte_count for own in payloads for payload in own))
        island, facts = connection.actor, (self._epoch, versions, step, effect.cursor)
        if len(contents) == 1:
            call = island.call(IslandInterface.load, *facts, *contents[0])
        else:
            call = island.call(IslandInterface.load_ranks, *facts, contents)
        self._wait(effect, connection, call)

    def _wait(self, effect: f.BeginCatchUp, connection: Connection, call: ray.ObjectRef[None]) -> None:
        island, incarnation = effect.island, effect.incarnation
        donor = effect.donor[0] if effect.donor is not None else None
        while self._connection(island, incarnation) is connection:
            try:
                ray.get(call, timeout=ANSWER_TIMEOUT_S)
                return
            except TimeoutError:
                continue  # the same call: a stopped island answers it when it goes on
            except ActorDiedError:
                return  # the report link notices it, too
            except RayError as error:
                reason = in_words(error)
                self._post(
                    partial(events.CatchUpFailed, island=island, incarnation=incarnation, donor=donor, reason=reason)
                )
                return
