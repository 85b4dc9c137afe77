"""The settings of every Ray process of a cluster: one setting of ours, turned into Ray's environment variables.

Responsible for: that head, nodes, workers and drivers agree. Ray reads ``RAY_*`` once, when a process first imports it,
so a process that starts or joins a cluster sets these before. Refuses to know what runs on the cluster.

Source: our own measurements on Ray 2.60: a node cut off from the head is declared dead after
``health_check_failure_threshold`` failed checks, and a node once declared dead can never rejoin. The other two defaults
(60 s each) would end a node's control connection before that.

The names of a job's actors. All begin with ``JOB:``, so that whatever is left of a job can be looked up.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from orchestrator.certificates import AUTHORITY_CERTIFICATE, CERTIFICATE, KEY
from orchestrator.core.vocabulary import Incarnation, IslandId, Life
from orchestrator.errors import ConfigurationError
from orchestrator.system import release


def prefix(job: str) -> str:
    return f"{job}:"


SYNCHRONISER_OPTIONS: Mapping[str, int] = MappingProxyType({"max_restarts": -1, "max_concurrency": 8})
"""Ray's options for a job's synchroniser. Service, controller and overseer make it by them."""


def synchroniser_name(job: str) -> str:
    return f"{prefix(job)}synchroniser"


def controller_name(job: str) -> str:
    """Return the name that a job's controller had in builds where it was a process of its own."""
    return f"{prefix(job)}controller"


CONTROLLERS = "controllers:"


def controllers_name() -> str:
    """Return the name of the process with the controllers of all jobs. Each build has its own."""
    return f"{CONTROLLERS}{release.own()}"


def evaluator_name(job: str, number: int, node_group: str = "") -> str:
    """Numbered: a name is taken until Ray has noticed its actor's end. ``node_group`` is empty for that of the head."""
    return f"{prefix(job)}evaluator-{f'{node_group}-' if node_group else ''}{number}"


def island_name(job: str, island: IslandId, incarnation: Incarnation) -> str:
    return f"{prefix(job)}{island}:{incarnation}"


def life_named(job: str, name: str) -> Life | None:
    """Return the life whose process has this ``island_name``; None if it is another's. Ranks but the first have others."""
    island, separator, incarnation = name.removeprefix(prefix(job)).rpartition(":")
    is_island = name.startswith(prefix(job)) and separator and incarnation.isdecimal()
    return (IslandId(island), Incarnation(int(incarnation))) if is_island else None


def shard_prefix(job: str) -> str:
    """Return the beginning of the names of a job's shards in processes of their own."""
    return f"{prefix(job)}shard-"


def shard_name(job: str, number: int, life: str) -> str:
    """Return the name of a shard's process. ``life`` distinguishes it from one before it, whose end Ray may not know yet."""
    return f"{shard_prefix(job)}{number}-{life}"


def rank_name(island: str, rank: int) -> str:
    """Return the name of the process of this rank, in an island whose rank 0 is called ``island``."""
    return f"{island}/{rank}" if rank else island


PARTITION_TOLERANCE_S = 600.0
"""How long a region may be cut off without its islands being killed by Ray itself."""
TOLERANCE_VARIABLE = "ATOLL_PARTITION_TOLERANCE_S"
ABANDONED_RATIO = 2.0
"""An island that nobody has listened to for so many tolerances ends itself: nobody else may be able to."""
CHECK_SECONDS_MIN = 3.0
"""What one failed health check costs at least (measured); the threshold counts checks."""
MARGIN_RATIO = 1.1
CONNECTION_PATIENCE_S = 20
NAMESPACE = "atoll"
CLUSTER_MARKER = "ATOLL_CLUSTER"
"""In the environment of every process of an embedded cluster: how ``down`` finds what is left of it."""
NODE_MARKER = "ATOLL_NODE"
"""Beside that, the name of the node that the process belongs to."""
TOKEN_VARIABLE = "RAY_AUTH_TOKEN_PATH"
TOKEN_DIGEST_VARIABLE = "ATOLL_TOKEN_SHA256"
"""The digest of the cluster's secret, by which a damaged copy is recognised without asking the head."""
FOLDER_VARIABLE = "ATOLL_CLUSTER_FOLDER"
"""The folder of the cluster's sockets, sessions and logs on this machine. It is lost with a restart of the machine."""
GROUP_LABEL = "atoll-node-group"
REGION_LABEL = "region"
NODE_ID_LABEL = "ray.io/node-id"
"""Every node has it by itself."""
INLINE_BYTES_MAX = 4 << 20
CONTROL_GROUP = "control"
"""The node group of the head: synchronisers, controllers and evaluators run there, islands do not."""


