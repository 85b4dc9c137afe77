"""The control plane's way to jobs on Ray: ``connect`` returns what ``api.jobs.control.ControlPort`` describes.

A thin driver: it holds nothing that matters, so the process that uses it may die and another may connect. Every call
answers or fails within seconds, also while the head is dead: Ray itself waits for a head as long as it tolerates partitions,
so what asks the head is asked of its port first, and then in threads of its own with a deadline. Remembers no jobs.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

import psutil

from orchestrator.actors import ActorHandle, ActorT, IslandInterface, ProfileRecord, SynchroniserInterface
from orchestrator.certificates import peer
from orchestrator.core.commands import Command, Upgrade
from orchestrator.core.vocabulary import Life
from orchestrator.errors import (
    Conflict,
    FilesElsewhere,
    InfrastructureError,
    LogStoreUnavailable,
    NotFound,
    disk_remedy,
    in_words,
)
from orchestrator.runtime import cluster, dead_nodes, run_copies
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.node_agent import NodeAgent
from orchestrator.runtime.nodes import node_groups_of
from orchestrator.runtime.placement import Node
from orchestrator.runtime.processes import StartWatch
from orchestrator.runtime.settings import (
    AUTHORITIES_VARIABLE,
    CONTROL_GROUP,
    SYNCHRONISER_OPTIONS,
    island_name,
    synchroniser_name,
)
from orchestrator.specification.config import JobSpec
from orchestrator.specification.memory_budget import NodeMemory
from orchestrator.status import CertificateRecord, NodeGroupRecord, StatusDocument, UnseenFile
from orchestrator.system import object_store, python_process, release
from orchestrator.system.marks import BY_UP
from orchestrator.system.mirror import JobObjects, delete_log
from orchestrator.system.ports import REACH_S, Reach
from orchestrator.system.roots import AllowedRoots
from orchestrator.system.run_folder import claimed, file_sizes, fleet_of, history_of, own_history_of, remove_claimed
from orchestrator.system.store_log import has_log
from orchestrator.system.threads import BoundedThreads
from orchestrator.tape import codec

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
START_LOOK_S = 2.0
"""Between two looks at a synchroniser that is being made."""
ASK_NODES_S = 10.0
"""What a question to all nodes may take. A process that has to be started first may need it."""
ANSWER_TIMEOUT_S = 10.0
ISLAND_ANSWER_S = 30.0
"""An island that writes the files of a trace answers late."""
REHEARSED_WITHIN_S = 60.0
"""A process starts and replays the whole tape of a job."""
NOTHING_MORE = AllowedRoots()
SAVE_BASE_S, SAVE_BYTES_PER_S_MIN = 120.0, 5_000_000
"""A write of Θ takes no longer than so long, and as its size says at this rate: a disk that is slower has stopped."""
FLOAT32_BYTES = 4
CERTIFICATES_FRESH_S = 300.0
QUESTIONS_MAX = 16
"""To the head, at a time. Each is answered within milliseconds, or by nobody."""
DEAD_S = 3.0
"""How long a node's machine must refuse connections before the head forgets the node."""

Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")


def connect(home: Path) -> RayControlPort:
    """Join the cluster of ``home``. Raises InfrastructureError when there is none."""
    cluster.join(home)
    about = ClusterFile.find(home)
    store = object_store.remembered(home)
    if about is None:
        return RayControlPort(store=store)
    return RayControlPort(about, (Path(about.temp_dir), about.state), store)


