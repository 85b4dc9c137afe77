"""The Ray cluster of a home: joining it, its nodes, and our actors by their names.

Responsible for: the environment being right before Ray is first imported; node capacities as plain data; finding our
actors by name. Everything that is not Ray's public API is here and only here.

As a program (``python -m orchestrator.runtime.cluster HEAD:PORT``) it says whether a head takes the token of the process's
environment, and which build it has. Machines that join run it before they start anything: a process that imports Ray cannot
unload it, and ``ray start`` itself would try for half a minute and then show a traceback.

It also says when the disk under Ray's folder is full, where every process of a cluster has its logs and sockets: no process
can start then, and Ray only reports that an actor died, or "Socket closed".
"""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, ParamSpec, TypeVar

from orchestrator.actors import ActorHandle
from orchestrator.core.vocabulary import Life
from orchestrator.errors import InfrastructureError, first_line
from orchestrator.runtime import settings
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.placement import Leaving, Node
from orchestrator.runtime.processes import is_own, run_folder
from orchestrator.runtime.settings import CONTROL_GROUP, GROUP_LABEL, NAMESPACE, NODE_ID_LABEL, REGION_LABEL
from orchestrator.specification.memory_budget import HEAD, NodeMemory
from orchestrator.system import printable, release
from orchestrator.system.ports import Reach, reach

TOKEN_REFUSED = 3
"""The program's exit code where the head refuses the token; 0 where it takes it, any other one where it does not answer."""
FREE_MIN_BYTES = 1 << 20
"""The logs that a process of Ray's begins with are some hundred kilobytes."""


def cluster_folder(environment: Mapping[str, str]) -> Path | None:
    """The folder of the embedded cluster that a process with this environment belongs to, if it does to one."""
    folder = run_folder(environment)
    return folder if is_own(folder) else None


def disk_remedy(folder: Path | None) -> str:
    """Return ``disk_shortage`` as a sentence of its own; empty if there is none."""
    clause = disk_shortage(folder)
    return f"{clause[:1].upper()}{clause[1:]}." if clause else ""


def disk_shortage(folder: Path | None) -> str:
    """Return what is wrong with the folder's disk and what to do about it; empty if nothing is, or it cannot be read."""
    if folder is None:
        return ""
    try:
        disk = os.statvfs(folder)
        full = disk.f_bavail * disk.f_frsize < FREE_MIN_BYTES or (disk.f_files > 0 and not disk.f_favail)
        with TemporaryFile(dir=folder):  # a disk that failed is read-only, and its flags need not say so
            pass
    except OSError as error:
        if error.errno == errno.EROFS:
            return f"the disk under {folder}, Ray's folder, is read-only, so no process can start: mount it writable"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return f"the disk under {folder}, Ray's folder, is full, so no process can start: make room on it" if full else ""


NEXT_TO_NOTHING: Mapping[str, Any] = {"num_cpus": 0, "memory": 1}
"""Ray's options for an actor that books nothing: a byte of memory. Whoever is to find a node for one that books nothing at
all, Ray draws among the nodes that it believes alive. If that one died minutes ago nobody answers, and Ray asks on. For one
that books something it asks the node of its creator. Source: Ray 2.60, GcsActorScheduler::SelectForwardingNode."""

PREEMPTION = 2
"""Ray's ``DRAIN_NODE_REASON_PREEMPTION``: the one reason that no node may refuse."""
RAY_DRAINS = "Ray drains the node"
CAUSE_MAX = 200
HEAD_ANSWER_S = 5.0
CORDONED_KEY = b"atoll-cordoned-nodes"
ALIVE = 0
"""``GcsNodeInfo.GcsNodeState.ALIVE`` of Ray."""

log = logging.getLogger(__name__)

ActorT = TypeVar("ActorT")
Answer = TypeVar("Answer")
Arguments = ParamSpec("Arguments")


