"""A job whose synchroniser's machine is gone with its disk: which versions go on, who survives, what is counted once."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core import events, saving
from orchestrator.core.effects import (
    BeginCatchUp,
    FlushIsland,
    FromSynchroniser,
    PlaceIsland,
    PublishFragment,
    RefuseContribution,
    SetTimer,
    StartTraining,
)
from orchestrator.core.messages import Adopted, Announcement, HeldVersion, IslandHoldings, MergedWork, Progress
from orchestrator.core.salvage import (
    ChosenVersion,
    choose,
    last_incarnations,
    latest,
    settled,
    survivors,
    tokens_trained,
)
from orchestrator.core.vocabulary import (
    AllOffers,
    FragmentId,
    Incarnation,
    IslandId,
    IslandState,
    RefusalReason,
    Version,
)
from tests.harness.story import Story, all_of, the

FRAGMENTS = 2


def digest_of(fragment: int, version: int) -> str:
    return f"Θ{fragment}@{version}"


def told(fragment: int, version: int, merged: tuple[tuple[str, int], ...] = ()) -> Announcement:
    works = tuple(MergedWork(IslandId(island), Incarnation(1), offer) for island, offer in merged)
    return Announcement(FragmentId(fragment), Version(version), digest_of(fragment, version), 10 * version, works)


def held(fragment: int, version: int, digest: str = "", announced: bool = True) -> HeldVersion:
    bytes_here = digest or digest_of(fragment, version)
    announcement = told(fragment, version) if announced else None
    return HeldVersion(FragmentId(fragment), Version(version), bytes_here, announcement)


def answer(island: str, *versions: int, **changed: object) -> IslandHoldings:
    """An island that holds and builds on these versions."""
    plain = IslandHoldings(
        IslandId(island),
        Incarnation(1),
        tuple(held(p, version) for p, version in enumerate(versions)),
        tuple(map(Version, versions)),
        step=40,
        steps_total=40,
        tokens_total=400,
        stepping_seconds=4.0,
        kept_tokens=(30, 20),
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def versions_of(answers: list[IslandHoldings]) -> list[int]:
    return [chosen.version for chosen in choose(answers, FRAGMENTS).chosen]


def test_the_newest_version_that_an_island_holds_goes_on_for_each_fragment() -> None:
    choice = choose([answer("a", 5, 3), answer("b", 4, 4), answer("c", 4, 3)], FRAGMENTS)
    assert [(one.version, one.holders) for one in choice.chosen] == [(5, ("a",)), (4, ("b",))]
    assert [one.step for one in choice.chosen] == [50, 40]
    assert (choice.doubted, choice.lost) == ({}, ())


def test_a_copy_that_is_not_what_was_announced_with_it_is_damaged_and_does_not_count() -> None:
    damaged = answer("a", 5, 3, held=(held(0, 5, "other bytes"), held(1, 3)))
    choice = choose([damaged, answer("b", 4, 3)], FRAGMENTS)
    assert [(one.version, one.holders) for one in choice.chosen] == [(4, ("b",)), (3, ("a", "b"))]
    assert choice.doubted == {"a": "its copy of version 5 of fragment 0 is damaged"}
    assert choice.lost == (saving.LostVersion(0, 5, "no island has sound bytes of it"),)


def test_a_single_copy_counts_only_where_the_synchroniser_announced_its_digest() -> None:
    lonely = answer("a", 5, 3, held=(held(0, 5, announced=False), held(1, 3)))
    choice = choose([lonely, answer("b", 4, 3)], FRAGMENTS)
    assert choice.chosen[0].version == 4
    assert choice.lost == (saving.LostVersion(0, 5, "only a holds it, and was not told its digest"),)
    assert choice.doubted == {"a": "it holds version 5 of fragment 0, which is lost"}


def test_where_islands_disagree_the_majority_is_right_and_the_others_are_placed_again() -> None:
    liar = HeldVersion(FragmentId(0), Version(5), "lie", replace(told(0, 5), digest="lie"))
    answers = [answer("a", 5, 3, held=(liar, held(1, 3))), answer("b", 5, 3), answer("c", 5, 3)]
    choice = choose(answers, FRAGMENTS)
    assert (choice.chosen[0].digest, choice.chosen[0].holders) == (digest_of(0, 5), ("b", "c"))
    assert choice.doubted == {"a": "its copy of version 5 of fragment 0 is not the one that most islands hold"}


def test_a_dispute_that_nothing_settles_falls_back_to_the_version_before() -> None:
    liar = HeldVersion(FragmentId(0), Version(5), "lie", replace(told(0, 5), digest="lie"))
    answers = [answer("a", 5, 3, held=(liar, held(1, 3))), answer("b", 5, 3), answer("c", 4, 3)]
    choice = choose(answers, FRAGMENTS)
    assert (choice.chosen[0].version, choice.chosen[0].holders) == (4, ("c",))
    assert choice.lost == (saving.LostVersion(0, 5, "a and b hold different bytes of it"),)
    assert set(choice.doubted) == {"a", "b"}


def test_an_island_that_gave_other_bytes_than_it_said_counts_no_more() -> None:
    choice = choose([answer("a", 5, 3), answer("b", 4, 3)], FRAGMENTS, {IslandId("a"): "it gave other bytes"})
    assert [(one.version, one.holders) for one in choice.chosen] == [(4, ("b",)), (3, ("b",))]
    assert choice.doubted == {"a": "it gave other bytes"}


def test_a_version_that_was_announced_and_reached_nobody_is_lost_and_named() -> None:
    choice = choose([answer("a", 5, 3, expected=(told(0, 6),)), answer("b", 5, 3)], FRAGMENTS)
    assert choice.chosen[0].version == 5
    assert choice.lost == (saving.LostVersion(0, 6, "no island has sound bytes of it"),)
    assert not choice.doubted


def test_a_fragment_that_no_island_can_vouch_for_is_not_chosen() -> None:
    alone = answer("a", 5, 3, held=(held(1, 3),))
    assert [one.fragment for one in choose([alone], FRAGMENTS).chosen] == [1]
    assert choose([], FRAGMENTS).chosen == ()


def test_survivors_learn_which_of_their_offers_the_chosen_version_contains() -> None:
    facts = (("a", 2), ("b", 7))
    newest = replace(held(0, 5), announced=told(0, 5, facts))
    answers = [answer("a", 5, 3, held=(newest, held(1, 3))), answer("b", 4, 3), answer("c", 4, 3)]
    a, b, c = survivors(answers, choose(answers, FRAGMENTS))
    assert (a.merged_offers, b.merged_offers, c.merged_offers) == ((0, 0), (7, 0), (0, 0))


def test_an_island_behind_a_version_whose_offers_nobody_knows_keeps_no_work_that_might_count_twice() -> None:
    """Two holders agree on the digest, and neither was told who is in it."""
    silent = (held(0, 5, announced=False), held(1, 3))
    answers = [answer("a", 5, 3, held=silent), answer("b", 5, 3, held=silent), answer("c", 4, 3)]
    choice = choose(answers, FRAGMENTS)
    assert choice.chosen[0].version == 5
    assert survivors(answers, choice)[2].merged_offers == (1 << 62, 0)


def test_an_offer_counts_as_merged_if_any_announcement_of_the_version_has_it() -> None:
    """b's process was believed lost before the version reached a, so what a heard of it lacks b."""
    late, early = (replace(held(0, 5), announced=told(0, 5, facts)) for facts in ((("c", 3),), (("b", 7), ("c", 3))))
    answers = [
        answer("a", 5, 3, held=(late, held(1, 3))),
        answer("b", 4, 3),
        answer("c", 5, 3, held=(early, held(1, 3))),
    ]
    assert survivors(answers, choose(answers, FRAGMENTS))[1].merged_offers == (7, 0)


