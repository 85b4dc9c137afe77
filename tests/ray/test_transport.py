"""Payloads travel between islands and synchroniser by connections of the job's own, encrypted, and as slowly as it says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest

from tests.ray.jobs import ENDLESS, GROUPS, Job, assert_sound, synthetic

pytestmark = pytest.mark.ray
FIRST, LAST = 24_000, 24_999
"""Outside of the system's ephemeral range: Ray's own server in each process listens on any port of that."""


def connections(pid: int) -> Iterator[tuple[str, int, int]]:
    """State, own port and the peer's, of all that has to do with the ports of the job."""
    with suppress(psutil.Error):
        for one in psutil.Process(pid).net_connections(kind="tcp"):
            ports = (one.laddr.port, one.raddr.port if one.raddr else 0)
            if any(FIRST <= port <= LAST for port in ports):
                yield one.status, *ports


def test_a_job_whose_lines_are_slower_than_its_offers_merges_all_the_same(start: Callable[..., Job]) -> None:
    """A fragment takes a second and a new offer of it comes before: of two that are under way the older is given up, but
    never twice in a row."""
    job = start(
        synthetic(
            ENDLESS,
            GROUPS,
            synchroniser={"wire": "float32"},
            transport={
                "ports": [FIRST, LAST],
                "shared_memory": False,
                "tls": "always",
                "bytes_per_s": 100_000.0,
            },
        )
    )
    for group in GROUPS:
        job.wait_for_merge(group, 1)
    synchroniser = job.pid_of_synchroniser()
    served = {own for state, own, _ in connections(synchroniser) if state == psutil.CONN_LISTEN}
    assert len(served) == 1
    job.wait_until(
        lambda: all(any(peer in served for _, _, peer in connections(job.island(group)["pid"])) for group in GROUPS),
        "every island connected to the synchroniser",
    )
    job.wait_until(
        lambda: any(own not in served for state, own, _ in connections(synchroniser) if state == "ESTABLISHED"),
        "the synchroniser connected to an island",
    )
    assert_sound(job)
