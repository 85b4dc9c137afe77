"""Merges explained: the fold in stories told by hand, its keeping up with tapes, and the service and the command line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, cast

import pytest

from api.client import Client
from api.run.explanations import JOBS_MAX, AllExplanations, because, concerns_islands, explains_merges, merge_of
from api.run.folder import Run
from orchestrator.accounting.explanation import REFUSALS_LISTED_MAX, Explanation, Explanations
from orchestrator.accounting.failures import Failures
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.vocabulary import CloseReason, RefusalReason
from orchestrator.errors import DataError, NotFound
from orchestrator.tape.schema import Header, Record, decode_header, decode_line
from orchestrator.tape.storage import TapeWriter, read_tape
from tests.api.installation import Installation
from tests.harness.story import Story, policy, the
from tests.waiting import wait_until

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


class Told(Story):
    """A story that the fold hears too. Islands are named a, b, c; a step takes a second, the grace window is one."""

    def __init__(self, islands: str = "abc", keep: int = 100, **changed: Any) -> None:
        self.fold = Explanations(policy(islands, **changed), keep)
        super().__init__(islands, folds=(self.fold,), **changed)
        self.starts(*islands)

    def explanation(self, fragment: int, version: int) -> Explanation:
        return self.fold.merges[fragment, version]

    def merge_of_all(self, version: int) -> None:
        for island in "abc":
            self.trains(island, tokens=100)
            self.offers_fragment(island)
        self.merges(0, version)


@pytest.fixture
def grace_over() -> Told:
    """a and b are in, c is not there in time and comes late."""
    story = Told()
    story.wait(10.0)
    timer = the(f.SetTimer, story.offers_fragment("a"))
    story.wait(0.25)
    story.offers_fragment("b", tokens=100)
    story.timer(timer)
    story.wait(0.05)
    story.merges(0, 1)
    story.wait(0.2)
    story.offers_fragment("c", base=0)
    return story


def test_of_a_merge_that_failed_only_the_second_attempt_is_told() -> None:
    story = Told("ab")
    order = the(f.MergeFragment, [*story.offers_fragment("a"), *story.offers_fragment("b")])
    story.happen(e.MergeFailed, 0, 1, tuple(item.payload for item in order.inputs), "not finite")
    assert not story.fold.merges
    story.wait(3.0)
    story.offers_fragment("a", steps=7)
    story.offers_fragment("b")
    story.merges(0, 1)
    told = story.explanation(0, 1)
    assert [(c.island, c.step_count, c.staleness) for c in told.contributors] == [("a", 7, 0), ("b", 1, 0)]
    assert (told.opened_at, told.merged_at) == (3.0, 3.0)


def test_what_could_not_be_used_stands_with_the_round_it_was_for() -> None:
    story = Told("ab")
    bad = story.contribution("b")
    story.happen(e.ContributionUnusable, bad, RefusalReason.NON_FINITE, "embed holds values from nan to nan")
    story.offers_fragment("a")
    story.merges(0, 1)
    (refusal,) = story.explanation(0, 1).refusals
    assert (refusal.island, refusal.reason) == ("b", RefusalReason.NON_FINITE)
    assert story.explanation(0, 1).absent == (("b", "lost"),)


def test_a_round_that_waited_is_told_with_its_times_and_contributors(grace_over: Told) -> None:
    told = grace_over.explanation(0, 1)
    assert (told.opened_at, told.quorum_at, told.grace_until, told.closed_at) == (10.0, 10.0, 11.0, 11.0)
    assert (told.merged_at, told.merge_seconds, told.digest) == (11.05, 0.01, "digest")
    assert told.reason is CloseReason.GRACE_OVER
    assert [(c.island, c.arrived_at, c.weight, c.staleness, c.on_time) for c in told.contributors] == [
        ("a", 10.0, 0.5, 0, True),
        ("b", 10.25, 0.5, 0, True),
    ]
    assert told.absent == (("c", "training"),)


def test_a_late_contribution_is_told_with_the_merge_it_missed(grace_over: Told) -> None:
    (refusal,) = grace_over.explanation(0, 1).refusals
    assert (refusal.island, refusal.reason, refusal.base_version) == ("c", RefusalReason.LATE, 0)
    assert because(grace_over.explanation(0, 1)) == (
        "closed because the grace window was over, after 1.00 s of grace; "
        "c refused: late, base 0 is 1 behind; at most 0 is allowed"
    )
    answer = merge_of(grace_over.explanation(0, 1))
    assert (answer.grace_window_s, answer.grace_used_s, answer.merge_s) == (1.0, 1.0, 0.01)
    assert answer.refusals[0].after_s == pytest.approx(11.25)


def test_a_contribution_that_comes_while_its_round_merges_is_told_with_it() -> None:
    story = Told("ab")
    timer = the(f.SetTimer, story.offers_fragment("a"))
    story.timer(timer)
    story.offers_fragment("b")
    told = story.explanation(0, 1)
    assert [(r.island, r.reason) for r in told.refusals] == [("b", RefusalReason.LATE)]
    assert (told.merged_at, told.digest) == (None, None)
    assert merge_of(told).merged_after_s is None


def test_other_refusals_stand_with_the_open_round_and_a_flood_is_counted_but_not_kept() -> None:
    story = Told()
    for _ in range(REFUSALS_LISTED_MAX + 5):
        story.offers_fragment("a", base=7)
    for island in "abc":
        story.offers_fragment(island)
    told = story.explanation(0, 1)
    assert told.refusal_count == REFUSALS_LISTED_MAX + 5
    assert len(told.refusals) == REFUSALS_LISTED_MAX
    assert {r.reason for r in told.refusals} == {RefusalReason.UNKNOWN_VERSION}
    assert story.fold.merges.keys() == {(0, 1)}


def test_who_is_lost_when_a_round_closes_is_told_as_lost() -> None:
    story = Told()
    story.offers_fragment("a")
    story.dies("c")
    story.offers_fragment("b")
    told = story.explanation(0, 1)
    assert told.absent == (("c", "lost"),)
    assert because(told).endswith("without c (lost)")


def test_a_better_contribution_of_the_same_island_takes_the_place_of_its_earlier_one() -> None:
    story = Told("ab")
    story.offers_fragment("a", step=0, steps=1)
    story.wait(1.0)
    story.offers_fragment("a", tokens=300)
    story.offers_fragment("b")
    (a, b) = story.explanation(0, 1).contributors
    assert (a.token_count, a.arrived_at, a.on_time) == (300, 1.0, True)
    assert story.explanation(0, 1).opened_at == 1.0
    assert a.weight > b.weight


def test_only_the_newest_merges_are_kept() -> None:
    story = Told(keep=3)
    for version in range(1, 8):
        story.merge_of_all(version)
    assert list(story.fold.merges) == [(0, 5), (0, 6), (0, 7)]
    assert story.fold.version(0) == 7
    assert story.fold.version(9) is None


# ── kept up with tapes ────────────────────────────────────────────────────────────────────────────────────────────


def run_at(folder: Path, job: str = "j") -> Run:
    return Run(job, folder, settled=False)


def test_a_history_reads_on_where_it_stopped_and_agrees_with_the_fold_at_any_time(tmp_path: Path) -> None:
    story = Told()
    for version in range(1, 6):
        story.merge_of_all(version)
        story.offers_fragment("a", base=0)
    story.timer(the(f.SetTimer, story.dies("c")))
    story.happen(e.IslandPlaced, "c", 2, "node", 1)  # nothing is decided on it, yet it says where c is
    story.timer(the(f.SetTimer, story.offers_fragment("a")))
    histories = AllExplanations()
    assert histories.of(run_at(tmp_path)).history.merges() == []
    fold = Explanations(policy())
    with TapeWriter(tmp_path / "tape.jsonl", Header("j", policy())) as writer:
        for record in story.records:
            writer.append(record)
            fold.apply(record.event, record.effects)
            assert histories.of(run_at(tmp_path)).history.merges() == list(reversed(fold.merges.values()))
    assert len(fold.merges) == 6
    assert fold.merges[0, 6].absent == (("b", "training"), ("c", "starting"))
    assert histories.of(run_at(tmp_path)).history.merges() == list(reversed(fold.merges.values()))


@pytest.mark.parametrize("name", ["calm", "everything", "killed"])
def test_records_that_decide_nothing_are_not_parsed_and_are_not_missed(name: str) -> None:
    with gzip.open(GOLDEN / f"live-{name}.jsonl.gz") as tape:
        header, *lines = tape.read().splitlines()
    policy = cast(Header, decode_header(header.decode())).policy
    islands = [plan.island for plan in policy.islands]
    told, whole = Explanations(policy, 1000), Explanations(policy, 1000)
    failures, all_failures = Failures(islands), Failures(islands)
    parsed = 0
    for line in lines:
        if isinstance(record := decode_line(line.decode()), Record):
            facts: Any = (record.n, record.event, record.effects)
            whole.apply(*facts[1:])
            all_failures.apply(*facts)
            if explains_merges(line):
                parsed += 1
                told.apply(*facts[1:])
            if concerns_islands(line):
                failures.apply(*facts)
    assert told.merges == whole.merges
    assert (list(failures.all), failures.nodes()) == (list(all_failures.all), all_failures.nodes())
    assert 2 * parsed < len(lines)


def test_a_merge_older_than_those_kept_is_left_to_the_tape(tmp_path: Path) -> None:
    story = Told()
    for version in range(1, 6):
        story.merge_of_all(version)
    with TapeWriter(tmp_path / "tape.jsonl", Header("j", policy())) as writer:
        for record in story.records:
            writer.append(record)
    history = AllExplanations(keep=2).of(run_at(tmp_path)).history
    assert [told.version for told in history.merges()] == [5, 4]
    with pytest.raises(NotFound, match="older than the merges that are kept"):
        history.merge("j", 0, 3)


def test_histories_let_go_of_the_job_asked_about_longest_ago(tmp_path: Path) -> None:
    histories = AllExplanations()
    first = histories.of(run_at(tmp_path, "first"))
    assert histories.of(run_at(tmp_path, "first")) is first
    for number in range(JOBS_MAX):
        histories.of(run_at(tmp_path, f"job-{number}"))
    assert histories.of(run_at(tmp_path, "first")) is not first


def test_a_damaged_tape_is_said_to_be_so_every_time(tmp_path: Path) -> None:
    with TapeWriter(tmp_path / "tape.jsonl", Header("j", policy())) as writer:
        writer.append_lines(b'{"n":1,"event":{"type":"MergeCompleted"},"effects":[]}\n', 1)
    history = AllExplanations().of(run_at(tmp_path)).history
    for _ in range(2):
        with pytest.raises(DataError, match="MergeCompleted needs the field 'at'"):
            history.merges()


# ── over the service ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def ended(service: Installation, client: Client) -> str:
    job = client.submit(service.spec(steps=40)).job
    wait_until(lambda: client.job(job).report_ready)
    return job


def test_every_merge_of_a_job_is_listed_and_explained_as_its_tape_has_it(
    service: Installation, client: Client, ended: str
) -> None:
    records = read_tape(service.runs / ended / "tape.jsonl").records
    closed = [effect for r in records for effect in r.effects if isinstance(effect, f.MergeFragment)]
    merged = {(r.event.fragment, r.event.version): r.event for r in records if isinstance(r.event, e.MergeCompleted)}
    listed = client.merges(ended, limit=1000).merges
    assert [(m.fragment, m.version) for m in reversed(listed)] == [(c.fragment, c.version) for c in closed]
    for effect in closed:
        told = client.merge(ended, effect.fragment, effect.version)
        assert {c.island: c.weight for c in told.contributors} == {i.island: i.weight for i in effect.inputs}
        assert told.digest == merged[effect.fragment, effect.version].digest
        assert sum(c.weight for c in told.contributors) == pytest.approx(1.0)
        assert told.opened_after_s <= told.quorum_after_s <= told.closed_after_s <= told.merged_after_s


def test_pages_of_merges_follow_one_another_without_gap_or_repeat(client: Client, ended: str) -> None:
    whole = client.merges(ended, fragment=1, limit=1000)
    assert whole.next_cursor is None
    assert {merge.fragment for merge in whole.merges} == {1}
    page = client.merges(ended, fragment=1, limit=3)
    pages = page.merges
    while page.next_cursor is not None:
        page = client.merges(ended, fragment=1, limit=3, cursor=page.next_cursor)
        assert 1 <= len(page.merges) <= 3
        pages = pages + page.merges
    assert pages == whole.merges
    with pytest.raises(NotFound, match="Start without a cursor"):
        client.merges(ended, cursor="1:99999")


def test_a_merge_that_is_not_there_is_refused_with_what_is(client: Client, ended: str) -> None:
    version = max(merge.version for merge in client.merges(ended, fragment=2).merges)
    with pytest.raises(NotFound, match=f"is at version {version}"):
        client.merge(ended, 2, version + 1)
    with pytest.raises(NotFound, match="lists all merges"):
        client.merge(ended, 99, 1)


def test_the_commands_list_and_explain(service: Installation, ended: str, client: Client) -> None:
    assert "closed because" in service.atoll("merges", ended, "--limit", "4")
    assert len(json.loads(service.atoll("merges", ended, "--limit", "4", "--json"))) == 4
    said = service.atoll("explain", ended, "2:1")
    assert "fragment 2, version 0 to 1" in said
    assert "contributions had arrived" in said
    for contributor in client.merge(ended, 2, 1).contributors:
        assert contributor.island in said
    told = [record.event for record in client.events(ended, follow=False) if record.event["type"] == "MergeCompleted"]
    (merged,) = (event for event in told if (event["fragment"], event["version"]) == (2, 1))
    assert json.loads(service.atoll("explain", ended, "2:1", "--json"))["digest"] == merged["digest"]
    assert "Write FRAGMENT:VERSION" in service.atoll("explain", ended, "two", code=2)
    assert "is at version" in service.atoll("explain", ended, "2:9999", code=2)
