"""The devices of an island of many hosts as one: JAX's distributed runtime, begun before any of its devices is used.

Source: JAX 0.10.2, as measured: its preemption notifier swallows SIGTERM, and its own way of noticing a death takes its
heartbeat's timeout and then hangs or aborts. So the one is off, the other as good as: who dies is noticed by the link
(``link``), and a process that is merely stopped for a while must not end the others.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from learners.contract import entry_of
from orchestrator.actors.island import Rank
from orchestrator.errors import InvalidJobSpec, Problem

INITIALISED_S = 300
"""For the last process to come: it may have to import JAX on a busy machine. A death before that ends all by the link."""
HEARTBEAT_S = 7 * 86_400


def join(rank: Rank) -> tuple[int, ...]:
    """Make this process one of the island's; return how many devices are on each of its hosts, by rank."""
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
    counts = Counter(device.process_index for device in jax.devices())
    return tuple(counts[number] for number in range(rank.size))


def require_promised(spec: Mapping[str, Any], device_counts: Sequence[int]) -> None:
    """Raises InvalidJobSpec where a host of this island has fewer devices than its entry promises. Counts are by rank."""
    promised = spec.get("island", {}).get("accelerators", 0)
    short = [f"host {number} has {count}" for number, count in enumerate(device_counts) if count < promised]
    if short:
        few = ", ".join(short) if len(device_counts) > 1 else f"{socket.gethostname()} has {device_counts[0]}"
        raise InvalidJobSpec(
            problems=(
                Problem(
                    f"{entry_of(spec)}.accelerators",
                    f"promises {promised} devices of each host, and {few}.",
                    "Lower accelerators, or repair the host: its drivers, or what else uses its devices.",
                ),
            )
        )
