"""What `atoll join` and `atoll leave` take, and refuse before anything begins; and the files by which machines join."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from api.commands import nodes
from api.installation.units import UNITS
from orchestrator.errors import ConfigurationError
from orchestrator.runtime import join, leave
from tests.documents import parse
from tests.programs import missing
from tests.waiting import wait_until

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2:00:00", 7200.0),
        ("1-00:30:15", 86_400.0 + 1815.0),
        ("1800003600", 3600.0),
        ("@1800003600", 3600.0),
        ("2027-01-15T09:00:00+00:00", 3600.0),
        ("2027-01-15T09:00:00Z", 3600.0),
    ],
)
def test_the_end_of_a_machines_time_is_a_time_or_a_duration(text: str, seconds: float) -> None:
    assert nodes.moment(text, NOW) == pytest.approx(NOW + seconds)


@pytest.mark.parametrize("text", ["soon", "", "12", "25:99:00", "-1:00:00", "99999-99-99T00:00:00", "1800003600.5x"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a time"):
        nodes.moment(text, NOW)


@pytest.mark.parametrize("text", ["0:02:00", "1700000000"])
def test_a_machine_that_would_leave_before_it_did_anything_does_not_join(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--lead|is not in the future"):
        nodes.checked_until(text, 120.0, NOW)


@pytest.mark.parametrize(
    "text",
    ["head", "head:0", "head:65536", "head:x", "he ad:1", "http://head:1", ":6379", ".head:1", "he..ad:1", "[::1::]:1"],
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="head:6379"):
        nodes.checked_address(text)


@pytest.mark.parametrize("text", ["rack", "rack=", "=a7", "rack=a b", "region=x", "atoll-node-group=y", "a,b=c"])
def test_a_label_that_cannot_be_or_is_ours_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--labels"):
        nodes.labels_of([text])


@pytest.mark.parametrize("text", ["TPU", "TPU=", "TPU=none", "TPU=0", "TPU=-1", "TPU=nan", "TPU=inf", "cpu=4", "GPU=1"])
def test_an_amount_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--resources"):
        nodes.amounts([text])


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigurationError, match="secret is missing"):
        nodes.checked_token(None)
    with pytest.raises(ConfigurationError, match="No such file"):
        nodes.checked_token(path)
    path.touch(mode=0o600)
    with pytest.raises(ConfigurationError, match="empty"):
        nodes.checked_token(path)
    path.write_text("secret")
    assert nodes.checked_token(path) == path
    for mode in (0o644, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(ConfigurationError, match="chmod 600"):
            nodes.checked_token(path)


def test_what_was_said_is_what_ray_is_started_with(tmp_path: Path) -> None:
    said = ["--address", "head:6379", "--token-file", "t", "--group", "spot", "--region", "us-east1", "--gpus", "2"]
    options = join.parser().parse_args([*said, "--labels", '{"rack": "a7"}', "--resources", '{"TPU": 4.0}'])
    command = join.ray_start(options, tmp_path)
    labels = "atoll-node-group=spot,region=us-east1,rack=a7"
    assert command[command.index("--labels") + 1] == labels
    assert command[command.index("--num-gpus") + 1] == "2"
    assert command[command.index("--resources") + 1] == '{"TPU": 4.0}'
    assert "--num-cpus" not in command  # as many as there are


def test_a_machine_asks_its_cloud_unless_it_is_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    options = join.parser().parse_args(["--address", "h:1", "--token-file", "t", "--group", "g", "--region", "r"])
    monkeypatch.setenv("SECRET_KEY", "of the caller")
    monkeypatch.delenv("ATOLL_NOTICES", raising=False)
    assert join.environment(options)["ATOLL_NOTICES"] == "auto"
    monkeypatch.setenv("ATOLL_NOTICES", "off")
    assert join.environment(options)["ATOLL_NOTICES"] == "off"
    assert "SECRET_KEY" not in join.environment(options)


def test_a_machine_passes_on_the_variables_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["--address", "h:1", "--token-file", "t", "--group", "g", "--region", "r"]
    monkeypatch.setenv("AWS_PROFILE", "training")
    assert "AWS_PROFILE" not in join.environment(join.parser().parse_args(said))
    options = join.parser().parse_args([*said, "--pass-environment", "AWS_PROFILE"])
    assert join.environment(options)["AWS_PROFILE"] == "training"


# ── the files ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def raylets(tmp_path: Path) -> Iterator[Callable[..., psutil.Popen]]:
    """Start processes with the name and the options of Ray's own."""
    program, started = tmp_path / "raylet", []
    program.symlink_to(sys.executable)

    def start(node_id: str, name: str) -> psutil.Popen:
        options = [f"--node_id={node_id}", "--gcs_address=192.0.2.1:6379", *([f"--node-name={name}"] if name else [])]
        started.append(psutil.Popen([program, "-c", "input()", *options], stdin=subprocess.PIPE))
        wait_until(lambda: started[-1].name() == "raylet", "its name")
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()