def test_a_process_that_was_given_up_is_no_witness_and_does_not_survive() -> None:
    """Behind a partition a.1 trained on, and a.2 took its place; b.1 was given up, and b.2 is not placed yet."""
    given_up = answer("b", 5, 3)
    orphan, present = answer("a", 5, 3), answer("a", 4, 3, incarnation=Incarnation(2))
    known = last_incarnations([("a", 1), ("a", 2), ("b", 2), ("b", 1)])
    assert known == {"a": 2, "b": 2}
    assert latest([orphan, present, given_up, answer("c", 4, 3)], known) == (present, answer("c", 4, 3))


def test_an_island_whose_bytes_are_others_does_not_survive_although_another_gave_the_version() -> None:
    asked: list[tuple[int, str]] = []

    def pull(one: ChosenVersion, island: IslandId) -> str:
        asked.append((one.fragment, island))
        return "it gave other bytes" if island == "a" and one.fragment == 1 else ""

    answers = [answer("a", 5, 3), answer("b", 5, 3)]
    choice = settled(answers, FRAGMENTS, pull)
    assert choice.doubted == {"a": "it gave other bytes"}
    assert [one.island for one in survivors(answers, choice)] == ["b"]
    assert asked == [(0, "a"), (1, "a"), (1, "b")], "what is here is not pulled again"


