"""Tables of the command line: ids and numbers are whole at any width, and into a pipe nothing is cut."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.text import Text

from api.commands import jobs as command
from api.schemas import Island, Job, JobSummary
from api.terminal.listing import Screen
from api.terminal.watch import island_table, last_merge, mixture_words, render, wide_island_table

REASON = "a: its own code failed: " + "a word after the other, " * 60
PLACE = "/data/runs/with/a/rather/long/path/" + "folder/" * 20


def job(number: int, **fields: Any) -> JobSummary:
    document = {
        "job": f"pretraining-of-a-model-with-40-letters-{number}",
        "name": "pretraining-of-a-model-with-40-letters",
        "state": "completed",
        "caller": "local",
        "run_dir": PLACE,
        "submitted_at": time.time(),
        "started_at": None,
        "ended_at": None,
        "global_version": 1234,
        "token_budget": 123_456_789_012,
        "tokens_trained": 98_765_432_109,
        "island_count": 128,
        "islands_training": 127,
        "loss": 1.3456,
        "goodput_ratio": 0.9876,
        "reason": REASON if number == 1 else "",
        **fields,
    }
    return JobSummary.model_validate(document)


def drawn(shown: Any, *, width: int, terminal: bool, wide: bool = False, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Screen, "is_terminal", terminal)
    screen = Screen(wide=wide)
    screen.file, screen.width = io.StringIO(), width
    screen.print(shown)
    return screen.file.getvalue()


FACTS = ("pretraining-of-a-model-with-40-letters-1", "completed", "127/128", "98,765,432,109 (80 %)", "1.346", "98.8 %")


@pytest.mark.parametrize("width", [20, 40, 80, 240])
@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("wide", [True, False])
def test_ids_and_numbers_of_jobs_are_never_cut(
    width: int, terminal: bool, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one job has a reason of more than a thousand characters."""
    table = command._table([job(1), job(2, silent=True, islands_training=None)], wide)
    text = drawn(table, width=width, terminal=terminal, wide=wide, monkeypatch=monkeypatch)
    for fact in FACTS:
        assert fact in text
    assert "?/128" in text, "of a job that does not answer"
    assert "…" not in text
    if wide and not terminal:
        (line,) = (line for line in text.splitlines() if "letters-1" in line)
        assert REASON.strip() in line
        assert PLACE in line


