"""What an island's loop does at its boundaries: offer, adopt, report, flush, drain."""

from __future__ import annotations

from time import monotonic

import numpy as np
import pytest

from learners import jax_trainer
from learners.loop import IslandLoop, LoopPlan
from learners.outbox import Outbox
from orchestrator.core.commands import UNCHANGED
from orchestrator.core.messages import (
    Adopted,
    Announcement,
    Broken,
    Drained,
    Flushed,
    HeldVersion,
    MergedWork,
    Offer,
    Progress,
)
from orchestrator.core.vocabulary import ScheduleAnchor
from orchestrator.errors import InternalError
from orchestrator.parameters import tensors, wire_format
from tests.learners.stepped import ISLANDS, TOKENS, alone, offers
from tests.waiting import PATIENCE_S


def test_an_offers_bytes_are_those_of_its_step_however_late_they_are_taken(new_island):
    island = new_island().start()
    island.steps(2)
    expected = {name: array.copy() for name, array in island.own(1).items()}
    island.steps(1)
    payload = island.loop.take(1, 1)
    assert payload is not None
    content, start = wire_format.parse(payload), island.trainer.initial_parameters()
    assert content.base == 0
    assert all(np.array_equal(content.decoded(name), start[name] - expected[name]) for name in expected)
    first = island.fragments[1][0]
    assert not np.array_equal(content.decoded(first), start[first] - island.own(1)[first])


def test_an_offer_stands_until_it_is_replaced_or_its_work_is_in_an_adopted_version(new_island):
    island = new_island().start()
    island.steps(2)
    assert island.loop.take(1, 1) is not None
    assert island.loop.take(1, 1) is not None
    island.steps(4)
    assert island.loop.take(1, 1) is None
    assert island.loop.take(1, 3) is not None
    assert [(offer.fragment, offer.offer) for offer in island.loop.standing_offers()] == [(1, 3), (0, 2)]
    island.loop.deliver(1, 1, 6, island.published(1, 0.5), merged_offer=1)
    island.steps(1)
    assert island.loop.take(1, 3) is not None  # what was merged was the one before
    island.loop.deliver(1, 2, 6, island.published(1, 0.5), merged_offer=3)
    island.steps(1)
    assert island.loop.take(1, 3) is None
    assert [offer.fragment for offer in island.loop.standing_offers()] == [0]


def test_progress_precedes_every_offer_and_adoption_so_that_totals_are_current(new_island):
    island = new_island().start()
    letters = island.steps(2)
    island.loop.deliver(0, 1, 2, island.published(0, 0.5))
    letters += island.steps(1)
    for index, letter in enumerate(letters):
        if isinstance(letter, Offer | Adopted):
            latest = [earlier for earlier in letters[:index] if isinstance(earlier, Progress)][-1]
            assert latest.tokens_total == letter.tokens_total
    assert [letter.steps_total for letter in letters if isinstance(letter, Progress)] == [
        2,
        3,
    ]  # one for both of the first


def test_between_two_times_of_the_clock_progress_is_reported_with_offers_and_at_the_end_alone(new_island):
    island = new_island(report_every_s=1e9).start()
    letters = island.steps(3)
    island.loop.deliver(0, 1, 2, island.published(0, 0.5))
    letters += island.steps(4)
    kinds = [type(letter) for letter in letters]
    assert kinds.count(Progress) == kinds.count(Offer) == 2
    assert all(kinds[index - 1] is Progress for index, kind in enumerate(kinds) if kind is Offer)
    adopted = kinds.index(Adopted)
    assert letters[adopted].tokens_total > max(x.tokens_total for x in letters[:adopted] if isinstance(x, Progress))
    island.loop.flush()
    island.trainer.permits.release()
    ending = island.letters_until(Flushed)
    assert [letter.steps_total for letter in ending if isinstance(letter, Progress)] == [8]