def test_islands_that_have_all_drained_vouch_for_what_they_hold_and_are_placed_again() -> None:
    """The machine is lost before their processes end. What they trained counts."""
    answers = [answer("a", 5, 3, trains=False, job_tokens=700), answer("b", 5, 3, trains=False)]
    choice = settled(answers, FRAGMENTS, lambda one, island: "")
    assert [(one.version, one.holders) for one in choice.chosen] == [(5, ("a", "b")), (3, ("a", "b"))]
    assert (survivors(answers, choice), choice.doubted) == ((), {})
    assert (tokens_trained(answers), tokens_trained(answers[1:])) == (800, 400)
    story = Story("ab", before=(replace(SALVAGED, islands=(), tokens_trained=800),))
    placing = [(effect.island, effect.incarnation) for effect in all_of(PlaceIsland, story.begun)]
    assert placing == [("a", 2), ("b", 4)]
    assert isinstance(story.is_ready("a").source, FromSynchroniser)
    assert story.core.state.tokens_trained == 800


def test_where_nobody_gives_a_version_the_one_before_goes_on() -> None:
    answers = [answer("a", 5, 3), answer("b", 4, 3)]
    choice = settled(answers, FRAGMENTS, lambda one, island: "it is silent" if island == "a" else "")
    assert [(one.version, one.holders) for one in choice.chosen] == [(4, ("b",)), (3, ("b",))]
    nothing = settled(answers, FRAGMENTS, lambda one, island: "it is silent")
    assert (nothing.chosen, set(nothing.doubted)) == ((), {"a", "b"})


@settings(max_examples=200)
@given(seed=st.integers(0, 1 << 30))
def test_no_damage_goes_on_and_no_sound_island_is_blamed(seed: int) -> None:
    """Islands hold recent parts of one history, some of them damaged, each copy in its own way."""
    random = Random(seed)
    answers, damaged = [], set()
    for n in range(random.randint(1, 6)):
        name, copies = f"i{n}", []
        versions = tuple(random.randint(3, 6) for _ in range(FRAGMENTS))
        for p, version in enumerate(versions):
            if random.random() < 0.2:
                damaged.add(name)
                copies.append(held(p, version, f"damage {name} {p}"))
            else:
                copies.append(held(p, version))
        answers.append(answer(name, *versions, held=tuple(copies)))
    choice = choose(answers, FRAGMENTS)
    shuffled = list(answers)
    random.shuffle(shuffled)
    assert choose(shuffled, FRAGMENTS) == choice
    for one in choice.chosen:
        assert one.digest == digest_of(one.fragment, one.version)
        sound = [a for a in answers if held(one.fragment, one.version) in a.held]
        assert {a.island for a in sound} == set(one.holders)
    best = {one.fragment: one.version for one in choice.chosen}
    for p in range(FRAGMENTS):
        newest = max(
            (h.version for a in answers for h in a.held if h.fragment == p and h.digest == digest_of(p, h.version)),
            default=None,
        )
        assert best.get(p) == newest, "the newest sound version goes on"
    sound_islands = {a.island for a in answers} - damaged
    blamed = {island for island in sound_islands & choice.doubted.keys() if "damaged" in choice.doubted[island]}
    assert not blamed
    assert sound_islands <= {one.island for one in survivors(answers, choice)}, "a sound island goes on"


