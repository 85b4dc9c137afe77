"""Where the processes of a live cluster find modules: not in a folder that somebody happened to start something in."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from orchestrator.system import python_process
from tests.documents import DOCS, blocks
from tests.hostile_folder import ATOLL, HostileFolder
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.ray

DRIVER = """
import sys
from pathlib import Path
from orchestrator.runtime import cluster
cluster.join(Path(sys.argv[1]))
import ray
@ray.remote(num_cpus=0, memory=1)
class Probe:
    def answer(self):
        import json, os, queue, sys
        flags = [sys.flags.safe_path, sys.flags.no_user_site]
        return json.dumps({"path": sys.path, "variables": dict(os.environ), "flags": flags, "queue": queue.__file__})
print(ray.get(Probe.remote().answer.remote()))
"""
GROUPS = "node_groups: [{name: near, region: here1, cpus: 4}]\n"


def test_a_worker_has_no_folder_of_its_driver_and_no_users_site(home: Path, tmp_path: Path) -> None:
    hostile = HostileFolder(tmp_path)
    driver = subprocess.run(
        python_process.code(DRIVER, str(home)),
        cwd=hostile.path,
        env=python_process.cleaned(hostile.environment),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert driver.returncode == 0, driver.stderr
    answer = json.loads(driver.stdout)
    assert not [entry for entry in answer["path"] if entry == "" or Path(entry).is_relative_to(tmp_path)]
    assert answer["flags"] == [True, 1]
    # Ray itself sets one, for its debugger
    code = {name for name in answer["variables"] if not python_process.is_harmless(name)} - {"PYTHONBREAKPOINT"}
    assert code == set(python_process.VARIABLES)
    assert not answer["queue"].startswith(str(tmp_path))
    assert hostile.executed() == ""


@pytest.mark.soak("a cluster of its own, and a job: half a minute")
def test_a_job_whose_code_is_in_a_named_folder_trains_in_an_installation_that_is_started_in_a_hostile_one(
    tmp_path: Path,
) -> None:
    hostile = HostileFolder(tmp_path)
    (text,) = [b.text for b in blocks((DOCS / "how-to-change" / "trainer.md").read_text()) if b.kind == "python"]
    package = tmp_path / "packages" / "mypackage"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "bigrams.py").write_text(text)
    job = {
        "trainer": "mypackage.bigrams:create",
        "islands": [{"node_group": "near", "name": name, "cpus": 1} for name in ("one", "two")],
        "budget": {"steps": 60},
        "training": {"inner_optimizer": {"lr": 0.1}},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    (tmp_path / "groups.yaml").write_text(GROUPS)
    home = ("--home", str(tmp_path / "home-of-atoll"))
    where = (*home, "--runs", str(tmp_path / "runs"), "--groups", str(tmp_path / "groups.yaml"), "--allow", "mypackage")
    try:
        hostile.atoll("up", *where, "--packages", str(package.parent))
        hostile.atoll("submit", str(tmp_path / "job.yaml"), *home, "--watch")
        (status,) = json.loads(hostile.atoll("jobs", *home, "-o", "json"))
        assert status["state"] == "completed"
        hostile.atoll("doctor", "--lines", *home, code=None)
        hostile.atoll("export", "latest", "--format", "orbax", "--out", str(tmp_path / "export"), *home)
        hostile.atoll("leave", code=None)
    finally:
        subprocess.run([ATOLL, "down", *home], cwd=hostile.path, env=os.environ, timeout=PATIENCE_S)
    assert hostile.executed() == ""