def test_replacing_takes_the_published_value_and_keeps_no_work(new_island):
    island = new_island().start()
    island.steps(3)  # fragment 1 was offered at 2
    island.loop.deliver(1, 1, 2, island.published(1, 0.5))
    island.trainer.permits.release()
    (adopted,) = [letter for letter in island.letters_until(Adopted) if isinstance(letter, Adopted)]
    assert adopted == Adopted(1, 1, 4, 4 * TOKENS, kept_tokens=0)
    assert island.trainer.at_gate.acquire(timeout=PATIENCE_S)
    island.outbox.take(0)
    assert all((array == 0.5).all() for array in island.own(1).values())
    assert offers(island.steps(2)) == [Offer(1, 3, 6, 1, 2, 2 * TOKENS, 6 * TOKENS)]


def test_rebasing_on_a_version_that_left_out_ones_offer_keeps_all_work_since_the_last_adoption(new_island, make_job):
    island = new_island(adoption="rebase").start()
    island.steps(3)  # fragment 1 was offered at 2, but did not get into version 1
    island.loop.deliver(1, 1, 2, island.published(1, 0.5), merged_offer=0)
    assert Adopted(1, 1, 4, 4 * TOKENS, kept_tokens=4 * TOKENS) in island.steps(1)
    own, first = alone(make_job(), 4), alone(make_job(), 0)
    for name, array in island.own(1).items():
        np.testing.assert_allclose(array, 0.5 + (own[name] - first[name]), rtol=1e-5, atol=1e-6)
    # and again, on the adopted base: 0.5 is taken off, not the first value
    island.loop.deliver(1, 2, 2, island.published(1, 0.75), merged_offer=0)
    assert Adopted(1, 2, 5, 5 * TOKENS, kept_tokens=5 * TOKENS) in island.steps(1)


def test_the_schedule_follows_what_the_job_has_trained_and_not_the_clock(new_island):
    island = new_island(interval=12, fragments=4).start()
    island.steps(3)
    island.loop.deliver(0, 1, 9, island.published(0, 0.5), 0, ScheduleAnchor(ISLANDS * TOKENS * 2, 9))
    island.steps(2)  # its clock was raised to 9, too
    island.loop.deliver(1, 1, 8, island.published(1, 0.5), 0, ScheduleAnchor(ISLANDS * TOKENS * 6, 10))
    letters = island.steps(2)
    assert island.trainer.schedule == [0, 1, 2, 3, 2, 3, 7, 8]
    island.loop.deliver(1, 2, 8, island.published(1, 0.5), 0, ScheduleAnchor(ISLANDS * TOKENS * 5, 9))  # no news
    letters += island.steps(1)
    assert island.trainer.schedule[-1] == 9
    adopted = [letter.fix for letter in letters if isinstance(letter, Adopted)]
    assert adopted == [ScheduleAnchor(ISLANDS * TOKENS * 6, 10)] * 2


def test_changed_settings_count_from_the_next_boundary_on(new_island):
    island = new_island(interval=4, fragments=1).start()
    assert [offer.step for offer in offers(island.steps(4))] == [4]
    island.loop.adjust(0.5, 3, UNCHANGED)
    assert [offer.step for offer in offers(island.steps(2))] == [6]
    island.loop.adjust(1.0, 100, UNCHANGED)
    assert offers(island.steps(3)) == []
    # a step is decided at the boundary before it: the one that waits at the gate began before the change
    assert island.trainer.lr_ratios == [*[1.0] * 5, 0.5, 0.5, *[1.0] * 3]


def test_an_island_begins_where_the_schedule_is_and_not_where_the_clock_is(new_island):
    island = new_island()
    island.loop.load(island.trainer.initial_parameters(), (0, 0), 30, cursor=0)
    island.loop.start(ScheduleAnchor(ISLANDS * TOKENS * 20, 29))
    island.loop.start(ScheduleAnchor(ISLANDS * TOKENS * 50, 29))  # it steps already
    assert island.trainer.at_gate.acquire(timeout=PATIENCE_S)
    island.steps(1)
    assert island.trainer.schedule == [21, 22]


def test_mail_that_waits_before_the_first_step_is_adopted_before_it(new_island):
    island = new_island()
    island.loop.deliver(0, 4, 30, island.published(0, 0.5))
    island.start(step=20)
    assert island.outbox.take(0) == [Adopted(0, 4, 30, 0, 0)]