def test_the_node_that_is_to_leave_is_named_where_several_run(raylets: Callable[..., psutil.Popen]) -> None:
    first, _, third = raylets("0a", "atoll-first"), raylets("0b", "atoll-twin"), raylets("0c", "atoll-twin")
    unnamed = raylets("0d", "")
    assert (leave.only("atoll-first").raylet, leave.only("0c").raylet) == (first.pid, third.pid)
    assert leave.only("0d").raylet == unnamed.pid
    for name, named in (("", "Choose one with --name."), ("nowhere", "atoll-first"), ("atoll-twin", "0b, 0c")):
        with pytest.raises(ConfigurationError, match=named):
            leave.only(name)


OPTIONS = {
    "head": ["--address", "10.0.0.7"],
    "service": ["--host", "10.0.0.7", "--port", "443"],
    "join": ["h:1", "--group", "g", "--region", "r", "--labels", "rack=a7"],
}


def install(root: Path, unit: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "api.cli", "install-units", "--root", str(root), unit, "--", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("unit", OPTIONS)
def test_a_unit_is_written_with_its_options_and_systemd_understands_it(unit: str, tmp_path: Path) -> None:
    done = install(tmp_path, unit, *OPTIONS[unit])
    assert done.returncode == 0, done.stderr
    written = configparser.ConfigParser(strict=False, interpolation=None)
    written.optionxform = str  # type: ignore[assignment]
    path = tmp_path / "etc/systemd/system" / f"atoll-{unit}.service"
    written.read(path)
    service = written["Service"]
    program, command, *words = service["ExecStart"].split()
    assert (Path(program).name, os.access(program, os.X_OK), command) == ("atoll", True, UNITS[unit])
    settings = (tmp_path / "etc/atoll" / f"{unit}.env").read_text()
    assert f'ATOLL_OPTIONS="{" ".join(OPTIONS[unit])}"' in settings
    parse([command, *" ".join(words).replace("$ATOLL_OPTIONS", " ".join(OPTIONS[unit])).split()])
    assert (service["Restart"], service["KillMode"]) == ("always", "mixed"), "signals are for our program alone"
    assert service["OOMPolicy"] == "continue", "a killed island ends no node"
    if unit == "join":
        grace = int(words[words.index("--grace") + 1])
        assert int(service["TimeoutStopSec"]) >= grace + join.ENDED_S
    if shutil.which("systemd-analyze") is None:
        missing("systemd-analyze")
    verified = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)
    assert (verified.returncode, f"atoll-{unit}" in verified.stderr) == (0, False), verified.stderr


@pytest.mark.parametrize(
    ("unit", "options", "says"),
    [
        ("head", ["--adress", "10.0.0.7"], "No such option: --adress"),
        ("head", [], "Missing option '--address'"),
        ("join", ["h:1", "--region", "r"], "Missing option '--group'"),
        ("service", ["--port", "0"], "is not a whole number from 1 to 65,535"),
        ("head", ["--address", "10.0.0.7 "], "is not an IP address"),
        ("head", ["--address", "10.0.0.7", "--home", "a b"], "has a space"),
    ],
)
def test_a_unit_whose_command_would_refuse_its_options_is_not_written(
    unit: str, options: list[str], says: str, tmp_path: Path
) -> None:
    done = install(tmp_path, unit, *options)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.replace("│", "").split())
    assert not list(tmp_path.iterdir())


def test_the_script_of_a_queue_is_whole() -> None:
    script = DEPLOY / "slurm" / "join.sbatch"
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("code", [0, 1])
def test_the_script_of_a_queue_passes_on_a_signal_that_it_alone_gets(code: int, tmp_path: Path) -> None:
    """Slurm with proctrack/cgroup signals only the shell that it has started, at any moment."""
    program = tmp_path / "program"
    program.write_text(
        f"#!{sys.executable} -IS\nimport signal, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, [15])\n"
        f"print(sys.argv[1], flush=True)\nsignal.sigwait([15])\nsys.exit({code})\n"
    )
    program.chmod(0o755)
    settings = {"ATOLL_HEAD": "h:1", "ATOLL_REGION": "r", "ATOLL_INSECURE": "1", "ATOLL_PROGRAM": str(program)}
    settings |= {"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": "9", "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    script = ["bash", str(DEPLOY / "slurm" / "join.sbatch")]
    for _ in range(20):
        with subprocess.Popen(script, env=settings, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "join\n"
            (child,) = psutil.Process(process.pid).children()
            process.terminate()
            assert process.wait() == code
            assert not child.is_running()