LOG_BYTES_MAX = 8 << 20
"""The limit of each log file of Ray."""


def ray_environment(
    token_path: Path,
    partition_tolerance_s: float = PARTITION_TOLERANCE_S,
    head_storage: Path | None = None,
    certificates: Path | None = None,
) -> dict[str, str]:
    """Environment variables for every Ray process of the cluster, drivers included.

    ``head_storage`` is a folder in which the head keeps what it knows of nodes and actors: with it a head may die and be
    started again, while islands train on. Without one, what a dead head knew is gone, and its cluster with it.

    ``certificates`` is this machine's own folder of them, with which its processes talk by TLS and to nobody of another
    authority; without one they talk in the clear, as is enough on loopback.
    """
    if partition_tolerance_s < CHECK_SECONDS_MIN:
        raise ConfigurationError(
            detail=f"partition_tolerance_s is {partition_tolerance_s}, below the {CHECK_SECONDS_MIN:.0f} s that one "
            "health check takes; every short silence would kill a node. Raise it."
        )
    day_s = 86_400
    storage = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(head_storage)} if head_storage else {}
    return {
        **storage,
        **(tls_environment(certificates) if certificates is not None else {}),
        TOLERANCE_VARIABLE: str(partition_tolerance_s),
        "RAY_health_check_failure_threshold": str(math.ceil(partition_tolerance_s / CHECK_SECONDS_MIN * MARGIN_RATIO)),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(day_s),
        "RAY_subscriber_timeout_ms": str(day_s * 1000),
        # a connection on which nothing is acknowledged for so long is given up and made anew. Ray's 120 s leave it to TCP,
        # which after a minute's cut tries again only each further minute: calls hang for as long once the line is whole
        "RAY_grpc_client_keepalive_timeout_ms": str(CONNECTION_PATIENCE_S * 1000),
        # beyond loopback its ports listen on all interfaces: who reaches them could run code here, so they need a token
        "RAY_AUTH_MODE": "token",
        TOKEN_VARIABLE: str(token_path),
        "RAY_USAGE_STATS_ENABLED": "0",
        # of each of its log files there is one older half; Ray's own bounds are 512 MiB and five of them
        "RAY_ROTATION_MAX_BYTES": str(LOG_BYTES_MAX),
        "RAY_ROTATION_BACKUP_COUNT": "1",
        # its figures would be served on all interfaces, to anybody, without the token
        "RAY_enable_metrics_collection": "0",
        # the monitor kills the largest worker at 95 % of the *host's* memory, whatever uses it
        "RAY_memory_monitor_refresh_ms": "0",
        # payloads up to this size travel inside calls and answers; Ray's default of 100 KB sends a fragment of a small
        # model through five object stores, where on two cores it waits for seconds
        "RAY_max_direct_call_object_size": str(INLINE_BYTES_MAX),
        # setproctitle would overwrite the environment that the marker is read from
        "SPT_NOENV": "1",
        # Ray's default for workers is 15: anything else on the machine would be preferred to the training itself
        "RAY_worker_niceness": "0",
        # glibc gives an inner step's buffers back to the kernel and asks for them again, a page fault each 4 KiB: with
        # these a nano step takes 48 ms instead of 65
        "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
        "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
        "MALLOC_TOP_PAD_": str(64 << 20),
        # one heap for all threads: what one has used and freed, another need not ask the kernel for
        "MALLOC_ARENA_MAX": "1",
    }


AUTHORITIES_VARIABLE = "RAY_TLS_CA_CERT"
"""Its file is in the machine's folder of certificates."""


def tls_environment(certificates: Path) -> dict[str, str]:
    """Ray's servers require a certificate of each caller, and its clients compare the server's with the address they call.

    A server reads the files when it begins, a client whenever it makes a connection. Source: Ray 2.60, GrpcServer::Run and
    BuildChannel; what is not gRPC, such as the agent of runtime environments, is in the clear.
    """
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(certificates / CERTIFICATE),
        "RAY_TLS_SERVER_KEY": str(certificates / KEY),
        AUTHORITIES_VARIABLE: str(certificates / AUTHORITY_CERTIFICATE),
    }


def abandoned_after_s() -> float:
    """Return the time without a synchroniser after which an island of this process's cluster counts as abandoned."""
    return float(os.environ.get(TOLERANCE_VARIABLE, PARTITION_TOLERANCE_S)) * ABANDONED_RATIO
