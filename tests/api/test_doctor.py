"""`atoll doctor` finds what is planted, and says what to do about it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

from api.installation.doctor import CheckResult, State, compiled_programs, examine, locked, memory
from api.installation.home import CONFIGS, Home
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.embedded import down
from orchestrator.runtime.orphan_scan import census
from orchestrator.runtime.settings import CLUSTER_MARKER, TOKEN_VARIABLE
from orchestrator.system.marks import HOME_MARKER, mark_of
from tests.api.clocks import a_service
from tests.api.installation import ROOT, environment
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckResult]:
    """Of this machine, with a home that is wrong in two ways and no groups file."""
    folder = tmp_path_factory.mktemp("home")
    folder.chmod(0o777)
    (folder / "token").write_text("secret")
    (folder / "token").chmod(0o644)
    found = examine(Home(folder), folder / "runs" / "not" / "made", folder / "groups.yaml")
    return {finding.check: finding for finding in found}


def test_what_is_in_order_is_said_to_be(findings: dict[str, CheckResult]) -> None:
    for check in ("python", "versions", "ports", "service's clock", "memory", "ray", "jax"):
        assert findings[check].state is State.OK, findings[check]
    assert findings["ray"].detail.startswith("2.")
    assert findings["jax"].detail.endswith(":0")
    assert findings["versions"].detail == "as requirements.lock says"


def test_memory_is_told_with_the_model_that_it_is_enough_for(findings: dict[str, CheckResult]) -> None:
    assert "GiB free: enough for 4 islands on CPU and the head with a model of " in findings["memory"].detail
    assert memory(str(11 * 10**9), "").detail.startswith("10.2 GiB free")
    assert (
        "a model of 63M parameters (36 bytes per parameter for each island, 31 for the head)"
        in memory(str(11 * 10**9), "").detail
    )
    assert memory("", "no module").state is State.WARNING


def test_a_home_open_to_others_is_wrong_and_the_secret_is_not_told(findings: dict[str, CheckResult]) -> None:
    home = findings["home"]
    assert home.state is State.WRONG
    assert "writable by all users" in home.detail
    assert "readable by other users" in home.detail
    assert "chmod" in home.remedy
    assert "secret" not in home.detail + home.remedy


def test_a_home_that_keeps_no_compiled_programs_is_a_warning_with_a_remedy(tmp_path: Path) -> None:
    finding = compiled_programs({"HOME": "/sys"})
    assert finding.state is State.WARNING
    assert "/sys/.cache" in finding.detail
    assert "XDG_CACHE_HOME" in finding.remedy
    assert compiled_programs({"HOME": str(tmp_path)}).state is State.OK


def test_a_missing_groups_file_is_wrong(findings: dict[str, CheckResult]) -> None:
    assert findings["cores"].state is State.WRONG
    assert "groups.yaml" in findings["cores"].remedy


def test_the_command_prints_the_same_and_ends_with_1_if_something_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "token").chmod(0o604)
    command = [sys.executable, "-m", "api.cli", "doctor", "--home", str(tmp_path)]
    with a_service(ahead_s=-3600) as url:
        done = subprocess.run(
            [*command, "--url", url, "--json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env=environment(),
        )
    assert done.returncode == 1, done.stderr
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert found["home"]["state"] == "wrong"
    assert f"chmod 600 {tmp_path / 'token'}" in found["home"]["remedy"]
    assert found["service's clock"]["state"] == "warning"
    assert "behind this machine" in found["service's clock"]["found"]
    assert found["cores"]["found"].endswith((CONFIGS / "groups.yaml").name)


NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="makes namespaces and changes its root, which needs root")
WAITS = "print(os.getpid(), flush=True); input()"


@pytest.fixture
def begin_marked(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Begin a process of a cluster with its token at ``tmp_path / "token"``; return its id as this process sees it."""
    begun: list[subprocess.Popen[bytes]] = []
    mark = {CLUSTER_MARKER: "some-cluster", TOKEN_VARIABLE: str(tmp_path / "token")}

    def begin(*enter: str, first: str = "pass", more: Mapping[str, str] = MappingProxyType({})) -> int:
        command = [*enter, sys.executable, "-c", f"import os; {first}; {WAITS}"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **mark, **more}
        )
        begun.append(process)
        assert process.stdout is not None
        own = int(process.stdout.readline())
        children = psutil.Process(process.pid).children()  # of `unshare`, which has the mark, too
        return children[0].pid if children else own

    yield begin
    for process in begun:
        process.communicate(b"\n", timeout=PATIENCE_S)


def test_processes_are_of_this_home_of_another_or_of_nobody(begin_marked: Callable[..., int], tmp_path: Path) -> None:
    pid, token = begin_marked(), tmp_path / "token"
    home = tmp_path / "home"
    assert pid in census(home)["orphaned"]
    token.write_text("")
    assert pid in census(home)["elsewhere"]
    ClusterFile("some-cluster", "127.0.0.1:1", str(tmp_path), {}).write(home)
    assert census(home)["own"] == [pid]
    assert census(home)["answers"] is False