class RayControlPort:
    """``head`` is where the cluster's head listens; None where nobody knows, and it is asked without a look at its port.

    ``private`` are the cluster's own files, which jobs have no business in. ``store`` is the service's, for mirrored jobs.
    """

    def __init__(self, head: ClusterFile | None = None, private: Sequence[Path] = (), store: str | None = None) -> None:
        self._head, self._private, self._job_store = head, private, store
        self._secret = head.secret() if head is not None else ""
        self._copies: run_copies.RunCopies | None = None
        self._certificates: list[CertificateRecord] = []
        self._certificates_at = -math.inf
        self._swept: set[str] = set()
        """The nodes on which nothing of unknown jobs was left, by id."""
        self._suspects: dict[str, float] = {}
        """Since when nodes that the head believes alive seem dead, by id."""
        self._questions = BoundedThreads("questions to the cluster's head", QUESTIONS_MAX)

    def begin(self, runs: Path) -> None:
        """Look whether the head's machine sees the service's folder of runs. If it does not, keep copies from now on.

        Raises InfrastructureError if the head does not answer.
        """
        nodes = self._ask_head(cluster.nodes)
        heads = [node for node in nodes if node.group == CONTROL_GROUP]
        if not heads or self._ask_head(cluster.own_node_id) in {node.id for node in heads}:
            return
        self._copies = run_copies.shared(runs, run_copies.Machine(self._head_agent))
        if self._copies is not None:
            self._copies.begin()

    def _head_agent(self) -> ActorHandle[NodeAgent]:
        """Return the agent of the head's node, which is another one after each start of the head."""
        from orchestrator.runtime.node_agents import node_agent_of

        heads = [node.id for node in self._ask_head(cluster.nodes) if node.group == CONTROL_GROUP]
        if not heads:
            raise InfrastructureError(detail="The head has no node.", remedy="Wait until it has started.")
        return self._ask_head(lambda: node_agent_of(heads[-1]))

    def node_groups(self) -> list[NodeGroupRecord]:
        """Every group that has a node, by name; the head's own is not one of them.

        Raises InfrastructureError where the node that this process joined by has died, though the head answers.
        """
        if not self._ask_head(cluster.own_node_runs):
            raise InfrastructureError(
                detail="The head's own node (its raylet), by which the service is part of the cluster, has died.",
                remedy=f"{self._node_remedy()}; jobs train on meanwhile.",
            )
        leaving, reaches = self._ask_head(cluster.leaving_nodes), self._reaches()
        nodes = self._ask_head(cluster.nodes)
        down = {node.id for node in nodes if reaches.get(node.id, Reach.TAKEN) is not Reach.TAKEN}
        return node_groups_of(nodes, down, leaving)

    def _reaches(self) -> dict[str, Reach]:
        """Return whether each node answers, by id. Have the head, which is patient, forget nodes dead for ``DEAD_S``."""
        reaches = self._ask_head(cluster.node_reaches)
        suspects = {node for node, seen in reaches.items() if seen is Reach.REFUSED}
        suspects |= self._ask_head(cluster.doubled_nodes)
        now = time.monotonic()
        self._suspects = {node: self._suspects.get(node, now) for node in suspects}
        due = [node for node, since in self._suspects.items() if now - since >= DEAD_S]
        if self._head is not None and due:
            self._unregister(self._head.address, due)
        return reaches

    def _unregister(self, head: str, suspects: Collection[str]) -> None:
        """Have the head forget those of these nodes that are dead. A head that has no time for that is asked again."""
        try:
            names = self._ask_head(lambda: dead_nodes.unregister_dead(head, suspects))
        except InfrastructureError as error:
            log.warning("dead nodes are not forgotten yet: %s", error)
            return
        if names:
            log.warning("the head has forgotten nodes whose processes are dead: %s", ", ".join(names))

    def _node_remedy(self) -> str:
        if self._head is None or self._head.supervisor == BY_UP:
            return "`atoll up` starts it and the service again"
        return "`atoll serve` starts again by itself once the head answers"

    def cordon_nodes(self, names: Collection[str]) -> None:
        self._ask_head(lambda: cluster.cordon_nodes(names))

    def node_memory(self) -> list[NodeMemory]:
        return self._ask_head(cluster.node_memory)

    def certificates(self) -> list[CertificateRecord]:
        """Return the certificates that the cluster's machines use. They are read again every ``CERTIFICATES_FRESH_S``."""
        authorities = self._head.environment.get(AUTHORITIES_VARIABLE) if self._head is not None else None
        if self._head is None or not authorities:
            return []
        address, folder = self._head.address, Path(authorities).parent
        if time.monotonic() - self._certificates_at > CERTIFICATES_FRESH_S:
            in_use = self._ask_head(lambda: peer.in_use(cluster.tls_servers(address), folder, REACH_S))
            self._certificates = [
                CertificateRecord(place=place, expires_at=one.not_after.timestamp(), lifetime_s=one.lifetime_s)
                for place, one in in_use.items()
            ]
            self._certificates_at = time.monotonic()
        return self._certificates

    def unseen_files(self, groups: Collection[str], sizes: Mapping[str, int | None]) -> list[UnseenFile]:
        """Try to open these files on every other machine of the groups. A node that does not answer in time is left out."""
        nodes = [node for node in self._ask_head(cluster.nodes_elsewhere) if node.group in groups]
        paths, unseen = list(sizes), []
        for node, seen in self._asked(nodes, file_sizes, paths):
            for path, size in zip(paths, seen, strict=True):
                if isinstance(size, str) or sizes[path] not in (None, size):
                    reason = size if isinstance(size, str) else f"it has {size:,} bytes there, not {sizes[path]:,}"
                    unseen.append(UnseenFile(path, node.host or node.name, node.group, reason))
        return unseen

    def has_store(self) -> bool:
        return self._job_store is not None

    def has_log(self, job_id: str) -> bool:
        """Return whether the store has the log of this job. Raises LogStoreUnavailable while that is unknown."""
        if self._job_store is None:
            return False
        object_store.require_available(self._job_store)
        try:
            return has_log(JobObjects(object_store.open_store(self._job_store), job_id))
        except OSError as error:
            raise LogStoreUnavailable(detail=f"{error.strerror or error}.", remedy=disk_remedy(error)) from error

    def delete_log(self, job_id: str) -> None:
        if self._job_store is None:
            return
        try:
            delete_log(object_store.open_store(self._job_store), job_id)
        except OSError as error:
            raise InfrastructureError(
                detail=f"The log of job {job_id} cannot be removed from {self._job_store}: {error.strerror or error}.",
                remedy=f"{object_store.remedy_of(error)} Then repeat the request.",
            ) from error

    def sweep(self, runs: Path, is_known: Callable[[str], bool], *, again: bool) -> None:
        """Remove run folders of unknown jobs from the machines of nodes that have joined since, or with ``again`` of all.

        Only folders that were claimed for this installation are removed. A node that does not answer is asked next time.
        """
        if self._copies is not None:
            self._copies.sweep(is_known)
        if again:
            self._swept = set()
        reaches = self._reaches()
        nodes = [node for node in self._ask_head(cluster.nodes_elsewhere) if reaches.get(node.id) is Reach.TAKEN]
        self._swept &= {node.id for node in nodes}
        fresh = [node for node in nodes if node.id not in self._swept]
        if not fresh or not runs.is_dir():
            return
        fleet = fleet_of(runs)
        for node, names in self._asked(fresh, claimed, runs, fleet):
            unknown = [name for name in names if not is_known(name)]
            if not unknown:
                self._swept.add(node.id)
                continue
            log.info("removing from %s what deleted jobs left: %s", node.name, ", ".join(unknown))
            self._swept |= {node.id for node, _ in self._asked([node], remove_claimed, runs, unknown, fleet)}

    def _asked(
        self,
        nodes: Sequence[Node],
        question: Callable[Arguments, Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> list[tuple[Node, Answer]]:
        """Call the function on each node, and return the answers that came in time, in the order of the nodes."""
        if not nodes:
            return []
        return self._ask_head(
            lambda: cluster.on_nodes(nodes, question, ASK_NODES_S, *arguments, **named), ASK_NODES_S + ANSWER_TIMEOUT_S
        )

    def start_job(
        self,
        job_id: str,
        spec: JobSpec,
        run_dir: Path,
        cordoned: Mapping[str, str] = MappingProxyType({}),
        roots: AllowedRoots = NOTHING_MORE,
        last_known: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Start the job, which then runs by itself and touches nothing outside ``roots`` and its run folder.

        ``last_known`` is what the service last knew of the job, if it has run before. It runs in the release of its node, or
        in this one if its files were last written by a newer release than the head's.
        Idempotent: a second call finds the running job. If ``run_dir`` holds this job's tape and no process writes it, the
        job continues from there. Raises InfrastructureError if the job does not start. While the store of a mirrored job
        cannot be used, nothing is started and nothing ended: its islands train on.
        """
        import ray

        from orchestrator.runtime import controllers
        from orchestrator.runtime.synchroniser_actor import SynchroniserActor

        regions = {group["name"]: group["region"] for group in self.node_groups() if group["region"]}
        if spec.synchroniser.durability.is_mirrored and self._job_store is not None:
            object_store.require_available(self._job_store)
        options = {
            **self._place_of(job_id, spec, run_dir),
            **SYNCHRONISER_OPTIONS,
            **self._release_for(last_known.get("build", "")),
        }
        if self._copies is not None:
            self._copies.put(run_dir)
        allowed = roots.without(*self._private)
        document, has_begun = spec.model_dump(mode="json"), bool(last_known.get("global_version"))
        facts = (job_id, document, regions, str(run_dir.resolve()), dict(cordoned), allowed, self._job_store, has_begun)
        before = frozenset(psutil.pids())
        actor = self._ask_head(lambda: cluster.start_actor(SynchroniserActor, options, *facts), START_TIMEOUT_S)
        try:
            self._wait_until_ready(actor, job_id, before)
        except (ray.exceptions.RayError, InfrastructureError) as error:
            with suppress(ray.exceptions.RayError, InfrastructureError):
                self._ask_head(lambda: controllers.let_go(job_id))
                self._ask_head(lambda: cluster.end_actors_of(job_id))  # what it had already made included
            raise InfrastructureError(
                detail=f"The synchroniser of job {job_id} did not start: {in_words(error)}",
                remedy=self._without_room()
                or "Look at the cluster's logs (temp_dir in HOME/cluster.json), and whether the run's folder has room.",
            ) from error

    def _place_of(self, job_id: str, spec: JobSpec, run_dir: Path) -> dict[str, Any]:
        """Return Ray's options for the place of the synchroniser: one that is restarted goes where its files are.

        Raises FilesElsewhere if no node has them.
        """
        name, groups = synchroniser_name(job_id), spec.synchroniser.node_groups
        history = history_of(run_dir)
        is_restart = history > 0 and not spec.synchroniser.durability.is_mirrored
        if not groups or not is_restart or self._ask_head(lambda: cluster.actor_named(name)) is not None:
            return cluster.on_groups(name, groups)
        nodes = [node for node in self._ask_head(cluster.nodes) if node.group in groups]
        having = [node for node, own in self._asked(nodes, own_history_of, run_dir.resolve()) if own >= history]
        if not having and self._ask_head(lambda: cluster.islands_of(job_id)):
            return cluster.on_groups(name, groups)  # it continues from what they hold
        if not having:
            raise FilesElsewhere(
                detail=f"The files of job {job_id} are on a machine that is no node of {' or '.join(groups)} now; the head "
                "has copies, which lack the parameters.",
                remedy=f"Start that machine's node again, or submit the job with `--resume {job_id}` from a checkpoint.",
            )
        best = min(having, key=lambda node: groups.index(node.group))
        return cluster.on_groups(name, groups, best.id)

    def _release_for(self, build: str) -> Mapping[str, Any]:
        """Return Ray's option for a synchroniser whose files are of this build, which may be newer than the head's."""
        from orchestrator.runtime import worker

        of_files = release.Build.parse(build)
        heads = [
            release.Build.parse(node.labels.get(release.LABEL, ""))
            for node in self._ask_head(cluster.nodes)
            if of_files is not None and node.group == CONTROL_GROUP
        ]
        if of_files is None or not any(head is not None and release.is_older(head, of_files) for head in heads):
            return {}
        return worker.of_release(str(release.own()), python_process.interpreter())

    def upgrade_of(self, job_id: str, spec: JobSpec, run_dir: Path) -> Upgrade:
        """Return the command that upgrades the running job to this release.

        Its synchroniser's machine has this release by then, and that has replayed the job's tape. Raises Conflict, with what
        to do, if the job cannot be upgraded, and NotFound if it does not run.
        """
        from orchestrator.runtime import restart, worker

        before, own, python = self.status(job_id)["view"].get("build", ""), release.own(), python_process.interpreter()
        groups = self.node_groups()
        heads = [node for node in self._ask_head(cluster.nodes) if node.group == CONTROL_GROUP]
        used = {section.node_group for section in spec.island_sections(slots=True).values()}
        places = [("the head", node.labels.get(release.LABEL, release.UNKNOWN)) for node in heads]
        for group in groups:
            if group["name"] in used:
                places += [(f"node group {group['name']}", build) for build in group["builds"]]
        if reason := release.upgrade_refusal(before, own, places):
            raise Conflict(detail=f"Job {job_id} is not upgraded: {reason}")
        process = self._synchroniser_process(job_id)
        if process is None:
            raise _not_here(job_id)
        of_release = worker.of_release(str(own), python)
        regions = {group["name"]: group["region"] for group in groups if group["region"]}
        about = (str(own), job_id, spec.model_dump(mode="json"), regions)
        folders: dict[str, str | None] = dict.fromkeys(node.id for node in heads)
        for node, folder in {**folders, process.node_id: str(run_dir.resolve())}.items():
            machine = "the machine of its synchroniser" if folder else "the head's machine"

            def rehearse(node: str = node, folder: str | None = folder) -> str:
                return cluster.call_in_release(node, of_release, restart.rehearse, REHEARSED_WITHIN_S, *about, folder)

            try:
                present = self._ask_head(rehearse, REHEARSED_WITHIN_S + ANSWER_TIMEOUT_S)
            except Exception as error:
                raise Conflict(
                    detail=f"Job {job_id} is not upgraded: {own} cannot continue it on {machine}: {in_words(error)}",
                    remedy="The job continues as it is.",
                ) from error
            if present != str(own):
                raise Conflict(
                    detail=f"Job {job_id} is not upgraded: {machine} has {present}, and no {own} at {python}.",
                    remedy=f"Install {own.release} there, in the same folder as the service's, or restart the node with it.",
                )
        return Upgrade(str(own), python)

    def _synchroniser_process(self, job_id: str) -> cluster.ActorProcess | None:
        def process() -> cluster.ActorProcess | None:
            actor = cluster.actor_named(synchroniser_name(job_id))
            return None if actor is None else cluster.process_of(actor)

        return self._ask_head(process)

    def _wait_until_ready(self, actor: ActorHandle[Any], job_id: str, before: frozenset[int]) -> None:
        """Wait while the synchroniser's process works towards its start. ``before`` are the processes that there were.

        Raises RayError at once if the start fails, and InfrastructureError if nothing of it moves or the disk is full.
        """
        import ray

        from orchestrator.runtime.synchroniser_actor import SynchroniserActor

        cluster_id = self._head.id if self._head is not None else ""
        name = synchroniser_name(job_id)
        watch = StartWatch(cluster_id, CONTROL_GROUP, name, time.monotonic(), before)
        ready = actor.call(SynchroniserActor.ready)
        while True:
            try:
                ray.get(ready, timeout=START_LOOK_S)
                return
            except ray.exceptions.GetTimeoutError:
                why = "there is no room for its process" if self._without_room() else watch.given_up(time.monotonic())
                if why:
                    raise InfrastructureError(detail=f"{why}.") from None

    def status(self, job_id: str) -> StatusDocument:
        """The live job. Raises NotFound when nothing of it runs (any more)."""
        try:
            return self._ask(job_id, ANSWER_TIMEOUT_S, SynchroniserInterface.status)
        except NotFound:
            if self._is_moving(job_id):
                detail = f"The synchroniser of job {job_id} is being made again on another node."
                raise InfrastructureError(detail=detail, remedy="Training continues.") from None
        try:
            return self._ask(job_id, ANSWER_TIMEOUT_S, SynchroniserInterface.status)  # it may be there by now
        except NotFound:
            if self._copies is not None:
                self._copies.settle(job_id)
            raise

    def _is_moving(self, job_id: str) -> bool:
        """Return whether the job's controller is making the synchroniser again, which has no name meanwhile."""
        import ray

        from orchestrator.runtime import controllers
        from orchestrator.runtime.controller import Controller

        try:
            controller = controllers.controller_of_open(job_id, ANSWER_TIMEOUT_S)
            return controller is not None and ray.get(controller.call(Controller.is_moving), timeout=ANSWER_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            log.info("the controller of %s cannot be asked: %s", job_id, in_words(error))
            return False

    def submit(self, job_id: str, command_id: str, caller: str, command: Command) -> None:
        """Hand a command to the job. Raises NotFound or Conflict when it cannot be taken."""
        document = codec.encode_command(command)
        self._ask(job_id, ANSWER_TIMEOUT_S, SynchroniserInterface.submit, command_id, caller, document)

    def restart_job(self, job_id: str) -> str:
        """SIGKILL the synchroniser's process, by the agent of its node. Ray makes it again, and it continues from its files.

        A process that hangs or is stopped cannot end itself, so Ray's own request to the actor would not do.
        """
        import ray

        from orchestrator.runtime.node_agents import node_agent_of

        process = self._synchroniser_process(job_id)
        if process is None:
            raise _not_here(job_id)
        agent = self._ask_head(lambda: node_agent_of(process.node_id))
        try:
            ended = ray.get(agent.call(NodeAgent.kill, process.pid, math.inf), timeout=ANSWER_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise InfrastructureError(
                detail=f"The synchroniser of job {job_id} is process {process.pid} on the head, where the node's agent does "
                f"not answer: {in_words(error)}",
                remedy=f"End it by hand: `kill -KILL {process.pid}` on the head's machine.",
            ) from error
        if not ended:
            raise _not_here(job_id)
        return f"process {process.pid} of its synchroniser was ended; a new one continues from tape and journal"

    def profile(self, job_id: str, life: Life, profile: str, steps: int | None) -> ProfileRecord:
        return self._ask_actor(*_island(job_id, life), ISLAND_ANSWER_S, IslandInterface.profile, profile, steps)

    def read_profile(self, job_id: str, life: Life, profile: str, start: int, stop: int) -> bytes:
        about, read = _island(job_id, life), IslandInterface.read_profile
        return self._ask_actor(*about, ISLAND_ANSWER_S, read, profile, start, stop)

    def save_parameters(self, job_id: str, held: Sequence[int] | None = None) -> str:
        """Θ, or what is newer than ``held``, is in a new file of the run folder. Raises Conflict before there is Θ."""
        timeout_s = SAVE_BASE_S + FLOAT32_BYTES * sum(self.status(job_id)["fragment_parameters"]) / SAVE_BYTES_PER_S_MIN
        try:
            if held is None:
                name = self._ask(job_id, timeout_s, SynchroniserInterface.save_parameters)
            else:
                name = self._ask(job_id, timeout_s, SynchroniserInterface.save_updates, held)
            if self._copies is not None:
                self._copies.take(job_id, name)
            return name
        except OSError as error:
            detail = f"The parameters of job {job_id} could not be written: {error.strerror or error}."
            remedy = f"{disk_remedy(error)}, on the disk of its run folder."
            raise InfrastructureError(detail=detail, remedy=remedy) from error

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()
        cluster.leave()

    def _ask(
        self,
        job_id: str,
        timeout_s: float,
        method: Callable[Concatenate[SynchroniserInterface, Arguments], Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Answer:
        who, gone = f"The synchroniser of job {job_id}", _not_here(job_id)
        return self._ask_actor(synchroniser_name(job_id), who, gone, timeout_s, method, *arguments, **named)

    def _ask_actor(
        self,
        name: str,
        who: str,
        gone: NotFound,
        timeout_s: float,
        method: Callable[Concatenate[ActorT, Arguments], Answer],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Answer:
        actor: ActorHandle[ActorT] | None
        actor = self._ask_head(lambda: cluster.actor_named(name))
        import ray  # not before the head answers

        if actor is None:
            raise gone
        if not actor.has(method):
            raise Conflict(
                detail=f"{who} was started by another build, which has no {method.__name__!r}.",
                remedy="Training continues. After a restart of that process the request will work.",
            )
        try:
            return ray.get(actor.call(method, *arguments, **named), timeout=timeout_s)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error  # our own errors, as they were raised over there
        except ray.exceptions.ActorDiedError as error:
            raise gone from error
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise InfrastructureError(
                detail=f"{who} does not answer: {in_words(error)}",
                remedy=f"{no_room} Training continues."
                if (no_room := self._without_room())
                else "Try again. Training continues.",
            ) from error

    def _without_room(self) -> str:
        """Return what to do about a full disk under Ray's folder, as a sentence; empty if there is room."""
        return cluster.disk_remedy(Path(self._head.temp_dir)) if self._head is not None else ""

    def _ask_head(self, call: Callable[[], Answer], within_s: float = ANSWER_TIMEOUT_S) -> Answer:
        """Make the call and return its answer. Raises InfrastructureError: at once if nothing listens, else later."""
        if self._head is not None and not self._head.answers():
            raise InfrastructureError(
                detail=f"The cluster's head at {self._head.address} does not answer: no process listens there.",
                remedy=f"{self._head.head_remedy()}; jobs train on meanwhile.",
            )
        self._keep_secret()
        return self._questions.answer(call, within_s, "The cluster's head")

    def _keep_secret(self) -> None:
        """Write the cluster's secret again if its file is gone or damaged: without it no process of a job can start."""
        if self._head is None:
            return
        try:
            if self._head.restore_token(self._secret):
                log.warning("The cluster's secret was missing or damaged; it is written again.")
        except InfrastructureError as error:
            log.warning("%s", error)


def _island(job_id: str, life: Life) -> tuple[str, str, NotFound]:
    """Return the name of the island's process, what to call it, and the error for its absence."""
    who = f"Incarnation {life[1]} of island {life[0]}"
    gone = NotFound(
        detail=f"{who} has ended, and its trace with it.", remedy="Record another once the island trains again."
    )
    return island_name(job_id, *life), who, gone


def _not_here(job_id: str) -> NotFound:
    return NotFound(detail=f"No process of job {job_id} runs here.", remedy="If it has ended, its run folder says why.")
