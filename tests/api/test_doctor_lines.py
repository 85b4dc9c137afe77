"""`atoll doctor --lines` as it prints what a probe measured, and as it advises on it. The live probe: ``tests/ray``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from api import cli
from api.client import Client
from api.commands import doctor_lines
from api.commands.doctor_lines import measured_lines
from api.installation.home import Home
from orchestrator.errors import InfrastructureError
from tests.api.installation import Installation
from tests.waiting import wait_until

FAST = {"round_trip_s": 0.002, "forth_bits_per_second": 5e10, "back_bits_per_second": 4e10}
SLOW = {"round_trip_s": 0.1, "forth_bits_per_second": 2e9, "back_bits_per_second": 1e9}


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has a program print these lines in the place of the one that measures."""

    def pretend(*measured: dict[str, Any], code: int = 0, complaint: str = "") -> None:
        text = "".join(json.dumps(line) + "\n" for line in measured)
        program = f"import sys; sys.stdout.write({text!r}); sys.stderr.write({complaint!r}); sys.exit({code})"
        (tmp_path / "pretended_probe.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(doctor_lines, "PROBE_MODULE", "pretended_probe")
        monkeypatch.setattr(doctor_lines, "built", dict)

    return pretend


def head_to(group: str, figures: dict[str, Any]) -> dict[str, Any]:
    return {"one": "control", "other": group, **figures}


def doctor(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["doctor", "--lines", *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


def test_lines_alone_are_measured_and_printed(probe: Any) -> None:
    probe(head_to("europe", FAST), head_to("asia", SLOW), {"one": "asia", "other": "europe", **SLOW})
    code, text = doctor()
    assert code == 0
    assert "control ─ europe" in text
    assert "50.00 Gbit/s" in text
    assert "100.00 ms" in text
    assert "asia ─ europe" in text
    assert "--job JOB" in text


@pytest.fixture
def large(tmp_path: Path) -> list[str]:
    """Options for 1e9 parameters in float32, and a step of a second."""
    synchroniser = {"fragments": 8, "interval_steps": 24, "wire": "float32"}
    spec = Installation(tmp_path).spec_file(
        islands=[{"node_group": "europe"}, {"node_group": "asia"}], synchroniser=synchroniser
    )
    return ["--config", spec, "--parameters", "1e9", "--step-s", "1"]


def test_with_a_size_and_a_step_the_least_change_is_advised(probe: Any, large: list[str]) -> None:
    probe(head_to("europe", FAST), head_to("asia", SLOW))
    code, text = doctor(*large)
    assert code == 0
    assert "on the line to asia" in text
    assert "Set wire bfloat16" in text


def test_where_a_fragment_travels_for_a_while_the_grace_is_advised_by_which_islands_meet(probe: Any) -> None:
    probe(head_to("asia", SLOW))
    code, text = doctor("--parameters", "5e8", "--step-s", "1")
    assert code == 0
    assert "takes 0.3 of a step" in text
    assert "grace_cap_steps 2 and overlap_steps 4" in " ".join(text.split())


def test_as_json_it_has_lines_subject_utilisation_and_advice(probe: Any, large: list[str]) -> None:
    probe(head_to("europe", FAST), head_to("asia", SLOW))
    code, text = doctor(*large, "--json")
    answer = json.loads(text)
    assert code == 0
    assert [line["other"] for line in answer["lines"]] == ["europe", "asia"]
    assert answer["subject"]["parameters"] == 1e9
    assert {row["line"]: row["int4"] for row in answer["utilisation"]} == {"europe": 1.0, "asia": 1.0}
    assert answer["advice"]["changes"] == {"wire": "bfloat16"}
    assert answer["advice"]["slowest"] == "asia"


def test_a_line_that_carries_nothing_is_wrong_and_the_others_are_told(probe: Any) -> None:
    probe(head_to("europe", {"problem": "nothing gets through to 10.0.0.1:7"}), head_to("asia", FAST))
    code, text = doctor("--parameters", "1e6", "--step-s", "1")
    assert code == 1
    assert "nothing gets through" in text
    assert "Keep the settings" in text


def test_only_the_groups_of_the_specification_count(probe: Any, tmp_path: Path) -> None:
    probe(head_to("europe", FAST), head_to("asia", {**SLOW, "back_bits_per_second": 1e4, "forth_bits_per_second": 1e4}))
    spec = Installation(tmp_path).spec_file(islands=[{"node_group": "europe"}])
    code, text = doctor("--config", spec)
    assert code == 0
    assert "Keep the settings" in text
    assert "the line to europe" in text


def test_a_model_whose_size_nobody_says_is_asked_for(probe: Any) -> None:
    probe(head_to("europe", FAST))
    done = CliRunner().invoke(cli.app, ["doctor", "--lines", "--step-s", "1"])
    assert "--parameters" in str(done.exception)


def test_a_running_job_says_itself_what_it_needs(probe: Any, service: Installation, client: Client) -> None:
    probe(*(head_to(group, FAST) for group in ("us-east", "us-west", "europe", "asia")))
    job = client.submit(service.spec()).job

    def has_said() -> bool:
        seen = client.job(job)
        rates = [island.steps_per_second for island in seen.islands]
        return seen.islands_training == 4 and bool(seen.statistics.get("parameter_count")) and any(rates)

    wait_until(has_said, "size and speed")
    code, text = doctor("--job", job, "--home", str(service.home.path), "--json")
    answer = json.loads(text)
    assert code == 0
    assert answer["subject"]["parameters"] == client.job(job).statistics["parameter_count"]
    assert answer["subject"]["step_s"] == pytest.approx(0.05, rel=0.5)
    assert answer["subject"]["fragments"] == 4
    assert answer["subject"]["interval_steps"] == 8
    assert answer["subject"]["islands"] == {"us-east": 1, "us-west": 1, "europe": 1, "asia": 1}


def test_a_probe_that_fails_says_why(probe: Any, tmp_path: Path) -> None:
    probe(code=1, complaint="warning: much ado\nNo cluster was started for /home. Start one with `atoll up`.")
    with pytest.raises(InfrastructureError, match="No cluster was started"):
        list(measured_lines(Home(tmp_path)))


def test_without_a_cluster_the_probe_itself_says_so(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="No cluster was started"):
        list(measured_lines(Home(tmp_path)))


@pytest.mark.parametrize(
    ("options", "ports"), [((), "0 0"), (("--ports", "1", "2"), "1 2"), (("--config", "SPEC"), "24000 24999")]
)
def test_lines_are_measured_by_the_ports_of_the_specification_or_those_that_are_said(
    probe: Any, tmp_path: Path, options: tuple[str, ...], ports: str
) -> None:
    spec = Installation(tmp_path).spec_file(transport={"ports": [24_000, 24_999]})
    probe()
    program = (
        "import json, sys; print(json.dumps({'one': 'control', 'other': 'asia', 'problem': ' '.join(sys.argv[-2:])}))"
    )
    (tmp_path / "pretended_probe.py").write_text(program)
    trained = ("--parameters", "1e6", "--step-s", "1")
    code, text = doctor(*(spec if option == "SPEC" else option for option in options), *trained)
    assert code == 1
    assert ports in text