def test_processes_whose_home_was_moved_are_not_orphans(begin_marked: Callable[..., int], tmp_path: Path) -> None:
    """As after ``mv``: its cluster runs on, and has its files open there."""
    home, other = tmp_path / "parent" / "home", tmp_path / "other"
    (home / "cluster").mkdir(parents=True)
    (home.parent / "no home").mkdir()
    mark = {HOME_MARKER: mark_of(home)}
    pid = begin_marked(first=f"kept = open({str(home / 'cluster' / 'log')!r}, 'w')", more=mark)
    idle = begin_marked(more=mark)
    home.rename(home.with_name("beside"))
    assert {pid, idle} <= {*census(other)["elsewhere"]}
    home.with_name("beside").rename(tmp_path / "far")
    assert {pid, idle} <= {*census(other)["elsewhere"]}, "one of them has a file open there"
    shutil.rmtree(tmp_path / "far")
    assert {pid, idle} <= {*census(other)["orphaned"]}


@NEEDS_ROOT
def test_processes_whose_disk_is_not_mounted_now_are_not_orphans(tmp_path: Path) -> None:
    """In a mount namespace of its own, with a disk that is unmounted while a process of its home lives."""
    (tmp_path / "disk").mkdir()
    script = f"""
set -e
mount -t tmpfs none {tmp_path}/disk
mkdir -p {tmp_path}/disk/home/cluster
touch {tmp_path}/disk/home/cluster/token
export ATOLL_CLUSTER=some-cluster RAY_AUTH_TOKEN_PATH={tmp_path}/disk/home/cluster/token
export ATOLL_CLUSTER_HOME=$(stat -c %d:%i {tmp_path}/disk/home):{tmp_path}/disk/home
sleep 600 >/dev/null &
pid=$!
umount {tmp_path}/disk
{sys.executable} -m orchestrator.runtime.orphan_scan --home {tmp_path}/other
kill $pid
echo $pid
"""
    command = ["unshare", "-m", "sh", "-c", script]
    ran = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr
    scanned, pid = ran.stdout.splitlines()
    assert int(pid) in json.loads(scanned)["elsewhere"]


@NEEDS_ROOT
@pytest.mark.parametrize(
    "enter", [("unshare", "-m"), ("unshare", "-pf"), ("unshare", "-pmf")], ids=["folders", "pids", "container"]
)
def test_processes_in_a_container_are_anothers_though_their_files_are_not_here(
    enter: tuple[str, ...], begin_marked: Callable[..., int], tmp_path: Path
) -> None:
    pid = begin_marked(*enter)
    scanned = census(tmp_path / "home")
    assert pid in scanned["elsewhere"]
    assert pid not in scanned["orphaned"]


@NEEDS_ROOT
def test_processes_in_a_chroot_are_anothers_also_where_its_home_has_the_same_path(
    begin_marked: Callable[..., int], tmp_path: Path
) -> None:
    home, root = tmp_path / "home", tmp_path / "root"
    home.mkdir()
    root.mkdir()
    pid = begin_marked(first=f"os.chroot({str(root)!r})", more={HOME_MARKER: f"1:1:{home}"})
    assert pid in census(home)["elsewhere"]
    ClusterFile("some-cluster", "127.0.0.1:1", str(tmp_path), {}).write(home)  # a copy of the home in the chroot
    assert pid in census(home)["elsewhere"]
    assert down(home) == 0, "nor does `atoll down` end them"
    assert psutil.pid_exists(pid)


@NEEDS_ROOT
def test_processes_of_another_user_are_anothers_where_his_folders_cannot_be_looked_into(
    begin_marked: Callable[..., int], tmp_path: Path
) -> None:
    """As on a disk of the network that root may not read: here it is root without that privilege."""
    (tmp_path / "his").mkdir(mode=0o700)
    (tmp_path / "his" / "token").write_text("")
    os.chown(tmp_path / "his", 54321, 54321)
    without = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all")
    pid = begin_marked(*without, more={TOKEN_VARIABLE: str(tmp_path / "his" / "token")})
    command = [*without, sys.executable, "-m", "orchestrator.runtime.orphan_scan"]
    command += ["--home", str(tmp_path / "home")]
    ran = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr
    assert pid in json.loads(ran.stdout)["elsewhere"]


def test_a_lock_file_is_read_with_extras_and_markers() -> None:
    text = "jax==0.10.2 \\\n    --hash=sha256:00\n    # via atoll\nray[default]==2.60.0 ; python_version > '3'\n"
    assert locked(text) == {"jax": "0.10.2", "ray": "2.60.0"}


def test_the_shell_is_offered_completions(tmp_path: Path) -> None:
    atoll = Path(sys.executable).parent / "atoll"
    asked = {"_ATOLL_COMPLETE": "complete_bash", "COMP_WORDS": "atoll chaos ", "COMP_CWORD": "2"}
    done = subprocess.run([atoll], capture_output=True, text=True, timeout=PATIENCE_S, env={**environment(), **asked})
    assert {"run", "simulate", "kill", "stop", "continue", "list"} <= set(done.stdout.split())
    # The shell is named here: under CI there may be none above us to be recognised.
    home = {**environment(), "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    installed = subprocess.run(
        [atoll, "--install-completion", "bash"], capture_output=True, timeout=PATIENCE_S, env=home
    )
    assert installed.returncode == 0
    assert (tmp_path / ".bash_completions").is_dir()
