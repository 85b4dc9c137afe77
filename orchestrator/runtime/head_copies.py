"""Copies of what a job's processes write on machines that do not share its run folder, kept in that folder on the head.

    RUN_DIR/logs/islands/east-1.log         begins with a line that names the machine, the file there, and the first byte
    RUN_DIR/logs/islands/east-1.log.older   the part before, once that was longer than ``logbook.COPY_BYTES``
    all the rest of RUN_DIR                 of a synchroniser on another machine: ``HeadCopy``

So `atoll logs`, the page and the REST API read one folder, and the last lines of an island outlive its machine. The agent of
each node gives what was added since the last look. A machine that sees the text in RUN_DIR/logs/place.mark shares the
folder, and nothing is copied from it. On any other the folder is claimed, so that it is removed with the job; the whole log
stays there until then.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.exceptions import RayError

from orchestrator.checkpoints.manifest import MANIFEST
from orchestrator.core.vocabulary import Life
from orchestrator.errors import InfrastructureError, first_line, in_words
from orchestrator.runtime import cluster
from orchestrator.runtime.node_agent import NodeAgent
from orchestrator.runtime.node_agents import NodeAgents, node_agent_of
from orchestrator.runtime.placement import Placement
from orchestrator.runtime.run_copies import (
    EVERY_S,
    HALF_COPIED,
    Ask,
    Incomplete,
    Machine,
    RunCopy,
    facts_of,
    files_of,
    remove_file,
    sees,
    source_of,
)
from orchestrator.runtime.settings import CONTROL_GROUP
from orchestrator.runtime.supervision import Condition
from orchestrator.status import Helper as HelperStatus
from orchestrator.system.logbook import COPY_BYTES, LogAddition, Logbook, rank_logbook, remove_older
from orchestrator.system.run_folder import (
    ISLAND_LOGS,
    LOGS,
    PLACE,
    RESUMED,
    Copied,
    claim,
    copies_in,
    fleet_of,
    history_in,
    history_of,
    mark_source,
    note_copied,
    remove_claimed,
    set_aside,
)

log = logging.getLogger(__name__)

LOOK_S = 2.0
LAST_LOOK_S = 3.0
FINAL_LOOKS = 3
"""After the end of an island's process its log is looked at so often, for its machine may not answer at once."""
WRITTEN_ON_HEAD = (f"{LOGS}/{ISLAND_LOGS}/", f"{LOGS}/controller-")
"""What the job's controller writes into the head's folder, wherever the synchroniser is."""
HELPER = "copy of the run folder"
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


