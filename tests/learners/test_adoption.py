"""What adoption keeps, by rule, and that an island that is cut off does not fill its memory with snapshots."""

from __future__ import annotations

import numpy as np
import pytest

from learners.adoption import SENT_KEPT, FragmentWork, Known, Rule, Sent, combine
from orchestrator.core.vocabulary import Version


def value(number: float) -> dict[str, np.ndarray]:
    return {"a": np.full(3, number, np.float32)}


def work(offers: int, rule: Rule) -> FragmentWork:
    """Adopted 1.0 after offer 10; then ``offers`` more, of ten tokens each."""
    made = FragmentWork(Version(1), base=value(1.0), offers_before=10)
    for number in range(1, offers + 1):
        made.token_count = 10 * number
        made.remember(Sent(10 + number, Known(value(1.0 + number)), number, 10 * number), rule)
    return made


@pytest.mark.parametrize("rule", ["replace", "mix", "rebase"])
def test_snapshots_are_bounded_however_long_nothing_is_published(rule: Rule) -> None:
    assert len(work(1000, rule).sent) == SENT_KEPT[rule]


def test_rebase_keeps_what_follows_the_merged_offer_and_all_when_none_was_merged() -> None:
    ours = work(3, "rebase")
    merged = ours.kept_since(12, "rebase")
    assert merged is not None
    assert (merged.offer, merged.token_count) == (12, 20)
    nothing_merged = ours.kept_since(10, "rebase")
    assert nothing_merged is not None
    assert nothing_merged.token_count == 0
    np.testing.assert_array_equal(nothing_merged.snapshot.arrays()["a"], value(1.0)["a"])


def test_rebase_on_a_merged_offer_that_was_dropped_keeps_nothing_rather_than_counting_twice() -> None:
    assert work(9, "rebase").kept_since(11, "rebase") is None


def test_the_arithmetic_of_the_rules() -> None:
    published, own, since = value(5.0), value(3.0), value(2.0)
    assert combine(published, own, since, "rebase", 0.5)["a"][0] == pytest.approx(6.0)
    assert combine(published, own, since, "mix", 0.25)["a"][0] == pytest.approx(0.25 * 3.0 + 0.75 * 5.0)
    assert combine(published, own, since, "mix", 0.25)["a"].dtype == np.float32
