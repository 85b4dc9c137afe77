"""A machine without the cluster's token: no node of it, told so in a sentence, and nothing of it is left."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.runtime import cluster, embedded
from orchestrator.runtime.cluster import TOKEN_REFUSED
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.control_port import RayControlPort
from orchestrator.runtime.groups import DEFAULT_GROUPS
from orchestrator.runtime.orphan_scan import census
from orchestrator.runtime.settings import TOKEN_VARIABLE
from tests.ray.jobs import ENDLESS, Job, synthetic
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.ray


def strangers_environment() -> dict[str, str]:
    """Of somebody who has none of this cluster's settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "ATOLL_"))}


def test_a_machine_with_another_token_or_none_is_no_node_and_is_told_what_to_do(
    port: RayControlPort, home: Path, tmp_path: Path
) -> None:
    found = ClusterFile.find(home)
    assert found is not None
    before = {node.id for node in cluster.nodes()}
    wrong = tmp_path / "token"
    wrong.write_text(secrets.token_hex(32))
    wrong.chmod(0o600)
    command = [sys.executable, "-m", "api.cli", "join", found.address, "--group", "spot", "--region", "us-east1"]
    for options, sentence in (
        (["--token-file", str(wrong)], "is not the cluster's secret. Copy the file that the head was started with"),
        ([], "The cluster's secret is missing. Give its file with --token-file"),
    ):
        joined = subprocess.run(
            [*command, "--own-address", "127.0.0.1", *options],
            env=strangers_environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert joined.returncode == 2, joined.stderr
        assert sentence in " ".join(joined.stderr.split()), joined.stderr
        assert "Traceback" not in joined.stderr
    assert {node.id for node in cluster.nodes()} == before, "dead ones are not among them, nor is a new one"

    # past our own command, the head itself refuses a client that shows nothing, and takes the one with the token
    token = {TOKEN_VARIABLE: found.environment[TOKEN_VARIABLE], "RAY_AUTH_MODE": "token"}
    for shown, code in (({}, TOKEN_REFUSED), (token, 0)):
        client = [sys.executable, "-m", "orchestrator.runtime.cluster", found.address]
        environment = {**strangers_environment(), **shown}
        assert subprocess.run(client, env=environment, capture_output=True, timeout=PATIENCE_S).returncode == code


def test_a_killed_island_comes_back_after_the_clusters_secret_was_removed_or_damaged(
    port: RayControlPort, home: Path, start: Callable[..., Job]
) -> None:
    """Without the file, no process of the cluster could start any more."""
    found = ClusterFile.find(home)
    assert found is not None
    path, job = found.state / "token", start(synthetic(ENDLESS, ("us-east",)))
    secret, pid = path.read_text(), job.wait_for_merge("us-east", 1)["pid"]

    path.unlink()
    assert "cannot be read" in str(census(home)["secret"])
    os.kill(pid, signal.SIGKILL)
    job.wait_for_merge("us-east", 2)  # asks the service's port, which remembers the secret
    assert path.read_text() == secret
    assert path.stat().st_mode & 0o077 == 0

    for content in (b"", b"0" * 64, b"\xff"):
        path.write_bytes(content)
        assert "is damaged" in str(census(home)["secret"])
        embedded.up(home, DEFAULT_GROUPS)
        assert path.read_text() == secret
    assert census(home)["secret"] == ""