def test_flushing_offers_all_uncovered_work_then_says_so_and_steps_no_more(new_island):
    island = new_island(fragments=3, interval=6).start()  # due at 6, 2, 4
    island.steps(3)
    island.loop.flush()
    island.trainer.permits.release()
    letters = island.letters_until(Flushed)
    # fragment 2 came due at 4 by itself, or was swept up by the flush: either way each fragment is offered once
    assert sorted((o.fragment, o.token_count) for o in offers(letters)) == [(p, 4 * TOKENS) for p in range(3)]
    assert isinstance(letters[-1], Flushed)
    assert all(island.loop.take(o.fragment, o.offer) is not None for o in offers(letters))
    assert not island.trainer.at_gate.acquire(blocking=False)


def test_an_island_without_a_state_is_flushed_at_once(new_island):
    island = new_island()
    island.loop.flush()
    assert island.outbox.take(0) == [Flushed()]


def test_draining_offers_again_what_a_version_lacks_and_says_so_once_versions_hold_all_work(new_island):
    island = new_island(adoption="rebase").start()  # due: fragment 0 at 4, 8, …; fragment 1 at 2, 6, …
    island.steps(3)  # fragment 1 was offered at 2, with 2 steps of what are 4 by the next boundary
    assert island.loop.take(1, 1) is not None
    island.loop.drain()
    island.trainer.permits.release()
    assert sorted((o.fragment, o.offer, o.step_count) for o in two_offers(island)) == [(0, 2, 4), (1, 3, 4)]
    island.loop.deliver(0, 1, 4, island.published(0, 1.0), 2)
    island.loop.deliver(1, 1, 4, island.published(1, 1.0), 1)  # it came too late for more than the first offer
    assert offers(island.letters_until(Offer)) == [Offer(1, 4, 4, 1, 2, 2 * TOKENS, 4 * TOKENS)]
    island.loop.deliver(1, 2, 4, island.published(1, 2.0), 4)
    assert isinstance(island.letters_until(Drained)[-1], Drained)
    assert not island.trainer.at_gate.acquire(blocking=False)
    held = island.loop.holdings("a", 1)  # it still vouches for what it holds
    assert (held.trains, [(one.fragment, one.version) for one in held.held]) == (False, [(0, 1), (1, 2)])


def two_offers(island):
    given = island.letters_until(Offer)
    while len(offers(given)) < 2:  # the second may come a moment later
        given += island.letters_until(Offer)
    return offers(given)


def test_a_drain_that_is_called_off_lets_the_island_train_on(new_island):
    island = new_island(adoption="rebase").start()
    island.steps(1)
    island.loop.drain()
    island.trainer.permits.release()
    two_offers(island)
    island.loop.start()
    assert island.trainer.at_gate.acquire(timeout=PATIENCE_S)
    assert [o.step_count for o in offers(island.steps(2))] == [4]


def test_misuse_by_the_service_fails_loudly(new_island):
    island = new_island()
    with pytest.raises(InternalError, match="before it held a state"):
        island.loop.start()
    with pytest.raises(InternalError, match="3 versions came for 2 fragments"):
        island.loop.load(island.trainer.initial_parameters(), (0, 0, 0), 0, 0)
    island.start()
    with pytest.raises(InternalError, match="was given another one"):
        island.loop.load(island.trainer.initial_parameters(), (0, 0), 0, 0)


class Stop(KeyboardInterrupt):
    pass


@pytest.mark.parametrize(
    "error", [FloatingPointError("enough"), SystemExit("enough"), Stop("enough"), GeneratorExit("enough")]
)
def test_a_failing_trainer_is_reported_as_broken(new_island, error):
    island = new_island().start()
    island.trainer.fails = error
    island.trainer.permits.release()
    assert island.letters_until(Broken)[-1] == Broken(f"{type(error).__name__}: enough (at step 0)")