# ── the core ──────────────────────────────────────────────────────────────────────────────────────────────────────

SURVIVORS = tuple(
    saving.SurvivingIsland(
        IslandId(name), Incarnation(incarnation), (Version(5), Version(base)), 40, 40, 400, 4.0, (30, 20), (0, merged)
    )
    for name, incarnation, base, merged in (("a", 1, 4, 0), ("b", 3, 3, 7))
)
SALVAGED = saving.JobSalvaged(
    at=0.0,
    continued_from="epoch 2",
    epoch=3,
    versions=(Version(5), Version(4)),
    steps=(38, 36),
    digests=("d0", "d1"),
    lost=(saving.LostVersion(FragmentId(0), Version(6), "no island has sound bytes of it"),),
    momentum="zeros",
    tokens_trained=1_000,
    islands=SURVIVORS,
    last_incarnations=(
        (IslandId("a"), Incarnation(1)),
        (IslandId("b"), Incarnation(3)),
        (IslandId("c"), Incarnation(2)),
    ),
    checkpoints_before=7,
    doubted=("c: its copy is damaged",),
)


class Salvaged(Story):
    def __init__(self, **changed: object) -> None:
        super().__init__("abc", accounted=True, before=(SALVAGED,), **changed)


def test_survivors_are_placed_as_they_are_and_the_others_as_their_next_incarnations() -> None:
    story = Salvaged()
    placing = [(effect.island, effect.incarnation) for effect in all_of(PlaceIsland, story.begun)]
    assert placing == [("a", 1), ("b", 3), ("c", 3)]
    assert story.core.state.epoch == 3
    assert [(r.version, r.step) for r in story.core.state.rounds] == [(5, 38), (4, 36)]
    assert story.core.state.checkpoints.count == 7, "no checkpoint of the lost tape is written over"


def test_a_survivor_that_is_found_trains_at_once_and_gets_what_it_lacks() -> None:
    story = Salvaged()
    found = story.happen(events.IslandPlaced, "b", 3, "node", 1)
    assert all_of(StartTraining, found)
    assert not all_of(BeginCatchUp, found)
    (publication,) = all_of(PublishFragment, found)
    assert (publication.fragment, publication.version) == (1, 4)
    assert [(r.island, r.incarnation, r.merged_offer) for r in publication.recipients] == [("b", 3, 7)]
    assert story.core.state.islands["b"].state is IslandState.TRAINING
    assert the(StartTraining, story.happen(events.IslandPlaced, "a", 1, "node", 1)).island == "a"


def test_an_island_placed_anew_takes_the_state_of_a_survivor() -> None:
    story = Salvaged()
    story.happen(events.IslandPlaced, "a", 1, "node", 1)
    assert story.is_ready("c").donor == ("a", 1)


def test_survivors_wait_for_parameters_and_come_before_islands_that_need_their_state() -> None:
    story = Salvaged()
    core = story.core
    core.state.seeded = False
    assert not story.happen(events.IslandPlaced, "b", 3, "node", 1)
    assert [e.island for e in all_of(StartTraining, story.happen(events.OuterStateSeeded, 1000, "digest"))] == ["b"]


def test_kept_work_is_counted_once_and_earlier_reports_change_nothing() -> None:
    story = Salvaged()
    story.happen(events.IslandPlaced, "a", 1, "node", 1)
    assert story.core.state.tokens_trained == 1_000, "what survivors had trained counts before they report"
    account = story.goodput.ledger.accounts["a"][0]
    assert (account.local, account.carried, account.version) == (30, 30, 5)
    story.reports("a", 1, Adopted(FragmentId(0), Version(5), 30, 300, 10))  # not acknowledged by the lost synchroniser
    assert account.local == 30
    story.reports("a", 1, Progress(38, 38, 380, 3.8, 0.1, 0.2, 1.0))  # written before the salvage
    assert story.core.state.tokens_trained == 1_000
    story.tokens["a", 1] = 400
    story.trains("a", tokens=50)
    assert (account.local, story.goodput.ledger.trained["a"]) == (80, 50)
    story.goodput.check()


