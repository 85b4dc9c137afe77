"""The rule for threads: the shell reads the core's state through ``StateView`` alone, and never within an event."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest

from orchestrator.core import commands
from orchestrator.core.effects import SetTimer
from orchestrator.core.messages import Adopted
from orchestrator.core.saving import CheckpointFailed
from orchestrator.core.synchroniser import Synchroniser
from orchestrator.core.vocabulary import CheckpointPolicy, FragmentId, IslandId, JobPhase, ScheduleAnchor, Version
from orchestrator.host.state_view import StateView, core_status
from tests.harness.story import Story, policy, the
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parent.parent.parent / "orchestrator"
OWNERS = {
    "host/state_view.py",
    "host/job_files.py",  # opens the job's files, before there is a view
    "host/last_known.py",  # reads what a job left whose files nobody can go on from
}
SHELL = [
    path
    for package in ("host", "runtime")
    for path in sorted((ROOT / package).glob("*.py"))
    if str(path.relative_to(ROOT)) not in OWNERS
]


@pytest.mark.parametrize("path", SHELL, ids=[path.stem for path in SHELL])
def test_no_part_of_the_shell_reaches_into_the_core(path: Path) -> None:
    tree = ast.parse(path.read_text())
    of_core = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("state", "view") and "core" in ast.unparse(node.value)
    ]
    assert not of_core, f"{path.name} reads the core's state in lines {of_core}; host.state_view is the way to it"
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "orchestrator.core.state" not in imported


def test_a_reader_waits_for_the_end_of_the_event() -> None:
    """The core may stand between two changes of one event for as long as the tape's disk is full."""
    core = Synchroniser(policy())
    view = StateView(core)
    seen: list[JobPhase] = []
    reader = threading.Thread(target=lambda: seen.append(view.phase))
    with view.changing():
        reader.start()
        assert not seen_within_an_event(view)
        assert not seen
        core.state.phase = JobPhase.FINISHED
    reader.join(PATIENCE_S)
    assert seen == [JobPhase.FINISHED]


def seen_within_an_event(view: StateView) -> bool:
    """Whether another thread may go on; it gives up at once."""
    allowed: list[bool] = []

    def read() -> None:
        with view.unchanged(0.0) as held:
            allowed.append(held)

    other = threading.Thread(target=read)
    other.start()
    other.join(PATIENCE_S)
    return allowed.pop()


def test_what_was_read_changes_with_no_later_event() -> None:
    core = Synchroniser(policy("ab"))
    view = StateView(core)
    islands, checkpoints = view.islands(), view.checkpoints()
    before = islands[IslandId("a")]
    with view.changing():
        core.state.islands.clear()
        core.state.checkpoints = type(checkpoints)(count=7)
    assert (islands[IslandId("a")], checkpoints.count) == (before, 0)
    assert view.island_ids == (IslandId("a"), IslandId("b"))
    assert seen_within_an_event(view), "the pump is done"


def test_steps_are_those_of_all_incarnations() -> None:
    story = Story("a")
    story.starts("a")
    reported = core_status(story.core.state, story.now).islands[0].steps_total
    assert reported > 0
    assert StateView(story.core).step_counts() == {IslandId("a"): reported}


def test_the_tokens_of_an_island_are_those_of_the_goodput_after_an_incarnation_was_lost_right_after_an_adoption() -> (
    None
):
    """An adoption reports its tokens itself. The progress follows later, and here it never does."""
    story = Story("ab", accounted=True)
    story.starts("a", "b")
    story.offers_fragment("a")
    story.merges(0, 1)
    story.reports("a", 1, Adopted(FragmentId(0), Version(1), 3, 300, 200, ScheduleAnchor(0, 0)))
    again = story.dies("a")
    story.timer(the(SetTimer, again))
    story.starts("a")
    trained = story.goodput.ledger.trained
    (island, *_) = StateView(story.core).status(story.now, trained).islands
    assert island.tokens_total == trained[IslandId("a")] == 400
    assert story.goodput.summary(story.now)["islands"]["a"]["tokens"]["trained"] == 400


def test_the_status_says_that_checkpoints_fail_why_and_when_one_is_tried() -> None:
    story = Story("a", checkpoints=CheckpointPolicy(every_s=10.0))
    story.starts("a")
    facts = core_status(story.core.state, story.now).checkpoint
    assert (facts.scheduled, facts.taken_at, facts.trouble) == (True, None, None)
    for number in (1, 2, 3):
        story.command(f"c{number}", commands.Checkpoint())
        story.happen(CheckpointFailed, number, "the folder is not writable.")
    facts = core_status(story.core.state, story.now + 10.0).checkpoint
    assert (facts.failures, facts.failures_in_a_row) == (3, 3)
    assert facts.trouble == (
        "the last 3 checkpoints failed: the folder is not writable; the next one begins in 50 s at the earliest, "
        "or at once by `atoll checkpoint JOB`"
    )
    story.command("p", commands.Pause("maintenance"))
    trouble = core_status(story.core.state, story.now).checkpoint.trouble
    assert trouble is not None
    assert trouble.endswith("the folder is not writable; the next one is tried once the job continues")
