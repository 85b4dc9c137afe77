"""The commands that need no service, as a user types them: simulate, tape fit, whatif, train-tape."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from pyarrow.parquet import read_table

from api import cli
from api.run import tables
from orchestrator.simulation.plan import Fault, FaultKind, WorldPlan, sample_policy
from orchestrator.simulation.world import World
from orchestrator.tape.replay import replay
from orchestrator.tape.storage import TapeWriter, read_tape
from tests.api.installation import ROOT, environment, interruptible
from tests.waiting import PATIENCE_S, wait_until

FLEET = {"chips": 100_000, "learners": 4, "mtbi_chip": "30d"}


def _command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "api.cli", *map(str, arguments)]


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(ROOT)


def atoll(*arguments: str | Path, code: int = 0) -> str:
    """What the command printed: stdout alone if it succeeded. In this process, through the real entry."""
    printed, said, before = StringIO(), StringIO(), sys.argv
    sys.argv = ["atoll", *map(str, arguments)]
    try:
        with redirect_stdout(printed), redirect_stderr(said), pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        sys.argv = before
    told = printed.getvalue() + said.getvalue()
    assert (ended.value.code or 0) == code, told
    return printed.getvalue() if code == 0 else told


def _spec(folder: Path, **changes: Any) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump({"name": "small", "duration": "3h", "fleet": FLEET, **changes}))
    return path


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of four islands of which one was killed."""
    policy = sample_policy(4, steps=150)
    world = World(
        policy, WorldPlan((0.05,) * 4, faults=(Fault(3.0, FaultKind.KILL, policy.islands[0].island),)), seed=2
    )
    recorded = world.run().tape
    path = tmp_path_factory.mktemp("tapes") / "tape.jsonl"
    with TapeWriter(path, recorded.header) as writer:
        for record in recorded.records:
            writer.append(record)
    return path


def test_the_example_prints_every_system_writes_its_tape_and_draws_it(tmp_path: Path) -> None:
    document = yaml.safe_load((ROOT / "deploy/configs/simulate.yaml").read_text())
    file = tmp_path / "example.yaml"
    file.write_text(yaml.safe_dump({**document, "duration": "10min"}))
    said = atoll("simulate", file, "--tape", tmp_path / "out.jsonl", "--plot", tmp_path / "out.svg")
    for system in ("data-parallel", "elastic-data-parallel", "diloco", "streaming-diloco", "decoupled (protocol)"):
        assert f"\n{system} " in said
    for heading in ("goodput", "uptime", "merges", "islands/merge", "Gbps used", "lost to", "shrinking"):
        assert heading in said
    recorded = read_tape(tmp_path / "out.jsonl")
    assert recorded.footer is not None
    assert recorded.footer.digest in said
    assert replay(recorded).exact
    assert ElementTree.parse(tmp_path / "out.svg").getroot().get("aria-label", "").startswith("million-chips")


def test_json_is_the_same_as_plain_data_and_a_tape_a_system_is_written(tmp_path: Path) -> None:
    file = _spec(tmp_path, systems=["elastic-data-parallel", "decoupled"])
    result = json.loads(atoll("simulate", file, "--seed", "5", "--tape", tmp_path / "out.jsonl", "--json"))
    assert (result["name"], result["seed"], result["partial"]) == ("small", 5, False)
    assert [row["system"] for row in result["systems"]] == ["elastic-data-parallel", "decoupled"]
    for row in result["systems"]:
        assert row["goodput"] + sum(row["badput"].values()) == pytest.approx(1.0)
    paths = [tmp_path / f"out-{system}.jsonl" for system in ("elastic-data-parallel", "decoupled")]
    assert list(result["tapes"]) == [str(path) for path in paths]
    for path in paths:
        assert read_tape(path).footer.digest == result["tapes"][str(path)]
        assert "identical" in atoll("replay", path)
    assert "already exists" in atoll("simulate", file, "--tape", tmp_path / "out.jsonl", code=2)


def test_a_bad_specification_gets_every_problem_and_starts_nothing(tmp_path: Path) -> None:
    file = _spec(tmp_path, duration="soon", colour=1, synchroniser={"quorum": 9})
    said = atoll("simulate", file, "--tape", tmp_path / "out.jsonl", code=2)
    for path in ("duration:", "colour:", "synchroniser.quorum:"):
        assert path in said
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate"], "SPEC"),
        (["simulate", "deploy/configs/simulate.yaml", "--plot", "no/such/folder/out.svg"], "does not exist"),
        (["reproduce", "everything"], "There is no table 'everything'. Tables: goodput"),
        (["reproduce", "bandwidth", "--into", "pyproject.toml"], "--into pyproject.toml"),
        (["reproduce", "bandwidth", "--size", "1M"], "--size is for trained tables. Name one: quality, ablations."),
        (["reproduce", "bandwidth", "quality", "--estimate"], "Leave bandwidth out."),
        (["reproduce", "quality", "--size", "2M"], "There is no --size 2M. Sizes: 0.01M"),
        (["simulate", "no-such-file.yaml"], "cannot be read"),
    ],
)
def test_a_mistake_has_its_remedy(arguments: list[str], words: str) -> None:
    assert words in atoll(*arguments, code=2)


def test_ctrl_c_prints_what_was_simulated_and_seals_the_tape(tmp_path: Path) -> None:
    few = {**FLEET, "chips": 20_000}
    file = _spec(tmp_path, duration="800d", systems=["decoupled"], fleet=few)
    out = tmp_path / "out.jsonl"
    running = subprocess.Popen(
        _command("simulate", file, "--tape", out, "--json"),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=interruptible,
    )
    wait_until(lambda: out.exists() and out.stat().st_size > 10_000)
    running.send_signal(signal.SIGINT)
    printed, said = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130, said
    assert "interrupted" in said
    result = json.loads(printed)
    assert result["partial"]
    assert 0.0 < result["simulated_s"] < result["duration_s"]
    assert 0.0 < result["systems"][0]["goodput"] < 1.0


