"""What every Ray process must have been told, in its own environment: Ray reads its settings once, wherever it is imported.

The figures are what cutting networks has shown of Ray 2.60, not what ``runtime/settings.py`` says. Cuts that are short
enough for a test Ray survives without any of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.runtime import processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.runtime.settings import CLUSTER_MARKER
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.ray
CUT_S = 600
"""How long a region may be cut off: ten minutes."""
CHECK_S_MIN, CHECK_S_MAX = 3, 13
"""What one failed health check costs: at least its period, at most its own timeout of 10 s besides."""
DEAD_S_MAX = 3600
"""A node that is dead has to be believed so some time: without that nothing of it is ever placed elsewhere."""
PATIENCE_MS_MAX = 30_000
"""After a minute's cut TCP tries again only each further minute, so nobody may wait as long for an acknowledgement."""


def environments(home: Path) -> dict[str, list[dict[str, str]]]:
    """Of each process of the cluster, by the process's name."""
    cluster = ClusterFile.find(home)
    assert cluster is not None
    found: dict[str, list[dict[str, str]]] = {}
    for process, environment in processes.marked_by_any():
        if environment[CLUSTER_MARKER] == cluster.id:
            found.setdefault(process.name(), []).append(environment)
    return found


def test_every_daemon_and_every_actor_bears_a_cut_of_ten_minutes(port: RayControlPort, home: Path) -> None:
    found = environments(home)
    assert len(found["gcs_server"]) == 1
    assert len(found["raylet"]) == 1 + len(port.node_groups())
    for environment in (*found["gcs_server"], *found["raylet"], environment_of_an_actor()):
        assert_tolerant(environment)


def environment_of_an_actor() -> dict[str, str]:
    """Of its worker process, as it was when that began."""
    import ray  # not before the cluster's environment is set

    class Told:
        def pid(self) -> int:
            import os

            return os.getpid()

    actor: Any = ray.remote(Told).options(num_cpus=0).remote()
    try:
        return psutil.Process(ray.get(actor.pid.remote(), timeout=PATIENCE_S)).environ()
    finally:
        ray.kill(actor)


def assert_tolerant(environment: dict[str, str]) -> None:
    checks = int(environment["RAY_health_check_failure_threshold"])
    assert checks * CHECK_S_MIN >= CUT_S, "a node that is cut off is declared dead, and can never rejoin"
    assert checks * CHECK_S_MAX <= DEAD_S_MAX
    declared_dead_s = checks * CHECK_S_MAX
    assert int(environment["RAY_gcs_rpc_server_reconnect_timeout_s"]) > declared_dead_s, (
        "a raylet gives up before the head"
    )
    assert int(environment["RAY_subscriber_timeout_ms"]) > declared_dead_s * 1000, (
        "it lives, and its calls never recover"
    )
    assert 0 < int(environment["RAY_grpc_client_keepalive_timeout_ms"]) <= PATIENCE_MS_MAX
    assert environment["RAY_memory_monitor_refresh_ms"] == "0", "islands are killed for the memory of others"
    assert environment["RAY_worker_niceness"] == "0", "anything else on the machine is preferred to training"
    assert environment["RAY_AUTH_MODE"] == "token"
    assert Path(environment["RAY_AUTH_TOKEN_PATH"]).stat().st_mode & 0o077 == 0
    assert environment["RAY_gcs_storage"] == "rocksdb"
    assert Path(environment["RAY_gcs_storage_path"]).is_dir(), "a head that is killed comes back empty"
