"""A learner island as a Ray actor: the island's loop on one side, the service's calls on the other.

Responsible for turning calls into what the loop understands, and its letters into answers. Refuses to decide anything,
and to wait: nothing a step needs goes through here, so an island trains on whatever becomes of Ray. The process starts
light; JAX is imported when ``prepare`` says what for.

Who commands says with which epoch; one that was replaced is told ``Fenced`` (``correspondence``, which keeps the letters).
A payload is a *returned* value: it belongs to who asked, and survives this process.

Source: Ray 2.60 as measured (DESIGN section 9).
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray

from learners import checkpointing
from learners.correspondence import Correspondence
from learners.loop import IslandLoop, LoopPlan
from learners.niceness import give_way, give_way_since, threads
from learners.outbox import Outbox
from learners.vigil import Vigil
from orchestrator import logbook
from orchestrator.checkpoints.folder import Folder
from orchestrator.checkpoints.manifest import part_digest
from orchestrator.core.messages import Broken, CatchUpFailure, CaughtUp, Letter, NotSaved, Ready, Saved
from orchestrator.core.vocabulary import Epoch, FragmentId, Incarnation, IslandId, Version
from orchestrator.errors import InfrastructureError, last_line
from orchestrator.merge import fragment_map, wire

EXPORT_TIMEOUT_S = 30.0
TRANSFER_TIMEOUT_S = 35.0
"""A little more than the donor takes at most."""
SYNTHETIC = "learners.synthetic"

log = logging.getLogger(__name__)


class Island:
    """One incarnation. Made with many threads: a long poll, an export and deliveries go on at once."""

    def __init__(
        self, island: IslandId, environment: Mapping[str, str], book: logbook.Logbook, abandoned_after_s: float
    ) -> None:
        os.environ.update(environment)
        logbook.keep(book)
        log.info("%s, incarnation %d, is process %d", island, book.number, os.getpid())
        self._island, self._incarnation = island, Incarnation(book.number)
        self._synthetic = False
        self._saves: set[int] = set()
        self._outbox = Outbox()
        self._loop: IslandLoop | None = None
        self._correspondence = Correspondence(
            self._outbox, lambda: self._loop.standing_offers() if self._loop is not None else ()
        )
        self._codec: wire.Codec = "float32"
        self._computes = False
        self._vigil = Vigil(abandoned_after_s, self._give_up)
        self._device_count = self._shard_index = 0

    def hello(self) -> dict[str, Any]:
        """Who this is: the facts of ``Placement``."""
        return {
            "pid": os.getpid(),
            "seen_at": time.time(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "node": socket.gethostname(),
        }

    def prepare(self, spec: dict[str, Any], shard_index: int, shard_count: int, hurry: bool) -> None:
        """Begin to build and compile the model; ``Ready`` or ``Broken`` follows.

        An island that comes back may ``hurry``: until it is ready, it does not give way to those that train.
        """
        self._synthetic = spec["trainer"].startswith(SYNTHETIC)
        self._computes = os.environ.get("JAX_PLATFORMS") == "cpu" and not self._synthetic
        threading.Thread(
            target=self._prepare, args=(spec, shard_index, shard_count, hurry), name="prepare", daemon=True
        ).start()

    def load(self, epoch: Epoch, versions: Sequence[Version], step: int, cursor: int, *payloads: bytes) -> None:
        """Take the synchroniser's parameters, one payload a fragment. ``CaughtUp`` or ``CatchUpFailure`` follows."""
        self._correspondence.heed(epoch)
        began = time.monotonic()
        try:
            arrays = {name: array for payload in payloads for name, array in wire.decode(payload).items()}
            self._built().load(arrays, versions, step, cursor)
        except Exception as error:
            log.exception("the synchroniser's state cannot be taken")
            self._outbox.put(CatchUpFailure(None, _told(error)))
            return
        log.info("caught up from the synchroniser, at step %d", step)
        self._outbox.put(CaughtUp(None, tuple(versions), step, time.monotonic() - began))

    def load_from(self, epoch: Epoch, actor: str, donor: IslandId, cursor: int) -> None:
        """Take the state of a peer, from process to process. ``CaughtUp`` or ``CatchUpFailure`` follows."""
        self._correspondence.heed(epoch)
        began = time.monotonic()
        try:
            handle = ray.get_actor(actor, namespace=ray.get_runtime_context().namespace)
            state = ray.get(handle.export_state.remote(), timeout=TRANSFER_TIMEOUT_S)
            self._built().load_peer(state, cursor)
        except Exception as error:  # a dead donor is only one of the ways; the service chooses another
            log.warning("no state from %s: %s", donor, error)
            self._outbox.put(CatchUpFailure(donor, _told(error)))
            return
        versions, step = tuple(state["versions"]), state["step"]
        log.info("caught up from %s, at step %d", donor, step)
        self._outbox.put(CaughtUp(donor, versions, step, time.monotonic() - began))

    def take_over(self, island: IslandId, shard_index: int, book: logbook.Logbook) -> dict[str, Any]:
        """A standby becomes an island: its name, data and logbook. ``Ready`` follows; answers as ``hello``."""
        log.info("this process is %s, incarnation %d, from here on", island, book.number)
        logbook.keep(book)
        log.info("%s, incarnation %d, is process %d, which was %s", island, book.number, os.getpid(), self._island)
        self._island, self._incarnation, self._shard_index = island, Incarnation(book.number), shard_index
        self._correspondence.forget()
        self._outbox.put(Ready(self._device_count, 0.0))
        return self.hello()

    def resume(self, epoch: Epoch, cursor: int) -> None:
        """Go on from what this process holds from its time as a standby. ``CaughtUp`` or ``CatchUpFailure`` follows."""
        self._correspondence.heed(epoch)
        began = time.monotonic()
        try:
            versions, step = self._built().take_over(self._shard_index, cursor)
        except Exception as error:
            log.exception("what this standby holds cannot be gone on from")
            self._outbox.put(CatchUpFailure(None, _told(error)))
            return
        log.info("goes on from its own state, at step %d", step)
        self._outbox.put(CaughtUp(None, versions, step, time.monotonic() - began))

    def load_saved(self, epoch: Epoch, folder: str, cursor: int) -> None:
        """Take the state that the checkpoint has of this island. ``CaughtUp`` or ``CatchUpFailure`` follows."""
        self._correspondence.heed(epoch)
        began = time.monotonic()
        try:
            saved = checkpointing.restored(folder, self._island)
            self._built().load_saved(saved, cursor)
        except Exception as error:
            log.exception("the checkpoint's state cannot be taken")
            self._outbox.put(CatchUpFailure(self._island, _told(error)))
            return
        log.info("gone on from %s, at step %d", folder, saved.part.step)
        self._outbox.put(CaughtUp(self._island, saved.versions, saved.part.step, time.monotonic() - began))

    def start(self, epoch: Epoch) -> None:
        self._correspondence.heed(epoch)
        threading.Thread(target=self._start, name="start", daemon=True).start()

    def flush(self, epoch: Epoch) -> None:
        self._correspondence.heed(epoch)
        self._built().flush()

    def drain(self, epoch: Epoch) -> None:
        self._correspondence.heed(epoch)
        self._built().drain()

    def deliver(
        self, epoch: Epoch, fragment: FragmentId, version: Version, step: int, merged_offer: int, payload: bytes
    ) -> None:
        """Put a published fragment into the mailbox."""
        self._correspondence.heed(epoch)
        self._built().deliver(fragment, version, step, wire.decode(payload), merged_offer)

    def save(self, epoch: Epoch, checkpoint: int, folder: str) -> None:
        """Cut at the next boundary, and write this island's part while it trains on. ``Saved`` or ``NotSaved`` follows."""
        self._correspondence.heed(epoch)
        if checkpoint in self._saves:
            return  # the marker came twice
        self._saves.add(checkpoint)
        try:
            cut = self._built().request_cut()
        except InfrastructureError as error:
            self._outbox.put(NotSaved(checkpoint, _told(error)))
            return
        threading.Thread(target=self._save, args=(checkpoint, folder, cut), name="save", daemon=True).start()

    def take_payload(self, fragment: FragmentId, offer: int) -> bytes | None:
        """The offer's bytes, or ``None`` if a newer offer has replaced it."""
        arrays = self._built().take(fragment, offer)
        return None if arrays is None else wire.encode(arrays, self._codec)

    def letters(self, epoch: Epoch, read: int, acknowledged: int, timeout_s: float) -> list[tuple[int, Letter]]:
        """See ``Correspondence.letters``."""
        letters = self._correspondence.letters(epoch, read, acknowledged, timeout_s)
        self._vigil.heard()
        return letters

    def export_state(self) -> dict[str, Any]:
        """A peer's way to this island's state; raises when it has none to give."""
        return self._built().export_state(EXPORT_TIMEOUT_S)

    def _prepare(self, spec: dict[str, Any], shard_index: int, shard_count: int, hurry: bool) -> None:
        began, before = time.monotonic(), threads()
        if self._computes and not hurry:
            give_way()
        try:
            module, _, name = spec["trainer"].partition(":")
            trainer = getattr(importlib.import_module(module), name)(spec, shard_index, shard_count)
            trainer.warm_up()
            knobs = spec["synchroniser"]
            sizes = {tensor: math.prod(shape) for tensor, shape in trainer.tensor_shapes().items()}
            plan = LoopPlan(
                fragments=fragment_map.build(sizes, knobs["fragments"]),
                interval_steps=knobs["interval_steps"],
                adoption=knobs["adoption"],
                mix_alpha=knobs["mix_alpha"],
            )
            self._codec, self._device_count = knobs["wire"], trainer.device_count
            self._loop = IslandLoop(trainer, plan, self._outbox)
        except Exception as error:
            log.exception("the model cannot be built")
            self._outbox.put(Broken(_told(error)))
            return
        if self._computes:
            give_way_since(before)
        log.info("the model is built, on %d devices", trainer.device_count)
        self._outbox.put(Ready(trainer.device_count, time.monotonic() - began))

    def _give_up(self) -> None:
        log.critical("nobody has listened to this island for too long; it ends itself")
        os._exit(1)  # other threads may be inside a step, or a call

    def _save(self, checkpoint: int, folder: str, asked: Future[checkpointing.Cut]) -> None:
        if self._computes:
            give_way()
        try:
            cut = asked.result()
            orbax = not self._synthetic
            part = checkpointing.write(cut, Folder(folder), self._island, self._incarnation, orbax=orbax)
        except Exception as error:  # a full disk is only one of the ways; training goes on
            log.exception("this island's part of checkpoint %d is not written", checkpoint)
            self._outbox.put(NotSaved(checkpoint, _told(error)))
            return
        log.info("saved for checkpoint %d, at step %d", checkpoint, cut.step)
        self._outbox.put(Saved(checkpoint, part_digest(part), cut.tokens_total, cut.held_seconds))

    def _start(self) -> None:
        """From a thread that gives way, where this island computes on the host's cores: the loop's own does as well."""
        if self._computes:
            give_way()
        self._built().start()

    def _built(self) -> IslandLoop:
        if self._loop is None:
            raise RuntimeError(f"island {self._island} has not built its model yet")
        return self._loop


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {last_line(error)}"
