"""Any two processes of an installation die at the same moment: after ``atoll up`` its job merges, and is whole again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ray.killed_pairs import PAIRS, Campaign, campaign

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1200), pytest.mark.soak("a cluster of its own, half an hour")]


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Campaign]:
    with campaign(tmp_path_factory.mktemp("pairs")) as one:
        yield one


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_job_goes_on_after_the_deaths_of_two_at_once(struck: Campaign, pair: tuple[str, str]) -> None:
    took = struck.strike(pair)
    print(f"{'+'.join(pair)}: up {took.up_s:.1f} s, merge {took.merge_s:.1f} s later, whole {took.whole_s:.1f} s later")


def test_a_dead_node_is_handed_nothing_by_the_head_that_was_restored_without_it(struck: Campaign) -> None:
    """Before, the synchroniser's restart was handed to it in some of these, and waited for eleven minutes."""
    took = struck.strike(("head", "head-raylet", "node-raylet", "service"))
    print(f"up {took.up_s:.1f} s, merge {took.merge_s:.1f} s later")
