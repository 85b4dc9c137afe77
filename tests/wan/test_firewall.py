"""A firewall that lets Ray through and not the parameter channel: islands train, nothing is merged, an operator sees why."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.wan.archipelago import Archipelago, WideJob
from tests.wan.conftest import ASIA, EAST

pytestmark = pytest.mark.ray
FIRST, LAST = 24_000, 24_999


@pytest.mark.soak("half a minute of waiting")
def test_a_firewall_in_the_channels_way_is_seen_with_its_remedy_and_forgotten_when_it_opens(
    archipelago: Archipelago, submit: Callable[..., WideJob]
) -> None:
    job = submit(transport={"ports": [FIRST, LAST], "inline_bytes_max": 0, "stall_s": 20.0})
    job.wait_for_merge(EAST, 1)
    pid = job.wait_for_merge(ASIA, 1)["pid"]
    region = archipelago.region_of(pid)
    address = archipelago.regions.address(region)

    archipelago.regions.close_ports(region, FIRST, LAST)
    try:
        job.wait_until(lambda: bool(job.trouble(ASIA)), "the trouble of the line to asia")
        trouble = job.trouble(ASIA)
        assert f"{FIRST} to {LAST}" in trouble
        assert address in trouble
        assert "Allow TCP" in trouble
        job.wait_for_state(ASIA, "training")  # Ray gets through
        job.wait_until(lambda: job.island(EAST)["last_merge_at"] > job.island(ASIA)["last_merge_at"], "east goes on")
        assert not job.trouble(EAST)
    finally:
        archipelago.regions.open_ports(region)
    at = job.status()["at"]
    job.wait_until(lambda: ASIA in job.contributors_since(at), "a contribution of asia")
    job.wait_until(lambda: not job.trouble(ASIA), "no trouble any more")
    assert job.island(ASIA)["pid"] == pid