class HeadCopy:
    """Copies one run to this machine, the head's, while its synchroniser is on a machine that does not share the folder.

    ``source`` returns the id of the synchroniser's node, empty while there is none; ``machine`` returns the calls to the
    machine of a node, None for this one. Thread-safe. ``begin`` starts a thread that copies every ``EVERY_S``.
    """

    def __init__(self, run_dir: Path, source: Callable[[], str], machine: Callable[[str], Ask | None]) -> None:
        self._run_dir, self._source, self._machine = run_dir, source, machine
        self._node = ""
        self._ask: Ask | None = None
        """The calls to the machine of the synchroniser, None while that sees this folder."""
        self._copy: RunCopy | None = None
        self._marked = 0
        self._lock = threading.RLock()
        self._looked, self._looks, self._hurry = threading.Condition(), 0, threading.Event()
        self._closed = threading.Event()
        self._is_behind = False
        self.trouble = ""
        """Why the last look has not copied everything."""

    @property
    def copies(self) -> bool:
        """Return whether the synchroniser writes on another machine."""
        return self._ask is not None

    def statuses(self) -> list[HelperStatus]:
        """Return the state of the copy as that of a helper; none if nothing is copied."""
        condition = Condition.SILENT if self.trouble else Condition.RUNNING
        status = HelperStatus(name=HELPER, condition=condition.value, reason=self.trouble, restarts=0)
        return [status] if self.copies else []

    def begin(self) -> None:
        threading.Thread(target=copy_context().run, args=(self._run,), name="head-copy", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._hurry.set()

    def finish(self, within_s: float) -> str:
        """Wait until what the job has left is here, durably. Return why it is not; empty if it is."""
        with self._looked:
            wanted = self._looks + 2  # one may be under way

            def is_over() -> bool:
                self._hurry.set()
                return self._looks >= wanted or self._closed.is_set()

            is_late = not self._looked.wait_for(is_over, within_s)
        if not self.copies:
            return ""
        if not (self.trouble or is_late or self._is_behind):
            _make_durable(self._run_dir)
            return ""
        return self.trouble or "it is still being copied to the head"

    def take(self, name: str) -> None:
        """Move this file here from the synchroniser's machine, if that is another. Raises InfrastructureError, OSError."""
        with self._lock:
            self.look()
            if self._ask is None or self._copy is None:
                return
            facts = self._ask(facts_of, self._run_dir, name)
            if facts is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._run_dir / name))
            self._copy.update_file(facts)
            self._copy.forget(name)
            self._ask(remove_file, self._run_dir, name)

    def clear(self) -> None:
        """Remove the folder on the synchroniser's machine, whose content is here. Else it goes when the job is deleted."""
        with self._lock:
            runs = self._run_dir.parent
            try:
                if self._ask is not None and self._marked:
                    self._ask(remove_claimed, runs, [self._run_dir.name], fleet_of(runs))
            except (InfrastructureError, OSError) as error:
                log.warning("the copied run folder cannot be removed from the synchroniser's machine: %s", error)

    def look(self) -> None:
        """Copy what is new. Raises Incomplete, OSError or InfrastructureError."""
        with self._lock:
            node = self._source()
            if not node or not self._run_dir.is_dir():
                return  # it is being made again, or the job was deleted
            if node != self._node:
                ask = self._machine(node)
                is_elsewhere = ask is not None and not _is_same(self._run_dir, ask)
                self._ask, self._copy, self._marked, self._node = ask if is_elsewhere else None, None, 0, node
            if self._ask is None:
                return
            first_line, files = self._ask(source_of, self._run_dir)
            history, here = history_in(first_line), history_of(self._run_dir)
            if not history or history < here:
                return  # the synchroniser begins, and sets these files aside
            noted = copies_in(self._run_dir)
            if noted is None or noted.history != history:
                set_aside(self._run_dir, with_logs=True)
            if noted is None or (noted.history, noted.node) != (history, node):
                log.info("the synchroniser writes on another machine: its run folder is copied from there")
                note_copied(self._run_dir, history, node)
                self._copy = None
            if self._marked != history:
                self._ask(mark_source, self._run_dir, history, fleet_of(self._run_dir.parent))
                self._marked = history
            self._copy = self._copy or RunCopy(self._run_dir, self._ask)
            is_sealed = any(os.path.basename(facts.name) == MANIFEST for facts in files)
            earlier = () if is_sealed else (copies_in(self._run_dir) or Copied()).checkpoints
            self._copy.update([facts for facts in files if not facts.name.startswith(WRITTEN_ON_HEAD)], earlier)

    def _run(self) -> None:
        while not self._closed.is_set():
            trouble, is_behind = "", False
            try:
                self.look()
            except Incomplete:  # the next look finds the whole file
                is_behind = True
            except (InfrastructureError, OSError) as error:
                trouble = f"{self._run_dir} on the head cannot be kept up to date: {in_words(error)}"
            except Exception as error:  # the next look may do better
                trouble = in_words(error)
                log.exception("the run folder is not copied to the head")
            if trouble and trouble != self.trouble:
                log.warning("the run folder is not copied to the head: %s", trouble)
            self.trouble, self._is_behind = trouble, is_behind
            with self._looked:
                self._looks += 1
                self._looked.notify_all()
            self._hurry.wait(EVERY_S)
            self._hurry.clear()


def machine_of(agents: NodeAgents, node_id: str) -> Machine | None:
    """Return the calls to the machine of the node, None if it is this one."""
    if node_id == cluster.own_node_id():
        return None
    name = cluster.name_of_node(node_id) or node_id
    return Machine(lambda: agents.on(node_id, name), name)


def head_of(run_dir: Path) -> Ask | None:
    """Return the calls to the head's machine, None if that sees this run folder. Raises InfrastructureError, or OSError."""
    own = cluster.own_node_id()
    heads = [node.id for node in cluster.nodes() if node.group == CONTROL_GROUP]
    if not heads or own in heads:
        return None
    machine = Machine(lambda: node_agent_of(heads[-1]))
    return None if _is_same(run_dir, machine) else machine


def bring(run_dir: Path, checkpoint: str | None) -> None:
    """Get what a job that begins on this machine reads of the head's runs: the note of its resumption, and the checkpoint.

    Raises InfrastructureError, Incomplete, or OSError.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    if checkpoint is None or (run_dir / RESUMED).exists() or (ask := head_of(run_dir)) is None:
        return
    if (noted := ask(facts_of, run_dir, RESUMED)) is not None:
        RunCopy(run_dir, ask).update_file(noted)
    place = Path(checkpoint)
    if place.exists() or not place.is_relative_to(run_dir.parent):
        return  # it is not in the head's runs
    other = run_dir.parent / place.relative_to(run_dir.parent).parts[0]
    other.mkdir(exist_ok=True)
    claim(other, ask(fleet_of, run_dir.parent))
    copy = RunCopy(other, ask)
    for facts in ask(files_of, other):
        if (other / facts.name).is_relative_to(place):
            copy.update_file(facts)


def _is_same(run_dir: Path, ask: Ask) -> bool:
    """Return whether both machines see the same folder. The names are new, so that no cache of a file system has them."""
    own, theirs = (f".place-{secrets.token_hex(8)}" for _ in range(2))
    (run_dir / own).touch()
    try:
        return ask(sees, run_dir, own, theirs) or (run_dir / theirs).exists()
    finally:
        (run_dir / own).unlink(missing_ok=True)
        ask(remove_file, run_dir, theirs)


def _make_durable(folder: Path) -> None:
    for place, _, names in os.walk(folder):
        for path in (*(os.path.join(place, name) for name in names if not name.endswith(HALF_COPIED)), place):
            with suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