def join(home: Path) -> None:
    """Connect this process to the cluster of ``home`` as a driver. Safe to call again.

    Raises InfrastructureError when there is none, or it does not answer.
    """
    cluster = ClusterFile.find(home)
    if cluster is None:
        raise InfrastructureError(detail=f"No cluster was started for {home}.", remedy="Start one with `atoll up`.")
    if not cluster.answers():
        raise InfrastructureError(
            detail=f"The cluster at {cluster.address} does not answer.",
            remedy=f"{cluster.head_remedy()}; jobs continue from their run folders.",
        )
    os.environ.update(cluster.environment)
    import ray  # not before its environment is set
    from ray._private import services

    services.resolve_ip_for_localhost = _as_written  # 127.0.0.1 is meant (``ray_start.RAY``)
    if not ray.is_initialized():
        ray.init(
            address=cluster.address,
            _temp_dir=cluster.driver_folder,  # of the node to use, where several are on this machine
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            job_config=_without_folders(),
        )
        _silence_nodes()


def _without_folders() -> Any:
    """Return what Ray learns about this driver, without its working folder.

    Ray puts a driver's working folder and its script's before everything else that the driver's workers import from. It
    leaves both out where the job has a working folder of its own, and there is no public switch.
    """
    from ray.job_config import JobConfig

    class WithoutFolders(JobConfig):  # type: ignore[misc, unused-ignore]
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return WithoutFolders()


def _silence_nodes() -> None:
    """Ray 2.60 prints what nodes say of dead workers on every driver's standard output, whatever ``log_to_driver`` is.

    The job itself says when an island was killed. There is no public switch.
    """
    import ray._private.worker as driver

    driver.print_to_stdstream = lambda *_, **__: None


def leave() -> None:
    import ray

    ray.shutdown()


def nodes() -> list[Node]:
    """Every node that Ray believes alive, with what of it is free right now. A hint, not a promise."""
    import ray
    from ray._private.state import available_resources_per_node  # no public equivalent in Ray 2.60

    free = available_resources_per_node()
    return [
        Node(
            id=entry["NodeID"],
            name=entry.get("NodeName") or entry["NodeID"][:8],
            group=entry.get("Labels", {}).get(GROUP_LABEL, ""),
            region=entry.get("Labels", {}).get(REGION_LABEL, ""),
            total=dict(entry.get("Resources", {})),
            free=dict(free.get(entry["NodeID"], {})),
            host=entry.get("NodeManagerHostname", ""),
            labels=dict(entry.get("Labels", {})),
            address=entry.get("NodeManagerAddress", ""),
        )
        for entry in ray.nodes()
        if entry["Alive"]
    ]


def nodes_elsewhere() -> list[Node]:
    """Return the nodes that are on other machines than the head, by their addresses."""
    present = nodes()
    own = {node.address for node in present if node.group == CONTROL_GROUP}
    return [node for node in present if node.address not in own]


def node_memory() -> list[NodeMemory]:
    """Return each node's memory for processes, as reported at its start (``--memory``, or what was free then)."""
    return [
        NodeMemory(
            node.host or node.id, HEAD if node.group == CONTROL_GROUP else node.group, node.total.get("memory", 0.0)
        )
        for node in nodes()
    ]