def test_work_that_the_chosen_version_contains_is_not_merged_again() -> None:
    """b contributed its offer 7 to version 4 of fragment 1, never heard of it, and offers the same work again."""
    story = Salvaged(staleness_max=3)
    story.happen(events.IslandPlaced, "b", 3, "node", 1)
    again = story.contribution("b", fragment=1, base=3, offer=7, incarnation=3, step=40)
    (refused,) = all_of(RefuseContribution, story.happen(events.ContributionArrived, again))
    assert refused.reason is RefusalReason.DUPLICATE
    newer = story.contribution("b", fragment=1, base=3, offer=8, incarnation=3, step=41)
    (refused, *_) = all_of(RefuseContribution, story.happen(events.ContributionArrived, newer))
    assert refused.reason is RefusalReason.ALREADY_MERGED


def test_an_offer_that_a_survivor_made_before_the_version_it_held_is_not_merged() -> None:
    """a holds version 5 of fragment 0. An offer on version 4 arrives again, because its report was never acknowledged.

    Whether version 5 has it is on the lost tape. Its tokens are none of those that a kept.
    """
    story = Salvaged(staleness_max=3)
    story.happen(events.IslandPlaced, "a", 1, "node", 1)
    again = story.contribution("a", fragment=0, base=4, offer=6, step=36)
    (refused,) = all_of(RefuseContribution, story.happen(events.ContributionArrived, again))
    assert refused.reason is RefusalReason.ALREADY_MERGED
    story.goodput.check()
    later = story.contribution("a", fragment=0, base=5, offer=7, step=40, tokens=30)
    assert not all_of(RefuseContribution, story.happen(events.ContributionArrived, later))
    story.goodput.check()


def test_a_survivor_that_is_lost_before_it_is_found_comes_back_as_any_other() -> None:
    story = Salvaged()
    story.happen(events.PlacementFailed, "a", 1, "its process is gone")
    island = story.core.state.islands["a"]
    assert island.state is IslandState.LOST
    assert story.goodput.ledger.accounts["a"][0].discarded == 30
    story.goodput.check()


@pytest.mark.parametrize("found", [False, True])
def test_what_a_survivor_had_trained_counts_if_it_is_lost_before_it_reports(found: bool) -> None:
    story = Salvaged()
    if found:
        story.happen(events.IslandPlaced, "a", 1, "node", 1)
        effects = story.happen(events.ConnectionLost, "a", 1, True, "its process died")
    else:
        effects = story.happen(events.PlacementFailed, "a", 1, "its process is gone")
    assert story.core.state.tokens_trained == 1_000
    story.timer(the(SetTimer, effects))
    assert story.core.state.islands["a"].incarnation == 2
    assert story.core.state.tokens_trained == 1_000
    assert story.core.state.islands["a"].tokens_before == 400


def test_a_job_at_its_budget_ends_with_the_survivors_last_work() -> None:
    story = Salvaged(token_budget=600)
    story.happen(events.IslandPlaced, "a", 1, "node", 1)
    story.tokens["a", 1] = 400
    assert all_of(FlushIsland, story.trains("a", tokens=50))
    assert all_of(FlushIsland, story.happen(events.IslandPlaced, "b", 3, "node", 1))


def test_said_twice_it_changes_nothing() -> None:
    story = Salvaged()
    story.happen(events.IslandPlaced, "a", 1, "node", 1)
    before = dict(story.core.state.islands)
    assert not story.tell(SALVAGED)
    assert story.core.state.islands == before


@pytest.mark.parametrize("number", [1 << 62])
def test_an_island_of_which_nothing_is_known_keeps_no_work_of_the_fragment(number: int) -> None:
    one = replace(SURVIVORS[1], merged_offers=(0, number))
    story = Story("abc", before=(replace(SALVAGED, islands=(one,)),))
    found = story.happen(events.IslandPlaced, "b", 3, "node", 1)
    assert isinstance(the(PublishFragment, found).recipients[0].merged_offer, AllOffers)
