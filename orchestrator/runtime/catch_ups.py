"""How an island is given a state: which call asks for it, and what the core hears when the call itself fails.

The island's letter says how it went. Refuses to choose the donor (``core.island_life``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, assert_never

import ray
from ray.exceptions import ActorDiedError, RayError

from orchestrator.core import effects as f
from orchestrator.core import events
from orchestrator.core.vocabulary import Epoch, Incarnation, IslandId
from orchestrator.errors import first_line
from orchestrator.host.checkpoint_writer import CheckpointWriter
from orchestrator.host.posting import Post
from orchestrator.runtime.links import Link
from orchestrator.runtime.workshop import Workshop

ANSWER_TIMEOUT_S = 10.0


class CatchUps:
    """``link`` finds the link to an incarnation, ``name`` what Ray calls its process."""

    def __init__(
        self,
        link: Callable[[IslandId, Incarnation], Link | None],
        name: Callable[[IslandId, Incarnation], str],
        epoch: Epoch,
        workshop: Workshop,
        checkpoints: CheckpointWriter,
        post: Post,
    ) -> None:
        self._link, self._name, self._epoch = link, name, epoch
        self._workshop, self._checkpoints, self._post = workshop, checkpoints, post
        self._count = count(1)

    def begin(self, effect: f.BeginCatchUp) -> tuple[Link, Any] | None:
        """The call under way, for ``wait``; ``None`` where nobody listens to the island any more."""
        link = self._link(effect.island, effect.incarnation)
        if link is None:
            return None
        match effect.source:
            case f.FromStandby():
                call = link.actor.resume.remote(self._epoch, effect.cursor)
            case f.FromSynchroniser():
                versions, step, payloads = self._workshop.whole_state()
                call = link.actor.load.remote(self._epoch, versions, step, effect.cursor, *payloads)
            case f.FromCheckpoint():
                call = link.actor.load_saved.remote(self._epoch, self._checkpoints.resumed_from, effect.cursor)
            case f.FromPeers(donor, helpers):
                donors = {self._name(*life): life[0] for life in (donor, *helpers)}
                call = link.actor.load_from.remote(self._epoch, next(self._count), donors, effect.cursor)
            case unknown:
                assert_never(unknown)
        return link, call

    def wait(self, effect: f.BeginCatchUp, link: Link, call: Any) -> None:
        """In a thread of its own, until the island has answered or is not listened to any more."""
        island, incarnation = effect.island, effect.incarnation
        donor = effect.donor[0] if effect.donor is not None else None
        while self._link(island, incarnation) is link:
            try:
                ray.get(call, timeout=ANSWER_TIMEOUT_S)
                return
            except TimeoutError:
                continue  # the same call: a stopped island answers it when it goes on
            except ActorDiedError:
                return  # the link says so, too
            except RayError as error:
                reason = f"{type(error).__name__}: {first_line(error)}"
                self._post(
                    partial(events.CatchUpFailed, island=island, incarnation=incarnation, donor=donor, reason=reason)
                )
                return