def on_nodes(
    nodes: Sequence[Node],
    function: Callable[Arguments, Answer],
    within_s: float,
    *arguments: Arguments.args,
    **named: Arguments.kwargs,
) -> list[tuple[Node, Answer]]:
    """Call the function once on each node, and return the answers that came in time. Nothing stays on the nodes.

    A node that does not answer, or on which the call fails, is left out.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(function)
    calls = [
        remote.options(
            **NEXT_TO_NOTHING,
            enable_task_events=False,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        ).remote(*arguments, **named)
        for node in nodes
    ]
    ready, late = ray.wait(calls, num_returns=len(calls), timeout=within_s)
    for call in late:
        ray.cancel(call, force=True)
    answers = []
    for node, call in zip(nodes, calls, strict=True):
        if call in ready:
            try:
                answers.append((node, ray.get(call)))
            except ray.exceptions.RayError as error:
                log.info("%s does not answer %s: %s", node.name, function.__name__, first_line(error))
    return answers


def call_in_release(
    node_id: str,
    of_release: Mapping[str, Any],
    function: Callable[Arguments, Answer],
    within_s: float,
    *arguments: Arguments.args,
    **named: Arguments.kwargs,
) -> Answer:
    """Call the function once on this node, in a process with these options of another release. Raises what it raises.

    Raises InfrastructureError if the process does not start or does not answer in time.
    """
    import ray

    options = {**NEXT_TO_NOTHING, **on_node(node_id), **of_release, "max_retries": 0, "enable_task_events": False}
    call = ray.remote(function).options(**options).remote(*arguments, **named)
    try:
        answer: Answer = ray.get(call, timeout=within_s)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except (ray.exceptions.RayError, TimeoutError) as error:
        with suppress(ray.exceptions.RayError):
            ray.cancel(call, force=True)
        raise InfrastructureError(detail=f"no process of it answers there: {first_line(error)}") from error
    return answer


def node_reaches() -> dict[str, Reach]:
    """Connect to the raylet of each node that Ray believes alive, and return the outcomes by node id.

    Ray itself is configured to tolerate long partitions, and takes as long to declare a node dead.
    """
    import ray

    alive = [entry for entry in ray.nodes() if entry["Alive"]]
    with ThreadPoolExecutor(max(1, len(alive)), "reach") as pool:
        reaches = pool.map(lambda entry: reach(entry["NodeManagerAddress"], entry["NodeManagerPort"]), alive)
        return dict(zip((entry["NodeID"] for entry in alive), reaches, strict=True))


def doubled_nodes() -> set[str]:
    """Return the nodes that Ray believes alive at an address and port where another one is as well. One of them lives."""
    import ray

    at: dict[tuple[str, int], list[str]] = {}
    for entry in ray.nodes():
        if entry["Alive"]:
            at.setdefault((entry["NodeManagerAddress"], entry["NodeManagerPort"]), []).append(entry["NodeID"])
    return {node for nodes in at.values() if len(nodes) > 1 for node in nodes}


def tls_servers(head: str) -> list[tuple[str, str, int]]:
    """Return (what it is, host, port) of Ray's servers that have a certificate: the head's, and those of all nodes."""
    import ray

    host, _, port = head.rpartition(":")
    servers = [("head", host, int(port))]
    for node in ray.nodes():
        group = node.get("Labels", {}).get(GROUP_LABEL, "")
        if node["Alive"] and group:
            servers.append((f"nodes of {group}", node["NodeManagerAddress"], node["NodeManagerPort"]))
    return servers


def own_node_runs() -> bool:
    """Return whether the node through which this process takes part in the cluster runs.

    Without that node a driver never learns of actors that were made again, and calls the dead ones for ever. Only another
    process can join again.
    """
    import ray

    own = own_node_id()
    entry = next((entry for entry in ray.nodes() if entry["NodeID"] == own and entry["Alive"]), None)
    return entry is not None and reach(entry["NodeManagerAddress"], entry["NodeManagerPort"]) is not Reach.REFUSED


def drain(gcs: Any, node_id: str, cause: str, deadline: float | None) -> None:
    """Have Ray place nothing on this node any more, and know when it goes (seconds since 1970). It may be said again.

    ``gcs`` is a client of the head. Why, Ray does not tell others: that lies under the node's name beside what Ray keeps.
    Raises RayError, RuntimeError or OSError when the head does not answer.
    """
    gcs.internal_kv_put(_cause_key(node_id), cause[:CAUSE_MAX].encode(), False, None, timeout=HEAD_ANSWER_S)
    at_ms = round(deadline * 1000) if deadline is not None else 0
    accepted, why = gcs.drain_node(node_id, PREEMPTION, cause[:CAUSE_MAX], at_ms, timeout=HEAD_ANSWER_S)
    if not accepted:
        raise RuntimeError(f"the head refuses to drain the node: {why}")


def end_node(gcs: Any, node_id: str) -> None:
    """Have the head end this node's raylet, which then signs off. Raises as ``drain`` does."""
    gcs.drain_nodes([bytes.fromhex(node_id)], timeout=HEAD_ANSWER_S)


def drain_own_node(cause: str, deadline: float | None) -> None:
    """``drain`` of the node that this process of the cluster is on."""
    import ray

    drain(_head(), ray.get_runtime_context().get_node_id(), cause, deadline)


def leaving_nodes() -> dict[str, Leaving]:
    """Return the nodes that are being drained, by id, whether we, ``ray start`` at SIGTERM or an autoscaler asked for it."""
    from ray._private.state import state  # no public equivalent in Ray 2.60

    leaving = {}
    for node_id, deadline_ms in state.get_draining_nodes().items():
        noted = _head().internal_kv_get(_cause_key(node_id), None, timeout=HEAD_ANSWER_S)
        cause = printable.line(noted.decode(errors="replace")[:CAUSE_MAX]) if noted else RAY_DRAINS
        leaving[node_id] = Leaving(cause, deadline_ms / 1000 if deadline_ms else None)
    return leaving


