"""Which processes behind a cut line are to be ended, and when: those that are over, once their links could hear them out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from orchestrator.runtime.nodes import Orphans

FINAL_REPORT_S = 10.0
AWAY = {"far"}


@pytest.fixture
def orphans() -> Orphans:
    from orchestrator.runtime import nodes  # imports Ray, which must not happen at collection

    assert nodes.FINAL_REPORT_S == FINAL_REPORT_S
    return nodes.Orphans()


def test_an_orphan_is_ended_once_its_node_was_reachable_for_long_enough_to_be_heard_out(orphans: Orphans) -> None:
    assert orphans.add(("asia", 1), "far")
    assert not orphans.add(("asia", 1), "far")
    assert orphans.due(AWAY.__contains__, 0.0) == []
    assert orphans.due(AWAY.__contains__, 1e6) == []
    assert orphans.due(set().__contains__, 1e6 + 1) == []
    assert orphans.due(set().__contains__, 1e6 + 1 + FINAL_REPORT_S) == [("asia", 1)]
    orphans.discard([("asia", 1)])
    assert orphans.due(set().__contains__, 2e6) == []


def test_a_line_that_breaks_again_meanwhile_begins_it_anew(orphans: Orphans) -> None:
    orphans.add(("asia", 1), "far")
    assert orphans.due(set().__contains__, 1.0) == []
    assert orphans.due(AWAY.__contains__, 2.0) == []
    assert orphans.due(set().__contains__, 3.0) == []
    assert orphans.due(set().__contains__, 2.0 + FINAL_REPORT_S) == []
    assert orphans.due(set().__contains__, 3.0 + FINAL_REPORT_S) == [("asia", 1)]
