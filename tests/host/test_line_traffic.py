"""Bytes are counted as they are carried, for each island over all its incarnations, and add up by region."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from orchestrator.core.vocabulary import IslandId
from orchestrator.host.line_traffic import JobLines, LineCounter, by_region, pause_reason

EAST, WEST, ASIA = IslandId("us-east"), IslandId("us-west"), IslandId("asia")


def test_an_islands_next_incarnation_goes_on_with_the_same_counter() -> None:
    lines = JobLines()
    lines.of(ASIA).received(100, 0.5)
    lines.of(ASIA).received(50, 0.25)
    record = lines.statuses()["asia"]
    assert (record.up_payloads, record.up_bytes, record.up_busy_seconds) == (2, 150, 0.75)


def test_what_goes_down_is_told_apart_by_kind() -> None:
    counter = LineCounter()
    for kind, size in (("update", 5), ("values", 40), ("state", 80), ("update", 6)):
        counter.sent(kind, size)  # type: ignore[arg-type]  # they are kinds
    counter.delivered(2.0)
    record = counter.status()
    assert record.down_bytes == {"update": 11, "values": 40, "state": 80}
    assert record.down_payloads == {"update": 2, "values": 1, "state": 1}
    assert record.down_busy_seconds == 2.0


def test_what_waits_is_what_waits_now_and_no_sum() -> None:
    counter = LineCounter()
    counter.waits(3, 300)
    counter.waits(1, 100)
    assert (counter.status().queued_fragments, counter.status().queued_bytes) == (1, 100)


def test_a_record_stays_as_it_was_taken() -> None:
    counter = LineCounter()
    before = counter.status()
    counter.sent("update", 5)
    assert before.down_bytes["update"] == 0


def test_regions_are_the_sums_of_their_islands() -> None:
    lines = JobLines()
    for island, size in ((EAST, 1), (WEST, 10), (ASIA, 100)):
        lines.of(island).received(size, 1.0)
        lines.of(island).sent("values", 2 * size)
        lines.of(island).waits(1, size)
    regions = by_region(lines.statuses(), {EAST: "america", WEST: "america", ASIA: "asia"})
    assert (regions["america"].up_bytes, regions["asia"].up_bytes) == (11, 100)
    assert (regions["america"].down_bytes["values"], regions["america"].queued_fragments) == (22, 2)
    assert lines.statuses()["us-east"].up_bytes == 1, "an island's own record is not touched"


def test_nothing_is_lost_where_links_count_at_once() -> None:
    counter = LineCounter()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2000):
            pool.submit(counter.sent, "update", 3)
    assert counter.status().down_bytes["update"] == 6000


def test_what_is_in_a_lines_way_is_said_while_it_is_also_of_its_region() -> None:
    lines = JobLines()
    lines.of(EAST).waits(0, 0)
    lines.of(ASIA).hindered("nothing comes from there")
    regions = {EAST: "america", ASIA: "asia"}
    assert lines.statuses()["asia"].trouble == "nothing comes from there"
    assert by_region(lines.statuses(), regions)["asia"].trouble == "nothing comes from there"
    assert by_region(lines.statuses(), regions)["america"].trouble is None
    lines.of(ASIA).hindered(None)
    assert lines.statuses()["asia"].trouble is None


def test_merging_waits_for_lines_where_too_few_islands_have_a_free_one() -> None:
    lines = JobLines()
    for island in (EAST, WEST, ASIA):
        lines.of(island).waits(0, 0)
    assert pause_reason(lines.statuses(), [EAST], 2) is None, "what the core says of it is enough"
    lines.of(ASIA).hindered("nothing comes from 10.0.0.3:42001")
    assert pause_reason(lines.statuses(), [EAST, WEST, ASIA], 2) is None
    reason = pause_reason(lines.statuses(), [WEST, ASIA], 2)
    assert reason is not None
    assert "asia: nothing comes from 10.0.0.3:42001" in reason
    assert pause_reason(lines.statuses(), [EAST, WEST], 3) is None, "asia does not train"