def cordon_nodes(names: Collection[str]) -> None:
    """Have nothing new placed on the nodes of these names (``cordoned_nodes``), and only on these. It may be said again."""
    content, head = json.dumps(sorted(names)).encode(), _head()
    if head.internal_kv_get(CORDONED_KEY, None, timeout=HEAD_ANSWER_S) != content:  # writing goes to the head's disk
        head.internal_kv_put(CORDONED_KEY, content, True, None, timeout=HEAD_ANSWER_S)


def cordoned_nodes() -> frozenset[str]:
    """Return the ids of the nodes on which nothing new is to be placed: cordons name the machine, or the node itself."""
    content = _head().internal_kv_get(CORDONED_KEY, None, timeout=HEAD_ANSWER_S)
    names = set(json.loads(content)) if content else set()
    return frozenset(node.id for node in nodes() if names & {node.host, node.name}) if names else frozenset()


def client_of(address: str) -> Any:
    """Return a client of the head at this address, for a process outside the cluster. Its environment must be right."""
    raylet: Any = importlib.import_module("ray._raylet")
    return raylet.GcsClient(address=address)


def build_of_head(client: Any) -> str:
    """Return the build of atoll that the head's node names, or ``unknown``."""
    nodes = client.get_all_node_info(timeout=HEAD_ANSWER_S).values()
    heads = (node for node in nodes if node.is_head_node and node.state == ALIVE and release.LABEL in node.labels)
    return next((str(node.labels[release.LABEL]) for node in heads), release.UNKNOWN)


def _head() -> Any:
    """A client of the head, as this process of the cluster has one."""
    from ray._private import worker

    driver: Any = worker.global_worker
    return driver.gcs_client


def _cause_key(node_id: str) -> bytes:
    return f"atoll-leaving:{node_id}".encode()


def address_of(actor: ActorHandle[ActorT]) -> tuple[str, int] | None:
    """Return the address at which the actor's process listens, or ``None`` while it has no process."""
    from ray._private.state import state  # no public equivalent without the dashboard

    address = state.actor_table(actor.ray_handle._actor_id.hex()).get("Address", {})
    return (address["IPAddress"], address["Port"]) if address.get("IPAddress") else None


@dataclass(frozen=True, slots=True)
class ActorProcess:
    node_id: str
    pid: int


def process_of(actor: ActorHandle[ActorT]) -> ActorProcess | None:
    """Return the process of the actor as the head knows it, whether it answers or not; None while there is none."""
    from ray._private.state import state  # no public equivalent without the dashboard

    entry = state.actor_table(actor.ray_handle._actor_id.hex())
    node_id, pid = entry.get("Address", {}).get("NodeID", ""), entry.get("Pid", 0)
    return ActorProcess(node_id, pid) if entry.get("State") == "ALIVE" and node_id and pid else None


def actor_named(name: str) -> ActorHandle[Any] | None:
    """A handle to our actor of this name, or ``None``. Old handles to a re-created actor stay dead: look up again."""
    import ray

    try:
        return ActorHandle(ray.get_actor(name, namespace=NAMESPACE))
    except ValueError:
        return None


def actor_class(path: str) -> Any:
    """The actor class at ``package.module:Class``: how this package uses learners without importing them."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def start_actor(
    kind: Callable[Arguments, ActorT],
    options: Mapping[str, Any],
    *arguments: Arguments.args,
    **named: Arguments.kwargs,
) -> ActorHandle[ActorT]:
    """Have Ray make a detached actor of this class with Ray's ``options``. Returns at once."""
    configured = _remote_class(kind).options(namespace=NAMESPACE, lifetime="detached", **options)
    return ActorHandle(configured.remote(*arguments, **named))


@cache
def _remote_class(kind: Callable[..., Any]) -> Any:
    """Make Ray's class once: Ray pickles each one that is made, and keeps it in the head for the life of the cluster."""
    import ray

    return ray.remote(kind)


