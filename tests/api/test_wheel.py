"""Whoever installs a wheel has all of it: commands, page, migrations, sample jobs and plans, and what the image starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from api.installation.home import Home
from tests.api.installation import CONTROL, ROOT
from tests.waiting import PATIENCE_S

BUILD = "import hatchling.build, sys; print(hatchling.build.build_wheel(sys.argv[1]))"


class Installed:
    """A wheel of this checkout, unpacked; ``run`` finds its modules first, and the checkout's only for ``tests``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.packages = folder, folder / "packages"
        wheel = self._checked([sys.executable, "-c", BUILD, str(folder)], cwd=ROOT).split()[-1]
        with zipfile.ZipFile(folder / wheel) as archive:
            archive.extractall(self.packages)

    def run(self, *arguments: str) -> str:
        path = os.pathsep.join((str(self.packages), str(ROOT)))
        return self._checked([sys.executable, *arguments], cwd=self.folder, env=os.environ | {"PYTHONPATH": path})

    @staticmethod
    def _checked(command: list[str], **how: object) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, **how)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_it_is_the_wheels_own_code_that_runs(installed: Installed) -> None:
    found = installed.run("-c", "import api, orchestrator, learners; print(api, orchestrator, learners)")
    assert found.count(str(installed.packages)) == 3


def test_the_service_comes_up_with_page_tables_groups_and_plans(installed: Installed) -> None:
    home = installed.folder / "home"
    where = ("--home", str(home))
    installed.run("-m", "api.cli", "up", *where, "--control", CONTROL, "--runs", str(installed.folder / "runs"))
    try:
        address = Home(home).address()
        assert address is not None
        page = httpx.get(address.url)
        assert page.status_code == 200
        for name in [part.split('"')[0] for part in page.text.split('src="')[1:]]:
            assert httpx.get(f"{address.url}/{name.lstrip('/')}").status_code == 200, name
        plans = installed.run("-m", "api.cli", "chaos", "list")
        assert all(plan.stem in plans for plan in (ROOT / "deploy" / "plans").glob("*.yaml"))
        sample = installed.packages / "api" / "deploy" / "configs" / "demo.yaml"
        job = json.loads(installed.run("-m", "api.cli", "submit", str(sample), "--json", *where))
        assert job["island_count"] >= 4
    finally:
        installed.run("-m", "api.cli", "down", *where)


def test_the_program_of_the_image_starts_beside_it(installed: Installed) -> None:
    program = installed.folder / "node.py"
    program.write_text((ROOT / "deploy" / "node.py").read_text())
    assert "--region" in installed.run(str(program), "island", "--help")
