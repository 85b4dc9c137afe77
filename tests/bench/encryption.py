"""The cost of Ray's TLS for a call, and for an answer that carries a payload, on one machine. Not part of ``make bench``.

``python -m tests.bench.encryption`` runs a head and a driver with the settings of our clusters, in the clear and with
TLS. It measures the processor time of all their processes, because elapsed time says little on a busy machine.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from orchestrator.certificates import folders
from orchestrator.runtime import cluster, processes, ray_command
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.settings import CLUSTER_MARKER, INLINE_BYTES_MAX, ray_environment
from orchestrator.system.ports import LOOPBACK, free_port
from orchestrator.system.python_process import built

CALLS, PAYLOADS = 2000, 200
PAYLOAD_BYTES = INLINE_BYTES_MAX - (64 << 10)
"""The largest payload that travels inside an answer."""
MODULE = "tests.bench.encryption"


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a head with one actor and a driver that calls it, in seconds each."""

    call_s: float
    call_cpu_s: float
    payload_s: float
    payload_cpu_s: float


def main() -> None:
    clear, encrypted = (measured(by_tls=by_tls) for by_tls in (False, True))
    print(f"{'':24}{'in the clear':>16}{'TLS':>12}{'ratio':>8}")
    for name, what in (
        ("call_s", "a call, elapsed"),
        ("call_cpu_s", "a call, CPU"),
        ("payload_s", f"{PAYLOAD_BYTES / 2**20:.1f} MiB, elapsed"),
        ("payload_cpu_s", f"{PAYLOAD_BYTES / 2**20:.1f} MiB, CPU"),
    ):
        before, after = getattr(clear, name), getattr(encrypted, name)
        print(f"{what:24}{before * 1e3:13.3f} ms{after * 1e3:9.3f} ms{after / before:8.2f}")


def measured(*, by_tls: bool) -> Cost:
    with tempfile.TemporaryDirectory(prefix="atoll-bench-", ignore_cleanup_errors=True) as name:
        folder, cluster_id, port = Path(name), uuid.uuid4().hex, free_port()
        (folder / "token").write_text(secrets.token_hex(32))
        own = folder / "machine"
        folders.make_authority(folder / "authority", "bench")
        folders.issue(folder / "authority", own, [LOOPBACK])
        settings = ray_environment(folder / "token", certificates=own if by_tls else None)
        environment = {**built(os.environ), **settings, CLUSTER_MARKER: cluster_id}
        head = [
            "start",
            "--head",
            "--port",
            str(port),
            "--node-ip-address",
            LOOPBACK,
            "--temp-dir",
            str(folder / "ray"),
        ]
        quiet = ["--num-cpus", "2", "--include-dashboard", "false", "--no-monitor", "--disable-usage-stats"]
        try:
            command = [sys.executable, "-m", ray_command.MODULE, *head, *quiet]
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            ClusterFile(cluster_id, f"{LOOPBACK}:{port}", str(folder), settings).write(folder)
            driver = [sys.executable, "-m", MODULE, str(folder), cluster_id]
            printed = subprocess.run(driver, env=environment, check=True, capture_output=True, text=True).stdout
            return Cost(*json.loads(printed.splitlines()[-1]))
        finally:
            processes.end_all(cluster_id)


def drive(home: str, cluster_id: str) -> None:
    """Run as the driver, and print the fields of ``Cost`` as a list."""
    cluster.join(Path(home))
    import ray  # not before its environment is set

    class Answering:
        def answer(self, size: int) -> bytes:
            return bytes(size)

    actor = ray.remote(Answering).remote()
    ray.get(actor.answer.remote(0))
    costs: list[float] = []
    for count, size in ((CALLS, 0), (PAYLOADS, PAYLOAD_BYTES)):
        began, cpu_began = time.monotonic(), cpu_s(cluster_id)
        for _ in range(count):
            ray.get(actor.answer.remote(size))
        costs += [(time.monotonic() - began) / count, (cpu_s(cluster_id) - cpu_began) / count]
    print(json.dumps(costs))


def cpu_s(cluster_id: str) -> float:
    """Return the processor time so far of this process and all others of the cluster."""
    times = [process.cpu_times() for process in processes.marked(cluster_id)]
    return time.process_time() + sum(each.user + each.system for each in times)


if __name__ == "__main__":
    drive(*sys.argv[1:]) if len(sys.argv) > 1 else main()
