"""Cordoned node groups and nodes: the store holds what operators want, and every living job is brought in line with it.

Jobs are reconciled by comparison, not by forwarding messages, so that a SIGKILL between storing and sending loses nothing:
the next service compares again, and a job that did not answer is compared again when it does. A command under way counts as
known to the job. Jobs decide by themselves what a cordon means; islands that train on a cordoned node group continue.

A cordoned node is skipped when islands are placed, so they go to other nodes of its group. Jobs do not hear of it. The
control port does, at every round, because a head that was started again may have forgotten it. An operator cordons nodes. If
the service was started with ``--cordon-bad-nodes``, the rule of the diagnosis does, too (``accounting.failures``), for all
running jobs together. It cordons at most ``CORDONED_RATIO_MAX`` of a group's nodes, and its cordons expire. No cordon of
nodes may leave a group without a node: while that would be so, those of the group are not in force. Nodes go by the names of
their machines, which tapes have, so nodes on one machine are cordoned together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Lock

from api.jobs.background_loop import ProblemLog, reason_of
from api.jobs.control import ControlPort
from api.jobs.outbox import Outbox, digest_of, row_of
from api.jobs.status_cache import refuse_outdated
from api.jobs.translate import request_in, status_in
from api.run.explanations import NodeFailures
from api.run.folder import Run
from api.schemas import JobState, NodeCordon, NodeGroup
from api.storage.store import CommandRow, CordonRow, JobRow, NodeCordonRow, Store
from orchestrator.accounting.failures import Failure, bad_nodes
from orchestrator.core.commands import Cordon, Uncordon
from orchestrator.core.vocabulary import IslandId, NodeGroupId
from orchestrator.errors import Conflict, InfrastructureError, NotFound
from orchestrator.specification.config import JobSpec
from orchestrator.status import NodeGroupRecord
from orchestrator.system import printable
from orchestrator.system.plain import counted, some_of

logger = logging.getLogger(__name__)


NOT_OVER = frozenset(state for state in JobState if not state.final)
BAD_NODE_RULE = "the rule for bad nodes"
"""The caller of its cordons."""
CORDONED_RATIO_MAX = 0.25
"""Of a group's nodes that can be used; of a group of two or three the rule may cordon one."""
CORDON_S = 6 * 3600.0
"""How long a cordon of the rule lasts. A node that is still bad gets the next one after three more failures."""
LIFTED_KEPT_S = 7 * 86400.0
"""How long a lifted cordon is kept at least: from its end on the failures of its node count."""
REASON_CHARACTERS_MAX = 400
ROUND_EVERY_S = 10.0


