"""The diagnosis names what was done to a job: one fault at a time in simulated worlds, and stories told by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from orchestrator.accounting.causes import Cause, Diagnosis
from orchestrator.accounting.diagnosis import SHARE_MIN, Diagnostician
from orchestrator.accounting.island_evidence import RECORDS_SHOWN
from orchestrator.accounting.series import DecayingCounts, distances
from orchestrator.core import commands as c
from orchestrator.core import effects as f
from orchestrator.core import events as e
from orchestrator.core.messages import Adopted, CarriedReport, Overdue, Progress
from orchestrator.core.vocabulary import (
    Contribution,
    FailureExtent,
    IslandId,
    IslandTimer,
    IslandTimerKind,
    JobPolicy,
    RefusalReason,
    StepLimits,
    payload_id,
)
from orchestrator.simulation.links import Links
from orchestrator.simulation.plan import Fault, FaultKind, Pace, WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.tape.schema import Record
from tests.harness.story import Story, policy

ASIA = IslandId("asia")
STEP_S = 0.05


def diagnosis_of(
    *faults: Fault, steps: int = 400, quorum: int = 1, until: float = math.inf, **changes: Any
) -> tuple[Diagnosis, list[Record]]:
    """Simulate four islands whose own work survives adoption, and diagnose the tape."""
    wanted = sample_policy(4, steps=steps, quorum=quorum)
    plan = WorldPlan(**({"step_s": (STEP_S,) * 4, "adoption": "rebase", "faults": faults} | changes))
    world = World(wanted, plan, seed=5).run(until)
    return diagnosed(world, wanted), world.sink.records


def diagnosed(world: World, wanted: JobPolicy) -> Diagnosis:
    fold = Diagnostician(wanted)
    for record in world.sink.records:
        fold.apply(record.n, record.event, record.effects)
    return fold.diagnosis()


def test_an_undisturbed_job_has_no_cause_beyond_its_start_and_lateness():
    diagnosis, _ = diagnosis_of()
    harmless = {Cause.STARTING, Cause.ENDING, Cause.WAITING, Cause.OVERWRITTEN, Cause.LATE_WORK}
    assert {one.cause for one in diagnosis.others} <= harmless
    assert diagnosis.cause is None or diagnosis.cause.cause in harmless
    assert all(abs(own.step_z or 0.0) < 3.0 for own in diagnosis.islands)


def test_a_straggler_is_named_with_its_step_time():
    diagnosis, _ = diagnosis_of(step_s=(STEP_S, STEP_S, STEP_S, 3 * STEP_S))
    assert diagnosis.cause is not None
    assert (diagnosis.cause.cause, diagnosis.cause.subject) == (Cause.STRAGGLER, "asia")
    assert "0.15 s a step where the others take 50 ms" in diagnosis.cause.statement
    others = [own.step_z for own in diagnosis.islands if own.island != "asia"]
    assert max(others) < 3.0


def test_two_islands_suffice_to_tell_which_is_slow():
    assert distances({IslandId("a"): 1.0, IslandId("b"): 2.0}) == pytest.approx({"a": -5.0, "b": 10.0})
    assert distances({IslandId("a"): 1.0}) == {}


def test_a_thin_line_is_named_by_how_long_contributions_travel():
    diagnosis, records = diagnosis_of(bandwidth_bytes_per_s=(1e9, 1e9, 1e9, 2e5), payload_bytes=400_000)
    assert diagnosis.cause is not None
    assert (diagnosis.cause.cause, diagnosis.cause.subject) == (Cause.THIN_LINE, "asia")
    by_number = {record.n: record for record in records}
    assert 0 < len(diagnosis.cause.records) <= RECORDS_SHOWN
    for number in diagnosis.cause.records:
        assert by_number[number].event.contribution.island == "asia"


def test_a_thin_line_is_named_though_most_of_its_offers_come_without_bytes():
    """What is refused for its age is not pulled, so it is known at once, and says nothing about the line."""
    _, records = diagnosis_of(bandwidth_bytes_per_s=(1e9, 1e9, 1e9, 2e5), payload_bytes=400_000)
    fold, offered = Diagnostician(sample_policy(4, steps=400)), 0
    for record in records:
        fold.apply(record.n, record.event, record.effects)
        if not isinstance(record.event, e.IslandReported) or record.event.island != ASIA:
            continue
        if isinstance(report := record.event.report, Progress):
            offered += 1
            name = payload_id(ASIA, record.event.incarnation, 0, 1000 + offered)
            known = (report.step, 0, 1, 0, report.tokens_total)
            c = Contribution(name, ASIA, record.event.incarnation, 0, 1000 + offered, *known)
            refusal = f.RefuseContribution(c, RefusalReason.STALE_BASE, "why")
            for _ in range(4):
                fold.apply(record.n, e.ContributionArrived(record.event.at, c), (refusal,))
    cause = fold.diagnosis().cause
    assert offered > 20
    assert cause is not None
    assert (cause.cause, cause.subject) == (Cause.THIN_LINE, "asia")
    assert "contributions of asia travel" in cause.statement


def test_a_lost_connection_is_named_with_the_record_at_which_it_was_lost():
    diagnosis, records = diagnosis_of(*(Fault(4.0 + 5.0 * n, FaultKind.CUT, ASIA, 4.0) for n in range(3)))
    found = {one.cause: one for one in (diagnosis.cause, *diagnosis.others) if one}
    link = found[Cause.LINK]
    assert link.subject == "asia"
    by_number = {record.n: record.event for record in records}
    assert all(isinstance(by_number[number], e.ConnectionLost) for number in link.records)


def test_kills_by_commands_are_deliberate_and_their_records_are_the_commands():
    story, kills = Told(), []
    for n in range(4):
        story.happen(e.CommandRequested, f"kill-{n}", "operator", c.Kill("a"))
        kills.append(story.number)
        story.dies("a")
        story.comes_back("a")
    assert story.causes()[Cause.ON_PURPOSE].records == tuple(kills)
    assert not {Cause.CRASH_LOOP, Cause.FAILURES, Cause.BAD_NODE} & story.causes().keys()


class Told(Story):
    """A story that the diagnosis hears too."""

    def __init__(self, islands: str = "abcd", **changed: Any) -> None:
        wanted = policy(islands, restarts_max=99, **changed)
        self.fold = Diagnostician(wanted)
        self.number = 0
        super().__init__(islands, wanted=wanted, folds=(self,))
        self.starts(*islands)

    def apply(self, event: Any, effects: Any) -> None:
        self.number += 1
        self.fold.apply(self.number, event, effects)

    def causes(self) -> dict[Cause, Any]:
        diagnosis = self.fold.diagnosis()
        return {one.cause: one for one in (diagnosis.cause, *diagnosis.others) if one}

    def comes_back(self, island: str, node: str = "node", *, contributes: bool = False) -> None:
        state = self.core.state.islands[island]
        self.wait(10.0)
        self.happen(e.TimerFired, IslandTimer(IslandTimerKind.BACKOFF, island), state.current.timer_serial)
        self.happen(e.IslandPlaced, island, self.incarnation(island), node, 1000)
        self.wait(5.0)
        if contributes:
            self.is_trained_again(island)

    def is_trained_again(self, island: str) -> None:
        self.starts(island)
        self.offers_fragment(island)


def test_an_island_that_dies_again_and_again_without_contributing_is_in_a_crash_loop():
    story = Told()
    for _ in range(4):
        story.dies("b")
        story.comes_back("b")
    loop = story.causes()[Cause.CRASH_LOOP]
    assert (loop.subject, len(loop.records)) == ("b", 4)
    assert "nothing in 4 lives in a row (process died)" in loop.statement
    assert loop.share >= SHARE_MIN


def test_a_node_that_fails_several_islands_while_others_do_well_is_bad():
    story = Told()
    for island in "cdcd":
        story.dies(island)
        story.comes_back(island, node="rack-9")
    for island in "cd":
        story.dies(island)
        story.comes_back(island, node="rack-9")
        story.dies(island)
        story.comes_back(island, node="rack-1")
    bad = story.causes()[Cause.BAD_NODE]
    assert bad.subject == "rack-9"
    worst = next(iter(story.fold.diagnosis().node_failures))
    assert worst == "rack-9"


def test_the_same_error_on_several_islands_is_the_jobs_code():
    story = Told("ab")
    for island in "ab":
        incarnation, reason = story.incarnation(island), "its own code failed: KeyError: 'text'"
        story.happen(e.ConnectionLost, island, incarnation, True, reason)
        story.comes_back(island)
    code = story.causes()[Cause.CODE]
    assert "KeyError: 'text'" in code.statement


def test_errors_that_differ_in_numbers_only_are_the_same() -> None:
    """An island adds the step at which its code failed, and most messages have an index or a size."""
    story = Told("ab")
    for step, island in enumerate("ab"):
        reason = f"its own code failed: ValueError: row {7 * step} is ragged (at step {1000 + step:,})"
        story.happen(e.ConnectionLost, island, story.incarnation(island), True, reason)
        story.comes_back(island)
    code = story.causes()[Cause.CODE]
    assert code.subject == ""
    assert "row 7 is ragged" in code.statement, "the latest"


def test_an_error_of_one_islands_code_is_no_crash_loop_of_its_machine() -> None:
    story, failed = Told(), []
    for step in range(4):
        story.happen(
            e.ConnectionLost, "b", story.incarnation("b"), True, f"its own code failed: KeyError (at step {step})"
        )
        failed.append(story.number)
        story.comes_back("b")
    code = story.causes()[Cause.CODE]
    assert (code.subject, code.records) == ("b", tuple(failed))
    assert "b failed 4 times by errors of its own" in code.statement
    assert Cause.CRASH_LOOP not in story.causes()


def test_failures_of_one_island_are_told_with_its_node_and_what_ended_it() -> None:
    story = Told()
    for _ in range(2):
        story.dies("b")
        story.comes_back("b", contributes=True)
    failures = story.causes()[Cause.FAILURES]
    assert failures.subject == "b"
    assert "2 failures of b on" in failures.statement
    assert "(the last: process died)" in failures.statement
    story.dies("c")
    story.comes_back("c")
    assert story.causes()[Cause.FAILURES].subject == ""


def test_a_job_that_its_own_code_ended_has_that_as_its_cause():
    story = Told("ab")
    story.happen(e.ConnectionLost, "a", 1, True, "its own code failed: ValueError: bad batch", False, FailureExtent.JOB)
    diagnosis = story.fold.diagnosis()
    assert diagnosis.outcome == "failed"
    assert diagnosis.cause is not None
    assert (diagnosis.cause.cause, diagnosis.cause.share) == (Cause.CODE, 1.0)
    assert "ValueError: bad batch" in diagnosis.cause.statement
    assert story.number in diagnosis.cause.records


def test_a_job_that_merges_no_more_lacks_its_quorum():
    story = Told("ab", quorum=2)
    for version in (1, 2, 3):
        for island in "ab":
            story.trains(island, tokens=100)
            story.offers_fragment(island)
        story.merges(0, version)
        story.wait(1.0)
    story.dies("b")
    assert story.fold.diagnosis().cause is None or story.fold.diagnosis().cause.cause is not Cause.NO_QUORUM
    story.wait(100.0)
    story.trains("a", tokens=100)
    diagnosis = story.fold.diagnosis()
    assert diagnosis.cause is not None
    assert diagnosis.cause.cause is Cause.NO_QUORUM
    assert "1 of 2 islands train, without b" in diagnosis.cause.statement


def test_what_causes_cost_adds_up_to_the_badput_and_slowness_comes_on_top():
    faults = (Fault(8.0, FaultKind.KILL, ASIA), Fault(14.0, FaultKind.FREEZE, IslandId("europe"), 4.0))
    wanted = sample_policy(4, steps=400)
    world = World(wanted, WorldPlan(step_s=(STEP_S,) * 4, faults=faults), seed=2).run()
    fold = Diagnostician(wanted)
    for record in world.sink.records:
        fold.apply(record.n, record.event, record.effects)
    found = fold.diagnosis()
    causes = [one for one in (found.cause, *found.others) if one and one.cause is not Cause.STRAGGLER]
    badput = sum(world.goodput.summary()["badput_seconds"].values())
    assert sum(one.island_seconds for one in causes) == pytest.approx(badput)


def test_failures_count_half_after_each_half_life():
    counts = DecayingCounts(10.0)
    for at in (0.0, 10.0, 20.0):
        counts.add("n", at)
    assert counts.count("n", 20.0) == pytest.approx(1.75)
    assert counts.count("n", 30.0) == pytest.approx(0.875)
    assert counts.count("other", 30.0) == 0.0
    counts.add("m", 30.0)
    assert list(counts.all(30.0)) == ["m", "n"]


def cause_of(*faults: Fault, **changes: Any) -> tuple[Cause, str]:
    """Return the one cause that a diagnosis of this simulated job names, and what it is about."""
    diagnosis, _ = diagnosis_of(*faults, **changes)
    assert diagnosis.cause is not None
    return diagnosis.cause.cause, diagnosis.cause.subject


def of_asia(value: Any, others: Any) -> tuple[Any, ...]:
    return (others, others, others, value)


@pytest.mark.parametrize("part", [0.2, 0.6])
def test_a_straggler_that_is_slow_in_bursts_is_one_whatever_its_median_says(part: float) -> None:
    paces = tuple(Pace(2.0 * n, 2.0 * (n + part), 6.0 * STEP_S) for n in range(200))
    assert cause_of(paces=of_asia(paces, ())) == (Cause.STRAGGLER, "asia")


def test_an_island_that_waits_between_steps_is_named_alone() -> None:
    assert cause_of(pause_s=of_asia(2.0 * STEP_S, 0.0)) == (Cause.HELD_UP, "asia")


def test_contributions_that_do_not_arrive_are_named_in_a_job_that_runs_and_in_one_that_ended() -> None:
    lost = Fault(1.0, FaultKind.DROP, ASIA, count=10_000)
    assert cause_of(lost) == (Cause.NOT_ARRIVING, "asia")
    assert cause_of(lost, until=15.0) == (Cause.NOT_ARRIVING, "asia")


def test_slow_merges_are_named_in_a_job_that_runs_and_in_one_that_ended() -> None:
    assert cause_of(merge_s=(0.5, 0.6)) == (Cause.SLOW_MERGES, "")
    assert cause_of(merge_s=(0.5, 0.6), until=15.0) == (Cause.SLOW_MERGES, "")


def test_an_island_whose_incarnations_are_quarantined_has_unusable_work() -> None:
    diverges = (Fault(4.0 + 4.0 * n, FaultKind.DIVERGE, ASIA) for n in range(3))
    assert cause_of(*diverges, steps=600) == (Cause.UNUSABLE_WORK, "asia")


def test_a_silent_island_hung_if_it_stood_still_meanwhile() -> None:
    assert cause_of(*(Fault(2.0 + 6.0 * n, FaultKind.FREEZE, ASIA, 3.0) for n in range(3))) == (Cause.HUNG_STEP, "asia")


def test_versions_that_reach_an_island_late_are_a_thin_line() -> None:
    class OneWay(Links):
        def publish(self, host: Any, effect: Any, merged_offer: Any, *, lost: bool = False) -> None:
            late = 0.8 if host.process.island == ASIA else 0.0
            world.later(late, lambda: Links.publish(self, host, effect, merged_offer, lost=lost))

    wanted = sample_policy(4, steps=400)
    world = World(wanted, WorldPlan(step_s=(STEP_S,) * 4, adoption="rebase"), seed=5)
    world.links = OneWay(world)
    diagnosis = diagnosed(world.run(), wanted)
    assert diagnosis.cause is not None
    assert (diagnosis.cause.cause, diagnosis.cause.subject) == (Cause.THIN_LINE, "asia")
    assert "versions reach asia after" in diagnosis.cause.statement


def test_a_full_disk_of_a_node_is_neither_the_jobs_code_nor_the_islands() -> None:
    story = Told()
    for island in "cdcdcd":
        reason = "its own code failed: OSError: [Errno 28] No space left on device"
        story.happen(e.ConnectionLost, island, story.incarnation(island), True, reason)
        story.comes_back(island, node="rack-9")
    disk = story.causes()[Cause.FULL_DISK]
    assert "No space left on device" in disk.statement
    assert Cause.CODE not in story.causes()


def test_an_island_lost_for_a_step_without_end_hung() -> None:
    story = Told(step_limits=StepLimits(10.0, 10.0))
    story.reports("b", 1, Overdue(60.0, 1.0))
    story.comes_back("b")
    assert story.causes()[Cause.HUNG_STEP].subject == "b"


def test_a_job_that_lacked_its_quorum_for_long_is_told_so_when_it_has_ended() -> None:
    kept_away = Fault(3.0, FaultKind.KILL_AND_KEEP_AWAY, ASIA)
    assert cause_of(kept_away, quorum=4) == (Cause.NO_QUORUM, "")


def test_a_line_that_became_slow_is_thin_before_half_of_the_job_had_it() -> None:
    """What had travelled before was most of it: its median was usual, and hardly anything came since."""
    slow = Fault(16.0, FaultKind.SLOW, ASIA, 600.0, bytes_per_second=2e4)
    facts: dict[str, Any] = {"payload_bytes": 80_000, "bandwidth_bytes_per_s": (1e9,) * 4, "steps": 500}
    assert cause_of(slow, until=27.0, **facts) == (Cause.THIN_LINE, "asia")
    assert cause_of(slow, **facts) == (Cause.THIN_LINE, "asia")


def test_contributions_that_arrive_no_more_are_named_though_most_of_them_did() -> None:
    lost = Fault(16.0, FaultKind.DROP, ASIA, count=10_000)
    diagnosis, records = diagnosis_of(lost, until=28.0, steps=800)
    assert diagnosis.cause is not None
    assert (diagnosis.cause.cause, diagnosis.cause.subject) == (Cause.NOT_ARRIVING, "asia")
    assert "contributions came from asia in the 12" in diagnosis.cause.statement
    by_number = {record.n: record.event for record in records}
    arrived = [n for n in diagnosis.cause.records if isinstance(by_number[n], e.ContributionArrived)]
    assert len(arrived) == 1, "the last one that came"


def test_a_step_that_hangs_while_the_island_answers_hung_and_its_report_shows_it() -> None:
    story = Told()
    story.reports("b", 1, Progress(10, 10, 100, 1.0, 0.1, 0.1, 2.0))
    story.wait(20.0)
    story.reports("b", 1, Progress(11, 11, 110, 21.0, 0.1, 20.0, 2.0))
    hung = story.causes()[Cause.HUNG_STEP]
    assert (hung.subject, hung.records) == ("b", (story.number,))
    assert "stood still, for 19.9 s at the longest" in hung.statement


def trained(step: int, stepping_s: float, gap_s: float, median_s: float = 0.1) -> Progress:
    return Progress(step, step, 10 * step, stepping_s, median_s, gap_s, 2.0)


STOPPED: Mapping[str, tuple[float, float, tuple[tuple[float, CarriedReport], ...], float]] = {
    "between two steps": (0.1, 8.0, ((0.0, trained(20, 2.0, 9.0)),), 8.9),
    "as it wrote a report": (0.1, 8.0, ((0.0, trained(11, 1.1, 0.1)), (0.01, trained(20, 2.0, 9.0))), 8.9),
    "two reports before": (
        0.1,
        8.0,
        ((0.0, trained(11, 1.1, 0.1)), (0.01, trained(12, 1.2, 0.1)), (0.01, trained(20, 2.0, 9.0))),
        8.9,
    ),
    "another report first": (0.1, 8.0, ((0.0, Overdue(5.0, 0.1)), (0.1, trained(11, 1.2, 11.1))), 11.0),
    "after a slow step": (0.1, 17.0, ((0.0, trained(11, 3.5, 2.5)), (0.2, trained(20, 4.4, 20.0))), 19.9),
    "in a step of 20 s": (20.0, 1.0, ((20.0, trained(11, 224.0, 24.0, 20.0)),), 4.0),
}
"""What an island reports after a silence in which its process was stopped: its usual step, how long it was silent, when each
report came after the one before, and how long it stood still at the longest."""
CUT_OFF: Mapping[str, tuple[float, float, tuple[tuple[float, CarriedReport], ...]]] = {
    "steps on": (0.1, 8.0, ((0.0, trained(90, 9.0, 0.3)),)),
    "a checkpoint right after": (0.1, 8.0, ((0.0, trained(120, 12.0, 0.12)), (6.0, trained(121, 12.1, 6.1)))),
    "a wait right after": (0.1, 29.0, ((0.0, trained(320, 32.0, 0.12)), (20.0, trained(321, 32.1, 20.1)))),
    "a wait later": (0.1, 8.0, ((0.0, trained(90, 9.0, 0.3)), (7.0, trained(91, 9.1, 6.0)))),
    "longer steps than that": (20.0, 1.0, ((16.0, trained(11, 220.0, 20.0, 20.0)),)),
    "steps as long as that": (0.3, 0.3, ((0.0, trained(21, 6.3, 0.3, 0.3)),)),
    "an adoption first": (1.0, 1.5, ((0.0, Adopted(0, 0, 12, 120, 0)), (0.5, trained(14, 14.0, 1.0, 1.0)))),
}


def after_a_silence(
    median_s: float, silent_s: float, reports: tuple[tuple[float, CarriedReport], ...], *, is_restored: bool
) -> Told:
    story = Told()
    story.reports("b", 1, trained(10, 10.0 * median_s, median_s, median_s))
    story.wait(3.0)
    story.happen(e.ConnectionLost, "b", 1, False, "no answer")
    story.wait(silent_s)
    if is_restored:
        story.happen(e.ConnectionRestored, "b", 1)
    for later_s, report in reports:
        story.wait(later_s)
        story.reports("b", 1, report)
    return story


@pytest.mark.parametrize(
    ("case", "is_restored"), [*((case, True) for case in STOPPED), *((case, False) for case in list(STOPPED)[:5])]
)
def test_a_process_that_was_stopped_is_shown_by_its_report(case: str, is_restored: bool) -> None:
    """Reports that were written before it was stopped arrive after its silence, before the one that shows it."""
    median_s, silent_s, reports, longest_s = STOPPED[case]
    story = after_a_silence(median_s, silent_s, reports, is_restored=is_restored)
    facts = story.fold._islands[IslandId("b")]
    assert Cause.LINK not in story.causes()
    assert (facts.frozen_longest_s, facts.stops[-1]) == (pytest.approx(longest_s), story.number)
    story.reports("b", 1, reports[-1][1])
    assert facts.stops[-1] == story.number - 1, "the same report read again is no second one"


def test_a_stop_is_diagnosed_with_its_length_and_its_report() -> None:
    median_s, silent_s, reports, _ = STOPPED["two reports before"]
    story = after_a_silence(median_s, silent_s, reports, is_restored=True)
    hung = story.causes()[Cause.HUNG_STEP]
    assert (hung.subject, story.number in hung.records) == ("b", True)
    assert "stood still, for 8.90 s at the longest" in hung.statement


@pytest.mark.parametrize("case", CUT_OFF)
def test_an_island_that_trained_behind_a_cut_did_not_stand_still(case: str) -> None:
    median_s, silent_s, reports = CUT_OFF[case]
    story = after_a_silence(median_s, silent_s, reports, is_restored=True)
    assert not story.fold._islands[IslandId("b")].stops
    assert Cause.HUNG_STEP not in story.causes()


def test_a_report_of_an_earlier_wait_that_is_read_again_after_a_silence_tells_nothing_of_it() -> None:
    story = Told()
    waited = trained(11, 1.1, 5.0)
    story.reports("b", 1, waited)
    story.wait(3.0)
    story.happen(e.ConnectionLost, "b", 1, False, "no answer")
    story.wait(4.0)
    story.happen(e.ConnectionRestored, "b", 1)
    story.reports("b", 1, waited)
    assert not story.fold._islands[IslandId("b")].stops


def test_the_end_of_an_older_incarnation_ends_no_silence_of_the_one_that_lives() -> None:
    story = Told()
    story.happen(e.ConnectionLost, "b", 1, False, "no answer")
    story.wait(30.0)
    serial = story.core.state.islands["b"].current.timer_serial
    story.happen(e.TimerFired, IslandTimer(IslandTimerKind.SUSPECT, IslandId("b")), serial)
    story.comes_back("b")
    story.starts("b")
    lives = story.incarnation("b")
    story.reports("b", lives, trained(10, 1.0, 0.1))
    story.wait(3.0)
    story.happen(e.ConnectionLost, "b", lives, False, "no answer")
    story.wait(1.0)
    story.happen(e.ConnectionLost, "b", 1, True, "gone")
    story.wait(10.0)
    story.happen(e.ConnectionRestored, "b", lives)
    story.reports("b", lives, trained(11, 1.1, 14.0))
    assert list(story.fold._islands[IslandId("b")].stops) == [story.number]


def test_islands_wait_at_the_end_for_the_one_that_hangs() -> None:
    """Their wait was called the end of the job, about which nothing can be done."""
    hangs = tuple(Pace(4.0 * n + 1.0, 4.0 * n + 1.2, 60.0 * STEP_S) for n in range(100))
    diagnosis, _ = diagnosis_of(paces=of_asia(hangs, ()), median_over=9)
    assert diagnosis.cause is not None
    assert (diagnosis.cause.cause, diagnosis.cause.subject) == (Cause.HUNG_STEP, "asia")
    assert all(one.share < SHARE_MIN for one in diagnosis.others if one.cause is Cause.ENDING)


def test_the_start_of_a_young_job_hides_no_fault() -> None:
    slow = {"step_s": of_asia(3.0 * STEP_S, STEP_S), "start_s": (8.0, 9.0)}
    diagnosis, _ = diagnosis_of(until=16.0, **slow)
    assert diagnosis.cause is not None
    assert (diagnosis.cause.cause, diagnosis.cause.subject) == (Cause.STRAGGLER, "asia")
    starting = next(one for one in diagnosis.others if one.cause is Cause.STARTING)
    assert starting.share > diagnosis.cause.share


def test_a_straggler_is_shown_by_its_slowest_reports() -> None:
    paces = tuple(Pace(2.0 * n, 2.0 * n + 0.8, 6.0 * STEP_S) for n in range(200))
    diagnosis, records = diagnosis_of(paces=of_asia(paces, ()))
    assert diagnosis.cause is not None
    by_number = {record.n: record.event for record in records}
    shown = [by_number[number] for number in diagnosis.cause.records]
    assert len(shown) == RECORDS_SHOWN
    assert all(one.island == "asia" and one.report.gap_max_seconds >= 5.0 * STEP_S for one in shown)


def test_unusable_work_is_told_with_how_often_and_why() -> None:
    diagnosis, _ = diagnosis_of(Fault(4.0, FaultKind.CORRUPT, ASIA, count=12), steps=100)
    unusable = next(one for one in (diagnosis.cause, *diagnosis.others) if one and one.cause is Cause.UNUSABLE_WORK)
    assert " corrupt)" in unusable.statement


def test_work_that_is_refused_as_late_until_the_end_came_too_late() -> None:
    """Its island keeps it and offers it again, so that it was only unmerged when the job ended."""
    diagnosis, records = diagnosis_of(merge_s=(0.2, 0.3), steps=200)
    assert diagnosis.cause is not None
    assert diagnosis.cause.cause is Cause.LATE_WORK
    by_number = {record.n: record for record in records}
    for number in diagnosis.cause.records:
        assert any(isinstance(effect, f.RefuseContribution) for effect in by_number[number].effects)
    assert cause_of(merge_s=(0.2, 0.3), steps=200, until=9.0)[0] is Cause.LATE_WORK
