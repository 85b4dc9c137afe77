"""Which processes behind a cut line are to be ended, and when: those that are over, once their links could hear them out."""

from __future__ import annotations

from orchestrator.runtime.strays import LAST_WORDS_S, Strays

AWAY = {"far"}


def test_a_stray_is_ended_once_its_node_was_reachable_for_long_enough_to_be_heard_out() -> None:
    strays = Strays()
    assert strays.add(("asia", 1), "far")
    assert not strays.add(("asia", 1), "far")
    assert strays.due(AWAY.__contains__, 0.0) == []
    assert strays.due(AWAY.__contains__, 1e6) == []
    assert strays.due(set().__contains__, 1e6 + 1) == []
    assert strays.due(set().__contains__, 1e6 + 1 + LAST_WORDS_S) == [("asia", 1)]
    strays.discard([("asia", 1)])
    assert strays.due(set().__contains__, 2e6) == []


def test_a_line_that_breaks_again_meanwhile_begins_it_anew() -> None:
    strays = Strays()
    strays.add(("asia", 1), "far")
    assert strays.due(set().__contains__, 1.0) == []
    assert strays.due(AWAY.__contains__, 2.0) == []
    assert strays.due(set().__contains__, 3.0) == []
    assert strays.due(set().__contains__, 2.0 + LAST_WORDS_S) == []
    assert strays.due(set().__contains__, 3.0 + LAST_WORDS_S) == [("asia", 1)]
