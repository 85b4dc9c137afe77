"""A link's impairment: how long nothing passes, what bytes cost, what becomes of the next payloads, and that it ends."""

from __future__ import annotations

import pytest

from orchestrator.core.faults import Corrupt, Cut, Delay, Drop, LinkImpairment, Slow, fault_of


def impaired(kind: str, now: float = 100.0, **numbers: float) -> LinkImpairment:
    impairment = LinkImpairment()
    impairment.inject(fault_of(kind, "asia", **numbers), now)
    return impairment


def test_a_link_without_impairment_costs_nothing():
    impairment = LinkImpairment()
    assert (
        impairment.cut_s(1.0),
        impairment.transfer_delay_s(10**9, 1.0),
        impairment.slow(1.0),
        impairment.payload_fault(),
    ) == (
        0.0,
        0.0,
        False,
        None,
    )


def test_a_cut_ends_by_itself_and_a_shorter_one_does_not_shorten_it():
    impairment = impaired("cut", duration=8.0)
    assert impairment.cut_s(103.0) == 5.0
    impairment.inject(Cut("asia", 2.0), 101.0)
    assert impairment.cut_s(103.0) == 5.0
    assert impairment.cut_s(108.0) == 0.0


@pytest.mark.parametrize(
    ("size_bytes", "now", "seconds"),
    [(500, 100.0, 5.0), (500, 105.0, 5.0), (500, 107.0, 3.0), (500, 110.0, 0.0), (10**9, 100.0, 10.0)],
)
def test_a_slow_link_takes_its_time_but_not_beyond_its_end(size_bytes, now, seconds):
    assert impaired("slow", duration=10.0, bytes_per_second=100.0).transfer_delay_s(size_bytes, now) == seconds


def test_each_payload_fault_is_met_once_in_the_order_of_injection():
    impairment = impaired("corrupt", payloads=1)
    impairment.inject(Delay("asia", 2.0, 2), 100.0)
    assert [impairment.payload_fault() for _ in range(4)] == [
        Corrupt("asia", 1),
        Delay("asia", 2.0, 2),
        Delay("asia", 2.0, 2),
        None,
    ]


def test_a_cleared_link_is_unimpaired():
    impairment = impaired("cut", duration=8.0)
    impairment.inject(Slow("asia", 8.0, 1.0), 100.0)
    impairment.inject(Drop("asia", 3), 100.0)
    impairment.clear()
    assert (impairment.cut_s(101.0), impairment.transfer_delay_s(100, 101.0), impairment.payload_fault()) == (
        0.0,
        0.0,
        None,
    )
