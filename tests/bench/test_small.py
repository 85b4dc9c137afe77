"""The benches run at their smallest sizes, and a missed goal is reported and fails. Speed is not tested."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import __main__ as bench
from tests.bench import accelerators, channel, core, goals, journal, merge, options, shard, surface

ROOT = Path(__file__).parents[2]
EASY = math.inf
CHEAP = ["core", "merge", "journal", "shard", "--small"]


@pytest.fixture
def easy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the goals by ones that the slowest machine reaches."""
    monkeypatch.setattr(core, "EVENTS_PER_SECOND_GOAL", 1)
    monkeypatch.setattr(channel, "GB_PER_SECOND_GOAL", 0.0)
    for name in ("CLIENT_CPU_S_GOAL", "GIL_MS_GOAL"):
        monkeypatch.setattr(channel, name, EASY)
    monkeypatch.setattr(journal, "KNOBS", journal.KNOBS.model_copy(update={"overlap_steps": 10**6}))
    for name in ("KILL_MEDIAN_GOAL_S", "KILL_P99_GOAL_S", "READ_P99_GOAL_S", "STEP_RATIO_GOAL"):
        monkeypatch.setattr(surface, name, EASY)
    monkeypatch.setattr(merge, "SHARE_GOAL", 0)
    monkeypatch.setattr(shard, "JOURNAL_GOAL", EASY)  # the headers of small entries
    for name in ("CPU_SECONDS_GOAL", "GAP_GOAL_S"):
        monkeypatch.setattr(merge, name, EASY)


@pytest.mark.soak("a minute of measuring")
@pytest.mark.usefixtures("easy")
def test_the_cheap_parts_run_and_say_that_all_goals_are_met(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(CHEAP) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "met        all 18 goals"
    for part, rows in (("core", 1), ("merge", 4), ("journal", 3), ("shard", 4)):
        assert len([line for line in said if line.startswith(part)]) == rows, part
    assert not [line for line in said if "MISSED" in line]


def test_without_arguments_every_option_has_a_value() -> None:
    parts, asked = options.parse([], bench.PARTS, None)
    assert parts == tuple(bench.PARTS)
    assert asked == options.Options()
    assert asked.minutes == 10.0
    assert options.parse(["--small"], bench.PARTS, None)[1].minutes < 1.0


@pytest.mark.ray
@pytest.mark.soak("every part, some minutes")
@pytest.mark.parametrize("part", bench.PARTS)
def test_every_part_runs_at_its_smallest_by_the_command_line(part: str) -> None:
    """Some goals are missed at that size, or on a busy machine; a part that ends with a traceback prints no verdict."""
    command = [sys.executable, "-m", "tests.bench", part, "--small"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout.splitlines()[-1].startswith(("met ", "MISSED ")), done.stderr


@pytest.mark.usefixtures("easy")
def test_the_channel_is_measured_by_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["channel", "--small"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len([line for line in said if line.startswith("channel")]) == len(channel.WAYS)


@pytest.mark.usefixtures("easy")
def test_a_goal_that_nothing_reaches_is_told_where_it_is_missed_and_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "EVENTS_PER_SECOND_GOAL", 10**12)
    assert bench.main(["core", "journal", "--small"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "goal 1,000,000,000,000: MISSED" in next(line for line in said if line.startswith("core"))
    assert said[-1].startswith("MISSED     1 of 4 goals: core events/s ")
    assert "journal" not in said[-1]


def test_a_slack_of_nothing_is_missed_by_every_write_of_the_journal(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["journal", "--small", "--step-seconds", "0"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("MISSED     3 of 3 goals: journal median s ")
    assert "journal longest s" in last
    assert "journal all fragments back to back s" in last


def test_a_figure_that_is_no_number_has_missed_its_goal() -> None:
    missed = [goals.at_least("some", math.nan, 1.0), goals.at_most("more", math.nan, 1.0)]
    assert goals.exit_code(missed) == 1
    assert goals.told([*missed, goals.at_most("one", 1.0, 1.0)]) == (
        "MISSED     2 of 3 goals: some nan (goal 1); more nan (goal 1)"
    )


def test_what_no_part_is_called_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["core", "corr"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "there is no corr; there are core, capacity, documents, fleet" in said.err


@pytest.mark.ray
@pytest.mark.usefixtures("easy")
@pytest.mark.soak("a minute of kills and reads")
def test_kills_and_reads_of_a_service_with_a_cluster_are_counted(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["surface", "--small"]) == 0
    said = capfd.readouterr().out.splitlines()
    assert "3 kills" in said[0]
    assert "0 failed" in said[1]
    assert said[-1] == "met        all 5 goals"


@pytest.mark.ray
@pytest.mark.soak("a service, two islands and a kill")
def test_what_is_measured_of_gpus_runs_without_them(capfd: pytest.CaptureFixture[str]) -> None:
    accelerators.recover("nano", gpu_count=0)
    assert "nano, 2 islands on no GPUs: SIGKILL to first merge" in capfd.readouterr().out