def test_a_reproduced_table_is_printed_drawn_stored_and_not_computed_twice(tmp_path: Path) -> None:
    into = tmp_path / "made" / "here"
    said = atoll("reproduce", "bandwidth", "scavenging", "--into", into)
    assert "decoupled, from half on" in said
    assert "72 of 75 cells" in said
    assert len(list(ElementTree.parse(into / "scavenging.svg").iter())) > 30
    stored = into / "scavenging.json"
    document = json.loads(stored.read_text())
    document["cells"][0]["ours"] = 0.123
    stored.write_text(json.dumps(document))
    again = json.loads(atoll("reproduce", "scavenging", "--into", into, "--json"))
    assert again[0]["cells"][0]["ours"] == 0.123, "what the folder has is not computed again"
    (into / "scavenging.svg").unlink()
    atoll("reproduce", "scavenging", "--into", into)
    assert (into / "scavenging.svg").exists(), "a picture that is missing is drawn from what is stored"
    stored.write_text("half a do")
    anew = json.loads(atoll("reproduce", "scavenging", "--into", into, "--json"))
    assert anew[0]["cells"][0]["ours"] == pytest.approx(0.9, abs=0.01)
    other = json.loads(atoll("reproduce", "scavenging", "--into", into, "--seed", "1", "--json"))
    assert other[0]["seed"] == 1


def test_a_world_fitted_to_a_tape_is_simulated_again(tmp_path: Path, tape: Path) -> None:
    world = tmp_path / "world.yaml"
    world.write_text(atoll("tape", "fit", tape))
    result = json.loads(atoll("simulate", world, "--json"))
    (row,) = result["systems"]
    recorded = sum(type(record.event).__name__ == "MergeCompleted" for record in read_tape(tape).records)
    assert row["merges"] == pytest.approx(recorded, rel=0.1)
    assert 0.3 < row["goodput"] < 1.0
    broken = yaml.safe_load(world.read_text())
    broken["world"]["islands"] = "many"
    world.write_text(yaml.safe_dump({**broken, "colour": "red"}))
    said = atoll("simulate", world, code=2)
    assert "world.islands" in said
    assert "colour" in said


def test_a_tape_is_written_as_a_table_with_a_row_for_each_record(tape: Path, tmp_path: Path) -> None:
    parquet, text = tmp_path / "tape.parquet", tmp_path / "new" / "tape.csv"
    atoll("tape", "export", tape, "--parquet", parquet, "--csv", text)
    records = read_tape(tape).records
    table = read_table(parquet).to_pylist()
    assert [row["n"] for row in table] == [record.n for record in records]
    assert [row["at"] for row in table] == [record.event.at for record in records]
    assert [len(json.loads(row["effects"])) for row in table] == [len(record.effects) for record in records]
    assert {"us-east", "europe", None} <= {row["island"] for row in table}
    with text.open(newline="") as file:
        assert [row["event"] for row in csv.DictReader(file)] == [row["event"] for row in table]
    before = parquet.read_bytes()
    assert "already exists" in atoll("tape", "export", tape, "--parquet", parquet, code=2)
    assert parquet.read_bytes() == before
    assert "nothing to write" in atoll("tape", "export", tape, code=2)
    assert "cannot be written" in atoll("tape", "export", tape, "--csv", text / "below.csv", code=2)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_report_has_its_curves_and_figures_as_rows(tmp_path: Path) -> None:
    report = {
        "loss_curve": [[0.0, 5.4, 0.5], [4096.0, 4.5, 2.0]],
        "goodput_ratio": 0.9,
        "outcome": "completed",
        "loss_unigram": None,
        "badput_seconds": {"starting: placing": 3.0},
        "islands": {"asia": {"spare": False, "merges": 7, "tokens": {"merged": 4096.0}}},
    }
    path = tmp_path / "report.parquet"
    tables.write_parquet(path, tables.REPORT_COLUMNS, tables.report_rows(report))
    rows = [tuple(row.values()) for row in read_table(path).to_pylist()]
    assert rows == [
        ("held_out_loss", None, 0, 0.5, 5.4),
        ("held_out_loss", None, 4096, 2.0, 4.5),
        ("goodput_ratio", None, None, None, 0.9),
        ("badput_seconds.starting: placing", None, None, None, 3.0),
        ("merges", "asia", None, None, 7.0),
        ("tokens.merged", "asia", None, None, 4096.0),
    ]


def test_whatif_stands_beside_what_happened(tape: Path) -> None:
    said = atoll("whatif", tape, "--set", "quorum=4")
    assert "happened" in said
    assert "changed" in said
    assert "contributors per merge" in said
    assert "NAME=VALUE" in atoll("whatif", tape, "--set", "quorum", code=2)
    assert "colour" in atoll("whatif", tape, "--set", "colour=4", code=2)
    assert "cannot be read" in atoll("whatif", "no-such-tape.jsonl", code=1)


def test_train_tape_hands_everything_on(tape: Path) -> None:
    command = _command(
        "train-tape", tape, "--config", "no-such-file.yaml", "--baseline", "no-failures", "--seeds", "2", "--json"
    )
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2, done.stderr
    assert "no-such-file.yaml" in done.stderr
    assert "Traceback" not in done.stderr
