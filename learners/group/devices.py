"""The devices of an island of many hosts as one: JAX's distributed runtime, begun before any of its devices is used.

Source: JAX 0.10.2, as measured: its preemption notifier swallows SIGTERM, and its own way of noticing a death takes its
heartbeat's timeout and then hangs or aborts. So the one is off, the other as good as: who dies is noticed by the link
(``link``), and a process that is merely stopped for a while must not end the others.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from orchestrator.actors.island import Rank
from orchestrator.errors import ConfigurationError

INITIALISED_S = 300
"""For the last process to come: it may have to import JAX on a busy machine. A death before that ends all by the link."""
HEARTBEAT_S = 7 * 86_400


def join(rank: Rank) -> int:
    """Make this process one of the island's; return how many devices of it are on this host."""
    import jax

    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    place = f"[{rank.place.host}]" if ":" in rank.place.host else rank.place.host
    address = f"{place}:{rank.place.devices_port}"
    jax.distributed.initialize(
        address,
        coordinator_bind_address=address if rank.number == 0 else None,  # by default it listens on all interfaces
        num_processes=rank.size,
        process_id=rank.number,
        initialization_timeout=INITIALISED_S,
        heartbeat_timeout_seconds=HEARTBEAT_S,
    )
    return int(jax.local_device_count())


def require_promised(spec: Mapping[str, Any], device_count: int, rank: Rank | None) -> None:
    """Raises ConfigurationError where this host has fewer devices than its entry promises."""
    promised = spec.get("island", {}).get("accelerators", 0)
    if device_count < promised:
        host = socket.gethostname() if rank is None else f"{socket.gethostname()} (host {rank.number} of {rank.size})"
        raise ConfigurationError(
            detail=f"islands.accelerators promises {promised} devices of a host, and {host} has {device_count}. "
            "Lower accelerators, or repair the host: its drivers, or what else uses its devices."
        )