@pytest.mark.parametrize("term", ["dumb", "unknown", "vt100"])
def test_a_terminal_of_which_rich_knows_nothing_gets_whole_lines_too(
    term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(Screen, "is_terminal", True)
    screen = Screen()
    before = screen.width
    screen.file = io.StringIO()
    screen.print(command._table([job(1)], False))
    assert all(fact in screen.file.getvalue() for fact in FACTS)
    assert "submitted" in screen.file.getvalue()
    assert screen.width == before, "what follows is wrapped as before"


def test_a_long_reason_leaves_a_wide_table_readable_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn(command._table([job(1)], True), width=240, terminal=True, wide=True, monkeypatch=monkeypatch)
    lines = Text.from_ansi(text).plain.splitlines()
    assert max(map(len, lines)) <= 300, "the reason wraps in its column"


def island(number: int, **fields: Any) -> Island:
    document = {
        "island": f"europe-west4-a-spot-preemptible-l4-x8-{number}",
        "node_group": "europe-west4-a-spot-preemptible-l4-x8",
        "region": "europe-west4",
        "accelerator_count": 8,
        "state": "lost",
        "incarnation": 123,
        "restarts": 122,
        "step": 1_234_567,
        "steps_total": 1_234_567,
        "tokens_total": 98_765_432_109,
        "reason": REASON,
        **fields,
    }
    return Island.model_validate(document)


@pytest.mark.parametrize("width", [40, 80, 240])
@pytest.mark.parametrize("terminal", [True, False])
def test_ids_and_numbers_of_islands_are_never_cut(width: int, terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"after_s": None, "pause_reason": None, "epoch": 1, "loss_train": None, "fragments": [], "loss_curve": []}
    nothing |= {"goodput": {}, "statistics": {}, "report_ready": False}
    islands = [island(1), island(2, reason="")]
    of_job = Job.model_validate({**job(1).model_dump(), **nothing, "islands": islands})
    for shown, wide in ((render(of_job), False), (island_table(of_job), True)):
        text = drawn(shown, width=width, terminal=terminal, wide=wide, monkeypatch=monkeypatch)
        for fact in (
            "europe-west4-a-spot-preemptible-l4-x8-1",
            "europe-west4-a-spot-preemptible-l4-x8-2",
            "98,765,432,109",
        ):
            assert fact in text
        if not terminal:
            assert REASON.strip() in text


@pytest.mark.parametrize(
    ("state", "merged_after_s", "words"),
    [("running", 40.0, "60 s ago"), ("completed", 40.0, "60 s before the end"), ("failed", 99.5, "at the end")],
)
def test_the_last_merge_of_an_ended_job_is_told_by_its_end(state: str, merged_after_s: float, words: str) -> None:
    nothing = {
        "after_s": 100.0,
        "pause_reason": None,
        "epoch": 1,
        "loss_train": None,
        "fragments": [],
        "loss_curve": [],
    }
    nothing |= {"goodput": {}, "statistics": {}, "report_ready": False}
    one = island(1, last_merge_after_s=merged_after_s)
    assert (
        last_merge(one, Job.model_validate({**job(1, state=state).model_dump(), **nothing, "islands": [one]})) == words
    )


def test_a_job_shows_what_its_islands_say_of_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"after_s": 9.0, "pause_reason": None, "epoch": 1, "loss_train": None, "fragments": [], "loss_curve": []}
    nothing |= {"goodput": {}, "statistics": {}, "report_ready": False, "eta_s": 42.0}
    islands = [
        island(1, learning_rate=1e-3, gradient_norm=0.5, mfu_ratio=0.4),
        island(2, learning_rate=1e-3, gradient_norm=0.25),
        island(3),
    ]
    of_job = Job.model_validate({**job(1).model_dump(), **nothing, "islands": islands})
    text = drawn(render(of_job), width=240, terminal=False, wide=False, monkeypatch=monkeypatch)
    for words in ("gradient norm 0.25 to 0.5; MFU 40.0 %", "lr 0.001", "0:42 left"):
        assert words in text
    wide = drawn(wide_island_table(of_job), width=240, terminal=False, wide=True, monkeypatch=monkeypatch)
    assert "40.0 %" in wide
    assert "0.25" in wide
    silent = of_job.model_copy(update={"islands": [island(1)], "eta_s": None})
    text = drawn(render(silent), width=240, terminal=False, wide=False, monkeypatch=monkeypatch)
    assert not [words for words in (" lr ", "gradient norm", " left") if words in text]


def test_a_mixture_shows_its_experts_its_routers_and_what_adoptions_cost() -> None:
    nothing = {"after_s": 9.0, "pause_reason": None, "epoch": 1, "loss_train": None, "fragments": [], "loss_curve": []}
    nothing |= {"goodput": {}, "report_ready": False, "islands": []}

    def shown(statistics: dict[str, Any]) -> str:
        return mixture_words(Job.model_validate({**job(1).model_dump(), **nothing, "statistics": statistics}))

    even = {
        "expert_share_max": 0.25,
        "expert_entropy_ratio": 1.0,
        "adoptions": 1,
        "loss_before": 3.0,
        "loss_after": 3.4,
    }
    less = {
        "expert_share_max": 0.5,
        "expert_entropy_ratio": 0.75,
        "adoptions": 3,
        "loss_before": 3.0,
        "loss_after": 3.0,
    }
    young = {**even, "adoptions": 0, "loss_before": None, "loss_after": None}
    routers = [{"fragment": 0, "distance": 3.0, "travel": 4.0}, {"fragment": 1, "distance": 3.0, "travel": 1.0}]
    mixture = {"islands": {"a": even, "b": less, "c": young}, "routers": routers}
    assert shown({"mixture": mixture}) == (
        "experts: largest share 50.0%, entropy 75.0% of even; routers: 1.20 of their travel apart; "
        "loss +0.1000 at an adoption, mean of 4"
    )
    assert shown({"mixture": {"islands": {"c": young}, "routers": []}}) == (
        "experts: largest share 25.0%, entropy 100.0% of even"
    )
    assert shown({}) == ""


def test_jobs_that_wait_for_the_same_reason_are_one_line() -> None:
    queued = [
        job(n, state="queued", queue_position=n, reason="no room" if n == 1 else "behind x: no room")
        for n in range(1, 301)
    ]
    first, others = command._waiting(queued)
    assert first == "pretraining-of-a-model-with-40-letters-1 waits: no room"
    assert others.startswith("pretraining-of-a-model-with-40-letters-2, ")
    assert others.endswith(" and 296 more wait: behind x: no room")
    assert command._named(["a"]) == "a"
    assert command._named(["a", "b"]) == "a and b"
    assert command._named(["a", "b", "c"]) == "a, b and c"
