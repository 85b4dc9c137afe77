"""Copies of the logs of islands whose machine does not share the job's run folder, kept in that folder.

    RUN_DIR/logs/islands/east-1.log         begins with a line that names the machine, the file there, and the first byte
    RUN_DIR/logs/islands/east-1.log.older   the part before, once that was longer than ``logbook.COPY_BYTES``

So `atoll logs`, the page and the REST API read one folder, and the last lines of an island outlive its machine. The agent of
each node gives what was added since the last look. A machine that sees the text in RUN_DIR/logs/place.mark shares the
folder, and nothing is copied from it. On any other the folder is claimed, so that it is removed with the job; the whole log
stays there until then.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.exceptions import RayError

from orchestrator.core.vocabulary import Life
from orchestrator.errors import first_line
from orchestrator.runtime.node_agent import NodeAgent
from orchestrator.runtime.node_agents import NodeAgents
from orchestrator.runtime.placement import Placement
from orchestrator.system.logbook import COPY_BYTES, LogAddition, Logbook, rank_logbook, remove_older
from orchestrator.system.run_folder import LOGS, PLACE, fleet_of

log = logging.getLogger(__name__)

LOOK_S = 2.0
LAST_LOOK_S = 3.0
FINAL_LOOKS = 3
"""After the end of an island's process its log is looked at so often, for its machine may not answer at once."""
_HEADING = re.compile(rb"\[copy of .* on .* from byte (\d+)\]\n")


@dataclass(slots=True)
class _Copied:
    """One process's log. ``at`` is how much of it has been copied, None before that is known."""

    book: Logbook
    placed: Placement
    at: int | None = None
    looks_left: int | None = field(default=None)


class LogCopies:
    """Thread-safe. ``begin`` starts a thread that copies every few seconds."""

    def __init__(self, run_dir: Path, agents: NodeAgents) -> None:
        self._run_dir, self._mark, self._agents = run_dir, run_dir / LOGS / PLACE, agents
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._logs: dict[Path, _Copied] = {}
        self._shared: dict[str, bool] = {}
        """By node: whether it shares the run folder."""
        self._closed = threading.Event()
        self._text, self._fleet = secrets.token_hex(16), ""

    def begin(self) -> None:
        try:
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.write_text(self._text)
            self._fleet = fleet_of(self._run_dir.parent)
        except OSError as error:
            log.warning("logs of islands on other machines are not copied: %s", first_line(error))
            return
        threading.Thread(target=copy_context().run, args=(self._run,), name="log-copies", daemon=True).start()

    def close(self) -> None:
        """Copy nothing more by itself."""
        self._closed.set()

    def add(self, book: Logbook, placed: Placement) -> None:
        """Copy the logs of this island's processes from now on."""
        with self._lock:
            for number, rank in enumerate(placed.ranks):
                own = rank_logbook(book, number)
                self._logs.setdefault(own.path, _Copied(own, rank))

    def end(self, life: Life) -> None:
        """Stop copying the logs of this life once their last lines are here."""
        island, incarnation = life
        with self._lock:
            for copied in self._logs.values():
                source, _, _ = copied.book.source.partition("-host")
                if island in (copied.book.source, source) and copied.book.number == incarnation:
                    copied.looks_left = FINAL_LOOKS

    def look(self, within_s: float = LOOK_S) -> None:
        """Copy what was added. Returns when the nodes have answered or the time is over."""
        with self._looking:
            with self._lock:
                nodes: dict[str, list[_Copied]] = {}
                for copied in self._logs.values():
                    nodes.setdefault(copied.placed.node_id, []).append(copied)
            self._recognise([own[0].placed for node_id, own in nodes.items() if node_id not in self._shared], within_s)
            calls = {}
            for node_id, own in nodes.items():
                if self._shared.get(node_id) is False:
                    for copied in own:
                        copied.at = _copied_so_far(copied.book.path) if copied.at is None else copied.at
                    requests = [(str(copied.book.path), copied.at or 0) for copied in own]
                    calls[self._agents.call(own[0].placed, NodeAgent.read_logs, requests)] = own
            if calls:
                ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=within_s)
                for call in ready:
                    self._take(calls[call], call)
            self._forget_ended()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                self.look()
            except Exception as error:  # the next look may do better
                log.warning("logs of other machines are not copied: %s", first_line(error))

    def _recognise(self, nodes: Sequence[Placement], within_s: float) -> None:
        calls, facts = {}, (str(self._mark), self._text, str(self._run_dir), self._fleet)
        for placed in nodes:
            try:
                calls[self._agents.call(placed, NodeAgent.shares, *facts)] = placed
            except AttributeError:  # an agent of an earlier build
                self._shared[placed.node_id] = True
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=within_s) if calls else ([], [])
        for call in ready:
            try:
                self._shared[calls[call].node_id] = ray.get(call)
            except RayError as error:
                log.info("%s does not say whether it shares the run folder: %s", calls[call].node, first_line(error))

    def _take(self, own: Sequence[_Copied], call: ray.ObjectRef[list[LogAddition | None]]) -> None:
        try:
            additions = ray.get(call)
        except RayError as error:
            log.info("the logs on %s cannot be read: %s", own[0].placed.node, first_line(error))
            return
        for copied, addition in zip(own, additions, strict=True):
            if addition is not None and addition.content:
                _append(copied, addition)
            if addition is not None:
                copied.at = addition.end

    def _forget_ended(self) -> None:
        with self._lock:
            for path, copied in list(self._logs.items()):
                if copied.looks_left is not None:
                    copied.looks_left -= 1
                    if copied.looks_left < 0:
                        del self._logs[path]


def _copied_so_far(path: Path) -> int:
    """Return up to which byte an earlier controller has copied the log."""
    try:
        with path.open("rb") as file:
            heading = file.readline()
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return 0
    matched = _HEADING.fullmatch(heading)
    return int(matched[1]) + size - len(heading) if matched else 0


def _append(copied: _Copied, addition: LogAddition) -> None:
    """Append to the copy. It begins anew, beside its older half, if it is too long or does not continue the copy."""
    path = copied.book.path
    try:
        path.parent.mkdir(exist_ok=True)  # and no more: the job may be deleted
        is_continued = path.exists() and copied.at and addition.start == copied.at
        if not is_continued or path.stat().st_size > COPY_BYTES:
            if path.exists():
                os.replace(path, copied.book.older)
            else:
                remove_older(copied.book)
            path.write_text(f"[copy of {path} on {copied.placed.node} from byte {addition.start}]\n")
        with path.open("ab") as file:
            file.write(addition.content)
    except OSError as error:
        log.warning("the log of %s is not copied to %s: %s", copied.book.source, path, first_line(error))