def test_the_real_trainer_trains_offers_adopts_and_flushes_under_the_loop(make_job):
    trainer = jax_trainer.create(make_job(), 0, 2)
    trainer.warm_up()
    names = sorted(trainer.tensor_shapes())
    fragments = (tuple(names[0::2]), tuple(names[1::2]))
    outbox = Outbox()
    plan = LoopPlan(fragments, 4, "rebase", report_every_s=0.0, tokens_per_schedule_step=ISLANDS * TOKENS)
    loop = IslandLoop(trainer, plan, outbox)
    outer = dict(trainer.initial_parameters())
    loop.load(outer, (0, 0), 0, 0)
    loop.start()
    give_up_at, letters = monotonic() + PATIENCE_S, []
    versions, adopted = [0, 0], []
    while (sum(versions) < 4 or len(adopted) < 2) and monotonic() < give_up_at:
        for letter in outbox.take(PATIENCE_S):
            letters.append(letter)
            adopted += [letter.version] if isinstance(letter, Adopted) and letter.fragment == 0 else []
            if isinstance(letter, Offer) and (payload := loop.take(letter.fragment, letter.offer)) is not None:
                content = wire_format.parse(payload)
                if content.base != versions[letter.fragment]:
                    continue
                versions[letter.fragment] += 1
                arrays = {name: outer[name] - content.decoded(name) for name in content.tensors}
                outer |= arrays
                loop.deliver(letter.fragment, versions[letter.fragment], letter.step, arrays)
    state = loop.export_state(PATIENCE_S)
    loop.flush()
    while not letters or not isinstance(letters[-1], Flushed):
        letters += (got := outbox.take(PATIENCE_S))
        assert got
    loop.stop()
    assert not [letter for letter in letters if isinstance(letter, Broken)]
    assert adopted[:2] == [1, 2]
    assert state.step > 4
    progress = [letter for letter in letters if isinstance(letter, Progress)][-1]
    assert progress.loss < np.log(256)
    assert progress.tokens_total == progress.steps_total * TOKENS
    assert progress.gap_max_seconds >= 0 < progress.step_seconds_median


@pytest.mark.parametrize("adoption", ["mix", "rebase"])
def test_mixing_and_rebasing_keep_the_work_since_the_offer(new_island, make_job, adoption):
    island = new_island(adoption=adoption).start()
    island.steps(3)  # fragment 1 was offered at 2
    island.loop.deliver(1, 1, 2, island.published(1, 0.5), merged_offer=1)
    letters = island.steps(1)
    assert Adopted(1, 1, 4, 4 * TOKENS, kept_tokens=2 * TOKENS) in letters
    own, sent = alone(make_job(), 4), alone(make_job(), 2)
    for name, array in island.own(1).items():
        expected = 0.25 * own[name] + 0.75 * 0.5 if adoption == "mix" else 0.5 + (own[name] - sent[name])
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6)
    # the kept work is offered again with what follows, on the adopted base
    assert offers(island.steps(2)) == [Offer(1, 3, 6, 1, 4, 4 * TOKENS, 6 * TOKENS)]


def test_an_island_says_what_it_holds_of_theta_and_of_its_own_work(new_island):
    """A synchroniser whose predecessor's disk is lost asks for this. Digests are of the bytes, not of what was announced."""
    island = new_island()
    assert island.loop.holdings("a", 2) is None, "it does not train yet"
    island.start()
    island.steps(3)
    published = island.published(0, 0.5)
    announcement = Announcement(0, 1, tensors.digest(published), 2, (MergedWork("a", 2, 1),))
    island.loop.published.announce(announcement)
    waiting = Announcement(1, 1, "never arrives", 2, ())
    island.loop.published.announce(waiting)
    assert [x.fragment for x in island.loop.published.expected_versions()] == [0, 1]
    island.loop.deliver(0, 1, 2, published)
    island.steps(1)
    held = island.loop.holdings("a", 2)
    assert (held.island, held.incarnation, held.versions, held.expected) == ("a", 2, (1, 0), (waiting,))
    start = {name: island.trainer.initial_parameters()[name] for name in island.fragments[1]}
    assert held.held == (
        HeldVersion(0, 1, tensors.digest(published), announcement),
        HeldVersion(1, 0, tensors.digest(start), None),
    )
    assert (held.steps_total, held.tokens_total) == (4, 4 * TOKENS)
    assert held.stepping_seconds > 0
    damaged = dict(published)
    damaged[next(iter(damaged))] = next(iter(damaged.values())) + 1
    island.loop.published.hold(0, 2, damaged)
    island.loop.published.announce(Announcement(0, 2, announcement.digest, 4, ()))
    (first, _) = island.loop.holdings("a", 2).held
    assert first.digest != first.announced.digest