def booked(
    name: str, wanted: Mapping[str, float], selectors: Sequence[Mapping[str, str]], timeout_s: float
) -> Any | None:
    """A booking under this name of ``wanted`` on as many different nodes as there are label selectors; of all, or none.

    For ``in_booking``. None when Ray cannot have it in time.
    """
    import ray

    booking = ray.util.placement_group(
        bundles=[dict(wanted) for _ in selectors],
        strategy="STRICT_SPREAD",
        name=name,
        lifetime="detached",
        bundle_label_selector=[dict(selector) for selector in selectors],
    )
    if booking.wait(timeout_s):
        return booking
    ray.util.remove_placement_group(booking)
    return None


def in_booking(booking: Any, index: int) -> dict[str, Any]:
    """Ray's option for an actor on the node of this index."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(booking, index)}


def cancel_booking(name: str) -> None:
    """Cancel the booking of this name, if there is one, and end the actors in it."""
    import ray

    with suppress(ray.exceptions.RayError, ValueError):
        ray.util.remove_placement_group(ray.util.get_placement_group(name))


def on_head(name: str) -> dict[str, Any]:
    """Ray's options for an actor of a job on the head: the one with this name, wherever it was made."""
    return {"name": name, "get_if_exists": True, **NEXT_TO_NOTHING, "label_selector": {GROUP_LABEL: CONTROL_GROUP}}


def on_groups(name: str, groups: Sequence[str], node_id: str = "") -> dict[str, Any]:
    """The same for an actor on a node of the first of these groups that has one; on the head if there are none.

    The node with this id comes first.
    """
    if not groups:
        return on_head(name)
    selectors = [{NODE_ID_LABEL: node_id}] if node_id else []
    selectors += [{GROUP_LABEL: group} for group in groups]
    first, *others = [{"label_selector": selector} for selector in selectors]
    return {"name": name, "get_if_exists": True, **NEXT_TO_NOTHING, **first, "fallback_strategy": others or None}


def on_node(node_id: str | None = None) -> dict[str, Any]:
    """Ray's option for an actor on this node, by default that of this process, and no other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id or own_node_id(), soft=False)}


def own_node_id() -> str:
    """Return Ray's id of the node of this process."""
    import ray

    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


def name_of_node(node_id: str) -> str | None:
    """Return the name of the node with this id, if it is alive."""
    return next((node.name for node in nodes() if node.id == node_id), None)


def own_address() -> str:
    """The address of this process's node, as the others of the cluster know it."""
    import ray

    address: str = ray.util.get_node_ip_address()
    return address


def end_actor(actor: ActorHandle[ActorT]) -> None:
    """Let Ray end an actor and forget its name. Nothing happens if it is gone."""
    import ray

    with suppress(ray.exceptions.RayError, ValueError):
        ray.kill(actor.ray_handle, no_restart=True)


def end_actors_of(job: str, *, but: str = "") -> None:
    """End whatever has a name of this job, except ``but``. Its controller must place nothing meanwhile."""
    import ray

    end_actors_named_from(settings.prefix(job), but=but)
    for booking in ray.util.placement_group_table().values():
        if booking["name"].startswith(settings.prefix(job)) and booking["state"] != "REMOVED":
            cancel_booking(booking["name"])


def end_actors_named_from(beginning: str, *, but: str = "") -> None:
    """End our actors with names that begin like this, except ``but``."""
    for name in actor_names():
        if name.startswith(beginning) and name != but:
            end_actor_named(name)


def actor_names() -> list[str]:
    """Return the names of our actors, of all jobs and builds, as Ray knows them."""
    import ray

    entries = ray.util.list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in entries if entry["namespace"] == NAMESPACE]


def islands_of(job: str) -> dict[Life, str]:
    """Return the lives of the job that Ray knows, with their actors' names."""
    return {life: name for name in sorted(actor_names()) if (life := settings.life_named(job, name)) is not None}


def end_actor_named(name: str) -> None:
    if (actor := actor_named(name)) is not None:
        end_actor(actor)


def _as_written(host: str) -> str:
    return host


def main() -> int:
    """Print the build of the head whose address is the argument. Returns ``TOKEN_REFUSED`` where it refuses the token."""
    exceptions: Any = importlib.import_module("ray.exceptions")
    try:
        print(build_of_head(client_of(sys.argv[1])))
    except exceptions.AuthenticationError:
        return TOKEN_REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
