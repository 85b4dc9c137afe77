"""The command line as a user types it, against a service of real processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api import cli
from tests import forked
from tests.api.installation import ROOT, Installation, environment, interruptible
from tests.waiting import PATIENCE_S, wait_until


def test_the_main_path_by_hand(warm: Installation) -> None:
    assert "already running at http://127.0.0.1:" in warm.up()
    said = warm.atoll("submit", warm.spec_file())
    job = said.split()[1].rstrip(":")
    assert job.startswith("trial-")
    assert (warm.runs / "latest").resolve() == (warm.runs / job).resolve()

    def training() -> bool:
        islands = json.loads(warm.atoll("islands", job, "--json"))
        return [island["state"] for island in islands] == ["training"] * 4

    wait_until(training)
    assert "20.00" in warm.atoll("islands", job, "-o", "wide"), "the step rate of 0.05 s a step"
    assert "steps/s 20.0" in warm.atoll("status", job)
    assert "will be placed again" in warm.atoll("kill", job, "asia")
    wait_until(lambda: json.loads(warm.atoll("islands", job, "--json"))[3]["incarnation"] == 2)

    assert "until it is re-added" in warm.atoll("kill", "latest", "europe", "--stay-down")
    wait_until(lambda: "stopped" in warm.atoll("islands", "latest"))
    assert "refused" in warm.atoll("kill", job, "europe", code=1)
    assert "being placed again" in warm.atoll("readd", job, "europe")

    assert job in warm.atoll("jobs")
    assert json.loads(warm.atoll("status", job, "--json"))["state"] == "running"
    assert "accepted" in warm.atoll("cancel", job)
    assert "cancelled" in warm.atoll("watch", job, code=1)
    assert "recovery  " in warm.atoll("report", job)
    figures = json.loads(warm.atoll("report", job, "--json", "--csv", f"{warm.home.path}/report.csv"))
    assert figures["outcome"] == "cancelled"
    assert f"merges,,,,{figures['merges']}" in (warm.home.path / "report.csv").read_text().splitlines()
    assert "nothing to kill" in warm.atoll("kill", job, "asia", code=1)


def test_a_job_is_changed_and_finished_early_and_completes(warm: Installation) -> None:
    job = warm.atoll("submit", warm.spec_file()).split()[1].rstrip(":")
    wait_until(lambda: json.loads(warm.atoll("status", job, "--json"))["global_version"] > 0)
    assert "quorum 2 (until now 1), interval 16 (until now 8)" in warm.atoll("set", job, "quorum=2", "interval=16")
    assert "quorum is 9, but must be 1 to 4" in warm.atoll("set", job, "quorum=9", code=1)
    assert "interval is '1.5', which is not a whole number" in warm.atoll("set", job, "interval=1.5", code=2)
    assert "'depth=3' is no setting of a running job" in warm.atoll("set", job, "depth=3", code=2)
    assert "the steps of the job's trainer" in warm.atoll("set", job, "lr=0.5x", code=1)
    assert "interval 16 steps" in warm.atoll("status", job)
    settings = json.loads(warm.atoll("status", job, "--json"))["settings"]
    assert (settings["quorum"], settings["interval"], settings["changed"]) == (2, 16, True)
    assert "islands give their last work" in warm.atoll("finish", job)
    assert "completed: finished early by" in warm.atoll("watch", job)
    figures = json.loads(warm.atoll("report", job, "--json"))
    assert figures["outcome"] == "completed"
    assert 0 < figures["tokens_merged"] <= figures["tokens_trained"] < figures["policy"]["token_budget"]
    assert "nothing to finish" in warm.atoll("finish", job, code=1)


def test_a_job_that_completes_is_watched_to_its_end(warm: Installation) -> None:
    said = warm.atoll("submit", warm.spec_file(steps=20), "--watch")
    assert "completed" in said
    assert "report.html" in said
    *_, last = warm.atoll("watch", "latest", "--json").splitlines()
    job = json.loads(warm.atoll("jobs", "--json"))["jobs"][0]
    assert job["state"] == json.loads(last)["state"] == "completed"
    assert job["tokens_trained"] >= job["token_budget"]
    assert job["loss"] > 0


def test_interrupting_a_watch_leaves_the_job_running(warm: Installation) -> None:
    job = json.loads(warm.atoll("submit", warm.spec_file(), "--json"))["job"]
    watching = subprocess.Popen(
        warm.command("watch", "latest"),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,
    )
    assert watching.stdout is not None
    assert "tokens" in watching.stdout.readline()
    watching.send_signal(signal.SIGINT)
    _, said = watching.communicate(timeout=PATIENCE_S)
    assert watching.returncode == 130
    assert f"the job keeps running; watch it again with `atoll watch {job}`" in said
    assert json.loads(warm.atoll("status", job, "--json"))["state"] == "running"


def test_every_problem_of_a_specification_is_told_at_once_and_nothing_starts(warm: Installation) -> None:
    islands = [{"node_group": "mars"}, {"node_group": "asia", "count": 9}]
    broken = {"islands": islands, "synchroniser": {"fragments": 0}, "budget": {}, "colour": "red"}
    said = warm.atoll("submit", warm.spec_file(**broken), code=2)
    for path in ("synchroniser.fragments", "colour", "budget", "islands.0.node_group", "islands.1.cpus"):
        assert path in said
    assert "'mars'" in said
    assert json.loads(warm.atoll("jobs", "--json"))["jobs"] == []
    assert not [entry for entry in warm.runs.iterdir() if entry.is_dir()]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["status", "nothing-here"], 2, "Job 'nothing-here' does not exist"),
        (["status", "latest"], 2, "No job has been submitted yet"),
        (["submit", "no-such-file.yaml"], 2, "cannot be read"),
        (["kill", "latest"], 2, "Missing argument"),
        (["report", "latest", "--url", "http://127.0.0.1:1"], 3, "does not answer"),
        (["jobs", "--url", "not an address"], 2, "is not of the form https://HOST:PORT"),
    ],
)
def test_a_users_mistake_has_its_exit_code_and_a_remedy(
    service: Installation, arguments: list[str], code: int, words: str
) -> None:
    assert words in service.atoll(*arguments, code=code)


def test_without_a_service_commands_say_how_to_start_one(cold: Installation) -> None:
    assert "atoll up" in cold.atoll("jobs", code=3)
    assert "nothing is running" in cold.atoll("down")
    assert "budget" in cold.atoll("submit", cold.spec_file(budget={}), code=2), "a wrong file is the nearer trouble"


def test_the_report_of_a_running_job_is_not_there_yet(warm: Installation) -> None:
    warm.atoll("submit", warm.spec_file())
    assert "atoll watch trial-" in warm.atoll("report", "latest", code=1)


def test_replay_tells_an_identical_tape_from_a_changed_one(warm: Installation) -> None:
    warm.atoll("submit", warm.spec_file(steps=10), "--watch")
    run = warm.runs / "latest"
    same = forked.atoll("replay", str(run))
    assert same.returncode == 0
    assert "identical" in same.stdout

    header, *lines = (run / "tape.jsonl").read_text().splitlines()
    placed = next(n for n, line in enumerate(lines) if '"PlaceIsland"' in line)
    lines[placed] = lines[placed].replace("the job starts", "the job begins")
    changed = run / "changed.jsonl"
    changed.write_text("\n".join([header, *lines[:-1]]) + "\n")
    other = forked.atoll("replay", str(changed))
    assert other.returncode == 1
    assert "this build decides" in other.stdout

    torn = forked.atoll("replay", str(run / "spec.yaml"))
    assert torn.returncode in (1, 2)
    assert "Traceback" not in torn.stderr


@pytest.mark.parametrize(("module", "more"), [("api.cli", {"httpx", "pydantic"}), ("api.client", set())])
def test_the_command_line_starts_light(module: str, more: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    loaded = set(printed.split())
    heavy = {"ray", "jax", "numpy", "matplotlib", "pandas", "fastapi", "sqlalchemy", "alembic", "uvicorn"}
    assert not (heavy | more) & loaded
    deciding = (
        "orchestrator.tape",
        "orchestrator.accounting",
        "orchestrator.core.synchroniser",
        "orchestrator.runtime",
    )
    assert not {name for name in loaded if name.startswith(deciding)}, "it reads no tape and decides nothing"


def test_compare_hands_every_baseline_on() -> None:
    known = ["--baseline", "diloco", "--baseline"]
    command = [sys.executable, "-m", "api.cli", "compare", "no-such-file.yaml", *known]
    refused = subprocess.run([*command, "sgd"], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert refused.returncode == 2
    assert "'sgd'" in refused.stderr
    missing = subprocess.run([*command, "data-parallel"], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert missing.returncode != 0
    assert "no-such-file.yaml" in missing.stderr


def test_wide_lists_say_what_narrow_ones_leave_out_and_json_is_an_output_too(warm: Installation) -> None:
    job = json.loads(warm.atoll("submit", warm.spec_file(), "--json"))["job"]
    with warm.client() as client:
        wait_until(lambda: client.job(job).islands_training == 4)
        client.kill(job, "asia")
        wait_until(lambda: client.job(job).islands[3].incarnation == 2 and client.job(job).islands_training == 4)
    head, *rows = warm.atoll("islands", job, "-o", "wide").splitlines()
    assert head.split()[:4] == ["island", "node", "group", "region"]
    assert "tokens/s" in head.split()
    with warm.client() as client:
        island = client.job(job).islands[0]
    assert island.steps_per_second is not None
    tokens_each = island.tokens_total / island.steps_total
    assert island.tokens_per_second == pytest.approx(island.steps_per_second * tokens_each)
    asia = next(row for row in rows if row.startswith("asia")).split()
    assert asia[:8] == ["asia", "asia", "asia", "training", "asia", "1005", "2", "1"]
    assert "1005" not in warm.atoll("islands", job)
    assert json.loads(warm.atoll("islands", job, "--output", "json"))[3]["pid"] == 1005
    assert str(warm.runs / job) in warm.atoll("jobs", "-o", "wide")
    assert json.loads(warm.atoll("jobs", "-o", "json"))["jobs"][0]["job"] == job
    assert "'yaml' is not one of" in warm.atoll("jobs", "-o", "yaml", code=2)


def test_a_shell_completes_the_names_that_the_service_knows(warm: Installation) -> None:
    job = json.loads(warm.atoll("submit", warm.spec_file(), "--json"))["job"]
    home = ("--home", str(warm.home.path))

    def completed(*words: str) -> list[str]:
        line = {
            "_ATOLL_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(["atoll", *words]),
            "COMP_CWORD": str(len(words)),
        }
        atoll = [str(Path(sys.executable).with_name("atoll"))]
        done = subprocess.run(
            atoll, capture_output=True, text=True, timeout=PATIENCE_S, env=environment() | line, cwd=ROOT
        )
        assert done.stderr == ""
        return done.stdout.split()

    assert completed("kill", *home, "tr") == [job]
    assert completed("kill", *home, job, "us") == ["us-east", "us-west"]
    assert completed("cordon", *home, "e") == ["europe"]
    assert completed("chaos", "run", *home, job, "a") == ["attrition"]
    warm.atoll("down")
    assert completed("kill", *home, "") == ["latest"]


@pytest.mark.parametrize("width", ["40", "80"])
def test_help_cuts_no_name_and_no_value(width: str) -> None:
    """`--retention-failed-days` was `--retention-failed-da…` at 80 columns."""
    cut = []
    for command in sorted(cli.app.registered_commands, key=lambda command: str(command.callback)):
        name = command.name or str(getattr(command.callback, "__name__", "")).strip("_").replace("_", "-")
        result = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": width})
        assert "Usage: " in result.output, name
        cut += [f"{name}: {line}" for line in result.output.splitlines() if "…" in line]
    assert cut == []
