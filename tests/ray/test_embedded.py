"""The embedded cluster: it outlives who started it, and nothing is left of it after ``down``."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.errors import ConfigurationError
from orchestrator.runtime import embedded, processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.dead_nodes import VERB
from orchestrator.runtime.groups import DEFAULT_GROUPS, NodeGroup, read_groups
from orchestrator.runtime.orphan_scan import census
from orchestrator.runtime.ray_start import Place, RayProgram, log_of
from orchestrator.runtime.settings import CLUSTER_MARKER, CONTROL_GROUP, LOG_BYTES_MAX, NODE_MARKER
from tests.attack.test_environment import SECRETS
from tests.attack.test_permissions import open_to_others
from tests.listening import listeners, undocumented
from tests.waiting import PATIENCE_S


def beyond_loopback(among: Iterable[psutil.Process]) -> list[str]:
    """Where these processes listen for others than this machine's own, with who it is."""
    found = []
    for process in among:
        with suppress(psutil.NoSuchProcess):
            for held in process.net_connections("inet"):
                address = ipaddress.ip_address(held.laddr.ip)
                address = getattr(address, "ipv4_mapped", None) or address
                if held.status == psutil.CONN_LISTEN and not address.is_loopback:
                    found.append(f"{process.name()} {held.laddr.ip}:{held.laddr.port}")
    return found


@pytest.mark.ray
def test_a_cluster_outlives_its_starter_and_down_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    groups = tmp_path / "groups.yaml"
    groups.write_text("node_groups: [{name: only, region: here1, cpus: 2}]\n")
    command = [sys.executable, "-m", "orchestrator.runtime.embedded", "up", "--home", str(tmp_path)]
    given = [*command, "--groups", str(groups), "--pass-environment", "AWS_ACCESS_KEY_ID"]
    subprocess.run(given, env={**os.environ, **SECRETS}, umask=0o022, check=True, timeout=PATIENCE_S)
    cluster = ClusterFile.find(tmp_path)
    assert cluster is not None
    assert cluster.answers()
    assert len(processes.marked(cluster.id)) >= 5
    assert open_to_others(cluster.state) == []
    assert Path(cluster.temp_dir).stat().st_mode & 0o077 == 0
    assert open_to_others(tmp_path / "cluster.json") == []
    for process in processes.marked(cluster.id):
        assert SECRETS.keys() & process.environ().keys() == {"AWS_ACCESS_KEY_ID"}, process.cmdline()
        assert process.environ()["RAY_ROTATION_MAX_BYTES"] == str(LOG_BYTES_MAX), process.cmdline()
    assert beyond_loopback(processes.marked(cluster.id)) == []
    seen = listeners(process.pid for process in processes.marked(cluster.id))
    assert {"gcs_server", "raylet"} <= {one.process for one in seen}
    assert undocumented(seen, on_loopback=True) == []
    pids = {process.pid for process in processes.marked(cluster.id)}
    for damage in (b"", b"{", b"{}", None):  # it is found again by the marks of its processes, whatever its file is
        path = ClusterFile.path(tmp_path)
        path.unlink() if damage is None else path.write_bytes(damage)
        assert set(census(tmp_path)["own"]) == pids  # type: ignore[call-overload]
        subprocess.run([*command, "--groups", str(groups)], check=True, timeout=PATIENCE_S)
        assert ClusterFile.find(tmp_path) == cluster
        assert {process.pid for process in processes.marked(cluster.id)} == pids, "nothing of it was ended or started"

    secret = (cluster.state / "token").read_text()  # the machine is restarted, with an empty /tmp
    processes.kill_all(cluster.id)
    shutil.rmtree(cluster.temp_dir)
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    former, cluster = cluster, ClusterFile.find(tmp_path)
    assert cluster is not None
    assert cluster.id != former.id
    assert (cluster.state / "token").read_text() == secret
    assert processes.nodes_with(cluster.id, "raylet") == {CONTROL_GROUP, "only"}, "the groups that were given before"

    ClusterFile.path(tmp_path).write_bytes(b"")
    assert embedded.down(tmp_path) >= 5
    assert processes.marked(cluster.id) == []
    assert not Path(cluster.temp_dir).exists()
    assert not cluster.state.exists()
    assert ClusterFile.find(tmp_path) is None
    assert embedded.down(tmp_path) == 0


def test_a_node_whose_start_failed_is_started_anew_though_its_raylet_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ray start` gives a node up on a machine that is too busy, and leaves its raylet alive."""
    raylet = shutil.copy("/bin/sleep", tmp_path / "raylet")
    started: list[str] = []

    def start(cluster: ClusterFile, name: str, code: int) -> subprocess.Popen[bytes]:
        started.append(name)
        log_of(cluster, name).touch()
        marks = {**cluster.environment, CLUSTER_MARKER: cluster.id, NODE_MARKER: name}
        return subprocess.Popen(["/bin/sh", "-c", f"{raylet} 600 & exit {code}"], env={**os.environ, **marks})

    def start_node(program: RayProgram, name: str, *_: Any) -> subprocess.Popen[bytes]:
        return start(program.cluster, name, code=0 if name in started else 1)

    with ExitStack() as listening:

        def start_head(program: RayProgram, *_: Any) -> subprocess.Popen[bytes]:
            host, _, port = program.cluster.address.rpartition(":")
            listening.enter_context(socket.create_server((host, int(port))))
            return start(program.cluster, CONTROL_GROUP, code=0)

        def unregister_dead(program: RayProgram, _: Place) -> subprocess.Popen[bytes]:
            log_of(program.cluster, VERB).write_text("only\n")
            return subprocess.Popen(["/bin/true"])

        monkeypatch.setattr(embedded, "unregister_dead", unregister_dead)
        monkeypatch.setattr(embedded, "start_head", start_head)
        monkeypatch.setattr(embedded, "start_node", start_node)
        cluster = embedded.up(tmp_path, (NodeGroup(name="only", region="here", cpus=1),))
        try:
            assert started == [CONTROL_GROUP, "only", "only"]
            assert len(processes.marked(cluster.id, "only")) == 1
            assert "has unregistered the dead nodes only" in capsys.readouterr().err
        finally:
            assert embedded.down(tmp_path) > 0
        assert processes.marked(cluster.id) == []


def test_a_start_that_fails_has_its_own_exit_code_and_log(tmp_path: Path) -> None:
    cluster = ClusterFile(id="none", address="127.0.0.1:1", temp_dir=str(tmp_path), environment={})
    names = ("one", "other")
    with RayProgram(cluster, dashboard=False) as program:
        starts = [program.start(name, Place(), ["start", f"--no-{name}"]) for name in names]
        assert [start.wait(PATIENCE_S) for start in starts] == [2, 2]
        assert [start.poll() for start in starts] == [2, 2]
    for name, another in (names, names[::-1]):
        log = log_of(cluster, name).read_text()
        assert f"--no-{name}" in log
        assert f"--no-{another}" not in log


def test_a_groups_file_is_refused_with_all_its_problems_at_once(tmp_path: Path) -> None:
    path = tmp_path / "groups.yaml"
    path.write_text(
        "node_groups: [{name: a, region: r, cpus: 0}, {name: a}, {name: b, region: r}, {name: b, region: r}]"
    )
    with pytest.raises(ConfigurationError) as refused:
        read_groups(path)
    for words in ("node_groups.0.cpus", "node_groups.1.region", "'b' is given twice"):
        assert words in str(refused.value)


def test_without_a_groups_file_there_are_four_regions() -> None:
    assert read_groups(None) == DEFAULT_GROUPS
    assert len({group.region for group in DEFAULT_GROUPS}) == 4
