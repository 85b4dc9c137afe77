"""The embedded cluster: it outlives who started it, and nothing is left of it after ``down``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.errors import ConfigurationError
from orchestrator.runtime import embedded, processes
from orchestrator.runtime.clusterfile import ClusterFile
from orchestrator.runtime.groups import DEFAULT_GROUPS, read_groups


@pytest.mark.ray
def test_a_cluster_outlives_its_starter_and_down_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    groups = tmp_path / "groups.yaml"
    groups.write_text("node_groups: [{name: only, region: here1, cpus: 2}]\n")
    command = [sys.executable, "-m", "orchestrator.runtime.embedded", "up", "--home", str(tmp_path)]
    subprocess.run([*command, "--groups", str(groups)], check=True, timeout=90)
    cluster = ClusterFile.find(tmp_path)
    assert cluster is not None
    assert cluster.answers()
    assert len(processes.marked(cluster.id)) >= 5
    assert (Path(cluster.temp_dir) / "token").stat().st_mode & 0o077 == 0
    assert embedded.down(tmp_path) >= 5
    assert processes.marked(cluster.id) == []
    assert not Path(cluster.temp_dir).exists()
    assert ClusterFile.find(tmp_path) is None
    assert embedded.down(tmp_path) == 0


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