class NodeCordons:
    """The cordons of single nodes. ``by_rule`` lets the rule for bad nodes add some; ``audit`` records that it did.

    ``round`` is for one thread; the rest may be called from any.
    """

    def __init__(
        self,
        control: ControlPort,
        store: Store,
        *,
        by_rule: bool = False,
        audit: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._control, self._store, self._by_rule, self._audit, self._clock = control, store, by_rule, audit, clock
        self._lock = Lock()
        """Cordons are compared with the groups and stored in one step, or two could take a group's last two nodes."""
        self._folds: dict[str, NodeFailures] = {}
        self._problem_log = ProblemLog(logger)
        self._latest: tuple[NodeCordon, ...] = ()

    def latest(self) -> tuple[NodeCordon, ...]:
        """Return the cordons as of the last round or change, without asking the store or the cluster."""
        return self._latest

    def of(self, groups: Sequence[NodeGroupRecord]) -> list[NodeCordon]:
        """Return the cordons of nodes, by name, as they are in force with these groups."""
        rows = self._active()
        effective_names = in_force(rows, groups)
        return [
            NodeCordon(
                node=row.node,
                node_group=row.node_group,
                cordoned_by=row.caller,
                reason=row.reason,
                cordoned_at=row.cordoned_at,
                expires_at=row.expires_at,
                in_force=row.node in effective_names,
            )
            for row in rows
        ]

    def change(self, node_group: str, node: str, caller: str, cordoned: bool) -> None:
        """Cordon or uncordon the node of this group. Idempotent. Uncordoning also resets the count of its failures.

        Raises NotFound for a node that is not there, and Conflict for the last node of a group that is not cordoned.
        """
        groups = self._control.node_groups()
        group = next((group for group in groups if group["name"] == node_group), None)
        names = group.get("node_names", []) if group is not None else []
        with self._lock:
            rows = self._active()
            cordons_here = {row.node for row in rows if row.node_group == node_group}
            if node not in {*names, *cordons_here}:
                raise NotFound(
                    detail=f"Node group {node_group!r} has no node {node!r}.",
                    remedy=f"It has {some_of(names) or 'none that answers'}; `atoll islands JOB -o wide` names nodes.",
                )
            if (
                cordoned
                and node not in cordons_here
                and group is not None
                and (why := _last_of(node, group, cordons_here))
            ):
                raise Conflict(detail=f"{why}.", remedy=f"Cordon the whole group: `atoll cordon {node_group}`.")
            now = self._clock()
            if cordoned:
                row = NodeCordonRow(node=node, node_group=node_group, caller=caller, reason="", cordoned_at=now)
                self._store.cordon_node(row)
            else:
                self._store.uncordon_node(node, now, node_group, caller)
        self._tell(groups)

    def round(self) -> None:
        """End what has expired, apply the rule if it is on, and tell the cluster which nodes are cordoned."""
        groups = self._control.node_groups() if self._by_rule or self._active() else []
        now = self._clock()
        with self._lock:
            for row in self._active():
                if row.expires_at is not None and row.expires_at <= now:
                    self._store.uncordon_node(row.node, now, row.node_group, BAD_NODE_RULE)
                    logger.info("node %s is no longer cordoned: %.0f h are over", row.node, CORDON_S / 3600)
        if self._by_rule:
            failures, nodes_of, is_whole = self._failures()
            with self._lock:
                self._apply_rule(failures, nodes_of, groups, now)
                if is_whole:
                    self._forget(failures, now)
        self._tell(groups)

    def _active(self) -> list[NodeCordonRow]:
        return [row for row in self._store.node_cordons().values() if row.lifted_at is None]

    def _tell(self, groups: Sequence[NodeGroupRecord]) -> None:
        self._latest = tuple(self.of(groups))
        self._control.cordon_nodes([one.node for one in self._latest if one.in_force])

    def _apply_rule(
        self,
        failures: Iterable[Failure],
        nodes_of: dict[IslandId, frozenset[str]],
        groups: Sequence[NodeGroupRecord],
        now: float,
    ) -> None:
        rows = self._store.node_cordons()
        counts_from = {row.node: row.lifted_at for row in rows.values() if row.lifted_at is not None}
        counted_failures = [one for one in failures if one.at > counts_from.get(one.node, 0.0)]
        cordoned = {row.node for row in rows.values() if row.lifted_at is None}
        bad = bad_nodes(counted_failures, nodes_of, now)
        for node, own in sorted(bad.items(), key=lambda item: (-len(item[1]), item[0])):
            group = next((group for group in groups if node in group.get("node_names", [])), None)
            if node in cordoned or group is None:
                continue
            reason = reason_for(own)
            own_groups = [one for one in groups if node in one.get("node_names", [])]
            if why := next(filter(None, (not_by_rule(node, one, cordoned) for one in own_groups)), ""):
                self._problem_log.note(f"node {node}", f"it is bad ({reason}), but not cordoned: {why}")
                continue
            row = NodeCordonRow(
                node=node,
                node_group=group["name"],
                caller=BAD_NODE_RULE,
                reason=reason,
                cordoned_at=now,
                expires_at=now + CORDON_S,
            )
            self._store.cordon_node(row)
            self._audit(f"/v1/node-groups/{group['name']}/nodes/{node}/cordon")
            cordoned.add(node)
            logger.warning("node %s of %s is cordoned: %s", node, group["name"], reason)
        self._problem_log.keep({f"node {node}" for node in bad} | {f"job {job}" for job in self._folds})

    def _forget(self, failures: Iterable[Failure], now: float) -> None:
        """Remove lifted cordons that no longer decide which failures count. Nodes of clouds have new names each time."""
        first: dict[str, float] = {}
        for one in failures:
            first[one.node] = min(one.at, first.get(one.node, one.at))
        for row in self._store.node_cordons().values():
            if row.lifted_at is None or row.lifted_at > min(now - LIFTED_KEPT_S, first.get(row.node, now)):
                continue
            self._store.forget_node_cordon(row.node)

    def _failures(self) -> tuple[list[Failure], dict[IslandId, frozenset[str]], bool]:
        """Return the failures of all running jobs, but those of islands of many hosts, any of which may be to blame.

        Also returns where their islands were, and whether every job's failures could be counted.
        """
        rows = self._store.jobs(states={JobState.RUNNING})
        self._folds = {row.job: self._folds.get(row.job) or NodeFailures(run_of(row)) for row in rows}
        failures: list[Failure] = []
        nodes_of: dict[IslandId, frozenset[str]] = {}
        is_whole = True
        for row in rows:
            try:
                spec = JobSpec.model_validate(row.spec)
                sections = {**spec.island_sections(slots=True), **spec.standby_sections()}
                single = {IslandId(f"{row.job}/{name}") for name, section in sections.items() if section.hosts == 1}
                own, places = self._folds[row.job].so_far()
            except Exception as error:  # other jobs are not affected
                self._problem_log.note(f"job {row.job}", f"its failures cannot be counted: {reason_of(error)}", error)
                is_whole = False
                continue
            self._problem_log.settle(f"job {row.job}")
            failures += [one for one in own if one.island in single]
            nodes_of |= {island: nodes for island, nodes in places.items() if island in single}
        return failures, nodes_of, is_whole


def run_of(row: JobRow) -> Run:
    return Run(row.job, Path(row.run_dir), False)


def reason_for(failures: Sequence[Failure]) -> str:
    """Return why a node is bad, in words."""
    last = max(failures, key=lambda one: one.at)
    islands = some_of(sorted({one.island for one in failures}), 4)
    words = f"{counted(len(failures), 'failure')} of {islands}, the last one: {last.reason or 'no reason'}"
    return printable.line(words)[:REASON_CHARACTERS_MAX]


def in_force(rows: Iterable[NodeCordonRow], groups: Iterable[NodeGroupRecord]) -> set[str]:
    """Return the cordoned nodes that are skipped: those of groups with another node that can be used."""
    cordoned = {row.node for row in rows}
    left = {group["name"]: set(group.get("node_names", [])) for group in groups}
    full = {node for nodes in left.values() if nodes and not nodes - cordoned for node in nodes}
    return cordoned - full


def not_by_rule(node: str, group: NodeGroupRecord, cordoned: Iterable[str]) -> str:
    """Return why the rule must not cordon this node of the group; empty if it may."""
    names, cordon_names = set(group.get("node_names", [])), set(cordoned)
    count, limit = len(names & cordon_names), max(1, int(len(names) * CORDONED_RATIO_MAX))
    if count >= limit:
        return f"{count} of {counted(len(names), 'node')} of {group['name']} are cordoned already"
    return _last_of(node, group, cordon_names)


def _last_of(node: str, group: NodeGroupRecord, cordoned: Iterable[str]) -> str:
    others = set(group.get("node_names", [])) - {*cordoned, node}
    return "" if others else f"{node} is the last node of {group['name']} that can be used"


class Cordons:
    def __init__(self, control: ControlPort, store: Store, outbox: Outbox, nodes: NodeCordons) -> None:
        self.nodes = nodes
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
        nodes = self.nodes.of(groups)
        return [
            NodeGroup(
                **group,
                cordoned=group["name"] in cordoned,
                cordoned_by=cordoned.get(group["name"]),
                cordoned_nodes=[one for one in nodes if one.node_group == group["name"]],
            )
            for group in groups
        ]

    def callers(self) -> dict[str, str]:
        """Return the cordoned node groups, and who cordoned each."""
        return {name: row.caller for name, row in self._store.cordons().items()}

    def generation(self) -> str:
        """Return a text that changes whenever a node group, or a node, is cordoned or uncordoned."""
        groups, nodes = self._store.cordons().values(), self._store.node_cordons().values()
        facts: list[tuple[object, ...]] = [(row.node_group, row.caller, row.cordoned_at) for row in groups]
        return digest_of([*facts, *((row.node, row.caller, row.cordoned_at, row.lifted_at) for row in nodes)])[:8]

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

    def change_node(
        self, node_group: str, node: str, caller: str, cordoned: bool, if_match: str | None = None
    ) -> NodeGroup:
        """Cordon or uncordon one node of the group (``NodeCordons.change``), refused as ``change`` is with ``if_match``."""
        refuse_outdated(if_match, self.generation(), "the node groups")
        self.nodes.change(node_group, node, caller, cordoned)
        return next(group for group in self.node_groups() if group.name == node_group)

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
