"""Settings of a running job that an operator changes: checked together, given to islands, and the same after a restart."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest

from orchestrator.accounting.explanation import Explanations
from orchestrator.checkpoints import manifest as manifests
from orchestrator.checkpoints.manifest import Fragment, Manifest
from orchestrator.checkpoints.resumption import Resumption, commands_of
from orchestrator.core.commands import UNCHANGED, ChangedSettings, Continue, Finish, Kill, Pause, Readd, Set
from orchestrator.core.effects import (
    AdjustIsland,
    DrainIsland,
    Effect,
    MergeFragment,
    PlaceIsland,
    ResolveCommand,
    SetTimer,
    StartTraining,
    StopIsland,
)
from orchestrator.core.events import ConnectionLost, SynchroniserRestarted
from orchestrator.core.messages import CaughtUp, Drained, Offer
from orchestrator.core.salvage import changed_settings
from orchestrator.core.saving import BeginCheckpoint
from orchestrator.core.vocabulary import (
    CloseReason,
    Epoch,
    FragmentId,
    GraceTimer,
    IslandId,
    JobPhase,
    Schedule,
    Version,
)
from orchestrator.errors import DataError
from orchestrator.host.state_view import core_status
from orchestrator.replica.replica import Publication, Replica, ReplicaPolicy
from orchestrator.specification.config import parse_job
from orchestrator.tape.driver import MemorySink
from orchestrator.tape.replay import replay
from orchestrator.tape.schema import Header, Tape
from tests.harness.story import Story, all_of, policy, the
from tests.ray.jobs import synthetic


def changed(story: Story, **settings: float) -> ResolveCommand:
    return the(ResolveCommand, story.command(f"set-{len(story.records)}", Set(**settings)))  # type: ignore[arg-type]


def test_settings_are_changed_together_and_every_island_that_trains_gets_them() -> None:
    story = Story("abc", quorum=2)
    story.starts("a", "b")
    effects = story.command("c1", Set(0.5, 1, 3.0, 8), caller="ada")
    answer = the(ResolveCommand, effects)
    assert answer.accepted
    said = (
        "lr 0.5 of the specification's (until now 1), quorum 1 (until now 2), grace 3 (until now 1), interval 8 (until"
    )
    assert answer.detail.startswith(said)
    now_changed = ChangedSettings(Epoch(1), 1, 0.5, 1, 3.0, 8)
    expected = [AdjustIsland("a", 1, 0.5, 8, now_changed), AdjustIsland("b", 1, 0.5, 8, now_changed)]  # type: ignore[arg-type]
    assert all_of(AdjustIsland, effects) == expected
    now = core_status(story.core.state, story.now).settings
    assert now is not None
    assert (now.lr_ratio, now.quorum, now.grace, now.interval, now.changed) == (0.5, 1, 3.0, 8, True)


def test_an_island_that_comes_later_gets_the_settings_before_it_trains() -> None:
    story = Story("ab")
    story.starts("a")
    changed(story, sync_interval_steps=8)
    changed(story, lr_ratio=1.0)
    story.is_ready("b")
    effects = story.reports("b", 1, CaughtUp(None, (Version(0), Version(0)), 0, 0.1))
    orders = [effect for effect in effects if isinstance(effect, AdjustIsland | StartTraining)]
    assert [type(order) for order in orders] == [AdjustIsland, StartTraining]
    assert the(AdjustIsland, effects).interval_steps == 8


def test_a_lower_quorum_closes_a_round_that_waits_and_a_higher_one_holds_a_round_that_did_not() -> None:
    story = Story("ab", quorum=2, grace_cap_steps=0.0)
    story.starts("a", "b")
    assert not all_of(MergeFragment, story.offers_fragment("a"))
    merge = the(MergeFragment, story.command("c1", Set(quorum=1)))
    assert merge.reason is CloseReason.NO_GRACE_LEFT
    assert changed(story, quorum=2).accepted, "although a merge of one contribution is under way"
    story.merges(0, 1)
    assert not all_of(MergeFragment, story.offers_fragment("a"))


def test_a_longer_grace_window_counts_for_rounds_that_reach_their_quorum_afterwards() -> None:
    story = Story("ab", grace_cap_steps=0.0, overlap_steps=3)
    story.starts("a", "b")
    changed(story, grace_cap_steps=1.0)
    timer = the(SetTimer, story.offers_fragment("a"))
    assert timer.timer == GraceTimer(FragmentId(0))


def test_a_longer_interval_moves_the_point_from_which_a_contribution_is_on_time() -> None:
    folded = Explanations(policy("a"))
    story = Story("a", accounted=False, folds=(folded,))
    story.starts("a")
    changed(story, sync_interval_steps=8)
    assert not all_of(MergeFragment, story.offers_fragment("a", step=4))
    assert the(MergeFragment, story.offers_fragment("a", step=8)).step == 8
    assert folded.merges[FragmentId(0), Version(1)].opened_at == story.now


def test_an_interval_must_stay_above_that_of_the_routers() -> None:
    story = Story("a", fragment_count=2, router_interval_steps=3)
    story.starts("a")
    refused = changed(story, sync_interval_steps=3)
    assert not refused.accepted
    assert "must be 4 to 1,000,000 inner steps, above synchroniser.router_interval_steps (3)" in refused.detail
    assert changed(story, sync_interval_steps=8).accepted
    assert the(MergeFragment, story.offers_fragment("a", fragment=1, step=1)).step == 1
    story.merges(1, 1)
    assert not all_of(MergeFragment, story.offers_fragment("a", fragment=1, step=3))
    assert the(MergeFragment, story.offers_fragment("a", fragment=1, step=4)).step == 4, "routers keep their period"


@pytest.mark.parametrize(
    ("wanted", "refusal"),
    [
        (Set(), "no setting was named"),
        (Set(quorum=4), "quorum is 4, but must be 1 to 3, the islands that the job wants: lower it, or scale"),
        (Set(quorum=0), "quorum is 0, but must be 1 to 3"),
        (Set(sync_interval_steps=2), "interval is 2, but must be 3 to 1,000,000 inner steps, above"),
        (Set(grace_cap_steps=-1.0), "grace is -1, but must be 0 to 1,000,000 inner steps"),
        (Set(lr_ratio=0.0), "lr is 0 of the specification's, but must be 0.001 to 1000 of it"),
        (Set(lr_ratio=0.5, quorum=9), "quorum is 9"),
    ],
)
def test_a_setting_outside_its_bounds_is_refused_and_nothing_is_changed(wanted: Set, refusal: str) -> None:
    story = Story("abc")
    story.starts("a", "b")
    effects = story.command("c1", wanted)
    answer = the(ResolveCommand, effects)
    assert not answer.accepted
    assert answer.detail.startswith(refusal)
    assert len(effects) == 1
    assert story.core.state.policy == story.core.state.policy_begun
    assert story.core.state.lr_ratio == 1.0


def test_a_job_that_finishes_keeps_its_settings() -> None:
    story = Story("ab")
    story.starts("a")
    story.command("c1", Finish())
    assert "is finishing: its settings are not changed any more" in changed(story, quorum=2).detail


def test_settings_survive_the_synchroniser_and_the_tape_is_decided_again_as_it_was() -> None:
    wanted = policy("ab", quorum=2)
    story = Story(wanted=wanted, accounted=True)
    story.starts("a", "b")
    changed(story, lr_ratio=0.25, quorum=1, sync_interval_steps=6)
    story.wait(5.0)
    effects: tuple[Effect, ...] = story.happen(SynchroniserRestarted, 2)
    assert {adjusted.island for adjusted in all_of(AdjustIsland, effects)} == {"a", "b"}
    assert story.core.state.policy.quorum == 1
    sink = MemorySink()
    sink.records = story.records
    tape: Tape = sink.tape(Header("job", wanted))
    assert replay(tape).exact


def test_a_replica_offers_by_the_interval_that_it_was_given_last() -> None:
    replica = Replica(
        ReplicaPolicy(schedule=Schedule(1, 4), adoption="rebase", tokens_per_schedule_step=1, snapshots_max=None)
    )
    replica.hold((Version(0),), 0)
    replica.start()
    replica.adjust(0.5, 6)
    offered = []
    for _ in range(12):
        replica.step_taken(1)
        if replica.boundary().actions:
            offered.append(replica.step)
    assert offered == [6, 12]
    assert replica.next_step[1] == 0.5


def test_a_replica_offers_routers_by_their_own_period_whatever_the_interval() -> None:
    replica = Replica(ReplicaPolicy(Schedule(2, 8, 3), "rebase", 1, None))
    replica.hold((Version(0), Version(0)), 0)
    replica.start()
    offered: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(24):
        if replica.step == 16:
            replica.adjust(1.0, 4)
        replica.step_taken(1)
        for offer in replica.boundary().reports():
            if isinstance(offer, Offer):
                offered[offer.fragment].append(replica.step)
                merged = Publication(offer.fragment, Version(offer.base_version + 1), offer.step, offer.offer)
                replica.publication_arrived(merged)
    assert offered == {0: [8, 16, 20, 24], 1: list(range(1, 25, 3))}


def test_the_newest_settings_that_islands_or_the_checkpoint_know_go_on_after_a_salvage() -> None:
    old, new = ChangedSettings(Epoch(1), 3, quorum=1), ChangedSettings(Epoch(2), 1, quorum=2, lr_ratio=0.5)
    answers = [SimpleNamespace(changed=changed) for changed in (old, new, UNCHANGED)]
    assert changed_settings(answers, UNCHANGED) == new  # type: ignore[arg-type]
    assert changed_settings(answers[:1], new) == new  # type: ignore[arg-type]
    assert commands_of(new, ("lr_ratio", "quorum", "grace_cap_steps")) == [Set(lr_ratio=0.5), Set(quorum=2)]


def test_an_island_is_given_all_settings_that_were_changed_to_keep() -> None:
    story = Story("ab", quorum=2)
    story.starts("a", "b")
    changed(story, quorum=1)
    (given, _) = all_of(AdjustIsland, story.command("c2", Set(lr_ratio=0.5, cost_max=7.0)))
    assert given.changed == ChangedSettings(Epoch(1), 2, 0.5, 1, cost_max=7.0)


def test_a_resumed_job_has_the_settings_of_the_checkpoint_unless_its_specification_changes_them() -> None:
    spec = parse_job(synthetic(100)).model_dump(mode="json")
    manifest = SimpleNamespace(changed=ChangedSettings(Epoch(1), 2, 0.5, 1, 4.0, 48, 900.0), spec=spec)
    resumption = Resumption("checkpoint", manifest, ())  # type: ignore[arg-type]
    assert resumption.settings(spec) == [
        Set(lr_ratio=0.5),
        Set(quorum=1),
        Set(grace_cap_steps=4.0),
        Set(sync_interval_steps=48),
    ]
    other = spec | {"synchroniser": spec["synchroniser"] | {"quorum": 2, "interval_steps": 9}}
    assert resumption.settings(other) == [Set(lr_ratio=0.5), Set(grace_cap_steps=4.0)]
    manifest.changed = UNCHANGED
    assert resumption.settings(spec) == []


def test_settings_are_in_the_manifest_and_one_of_an_earlier_build_has_none() -> None:
    plain = Manifest(
        "job", 1, 1.0, 1.0, {}, (Fragment(1, 1, "0" * 16),), 10, (5,), (1,), (), (), (), (8,),
        changed=ChangedSettings(Epoch(2), 3, 0.5, 2, 0.0, 48, 12.5),
    )  # fmt: skip
    assert manifests.decode(manifests.encode(plain), "it") == plain
    earlier = asdict(plain)
    del earlier["changed"]
    assert manifests.from_document(earlier, "it").changed == UNCHANGED
    with pytest.raises(DataError, match="quorum is not a whole number"):
        manifests.from_document({**asdict(plain), "changed": asdict(plain.changed) | {"quorum": 0}}, "it")


def test_a_paused_job_merges_all_work_keeps_no_island_and_places_them_again_when_it_continues() -> None:
    story = Story("ab", quorum=2)
    story.starts("a", "b")
    effects = story.command("c1", Pause("it has cost 5"))
    assert the(ResolveCommand, effects).accepted
    assert {order.island for order in all_of(DrainIsland, effects)} == {"a", "b"}
    assert all_of(BeginCheckpoint, effects), "no island holds Θ during the pause"
    assert story.core.state.pause_reason() == "the job is paused: it has cost 5"
    for island in "ab":
        ended = story.reports(island, 1, Drained())
        assert all_of(StopIsland, ended)
        assert not all_of(PlaceIsland, ended)
    assert "is paused, and no island is placed" in the(ResolveCommand, story.command("c2", Readd(IslandId("a")))).detail
    assert "is paused already" in the(ResolveCommand, story.command("c3", Pause("again"))).detail
    assert not story.happen(SynchroniserRestarted, 2)
    again = story.command("c4", Continue("the limit is 9 now"))
    assert {order.island for order in all_of(PlaceIsland, again)} == {"a", "b"}
    assert story.core.state.paused is None
    assert "is not paused" in the(ResolveCommand, story.command("c5", Continue(""))).detail


def test_an_island_killed_during_a_pause_comes_back_only_when_the_job_continues_or_not_at_all() -> None:
    story = Story("abc", quorum=2)
    story.starts("a", "b", "c")
    story.command("c1", Pause("it has cost 5"))
    again = the(ResolveCommand, story.command("c2", Kill(IslandId("a"), restart=True)))
    assert "it will be placed again, once the job continues" in again.detail
    assert "until it is re-added" in the(ResolveCommand, story.command("c3", Kill(IslandId("b"), restart=False))).detail
    for island in "ab":
        lost = story.happen(ConnectionLost, island, 1, True, "killed")
        assert not [effect for effect in lost if isinstance(effect, PlaceIsland | SetTimer)]
    story.reports("c", 1, Drained())
    placed = all_of(PlaceIsland, story.command("c4", Continue("the limit is 9 now")))
    assert {order.island for order in placed} == {"a", "c"}


def test_a_paused_job_can_be_finished() -> None:
    story = Story("a")
    story.starts("a")
    story.offers_fragment("a")
    story.merges(0, 1)
    story.command("c1", Pause("it has cost 5"))
    story.reports("a", 1, Drained())
    assert the(ResolveCommand, story.command("c2", Finish())).accepted
    assert story.core.state.phase is not JobPhase.RUNNING
