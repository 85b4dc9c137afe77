"""The time from a call to the bytes of its payload: in the call's answer, or pulled by a ticket in it.

    python -m tests.bench.handing_over

Both ends run on loopback, best of 8 to 100. It shows from which size on a ticket is worth its second round trip
(`transport.inline_bytes_max`).
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import numpy as np

from orchestrator.certificates.authority import JobAuthority
from orchestrator.channel.endpoint import Carried, Endpoint, Membership, Payload, Terms
from orchestrator.runtime.settings import INLINE_BYTES_MAX

KIB = 1 << 10
SIZES = tuple(4**power * KIB for power in range(1, 8))
TOTAL_BYTES, COUNT_MIN, COUNT_MAX = 64 * KIB * KIB, 8, 100
LOOPBACK, GIVER, TAKER = "127.0.0.1", "giver", "taker"
IN_ANSWER = "in the answer"
PULLED = Terms(inline_bytes_max=0)
WAYS = {
    IN_ANSWER: Terms(inline_bytes_max=TOTAL_BYTES),
    "memory": PULLED,
    "plain": replace(PULLED, shared_memory=False),
    "TLS": replace(PULLED, shared_memory=False, tls="always"),
}


class Giver:
    """Hands over payloads, one at a time."""

    def __init__(self, memberships: dict[str, Membership]) -> None:
        self._ends = {way: Endpoint(membership, LOOPBACK) for way, membership in memberships.items()}
        self._held: Payload | None = None

    def hand_over(self, way: str, size: int) -> Carried:
        self._held = self._ends[way].payload("payload", memoryview(np.zeros(size, np.uint8)))
        return self._held.carried(TAKER)


def memberships(authority: JobAuthority, subject: str) -> dict[str, Membership]:
    identity = authority.issue(subject)
    return {
        way: Membership("job", subject, 1, terms, identity if terms.tls == "always" else None)
        for way, terms in WAYS.items()
    }


def seconds(ray: Any, giver: Any, taker: Endpoint, way: str, size: int) -> float:
    began = time.perf_counter()
    content = taker.received(ray.get(giver.hand_over.remote(way, size)))
    assert len(content) == size
    return time.perf_counter() - began


def main() -> None:
    os.environ |= {"RAY_max_direct_call_object_size": str(INLINE_BYTES_MAX), "RAY_USAGE_STATS_ENABLED": "0"}
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    authority = JobAuthority.new("job")
    giver = ray.remote(Giver).remote(memberships(authority, GIVER))
    takers = {way: Endpoint(member, LOOPBACK) for way, member in memberships(authority, TAKER).items()}
    print(f"{'milliseconds':>14}" + "".join(f"{way:>15}" for way in WAYS))
    for size in SIZES:
        count = max(COUNT_MIN, min(COUNT_MAX, TOTAL_BYTES // size))
        best = [min(seconds(ray, giver, takers[way], way, size) for _ in range(count)) for way in WAYS]
        print(f"{size // KIB:>10} KiB" + "".join(f"{1e3 * time_s:>15.2f}" for time_s in best), flush=True)
    for taker in takers.values():
        taker.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
