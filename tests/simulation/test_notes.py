"""What a simulation says beside its figures: gangs, spares, and whether the line carries what is sent."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.simulation import run, spec
from orchestrator.simulation.bandwidth import Traffic
from orchestrator.simulation.fleet import FleetPlan, System
from orchestrator.simulation.line_advice import bits_of

FLEET = {"chips": 256, "chips_per_slice": 8, "learners": 4, "mtbi_chip": "24d", "return_time": {"exponential": "15min"}}
SMALL: dict[str, Any] = {"duration": "2d", "fleet": FLEET, "systems": ["data-parallel", "decoupled"]}


def said(**changes: Any) -> list[str]:
    return list(run.simulate(spec.parse({**SMALL, **changes})).notes)


def test_learners_of_several_slices_are_said_to_be_no_gangs_with_the_goodput_of_gangs() -> None:
    gang, spare, line = said()
    assert "its learners of 8 slices shrink" in gang
    assert "With gangs, goodput would be 97.6 %" in gang
    assert "Without spares it would train only while all 32 slices work: 89.5 % of the time" in spare
    assert line.startswith("lines: ")
    assert "does not simulate lines" in line


def test_learners_of_one_slice_are_gangs_already() -> None:
    assert not [note for note in said(fleet={**FLEET, "chips_per_slice": 64}) if "gang" in note]


def test_a_gang_is_a_slice_of_all_chips_of_a_learner() -> None:
    """A learner is one slice then, of all its chips."""
    plan = FleetPlan(1024, 200 * 86400.0, System.DECOUPLED, learners=4, chips_per_slice=8, mtbi_chip=24 * 86400.0)
    gangs = run.as_gangs(plan)
    assert gangs is not None
    assert (gangs.chips_per_slice, gangs.slice_count) == (256, 4)


@pytest.mark.parametrize(
    ("gbps", "says"),
    [
        (5.0, "at 5 Gbps they take 0.275 s."),
        (1.0, "The line would have to be 2.8 times as fast"),
        (0.1, "28 times as fast"),
    ],
)
def test_a_line_too_thin_is_said_with_by_how_much_and_what_helps(gbps: float, says: str) -> None:
    text = run.of_lines(Traffic(parameters=8e9, step_s=0.5), gbps * 1e9, simulated=True)
    assert says in text
    assert ("synchroniser.wire" in text) is (gbps < 5)


def test_a_round_trip_longer_than_the_overlap_is_said() -> None:
    text = run.of_lines(Traffic(step_s=0.1, overlap_steps=1, round_trip_s=0.3), 1e12, simulated=True)
    assert "The round trip alone takes longer than overlap_steps allows" in text


def test_bits_on_the_wire_follow_the_codec_unless_they_are_given() -> None:
    by_codec = spec.parse({**SMALL, "synchroniser": {"wire": "bfloat16"}})
    assert by_codec.wire_bits == bits_of("bfloat16")
    given = spec.parse({**SMALL, "synchroniser": {"wire": "bfloat16"}, "links": {"bits": 4}})
    assert given.wire_bits == 4
    assert "links.bits is 4, but the codec of synchroniser.wire has 16" in list(run.simulate(given).notes)[-1]
